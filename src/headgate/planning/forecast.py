"""How much work is being asked for, in Erlangs: the number of places it would keep busy."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import exp
from typing import Final, final


@final
class OfferedLoad:
    """Work per time of what was offered lately; the past fades with time constant `memory_ns`.

    It counts what arrives, not what is finished: under overload, completions tell of capacity and
    nothing of demand. `prior_ns` of quiet time is taken for granted at the beginning, so that the
    first few arrivals are not read as a flood.

    >>> load = OfferedLoad(memory_ns=1_000_000, prior_ns=0)
    >>> for at_ns in range(0, 1_000_000, 100):
    ...     load.offer(at_ns, work_ns=160)
    >>> round(load.erlangs(1_000_000), 1)
    1.6
    """

    def __init__(self, memory_ns: int, prior_ns: int) -> None:
        self._memory_ns = memory_ns
        self._prior_ns = prior_ns
        self._work_ns = 0.0
        self._since_ns: int | None = None
        self._updated_ns = 0

    def offer(self, now_ns: int, work_ns: float) -> None:
        """Something has arrived that takes so long. O(1)."""
        if self._since_ns is None:
            self._since_ns = now_ns
        else:
            self._work_ns *= exp((self._updated_ns - now_ns) / self._memory_ns)
        self._updated_ns = now_ns
        self._work_ns += work_ns

    def erlangs(self, now_ns: int) -> float:
        """The load as of now. O(1)."""
        if self._since_ns is None:
            return 0.0
        faded = self._work_ns * exp((self._updated_ns - now_ns) / self._memory_ns)
        seen_ns = self._memory_ns * (1.0 - exp((self._since_ns - now_ns) / self._memory_ns))
        return faded / (seen_ns + self._prior_ns) if seen_ns + self._prior_ns > 0 else 0.0


# How much arrives: counts over a window that moves on, and forecasts from them.


@final
class ArrivalCounts:
    """What arrived lately, in buckets of time that begin with the first arrival.

    Only whole buckets are told of, and no more than fit into the window.

    >>> counts = ArrivalCounts(bucket_ns=10, window_ns=30)
    >>> for at_ns in (100, 105, 112, 131):
    ...     counts.see(at_ns)
    >>> counts.buckets(139), counts.buckets(140)
    ([2.0, 1.0, 0.0], [1.0, 0.0, 1.0])
    """

    def __init__(self, bucket_ns: int, window_ns: int) -> None:
        assert bucket_ns > 0, bucket_ns
        self._bucket_ns = bucket_ns
        self._buckets: deque[float] = deque(maxlen=max(1, window_ns // bucket_ns))
        self._open = 0.0  # the bucket that is not over yet
        self._ends_ns: int | None = None  # when it will be

    def see(self, now_ns: int, amount: float = 1.0) -> None:
        """Something has arrived. O(1), but for the buckets that have passed since the last."""
        if self._ends_ns is None:
            self._ends_ns = now_ns + self._bucket_ns
        else:
            self._move_on(now_ns)
        self._open += amount

    def buckets(self, now_ns: int) -> list[float]:
        """The amounts in whole buckets, oldest first; nothing before the first bucket is over."""
        self._move_on(now_ns)
        return list(self._buckets)

    def _move_on(self, now_ns: int) -> None:
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
    """The line of least squares through the values, so many steps beyond the last; not below 0.

    >>> trend([1.0, 2.0, 3.0], ahead=2)
    5.0
    >>> trend([5.0, 5.0], ahead=7), trend([4.0], ahead=7), trend([3.0, 1.0], ahead=9)
    (5.0, 4.0, 0.0)
    """
    count = len(values)
    middle = (count - 1) / 2
    mean = sum(values) / count
    spread = sum((i - middle) ** 2 for i in range(count))
    if spread == 0.0:
        return mean
    slope = sum((i - middle) * (value - mean) for i, value in enumerate(values)) / spread
    return max(0.0, mean + slope * (count - 1 - middle + ahead))


# How bursty arrivals are, from one moment to the next.


_PRIOR: Final = 3.0  # arrivals' worth of taking them to be independent of each other


@final
class Dispersion:
    """Variance over mean of counts in windows, from differences between neighbours.

    It is 1 where arrivals are independent. Because only neighbours are compared, a step from one
    rate to another hardly moves it, however high, while bursts that come and go do: it tells
    whether what was seen in the last few windows says anything about the next.

    >>> steady = Dispersion(window_ns=10, memory_ns=10_000)
    >>> for at_ns in range(0, 10_000):
    ...     steady.arrived(at_ns, 1)
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
        """The index, as of the last window that has ended."""
        return self._squares / self._mean

    def arrived(self, now_ns: int, items: int) -> None:
        """Something has arrived. O(1), amortised."""
        if self._ends_ns is None:
            self._ends_ns = now_ns + self._window_ns
        while now_ns >= self._ends_ns:
            if self._count == 0 and self._before == 0:  # nothing is learnt from silence
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
