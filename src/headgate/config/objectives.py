"""Finds latency objectives that no placement can meet: below the critical path of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headgate.config.options import AppConfig
from headgate.core.clock import NEVER_NS
from headgate.core.errors import ConfigError
from headgate.core.model import App, Function, Pipeline
from headgate.core.units import format_duration


@dataclass(frozen=True, slots=True)
class StageTime:
    """A stage of a pipeline, with its shortest possible time."""

    function: Function
    time_ns: int  # 0: not measured


def unreachable_objectives(config: AppConfig, where: str) -> list[ConfigError]:
    """Return an error for each objective that no placement can meet.

    A request takes at least as long as its critical path: each stage a batch of one on the fastest
    variant, plus the network delay both ways, on an idle and warm system. A stage that was never
    measured, or that does not always run, counts as zero.
    """
    times_ns = [_shortest_ns(config, function) for function in config.app.functions]
    errors = []
    for pipeline in config.app.pipelines:
        steps = critical_path(pipeline, times_ns)
        total_ns = sum(step.time_ns for step in steps)
        if pipeline.slo.latency_ns != NEVER_NS and pipeline.slo.latency_ns < total_ns:
            errors.append(_error(config, pipeline, steps, where))
    return errors


def critical_path(pipeline: Pipeline, times_ns: Sequence[int]) -> list[StageTime]:
    """Return the longest chain of stages, given the shortest time of each function.

    Stages may be in any order.
    """
    paths: dict[int, list[StageTime]] = {}

    def path_to(index: int) -> list[StageTime]:
        if index not in paths:
            stage = pipeline.stages[index]
            before = max(map(path_to, stage.after), key=_length_ns, default=[])
            time_ns = 0 if stage.only_if_unsure else times_ns[stage.function.id]
            paths[index] = [*before, StageTime(stage.function, time_ns)]
        return paths[index]

    return max(map(path_to, range(len(pipeline.stages))), key=_length_ns)


def _length_ns(path: list[StageTime]) -> int:
    return sum(step.time_ns for step in path)


def _shortest_ns(config: AppConfig, function: Function) -> int:
    """The shortest time of one item on any variant, network included, if the profiles are right."""
    app, simulation = config.app, config.simulation
    factor = simulation.scale[function.id]
    if simulation.observed:
        factor *= min(simulation.observed[function.id])
    return min(
        0
        if variant.name in config.unmeasured
        else int(variant.profile.exec_ns[0] * min(1.0, factor))
        + 2 * _network_ns(app, variant.pool_ids)
        for variant in function.variants
    )


def _network_ns(app: App, pool_ids: Sequence[int]) -> int:
    return min(app.pools[pool_id].network_ns for pool_id in pool_ids)


def _error(
    config: AppConfig, pipeline: Pipeline, steps: list[StageTime], where: str
) -> ConfigError:
    total = format_duration(_length_ns(steps))
    path = " -> ".join(
        f"{step.function.name} {format_duration(step.time_ns)}" for step in steps if step.time_ns
    )
    sections = config.spec["pipelines"]
    section = sections.get(pipeline.name) if isinstance(sections, dict) else None
    has_own = isinstance(section, dict) and section.get("slo") is not None
    return ConfigError(
        f"is below the critical path of pipeline {pipeline.name}, {total}: {path}",
        where=where,
        key=f"pipelines.{pipeline.name}.slo.latency" if has_own else "slo.latency",
        value=format_duration(pipeline.slo.latency_ns),
        allowed=f"{total} or longer",
    )
