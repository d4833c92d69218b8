"""Mismatched stages are found at start; published outputs are always present."""

from __future__ import annotations

import pytest

from headgate.config import from_spec
from headgate.core.errors import ConfigError
from headgate.functions.tensor import Signature, parse_specs
from headgate.live.call import ServedModel
from headgate.live.ipc.messages import MeasuredFunction
from headgate.live.model_registry import served_models

FIRST = {"function": "a"}
THEN = {"function": "b", "after": ["a"]}
IF_UNSURE = {**THEN, "only_if_unsure": True}


def model(
    stages: dict[str, object], **signatures: tuple[dict[str, str], dict[str, str]]
) -> ServedModel:
    spec = {
        "functions": {name: {"exec_time": "1ms"} for name in signatures},
        "pipelines": {"p": {"stages": stages}},
    }
    measured = {}
    for name, (inputs, outputs) in signatures.items():
        signature = Signature(parse_specs(inputs, name), parse_specs(outputs, name))
        measured[name] = MeasuredFunction(name, signature, (), 0, 0)
    return served_models(from_spec(spec, "here").app, measured)["p"]


def line_of(stages: dict[str, object], **signatures: tuple[dict[str, str], dict[str, str]]) -> str:
    with pytest.raises(ConfigError) as caught:
        model(stages, **signatures)
    return str(caught.value)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"y": "FP64[-1]"}, "stage a outputs FP64[-1]"),
        ({"y": "FP32[-1, 3]"}, "stage a outputs FP32[-1, 3]"),
        ({"z": "FP32[-1]"}, "no earlier stage outputs it"),
    ],
)
def test_stage_must_get_its_inputs(given: dict[str, str], problem: str) -> None:
    line = line_of({"a": FIRST, "b": THEN}, a=({}, given), b=({"y": "FP32[-1]"}, {}))
    assert line == f"pipelines.p: stage b takes 'y' as FP32[-1]; {problem}"


def test_unknown_sizes_are_checked_per_request() -> None:
    stages: dict[str, object] = {"a": FIRST, "b": THEN}
    taken = {"y": "FP32[-1, 3]"}
    assert model(stages, a=({}, {"y": "FP32[-1, -1]", "z": "BOOL[-1]"}), b=(taken, {}))
    assert model(stages, a=({}, {}), b=(taken, {}))
    assert model(stages, a=({}, {"z": "BOOL[-1]"}), b=({}, {}))


def test_input_may_come_from_a_stage_further_up_or_from_the_request() -> None:
    """The large model of a cascade takes what the small one took."""
    x, y = {"x": "FP32[-1]"}, {"y": "FP32[-1]"}
    z = {"z": "FP32[-1]", "unsure": "BOOL[-1]"}
    last = {"function": "c", "after": ["b"], "only_if_unsure": True}
    stages: dict[str, object] = {"a": FIRST, "b": THEN, "c": last}
    assert model(stages, a=(x, y), b=(y, z), c=(y, z))
    assert model(stages, a=(x, y), b=(y, z), c=(x, z))
    assert model(stages, a=(x, {}), b=(y, z), c=(y, z))  # whatever the first one outputs
    line = line_of(stages, a=(x, y), b=(y, z), c=({"x": "FP64[-1]"}, z))
    assert line == "pipelines.p: stage c takes 'x' as FP64[-1]; no earlier stage outputs it"
    line = line_of(stages, a=(x, {"y": "FP64[-1]"}), b=({}, z), c=(y, z))
    assert line.endswith("takes 'y' as FP32[-1]; stage a outputs FP64[-1]")
    # The nearest one counts, and two of which neither is nearer are one too many.
    assert model(stages, a=(x, z), b=(z, z), c=(z, y))
    beside: dict[str, object] = {
        "a": FIRST,
        "b": {"function": "b"},
        "c": {"function": "c", "after": ["a", "b"]},
        "d": {"function": "d", "after": ["c"]},
    }
    line = line_of(beside, a=(x, {**y}), b=(x, {**y}), c=({}, z), d=(y, z))
    assert line.endswith("takes 'y' as FP32[-1]; several stages output it")


def test_input_must_come_from_one_stage_that_always_runs() -> None:
    y = {"y": "FP32[-1]"}
    unsure = {**y, "unsure": "BOOL[-1]"}
    join = {"function": "c", "after": ["a", "b"]}
    line = line_of({"a": FIRST, "b": THEN, "c": join}, a=({}, y), b=({}, y), c=(y, {}))
    assert line == "pipelines.p: stage c takes 'y' as FP32[-1]; several stages output it"
    late = {"function": "c", "after": ["b"]}
    stages: dict[str, object] = {"a": FIRST, "b": IF_UNSURE, "c": late}
    line = line_of(stages, a=({}, unsure), b=({}, y), c=(y, {}))
    assert line.endswith("takes 'y' as FP32[-1]; stage b does not always run")
    stages["c"] = {**late, "only_if_unsure": True}
    assert model(stages, a=({}, unsure), b=({}, unsure), c=(y, {}))


@pytest.mark.parametrize("outputs", [{"y": "FP32[-1]"}, {"unsure": "FP32[-1]"}])
def test_a_stage_that_cannot_be_unsure_is_found_at_start(outputs: dict[str, str]) -> None:
    """The next stage of its cascade would never run."""
    stages: dict[str, object] = {"a": FIRST, "b": IF_UNSURE}
    line = line_of(stages, a=({}, outputs), b=({}, {}))
    problem = "runs only if unsure; stage a has no output 'unsure' of type BOOL"
    assert line == f"pipelines.p: stage b {problem}"
    assert model(stages, a=({}, {}), b=({}, {})), "which outputs there are is not known"


def test_first_stages_must_accept_the_same_request() -> None:
    stages: dict[str, object] = {"a": FIRST, "b": {"function": "b"}}
    line = line_of(stages, a=({"x": "FP32[-1]"}, {}), b=({"x": "FP64[-1]"}, {}))
    assert line.startswith("pipelines.p: stage b takes 'x' as FP64[-1], ")
    both = model(stages, a=({"x": "FP32[-1, 3]"}, {}), b=({"x": "FP32[-1, -1]"}, {}))
    assert both.inputs == parse_specs({"x": "FP32[-1, 3]"}, "")


@pytest.mark.parametrize(
    ("first", "second", "published"),
    [
        ({"y": "FP32[-1]"}, {"y": "FP32[-1]"}, {"y": "FP32[-1]"}),
        ({"y": "FP32[-1]", "unsure": "BOOL[-1]"}, {"y": "FP32[-1]"}, {"y": "FP32[-1]"}),
        ({"y": "FP32[-1]"}, {"y": "FP64[-1]"}, {}),
        ({"small": "FP32[-1]"}, {"large": "FP32[-1]"}, {}),
        ({}, {"y": "FP32[-1]"}, {}),
    ],
)
def test_cascade_publishes_outputs_common_to_all_ends(
    first: dict[str, str], second: dict[str, str], published: dict[str, str]
) -> None:
    unsure = {"unsure": "BOOL[-1]"} if first else {}  # without any they are not known
    cascade = model({"a": FIRST, "b": IF_UNSURE}, a=({}, {**unsure, **first}), b=({}, second))
    assert cascade.outputs == parse_specs(published, "")
