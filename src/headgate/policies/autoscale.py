"""Instances added and removed by the load of the last minutes; no functions.

The foil of the hybrid of SageMaker and Lambda (HiPS 2021): target tracking as SageMaker does it.
The metric is what arrives per instance over a window, the target a share of what an instance can
answer in time. When the metric has been above the target for `out_after` looks in a row, so many
instances are added that it would be met; when it has been a tenth below for `in_after` looks, so
many are removed. After either, a cool-down passes. New instances take minutes to boot; what the
present ones cannot take waits, first come first served, for the least loaded.

The defaults are those of the service (a look every minute, 3 and 15 looks, 5 minutes), as it is
documented; smaller ones make a nimbler autoscaler than can be bought. A function that runs on no
dedicated pool goes to its platform. Cost per decision: O(nodes).

>>> from headgate.policies import find_policy
>>> find_policy("autoscale").config().target
0.7
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from headgate.core.clock import MINUTE_NS, SECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.policy import Capabilities, Context, PolicyConfig, PolicyKind
from headgate.planning.concurrency import Thresholds
from headgate.planning.rent_or_call import nodes_for
from headgate.planning.targets import NodeOption, Targets
from headgate.policies._hybrid import AutoscalingRouter

_UNBOUNDED: Final = 1_000_000  # more than a node can have slots
_BELOW: Final = 0.9  # of the target; above that nothing is removed, or it would be added again


@dataclass(frozen=True)
class Config(PolicyConfig):
    """Settings of `autoscale`."""

    target: float = 0.7  # of the rate that an instance can answer in time
    window_ns: int = MINUTE_NS  # over which the metric is taken
    plan_every_ns: int = MINUTE_NS  # how often it is looked at
    out_after: int = 3  # looks in a row above the target
    in_after: int = 15  # looks in a row below it
    out_cooldown_ns: int = 5 * MINUTE_NS  # after anything was changed, before more are added
    in_cooldown_ns: int = 5 * MINUTE_NS  # the same, before some are removed
    nodes_min: int = 1  # instances that are never given up
    concurrency_max: int = 0  # requests at once on a node; 0: as many as it has slots

    def __post_init__(self) -> None:
        for key in ("target", "window_ns", "plan_every_ns", "out_after", "in_after"):
            if getattr(self, key) <= 0:
                raise ConfigError("must be positive", key=key, value=getattr(self, key))
        for key in ("out_cooldown_ns", "in_cooldown_ns", "nodes_min", "concurrency_max"):
            if getattr(self, key) < 0:
                raise ConfigError("must not be negative", key=key, value=getattr(self, key))


@final
class Autoscale(AutoscalingRouter):
    """Two alarms per function."""

    def __init__(self, context: Context, config: Config) -> None:
        app = context.view.app
        super().__init__(
            context,
            config,
            Thresholds(app, fixed=config.concurrency_max or _UNBOUNDED),
            Targets(app, Thresholds(app)),
            bucket_ns=min(SECOND_NS, config.window_ns),
            window_ns=config.window_ns,
            nodes_min=config.nodes_min,
        )
        self.plan_every_ns = config.plan_every_ns
        self._config = config
        self._alarms = [_Alarm(config) for _ in app.functions]

    def spills(self, function_id: int) -> bool:
        return not self.tiers.lots[function_id]

    def count_for(self, lot: NodeOption, buckets: list[float]) -> int | None:
        rate_per_s = self.mean_per_s(buckets)
        aim_per_s = self._config.target * lot.rate_per_s
        present = self.wanted_of(lot)
        count = max(nodes_for(rate_per_s, aim_per_s), self._config.nodes_min)
        count = min(count, lot.pool.nodes)
        alarm = self._alarms[lot.variant.function_id]
        is_below = count < present and rate_per_s < _BELOW * present * aim_per_s
        return count if alarm.is_due(self.view.now_ns, count > present, is_below) else None


@final
class _Alarm:
    """How many looks in a row have found too much or too little, and when that was acted on."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._above = 0
        self._below = 0
        self._acted_ns: int | None = None

    def is_due(self, now_ns: int, is_above: bool, is_below: bool) -> bool:
        """Whether it is time to act, after one more look."""
        config = self._config
        self._above = self._above + 1 if is_above else 0
        self._below = self._below + 1 if is_below else 0
        if self._above >= config.out_after:
            cooldown_ns = config.out_cooldown_ns
        elif self._below >= config.in_after:
            cooldown_ns = config.in_cooldown_ns
        else:
            return False
        if self._acted_ns is not None and now_ns - self._acted_ns < cooldown_ns:
            return False
        self._acted_ns = now_ns
        self._above = self._below = 0
        return True


POLICY = PolicyKind(Autoscale, Config, Capabilities(mixed_pools=True, serverless=True))
