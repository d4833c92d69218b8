"""Environment and arrivals of the hybrid trace experiments.

A recommender runs on instances that can be rented and on functions. Response times are those of the
surrogate for the hybrid paper's figure 2: `c` concurrent requests on `n` cores each take
c x (16 + 40 / min(n, 4)) ms. Execution times and the SLO are then multiplied by `TIME_SCALE`: the
same number of instances is needed for a tenth of the requests, so that an hour is simulated in a
second. Boot, cold start, keep-alive and network times are not scaled.

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
from headgate.core.model import (
    App,
    Client,
    FaasPlatform,
    Function,
    Pipeline,
    Pool,
    Profile,
    Slo,
    Stage,
    Tier,
    Variant,
)
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


@dataclass(frozen=True, slots=True)
class HybridEnvironment:
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
        return LAMBDA.usd(single_request_ns(_FUNCTION_CORES))

    def instances_for(self, rate_per_s: float) -> int:
        """Return the number of instances that a rate saturates, rounded up; at least one."""
        return max(1, ceil(rate_per_s / self.capacity_per_s))


# AWS Lambda, 6656 MB: 4 cores. Prices of x86 in USD, as published in 2024.
LAMBDA: Final = FaasPlatform(
    memory_bytes=6656 << 20,
    concurrency_max=1_000,
    burst_concurrency=1_000,
    burst_refill_per_s=100.0,
    keep_alive_ns=10 * MINUTE_NS,
    age_max_ns=2 * HOUR_NS,
    usd_per_gb_s=1.66667e-5,
    usd_per_request=2e-7,
    bills_cold_start=True,
    provisioning_ns=60 * SECOND_NS,
    provisioned_usd_per_gb_s=4.1667e-6,
    provisioned_run_usd_per_gb_s=9.7222e-6,
)


def single_request_ns(cores: int) -> int:
    """Return the time of a single request.

    >>> [single_request_ns(cores) // MILLISECOND_NS for cores in (2, 4, 8)]
    [360, 260, 260]
    """
    return round((16 + 40 / min(cores, 4)) * TIME_SCALE * MILLISECOND_NS)


SMALL: Final = HybridEnvironment(
    "ml.c5.large", cores=2, usd_per_hour=0.10, slo_ms=200, concurrency=5
)
# The larger instance leaves nothing to decide: a request costs the same on a warm function as on a
# saturated instance.
LARGE: Final = HybridEnvironment(
    "ml.c5.2xlarge", cores=8, usd_per_hour=0.41, slo_ms=150, concurrency=5
)


def build_app(environment: HybridEnvironment, warm: int) -> App:
    """Return the application, with `warm` instances ready at time 0."""
    dedicated = Pool(
        0,
        "instance",
        Tier.DEDICATED,
        nodes=INSTANCES_MAX,
        slots=environment.concurrency,
        is_elastic=True,
        boot_ns=environment.boot_ns,
        usd_per_hour=environment.usd_per_hour,
    )
    functions = Pool(
        1, "lambda", Tier.SERVERLESS, nodes=0, network_ns=5 * MILLISECOND_NS, faas=LAMBDA
    )
    shared = tuple(float(c) for c in range(1, environment.concurrency + 1))
    on_instance = Profile(
        (environment.exec_ns,), slowdown=shared, cold_start_ns=environment.start_ns
    )
    as_function = Profile((single_request_ns(_FUNCTION_CORES),), cold_start_ns=environment.start_ns)
    recommend = Function(
        0,
        "recommend",
        (
            Variant(0, "instance", 0, (0,), on_instance, concurrency=environment.concurrency),
            Variant(1, "lambda", 0, (1,), as_function),
        ),
        prewarm_nodes=warm,
    )
    slo = Slo(environment.slo_ns, quantile=0.99)
    pipeline = Pipeline(0, "recommend", (Stage(recommend),), slo)
    return App((recommend,), (pipeline,), (dedicated, functions), (Client(0, "client"),))


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
    high = mean + min(
        trace.peak_per_s - mean, 7 * sqrt(variance)
    )  # high for at least 2 % of the time
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
