"""What a forecast of arrivals is worth: the backend-time it costs at equal violations.

A forecast error is not the score. A rule that is too low before every peak and one that is too high
after it may have the same error, but not the same price. So all forecasts of a rule are adjusted,
by a factor or by a margin of its own, until the same share of requests violates the objective, and
the rule is charged for the backends that it then needs. The replay is simple, so that it can be
stated:

- Arrivals are counted in buckets. At the end of each, a rule sees all buckets so far and forecasts
  the rate of the bucket for which backends that are started now are ready: one set-up time, in
  whole buckets, later. The adjusted forecast gives the number of backends for that bucket, at least
  one and at most the pool: the fewest with which no more than the allowed share of requests would
  violate the objective at that rate.
- A backend serves one request at a time. Within a bucket arrivals are Poisson at the rate that was
  counted, service times are exponential, requests wait in one queue, and one that would wait longer
  than the objective less the mean service time is dropped: a violation (`violation_share`). Every
  bucket is in its steady state; no queue is carried over from one to the next.
- Backend-time is that of the buckets, and one set-up time for each backend that is started. When
  fewer backends are wanted, the others stop as the bucket begins.
- Several frontends each see a part of the arrivals, forecast from it, and multiply by their number.
  The highest forecast counts: in Swayam, a backend that any frontend uses stays in service.
- The first buckets, for which nothing could have been started, are not scored.
- Backends are whole, so violations step over the level. Backend-time is interpolated between the
  two replays on either side of the step: equal violations are then equal to the letter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, log2
from typing import Final, Literal

import numpy as np

from headgate.core.clock import SECOND_NS
from headgate.planning.capacity.mix import Floats, Ints
from headgate.planning.forecast import ArrivalForecaster, ForecastRule

Adjustment = Literal["scale", "margin"]  # a factor on the forecasts, or a rate that is added

SCALE_MIN: Final = 1 / 64
SCALE_MAX: Final = 256.0
_BISECTIONS: Final = 40
_EXPONENT_MAX: Final = 200.0  # beyond which a share of violations is 0


@dataclass(frozen=True, slots=True)
class ReplayModel:
    """The service whose backends are scaled, and the violations that are allowed."""

    bucket_ns: int
    setup_ns: int
    service_ns: int  # mean
    latency_ns: int  # the objective
    level: float  # share of requests that may violate it
    backends_max: int

    def __post_init__(self) -> None:
        assert self.bucket_ns > 0 and self.setup_ns >= 0, self
        assert 0 < self.service_ns <= self.latency_ns, self
        assert 0.0 < self.level < 1.0 and self.backends_max >= 1, self

    @property
    def lead(self) -> int:
        """Buckets between the one that a decision follows and the one that it is for."""
        return 1 + -(-self.setup_ns // self.bucket_ns)

    @property
    def patience(self) -> float:
        """How long a request may wait, in service times."""
        return (self.latency_ns - self.service_ns) / self.service_ns

    def load(self, rate_per_s: Floats) -> Floats:
        """Offered load in Erlangs."""
        return rate_per_s * (self.service_ns / SECOND_NS)


@dataclass(frozen=True, slots=True)
class ForecastScore:
    """What a rule costs, adjusted so that its violations are at the level."""

    name: str
    adjustment: float  # the scale, or the margin per second
    violations: float  # share of requests
    backend_s: float  # backend-time, set-up included
    starts: float  # of backends
    error: float  # sum of absolute errors of the forecasts, not adjusted, over all arrivals
    is_reached: bool  # whether violations are at most the level

    @property
    def backend_hours(self) -> float:
        """Backend-time in hours."""
        return self.backend_s / 3600


def violation_share(backends: Ints, load: Floats, patience: float) -> Floats:
    """Return the share of requests that are dropped, for each number of backends and its load.

    M/M/n with requests that wait no longer than a fixed patience (M/M/n+D; Barrer 1957), which is
    in service times. Without patience it is Erlang's loss formula; far beyond saturation it is the
    excess of the load. O(sum of the backends).

    >>> violation_share(np.array([10, 10, 8]), np.array([8.0, 1000.0, 8.0]), 4.0).round(4).tolist()
    [0.0, 0.99, 0.0276]
    >>> violation_share(np.array([10]), np.array([8.0]), 0.0).round(4).tolist()  # erlang_b(10, 8)
    [0.1217]
    """
    order = np.argsort(-backends, kind="stable")
    servers, offered = backends[order], load[order]
    blocked = np.ones(len(servers))  # of a loss system with one server less, by recursion
    more_than = np.searchsorted(-servers, -np.arange(1, servers[0] if len(servers) else 0))
    for server, count in enumerate(more_than.tolist(), 1):
        product = offered[:count] * blocked[:count]
        blocked[:count] = product / (server + product)
    spare = servers - offered
    grown = np.exp(np.minimum(spare * patience, _EXPONENT_MAX))
    is_even = np.abs(spare) < 1e-9
    waiting = np.where(is_even, patience, (grown - 1.0) / np.where(is_even, 1.0, spare))
    full = offered * blocked
    lost = full / servers
    shares = np.empty(len(servers))
    shares[order] = lost / (grown + full * waiting + lost)
    return shares


def load_limits(backends_max: int, patience: float, level: float) -> Floats:
    """Return the highest load that 1, 2, ... backends serve with violations at the level.

    >>> load_limits(3, patience=4.0, level=0.01).round(2).tolist()
    [0.26, 1.27, 2.34]
    """
    backends = np.arange(1, backends_max + 1)
    low, high = np.zeros(backends_max), backends / (1.0 - level) + 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        is_within = violation_share(backends, middle, patience) <= level
        low, high = np.where(is_within, middle, low), np.where(is_within, high, middle)
    return low


def forecast_rates(counts: Ints, rule: ForecastRule, model: ReplayModel, window_ns: int) -> Floats:
    """Return the rate per second that a rule forecasts for each bucket that can be scored."""
    bucket_ns = model.bucket_ns
    forecaster = ArrivalForecaster(rule, bucket_ns, window_ns)
    # From the end of a bucket to the middle of the one that a decision is for.
    horizon_ns = (model.lead - 1) * bucket_ns + bucket_ns // 2
    rates = np.zeros(max(0, len(counts) - model.lead))
    for index, count in enumerate(counts[: len(rates)].tolist()):
        forecaster.observe(index * bucket_ns, count)
        rates[index] = forecaster.ahead((index + 1) * bucket_ns, horizon_ns)
    return rates


def split_counts(counts: Ints, frontends: int, seed: int) -> Ints:
    """Return a row of counts per frontend: each arrival goes to one of them, by chance."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(counts, np.full(frontends, 1.0 / frontends)).T


def known_rates(counts: Ints, model: ReplayModel) -> Floats:
    """Return the true rate per second of each bucket that can be scored: a perfect forecast."""
    return counts[model.lead :].astype(np.float64) * (SECOND_NS / model.bucket_ns)


class Backtest:
    """A trace, as arrivals per bucket, on which forecasts are scored."""

    def __init__(self, counts: Ints, model: ReplayModel, by: Adjustment = "scale") -> None:
        self._model = model
        self._by: Adjustment = by
        self._actual = known_rates(counts, model)
        assert self._actual.sum() > 0.0, "no arrivals in the buckets that are scored"
        self._limits = load_limits(model.backends_max, model.patience, model.level)

    def score(self, name: str, rates: Floats) -> ForecastScore:
        """Score a rule by its forecasts, at the least adjustment with violations at the level.

        Violations never rise with the adjustment, so bisection finds it. A rule that stays above
        the level, or below it, however it is adjusted, is scored at the end of the range.
        """
        level = self._model.level
        low, high = self._range(rates)
        above, below = self.replay(name, rates, low), self.replay(name, rates, high)
        if above.is_reached:
            return above
        if not below.is_reached:
            return below
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            found = self.replay(name, rates, middle)
            if found.is_reached:
                high, below = middle, found
            else:
                low, above = middle, found
        weight = (level - below.violations) / (above.violations - below.violations)
        return replace(
            below,
            violations=level,
            backend_s=below.backend_s + weight * (above.backend_s - below.backend_s),
            starts=below.starts + weight * (above.starts - below.starts),
        )

    def replay(self, name: str, rates: Floats, position: float) -> ForecastScore:
        """Replay the trace with the backends for these forecasts, adjusted.

        The position is that of the bisection: a margin, or the logarithm of a scale.
        """
        model = self._model
        if self._by == "scale":
            adjustment = 2.0**position
            adjusted = rates * adjustment
        else:
            adjustment = position
            adjusted = np.maximum(0.0, rates + adjustment)
        wanted = np.searchsorted(self._limits, model.load(adjusted)) + 1
        backends = np.minimum(wanted, model.backends_max)
        shares = violation_share(backends, model.load(self._actual), model.patience)
        violations = float((shares * self._actual).sum() / self._actual.sum())
        starts = int(np.maximum(0, np.diff(backends)).sum())
        return ForecastScore(
            name,
            adjustment,
            violations,
            (int(backends.sum()) * model.bucket_ns + starts * model.setup_ns) / SECOND_NS,
            starts,
            float(np.abs(rates - self._actual).sum() / self._actual.sum()),
            is_reached=violations <= model.level,
        )

    def _range(self, rates: Floats) -> tuple[float, float]:
        if self._by == "scale":
            return log2(SCALE_MIN), log2(SCALE_MAX)
        # With the highest rate as margin, there are always backends enough, if the pool has them.
        peak = float(self._actual.max())
        return -max(peak, float(rates.max())), 2.0 * peak


def ranked(scores: Sequence[ForecastScore]) -> list[ForecastScore]:
    """Return scores with the least backend-time first; those that miss the level come last."""
    return sorted(scores, key=lambda score: score.backend_s if score.is_reached else inf)
