"""Counts of integers by bucket, many at once, and where the buckets of a model lie."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from headgate.core.clock import MILLISECOND_NS, NEVER_NS, SECOND_NS

Int64 = NDArray[np.int64]

# Multiples of the objective. Close around it, because whether it is kept is what is looked at; it
# is a bound itself, so the share of requests within it is exact and not interpolated.
_TIMES_SLO: Final = (
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    *(1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0),
)
_SLACK_TIMES_SLO: Final = (
    *(-4.0, -2.0, -1.0, -0.5, -0.25, -0.1, -0.05, 0.0),
    *(0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
)
_SLO_UNKNOWN_NS: Final = 100 * MILLISECOND_NS
_STARTS_S: Final = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300)

BATCH_BOUNDS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)
START_BOUNDS_NS: Final = tuple(round(s * SECOND_NS) for s in _STARTS_S)


@final
class Histogram:
    """How many values were at most each bound; the last count is of those beyond all."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[int]) -> None:
        self.bounds = np.array(bounds, np.int64)
        self.counts = np.zeros(len(bounds) + 1, np.int64)
        self.total = 0  # the sum of all values

    def add(self, values: Int64) -> None:
        """Count these too.

        >>> histogram = Histogram((10, 20))
        >>> histogram.add(np.array([10, 11, 99]))
        >>> histogram.cumulative(unit=10), histogram.total
        ([(1.0, 1), (2.0, 2), (inf, 3)], 120)
        """
        places = np.searchsorted(self.bounds, values)
        self.counts += np.bincount(places, minlength=len(self.counts))
        self.total += int(values.sum())

    def cumulative(self, *, unit: int) -> list[tuple[float, int]]:
        """Bounds, divided by `unit`, with the count of values up to each."""
        bounds = [bound / unit for bound in self.bounds.tolist()]
        return list(zip([*bounds, float("inf")], accumulate(self.counts.tolist()), strict=True))


def latency_bounds_ns(slo_ns: int) -> list[int]:
    """Buckets for anything that takes time out of what the objective allows."""
    return _times(_TIMES_SLO, slo_ns)


def slack_bounds_ns(slo_ns: int) -> list[int]:
    """Buckets for what was left at the end; below zero it was late."""
    return _times(_SLACK_TIMES_SLO, slo_ns)


def _times(factors: tuple[float, ...], slo_ns: int) -> list[int]:
    scale_ns = _SLO_UNKNOWN_NS if slo_ns == NEVER_NS else slo_ns
    return sorted({round(factor * scale_ns) for factor in factors})
