"""Requests to an instance up to its concurrency threshold, and the rest to FaaS.

The rule of the hybrid of SageMaker and Lambda (HiPS 2021): offline, the response time is measured
over concurrency, and the threshold is the largest concurrency within the objective; online, a
request goes to an instance with fewer in flight, the least loaded first, and otherwise to FaaS. The
instances are fixed: all nodes of a pool, or `nodes` of them in an elastic pool (`prewarm_nodes` of
the function if that is 0).

If several functions share a node, the smallest threshold of those that run applies. While the FaaS
pool is unavailable, requests above the threshold wait. `warm_instances` of each function are kept
warm at all times, against the cold starts that the paper does not address. Cost per decision:
O(nodes).

>>> from headgate.policies import find_policy
>>> find_policy("threshold").config(threshold=5).threshold
5
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
from headgate.planning.pools.concurrency import ConcurrencyLimits, FixedLimits, ThresholdLimits
from headgate.policies._hybrid import ThresholdRouter


@dataclass(frozen=True)
class Config(PolicyConfig):
    """Settings of `threshold`."""

    # Concurrent requests on a node; 0: from the profile and the objective.
    threshold: int = field(default=0, metadata=NOT_NEGATIVE)
    # Factor on the profile's times when the threshold is computed.
    margin: float = field(default=1.0, metadata=POSITIVE)
    # Instances in an elastic pool; 0: `prewarm_nodes` of the function.
    nodes: int = field(default=0, metadata=NOT_NEGATIVE)
    bin_pack: bool = False  # fill one node before the next, instead of the least loaded first
    # FaaS instances kept warm, per function.
    warm_instances: int = field(default=0, metadata=NOT_NEGATIVE)
    # How often lost instances are replaced.
    plan_every_ns: int = field(default=10 * SECOND_NS, metadata=POSITIVE)


@final
class Threshold(ThresholdRouter):
    """A fixed fleet, filled up to its threshold."""

    def __init__(self, context: Context, config: Config) -> None:
        limits: ConcurrencyLimits
        if config.threshold:
            limits = FixedLimits(config.threshold)
        else:
            limits = ThresholdLimits(context.view.app, config.margin)
        super().__init__(
            context,
            config,
            limits,
            nodes=config.nodes,
            plan_every_ns=config.plan_every_ns,
            bin_pack=config.bin_pack,
            warm_instances=config.warm_instances,
        )


POLICY = PolicyKind(Threshold, Config, Capabilities(mixed_pools=True, serverless=True))
