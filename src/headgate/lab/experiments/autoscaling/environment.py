"""The services of the Swayam experiment: execution times, arrivals, and the pool of backends.

Fifteen services with log-normal execution times, their means spaced evenly on a logarithmic scale
from 10 to 500 ms. Five have generated arrivals; ten have three-hour windows of public traces. Eight
are of the Twitter trace, without gaps in the capture, from the calmest to one of the burstiest by
the index of dispersion, thinned to the load of the service. Two are of the NASA trace, which has
fewer requests than the services: its rate by minute, with Poisson arrivals.

A service has at most `REQUESTS_MAX` requests in three hours, so that it is simulated in a minute or
so; short requests therefore make light services, which two or three backends can serve.

A backend is a node that is rented while it holds an instance. It runs one request at a time, takes
the set-up time to start, and is paid for from the beginning of its set-up until it is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np

from headgate.core.clock import HOUR_NS, MICROSECOND_NS, MILLISECOND_NS, NEVER_NS, SECOND_NS
from headgate.core.model import App, Function, Pipeline, Pool, Profile, Slo, Stage, Tier, Variant
from headgate.lab.experiments.autoscaling.oracles import Int64
from headgate.lab.harness import Environment, Floats
from headgate.sim.faults import FaultAction
from headgate.sim.ground_truth import GroundTruthConfig
from headgate.workload import (
    Arrivals,
    counts_of_means,
    expand_counts,
    find_trace,
    rescale_rate,
)
from headgate.workload.generators import column_stream

DURATION_NS: Final = 3 * HOUR_NS
REQUESTS_MAX: Final = 100_000  # of a service, on average
ERLANGS_MAX: Final = 6.0  # mean load of a service
BACKENDS: Final = 100
FRONTENDS: Final = 8
WARM: Final = 5
RESPONSE_MAX: Final = 5  # RT_max, in mean execution times
SERVICE_LEVEL: Final = 0.99
RATE_TOLERANCE: Final = 2.0  # U
NETWORK_NS: Final = 250 * MICROSECOND_NS  # one way, frontend to backend
SETUPS_S: Final = (5.0, 10.0)
# Of backends that retire by themselves: until one that is idle is not in use, and then until it is
# gone. ClairA2 releases a backend after both.
UNUSED_AFTER_NS: Final = 5 * SECOND_NS
RETIRE_AFTER_NS: Final = 5 * SECOND_NS

_TWITTER: Final = "twitter_2021_08_persec_d01_d13"
_NASA: Final = "nasa_http_1995_persec_week1"
STEP: Final = (1 / 3, 2 / 3)  # the part of the time in which `step` has twice the rate


@dataclass(frozen=True, slots=True)
class Service:
    """A service: how long its requests take, and how they arrive."""

    name: str
    exec_ms: float
    cv: float
    start_s: int = 0  # of the window, if arrivals are those of a trace
    file: str = ""
    step_s: int = 1  # above 1: only the rate in such steps is that of the trace

    @property
    def exec_ns(self) -> int:
        """Mean execution time."""
        return round(self.exec_ms * MILLISECOND_NS)

    @property
    def response_max_ns(self) -> int:
        """RT_max."""
        return RESPONSE_MAX * self.exec_ns

    @property
    def probe_delay_ns(self) -> int:
        """From a probe of a busy backend to the next one: 5 % of the mean execution time."""
        return max(2 * NETWORK_NS, self.exec_ns // 20)

    @property
    def rate_per_s(self) -> float:
        """Mean rate of arrivals."""
        most_per_s = REQUESTS_MAX / (DURATION_NS / SECOND_NS)
        return min(most_per_s, ERLANGS_MAX * SECOND_NS / self.exec_ns)


# Execution times in ms: 10 to 500 in 14 equal ratios. Shapes and times are interleaved, so that
# both generated and real arrivals come with short and with long requests.
SERVICES: Final = (
    Service("steady", 10.0, 0.1),
    Service("calm", 13.2, 0.2, 453_600, _TWITTER),
    Service("spiky", 17.5, 0.3, 345_600, _TWITTER),
    Service("nasa-day", 23.1, 0.1, 475_200, _NASA, 60),
    Service("bursts", 30.6, 0.2),
    Service("falling", 40.5, 0.3, 734_400, _TWITTER),
    Service("wave", 53.5, 0.1, 615_600, _TWITTER),
    Service("diurnal", 70.7, 0.2),
    Service("swings", 93.5, 0.3, 691_200, _TWITTER),
    Service("nasa-peak", 124.0, 0.1, 540_000, _NASA, 60),
    Service("ramp", 163.0, 0.2),
    Service("peaks", 216.0, 0.3, 842_400, _TWITTER),
    Service("tides", 286.0, 0.1, 561_600, _TWITTER),
    Service("surges", 378.0, 0.2, 1_090_800, _TWITTER),
    Service("step", 500.0, 0.3),
)


@dataclass(frozen=True, slots=True)
class ServiceScenario:
    """A service with a set-up time, and what goes wrong in it."""

    service: Service
    setup_s: float
    directory: Path | None = None  # of traces
    duration_ns: int = DURATION_NS  # a shape is as long as this, a trace is cut off
    frontends: int = FRONTENDS
    load_factor: float = 1.0  # on the rate of the service
    retires: bool = False  # backends leave by themselves
    faults: tuple[tuple[int, FaultAction], ...] = ()
    membership_delay_ns: int = 0  # until frontends know of one that crashed

    @property
    def setup_ns(self) -> int:
        return round(self.setup_s * SECOND_NS)

    def arrivals(self, seed: int) -> Arrivals:
        rate_per_s = self.load_factor * self.service.rate_per_s
        return draw_arrivals(self.service, rate_per_s, self.duration_ns, self.directory, seed)

    def exec_ns(self, seed: int) -> Int64:
        """Return an execution time for each request, as an oracle knows them.

        The simulator draws its own, from the same distribution, when a request begins to run.
        """
        service = self.service
        rng = column_stream(seed, f"swayam/exec/{service.name}")
        return lognormal_ns(service.exec_ns, service.cv, len(self.arrivals(seed)), rng)

    def environment(self, seed: int) -> Environment:
        return Environment(
            build_app(self.service, self.setup_ns, retires=self.retires),
            self.arrivals(seed),
            GroundTruthConfig("lognormal", cv=self.service.cv),
            faults=self.faults,
            schedulers=self.frontends,
            membership_delay_ns=self.membership_delay_ns,
        )


def build_app(service: Service, setup_ns: int, *, retires: bool = False) -> App:
    """Return the application: one function on a pool of backends, under the service's SLA."""
    pool = Pool(
        0,
        "backend",
        Tier.DEDICATED,
        nodes=BACKENDS,
        is_elastic=True,
        cpu_usd_per_hour=1.0,  # of nothing, but a price makes the simulator record instances
        network_ns=NETWORK_NS,
    )
    variant = Variant(
        0,
        service.name,
        0,
        (0,),
        Profile((service.exec_ns,), cold_start_ns=setup_ns),
        unused_after_ns=UNUSED_AFTER_NS if retires else NEVER_NS,
        retire_after_ns=RETIRE_AFTER_NS if retires else NEVER_NS,
    )
    function = Function(0, service.name, (variant,), prewarm_nodes=WARM)
    slo = Slo(service.response_max_ns, SERVICE_LEVEL, rate_tolerance=RATE_TOLERANCE, is_hard=True)
    return App((function,), (Pipeline(0, "default", (Stage(function),), slo),), (pool,))


def lognormal_ns(mean_ns: int, cv: float, count: int, rng: np.random.Generator) -> Int64:
    """Return execution times of this mean and coefficient of variation."""
    variance = np.log(1.0 + cv * cv)
    drawn = rng.lognormal(-variance / 2, np.sqrt(variance), count)
    return np.maximum(1, np.rint(drawn * mean_ns)).astype(np.int64)


@lru_cache(maxsize=4)
def draw_arrivals(
    service: Service, rate_per_s: float, duration_ns: int, directory: Path | None, seed: int
) -> Arrivals:
    """Return arrivals at a mean rate; a shape is as long as the arrivals last."""
    if service.file and service.step_s == 1:
        counts = _counts(service, duration_ns, directory)
        factor = rate_per_s / float(counts.mean())
        return rescale_rate(expand_counts(counts, seed=seed), factor, seed=seed)
    seconds = np.arange(duration_ns // SECOND_NS)
    if service.file:
        steps = _counts(service, duration_ns, directory).reshape(-1, service.step_s)
        rates = np.repeat(steps.mean(axis=1), service.step_s)
    else:
        rng = column_stream(seed, f"swayam/{service.name}")
        rates = _SHAPES[service.name](seconds / len(seconds), rng)
    means = rates * (rate_per_s / rates.mean())
    return expand_counts(counts_of_means(means, draw="poisson", seed=seed), seed=seed)


def _counts(service: Service, duration_ns: int, directory: Path | None) -> Int64:
    """Return the requests in each second of a window, for traces with a row per second."""
    path = find_trace(service.file, directory)
    length_s = duration_ns // SECOND_NS
    rows = np.loadtxt(path, skiprows=1 + service.start_s, max_rows=length_s)
    counts: Int64 = rows.astype(np.int64)
    return counts


def _steady(part: Floats, rng: np.random.Generator) -> Floats:
    return np.ones(len(part))


def _diurnal(part: Floats, rng: np.random.Generator) -> Floats:
    """A day: the highest rate is four times the lowest."""
    wave: Floats = 1.0 - 0.6 * np.cos(2 * np.pi * part)
    return wave


def _step(part: Floats, rng: np.random.Generator) -> Floats:
    """Twice the rate in the middle third, from one second to the next."""
    begin, end = STEP
    return np.where((part >= begin) & (part < end), 2.0, 1.0)


def _ramp(part: Floats, rng: np.random.Generator) -> Floats:
    """A rate that grows sevenfold."""
    ramp: Floats = 0.25 + 1.5 * part
    return ramp


def _bursts(part: Floats, rng: np.random.Generator) -> Floats:
    """Bursts of four times the rate: a minute on average, after five minutes on average."""
    rates = np.ones(len(part))
    at = 0.0
    while at < len(rates):
        begin = at + rng.exponential(300)
        at = begin + rng.exponential(60)
        rates[int(begin) : int(at)] = 4.0
    return rates


# Each gives a rate by second, relative to the mean, over the part of the time that has passed.
_SHAPES: Final[Mapping[str, Callable[[Floats, np.random.Generator], Floats]]] = {
    "steady": _steady,
    "bursts": _bursts,
    "diurnal": _diurnal,
    "ramp": _ramp,
    "step": _step,
}
