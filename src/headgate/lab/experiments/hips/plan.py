"""What characterisation alone says of a setting, and what trying everything says of that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final

from headgate.config.prices import read_prices
from headgate.core.catalog import MIB
from headgate.core.clock import SECOND_NS
from headgate.lab.experiments.hips.environment import (
    LEAST,
    MOST,
    QUANTILE,
    BurstPhase,
    HipsEnvironment,
    Setting,
    build_scene,
    characterise,
    period_of,
    platform_of,
    wave_sizes,
    waves,
)
from headgate.lab.experiments.hips.run import (
    HipsCase,
    HipsPolicyCase,
    HipsResult,
    observe,
    summarise,
)
from headgate.planning.capacity.sizing import (
    SizeRow,
    cheapest_size,
    faas_sizes,
    knee_cores,
    knee_size,
    largest_concurrency,
)

THRESHOLDS: Final = range(1, MOST + 1)


@dataclass(frozen=True, slots=True)
class PaperPlan:
    """The paper's two decisions, from response times measured beforehand."""

    threshold: int
    knee_cores: float
    sizes: tuple[SizeRow, ...]  # of functions, smallest first
    chosen: SizeRow | None  # the smallest that is about as fast as any; None: none is in time
    cheapest: SizeRow | None  # of those in time

    @property
    def world(self) -> HipsEnvironment:
        """With the size chosen, or the largest where none will do."""
        return HipsEnvironment((self.chosen or self.sizes[-1]).memory_bytes // MIB)


@dataclass(frozen=True, slots=True)
class TrialCase:
    """Every threshold, or every size, in so many waves of bursts: plain values, for workers."""

    setting: Setting
    memory_mb: tuple[int, ...]
    thresholds: tuple[int, ...]
    wave_count: int


def plan_of(setting: Setting) -> PaperPlan:
    """Decide, from the characterisation alone."""
    times = characterise(setting.source)
    platform = platform_of(read_prices(), HipsEnvironment(0))
    sizes = faas_sizes(times, platform, setting.sla_ms, QUANTILE)
    return PaperPlan(
        threshold=largest_concurrency(times, setting.cores, setting.sla_ms, QUANTILE),
        knee_cores=knee_cores(times),
        sizes=tuple(sizes),
        chosen=knee_size(sizes),
        cheapest=cheapest_size(sizes),
    )


def attempt(case: TrialCase, seed: int) -> dict[tuple[int, int], HipsResult]:
    """Simulate each of them, by size and threshold, under the same bursts.

    Nothing starts cold: how often that happens depends on the bursts before all else.
    """
    period_ns = period_of(case.setting.sla_ms)
    bursts = (BurstPhase(case.wave_count * period_ns, is_bursty=True),)
    arrivals = waves(wave_sizes(bursts, period_ns, seed), period_ns)
    found = {}
    for memory_mb in case.memory_mb:
        scene = build_scene(case.setting, HipsEnvironment(memory_mb, cold_start_ms=0.0))
        for threshold in case.thresholds:
            way = HipsPolicyCase("threshold", "threshold", (("threshold", threshold),))
            found[memory_mb, threshold] = summarise(*observe(scene, way, arrivals, seed))
    return found


def best_threshold(runs: Mapping[int, Sequence[HipsResult]]) -> int:
    """Return the cheapest threshold with enough in time, else the one with most in time."""
    attainment = {key: fmean(run.attainment for run in each) for key, each in runs.items()}
    cost = {key: fmean(run.usd_per_1000 for run in each) for key, each in runs.items()}
    enough = [key for key in runs if attainment[key] >= QUANTILE]
    if enough:
        return min(enough, key=cost.__getitem__)
    return max(runs, key=attainment.__getitem__)


# The policies that are compared: labels, settings, and the machines that each may use.


DEDICATED: Final = "dedicated_only"
AUTOSCALE: Final = "autoscale"
NIMBLE: Final = "autoscale, nimble"
SERVERLESS: Final = "serverless_only"
THRESHOLD: Final = "threshold"
WARM: Final = "threshold, kept warm"
HEADGATE: Final = "headgate"
_INSTANCES_MAX: Final = 4  # as many as hold 20 requests at once within the paper's objectives


def cases_of(setting: Setting, plan: PaperPlan, course: tuple[BurstPhase, ...]) -> list[HipsCase]:
    """Every policy, with the plan's threshold where it has one."""
    threshold = ("threshold", plan.threshold)
    target = ("target", _target(setting, plan))
    quickly = (("plan_every_ns", 10 * SECOND_NS), ("out_after", 1), ("out_cooldown_ns", 0))
    one = plan.world
    several = replace(one, instances_max=_INSTANCES_MAX)
    return [
        HipsCase(setting, way, world, course)
        for way, world in (
            (HipsPolicyCase(DEDICATED, "dedicated_only"), one),
            (HipsPolicyCase(AUTOSCALE, "autoscale", (target,)), several),
            (HipsPolicyCase(NIMBLE, "autoscale", (target, *quickly)), several),
            (HipsPolicyCase(SERVERLESS, "serverless_only"), one),
            (HipsPolicyCase(THRESHOLD, "threshold", (threshold,)), one),
            (
                HipsPolicyCase(
                    WARM, "threshold", (threshold, ("warm_instances", MOST - plan.threshold))
                ),
                one,
            ),
            (HipsPolicyCase(HEADGATE, "headgate"), one),
        )
    ]


def _target(setting: Setting, plan: PaperPlan) -> float:
    """Return what share of its time an instance is to be busy, so that peaks are in time.

    It may get as many requests per wave as the threshold says when there are most of them, and
    the mean, by which the autoscaler goes, is below that in proportion.
    """
    busy_ms = characterise(setting.source).time_ms(setting.cores, max(1, plan.threshold))
    mean_over_most = (LEAST + MOST) / 2 / MOST
    return busy_ms * 1e6 / period_of(setting.sla_ms) * mean_over_most
