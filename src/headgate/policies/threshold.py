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

from dataclasses import dataclass
from typing import final

from headgate.core.clock import SECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.policy import Capabilities, Context, PolicyConfig, PolicyKind
from headgate.planning.concurrency import Thresholds
from headgate.planning.targets import Targets
from headgate.policies._hybrid import ThresholdRouter


@dataclass(frozen=True)
class Config(PolicyConfig):
    """Settings of `threshold`."""

    threshold: int = 0  # concurrent requests on a node; 0: from the profile and the objective
    margin: float = 1.0  # factor on the profile's times when the threshold is computed
    nodes: int = 0  # instances in an elastic pool; 0: `prewarm_nodes` of the function
    bin_pack: bool = False  # fill one node before the next, instead of the least loaded first
    warm_instances: int = 0  # FaaS instances kept warm, per function
    plan_every_ns: int = 10 * SECOND_NS  # how often lost instances are replaced

    def __post_init__(self) -> None:
        for key in ("threshold", "nodes", "warm_instances"):
            if getattr(self, key) < 0:
                raise ConfigError("must not be negative", key=key, value=getattr(self, key))
        for key in ("margin", "plan_every_ns"):
            if getattr(self, key) <= 0:
                raise ConfigError("must be positive", key=key, value=getattr(self, key))


@final
class Threshold(ThresholdRouter):
    """A fixed fleet, filled up to its threshold."""

    def __init__(self, context: Context, config: Config) -> None:
        app = context.view.app
        thresholds = Thresholds(app, config.margin, config.threshold)
        super().__init__(
            context,
            config,
            thresholds,
            Targets(app, thresholds),
            nodes=config.nodes,
            bin_pack=config.bin_pack,
            warm_instances=config.warm_instances,
        )
        self.plan_every_ns = config.plan_every_ns


POLICY = PolicyKind(Threshold, Config, Capabilities(mixed_pools=True, serverless=True))
