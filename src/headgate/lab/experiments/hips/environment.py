"""Environment and load of the HiPS'21 experiments: a model, an instance, functions, and bursts.

The paper is "SLA-aware Workload Scheduling Using Hybrid Cloud Services" (Chahal and others, 2021).
Its figure 2, response time over concurrency and cores, was not available. Instead, a surrogate
surface is used that agrees with all statements in the text, and tables measured on another machine
for three other models; these get an SLA of five times their single-request response time.

The bursty load of the paper's figure 3 has between 5 and 20 concurrent requests; its text has no
other details. Here requests arrive in waves of simultaneous requests, and every few waves their
number is drawn anew. The load is open-loop: waves do not depend on earlier responses, so every
policy gets the same load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from statistics import NormalDist
from typing import Final

import numpy as np

from headgate.config.prices import PriceList, read_prices
from headgate.core.catalog import MIB, FaasOffering
from headgate.core.clock import MILLISECOND_NS, MINUTE_NS, SECOND_NS
from headgate.core.model import App, Function, Pipeline, Pool, Profile, Slo, Stage, Tier, Variant
from headgate.planning.capacity.sizing import largest_concurrency
from headgate.planning.latency_model import Characterisation, profile_of
from headgate.profiling import bundled_profile
from headgate.sim.ground_truth import GroundTruthConfig
from headgate.workload import Arrivals
from headgate.workload.arrivals import arrivals_at

LEAST: Final = 5
MOST: Final = 20
_WAVES_ALIKE: Final = 5  # a burst of some seconds is far shorter than the boot time of a machine


@dataclass(frozen=True, slots=True)
class BurstPhase:
    """A phase of bursts, or a calm phase with the minimum number of concurrent requests."""

    length_ns: int
    is_bursty: bool


def make_phases(bursts_ns: int) -> tuple[BurstPhase, ...]:
    """Return the phases of a run: calm and bursts, twice.

    The second calm is longer than the keep-alive time of functions.
    """
    burst = BurstPhase(bursts_ns, is_bursty=True)
    return (
        BurstPhase(MINUTE_NS, is_bursty=False),
        burst,
        BurstPhase(12 * MINUTE_NS, is_bursty=False),
        burst,
    )


def lead_in_s(phases: Sequence[BurstPhase], period_ns: int) -> float:
    """Return the time of the first wave of bursts; requests before it are not counted.

    A run starts without warm functions, even for policies that keep functions warm.

    >>> lead_in_s(make_phases(MINUTE_NS), 7 * SECOND_NS)
    56.0
    """
    first = phases[0]
    return 0.0 if first.is_bursty else first.length_ns // period_ns * period_ns / SECOND_NS


def wave_sizes(phases: Sequence[BurstPhase], period_ns: int, seed: int) -> list[int]:
    """Return the number of requests of each wave.

    >>> phases = [BurstPhase(2 * SECOND_NS, False), BurstPhase(9 * SECOND_NS, True)]
    >>> wave_sizes(phases, SECOND_NS, seed=0)
    [5, 5, 20, 20, 20, 20, 20, 15, 15, 15, 15]
    """
    rng = np.random.default_rng([seed, 0x6275727374])  # "burst": a stream of its own
    sizes: list[int] = []
    for phase in phases:
        waves = phase.length_ns // period_ns
        if not phase.is_bursty:
            sizes += [LEAST] * waves
            continue
        draws = rng.integers(LEAST, MOST, size=-(-waves // _WAVES_ALIKE), endpoint=True)
        sizes += np.repeat(draws, _WAVES_ALIKE)[:waves].tolist()
    return sizes


def waves(sizes: Sequence[int], period_ns: int) -> Arrivals:
    """Return the arrivals of all waves."""
    starts_ns = np.arange(len(sizes), dtype=np.int64) * period_ns
    return arrivals_at(np.repeat(starts_ns, sizes), len(sizes) * period_ns)


def period_of(sla_ms: float) -> int:
    """Return the time between waves: five times the SLA, at least half a second.

    >>> period_of(200.0) / SECOND_NS
    1.0
    """
    return max(SECOND_NS // 2, round(5e6 * sla_ms))


SURROGATE: Final = "surrogate"
MEASURED: Final = ("bert", "classification", "recommender")
SOURCES: Final = (SURROGATE, *MEASURED)
PAPER_SLA_MS: Final = {2: 200.0, 8: 150.0}  # by cores
QUANTILE: Final = 0.99  # share of requests that must meet the SLA
INSTANCE_POOL: Final = 0
FUNCTION_POOL: Final = 1

_SLA_FACTOR: Final = 5.0
_INSTANCES: Final = "ml.c5.*"
_PLATFORM: Final = "aws-lambda"


@dataclass(frozen=True, slots=True)
class Setting:
    """A model, the number of cores of its instance, and its SLA."""

    source: str
    cores: int
    sla_ms: float

    def __str__(self) -> str:
        return f"{self.source}, {self.cores} cores"


@dataclass(frozen=True, slots=True)
class HipsEnvironment:
    """Instances and functions. The times are assumptions: the paper does not state them."""

    memory_mb: int
    # Cold start with a runtime of 200 MB and a model from a store.
    cold_start_ms: float = 2_500.0
    network_ms: float = 5.0  # round trip to a function, in addition to that to the instance
    instances_max: int = 1


@dataclass(frozen=True, slots=True)
class Scene:
    """Inputs of a run other than its policy and its load."""

    app: App
    truth: GroundTruthConfig


def setting_of(source: str, cores: int) -> Setting:
    """Return the paper's setting, or an SLA of five single-request times for a measured model.

    >>> setting_of(SURROGATE, 8).sla_ms
    150.0
    """
    if source == SURROGATE:
        return Setting(source, cores, PAPER_SLA_MS[cores])
    return Setting(source, cores, _SLA_FACTOR * characterise(source).time_ms(cores, 1))


def characterise(source: str) -> Characterisation:
    """Return the response times of a source."""
    return Characterisation.surrogate() if source == SURROGATE else bundled_profile(source)


def platform_of(prices: PriceList, environment: HipsEnvironment) -> FaasOffering:
    """Return the function platform of the price list, with this network delay."""
    platform = next(each for each in prices.platforms if each.name == _PLATFORM)
    return replace(platform, network_ns=round(environment.network_ms / 2 * MILLISECOND_NS))


def scatter(times: Characterisation, setting: Setting) -> GroundTruthConfig:
    """Return the service-time distribution: log-normal, with the measured ratio of p99 to p50.

    The ratio is that of the measured concurrency next to the largest one whose median meets the
    SLA, because it decides about violations there. The surrogate is deterministic.
    """
    at_stake = largest_concurrency(times, setting.cores, setting.sla_ms, 0.5)
    points = [point for point in times.points if point.cores == setting.cores and point.batch == 1]
    point = min(points, key=lambda point: abs(point.concurrency - at_stake))
    sigma = log(point.p99_ms / point.p50_ms) / NormalDist().inv_cdf(0.99)
    return (
        GroundTruthConfig("lognormal", cv=sqrt(exp(sigma * sigma) - 1.0))
        if sigma
        else GroundTruthConfig()
    )


def build_scene(setting: Setting, environment: HipsEnvironment) -> Scene:
    """Return the application (an instance that shares its cores, and functions) and its times."""
    times = characterise(setting.source)
    prices = read_prices()
    platform = platform_of(prices, environment)
    start_ns = round(environment.cold_start_ms * MILLISECOND_NS)
    shared = profile_of(times, setting.cores)
    on_instance = Profile(shared.exec_ns[:1], shared.slowdown[:MOST], cold_start_ns=start_ns)
    function_ms = times.time_ms(platform.cpus(environment.memory_mb * MIB), 1)
    on_function = Profile((round(function_ms * MILLISECOND_NS),), cold_start_ns=start_ns)
    variants = (
        Variant(0, "instance", 0, (INSTANCE_POOL,), on_instance, concurrency=MOST),
        Variant(1, "function", 0, (FUNCTION_POOL,), on_function),
    )
    function = Function(0, setting.source, variants, prewarm_nodes=1)
    slo = Slo(round(setting.sla_ms * MILLISECOND_NS), quantile=QUANTILE)
    pipeline = Pipeline(0, setting.source, (Stage(function),), slo)
    pools = (_instances(prices, setting, environment), _functions(platform, environment))
    return Scene(App((function,), (pipeline,), pools), scatter(times, setting))


def _instances(prices: PriceList, setting: Setting, environment: HipsEnvironment) -> Pool:
    instance_types = prices.instances_named([_INSTANCES], "the experiment")
    instance_type = next(
        instance_type for instance_type in instance_types if instance_type.cpus == setting.cores
    )
    return Pool(
        INSTANCE_POOL,
        instance_type.name,
        Tier.DEDICATED,
        nodes=environment.instances_max,
        slots=MOST,
        is_elastic=True,
        boot_ns=instance_type.boot_ns,
        usd_per_hour=instance_type.usd_per_hour,
    )


def _functions(platform: FaasOffering, environment: HipsEnvironment) -> Pool:
    return Pool(
        FUNCTION_POOL,
        platform.name,
        Tier.SERVERLESS,
        nodes=0,
        network_ns=platform.network_ns,
        faas=platform.sized(environment.memory_mb * MIB),
    )
