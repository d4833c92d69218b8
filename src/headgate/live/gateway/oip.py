"""The Open Inference Protocol's JSON: requests in, responses out.

The elements of an input stay text (`Raw`) until its shape and datatype have been looked at, and are
then read once, straight into their type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal, final

from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from msgspec.json import Decoder, Encoder

from headgate.functions.tensor import Tensor
from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.elements import (
    PIECE,
    count_of,
    elements_in,
    from_json,
    memoryview_of,
    to_json,
    to_json_text,
)
from headgate.live.gateway.refusal import Refused

Datatype = Literal[
    "BOOL",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "FP16",
    "FP32",
    "FP64",
    "BF16",
    "BYTES",
]
Dimension = Annotated[int, Meta(ge=0, lt=1 << 62)]
# As the protocol has it; lists of lists of nothing would take more time than anything else.
Parameters = dict[str, bool | int | float | str | None]
VERSION: Final = "1"  # models are not versioned; clients want to see one


@final
class InputJson(Struct, gc=False):
    """One input of a request."""

    name: str
    shape: tuple[Dimension, ...]
    datatype: Datatype
    data: Raw | UnsetType = UNSET
    parameters: Parameters | None = None


@final
class OutputWanted(Struct, gc=False):
    """One output that is asked for."""

    name: str
    parameters: Parameters | None = None


@final
class InferRequest(Struct, gc=False):
    """A request as it comes."""

    inputs: list[InputJson]
    id: str = ""
    parameters: Parameters | None = None
    outputs: list[OutputWanted] | None = None


@final
class OutputJson(Struct, gc=False, omit_defaults=True):
    """One output of a response: its elements, or how many bytes of them follow the JSON."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: dict[str, int] | None = None
    data: Sequence[object] | Raw | UnsetType = UNSET


@final
class InferResponse(Struct, gc=False, omit_defaults=True):
    """A response as it goes."""

    model_name: str
    outputs: list[OutputJson]
    model_version: str = ""
    id: str = ""


_DECODER: Final = Decoder(InferRequest)
_ENCODER: Final = Encoder()


def decode(text: bytes | bytearray | memoryview, limits: GatewayConfig) -> InferRequest:
    """A request, its form checked. Raises `Refused` (400, 413)."""
    if len(text) > limits.json_bytes_max:
        raise too_much_text(limits)
    try:
        request = _DECODER.decode(text)
    except RecursionError:
        raise Refused(400, "the request is too deeply nested") from None
    except ValueError as problem:  # of msgspec, or text that is not UTF-8
        raise Refused(400, f"the request is not understood: {problem}") from None
    most = limits.inputs_max
    if len(request.inputs) > most or (request.outputs and len(request.outputs) > most):
        raise Refused(400, f"more than {most} inputs or outputs")
    return request


def too_much_text(limits: GatewayConfig) -> Refused:
    """What is said of text that would take too long to read."""
    return Refused(
        413,
        f"more than {limits.json_bytes_max} bytes of text; send tensors as binary data "
        "(Inference-Header-Content-Length, and binary_data_size of each input)",
        reason="too_large",
    )


def encode(response: InferResponse) -> bytes:
    """A response as JSON."""
    return _ENCODER.encode(response)


def tensor(given: InputJson, limits: GatewayConfig) -> Tensor:
    """One input whose elements are in the JSON. Raises `Refused` (400)."""
    name = given.name
    count = count_of(given.shape, name, limits.dims_max, limits.elements_max)
    if given.data is UNSET:
        raise Refused(400, f"input {name!r} has no data")
    return Tensor(
        name,
        given.datatype,
        given.shape,
        from_json(memoryview(given.data), name, given.datatype, given.shape, count),
    )


def output(given: Tensor, text_max: int = 1 << 30) -> OutputJson:
    """An output with its elements in the JSON.

    Raises `Refused` if JSON cannot have them (406), or in more than `text_max` bytes (500).
    """
    is_short = elements_in(given.datatype, len(memoryview_of(given))) <= PIECE
    data = to_json(given) if is_short else to_json_text(given, text_max)
    return OutputJson(given.name, given.datatype, given.shape, data=data)
