"""The catalogue: pipelines as clients see them, with what goes in and what comes out."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, final

from msgspec.structs import replace

from headgate.config import AppConfig, from_spec
from headgate.config.build import variant_spec
from headgate.config.objectives import unreachable_objectives
from headgate.config.providers import providers_of
from headgate.core.errors import ConfigError
from headgate.core.model import App, Pipeline, Variant
from headgate.functions.error_text import error_text
from headgate.functions.tensor import Signature, TensorSpec, fits, write_spec
from headgate.live.call import ServedModel
from headgate.live.ipc.messages import MeasuredFunction


def catalogue(app: App, facts: Mapping[str, MeasuredFunction]) -> dict[str, ServedModel]:
    """Return the models by name. Facts are by name of the variant.

    Raises `ConfigError` if stages of a pipeline do not fit, as far as that is known.
    """
    return {pipeline.name: _model(pipeline, facts) for pipeline in app.pipelines}


def signatures(app: App, facts: Mapping[str, MeasuredFunction]) -> list[Signature]:
    """Return the signature of each function, by id: that of its first variant."""
    return [facts[function.variants[0].name].signature for function in app.functions]


def _model(pipeline: Pipeline, facts: Mapping[str, MeasuredFunction]) -> ServedModel:
    stages = pipeline.stages
    found = [facts[stage.function.variants[0].name].signature for stage in stages]
    for index, stage in enumerate(stages):
        if stage.after:
            _check_stage(pipeline, index, found)
    return ServedModel(
        name=pipeline.name,
        pipeline=pipeline,
        platform=found[0].platform if len(stages) == 1 else "headgate_pipeline",
        inputs=_inputs(pipeline, found),
        outputs=_outputs(pipeline, found),
        batches=all(s.batches for s in found),
        items_max=min(v.profile.items_max for stage in stages for v in stage.function.variants),
    )


def _inputs(pipeline: Pipeline, found: Sequence[Signature]) -> tuple[TensorSpec, ...]:
    """What all the first stages take. If one looks at it by itself, nothing is known."""
    first = [index for index, stage in enumerate(pipeline.stages) if not stage.after]
    if any(not found[index].inputs for index in first):
        return ()
    inputs: dict[str, TensorSpec] = {}
    for index in first:
        for spec in found[index].inputs:
            other = inputs.get(spec.name, spec)
            if spec.datatype != other.datatype or not fits(spec.shape, other.shape):
                wants = f"{write_spec(spec)}, an other first stage {write_spec(other)}"
                raise _misfit(pipeline, index, f"takes {spec.name!r} as {wants}")
            shape = tuple(map(max, spec.shape, other.shape))  # -1 is the smallest: any size
            inputs[spec.name] = TensorSpec(spec.name, spec.datatype, shape)
    return tuple(inputs.values())


def _outputs(pipeline: Pipeline, found: Sequence[Signature]) -> tuple[TensorSpec, ...]:
    """What the last stages give; of a cascade, what it gives wherever it ends."""
    stages = pipeline.stages
    last = [
        found[index].outputs
        for index, after in enumerate(pipeline.successors)
        if all(stages[next].only_if_unsure for next in after)
    ]
    if any(not outputs for outputs in last):
        return ()
    if any(stage.only_if_unsure for stage in stages):
        return tuple(spec for spec in last[0] if all(spec in outputs for outputs in last))
    return tuple({spec.name: spec for outputs in last for spec in outputs}.values())


def _check_stage(pipeline: Pipeline, index: int, found: Sequence[Signature]) -> None:
    """See that a stage gets each of its inputs, once and whatever happens, from those before it."""
    stages = pipeline.stages
    stage = stages[index]
    if any(not found[before].outputs for before in stage.after):
        return
    for wanted in found[index].inputs:
        takes = f"takes {wanted.name!r} as {write_spec(wanted)}"
        given = [
            (before, spec)
            for before in stage.after
            for spec in found[before].outputs
            if spec.name == wanted.name
        ]
        if len(given) != 1:
            problem = "several stages give it" if given else "none before it gives that"
            raise _misfit(pipeline, index, f"{takes}; {problem}")
        ((before, spec),) = given
        if spec.datatype != wanted.datatype or not fits(spec.shape, wanted.shape):
            gives = f"{_stage(pipeline, before)} gives {write_spec(spec)}"
            raise _misfit(pipeline, index, f"{takes}; {gives}")
        if stages[before].only_if_unsure and not stage.only_if_unsure:
            problem = f"{_stage(pipeline, before)} does not always run"
            raise _misfit(pipeline, index, f"{takes}; {problem}")


def _misfit(pipeline: Pipeline, index: int, problem: str) -> ConfigError:
    return ConfigError(f"{_stage(pipeline, index)} {problem}", key=f"pipelines.{pipeline.name}")


def _stage(pipeline: Pipeline, index: int) -> str:
    return f"stage {index + 1} ({pipeline.stages[index].function.name})"


# What workers found out about functions, written into the application.
#
# So the Scheduler is built of plain data that its log can carry, and a replay needs no worker.


_LOG: Final = logging.getLogger(__name__)

# Which functions must be loaded for a gateway to begin. At the first start, one: the others are
# worth serving. After a change, all: what was served before is better. Later, none.
LoadsNeeded = Literal["all", "one", "none"]


@final
class LoadsFailed(ConfigError):
    """Functions cannot be loaded, and without them there is no use in serving."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def check_loads(app: App, facts: Mapping[str, MeasuredFunction], needed: LoadsNeeded) -> None:
    """See that enough functions can be loaded. Raises `LoadsFailed`, with a line for each.

    A function that has another build, or runs elsewhere as well, can be served.
    """
    broken = [
        f"{variant.name}: cannot be loaded: {facts[variant.name].problem}"
        for variant in app.variants
        if facts[variant.name].problem
    ]
    is_served = [
        any(not facts[variant.name].problem for variant in function.variants)
        for function in app.functions
    ]
    if (needed == "all" and broken) or (needed == "one" and not any(is_served)):
        raise LoadsFailed(broken)


def with_measured_profiles(
    loaded: AppConfig, facts: Mapping[str, MeasuredFunction], where: str
) -> AppConfig:
    """Return the application with measured times and sizes where none were declared."""
    spec = copy.deepcopy(loaded.spec)
    for variant in loaded.app.variants:
        source = loaded.sources[variant.id]
        found = facts.get(variant.name)
        if source is not None and found is not None:
            entry = variant_spec(spec, variant.name)
            if source.is_measured:
                # Where nothing could be measured, what is assumed is written down all the same.
                times_ns = found.exec_ns or variant.profile.exec_ns
                entry["exec_time"] = [f"{time_ns}ns" for time_ns in times_ns]
            _fill(entry, found)
    measured = from_spec(spec, where)
    for problem in unreachable_objectives(measured, where):
        _LOG.warning("%s", problem)
    return measured


def _fill(entry: dict[str, Any], facts: MeasuredFunction) -> None:
    if entry["cold_start"] == 0:
        entry["cold_start"] = f"{facts.start_ns}ns"
    if entry["memory"] == "0B":
        entry["memory"] = f"{facts.memory_bytes}B"


# What functions take and give that no worker of ours looks at, because they run elsewhere only.


def remote_only(loaded: AppConfig) -> list[Variant]:
    """Return the variants that run on no node of ours."""
    local = {
        id
        for id, provider in enumerate(providers_of(loaded))
        if provider and provider.kind == "local"
    }
    return [variant for variant in loaded.app.variants if local.isdisjoint(variant.pool_ids)]


def look_up(loaded: AppConfig, base: str) -> list[MeasuredFunction]:
    """Return what the application's own files say of variants that run elsewhere.

    Where there is no file, or it cannot be read here, nothing is known: anything is taken.
    """
    return [_facts(loaded, variant, base) for variant in remote_only(loaded)]


def with_siblings(
    loaded: AppConfig, facts: Mapping[str, MeasuredFunction]
) -> dict[str, MeasuredFunction]:
    """Return facts in which what runs elsewhere and is unknown looks as its siblings do."""
    filled = dict(facts)
    for variant in remote_only(loaded):
        found = facts[variant.name]
        siblings = loaded.app.functions[variant.function_id].variants
        known = [facts[sibling.name].signature for sibling in siblings]
        if found.signature == Signature():
            signature = next((s for s in known if s != Signature()), Signature())
            filled[variant.name] = replace(found, signature=signature)
    return filled


def _facts(loaded: AppConfig, variant: Variant, base: str) -> MeasuredFunction:
    signature = Signature()
    source = loaded.sources[variant.id]
    if source is not None:
        # Here, because they import NumPy, and a gateway usually gets by without.
        from headgate.functions.loader import build_model  # noqa: PLC0415
        from headgate.functions.model import signature_of  # noqa: PLC0415

        try:
            model = build_model(source, base, variant.name)
            if source.model is not None:  # what it takes stands in the file
                model.load()
            signature = signature_of(model)
        except Exception as error:  # whatever a model does
            problem = error_text(error)
            _LOG.warning("%s runs elsewhere, and is not understood here: %s", variant.name, problem)
    return MeasuredFunction(variant.name, signature, (), 0, 0)
