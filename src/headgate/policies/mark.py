"""A forecast, the cheapest instances that fill it, and functions for the rest.

MArk (ATC 2019). Every minute the load over a horizon is forecast; where the present instances do
not suffice, instances are added greedily, each time of the kind that is cheapest per request it
would serve of what is missing, the price of launching it (three minutes of rent) included; where
they are more than enough, the dearest per request go first. An instance is really released only
when none of the last `plans_held` plans wanted it. Functions take what exceeds the capacity.

The paper forecasts by a neural network; in its public code that is commented out and replaced by
the largest rate seen lately, times a head-room of 1.2, which is the default here; `trend` is the
line of least squares over the same memory, `mean` its mean. Inferred: an instance that would cost
more than the calls it saves is not taken, since functions are there to be used when they are
cheaper (`minds_calls`). Cost per decision: O(nodes).

>>> from headgate.policies import find_policy
>>> find_policy("mark").config(forecast="trend").headroom
1.2
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final, final

from headgate.core.clock import MINUTE_NS, SECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.policy import Capabilities, Context, PolicyConfig, PolicyKind
from headgate.planning.concurrency import Thresholds
from headgate.planning.forecast import trend
from headgate.planning.targets import NodeOption, Targets
from headgate.policies._hybrid import AutoscalingRouter

_FORECASTS: Final = ("max", "mean", "trend")


@dataclass(frozen=True)
class Config(PolicyConfig):
    """Settings of `mark`."""

    forecast: str = "max"  # of the rates seen lately: max, mean or trend
    memory_ns: int = 10 * MINUTE_NS  # how far back they are looked at
    step_ns: int = 10 * SECOND_NS  # over which a rate is taken
    headroom: float = 1.2  # times the forecast
    horizon_ns: int = 50 * MINUTE_NS  # for how long an added instance is taken to serve
    launch_ns: int = 3 * MINUTE_NS  # of rent that adding an instance costs besides
    plans_held: int = 6  # an instance goes when none of so many plans wanted it
    minds_calls: bool = True  # leave to functions what they serve for less
    nodes_min: int = 0  # instances that are never given up
    plan_every_ns: int = MINUTE_NS
    margin: float = 1.0  # on the profile's times, when thresholds are worked out
    packs: bool = False  # fill one node before the next, instead of the least loaded first
    warm_functions: int = 0  # that are kept ready, of each function

    def __post_init__(self) -> None:
        if self.forecast not in _FORECASTS:
            allowed = ", ".join(_FORECASTS)
            raise ConfigError(
                "unknown forecast", key="forecast", value=self.forecast, allowed=allowed
            )
        for key in ("memory_ns", "step_ns", "headroom", "horizon_ns", "plans_held"):
            if getattr(self, key) <= 0:
                raise ConfigError("must be positive", key=key, value=getattr(self, key))
        for key in ("plan_every_ns", "margin"):
            if getattr(self, key) <= 0:
                raise ConfigError("must be positive", key=key, value=getattr(self, key))
        for key in ("launch_ns", "nodes_min", "warm_functions"):
            if getattr(self, key) < 0:
                raise ConfigError("must not be negative", key=key, value=getattr(self, key))


@final
class Mark(AutoscalingRouter):
    """Plans over all kinds of instances that a function can be rented on."""

    def __init__(self, context: Context, config: Config) -> None:
        app = context.view.app
        thresholds = Thresholds(app, config.margin)
        super().__init__(
            context,
            config,
            thresholds,
            Targets(app, thresholds),
            bucket_ns=config.step_ns,
            window_ns=max(config.memory_ns, config.step_ns),
            nodes_min=config.nodes_min,
            packs=config.packs,
            warm_functions=config.warm_functions,
        )
        self.plan_every_ns = config.plan_every_ns
        self._config = config

    def resize(self) -> None:
        for function in self.view.app.functions:
            lots = [lot for lot in self.tiers.lots[function.id] if lot.pool.is_elastic]
            buckets = self.demand(function.id)
            if not buckets or not lots:
                continue
            rate_per_s = self._forecast_per_s(buckets)
            counts = [self.wanted_of(lot) for lot in lots]
            spill_usd = self.tiers.spill_usd(function.id) if self._config.minds_calls else inf
            self._fill(lots, counts, rate_per_s, spill_usd)
            self._release(lots, counts, rate_per_s, spill_usd)
            counts[0] += max(0, self._config.nodes_min - sum(counts))
            for lot, count in zip(lots, counts, strict=True):
                self.want(lot, self.most_of(lot, count, self._config.plans_held))

    def _forecast_per_s(self, buckets: list[float]) -> float:
        """The rate to be ready for."""
        if self._config.forecast == "max":
            amount = max(buckets)
        elif self._config.forecast == "mean":
            amount = sum(buckets) / len(buckets)
        else:
            amount = trend(buckets, self._config.launch_ns / self.bucket_ns)
        return self.mean_per_s([amount]) * self._config.headroom

    def _fill(
        self, lots: list[NodeOption], counts: list[int], rate_per_s: float, spill_usd: float
    ) -> None:
        """Add what is cheapest per request that it serves, until nothing is missing."""
        span_s = self._config.horizon_ns / 1e9
        paid_s = span_s + self._config.launch_ns / 1e9
        while True:
            missing_per_s = rate_per_s - _rate_of(lots, counts)
            best, best_usd = -1, spill_usd
            for i, lot in enumerate(lots):
                served = min(missing_per_s, lot.rate_per_s) * span_s
                if served <= 0 or counts[i] >= lot.pool.nodes:
                    continue
                usd = lot.usd_per_s * paid_s / served
                if usd < best_usd:
                    best, best_usd = i, usd
            if best < 0:
                return
            counts[best] += 1

    def _release(
        self, lots: list[NodeOption], counts: list[int], rate_per_s: float, spill_usd: float
    ) -> None:
        """Give up the dearest per request, while it is not needed or costs more than calls."""
        for i, lot in sorted(enumerate(lots), key=lambda pair: -pair[1].usd_per_request):
            while counts[i]:
                others_per_s = _rate_of(lots, counts) - lot.rate_per_s
                served_per_s = min(lot.rate_per_s, rate_per_s - others_per_s)
                if served_per_s > 0 and lot.usd_per_s <= served_per_s * spill_usd:
                    break
                counts[i] -= 1


def _rate_of(lots: list[NodeOption], counts: list[int]) -> float:
    return sum(lot.rate_per_s * count for lot, count in zip(lots, counts, strict=True))


POLICY = PolicyKind(Mark, Config, Capabilities(mixed_pools=True, serverless=True))
