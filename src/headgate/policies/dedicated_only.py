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

from dataclasses import dataclass, field
from typing import final

from headgate.core.clock import SECOND_NS
from headgate.core.policy import (
    NOT_NEGATIVE,
    POSITIVE,
    Capabilities,
    Context,
    PolicyConfig,
    PolicyKind,
)
from headgate.planning.pools.concurrency import FixedLimits
from headgate.policies._hybrid import ThresholdRouter


@dataclass(frozen=True)
class Config(PolicyConfig):
    """Settings of `dedicated_only`."""

    # Instances in an elastic pool; 0: `prewarm_nodes` of the function.
    nodes: int = field(default=0, metadata=NOT_NEGATIVE)
    # Concurrent requests on a node; 0: as many as it has slots.
    concurrency_max: int = field(default=0, metadata=NOT_NEGATIVE)
    # How often lost instances are replaced.
    plan_every_ns: int = field(default=10 * SECOND_NS, metadata=POSITIVE)


@final
class DedicatedOnly(ThresholdRouter):
    """A fixed fleet with one queue."""

    def __init__(self, context: Context, config: Config) -> None:
        limits = FixedLimits(config.concurrency_max)
        super().__init__(
            context, config, limits, nodes=config.nodes, plan_every_ns=config.plan_every_ns
        )

    def uses_faas(self, function_id: int) -> bool:
        return not self.targets.nodes[function_id]


POLICY = PolicyKind(DedicatedOnly, Config, Capabilities(mixed_pools=True, serverless=True))
