"""Autoscaled instances, with FaaS for the overflow while new instances boot.

Spock (CLOUD 2019): virtual machines scale as they would without FaaS, by the recent arrival rate or
by the rate predicted for the time when a new machine would be ready; FaaS hides the boot time and
is no longer used when the machines have caught up. Here a machine takes requests up to its
threshold, so no machine is overloaded with requests that FaaS could take. Not in the paper, and so
inferred: the prediction is the least-squares line through the window, and an instance is released
when the load has not needed it for `hold_ns`.

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

    is_predictive: bool = False  # scale by the predicted rate instead of the recent one
    target: float = 0.8  # share of the rate that an instance can serve within the objective
    window_ns: int = MINUTE_NS  # length of the history of the load
    hold_ns: int = 2 * MINUTE_NS  # how long an instance that is not needed is kept
    nodes_min: int = 0  # minimum number of instances
    plan_every_ns: int = 10 * SECOND_NS
    margin: float = 1.0  # factor on the profile's times when thresholds are computed
    bin_pack: bool = False  # fill one node before the next, instead of the least loaded first
    warm_instances: int = 0  # FaaS instances kept warm, per function

    def __post_init__(self) -> None:
        for key in ("target", "window_ns", "plan_every_ns", "margin"):
            if getattr(self, key) <= 0:
                raise ConfigError("must be positive", key=key, value=getattr(self, key))
        for key in ("hold_ns", "nodes_min", "warm_instances"):
            if getattr(self, key) < 0:
                raise ConfigError("must not be negative", key=key, value=getattr(self, key))


@final
class Spock(AutoscalingRouter):
    """As many instances as the rate needs; FaaS until they are ready."""

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
            bin_pack=config.bin_pack,
            warm_instances=config.warm_instances,
        )
        self.plan_every_ns = config.plan_every_ns
        self._config = config
        self._plans_held = config.hold_ns // config.plan_every_ns + 1

    def count_for(self, option: NodeOption, buckets: list[float]) -> int | None:
        rate_per_s = self.mean_per_s(buckets)
        if self._config.is_predictive:
            ready_ns = option.pool.boot_ns + option.variant.profile.cold_start_ns
            rate_per_s = self.mean_per_s([trend(buckets, ready_ns / self.bucket_ns)])
        count = nodes_for(rate_per_s, self._config.target * option.rate_per_s)
        return self.hold_max(option, count, self._plans_held)


POLICY = PolicyKind(Spock, Config, Capabilities(mixed_pools=True, serverless=True))
