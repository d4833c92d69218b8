"""The catalogue: pipelines as clients see them, with what goes in and what comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headgate.core.errors import ConfigError
from headgate.core.model import App, Pipeline
from headgate.functions.specs import fits, write_spec
from headgate.functions.tensor import Signature, TensorSpec
from headgate.live.messages import FunctionFacts
from headgate.live.serving import Model


def catalogue(app: App, facts: Mapping[str, FunctionFacts]) -> dict[str, Model]:
    """Return the models by name. Facts are by name of the variant.

    Raises `ConfigError` if stages of a pipeline do not fit, as far as that is known.
    """
    return {pipeline.name: _model(pipeline, facts) for pipeline in app.pipelines}


def signatures(app: App, facts: Mapping[str, FunctionFacts]) -> list[Signature]:
    """Return the signature of each function, by id: that of its first variant."""
    return [facts[function.variants[0].name].signature for function in app.functions]


def _model(pipeline: Pipeline, facts: Mapping[str, FunctionFacts]) -> Model:
    stages = pipeline.stages
    found = [facts[stage.function.variants[0].name].signature for stage in stages]
    for index, stage in enumerate(stages):
        if stage.after:
            _check_stage(pipeline, index, found)
    return Model(
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
