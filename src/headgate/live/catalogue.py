"""The catalogue: pipelines as clients see them, with what goes in and what comes out."""

from __future__ import annotations

from collections.abc import Mapping

from headgate.core.model import App, Pipeline
from headgate.functions.tensor import Signature, TensorSpec
from headgate.live.messages import FunctionFacts
from headgate.live.serving import Model


def catalogue(app: App, facts: Mapping[str, FunctionFacts]) -> dict[str, Model]:
    """Return the models by name. Facts are by name of the variant."""
    return {pipeline.name: _model(pipeline, facts) for pipeline in app.pipelines}


def signatures(app: App, facts: Mapping[str, FunctionFacts]) -> list[Signature]:
    """Return the signature of each function, by id: that of its first variant."""
    return [facts[function.variants[0].name].signature for function in app.functions]


def _model(pipeline: Pipeline, facts: Mapping[str, FunctionFacts]) -> Model:
    stages = pipeline.stages
    found = [facts[stage.function.variants[0].name].signature for stage in stages]
    first = [s for s, stage in zip(found, stages, strict=True) if not stage.after]
    last = [s for s, after in zip(found, pipeline.successors, strict=True) if not after]
    return Model(
        name=pipeline.name,
        pipeline=pipeline,
        platform=found[0].platform if len(stages) == 1 else "headgate_pipeline",
        inputs=_all([s.inputs for s in first]),
        outputs=_all([s.outputs for s in last]),
        batches=all(s.batches for s in found),
        items_max=min(v.profile.items_max for stage in stages for v in stage.function.variants),
    )


def _all(specs: list[tuple[TensorSpec, ...]]) -> tuple[TensorSpec, ...]:
    """Each name once. If one of them looks at whatever it is given by itself, nothing is known."""
    if any(not spec for spec in specs):
        return ()
    return tuple({tensor.name: tensor for spec in specs for tensor in spec}.values())
