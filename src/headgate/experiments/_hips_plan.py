"""What characterisation alone says of a setting, and what trying everything says of that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from headgate.app.prices import read_prices
from headgate.core.offers import MIB
from headgate.experiments._hips_run import Measured, Way, condense, observe
from headgate.experiments._hips_workload import MOST, Phase, period_of, wave_sizes, waves
from headgate.experiments._hips_world import (
    QUANTILE,
    Setting,
    World,
    build_scene,
    characterise,
    platform_of,
)
from headgate.planning.sizing import (
    SizeRow,
    cheapest_size,
    function_sizes,
    knee_cores,
    knee_size,
    largest_concurrency,
)

THRESHOLDS: Final = range(1, MOST + 1)


@dataclass(frozen=True, slots=True)
class Plan:
    """The paper's two decisions, from response times measured beforehand."""

    threshold: int
    knee_cores: float
    sizes: tuple[SizeRow, ...]  # of functions, smallest first
    chosen: SizeRow | None  # the smallest that is about as fast as any; None: none is in time
    cheapest: SizeRow | None  # of those in time

    @property
    def world(self) -> World:
        """With the size chosen, or the largest where none will do."""
        return World((self.chosen or self.sizes[-1]).memory_bytes // MIB)


@dataclass(frozen=True, slots=True)
class TrialCase:
    """Every threshold, or every size, in so many waves of bursts: plain values, for workers."""

    setting: Setting
    memory_mb: tuple[int, ...]
    thresholds: tuple[int, ...]
    wave_count: int


def plan_of(setting: Setting) -> Plan:
    """Decide, from the characterisation alone."""
    times = characterise(setting.source)
    platform = platform_of(read_prices(), World(0))
    sizes = function_sizes(times, platform, setting.sla_ms, QUANTILE)
    return Plan(
        threshold=largest_concurrency(times, setting.cores, setting.sla_ms, QUANTILE),
        knee_cores=knee_cores(times),
        sizes=tuple(sizes),
        chosen=knee_size(sizes),
        cheapest=cheapest_size(sizes),
    )


def attempt(case: TrialCase, seed: int) -> dict[tuple[int, int], Measured]:
    """Simulate each of them, by size and threshold, under the same bursts.

    Nothing starts cold: how often that happens depends on the bursts before all else.
    """
    period_ns = period_of(case.setting.sla_ms)
    bursts = (Phase(case.wave_count * period_ns, is_bursty=True),)
    arrivals = waves(wave_sizes(bursts, period_ns, seed), period_ns)
    found = {}
    for memory_mb in case.memory_mb:
        scene = build_scene(case.setting, World(memory_mb, cold_start_ms=0.0))
        for threshold in case.thresholds:
            way = Way("threshold", "threshold", (("threshold", threshold),))
            found[memory_mb, threshold] = condense(*observe(scene, way, arrivals, seed))
    return found


def best_threshold(runs: Mapping[int, Sequence[Measured]]) -> int:
    """Return the cheapest threshold with enough in time, else the one with most in time."""
    attainment = {key: fmean(run.attainment for run in each) for key, each in runs.items()}
    cost = {key: fmean(run.usd_per_1000 for run in each) for key, each in runs.items()}
    enough = [key for key in runs if attainment[key] >= QUANTILE]
    if enough:
        return min(enough, key=cost.__getitem__)
    return max(runs, key=attainment.__getitem__)
