"""Estimates from what was seen: offered load, burstiness, quantiles, and forecasts of arrivals.

A forecast rule is a function of the amounts in recent time buckets, oldest first, and of how many
buckets beyond the last one to look; it returns the amount in a bucket there. `trend` (linear
regression, as in Swayam), `last_value`, `ewma`, `holt`, `peak_quantile` and `Seasonal` are rules.
`ArrivalForecaster` counts arrivals and applies a rule to them; `headgate forecast` scores rules.
`Recurrence` knows the highest rate that earlier seasons let one expect while a node is set up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import ceil, exp, floor, sqrt
from typing import Final, final

from headgate.core.clock import SECOND_NS
from headgate.planning.constants import (
    DISPERSION_PRIOR,
    RECURRING_MIN,
    RECURRING_SEARCHES,
    RECURRING_SEASONS,
)

ForecastRule = Callable[[Sequence[float], float], float]

_SEASONS_MAX: Final = 3  # how many earlier seasons are averaged
_BLUR: Final = 1 / 96  # part of a period to each side that is averaged: a quarter of an hour a day
_RECENT_MIN: Final = 8  # buckets that say how this season compares with the earlier ones
_RATIO_MAX: Final = 2.0  # by how much it may differ from them; more is noise in a few arrivals
_GROUPS_MAX: Final = 256  # values in the first, coarse search for a period
_SEARCHES_PER_WINDOW: Final = 16
# Steps of `Seasons` that are kept: periods of up to half of that are known, 8 minutes by the
# second. Longer steps than the set-up time would have nodes wait for longer than it takes to set
# them up.
_STEPS_KEPT: Final = 1024


@final
class OfferedLoad:
    """Offered load in Erlangs (servers kept busy), with exponential decay over `memory_ns`.

    It counts arrivals, not completions: under overload, completions measure capacity and not
    demand. `prior_ns` of idle time is assumed at the beginning, so that the first few arrivals are
    not taken for a high load.

    >>> load = OfferedLoad(memory_ns=1_000_000, prior_ns=0)
    >>> for at_ns in range(0, 1_000_000, 100):
    ...     load.observe(at_ns, work_ns=160)
    >>> round(load.erlangs(1_000_000), 1)
    1.6
    """

    def __init__(self, memory_ns: int, prior_ns: int) -> None:
        self.memory_ns: Final = memory_ns
        self._prior_ns = prior_ns
        self._work_ns = 0.0
        self._since_ns: int | None = None
        self._updated_ns = 0

    def observe(self, now_ns: int, work_ns: float) -> None:
        """Add an arrival with its service time. O(1)."""
        if self._since_ns is None:
            self._since_ns = now_ns
        else:
            self._work_ns *= exp((self._updated_ns - now_ns) / self.memory_ns)
        self._updated_ns = now_ns
        self._work_ns += work_ns

    def erlangs(self, now_ns: int) -> float:
        """The load now. O(1)."""
        if self._since_ns is None:
            return 0.0
        work_ns = self._work_ns * exp((self._updated_ns - now_ns) / self.memory_ns)
        span_ns = self.memory_ns * (1.0 - exp((self._since_ns - now_ns) / self.memory_ns))
        return work_ns / (span_ns + self._prior_ns) if span_ns + self._prior_ns > 0 else 0.0

    def seen_ns(self, now_ns: int) -> float:
        """For how long the load was observed, as far as it is remembered. O(1).

        A memory that decays says as much about a load as two time constants without decay do.
        """
        age_ns = 0 if self._since_ns is None else now_ns - self._since_ns
        return float(min(age_ns, 2 * self.memory_ns) + self._prior_ns)


@final
class ArrivalCounts:
    """Arrivals per time bucket over a sliding window; the first bucket begins at the first arrival.

    Only complete buckets are returned, and no more than fit into the window.

    >>> counts = ArrivalCounts(bucket_ns=10, window_ns=30)
    >>> for at_ns in (100, 105, 112, 131):
    ...     counts.observe(at_ns)
    >>> counts.buckets(139), counts.buckets(140)
    ([2.0, 1.0, 0.0], [1.0, 0.0, 1.0])
    """

    def __init__(self, bucket_ns: int, window_ns: int) -> None:
        assert bucket_ns > 0, bucket_ns
        self._bucket_ns = bucket_ns
        self._buckets: deque[float] = deque(maxlen=max(1, window_ns // bucket_ns))
        self._open = 0.0  # amount in the current bucket
        self._ends_ns: int | None = None  # end of the current bucket

    def observe(self, now_ns: int, amount: float = 1.0) -> None:
        """Add an arrival. O(1), plus O(1) per bucket that has passed since the last one."""
        if self._ends_ns is None:
            self._ends_ns = now_ns + self._bucket_ns
        else:
            self._advance(now_ns)
        self._open += amount

    @property
    def open_since_ns(self) -> int | None:
        """When the current, incomplete bucket began; None before the first arrival."""
        return None if self._ends_ns is None else self._ends_ns - self._bucket_ns

    def buckets(self, now_ns: int) -> list[float]:
        """The amounts in complete buckets, oldest first; empty until the first one is complete."""
        self._advance(now_ns)
        return list(self._buckets)

    def _advance(self, now_ns: int) -> None:
        if self._ends_ns is None or now_ns < self._ends_ns:
            return
        passed = (now_ns - self._ends_ns) // self._bucket_ns + 1
        self._ends_ns += passed * self._bucket_ns
        self._buckets.append(self._open)
        self._open = 0.0
        most = self._buckets.maxlen
        assert most is not None
        self._buckets.extend([0.0] * min(passed - 1, most))


def trend(values: Sequence[float], ahead: float) -> float:
    """Linear least-squares extrapolation, `ahead` steps beyond the last value; not below 0.

    >>> trend([1.0, 2.0, 3.0], ahead=2)
    5.0
    >>> trend([5.0, 5.0], ahead=7), trend([4.0], ahead=7), trend([3.0, 1.0], ahead=9)
    (5.0, 4.0, 0.0)
    """
    count = len(values)
    middle = (count - 1) / 2
    mean = sum(values) / count
    variation = sum((i - middle) ** 2 for i in range(count))
    if variation == 0.0:
        return mean
    slope = sum((i - middle) * (value - mean) for i, value in enumerate(values)) / variation
    return max(0.0, mean + slope * (count - 1 - middle + ahead))


def last_value(values: Sequence[float], ahead: float) -> float:
    """The last value, however far ahead.

    >>> last_value([1.0, 2.0, 3.0], ahead=2)
    3.0
    """
    return values[-1]


def ewma(values: Sequence[float], ahead: float, *, weight: float = 0.3) -> float:
    """The exponentially weighted moving average; `weight` is that of the last value. O(window).

    >>> ewma([8.0, 8.0, 4.0], ahead=1, weight=0.5)
    6.0
    """
    level = values[0]
    for value in values:
        level += weight * (value - level)
    return level


def holt(
    values: Sequence[float],
    ahead: float,
    *,
    weight: float = 0.3,
    slope_weight: float = 0.1,
    damping: float = 0.9,
) -> float:
    """Holt's level and trend, with a damped trend (Gardner and McKenzie 1985); not below 0.

    Each step ahead adds `damping` times what the one before it added, so a forecast far ahead stays
    finite where that of `trend` does not. O(window).

    >>> rising = [float(value) for value in range(60)]
    >>> 59.0 < holt(rising, ahead=5) < trend(rising, ahead=5)
    True
    """
    assert 0.0 < damping < 1.0, damping
    level, slope = values[0], 0.0
    for value in values:
        before = level
        expected = level + damping * slope
        level = expected + weight * (value - expected)
        slope = damping * slope + slope_weight * (level - before - damping * slope)
    steps: float = damping * (1.0 - damping**ahead) / (1.0 - damping)
    return max(0.0, level + slope * steps)


def peak_quantile(values: Sequence[float], ahead: float, *, quantile: float = 0.95) -> float:
    """A high quantile of the recent values (nearest rank), however far ahead.

    >>> peak_quantile([1.0, 9.0, 2.0, 3.0], ahead=1, quantile=0.75)
    3.0
    """
    assert 0.0 < quantile <= 1.0, quantile
    return sorted(values)[max(0, ceil(quantile * len(values)) - 1)]


@final
class Seasonal:
    """What earlier seasons had at the same phase, scaled to how high this season is so far.

    The period is given, in buckets, or found in the values (`find_period`); the search is repeated
    as the window moves on. While no whole season is known, the forecast is that of `ewma`.
    O(1) with a given period; a search for it takes O(window), amortised over forecasts.

    >>> seasonal = Seasonal(period=3)
    >>> [seasonal([1.0, 5.0, 9.0, 1.0, 5.0], ahead) for ahead in (1, 2, 3)]
    [9.0, 1.0, 5.0]
    """

    def __init__(self, period: float | None = None) -> None:
        assert period is None or period >= 1.0, period
        self._given = period
        self._found: float | None = None
        self._until_search = 0  # forecasts

    def __call__(self, values: Sequence[float], ahead: float) -> float:
        """Return the forecast, `ahead` buckets beyond the last one."""
        period = self._period(values)
        last = len(values) - 1
        if period is None:
            return ewma(values, ahead)
        season = _earlier_seasons(values, last + ahead, period)
        if season is None:
            return ewma(values, ahead)
        now = before = 0.0
        recent = min(ceil(period / 4), _RECENT_MIN + floor(period * _BLUR))
        for index in range(last, max(-1, last - recent), -1):
            expected = _earlier_seasons(values, index, period)
            if expected is not None:
                now += values[index]
                before += expected
        ratio = now / before if before > 0.0 else 1.0
        return season * min(max(ratio, 1.0 / _RATIO_MAX), _RATIO_MAX)

    def _period(self, values: Sequence[float]) -> float | None:
        if self._given is not None:
            return self._given
        if self._until_search == 0:
            self._found = find_period(values)
            self._until_search = max(1, len(values) // _SEARCHES_PER_WINDOW)
        self._until_search -= 1
        return self._found


def find_period(values: Sequence[float], seasons: int = 3) -> int | None:
    """The period of the values, if they have one and hold so many seasons: by autocorrelation.

    It is the shortest lag, beyond the first one without correlation, whose correlation is nearly
    the highest. Neither it nor that of twice the lag, where there are three seasons, may be low:
    slow changes without a period correlate once by chance, but not twice. Groups of values are
    compared first, and lags near the best group then: O(window + window**2 / groups).

    >>> find_period([0.0, 1.0, 4.0, 1.0] * 10), find_period([1.0, 2.0, 3.0] + [4.0] * 9)
    (4, None)
    """
    group = max(1, ceil(len(values) / _GROUPS_MAX))
    whole = len(values) // group
    coarse = _deviations([sum(values[i * group : (i + 1) * group]) for i in range(whole)])
    lag_max = whole // seasons
    correlations = [_autocorrelation(coarse, lag) for lag in range(lag_max + 1)]
    first = next((lag for lag, value in enumerate(correlations) if value <= 0.0), None)
    if first is None:
        return None
    highest = max(correlations[first:])
    if highest < RECURRING_MIN:
        return None
    lag = next(i for i in range(first, lag_max + 1) if correlations[i] >= 0.9 * highest)
    while lag < lag_max and correlations[lag + 1] > correlations[lag]:
        lag += 1  # the shortest lag that is nearly the best is on the way up to a peak
    if 3 * lag <= whole and _autocorrelation(coarse, 2 * lag) < RECURRING_MIN:
        return None
    if group == 1:
        return lag
    fine = _deviations(values)
    near = range((lag - 1) * group + 1, min((lag + 1) * group, len(values) // seasons + 1))
    return max(near, key=lambda each: _autocorrelation(fine, each))


def _deviations(values: Sequence[float]) -> list[float]:
    """The values less their mean, in units of their standard deviation; 0 if they do not vary."""
    count = len(values)
    mean = sum(values) / count
    deviation = sqrt(sum((value - mean) ** 2 for value in values) / count)
    return [(value - mean) / deviation if deviation > 0.0 else 0.0 for value in values]


def _autocorrelation(deviations: Sequence[float], lag: int) -> float:
    """The correlation of the values with those `lag` later."""
    pairs = zip(deviations, deviations[lag:], strict=False)
    return sum(a * b for a, b in pairs) / (len(deviations) - lag)


def _earlier_seasons(values: Sequence[float], at: float, period: float) -> float | None:
    """The mean of the values one, two and three periods before `at`; None if none is known.

    Each is the mean of its neighbours, too, within a small part of the period. `at` may be several
    periods ahead: then the last known seasons count.
    """
    count = len(values)
    position = at - period * max(1, ceil((at - count + 1) / period))
    width = floor(period * _BLUR)
    total, found = 0.0, 0
    for _ in range(_SEASONS_MAX):
        index = round(position)
        if index < 0:
            break
        near = values[max(0, index - width) : index + width + 1]
        total += sum(near)
        found += len(near)
        position -= period
    return total / found if found else None


def forecast_rules(period: float | None = None) -> dict[str, ForecastRule]:
    """Every rule by name, with its defaults; the period is that of `Seasonal`, in buckets."""
    return {
        "linear_regression": trend,
        "last_value": last_value,
        "ewma": ewma,
        "holt": holt,
        "seasonal": Seasonal(period),
        "peak_quantile": peak_quantile,
    }


@final
class ArrivalForecaster:
    """Counts arrivals in buckets over a sliding window, and forecasts their rate with a rule.

    >>> forecaster = ArrivalForecaster(trend, bucket_ns=SECOND_NS, window_ns=10 * SECOND_NS)
    >>> for second in range(10):
    ...     forecaster.observe(second * SECOND_NS, amount=second)
    >>> forecaster.ahead(10 * SECOND_NS, horizon_ns=5 * SECOND_NS)  # rising by 1/s each second
    14.5
    """

    def __init__(self, rule: ForecastRule, bucket_ns: int, window_ns: int) -> None:
        self._rule = rule
        self._bucket_ns = bucket_ns
        self._counts = ArrivalCounts(bucket_ns, window_ns)

    def observe(self, now_ns: int, amount: float = 1.0) -> None:
        """Add an arrival. O(1), plus O(1) per bucket that has passed since the last one."""
        self._counts.observe(now_ns, amount)

    def ahead(self, now_ns: int, horizon_ns: int) -> float:
        """The rate per second at `now_ns + horizon_ns`; 0 until a bucket is complete. O(window)."""
        values = self._counts.buckets(now_ns)
        since_ns = self._counts.open_since_ns
        if not values or since_ns is None:
            return 0.0
        # A value stands for the middle of its bucket.
        ahead = (now_ns + horizon_ns - since_ns) / self._bucket_ns + 0.5
        return max(0.0, self._rule(values, ahead)) * SECOND_NS / self._bucket_ns


@final
class Dispersion:
    """Index of dispersion of arrivals: variance over mean of the counts in successive windows.

    It is 1 for a Poisson stream. The variance is computed from differences between neighbouring
    windows, so a step from one rate to another hardly changes it, however high the step, while
    bursts do. It indicates whether the last few windows predict the next one.

    >>> steady = Dispersion(window_ns=10, memory_ns=10_000)
    >>> for at_ns in range(0, 10_000):
    ...     steady.observe(at_ns, 1)
    >>> steady.value < 0.1
    True
    """

    def __init__(self, window_ns: int, memory_ns: int) -> None:
        self._window_ns = window_ns
        self._fading = exp(-window_ns / memory_ns)
        self._ends_ns: int | None = None
        self._count = 0.0
        self._before = 0.0
        self._squares = DISPERSION_PRIOR
        self._mean = DISPERSION_PRIOR

    @property
    def value(self) -> float:
        """The index at the end of the last complete window."""
        return self._squares / self._mean

    def observe(self, now_ns: int, items: float) -> None:
        """Add an arrival. O(1) amortised."""
        if self._ends_ns is None:
            self._ends_ns = now_ns + self._window_ns
        while now_ns >= self._ends_ns:
            if self._count == 0 and self._before == 0:  # skip idle windows at once
                self._ends_ns += (now_ns - self._ends_ns) // self._window_ns * self._window_ns
            self._close()
            self._ends_ns += self._window_ns
        self._count += items

    def _close(self) -> None:
        count, before = self._count, self._before
        if count or before:
            self._squares = self._squares * self._fading + (count - before) ** 2 / 2
            self._mean = self._mean * self._fading + (count + before) / 2
        self._before, self._count = count, 0.0


@final
class QuantileTracker:
    """A running estimate of a quantile of recent positive values, in constant memory.

    Stochastic approximation on a logarithmic scale: each value above the estimate moves it up a
    little, each value below moves it down, in the ratio that balances exactly at the quantile. The
    step size is fixed (`step`), so the estimate follows a drift and never gets stuck.

    >>> tracker = QuantileTracker(quantile=0.5)
    >>> for value in [2.0, 2.1, 1.9] * 200:
    ...     tracker.observe(value)
    >>> 1.9 <= tracker.value <= 2.1
    True
    """

    def __init__(self, quantile: float, *, value: float = 1.0, step: float = 0.05) -> None:
        self.value = value
        self._up = exp(step * quantile)
        self._down = exp(-step * (1.0 - quantile))

    def observe(self, value: float) -> None:
        """Update the estimate with one value. O(1)."""
        self.value *= self._up if value > self.value else self._down


@final
class Recurrence:
    """What recurs in the level of a rate, looking `ahead_ns` ahead. Amortised O(levels kept).

    Nothing in the arrivals announces a step, but one that comes every hour was seen before. Levels
    of the rate are kept by the second and by the set-up time, and in both a period is looked for
    (`find_period`). Two seasons are enough. Levels correlate by chance, too, so a period is tried
    on what is kept: what would the season before have been worth as a forecast? The rate rose
    within set-up times by so much, for so long. The season before had a part of that; and it was
    higher at other times, in vain. A period counts if that part is more than the rest and what was
    in vain.

    Then the forecast is the highest level that the season before had from this phase on until a
    node that is started now is ready. It is a maximum because a node that comes too early costs its
    rent for a while, and one that comes too late costs promises. It is never above what the last
    season had.
    """

    def __init__(self, ahead_ns: int) -> None:
        self._ahead_ns = ahead_ns
        steps_ns = sorted({SECOND_NS, max(SECOND_NS, ahead_ns)})
        self._scales = [Seasons(step_ns, ahead_ns) for step_ns in steps_ns]
        self._recent: deque[tuple[int, float]] = deque()  # time and level, of the last `ahead_ns`

    def observe(self, now_ns: int, level: float) -> None:
        """Record the present level."""
        recent = self._recent
        recent.append((now_ns, level))
        while len(recent) > 1 and recent[1][0] <= now_ns - self._ahead_ns:
            recent.popleft()
        for scale in self._scales:
            scale.observe(now_ns, level, recent[0][1])

    def highest_ahead(self) -> float:
        """The highest level that is expected until `ahead_ns` from now; 0 if nothing recurs.

        The finest scale that knows a period counts: it knows best when a step comes.
        """
        return next((s.highest_ahead() for s in self._scales if s.has_period), 0.0)


@final
class Seasons:
    """The levels of a rate in steps of time, the highest of each, and their period if any.

    >>> seasons = Seasons(step_ns=1, ahead_ns=2)
    >>> for now_ns in range(26):
    ...     is_high, was_high = now_ns % 10 >= 7, (now_ns - 2) % 10 >= 7
    ...     seasons.observe(now_ns, 9.0 if is_high else 1.0, 9.0 if was_high else 1.0)
    >>> seasons.highest_ahead()  # at 25, of 25 to 27
    9.0
    """

    def __init__(self, step_ns: int, ahead_ns: int) -> None:
        self._step_ns = step_ns
        self._ahead_ns = ahead_ns
        # Of complete steps: the highest level, the mean, and the lowest of `ahead_ns` before.
        self._highest: list[float] = []
        self._means: list[float] = []
        self._lowest: list[float] = []
        self._levels: list[float] = []  # of the present step
        self._before: list[float] = []
        self._ends_ns: int | None = None  # the present step
        self._period: int | None = None  # in steps, if what recurs is worth knowing
        self._until_search = 0  # steps

    @property
    def has_period(self) -> bool:
        """Whether something recurs."""
        return self._period is not None

    def observe(self, now_ns: int, level: float, before: float) -> None:
        """Record the present level, and that of `ahead_ns` before: of all steps since the last."""
        if self._ends_ns is None:
            self._ends_ns = now_ns + self._step_ns
        while now_ns >= self._ends_ns:
            self._ends_ns += self._step_ns
            self._complete_step(level, before)
            self._levels, self._before = [], []
        self._levels.append(level)
        self._before.append(before)

    def _complete_step(self, level: float, before: float) -> None:
        """Keep a step, which had the present level if none was seen in it."""
        levels = self._levels or [level]
        self._highest.append(max(levels))
        self._means.append(sum(levels) / len(levels))
        self._lowest.append(min(self._before, default=before))
        highest = self._highest
        if len(highest) > _STEPS_KEPT + _STEPS_KEPT // RECURRING_SEARCHES:
            for kept in (highest, self._means, self._lowest):
                del kept[:-_STEPS_KEPT]
        self._until_search -= 1
        if self._until_search < 0:
            self._until_search = len(highest) // RECURRING_SEARCHES
            period = find_period(highest, seasons=RECURRING_SEASONS)
            self._period = period if period and self._is_worth_it(period) else None

    def _is_worth_it(self, period: int) -> bool:
        """Whether the season before would have avoided more than it would have held in vain.

        When something recurs is known to a step, so the neighbours of a step count as well.
        """
        levels, short_ns = self._highest, min(self._ahead_ns, self._step_ns)
        risen = avoided = in_vain = 0.0
        for now in range(period + 1, len(levels)):
            near = levels[now - period - 1 : now - period + 2]
            risen += max(0.0, levels[now] - self._lowest[now]) * short_ns
            avoided += max(0.0, min(levels[now], max(near)) - self._lowest[now]) * short_ns
            in_vain += max(0.0, min(near) - self._means[now]) * self._step_ns
        return avoided > in_vain + (risen - avoided)

    def highest_ahead(self) -> float:
        """The highest level of the season before, from this phase on; 0 if nothing recurs."""
        if self._period is None:
            return 0.0
        begin = len(self._highest) - self._period
        ahead = -(-self._ahead_ns // self._step_ns)
        return max(self._highest[begin : begin + ahead + 1])
