"""Dedicated instances alone, a fixed number of them: what they cannot take waits.

The baseline without spill of the hybrid of SageMaker and Lambda (HiPS 2021): first come, first
served, to the least loaded node that has a slot. The instances are all that are there, or, in a
pool that is rented by the hour, `nodes` of them (as many as the function is to be warm on, if that
is 0). A function that runs on no dedicated pool is the exception: it goes to its platform.

With `concurrency_max` a node takes no more at once, although it has slots: under overload those who
wait in one queue fare better than those who share a node with all. Cost per decision: O(nodes).

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

_UNBOUNDED: Final = 1_000_000  # more than a node can have slots


@dataclass(frozen=True)
class Config(PolicyConfig):
    """Settings of `dedicated_only`."""

    nodes: int = 0  # instances in a rented pool; 0: as many as the function is to be warm on
    concurrency_max: int = 0  # requests at once on a node; 0: as many as it has slots
    plan_every_ns: int = 10 * SECOND_NS  # how often lost instances are replaced

    def __post_init__(self) -> None:
        for key in ("nodes", "concurrency_max"):
            if getattr(self, key) < 0:
                raise ConfigError("must not be negative", key=key, value=getattr(self, key))
        if self.plan_every_ns <= 0:
            raise ConfigError("must be positive", key="plan_every_ns", value=self.plan_every_ns)


@final
class DedicatedOnly(ThresholdRouter):
    """A fixed fleet and one queue before it."""

    def __init__(self, context: Context, config: Config) -> None:
        app = context.view.app
        limits = Thresholds(app, fixed=config.concurrency_max or _UNBOUNDED)
        super().__init__(context, config, limits, Targets(app, limits), nodes=config.nodes)
        self.plan_every_ns = config.plan_every_ns

    def spills(self, function_id: int) -> bool:
        return not self.tiers.lots[function_id]


POLICY = PolicyKind(DedicatedOnly, Config, Capabilities(mixed_pools=True, serverless=True))
