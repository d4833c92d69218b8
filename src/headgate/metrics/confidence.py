"""Confidence intervals: of a mean over independent seeds, and of the figures of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from headgate.core.clock import MILLISECOND_NS, NEVER_NS
from headgate.core.states import Outcome
from headgate.metrics.columns import RequestColumns

_WINDOWS: Final = 20  # that the time of a run is cut into


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and the bounds of its confidence interval."""

    mean: float
    low: float  # NaN for a single value, which says nothing about the variance
    high: float
    n: int  # number of independent values


def mean_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Return the mean of independent values (one per seed) with its Student-t interval.

    >>> mean_interval([1.0, 2.0, 3.0])
    Interval(mean=2.0, low=-0.48..., high=4.48..., n=3)
    """
    assert len(values) > 0, "an interval needs at least one value"
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return Interval(mean, math.nan, math.nan, 1)
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    half = student_t(level, n - 1) * math.sqrt(variance / n)
    return Interval(mean, mean - half, mean + half, n)


def resample_windows(
    requests: RequestColumns, replicates: int, *, seed: int
) -> Iterator[RunFigures]:
    """Yield the figures of a run again and again, each time from windows drawn at random.

    The time of the arrivals is cut into equal windows, and as many are drawn with replacement: a
    block bootstrap. Requests that share a burst or a queue stay together, as long as it does not
    last longer than a window.
    """
    rng = np.random.default_rng([seed, 0x77696E646F7773])  # "windows" in ASCII
    figures = _WindowFigures(requests, _WINDOWS)
    for _ in range(replicates):
        drawn = rng.integers(_WINDOWS, size=_WINDOWS)
        yield figures.weighted(np.bincount(drawn, minlength=_WINDOWS))


@dataclass(frozen=True, slots=True)
class RunFigures:
    """What users ask of a run first. Latencies are of answered requests, NaN if there are none."""

    in_time: float  # MET over everything but CANCELLED; 1 if there is nothing to count
    p50_ms: float
    p95_ms: float
    p99_ms: float
    refused: float  # requests


def run_figures(requests: RequestColumns) -> RunFigures:
    """Return the figures of a run, as they are."""
    return _WindowFigures(requests, 1).weighted(np.ones(1, np.int64))


@final
class _WindowFigures:
    """The requests of a run by window, sorted once, to compute figures of many choices of them."""

    def __init__(self, requests: RequestColumns, windows: int) -> None:
        arrival_ns = requests.arrival_ns
        first_ns = int(arrival_ns.min(initial=NEVER_NS))
        span_ns = max(1, int(arrival_ns.max(initial=0)) - first_ns + 1)
        window = (arrival_ns - first_ns) * windows // span_ns
        outcome = requests.outcome
        self._met = np.bincount(window[outcome == Outcome.MET], minlength=windows)
        self._counted = np.bincount(window[outcome != Outcome.CANCELLED], minlength=windows)
        self._refused = np.bincount(window[outcome == Outcome.REJECTED], minlength=windows)
        is_answered = outcome <= Outcome.LATE
        latency_ns = requests.finished_ns[is_answered] - arrival_ns[is_answered]
        order = np.argsort(latency_ns, kind="stable")
        self._latency_ns = latency_ns[order]
        self._window = window[is_answered][order]

    def weighted(self, counts: NDArray[np.int64]) -> RunFigures:
        """Return the figures if window i came `counts[i]` times."""
        counted = int(counts @ self._counted)
        ranks = np.cumsum(counts[self._window])
        total = int(ranks[-1]) if len(ranks) else 0
        p50_ms = p95_ms = p99_ms = math.nan
        if total:
            # By nearest rank, as in summaries.
            wanted = [(total * share + 999) // 1000 for share in (500, 950, 990)]
            rows = np.searchsorted(ranks, wanted)
            p50_ms, p95_ms, p99_ms = (self._latency_ns[rows] / MILLISECOND_NS).tolist()
        return RunFigures(
            int(counts @ self._met) / counted if counted else 1.0,
            p50_ms,
            p95_ms,
            p99_ms,
            float(counts @ self._refused),
        )


def student_t(level: float, dof: int) -> float:
    """Return t such that |T| <= t with probability `level`, T having `dof` degrees of freedom.

    >>> round(student_t(0.95, 9), 4)
    2.2622
    """
    assert 0.0 < level < 1.0, level
    assert dof >= 1, dof
    if dof > 200:
        return _student_t_large(level, dof)
    low, high = 0.0, math.pi / 2
    for _ in range(60):  # the angle to full double precision
        middle = (low + high) / 2
        if _probability_within(middle, dof) < level:
            low = middle
        else:
            high = middle
    return math.sqrt(dof) * math.tan(low)


def _probability_within(angle: float, dof: int) -> float:
    """Return P(|T| <= sqrt(dof) tan(angle)): exact (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    cosine, sine = math.cos(angle), math.sin(angle)
    is_odd = dof % 2 == 1
    term = cosine if is_odd else 1.0
    total = 0.0
    for k in range(1 if is_odd else 0, dof - 1, 2):
        total += term
        term *= cosine * cosine * (k + 1) / (k + 2)
    if is_odd:
        return (angle + sine * total) * 2 / math.pi
    return sine * total


def _student_t_large(level: float, dof: int) -> float:
    """Return the normal quantile, corrected up to order dof**-2 (Cornish and Fisher)."""
    z = NormalDist().inv_cdf((1 + level) / 2)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / dof + second / dof**2
