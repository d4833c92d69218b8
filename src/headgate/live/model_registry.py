"""Served models: the signatures of pipelines, and profiles measured by workers.

Pipelines are checked for matching stages and shown to clients with their inputs and outputs. What
workers measured is written into the application spec: the Scheduler is built from plain data that
its event log can carry, and a replay needs no worker. Variants that run only on remote pools are
inspected by the gateway, because no local worker does.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, final

from msgspec.structs import replace

from headgate.config import AppConfig, from_spec
from headgate.config.build import variant_spec
from headgate.config.options import unreachable_objectives
from headgate.core.errors import ConfigError, error_text
from headgate.core.model import App, Pipeline, Variant
from headgate.functions.tensor import UNSURE, Signature, TensorSpec, format_spec, shapes_match
from headgate.live.call import ServedModel, stages_before
from headgate.live.ipc.messages import MeasuredFunction

_LOG: Final = logging.getLogger(__name__)
# From a gateway to a worker on its machine, one way: from dispatch to result, the shortest of 2,662
# batches that do nothing took 106 µs. Without it, whether large batches of a function that takes
# some microseconds are worth it would depend on the noise of the measurement.
LOCAL_DELAY: Final = "50us"
# Which functions must load before a gateway starts to serve. First start: at least one, which is
# better than none. Reload: all, because the running configuration is better than one with a broken
# function. Restart: none.
LoadsNeeded = Literal["all", "one", "none"]


def served_models(app: App, measured: Mapping[str, MeasuredFunction]) -> dict[str, ServedModel]:
    """Return the served models by name. `measured` is by name of the variant.

    Raises `ConfigError` if the known signatures of the stages of a pipeline do not match.
    """
    return {pipeline.name: _model(pipeline, measured) for pipeline in app.pipelines}


def signatures(app: App, measured: Mapping[str, MeasuredFunction]) -> list[Signature]:
    """Return the signature of each function, by id: that of its first variant."""
    return [measured[function.variants[0].name].signature for function in app.functions]


@final
class LoadsFailed(ConfigError):
    """Too few functions can be loaded to start serving."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def check_loads(app: App, measured: Mapping[str, MeasuredFunction], needed: LoadsNeeded) -> None:
    """Check that enough functions can be loaded. Raises `LoadsFailed`, with one line per failure.

    A function counts as served if at least one of its variants loads or is remote.
    """
    failures = [
        f"{variant.name}: cannot be loaded: {measured[variant.name].problem}"
        for variant in app.variants
        if measured[variant.name].problem
    ]
    is_served = [
        any(not measured[variant.name].problem for variant in function.variants)
        for function in app.functions
    ]
    if (needed == "all" and failures) or (needed == "one" and not any(is_served)):
        raise LoadsFailed(failures)


def with_measured_profiles(
    config: AppConfig, measured: Mapping[str, MeasuredFunction], where: str
) -> AppConfig:
    """Return the application with measured times and sizes where none were declared.

    Local pools without a `network_delay` get that between processes.
    """
    spec: dict[str, Any] = copy.deepcopy(dict(config.spec))
    spec["pools"] = spec["pools"] or {"local": {"tier": "dedicated"}}
    for pool, provider in zip(config.app.pools, config.providers, strict=True):
        section = spec["pools"][pool.name]
        if provider is not None and provider.kind == "local" and not section.get("network_delay"):
            section["network_delay"] = LOCAL_DELAY
    for variant in config.app.variants:
        source = config.sources[variant.id]
        function = measured.get(variant.name)
        if source is not None and function is not None:
            section = variant_spec(spec, variant.name)
            if source.is_measured:
                # If the measurement failed, the assumed profile is written: the spec is complete.
                times_ns = function.exec_ns or variant.profile.exec_ns
                section["exec_time"] = [f"{time_ns}ns" for time_ns in times_ns]
                section["exec_time_estimated"] = True
            if section["cold_start"] == 0:
                section["cold_start"] = f"{function.start_ns}ns"
            if section["memory"] == "0B":
                section["memory"] = f"{function.memory_bytes}B"
    complete = from_spec(spec, where)
    for problem in unreachable_objectives(complete, where):
        _LOG.warning("%s", problem)
    return complete


def remote_only(config: AppConfig) -> list[Variant]:
    """Return the variants that run neither on a local node nor on Ray."""
    return [
        variant
        for variant in config.app.variants
        if _kinds(config, variant).isdisjoint(("local", "ray"))
    ]


def measured_on_ray(config: AppConfig) -> list[Variant]:
    """Return the variants that run on Ray and on no local node."""
    all_kinds = ((variant, _kinds(config, variant)) for variant in config.app.variants)
    return [variant for variant, kinds in all_kinds if "ray" in kinds and "local" not in kinds]


def _kinds(config: AppConfig, variant: Variant) -> set[str]:
    """Return the kinds of the providers of a variant's pools."""
    providers = (config.providers[pool_id] for pool_id in variant.pool_ids)
    return {provider.kind for provider in providers if provider is not None}


def inspect_remote_only(config: AppConfig, base: str) -> list[MeasuredFunction]:
    """Return the signatures of remote-only variants, from the files of the application.

    A variant without a file, or whose file cannot be read here, has an empty signature and accepts
    any input.
    """
    return [_inspect(config, variant, base) for variant in remote_only(config)]


def with_siblings(
    config: AppConfig, measured: Mapping[str, MeasuredFunction]
) -> dict[str, MeasuredFunction]:
    """Return `measured` with unknown signatures of remote-only variants copied from siblings."""
    filled = dict(measured)
    for variant in remote_only(config):
        function = measured[variant.name]
        siblings = config.app.functions[variant.function_id].variants
        known = [measured[sibling.name].signature for sibling in siblings]
        if function.signature == Signature():
            signature = next((s for s in known if s != Signature()), Signature())
            filled[variant.name] = replace(function, signature=signature)
    return filled


def _model(pipeline: Pipeline, measured: Mapping[str, MeasuredFunction]) -> ServedModel:
    stages = pipeline.stages
    signatures = [measured[stage.function.variants[0].name].signature for stage in stages]
    for index, stage in enumerate(stages):
        if stage.after:
            _check_stage(pipeline, index, signatures)
        if stage.only_if_unsure:
            _check_condition(pipeline, index, signatures)
    return ServedModel(
        name=pipeline.name,
        pipeline=pipeline,
        platform=signatures[0].platform if len(stages) == 1 else "headgate_pipeline",
        inputs=_inputs(pipeline, signatures),
        outputs=_outputs(pipeline, signatures),
        batches=all(s.batches for s in signatures),
        items_max=min(v.profile.items_max for stage in stages for v in stage.function.variants),
        is_idempotent=all(stage.function.is_idempotent for stage in stages),
    )


def _inputs(pipeline: Pipeline, signatures: Sequence[Signature]) -> tuple[TensorSpec, ...]:
    """Return the inputs of all first stages; empty (unknown) if one checks its inputs itself."""
    first = [index for index, stage in enumerate(pipeline.stages) if not stage.after]
    if any(not signatures[index].inputs for index in first):
        return ()
    inputs: dict[str, TensorSpec] = {}
    for index in first:
        for spec in signatures[index].inputs:
            other = inputs.get(spec.name, spec)
            if spec.datatype != other.datatype or not shapes_match(spec.shape, other.shape):
                both = f"{format_spec(spec)}, another first stage {format_spec(other)}"
                raise _mismatch(pipeline, index, f"takes {spec.name!r} as {both}")
            # -1, any size, is smaller than every size
            shape = tuple(map(max, spec.shape, other.shape))
            inputs[spec.name] = TensorSpec(spec.name, spec.datatype, shape)
    return tuple(inputs.values())


def _outputs(pipeline: Pipeline, signatures: Sequence[Signature]) -> tuple[TensorSpec, ...]:
    """Return the outputs of the last stages; for a cascade, those given wherever it ends."""
    stages = pipeline.stages
    last = [
        signatures[index].outputs
        for index, after in enumerate(pipeline.successors)
        if all(stages[next].only_if_unsure for next in after)
    ]
    if any(not outputs for outputs in last):
        return ()
    if any(stage.only_if_unsure for stage in stages):
        return tuple(spec for spec in last[0] if all(spec in outputs for outputs in last))
    return tuple({spec.name: spec for outputs in last for spec in outputs}.values())


def _check_stage(pipeline: Pipeline, index: int, signatures: Sequence[Signature]) -> None:
    """Check that each input of a stage comes from exactly one earlier stage that always runs, or
    from the request.
    """
    stages = pipeline.stages
    stage = stages[index]
    if any(not signatures[before].outputs for before in stage.after):
        return
    earlier = stages_before(pipeline, index)
    is_all_known = all(signatures[before].outputs for before in earlier)
    for wanted in signatures[index].inputs:
        takes = f"takes {wanted.name!r} as {format_spec(wanted)}"
        producers = _producers(stage.after, wanted.name, signatures)
        if not producers:
            producers = _producers(earlier, wanted.name, signatures)
            hidden = {each for before, _ in producers for each in stages_before(pipeline, before)}
            producers = [each for each in producers if each[0] not in hidden]
        if not producers and (not is_all_known or _is_in_request(pipeline, wanted, signatures)):
            continue
        if len(producers) != 1:
            problem = "several stages output it" if producers else "no earlier stage outputs it"
            raise _mismatch(pipeline, index, f"{takes}; {problem}")
        ((before, spec),) = producers
        if spec.datatype != wanted.datatype or not shapes_match(spec.shape, wanted.shape):
            problem = f"{_stage(pipeline, before)} outputs {format_spec(spec)}"
            raise _mismatch(pipeline, index, f"{takes}; {problem}")
        if stages[before].only_if_unsure and not stage.only_if_unsure:
            problem = f"{_stage(pipeline, before)} does not always run"
            raise _mismatch(pipeline, index, f"{takes}; {problem}")


def _check_condition(pipeline: Pipeline, index: int, signatures: Sequence[Signature]) -> None:
    """Check that the stages right before one that runs only if they are unsure can be: without
    their output it would never run, and nobody would notice.
    """
    for before in pipeline.stages[index].after:
        outputs = signatures[before].outputs
        if outputs and not any(s.name == UNSURE and s.datatype == "BOOL" for s in outputs):
            problem = f"{_stage(pipeline, before)} has no output {UNSURE!r} of type BOOL"
            raise _mismatch(pipeline, index, f"runs only if unsure; {problem}")


def _producers(
    stages: Sequence[int], name: str, signatures: Sequence[Signature]
) -> list[tuple[int, TensorSpec]]:
    return [(at, spec) for at in stages for spec in signatures[at].outputs if spec.name == name]


def _is_in_request(pipeline: Pipeline, wanted: TensorSpec, signatures: Sequence[Signature]) -> bool:
    """Whether a first stage takes the tensor, so that every request has it."""
    return any(
        spec.name == wanted.name
        and spec.datatype == wanted.datatype
        and shapes_match(spec.shape, wanted.shape)
        for stage, signature in zip(pipeline.stages, signatures, strict=True)
        if not stage.after
        for spec in signature.inputs
    )


def _mismatch(pipeline: Pipeline, index: int, problem: str) -> ConfigError:
    return ConfigError(f"{_stage(pipeline, index)} {problem}", key=f"pipelines.{pipeline.name}")


def _stage(pipeline: Pipeline, index: int) -> str:
    return f"stage {pipeline.stages[index].name}"


def _inspect(config: AppConfig, variant: Variant, base: str) -> MeasuredFunction:
    signature = Signature()
    source = config.sources[variant.id]
    if source is not None:
        # Imported here because only remote-only functions need them.
        from headgate.functions.loader import build_model  # noqa: PLC0415
        from headgate.functions.model import signature_of  # noqa: PLC0415

        try:
            model = build_model(source, base, variant.name)
            if source.model is not None:  # an ONNX file contains its signature
                model.load()
            signature = signature_of(model)
        except Exception as error:  # a model may raise anything
            problem = error_text(error)
            _LOG.warning(
                "%s runs on remote pools only, and its signature cannot be read: %s",
                variant.name,
                problem,
            )
    return MeasuredFunction(variant.name, signature, (), 0, 0)
