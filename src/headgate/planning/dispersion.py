"""How bursty arrivals are, from one moment to the next."""

from __future__ import annotations

from math import exp
from typing import Final, final

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
