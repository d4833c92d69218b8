"""Finds latency objectives that no placement can meet: below the critical path of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from headgate.config.options import AppConfig
from headgate.core.errors import ConfigError
from headgate.core.model import App, Function, Pipeline
from headgate.core.units import format_duration


def unreachable_objectives(config: AppConfig, where: str) -> list[ConfigError]:
    """Return an error for each objective that no placement can meet.

    A request takes at least as long as its critical path: each stage a batch of one on the fastest
    variant, plus the network delay both ways, on an idle and warm system. A stage that was never
    measured, or that does not always run, counts as zero.
    """
    times_ns = [_shortest_ns(config, function) for function in config.app.functions]
    errors = []
    for pipeline in config.app.pipelines:
        stages_ns = [0 if s.only_if_unsure else times_ns[s.function.id] for s in pipeline.stages]
        path = [
            (pipeline.stages[index].function.name, stages_ns[index])
            for index in pipeline.critical_path(stages_ns)
        ]
        if pipeline.slo.latency_ns < sum(time_ns for _, time_ns in path):
            errors.append(_error(config, pipeline, path, where))
    return errors


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
    config: AppConfig, pipeline: Pipeline, path: list[tuple[str, int]], where: str
) -> ConfigError:
    total = format_duration(sum(time_ns for _, time_ns in path))
    steps = " -> ".join(f"{name} {format_duration(time_ns)}" for name, time_ns in path if time_ns)
    sections = config.spec["pipelines"]
    section = sections.get(pipeline.name) if isinstance(sections, dict) else None
    has_own = isinstance(section, dict) and section.get("slo") is not None
    return ConfigError(
        f"is below the critical path of pipeline {pipeline.name}, {total}: {steps}",
        where=where,
        key=f"pipelines.{pipeline.name}.slo.latency" if has_own else "slo.latency",
        value=format_duration(pipeline.slo.latency_ns),
        allowed=f"{total} or longer",
    )
