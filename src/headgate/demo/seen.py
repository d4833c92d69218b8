"""What came of a run, live or simulated, in the same few numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headgate.core.outcome import Outcome
from headgate.metrics.columns import Int8


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """One run, without its warm-up."""

    arrival_s: NDArray[np.float64]
    latency_ms: NDArray[np.float64]  # until it was settled, whatever the outcome
    is_met: NDArray[np.bool_]
    unserved: int  # requests that were turned away, or broke
    spilled: float  # share of requests that functions ran
    cold_starts: int  # of functions
    usd_per_1000: float

    @property
    def attainment(self) -> float:
        """The share of requests that were answered in time."""
        return float(self.is_met.mean())

    def percentile_ms(self, quantile: float) -> float:
        """Of the latencies."""
        return float(np.quantile(self.latency_ms, quantile, method="inverted_cdf"))


def count_unserved(outcome: Int8) -> int:
    """Return how many of these requests got no answer, in time or late."""
    return int(np.count_nonzero(outcome > Outcome.LATE))
