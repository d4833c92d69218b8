"""Following a quantile of a stream that drifts, in constant memory."""

from __future__ import annotations

from math import exp
from typing import final


@final
class QuantileTracker:
    """Where a quantile of the values seen lately lies. For positive values.

    Stochastic approximation on a logarithmic scale: each value above the estimate pushes it up a
    little, each below pushes it down, in the ratio that balances exactly at the quantile. It
    forgets the past at a fixed pace (`step`), so it follows a drift and never gets stuck.

    >>> tracker = QuantileTracker(quantile=0.5)
    >>> for value in [2.0, 2.1, 1.9] * 200:
    ...     tracker.see(value)
    >>> 1.9 <= tracker.value <= 2.1
    True
    """

    def __init__(self, quantile: float, *, value: float = 1.0, step: float = 0.05) -> None:
        self.value = value
        self._up = exp(step * quantile)
        self._down = exp(-step * (1.0 - quantile))

    def see(self, value: float) -> None:
        """Take one more value into account. O(1)."""
        self.value *= self._up if value > self.value else self._down
