"""Forecast the load, rent the cheapest instances that serve it, and use FaaS for the rest.

MArk (ATC 2019). Every minute the load over a horizon is forecast. If the present instances do not
suffice, instances are added greedily, each time of the type that is cheapest per request of the
missing capacity, including the cost of launching it (three minutes of rent). If there are more than
enough, the most expensive per request are released first. An instance is released only when none of
the last `plans_held` plans included it. FaaS takes what exceeds the capacity.

The paper forecasts with a neural network. In its public code that is commented out and replaced by
the largest recent rate, times a headroom of 1.2, which is the default here; `trend` is the
least-squares line over the same memory, `mean` its mean. Inferred: an instance that would cost more
than the calls it saves is not rented, since FaaS is there to be used when it is cheaper
(`cap_at_faas_price`). Cost per decision: O(nodes).

>>> from headgate.policies import find_policy
>>> find_policy("mark").config(forecast="trend").headroom
1.2
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Final, final

from headgate.core.clock import MINUTE_NS, SECOND_NS
from headgate.core.policy import NOT_NEGATIVE, POSITIVE, Capabilities, Context, PolicyKind, bounded
from headgate.planning.forecast import trend
from headgate.planning.pools.targets import NodeTarget
from headgate.policies._hybrid import AutoscalingConfig, AutoscalingRouter

_FORECASTS: Final = ("max", "mean", "trend")


@dataclass(frozen=True)
class Config(AutoscalingConfig):
    """Settings of `mark`."""

    # What is made of the recent rates.
    forecast: str = field(default="max", metadata=bounded(choices=_FORECASTS))
    # Length of the history of rates.
    memory_ns: int = field(default=10 * MINUTE_NS, metadata=POSITIVE)
    # Interval over which a rate is averaged.
    step_ns: int = field(default=10 * SECOND_NS, metadata=POSITIVE)
    headroom: float = field(default=1.2, metadata=POSITIVE)  # factor on the forecast
    # Assumed lifetime of an added instance.
    horizon_ns: int = field(default=50 * MINUTE_NS, metadata=POSITIVE)
    # Additional rent that launching an instance costs.
    launch_ns: int = field(default=3 * MINUTE_NS, metadata=NOT_NEGATIVE)
    # An instance is released when none of this many plans included it.
    plans_held: int = field(default=6, metadata=POSITIVE)
    cap_at_faas_price: bool = True  # rent no instance that costs more than the calls it saves
    nodes_min: int = field(default=0, metadata=NOT_NEGATIVE)  # minimum number of instances
    plan_every_ns: int = field(default=MINUTE_NS, metadata=POSITIVE)


@final
class Mark(AutoscalingRouter):
    """Plans over all instance types that a function can be rented on."""

    def __init__(self, context: Context, config: Config) -> None:
        super().__init__(
            context,
            config,
            bucket_ns=config.step_ns,
            window_ns=config.memory_ns,
            nodes_min=config.nodes_min,
            plan_every_ns=config.plan_every_ns,
        )
        self._config = config

    def resize(self) -> None:
        for function in self.view.app.functions:
            targets = self.targets.elastic(function.id)
            buckets = self.demand(function.id)
            if not buckets or not targets:
                continue
            rate_per_s = self._forecast_per_s(buckets)
            counts = [self.desired_of(target) for target in targets]
            spill_usd = (
                self.targets.spill_usd(function.id) if self._config.cap_at_faas_price else inf
            )
            self._fill(targets, counts, rate_per_s, spill_usd)
            self._release(targets, counts, rate_per_s, spill_usd)
            counts[0] += max(0, self._config.nodes_min - sum(counts))
            for target, count in zip(targets, counts, strict=True):
                self.set_desired(target, self.hold_max(target, count, self._config.plans_held))

    def _forecast_per_s(self, buckets: list[float]) -> float:
        """The rate to provision for."""
        if self._config.forecast == "max":
            amount = max(buckets)
        elif self._config.forecast == "mean":
            amount = sum(buckets) / len(buckets)
        else:
            amount = trend(buckets, self._config.launch_ns / self.bucket_ns)
        return self.mean_per_s([amount]) * self._config.headroom

    def _fill(
        self, targets: list[NodeTarget], counts: list[int], rate_per_s: float, spill_usd: float
    ) -> None:
        """Add the node type that is cheapest per request it serves, until nothing is missing."""
        span_s = self._config.horizon_ns / 1e9
        paid_s = span_s + self._config.launch_ns / 1e9
        while True:
            missing_per_s = rate_per_s - _rate_of(targets, counts)
            best, best_usd = -1, spill_usd
            for i, target in enumerate(targets):
                served = min(missing_per_s, target.rate_per_s) * span_s
                if served <= 0 or counts[i] >= target.pool.nodes:
                    continue
                usd = target.usd_per_s * paid_s / served
                if usd < best_usd:
                    best, best_usd = i, usd
            if best < 0:
                return
            counts[best] += 1

    def _release(
        self, targets: list[NodeTarget], counts: list[int], rate_per_s: float, spill_usd: float
    ) -> None:
        """Release the most expensive per request while unneeded or dearer than calls."""
        for i, target in sorted(enumerate(targets), key=lambda pair: -pair[1].usd_per_request):
            while counts[i]:
                others_per_s = _rate_of(targets, counts) - target.rate_per_s
                served_per_s = min(target.rate_per_s, rate_per_s - others_per_s)
                if served_per_s > 0 and target.usd_per_s <= served_per_s * spill_usd:
                    break
                counts[i] -= 1


def _rate_of(targets: list[NodeTarget], counts: list[int]) -> float:
    return sum(target.rate_per_s * count for target, count in zip(targets, counts, strict=True))


POLICY = PolicyKind(Mark, Config, Capabilities(mixed_pools=True, serverless=True))
