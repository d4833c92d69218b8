"""How much arrives: counts over a window that moves on, and forecasts from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import final


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
