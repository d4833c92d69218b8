"""The arrivals of the hybrid experiments: six real ones, or generated ones that resemble them.

Five one-hour windows of the Twitter trace and the Azure code trace, each thinned so that its
busiest ten seconds would keep eight instances busy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from pathlib import Path
from typing import Final

import numpy as np

from headgate.core.clock import SECOND_NS
from headgate.workload import (
    Arrivals,
    counts_of_means,
    expand_counts,
    find_trace,
    read_trace,
    rescale_rate,
    window,
)
from headgate.workload.counts import Float64
from headgate.workload.rng import column_stream

PEAK_INSTANCES: Final = 8
PEAK_STEP_NS: Final = 10 * SECOND_NS
_TWITTER: Final = "twitter_2021_08_persec_d01_d13"
_AZURE: Final = "azure_llm_2023_code"


@dataclass(frozen=True, slots=True)
class Trace:
    """Where arrivals come from, and the statistics by which they are imitated."""

    name: str
    file: str
    start_s: int
    length_s: int
    mean_per_s: float
    peak_per_s: float  # in the busiest ten seconds
    idc_10s: float  # index of dispersion of the counts in ten seconds
    burst_s: int  # how long a burst lasts
    is_idle_between: bool = False  # bursts differ in height, and nothing comes between them


TRACES: Final = (
    Trace("calm", _TWITTER, 1_116_000, 3600, 46.7, 57, 1.36, 60),
    Trace("median", _TWITTER, 741_600, 3600, 53.7, 81, 10.56, 300),
    Trace("bursty1", _TWITTER, 608_400, 3600, 95.9, 243, 613.71, 900),
    Trace("bursty2", _TWITTER, 1_090_800, 3600, 77.8, 241, 569.26, 600),
    Trace("peaky", _TWITTER, 752_400, 3600, 59.4, 227, 288.95, 240),
    Trace("code", _AZURE, 0, 2050, 3.17, 33, 70.83, 25, is_idle_between=True),
)


@lru_cache(maxsize=16)
def draw_arrivals(
    trace: Trace, peak_per_s: float, directory: Path | None, seed: int = 0
) -> Arrivals:
    """Return the arrivals of a trace, thinned to a peak; generated if there is no directory."""
    arrivals = _generate(trace, seed) if directory is None else _read(trace, directory)
    factor = peak_per_s / busiest_per_s(arrivals)
    return rescale_rate(arrivals, factor, seed=seed)


def busiest_per_s(arrivals: Arrivals) -> float:
    """Return the rate in the busiest ten seconds."""
    counts = np.bincount(arrivals.times_ns // PEAK_STEP_NS)
    return float(counts.max()) * SECOND_NS / PEAK_STEP_NS


def _read(trace: Trace, directory: Path) -> Arrivals:
    path = find_trace(trace.file, directory)
    if trace.file == _TWITTER:  # 13 days, one row per second: only the hour is expanded
        rows = np.loadtxt(path, skiprows=1 + trace.start_s, max_rows=trace.length_s)
        return expand_counts(rows.astype(np.int64))
    arrivals = read_trace(path)
    end_ns = min(trace.length_s * SECOND_NS, arrivals.duration_ns)
    return window(arrivals, trace.start_s * SECOND_NS, end_ns)


def _generate(trace: Trace, seed: int) -> Arrivals:
    """Return Poisson arrivals whose rate has the same mean, and counts the same dispersion.

    Counts in ten seconds have a dispersion of 1 + 10 v / m where the rate has the mean m and the
    variance v and changes more slowly than that.
    """
    variance = (trace.idc_10s - 1) * trace.mean_per_s / 10
    shape = _spells if trace.is_idle_between else _steps
    rates = shape(trace, variance, column_stream(seed, f"hybrid/{trace.name}"))
    return expand_counts(counts_of_means(rates, draw="poisson", seed=seed), seed=seed)


def _steps(trace: Trace, variance: float, rng: np.random.Generator) -> Float64:
    """Return a rate per second that is low, and high in bursts, one at random in each equal part.

    Two rates have that mean and variance when (high - mean) x (mean - low) is the variance.
    """
    mean = trace.mean_per_s
    high = mean + min(trace.peak_per_s - mean, 7 * sqrt(variance))  # for 2 % of the time at least
    low = mean - variance / (high - mean)
    high_s = (mean - low) / (high - low) * trace.length_s
    bursts = max(1, round(high_s / trace.burst_s))
    part_s, burst_s = trace.length_s // bursts, round(high_s / bursts)
    rates = np.full(trace.length_s, low)
    for burst in range(bursts):
        begin_s = burst * part_s + int(rng.integers(part_s - burst_s))
        rates[begin_s : begin_s + burst_s] = high
    return rates


def _spells(trace: Trace, variance: float, rng: np.random.Generator) -> Float64:
    """Return a rate per second that is zero or, spell by spell, drawn from an exponential.

    If it is not zero for a share s of the spells, its variance is (2 / s - 1) x the mean squared.
    """
    mean = trace.mean_per_s
    share = 2 / (variance / mean**2 + 1)
    spells = trace.length_s // trace.burst_s
    busy = np.arange(spells) < round(share * spells)
    rates = np.where(rng.permutation(busy), rng.exponential(mean / share, spells), 0.0)
    return np.repeat(rates * (mean / rates.mean()), trace.burst_s)
