"""Pipelines and their objectives, from the application file to the core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Final

from headgate.app.entry import Entry
from headgate.app.spec import AppSpec, PipelineSpec, SloSpec, StageSpec
from headgate.core.errors import ConfigError
from headgate.core.model import Function, Pipeline, Slo, Stage
from headgate.core.records import STAGES_MAX

_STAGES_MAX: Final = STAGES_MAX - 1


def build_pipelines(
    spec: AppSpec, functions: Sequence[Function], where: str
) -> tuple[Pipeline, ...]:
    """Return the pipelines, numbered in the order of the file."""
    specs = spec.pipelines or {f.name: PipelineSpec(function=f.name) for f in functions}
    default = Slo() if spec.slo is None else _build_slo(Entry(spec.slo, where, "slo"))
    by_name = {function.name: function for function in functions}
    pipelines: list[Pipeline] = []
    for id, (name, body) in enumerate(specs.items()):
        entry = Entry(body, where, f"pipelines.{name}")
        slo = default if body.slo is None else _build_slo(Entry(body.slo, where, entry.path("slo")))
        pipelines.append(Pipeline(id, name, _build_stages(entry, by_name), slo))
    return tuple(pipelines)


def _build_slo(entry: Entry[SloSpec]) -> Slo:
    spec = entry.spec
    quantile = entry.fraction("quantile")
    if not 0 < quantile < 1:
        raise entry.error("quantile", "is a certainty", allowed="above 0% and below 100%")
    return Slo(
        latency_ns=entry.duration_or_never_ns("latency"),
        quantile=quantile,
        burst=spec.burst,
        gives_up=spec.gives_up,
    )


def _build_stages(
    entry: Entry[PipelineSpec], functions: Mapping[str, Function]
) -> tuple[Stage, ...]:
    spec = entry.spec
    if (spec.function is None) == (not spec.stages):
        allowed = "either function or stages"
        raise ConfigError(
            "must say what to run, once",
            where=entry.where,
            key=entry.key,
            allowed=allowed,
        )
    if not spec.stages:
        return (Stage(functions[entry.one_of("function", "function", functions)]),)
    if len(spec.stages) > _STAGES_MAX:
        problem = f"has {len(spec.stages)} stages"
        raise entry.error("stages", problem, allowed=f"at most {_STAGES_MAX}")
    names = list(spec.stages)
    stages = tuple(
        _build_stage(Entry(body, entry.where, f"{entry.path('stages')}.{name}"), functions, names)
        for name, body in spec.stages.items()
    )
    _refuse_cycle(entry, spec.stages)
    return stages


def _build_stage(
    entry: Entry[StageSpec], functions: Mapping[str, Function], names: list[str]
) -> Stage:
    spec = entry.spec
    probability = entry.fraction("unsure_probability")
    if spec.only_if_unsure and not spec.after:
        raise entry.error(
            "only_if_unsure", "there is none before it to be unsure", allowed="a stage with `after`"
        )
    if not spec.only_if_unsure and probability != 1:
        raise entry.error(
            "unsure_probability", "it runs always", allowed="a stage with `only_if_unsure: true`"
        )
    return Stage(
        function=functions[entry.one_of("function", "function", functions)],
        after=tuple(names.index(before) for before in entry.some_of("stage", "after", names)),
        only_if_unsure=spec.only_if_unsure,
        unsure_probability=probability,
    )


def _refuse_cycle(entry: Entry[PipelineSpec], stages: Mapping[str, StageSpec]) -> None:
    try:
        TopologicalSorter({name: body.after for name, body in stages.items()}).prepare()
    except CycleError as error:
        problem = f"wait for each other: {' -> '.join(error.args[1])}"
        raise entry.error("stages", problem, allowed="no cycles") from None
