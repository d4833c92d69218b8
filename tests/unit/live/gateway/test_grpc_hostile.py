"""What is wrong with a message is the client's mistake, and costs no more than looking at it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from grpc import StatusCode
from grpc_rig import Rig, run
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.outcome import Outcome
from headgate.functions.tensor import ITEM_BYTES, Tensor
from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.elements import STRINGS_MAX
from headgate.live.gateway.grpc_messages import Messages
from headgate.live.gateway.grpc_status import trailers_of
from headgate.live.gateway.grpc_tensors import check_size, fill, tensors
from headgate.live.gateway.refusal import Refused

MESSAGES = Messages()
LIMITS = GatewayConfig(inputs_max=4, elements_max=100, dims_max=3)


def one_input(datatype: str, shape: tuple[int, ...], **contents: list[Any]) -> Any:
    request = MESSAGES["ModelInferRequest"](model_name="free")
    request.inputs.add(name="x", datatype=datatype, shape=shape, contents=contents or None)
    return request


def both() -> Any:
    request = one_input("FP32", (1,), fp32_contents=[1.0])
    request.raw_input_contents.append(bytes(4))
    return request


def raw(data: bytes, datatype: str = "FP32", copies: int = 1) -> Any:
    request = one_input(datatype, (1,))
    request.raw_input_contents.extend([data] * copies)
    return request


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (both, "typed contents"),
        (lambda: raw(bytes(3)), "3 bytes"),
        (lambda: raw(bytes(4), copies=2), "1 inputs and 2 raw"),
        (lambda: raw(b"\xff\xff\xff\xffa", "BYTES"), "length"),
        (lambda: one_input("FP16", (1,), fp32_contents=[1.0]), "raw contents only"),
        (lambda: one_input("FP32", (1,), fp64_contents=[1.0]), "is in fp32_contents"),
        (lambda: one_input("INT8", (1,), int_contents=[128]), "range of INT8"),
        (lambda: one_input("UINT16", (1,), uint_contents=[1 << 16]), "range of UINT16"),
        (lambda: one_input("FP32", (2,), fp32_contents=[1.0]), "asks for 2"),
        (lambda: one_input("FP32", (1,)), "asks for 1"),
        (lambda: one_input("FP32", (-1,)), "negative"),
        (lambda: one_input("FP32", (1 << 40, 1 << 40)), "more than 100"),
        (lambda: one_input("FP32", (1, 1, 1, 1)), "dimensions"),
        (lambda: one_input("FP31", (1,)), "unknown datatype"),
    ],
)
def test_bad_tensors_are_refused(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(Refused, match=says) as refusal:
        tensors(make(), LIMITS)
    assert refusal.value.status == 400


@pytest.mark.parametrize(
    ("datatype", "field", "elements"),
    [
        ("BOOL", "bool_contents", [True, False]),
        ("INT8", "int_contents", [-128, 127]),
        ("INT16", "int_contents", [-32768, 5]),
        ("INT32", "int_contents", [-(2**31), 5]),
        ("INT64", "int64_contents", [-(2**63), 5]),
        ("UINT8", "uint_contents", [0, 255]),
        ("UINT16", "uint_contents", [0, 65535]),
        ("UINT32", "uint_contents", [0, 2**32 - 1]),
        ("UINT64", "uint64_contents", [0, 2**64 - 1]),
        ("FP32", "fp32_contents", [0.5, float("inf")]),
        ("FP64", "fp64_contents", [0.1, -0.0]),
        ("BYTES", "bytes_contents", [b"", b"\xff"]),
    ],
)
def test_typed_contents_survive_the_way_there_and_back(
    datatype: str, field: str, elements: list[Any]
) -> None:
    (tensor,) = tensors(one_input(datatype, (2,), **{field: elements}), LIMITS)
    assert isinstance(tensor.data, memoryview)
    if datatype != "BYTES":
        assert len(tensor.data) == 2 * ITEM_BYTES[datatype]
    response = MESSAGES["ModelInferResponse"]()
    fill(response, [tensor], is_raw=False)
    assert list(getattr(response.outputs[0].contents, field)) == elements


def test_an_answer_with_one_16_bit_float_is_raw_throughout() -> None:
    response = MESSAGES["ModelInferResponse"]()
    both_kinds = [
        Tensor("a", "FP32", (1,), memoryview(bytes(4))),
        Tensor("b", "BF16", (1,), memoryview(b"ab")),
    ]
    fill(response, both_kinds, is_raw=False)
    assert list(response.raw_output_contents) == [bytes(4), b"ab"]
    assert not any(output.HasField("contents") for output in response.outputs)


def test_a_million_empty_strings_are_refused() -> None:
    """Each becomes an object of its own on the way to the function."""
    many = STRINGS_MAX + 1
    limits = GatewayConfig()
    raw_ones = raw(bytes(4 * many), "BYTES")
    raw_ones.inputs[0].shape[0] = many
    for request in (raw_ones, one_input("BYTES", (many,), bytes_contents=[b""] * many)):
        with pytest.raises(Refused, match="strings"):
            tensors(request, limits)


def test_a_million_empty_inputs_are_never_parsed() -> None:
    """Two bytes each on the wire; parsed they would take a hundred times that."""
    with pytest.raises(Refused, match="more than 4"):
        check_size(b"\x2a\x00" * 1_000_000, LIMITS)
    check_size(b"\x2a\x00" * 4, LIMITS)


@given(st.binary(max_size=200))
def test_no_bytes_break_the_look_ahead(message: bytes) -> None:
    """It ends, and what it lets pass the parser decides."""
    try:
        check_size(message, LIMITS)
    except Refused as refused:
        assert refused.status == 400


@given(st.data())
def test_a_mutated_request_is_served_or_refused(data: st.DataObject) -> None:
    message = bytearray(one_input("FP32", (2,), fp32_contents=[1, 2]).SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    try:
        request = MESSAGES["ModelInferRequest"].FromString(bytes(message))
    except Exception as error:
        assert type(error).__name__ == "DecodeError"
        return
    try:
        check_size(bytes(message), LIMITS)
        tensors(request, LIMITS)
    except Refused as refused:
        assert refused.status == 400


@pytest.mark.parametrize("message", [b"\xff", b"\x0a\x05ab", b"\x0a\x02\xff\xfe", b"\x2a" * 50])
def test_noise_is_an_invalid_argument(message: bytes) -> None:
    async def story(rig: Rig) -> None:
        code, _ = await rig.refused(message)
        assert code is StatusCode.INVALID_ARGUMENT

    run(story)


def test_whatever_a_client_or_a_policy_says_fits_into_an_answer() -> None:
    """Metadata is printable ASCII of bounded length; gRPC breaks the call over anything else."""

    async def story(rig: Rig) -> None:
        code, text = await rig.refused(rig.row(model_version="2" * 500))
        assert code is StatusCode.NOT_FOUND and len(text) < 200
        rig.serving.mode = "never"
        asking = asyncio.ensure_future(rig.refused())
        while not rig.serving.calls:
            await asyncio.sleep(0.01)
        (call,) = rig.serving.calls
        call.outcome, call.error, call.status = Outcome.FAILED, "é\n" * 100_000, 500
        call.on_answer(call)
        code, text = await asking
        assert code is StatusCode["INTERNAL"] and text.startswith("é\n")

    run(story)
    trailers = trailers_of(Refused(429, "", reason="zu spät\n\x00"))
    assert trailers == (("headgate-reason", "zu sp?t??"),)
