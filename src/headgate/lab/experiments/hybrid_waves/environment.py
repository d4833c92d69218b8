"""Environment, load and plan of the HiPS'21 experiments: a model, instances, functions, bursts.

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
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from headgate.core.clock import MILLISECOND_NS, MINUTE_NS, SECOND_NS
from headgate.core.model import MIB, App, Profile, Slo
from headgate.lab.experiments._hybrid_app import (
    SURROGATE,
    characterise,
    function_pool,
    hybrid_app,
    instance_pool,
    lambda_offering,
    price_list,
)
from headgate.lab.harness import Case, Environment, PolicyCase, lognormal_truth
from headgate.planning.capacity.latency_model import Characterisation, profile_of
from headgate.planning.capacity.sizing import (
    SizeRow,
    cheapest_size,
    faas_sizes,
    knee_cores,
    knee_size,
    largest_concurrency,
)
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
    calm, long_calm = (BurstPhase(minutes * MINUTE_NS, is_bursty=False) for minutes in (1, 12))
    return (calm, burst, long_calm, burst)


def lead_in_ns(phases: Sequence[BurstPhase], period_ns: int) -> int:
    """Return the time of the first wave of bursts; requests before it are not counted.

    A run starts without warm functions, even for policies that keep functions warm.

    >>> lead_in_ns(make_phases(MINUTE_NS), 7 * SECOND_NS) / SECOND_NS
    56.0
    """
    first = phases[0]
    return 0 if first.is_bursty else first.length_ns // period_ns * period_ns


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
    starts_ns = np.arange(len(sizes), dtype=np.int64) * period_ns
    return arrivals_at(np.repeat(starts_ns, sizes), len(sizes) * period_ns)


MEASURED: Final = ("bert", "classification", "recommender")
SOURCES: Final = (SURROGATE, *MEASURED)
PAPER_SLA_MS: Final = {2: 200.0, 8: 150.0}  # by cores
QUANTILE: Final = 0.99  # share of requests that must meet the SLA

_SLA_FACTOR: Final = 5.0
_INSTANCES: Final = "ml.c5.*"
# Times that the paper does not state, and that are assumed.
_COLD_START_MS: Final = 2_500.0  # with a runtime of 200 MB and a model from a store
NETWORK_MS: Final = 2.5  # to a function, one way, in addition to that to the instance


@dataclass(frozen=True, slots=True)
class Setting:
    """A model, the number of cores of its instance, and its SLA."""

    source: str
    cores: int
    sla_ms: float

    def __str__(self) -> str:
        return f"{self.source}, {self.cores} cores"

    @property
    def times(self) -> Characterisation:
        return characterise(self.source)

    @property
    def period_ns(self) -> int:
        """Time between waves: five times the SLA, at least half a second.

        >>> setting_of(SURROGATE, 2).period_ns / SECOND_NS
        1.0
        """
        return max(SECOND_NS // 2, round(5e6 * self.sla_ms))


@dataclass(frozen=True, slots=True)
class BurstScenario:
    """Bursts on instances, with functions of one memory size."""

    setting: Setting
    memory_mb: int
    phases: tuple[BurstPhase, ...]
    instances_max: int = 1
    cold_start_ms: float = _COLD_START_MS

    def wave_sizes(self, seed: int) -> list[int]:
        return wave_sizes(self.phases, self.setting.period_ns, seed)

    def environment(self, seed: int) -> Environment:
        setting = self.setting
        return Environment(
            _build_app(setting, self.memory_mb, self.instances_max, self.cold_start_ms),
            waves(self.wave_sizes(seed), setting.period_ns),
            scatter(setting),
            since_ns=lead_in_ns(self.phases, setting.period_ns),
        )


def setting_of(source: str, cores: int) -> Setting:
    """Return the paper's setting, or an SLA of five single-request times for a measured model.

    >>> setting_of(SURROGATE, 8).sla_ms
    150.0
    """
    if source == SURROGATE:
        return Setting(source, cores, PAPER_SLA_MS[cores])
    return Setting(source, cores, _SLA_FACTOR * characterise(source).time_ms(cores, 1))


@lru_cache
def scatter(setting: Setting) -> GroundTruthConfig:
    """Return the service-time distribution: log-normal, with the measured ratio of p99 to p50.

    The ratio is that of the measured concurrency next to the largest one whose median meets the
    SLA, because it decides about violations there. The surrogate is deterministic.
    """
    times = setting.times
    at_stake = largest_concurrency(times, setting.cores, setting.sla_ms, 0.5)
    points = [point for point in times.points if point.cores == setting.cores and point.batch == 1]
    point = min(points, key=lambda point: abs(point.concurrency - at_stake))
    return lognormal_truth(point.p50_ms, point.p99_ms, 0.99)


@lru_cache
def _build_app(setting: Setting, memory_mb: int, instances_max: int, cold_start_ms: float) -> App:
    """Return the application: an instance that shares its cores among requests, and functions."""
    types = price_list().instances_named([_INSTANCES], "the experiment")
    rented = next(each for each in types if each.cpus == setting.cores)
    instances = instance_pool(
        rented.name,
        nodes=instances_max,
        slots=MOST,
        boot_ns=rented.boot_ns,
        usd_per_hour=rented.usd_per_hour,
    )
    offering = lambda_offering(NETWORK_MS)
    start_ns = round(cold_start_ms * MILLISECOND_NS)
    shared = profile_of(setting.times, setting.cores)
    function_ms = setting.times.time_ms(offering.cpus(memory_mb * MIB), 1)
    return hybrid_app(
        setting.source,
        instances,
        function_pool(offering, memory_mb),
        Profile(shared.exec_ns[:1], shared.slowdown[:MOST], cold_start_ns=start_ns),
        Profile((round(function_ms * MILLISECOND_NS),), cold_start_ns=start_ns),
        Slo(round(setting.sla_ms * MILLISECOND_NS), quantile=QUANTILE),
    )


@dataclass(frozen=True, slots=True)
class PaperPlan:
    """The paper's two decisions, from response times measured in advance."""

    threshold: int
    knee_cores: float
    sizes: tuple[SizeRow, ...]  # of functions, smallest first
    selected: SizeRow | None  # the smallest about as fast as any; None: none meets the SLA
    cheapest: SizeRow | None  # of those that meet the SLA

    @property
    def memory_mb(self) -> int:
        """The selected function size, or the largest if none meets the SLA."""
        return (self.selected or self.sizes[-1]).memory_bytes // MIB


def plan_of(setting: Setting) -> PaperPlan:
    """Plan from the characterisation alone."""
    times = setting.times
    sizes = faas_sizes(times, lambda_offering(NETWORK_MS), setting.sla_ms, QUANTILE)
    return PaperPlan(
        threshold=largest_concurrency(times, setting.cores, setting.sla_ms, QUANTILE),
        knee_cores=knee_cores(times),
        sizes=tuple(sizes),
        selected=knee_size(sizes),
        cheapest=cheapest_size(sizes),
    )


# Labels of the policies compared.
DEDICATED: Final = "dedicated_only"
AUTOSCALE: Final = "autoscale"
FAST_AUTOSCALE: Final = "autoscale, fast"
THRESHOLD: Final = "threshold"
WARM: Final = "threshold, kept warm"
HEADGATE: Final = "headgate"
_INSTANCES_MAX: Final = 4  # enough for 20 concurrent requests within the paper's SLAs


def cases_of(
    setting: Setting, plan: PaperPlan, phases: tuple[BurstPhase, ...]
) -> dict[str, Case[BurstScenario]]:
    """Return a case per policy, with the planned threshold for policies that have one."""
    threshold, target = plan.threshold, _target(setting, plan)
    policies = (
        PolicyCase(DEDICATED),
        PolicyCase.of("autoscale", AUTOSCALE, target=target),
        PolicyCase.of(
            "autoscale",
            FAST_AUTOSCALE,
            target=target,
            plan_every_ns=10 * SECOND_NS,
            out_after=1,
            out_cooldown_ns=0,
        ),
        PolicyCase("serverless_only"),
        PolicyCase.of(THRESHOLD, threshold=threshold),
        PolicyCase.of("threshold", WARM, threshold=threshold, warm_instances=MOST - threshold),
        PolicyCase(HEADGATE),
    )
    one = BurstScenario(setting, plan.memory_mb, phases)
    several = BurstScenario(setting, plan.memory_mb, phases, instances_max=_INSTANCES_MAX)
    return {
        policy.label: Case(policy, several if policy.name == "autoscale" else one)
        for policy in policies
    }


def _target(setting: Setting, plan: PaperPlan) -> float:
    """Return the target utilisation of the autoscaler at which the largest waves meet the SLA.

    In the largest wave an instance may get as many requests as the threshold. The autoscaler sees
    the mean, which is lower by the ratio of mean to largest wave.
    """
    busy_ms = setting.times.time_ms(setting.cores, max(1, plan.threshold))
    mean_over_most = (LEAST + MOST) / 2 / MOST
    return busy_ms * 1e6 / setting.period_ns * mean_over_most
