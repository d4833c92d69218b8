"""Outputs of stages: inputs of the stages after them, and the response."""

from __future__ import annotations

from weakref import ref

from headgate.core.model import App, Function, Pipeline, Pool, Profile, Slo, Stage, Variant
from headgate.functions.tensor import Signature, Tensor, TensorSpec
from headgate.live.call import Call, StageOutputs


def tensor(name: str) -> Tensor:
    return Tensor(name, "UINT8", (1,), memoryview(b"\1"))


def function(id: int) -> Function:
    variant = Variant(id, f"f{id}", id, (0,), Profile(exec_ns=(1,)))
    return Function(id, f"f{id}", (variant,))


def make_app(*after: tuple[int, ...]) -> App:
    functions = tuple(function(id) for id in range(len(after)))
    stages = tuple(Stage(f, after=a) for f, a in zip(functions, after, strict=True))
    return App(functions, (Pipeline(0, "p", stages, Slo()),), (Pool(0, "local"),))


def make_call(*names: str) -> Call:
    call = Call(0, [tensor(name) for name in names], 1, lambda _: None)
    call.request_id = 7
    return call


def names(tensors: list[Tensor]) -> list[str]:
    return [each.name for each in tensors]


def test_outputs_are_the_inputs_of_the_next_stage_and_the_last_are_the_response() -> None:
    outputs = StageOutputs(make_app((), (0,)), [Signature(), Signature()])
    call = make_call("x")
    assert names(outputs.inputs(call, 0)) == ["x"]
    outputs.store(call, 0, [tensor("y")])
    assert names(outputs.inputs(call, 1)) == ["y"]
    outputs.store(call, 1, [tensor("z")])
    outputs.end(call)
    assert names(call.outputs) == ["z"]


def test_where_a_cascade_ends_its_outputs_are_the_response() -> None:
    outputs = StageOutputs(make_app((), (0,)), [Signature(), Signature()])
    call = make_call("x")
    outputs.store(call, 0, [tensor("y")])
    outputs.end(call)
    assert names(call.outputs) == ["y"]


def test_outputs_that_no_stage_has_consumed_are_the_response() -> None:
    outputs = StageOutputs(make_app((), (0,), (0,)), [Signature()] * 3)
    call = make_call("x")
    outputs.store(call, 0, [tensor("y")])
    outputs.store(call, 1, [tensor("a")])
    outputs.store(call, 2, [tensor("b")])
    outputs.end(call)
    assert names(call.outputs) == ["a", "b"]


def test_a_stage_gets_only_the_inputs_of_its_signature() -> None:
    wanted = Signature(inputs=(TensorSpec("b", "UINT8", (-1,)),))
    outputs = StageOutputs(make_app(()), [wanted])
    assert names(outputs.inputs(make_call("a", "b"), 0)) == ["b"]


def test_outputs_are_dropped_with_their_request() -> None:
    outputs = StageOutputs(make_app((), (0,)), [Signature(), Signature()])
    call = make_call("x")
    outputs.store(call, 0, [tensor("y")])
    outputs.end(call)
    assert not outputs._by_request


def test_outputs_are_dropped_when_every_stage_that_reads_them_is_done() -> None:
    """Both stages of an ensemble read them; then they would only occupy memory."""
    outputs = StageOutputs(make_app((), (0,), (0,)), [Signature()] * 3)
    call = make_call("x")
    read = tensor("y")
    is_gone = ref(read.data)
    outputs.store(call, 0, [read])
    del read
    outputs.store(call, 1, [tensor("a")])
    assert is_gone() is not None
    assert names(outputs.inputs(call, 2)) == ["y"]
    outputs.store(call, 2, [tensor("b")])
    assert is_gone() is None
    outputs.end(call)
    assert names(call.outputs) == ["a", "b"]


def test_only_what_another_stage_reads_stays_on_the_node() -> None:
    functions = tuple(function(id) for id in range(3))
    stages = (
        Stage(functions[0]),
        Stage(functions[1], after=(0,)),
        Stage(functions[2], after=(1,), only_if_unsure=True),
    )
    app = App(functions, (Pipeline(0, "p", stages, Slo()),), (Pool(0, "local"),))
    outputs, call = StageOutputs(app, [Signature()] * 3), make_call("x")
    assert outputs.is_read_later(call, 0, is_unsure=False)
    assert outputs.is_read_later(call, 1, is_unsure=True)
    assert not outputs.is_read_later(call, 1, is_unsure=False)  # the cascade ends: the response
    assert not outputs.is_read_later(call, 2, is_unsure=True)


def test_an_input_comes_from_the_nearest_stage_that_outputs_it_or_from_the_request() -> None:
    """Three stages in a row: the last takes what the first output, and an input of the request."""
    wanted = ("x", "y", "z")
    last = Signature(inputs=tuple(TensorSpec(name, "UINT8", (-1,)) for name in wanted))
    outputs = StageOutputs(make_app((), (0,), (1,)), [Signature(), Signature(), last])
    call = make_call("x", "w")
    first = tensor("y")
    outputs.store(call, 0, [first, tensor("z")])
    second = tensor("z")
    outputs.store(call, 1, [second])
    found = {each.name: each for each in outputs.inputs(call, 2)}
    assert found == {"x": call.inputs[0], "y": first, "z": second}
    outputs.store(call, 2, [tensor("a")])
    assert outputs._by_request[call.request_id][0] == []
    outputs.end(call)
    assert names(call.outputs) == ["a"]
