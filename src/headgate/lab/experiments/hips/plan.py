"""The paper's plan from the characterisation, an exhaustive search, and the policies compared."""

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
    """The paper's two decisions, from response times measured in advance."""

    threshold: int
    knee_cores: float
    sizes: tuple[SizeRow, ...]  # of functions, smallest first
    selected: SizeRow | None  # the smallest about as fast as any; None: none meets the SLA
    cheapest: SizeRow | None  # of those that meet the SLA

    @property
    def environment(self) -> HipsEnvironment:
        """Environment with the selected function size, or the largest if none meets the SLA."""
        return HipsEnvironment((self.selected or self.sizes[-1]).memory_bytes // MIB)


@dataclass(frozen=True, slots=True)
class TrialCase:
    """Thresholds and sizes to run under `wave_count` waves of bursts. Picklable."""

    setting: Setting
    memory_mb: tuple[int, ...]
    thresholds: tuple[int, ...]
    wave_count: int


def plan_of(setting: Setting) -> PaperPlan:
    """Plan from the characterisation alone."""
    times = characterise(setting.source)
    platform = platform_of(read_prices(), HipsEnvironment(0))
    sizes = faas_sizes(times, platform, setting.sla_ms, QUANTILE)
    return PaperPlan(
        threshold=largest_concurrency(times, setting.cores, setting.sla_ms, QUANTILE),
        knee_cores=knee_cores(times),
        sizes=tuple(sizes),
        selected=knee_size(sizes),
        cheapest=cheapest_size(sizes),
    )


def run_trial(case: TrialCase, seed: int) -> dict[tuple[int, int], HipsResult]:
    """Simulate each size and threshold under the same bursts.

    Cold starts take no time: their number depends mostly on the bursts.
    """
    period_ns = period_of(case.setting.sla_ms)
    bursts = (BurstPhase(case.wave_count * period_ns, is_bursty=True),)
    arrivals = waves(wave_sizes(bursts, period_ns, seed), period_ns)
    results = {}
    for memory_mb in case.memory_mb:
        scene = build_scene(case.setting, HipsEnvironment(memory_mb, cold_start_ms=0.0))
        for threshold in case.thresholds:
            policy = HipsPolicyCase("threshold", "threshold", (("threshold", threshold),))
            results[memory_mb, threshold] = summarise(*observe(scene, policy, arrivals, seed))
    return results


def best_threshold(runs: Mapping[int, Sequence[HipsResult]]) -> int:
    """Return the cheapest threshold that reaches the quantile, else that of best attainment."""
    attainment = {key: fmean(run.attainment for run in each) for key, each in runs.items()}
    cost = {key: fmean(run.usd_per_1000 for run in each) for key, each in runs.items()}
    enough = [key for key in runs if attainment[key] >= QUANTILE]
    if enough:
        return min(enough, key=cost.__getitem__)
    return max(runs, key=attainment.__getitem__)


# Labels of the policies compared.
DEDICATED: Final = "dedicated_only"
AUTOSCALE: Final = "autoscale"
FAST_AUTOSCALE: Final = "autoscale, fast"
SERVERLESS: Final = "serverless_only"
THRESHOLD: Final = "threshold"
WARM: Final = "threshold, kept warm"
HEADGATE: Final = "headgate"
_INSTANCES_MAX: Final = 4  # enough for 20 concurrent requests within the paper's SLAs


def cases_of(setting: Setting, plan: PaperPlan, phases: tuple[BurstPhase, ...]) -> list[HipsCase]:
    """Return a case per policy, with the planned threshold for policies that have one."""
    threshold = ("threshold", plan.threshold)
    target = ("target", _target(setting, plan))
    quickly = (("plan_every_ns", 10 * SECOND_NS), ("out_after", 1), ("out_cooldown_ns", 0))
    one = plan.environment
    several = replace(one, instances_max=_INSTANCES_MAX)
    return [
        HipsCase(setting, policy, environment, phases)
        for policy, environment in (
            (HipsPolicyCase(DEDICATED, "dedicated_only"), one),
            (HipsPolicyCase(AUTOSCALE, "autoscale", (target,)), several),
            (HipsPolicyCase(FAST_AUTOSCALE, "autoscale", (target, *quickly)), several),
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
    """Return the target utilisation of the autoscaler at which the largest waves meet the SLA.

    In the largest wave an instance may get as many requests as the threshold. The autoscaler sees
    the mean, which is lower by the ratio of mean to largest wave.
    """
    busy_ms = characterise(setting.source).time_ms(setting.cores, max(1, plan.threshold))
    mean_over_most = (LEAST + MOST) / 2 / MOST
    return busy_ms * 1e6 / period_of(setting.sla_ms) * mean_over_most
