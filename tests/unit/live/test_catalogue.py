"""Stages that do not fit are found before anybody asks; what is published is always given."""

from __future__ import annotations

import pytest

from headgate.config import from_spec
from headgate.core.errors import ConfigError
from headgate.functions.tensor import Signature, read_specs
from headgate.live.call import ServedModel
from headgate.live.ipc.messages import MeasuredFunction
from headgate.live.model_registry import catalogue

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
    facts = {}
    for name, (inputs, outputs) in signatures.items():
        signature = Signature(read_specs(inputs, name), read_specs(outputs, name))
        facts[name] = MeasuredFunction(name, signature, (), 0, 0)
    return catalogue(from_spec(spec, "here").app, facts)["p"]


def line_of(stages: dict[str, object], **signatures: tuple[dict[str, str], dict[str, str]]) -> str:
    with pytest.raises(ConfigError) as caught:
        model(stages, **signatures)
    return str(caught.value)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"y": "FP64[-1]"}, "stage 1 (a) gives FP64[-1]"),
        ({"y": "FP32[-1, 3]"}, "stage 1 (a) gives FP32[-1, 3]"),
        ({"z": "FP32[-1]"}, "none before it gives that"),
    ],
)
def test_a_stage_must_get_what_it_takes(given: dict[str, str], problem: str) -> None:
    line = line_of({"a": FIRST, "b": THEN}, a=({}, given), b=({"y": "FP32[-1]"}, {}))
    assert line == f"pipelines.p: stage 2 (b) takes 'y' as FP32[-1]; {problem}"


def test_what_may_fit_is_left_to_each_request() -> None:
    stages: dict[str, object] = {"a": FIRST, "b": THEN}
    taken = {"y": "FP32[-1, 3]"}
    assert model(stages, a=({}, {"y": "FP32[-1, -1]", "z": "BOOL[-1]"}), b=(taken, {}))
    assert model(stages, a=({}, {}), b=(taken, {}))
    assert model(stages, a=({}, {"z": "BOOL[-1]"}), b=({}, {}))


def test_an_input_must_come_once_and_whatever_happens() -> None:
    y = {"y": "FP32[-1]"}
    join = {"function": "c", "after": ["a", "b"]}
    line = line_of({"a": FIRST, "b": THEN, "c": join}, a=({}, y), b=({}, y), c=(y, {}))
    assert line == "pipelines.p: stage 3 (c) takes 'y' as FP32[-1]; several stages give it"
    late = {"function": "c", "after": ["b"]}
    stages: dict[str, object] = {"a": FIRST, "b": IF_UNSURE, "c": late}
    line = line_of(stages, a=({}, y), b=({}, y), c=(y, {}))
    assert line.endswith("takes 'y' as FP32[-1]; stage 2 (b) does not always run")
    stages["c"] = {**late, "only_if_unsure": True}
    assert model(stages, a=({}, y), b=({}, y), c=(y, {}))


def test_first_stages_must_be_able_to_read_the_same_request() -> None:
    stages: dict[str, object] = {"a": FIRST, "b": {"function": "b"}}
    line = line_of(stages, a=({"x": "FP32[-1]"}, {}), b=({"x": "FP64[-1]"}, {}))
    assert line.startswith("pipelines.p: stage 2 (b) takes 'x' as FP64[-1], ")
    both = model(stages, a=({"x": "FP32[-1, 3]"}, {}), b=({"x": "FP32[-1, -1]"}, {}))
    assert both.inputs == read_specs({"x": "FP32[-1, 3]"}, "")


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
def test_a_cascade_publishes_what_it_gives_wherever_it_ends(
    first: dict[str, str], second: dict[str, str], published: dict[str, str]
) -> None:
    cascade = model({"a": FIRST, "b": IF_UNSURE}, a=({}, first), b=({}, second))
    assert cascade.outputs == read_specs(published, "")
