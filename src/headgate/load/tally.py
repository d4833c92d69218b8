"""How a run goes so far: counts and percentiles that cost next to nothing to keep."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan

import numpy as np
from numpy.typing import NDArray

from headgate.core.clock import MILLISECOND_NS, SECOND_NS
from headgate.core.outcome import OUTCOME_NAMES
from headgate.load.result import classify
from headgate.load.rows import Rows

_PER_OCTAVE = 16  # buckets per doubling: percentiles are right within 4 %
_BUCKETS = 64 * _PER_OCTAVE


@dataclass(frozen=True, slots=True)
class Standing:
    """What to show while a run is under way."""

    elapsed_ns: int
    sent: int
    ended: int
    rate_per_s: float  # of answers, since the last time
    outcomes: tuple[int, ...]  # in the order of `OUTCOME_NAMES`
    p50_ms: float  # of the answered requests
    p99_ms: float


class Tally:
    """Reads the rows that have ended since it was last asked."""

    def __init__(self, rows: Rows, slo_ns: int | None) -> None:
        self._rows = rows
        self._slo_ns = slo_ns
        self._seen = 0
        self._at_ns = 0
        self._outcomes = np.zeros(len(OUTCOME_NAMES), np.int64)
        self._histogram = np.zeros(_BUCKETS, np.int64)

    def update(self, now_ns: int) -> Standing:
        """Count what is new."""
        rows = self._rows
        new = rows.ended[self._seen :]
        self._seen += len(new)
        if new:
            self._count(new)
        since_ns = max(now_ns - self._at_ns, 1)
        self._at_ns = now_ns
        return Standing(
            elapsed_ns=now_ns,
            sent=len(rows),
            ended=self._seen,
            rate_per_s=len(new) * SECOND_NS / since_ns,
            outcomes=tuple(self._outcomes.tolist()),
            p50_ms=self._percentile_ms(500),
            p99_ms=self._percentile_ms(990),
        )

    def _count(self, new: list[int]) -> None:
        rows = self._rows
        latency_ns = np.array([rows.ended_ns[row] - rows.intended_ns[row] for row in new], np.int64)
        outcome = classify(
            np.array([rows.status[row] for row in new], np.int16),
            np.array([rows.trouble[row] for row in new], np.int8),
            np.array([rows.said[row] for row in new], np.int8),
            latency_ns,
            self._slo_ns,
        )
        self._outcomes += np.bincount(outcome, minlength=len(OUTCOME_NAMES))
        answered_ns = latency_ns[outcome <= 1]
        self._histogram += np.bincount(_bucket(answered_ns), minlength=_BUCKETS)

    def _percentile_ms(self, per_mille: int) -> float:
        total = int(self._histogram.sum())
        if not total:
            return nan
        rank = (total * per_mille + 999) // 1000
        bucket = int(np.searchsorted(np.cumsum(self._histogram), rank))
        return float(2 ** ((bucket + 0.5) / _PER_OCTAVE)) / MILLISECOND_NS


def _bucket(latency_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    return (np.log2(np.maximum(latency_ns, 1)) * _PER_OCTAVE).astype(np.int64)
