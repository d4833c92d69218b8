"""As many requests to the instance as it can hold in time; what exceeds that to functions.

The rule of the hybrid of SageMaker and Lambda (HiPS 2021): offline, the response time is measured
against the number of requests at once, and the threshold is the largest number within the
objective; online, a request goes to an instance that has fewer in flight, the least loaded first,
and else to a function. The instances are fixed: all that are there, or, in a pool that is rented by
the hour, `nodes` of them (as many as the function is to be warm on, if that is 0).

Several functions on one node share it: the tightest threshold of those that run holds. Where the
way to the functions is closed, what exceeds the threshold waits. With `warm_functions` so many are
kept ready at all times, against the cold starts that the paper leaves open. Cost per decision:
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

    threshold: int = 0  # requests at once on a node; 0: from the profile and the objective
    margin: float = 1.0  # on the profile's times, when the threshold is worked out
    nodes: int = 0  # instances in a rented pool; 0: as many as the function is to be warm on
    packs: bool = False  # fill one node before the next, instead of the least loaded first
    warm_functions: int = 0  # that are kept ready, of each function
    plan_every_ns: int = 10 * SECOND_NS  # how often lost instances are replaced

    def __post_init__(self) -> None:
        for key in ("threshold", "nodes", "warm_functions"):
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
            packs=config.packs,
            warm_functions=config.warm_functions,
        )
        self.plan_every_ns = config.plan_every_ns


POLICY = PolicyKind(Threshold, Config, Capabilities(mixed_pools=True, serverless=True))
