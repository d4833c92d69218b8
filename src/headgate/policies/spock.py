"""Instances follow the load; while new ones boot, what exceeds the present goes to functions.

Spock (CLOUD 2019): virtual machines scale as they would alone, on what arrived lately or on what is
predicted for when a new one would be there; functions hide the time that takes, and stop when the
machines have caught up. Here a machine takes requests up to its threshold, so nothing is overloaded
that a function could take. Not in the paper, and so inferred: the prediction is the line of least
squares through the window, and an instance is released when the load has not needed it for
`hold_ns`.

Cost per decision: O(nodes).

>>> from headgate.policies import find_policy
>>> find_policy("spock").config(is_predictive=True).is_predictive
True
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from headgate.core.clock import MINUTE_NS, SECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.policy import Capabilities, Context, PolicyConfig, PolicyKind
from headgate.planning.concurrency import Thresholds
from headgate.planning.forecast import trend
from headgate.planning.rent_or_call import nodes_for
from headgate.planning.targets import NodeOption, Targets
from headgate.policies._hybrid import AutoscalingRouter


@dataclass(frozen=True)
class Config(PolicyConfig):
    """Settings of `spock`."""

    is_predictive: bool = False  # by the load to come, instead of that of late
    target: float = 0.8  # how much of what an instance can answer in time is asked of it
    window_ns: int = MINUTE_NS  # how far back the load is looked at
    hold_ns: int = 2 * MINUTE_NS  # how long an instance is kept that seems not to be needed
    nodes_min: int = 0  # instances that are never given up
    plan_every_ns: int = 10 * SECOND_NS
    margin: float = 1.0  # on the profile's times, when thresholds are worked out
    packs: bool = False  # fill one node before the next, instead of the least loaded first
    warm_functions: int = 0  # that are kept ready, of each function

    def __post_init__(self) -> None:
        for key in ("target", "window_ns", "plan_every_ns", "margin"):
            if getattr(self, key) <= 0:
                raise ConfigError("must be positive", key=key, value=getattr(self, key))
        for key in ("hold_ns", "nodes_min", "warm_functions"):
            if getattr(self, key) < 0:
                raise ConfigError("must not be negative", key=key, value=getattr(self, key))


@final
class Spock(AutoscalingRouter):
    """As many instances as the rate needs; functions until they are there."""

    def __init__(self, context: Context, config: Config) -> None:
        app = context.view.app
        thresholds = Thresholds(app, config.margin)
        super().__init__(
            context,
            config,
            thresholds,
            Targets(app, thresholds),
            bucket_ns=min(SECOND_NS, config.window_ns),
            window_ns=config.window_ns,
            nodes_min=config.nodes_min,
            packs=config.packs,
            warm_functions=config.warm_functions,
        )
        self.plan_every_ns = config.plan_every_ns
        self._config = config
        self._plans_held = config.hold_ns // config.plan_every_ns + 1

    def count_for(self, lot: NodeOption, buckets: list[float]) -> int | None:
        rate_per_s = self.mean_per_s(buckets)
        if self._config.is_predictive:
            ready_ns = lot.pool.boot_ns + lot.variant.profile.cold_start_ns
            rate_per_s = self.mean_per_s([trend(buckets, ready_ns / self.bucket_ns)])
        count = nodes_for(rate_per_s, self._config.target * lot.rate_per_s)
        return self.most_of(lot, count, self._plans_held)


POLICY = PolicyKind(Spock, Config, Capabilities(mixed_pools=True, serverless=True))
