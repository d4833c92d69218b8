"""Objectives that nothing could ever meet: a latency below the fastest way through a pipeline."""

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
    """A stage of a pipeline, with the least that it takes."""

    function: Function
    time_ns: int  # 0: nobody knows


def unreachable_objectives(loaded: AppConfig, where: str) -> list[ConfigError]:
    """Return what is wrong with each objective that no placement can meet.

    A request takes no less than its longest chain of stages, each a batch of one on the fastest
    variant, there and back over the network, with nobody else around and nothing to start. What was
    never measured counts as nothing, and so does a stage that does not always run.
    """
    times_ns = [_least_ns(loaded, function) for function in loaded.app.functions]
    found = []
    for pipeline in loaded.app.pipelines:
        steps = fastest_path(pipeline, times_ns)
        total_ns = sum(step.time_ns for step in steps)
        if pipeline.slo.latency_ns != NEVER_NS and pipeline.slo.latency_ns < total_ns:
            found.append(_error(loaded, pipeline, steps, where))
    return found


def fastest_path(pipeline: Pipeline, times_ns: Sequence[int]) -> list[StageTime]:
    """Return the chain of stages that takes longest, given the least time of each function.

    Stages may stand in any order.
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


def _least_ns(loaded: AppConfig, function: Function) -> int:
    """The shortest time of one item wherever the function may run, if the profiles are right."""
    app, truth = loaded.app, loaded.simulation
    factor = truth.scale[function.id]
    if truth.observed:
        factor *= min(truth.observed[function.id])
    return min(
        0
        if variant.name in loaded.unmeasured
        else int(variant.profile.exec_ns[0] * min(1.0, factor))
        + 2 * _network_ns(app, variant.pool_ids)
        for variant in function.variants
    )


def _network_ns(app: App, pool_ids: Sequence[int]) -> int:
    return min(app.pools[pool_id].network_ns for pool_id in pool_ids)


def _error(
    loaded: AppConfig, pipeline: Pipeline, steps: list[StageTime], where: str
) -> ConfigError:
    total = format_duration(_length_ns(steps))
    shown = " -> ".join(
        f"{step.function.name} {format_duration(step.time_ns)}" for step in steps if step.time_ns
    )
    written = loaded.spec["pipelines"]
    own = written.get(pipeline.name) if isinstance(written, dict) else None
    has_own = isinstance(own, dict) and own.get("slo") is not None
    return ConfigError(
        f"is below the fastest path of pipeline {pipeline.name}, {total}: {shown}",
        where=where,
        key=f"pipelines.{pipeline.name}.slo.latency" if has_own else "slo.latency",
        value=format_duration(pipeline.slo.latency_ns),
        allowed=f"{total} or longer",
    )
