"""The bursty load of the paper's figure 3: between 5 and 20 requests at the same time.

Only these two bounds are in its text. Here requests come in waves, so many at once, and every few
waves that number is drawn anew. A wave does not wait for the one before: whoever serves, and
however slowly, is asked the same.
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
_WAVES_ALIKE: Final = 5  # a burst of some seconds is over long before a machine could have booted


@dataclass(frozen=True, slots=True)
class BurstPhase:
    """A while of bursts, or of calm, when there are as few requests at once as there ever are."""

    length_ns: int
    is_bursty: bool


def phases(bursts_ns: int) -> tuple[BurstPhase, ...]:
    """Return the course of a run: bursts come out of a calm, twice.

    The second calm is longer than a platform keeps functions that nobody calls.
    """
    burst = BurstPhase(bursts_ns, is_bursty=True)
    return (
        BurstPhase(MINUTE_NS, is_bursty=False),
        burst,
        BurstPhase(12 * MINUTE_NS, is_bursty=False),
        burst,
    )


def lead_in_s(course: Sequence[BurstPhase], period_ns: int) -> float:
    """Return when the first wave of bursts comes; nothing is counted before.

    A run begins with nothing warm, not even where functions are kept so at all times.

    >>> lead_in_s(phases(MINUTE_NS), 7 * SECOND_NS)
    56.0
    """
    first = course[0]
    return 0.0 if first.is_bursty else first.length_ns // period_ns * period_ns / SECOND_NS


def wave_sizes(course: Sequence[BurstPhase], period_ns: int, seed: int) -> list[int]:
    """Return how many requests each wave has.

    >>> phases = [BurstPhase(2 * SECOND_NS, False), BurstPhase(9 * SECOND_NS, True)]
    >>> wave_sizes(phases, SECOND_NS, seed=0)
    [5, 5, 20, 20, 20, 20, 20, 15, 15, 15, 15]
    """
    rng = np.random.default_rng([seed, 0x6275727374])  # its own stream: "burst"
    sizes: list[int] = []
    for phase in course:
        waves = phase.length_ns // period_ns
        if not phase.is_bursty:
            sizes += [LEAST] * waves
            continue
        draws = rng.integers(LEAST, MOST, size=-(-waves // _WAVES_ALIKE), endpoint=True)
        sizes += np.repeat(draws, _WAVES_ALIKE)[:waves].tolist()
    return sizes


def waves(sizes: Sequence[int], period_ns: int) -> Arrivals:
    """Return the requests of all waves."""
    starts_ns = np.arange(len(sizes), dtype=np.int64) * period_ns
    return arrivals_at(np.repeat(starts_ns, sizes), len(sizes) * period_ns)


def period_of(sla_ms: float) -> int:
    """Return the time from wave to wave: five times the objective, at least half a second.

    >>> period_of(200.0) / SECOND_NS
    1.0
    """
    return max(SECOND_NS // 2, round(5e6 * sla_ms))


# The world of the HiPS'21 experiments: a model, an instance that serves it, and functions.
#
# The paper is "SLA-aware Workload Scheduling Using Hybrid Cloud Services" (Chahal and others,
# 2021). Its figure 2, response time over concurrency and cores, was not available. In its place
# stands a surface that meets everything the text says about it, and tables measured on another
# machine for three other models; these get an objective of five times their lone response time.


SURROGATE: Final = "surrogate"
MEASURED: Final = ("bert", "classification", "recommender")
SOURCES: Final = (SURROGATE, *MEASURED)
PAPER_SLA_MS: Final = {2: 200.0, 8: 150.0}  # by cores
QUANTILE: Final = 0.99  # of the requests that an objective holds for
INSTANCE_POOL: Final = 0
FUNCTION_POOL: Final = 1

_LONE_TIMES: Final = 5.0
_INSTANCES: Final = "ml.c5.*"
_PLATFORM: Final = "aws-lambda"


@dataclass(frozen=True, slots=True)
class Setting:
    """A model on an instance of so many cores, and how soon it must answer."""

    source: str
    cores: int
    sla_ms: float

    def __str__(self) -> str:
        return f"{self.source}, {self.cores} cores"


@dataclass(frozen=True, slots=True)
class HipsEnvironment:
    """What there is beside the model. The paper says nothing about the times here."""

    memory_mb: int
    # From nothing to the first answer, for a runtime of 200 MB and a model from a store.
    cold_start_ms: float = 2_500.0
    network_ms: float = 5.0  # to a function and back, beyond the way to the instance
    instances_max: int = 1


@dataclass(frozen=True, slots=True)
class Scene:
    """What a run needs but its policy and its load."""

    app: App
    truth: GroundTruthConfig


def setting_of(source: str, cores: int) -> Setting:
    """Return the paper's setting, or five times the lone time of a measured model.

    >>> setting_of(SURROGATE, 8).sla_ms
    150.0
    """
    if source == SURROGATE:
        return Setting(source, cores, PAPER_SLA_MS[cores])
    return Setting(source, cores, _LONE_TIMES * characterise(source).time_ms(cores, 1))


def characterise(source: str) -> Characterisation:
    """Return the response times of a source."""
    return Characterisation.surrogate() if source == SURROGATE else bundled_profile(source)


def platform_of(prices: PriceList, world: HipsEnvironment) -> FaasOffering:
    """Return the function platform, as the price list has it, behind this network."""
    platform = next(each for each in prices.platforms if each.name == _PLATFORM)
    return replace(platform, network_ns=round(world.network_ms / 2 * MILLISECOND_NS))


def scatter(times: Characterisation, setting: Setting) -> GroundTruthConfig:
    """Return how times scatter around the median: log-normally, as p99 / p50 was measured.

    It is taken where the objective is at stake: from the number of requests at once that was
    measured next to the largest whose median is within it. The surrogate does not scatter.
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


def build_scene(setting: Setting, world: HipsEnvironment) -> Scene:
    """Return the application, an instance that shares its cores and functions, and the truth."""
    times = characterise(setting.source)
    prices = read_prices()
    platform = platform_of(prices, world)
    start_ns = round(world.cold_start_ms * MILLISECOND_NS)
    shared = profile_of(times, setting.cores)
    on_instance = Profile(shared.exec_ns[:1], shared.slowdown[:MOST], cold_start_ns=start_ns)
    alone_ms = times.time_ms(platform.cpus(world.memory_mb * MIB), 1)
    on_function = Profile((round(alone_ms * MILLISECOND_NS),), cold_start_ns=start_ns)
    variants = (
        Variant(0, "instance", 0, (INSTANCE_POOL,), on_instance, concurrency=MOST),
        Variant(1, "function", 0, (FUNCTION_POOL,), on_function),
    )
    function = Function(0, setting.source, variants, prewarm_nodes=1)
    slo = Slo(round(setting.sla_ms * MILLISECOND_NS), quantile=QUANTILE)
    pipeline = Pipeline(0, setting.source, (Stage(function),), slo)
    pools = (_instances(prices, setting, world), _functions(platform, world))
    return Scene(App((function,), (pipeline,), pools), scatter(times, setting))


def _instances(prices: PriceList, setting: Setting, world: HipsEnvironment) -> Pool:
    offers = prices.instances_named([_INSTANCES], "the experiment")
    offer = next(offer for offer in offers if offer.cpus == setting.cores)
    return Pool(
        INSTANCE_POOL,
        offer.name,
        Tier.DEDICATED,
        nodes=world.instances_max,
        slots=MOST,
        is_elastic=True,
        boot_ns=offer.boot_ns,
        usd_per_hour=offer.usd_per_hour,
    )


def _functions(platform: FaasOffering, world: HipsEnvironment) -> Pool:
    return Pool(
        FUNCTION_POOL,
        platform.name,
        Tier.SERVERLESS,
        nodes=0,
        network_ns=platform.network_ns,
        faas=platform.sized(world.memory_mb * MIB),
    )
