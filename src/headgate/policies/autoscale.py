"""Target-tracking autoscaling of instances by the recent arrival rate; no FaaS.

The baseline of the hybrid of SageMaker and Lambda (HiPS 2021): target tracking as in SageMaker. The
metric is the arrival rate per instance over a window, the target a share of the rate that an
instance can serve within the objective. When the metric has been above the target for `out_after`
consecutive evaluations, instances are added until the target would be met; when it has been a tenth
below for `in_after` evaluations, instances are removed likewise. A cool-down follows either action.
New instances take minutes to boot; requests that the present ones cannot take wait, first come
first served, for the least loaded one.

The defaults are those documented for the service (one evaluation per minute, 3 and 15 evaluations,
5 minutes); smaller ones make a faster autoscaler than the service offers. A function that runs on
no dedicated pool goes to its FaaS platform. Cost per decision: O(nodes).

>>> from headgate.policies import find_policy
>>> find_policy("autoscale").config().target
0.7
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, final

from headgate.core.clock import MINUTE_NS, SECOND_NS
from headgate.core.policy import (
    NOT_NEGATIVE,
    POSITIVE,
    Capabilities,
    Context,
    PolicyConfig,
    PolicyKind,
)
from headgate.planning.pools.concurrency import FixedLimits
from headgate.planning.pools.targets import NodeTarget, nodes_for
from headgate.policies._hybrid import AutoscalingConfig, AutoscalingRouter

# Hysteresis: scale in only below this share of the target, or the instances would be added again.
_SCALE_IN_BELOW: Final = 0.9


@dataclass(frozen=True)
class Config(PolicyConfig):
    """Settings of `autoscale`."""

    # Share of the rate that an instance can serve within the objective.
    target: float = field(default=0.7, metadata=POSITIVE)
    # Over which the metric is averaged.
    window_ns: int = field(default=MINUTE_NS, metadata=POSITIVE)
    plan_every_ns: int = field(default=MINUTE_NS, metadata=POSITIVE)  # interval of evaluations
    # Consecutive evaluations above the target before scaling out.
    out_after: int = field(default=3, metadata=POSITIVE)
    # Consecutive evaluations below it before scaling in.
    in_after: int = field(default=15, metadata=POSITIVE)
    # After any scaling, before scaling out.
    out_cooldown_ns: int = field(default=5 * MINUTE_NS, metadata=NOT_NEGATIVE)
    # After any scaling, before scaling in.
    in_cooldown_ns: int = field(default=5 * MINUTE_NS, metadata=NOT_NEGATIVE)
    nodes_min: int = field(default=1, metadata=NOT_NEGATIVE)  # minimum number of instances
    # Concurrent requests on a node; 0: as many as it has slots.
    concurrency_max: int = field(default=0, metadata=NOT_NEGATIVE)


@final
class Autoscale(AutoscalingRouter):
    """Target tracking with a scale-out and a scale-in alarm per function."""

    def __init__(self, context: Context, config: Config) -> None:
        super().__init__(
            context,
            AutoscalingConfig(),
            bucket_ns=min(SECOND_NS, config.window_ns),
            window_ns=config.window_ns,
            nodes_min=config.nodes_min,
            plan_every_ns=config.plan_every_ns,
            limits=FixedLimits(config.concurrency_max),
        )
        self._config = config
        self._alarms = [_ScalingAlarm(config) for _ in self.view.app.functions]

    def uses_faas(self, function_id: int) -> bool:
        return not self.targets.nodes[function_id]

    def count_for(self, target: NodeTarget, buckets: list[float]) -> int | None:
        rate_per_s = self.mean_per_s(buckets)
        aim_per_s = self._config.target * target.rate_per_s
        present = self.desired_of(target)
        count = max(nodes_for(rate_per_s, aim_per_s), self._config.nodes_min)
        count = min(count, target.pool.nodes)
        alarm = self._alarms[target.variant.function_id]
        is_below = count < present and rate_per_s < _SCALE_IN_BELOW * present * aim_per_s
        return count if alarm.is_due(self.view.now_ns, count > present, is_below) else None


@final
class _ScalingAlarm:
    """Counts consecutive evaluations above and below the target, and applies the cool-downs."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._above = 0
        self._below = 0
        self._acted_ns: int | None = None

    def is_due(self, now_ns: int, is_above: bool, is_below: bool) -> bool:
        """Whether to scale now, after one more evaluation."""
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
