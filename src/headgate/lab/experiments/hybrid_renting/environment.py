"""Environment and arrivals of the hybrid trace experiments.

A recommender runs on instances that can be rented and on functions. Response times are those of the
surrogate for the hybrid paper's figure 2. Execution times and the SLO are multiplied by
`TIME_SCALE`: the same number of instances is needed for a tenth of the requests, so that an hour is
simulated in a second. Boot, cold start, keep-alive and network times are not scaled.

Arrivals are five one-hour windows of the Twitter trace and the Azure code trace, each thinned so
that its busiest ten seconds would keep eight instances busy, or generated arrivals with the same
statistics.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, sqrt
from pathlib import Path
from typing import Final

import numpy as np

from headgate.core.clock import HOUR_NS, MILLISECOND_NS, MINUTE_NS, SECOND_NS
from headgate.core.model import MIB, App, Profile, Slo
from headgate.lab.experiments._hybrid_app import (
    SURROGATE,
    characterise,
    function_pool,
    hybrid_app,
    instance_pool,
    lambda_offering,
)
from headgate.lab.harness import Environment
from headgate.sim.ground_truth import GroundTruthConfig
from headgate.workload import (
    Arrivals,
    counts_of_means,
    expand_counts,
    find_trace,
    read_trace,
    rescale_rate,
    window,
)
from headgate.workload.generators import Float64, column_stream

TIME_SCALE: Final = 10
INSTANCES_MAX: Final = 16
_FUNCTION_CORES: Final = 4
_FUNCTION_MB: Final = 6656
_NETWORK_MS: Final = 5.0  # to a function, one way


@dataclass(frozen=True, slots=True)
class InstanceSetting:
    """An instance type with the SLO that the paper sets for it."""

    name: str
    cores: int
    usd_per_hour: float
    slo_ms: float
    concurrency: int  # requests that an instance serves at once within the SLO
    boot_ns: int = 180 * SECOND_NS
    start_ns: int = 2_500 * MILLISECOND_NS  # of an instance after its boot, and of a function

    @property
    def exec_ns(self) -> int:
        """Time of a single request on an instance."""
        return single_request_ns(self.cores)

    @property
    def slo_ns(self) -> int:
        """SLO, scaled by `TIME_SCALE`."""
        return round(self.slo_ms * TIME_SCALE * MILLISECOND_NS)

    @property
    def capacity_per_s(self) -> float:
        """Requests per second of a saturated instance, at any concurrency."""
        return SECOND_NS / self.exec_ns

    @property
    def usd_per_request(self) -> float:
        """Cost of a request on a saturated instance."""
        return self.usd_per_hour / HOUR_NS * self.exec_ns

    @property
    def usd_per_call(self) -> float:
        """Cost of a request on a warm function."""
        terms = lambda_offering(_NETWORK_MS).sized(_FUNCTION_MB * MIB)
        return terms.usd(single_request_ns(_FUNCTION_CORES))

    def instances_for(self, rate_per_s: float) -> int:
        """Return the number of instances that a rate saturates, rounded up; at least one."""
        return max(1, ceil(rate_per_s / self.capacity_per_s))


def single_request_ns(cores: int) -> int:
    """Return the time of a single request.

    >>> [single_request_ns(cores) // MILLISECOND_NS for cores in (2, 4, 8)]
    [360, 260, 260]
    """
    return round(characterise(SURROGATE).time_ms(cores, 1) * TIME_SCALE * MILLISECOND_NS)


SMALL: Final = InstanceSetting("ml.c5.large", cores=2, usd_per_hour=0.10, slo_ms=200, concurrency=5)
# The larger instance leaves nothing to decide: a request costs the same on a warm function as on a
# saturated instance.
LARGE: Final = InstanceSetting(
    "ml.c5.2xlarge", cores=8, usd_per_hour=0.41, slo_ms=150, concurrency=5
)


def build_app(setting: InstanceSetting, warm: int) -> App:
    """Return the application, with `warm` instances ready at time 0."""
    instances = instance_pool(
        setting.name,
        nodes=INSTANCES_MAX,
        slots=setting.concurrency,
        boot_ns=setting.boot_ns,
        usd_per_hour=setting.usd_per_hour,
    )
    shared = tuple(float(c) for c in range(1, setting.concurrency + 1))
    call_ns = single_request_ns(_FUNCTION_CORES)
    return hybrid_app(
        "recommend",
        instances,
        function_pool(lambda_offering(_NETWORK_MS), _FUNCTION_MB),
        Profile((setting.exec_ns,), slowdown=shared, cold_start_ns=setting.start_ns),
        Profile((call_ns,), cold_start_ns=setting.start_ns),
        Slo(setting.slo_ns, quantile=0.99),
        prewarm_nodes=warm,
    )


PEAK_INSTANCES: Final = 8
PEAK_STEP_NS: Final = 10 * SECOND_NS
_TWITTER: Final = "twitter_2021_08_persec_d01_d13"
_AZURE: Final = "azure_llm_2023_code"


@dataclass(frozen=True, slots=True)
class TraceSource:
    """A window of a trace, and the statistics for generated arrivals."""

    name: str
    file: str
    start_s: int
    length_s: int
    mean_per_s: float
    peak_per_s: float  # in the busiest ten seconds
    idc_10s: float  # index of dispersion of the counts in ten seconds
    burst_s: int  # duration of a burst
    is_idle_between: bool = False  # bursts of different rates with no arrivals between them


TRACES: Final = (
    TraceSource("calm", _TWITTER, 1_116_000, 3600, 46.7, 57, 1.36, 60),
    TraceSource("median", _TWITTER, 741_600, 3600, 53.7, 81, 10.56, 300),
    TraceSource("bursty1", _TWITTER, 608_400, 3600, 95.9, 243, 613.71, 900),
    TraceSource("bursty2", _TWITTER, 1_090_800, 3600, 77.8, 241, 569.26, 600),
    TraceSource("peaky", _TWITTER, 752_400, 3600, 59.4, 227, 288.95, 240),
    TraceSource("code", _AZURE, 0, 2050, 3.17, 33, 70.83, 25, is_idle_between=True),
)


@dataclass(frozen=True, slots=True)
class TraceScenario:
    """Arrivals of a trace on one type of instance; generated without a directory of traces."""

    trace: TraceSource
    directory: Path | None = None
    setting: InstanceSetting = SMALL

    def arrivals(self, seed: int) -> Arrivals:
        """Return the arrivals of the trace, thinned to the peak of `PEAK_INSTANCES`."""
        peak_per_s = PEAK_INSTANCES * self.setting.capacity_per_s
        return draw_arrivals(self.trace, peak_per_s, self.directory, seed)

    def environment(self, seed: int) -> Environment:
        """Return the environment, with the instances that the first minute needs on average."""
        arrivals = self.arrivals(seed)
        in_first_minute = int(np.searchsorted(arrivals.times_ns, MINUTE_NS))
        warm = self.setting.instances_for(in_first_minute / 60)
        truth = GroundTruthConfig("lognormal", cv=0.1)
        return Environment(build_app(self.setting, warm), arrivals, truth)


@lru_cache(maxsize=16)
def draw_arrivals(
    trace: TraceSource, peak_per_s: float, directory: Path | None, seed: int = 0
) -> Arrivals:
    """Return the arrivals of a trace, thinned to a peak; generated without a directory."""
    arrivals = _generate(trace, seed) if directory is None else _read(trace, directory)
    factor = peak_per_s / busiest_per_s(arrivals)
    return rescale_rate(arrivals, factor, seed=seed)


def busiest_per_s(arrivals: Arrivals) -> float:
    """Return the rate in the busiest ten seconds."""
    counts = np.bincount(arrivals.times_ns // PEAK_STEP_NS)
    return float(counts.max()) * SECOND_NS / PEAK_STEP_NS


def _read(trace: TraceSource, directory: Path) -> Arrivals:
    path = find_trace(trace.file, directory)
    if trace.file == _TWITTER:  # 13 days, one row per second: expand only the window
        rows = np.loadtxt(path, skiprows=1 + trace.start_s, max_rows=trace.length_s)
        return expand_counts(rows.astype(np.int64))
    arrivals = read_trace(path)
    end_ns = min(trace.length_s * SECOND_NS, arrivals.duration_ns)
    return window(arrivals, trace.start_s * SECOND_NS, end_ns)


def _generate(trace: TraceSource, seed: int) -> Arrivals:
    """Return Poisson arrivals with the mean rate and the index of dispersion of a trace.

    Counts in ten seconds have an index of dispersion of 1 + 10 v / m if the rate has the mean m and
    the variance v, and changes on a longer time scale.
    """
    variance = (trace.idc_10s - 1) * trace.mean_per_s / 10
    shape = _spells if trace.is_idle_between else _steps
    rates = shape(trace, variance, column_stream(seed, f"hybrid/{trace.name}"))
    return expand_counts(counts_of_means(rates, draw="poisson", seed=seed), seed=seed)


def _steps(trace: TraceSource, variance: float, rng: np.random.Generator) -> Float64:
    """Return a two-level rate per second: one burst at a random time in each of equal parts.

    Two levels have the mean and the variance if (high - mean) x (mean - low) is the variance.
    """
    mean = trace.mean_per_s
    # High for at least 2 % of the time.
    high = mean + min(trace.peak_per_s - mean, 7 * sqrt(variance))
    low = mean - variance / (high - mean)
    high_s = (mean - low) / (high - low) * trace.length_s
    bursts = max(1, round(high_s / trace.burst_s))
    part_s, burst_s = trace.length_s // bursts, round(high_s / bursts)
    rates = np.full(trace.length_s, low)
    for burst in range(bursts):
        begin_s = burst * part_s + int(rng.integers(part_s - burst_s))
        rates[begin_s : begin_s + burst_s] = high
    return rates


def _spells(trace: TraceSource, variance: float, rng: np.random.Generator) -> Float64:
    """Return a rate per second that is, per spell, zero or drawn from an exponential.

    If a share s of the spells is not zero, the variance is (2 / s - 1) x the mean squared.
    """
    mean = trace.mean_per_s
    share = 2 / (variance / mean**2 + 1)
    spells = trace.length_s // trace.burst_s
    busy = np.arange(spells) < round(share * spells)
    rates = np.where(rng.permutation(busy), rng.exponential(mean / share, spells), 0.0)
    return np.repeat(rates * (mean / rates.mean()), trace.burst_s)
