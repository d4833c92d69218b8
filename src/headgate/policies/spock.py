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

from dataclasses import dataclass, field
from typing import final

from headgate.core.clock import MINUTE_NS, SECOND_NS
from headgate.core.policy import NOT_NEGATIVE, POSITIVE, Capabilities, Context, PolicyKind
from headgate.planning.forecast import trend
from headgate.planning.pools.targets import NodeTarget, nodes_for
from headgate.policies._hybrid import AutoscalingConfig, AutoscalingRouter


@dataclass(frozen=True)
class Config(AutoscalingConfig):
    """Settings of `spock`."""

    is_predictive: bool = False  # scale by the predicted rate instead of the recent one
    # Share of the rate that an instance can serve within the objective.
    target: float = field(default=0.8, metadata=POSITIVE)
    # Length of the history of the load.
    window_ns: int = field(default=MINUTE_NS, metadata=POSITIVE)
    # How long an instance that is not needed is kept.
    hold_ns: int = field(default=2 * MINUTE_NS, metadata=NOT_NEGATIVE)
    nodes_min: int = field(default=0, metadata=NOT_NEGATIVE)  # minimum number of instances
    plan_every_ns: int = field(default=10 * SECOND_NS, metadata=POSITIVE)


@final
class Spock(AutoscalingRouter):
    """As many instances as the rate needs; FaaS until they are ready."""

    def __init__(self, context: Context, config: Config) -> None:
        super().__init__(
            context,
            config,
            bucket_ns=min(SECOND_NS, config.window_ns),
            window_ns=config.window_ns,
            nodes_min=config.nodes_min,
            plan_every_ns=config.plan_every_ns,
        )
        self._config = config
        self._plans_held = config.hold_ns // config.plan_every_ns + 1

    def count_for(self, target: NodeTarget, buckets: list[float]) -> int | None:
        rate_per_s = self.mean_per_s(buckets)
        if self._config.is_predictive:
            ready_ns = target.pool.boot_ns + target.variant.profile.cold_start_ns
            rate_per_s = self.mean_per_s([trend(buckets, ready_ns / self.bucket_ns)])
        count = nodes_for(rate_per_s, self._config.target * target.rate_per_s)
        return self.hold_max(target, count, self._plans_held)


POLICY = PolicyKind(Spock, Config, Capabilities(mixed_pools=True, serverless=True))
