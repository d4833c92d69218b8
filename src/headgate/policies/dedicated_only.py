"""A fixed number of dedicated instances and no FaaS: requests queue for them.

The baseline without spillover of the hybrid of SageMaker and Lambda (HiPS 2021): first come, first
served, to the least loaded node with a free slot. The instances are all nodes of a pool, or `nodes`
of them in an elastic pool (`prewarm_nodes` of the function if that is 0). A function that runs on
no dedicated pool is the exception: it goes to its FaaS platform.

`concurrency_max` limits the concurrent requests on a node below its slots: under overload, one
queue gives lower latencies than all requests sharing the nodes. Cost per decision: O(nodes).

>>> from headgate.policies import find_policy
>>> find_policy("dedicated_only").config(nodes=8).nodes
8
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from headgate.core.clock import SECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.policy import Capabilities, Context, PolicyConfig, PolicyKind
from headgate.planning.concurrency import Thresholds
from headgate.planning.targets import Targets
from headgate.policies._hybrid import ThresholdRouter

_UNBOUNDED: Final = 1_000_000  # more slots than a node can have


@dataclass(frozen=True)
class Config(PolicyConfig):
    """Settings of `dedicated_only`."""

    nodes: int = 0  # instances in an elastic pool; 0: `prewarm_nodes` of the function
    concurrency_max: int = 0  # concurrent requests on a node; 0: as many as it has slots
    plan_every_ns: int = 10 * SECOND_NS  # how often lost instances are replaced

    def __post_init__(self) -> None:
        for key in ("nodes", "concurrency_max"):
            if getattr(self, key) < 0:
                raise ConfigError("must not be negative", key=key, value=getattr(self, key))
        if self.plan_every_ns <= 0:
            raise ConfigError("must be positive", key="plan_every_ns", value=self.plan_every_ns)


@final
class DedicatedOnly(ThresholdRouter):
    """A fixed fleet with one queue."""

    def __init__(self, context: Context, config: Config) -> None:
        app = context.view.app
        limits = Thresholds(app, fixed=config.concurrency_max or _UNBOUNDED)
        super().__init__(context, config, limits, Targets(app, limits), nodes=config.nodes)
        self.plan_every_ns = config.plan_every_ns

    def uses_faas(self, function_id: int) -> bool:
        return not self.targets.node_options[function_id]


POLICY = PolicyKind(DedicatedOnly, Config, Capabilities(mixed_pools=True, serverless=True))
