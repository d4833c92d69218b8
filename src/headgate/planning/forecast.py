"""Estimates from what was seen: offered load, arrivals with a trend, burstiness, quantiles."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import exp
from typing import Final, final

_PRIOR: Final = 3.0  # weight, in arrivals, of the prior that arrivals are Poisson


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
        self._memory_ns = memory_ns
        self._prior_ns = prior_ns
        self._work_ns = 0.0
        self._since_ns: int | None = None
        self._updated_ns = 0

    def observe(self, now_ns: int, work_ns: float) -> None:
        """Add an arrival with its service time. O(1)."""
        if self._since_ns is None:
            self._since_ns = now_ns
        else:
            self._work_ns *= exp((self._updated_ns - now_ns) / self._memory_ns)
        self._updated_ns = now_ns
        self._work_ns += work_ns

    def erlangs(self, now_ns: int) -> float:
        """The load now. O(1)."""
        if self._since_ns is None:
            return 0.0
        work_ns = self._work_ns * exp((self._updated_ns - now_ns) / self._memory_ns)
        span_ns = self._memory_ns * (1.0 - exp((self._since_ns - now_ns) / self._memory_ns))
        return work_ns / (span_ns + self._prior_ns) if span_ns + self._prior_ns > 0 else 0.0


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
        self._count = 0
        self._before = 0
        self._squares = _PRIOR
        self._mean = _PRIOR

    @property
    def value(self) -> float:
        """The index at the end of the last complete window."""
        return self._squares / self._mean

    def observe(self, now_ns: int, items: int) -> None:
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
        self._before, self._count = count, 0


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
