"""Malformed messages over gRPC are the client's error, and cost little to refuse."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from grpc import StatusCode
from grpc_rig import Rig, run
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.states import Outcome, Settlement
from headgate.functions.tensor import ITEM_BYTES, Tensor
from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.errors import RequestError
from headgate.live.gateway.grpc.rpc import trailers_of
from headgate.live.gateway.grpc.server import Messages
from headgate.live.gateway.grpc.tensors import FIELDS_MAX, encode_response, split_message, tensors
from headgate.live.gateway.oip.json import STRINGS_MAX

MESSAGES = Messages()
LIMITS = GatewayConfig(inputs_max=4, elements_max=100, dims_max=3)


def one_input(datatype: str, shape: tuple[int, ...], **contents: list[Any]) -> Any:
    request = MESSAGES["ModelInferRequest"](model_name="free")
    request.inputs.add(name="x", datatype=datatype, shape=shape, contents=contents or None)
    return request


def read(request: Any, limits: GatewayConfig = LIMITS) -> list[Tensor]:
    """The inputs of a request, decoded as the service does."""
    rest, raw_ones = split_message(request.SerializeToString(), limits)
    return tensors(MESSAGES["ModelInferRequest"].FromString(rest), raw_ones, limits)


def answered(tensors_: list[Tensor], limits: GatewayConfig = LIMITS) -> Any:
    """A response with these outputs, typed where possible, parsed again."""
    message = encode_response(MESSAGES["ModelInferResponse"](), tensors_, limits, is_raw=False)
    return MESSAGES["ModelInferResponse"].FromString(message)


def both() -> Any:
    request = one_input("FP32", (1,), fp32_contents=[1.0])
    request.raw_input_contents.append(bytes(4))
    return request


def raw(data: bytes, datatype: str = "FP32", copies: int = 1) -> Any:
    request = one_input(datatype, (1,))
    request.raw_input_contents.extend([data] * copies)
    return request


@pytest.mark.parametrize(
    ("make", "expected_text"),
    [
        (both, "both typed and raw"),
        (lambda: raw(bytes(3)), "3 bytes"),
        (lambda: raw(bytes(4), copies=2), "1 inputs and 2 raw"),
        (lambda: raw(b"\xff\xff\xff\xffa", "BYTES"), "length"),
        (lambda: one_input("FP16", (1,), fp32_contents=[1.0]), "only be sent as raw contents"),
        (lambda: one_input("FP32", (1,), fp64_contents=[1.0]), "belongs in fp32_contents"),
        (lambda: one_input("INT8", (1,), int_contents=[128]), "range of INT8"),
        (lambda: one_input("UINT16", (1,), uint_contents=[1 << 16]), "range of UINT16"),
        (lambda: one_input("FP32", (2,), fp32_contents=[1.0]), "needs 2"),
        (lambda: one_input("FP32", (1,)), "needs 1"),
        (lambda: one_input("FP32", (-1,)), "negative"),
        (lambda: one_input("FP32", (1 << 40, 1 << 40)), "more than 100"),
        (lambda: one_input("FP32", (1, 1, 1, 1)), "dimensions"),
        (lambda: one_input("FP31", (1,)), "unknown datatype 'FP31' .allowed: BOOL, "),
    ],
)
def test_bad_tensors_are_refused(make: Callable[[], Any], expected_text: str) -> None:
    with pytest.raises(RequestError, match=expected_text) as refusal:
        read(make())
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
def test_typed_contents_round_trip(datatype: str, field: str, elements: list[Any]) -> None:
    (tensor,) = read(one_input(datatype, (2,), **{field: elements}))
    assert isinstance(tensor.data, memoryview)
    if datatype != "BYTES":
        assert len(tensor.data) == 2 * ITEM_BYTES[datatype]
    response = answered([tensor])
    assert list(getattr(response.outputs[0].contents, field)) == elements


def test_a_response_with_a_16_bit_float_is_all_raw() -> None:
    both_kinds = [
        Tensor("a", "FP32", (1,), memoryview(bytes(4))),
        Tensor("b", "BF16", (1,), memoryview(b"ab")),
    ]
    response = answered(both_kinds)
    assert list(response.raw_output_contents) == [bytes(4), b"ab"]
    assert not any(output.HasField("contents") for output in response.outputs)


def test_a_million_empty_strings_are_refused() -> None:
    """Each would become an object of its own for the function."""
    many = STRINGS_MAX + 1
    limits = GatewayConfig(typed_bytes_max=1 << 30, typed_elements_max=1 << 30)
    raw_ones = raw(bytes(4 * many), "BYTES")
    raw_ones.inputs[0].shape[0] = many
    for request in (raw_ones, one_input("BYTES", (many,), bytes_contents=[b""] * many)):
        with pytest.raises(RequestError, match="strings"):
            read(request, limits)


def test_strings_of_all_inputs_are_counted_together() -> None:
    half = STRINGS_MAX // 2 + 1
    request = raw(bytes(4 * half), "BYTES")
    request.inputs[0].shape[0] = half
    assert read(request, GatewayConfig())
    request.inputs.add().CopyFrom(request.inputs[0])
    request.raw_input_contents.append(bytes(4 * half))
    with pytest.raises(RequestError, match="strings"):
        read(request, GatewayConfig())


def test_a_million_empty_inputs_are_never_parsed() -> None:
    """Two bytes each on the wire; parsed they would take a hundred times that."""
    with pytest.raises(RequestError, match="more than 4"):
        split_message(b"\x2a\x00" * 1_000_000, LIMITS)
    assert split_message(b"\x2a\x00" * 4, LIMITS) == (b"\x2a\x00" * 4, [])


def test_a_million_fields_are_never_parsed() -> None:
    """Each costs the one event loop as much as a small request."""
    with pytest.raises(RequestError, match=f"more than {FIELDS_MAX} fields"):
        split_message(b"\x78\x01" * 1_000_000, LIMITS)


def test_raw_contents_are_not_copied() -> None:
    message = raw(bytes(4)).SerializeToString()
    rest, (view,) = split_message(message, LIMITS)
    assert view.obj is message
    assert b"".join((rest, b"\x3a\x04", view)) == message


def test_typed_elements_are_limited_and_raw_ones_are_not() -> None:
    """They are read one by one on the event loop: a few hundred thousand take milliseconds."""
    limits = GatewayConfig(typed_elements_max=10, typed_bytes_max=100)
    for request, expected_text in (
        (one_input("BOOL", (11,), bool_contents=[True] * 11), "10 typed elements"),
        (one_input("FP32", (40,), fp32_contents=[1.0] * 40), "100 bytes beside raw contents"),
    ):
        with pytest.raises(
            RequestError, match=f"{expected_text}; send tensors in raw_input_contents"
        ) as caught:
            read(request, limits)
        assert caught.value.status == 413
    many = raw(bytes(160))
    many.inputs[0].shape[0] = 40
    (tensor,) = read(many, limits)
    response = answered([tensor], limits)
    assert list(response.raw_output_contents) == [bytes(160)]


@given(st.binary(max_size=200))
def test_arbitrary_bytes_do_not_break_the_field_scan(message: bytes) -> None:
    """The scan ends, and the parser decides about the rest."""
    try:
        rest, raws = split_message(message, LIMITS)
    except RequestError as refused:
        assert refused.status == 400
    else:
        assert len(rest) + sum(map(len, raws)) <= len(message)


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
        rest, raws = split_message(bytes(message), LIMITS)
        again = MESSAGES["ModelInferRequest"].FromString(rest)
        assert [bytes(view) for view in raws] == list(request.raw_input_contents)
        assert again.inputs == request.inputs
        tensors(again, raws, LIMITS)
    except RequestError as refused:
        assert refused.status == 400


@pytest.mark.parametrize("message", [b"\xff", b"\x0a\x05ab", b"\x0a\x02\xff\xfe", b"\x2a" * 50])
def test_random_bytes_are_an_invalid_argument(message: bytes) -> None:
    async def scenario(rig: Rig) -> None:
        code, _ = await rig.refused(message)
        assert code is StatusCode.INVALID_ARGUMENT

    run(scenario)


def test_any_error_text_fits_the_trailers() -> None:
    """Metadata is printable ASCII of bounded length; gRPC fails the call otherwise."""

    async def scenario(rig: Rig) -> None:
        code, text = await rig.refused(rig.row(model_version="2" * 500))
        assert code is StatusCode.NOT_FOUND and len(text) < 200
        rig.runtime.mode = "never"
        asking = asyncio.ensure_future(rig.refused())
        while not rig.runtime.calls:
            await asyncio.sleep(0.01)
        (call,) = rig.runtime.calls
        call.settlement = Settlement(Outcome.FAILED)
        call.error, call.status = "é\n" * 100_000, 500
        call.on_answer(call)
        code, text = await asking
        assert code is StatusCode["INTERNAL"] and text.startswith("é\n")

    run(scenario, GatewayConfig(expose_errors=True))
    trailers = trailers_of(RequestError(429, "", reason="zu spät\n\x00"))
    assert trailers == (("headgate-reason", "zu sp?t??"),)
