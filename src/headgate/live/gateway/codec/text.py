"""Reading the text of requests into tensors, and writing the text of responses.

All functions here are pure, so that they can run in the gateway itself, for short texts, or in
another process, for long ones (see `codec.client`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Final, TypeVar, final

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType
from msgspec.json import Encoder

from headgate.functions.tensor import Tensor, TensorSpec
from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.errors import RequestError
from headgate.live.gateway.oip import json as oip
from headgate.live.gateway.oip.json import (
    PIECE,
    check_response_size,
    check_strings,
    element_count,
    elements_in,
    from_json,
    memoryview_of,
    nested,
    rows_of,
    shape_of_numbers,
    to_json,
)
from headgate.live.gateway.oip.messages import (
    VERSION,
    InferRequest,
    InferResponse,
    InputJson,
    OutputJson,
)

_T = TypeVar("_T")
_ENCODER: Final = Encoder()


@final
class ReadText(Struct, array_like=True, tag="read"):
    """How to read the text of a request."""

    format: str  # oip; or SageMaker's json and csv
    model: str
    spec: TensorSpec | None = None  # of a model's only input, to which rows belong


@final
class ParsedRequest(Struct, gc=False):
    """A request that has been read."""

    format: str  # of the response: oip, predictions, rows, csv or opaque
    request: InferRequest  # without the elements of its inputs
    data: list[memoryview | None]  # those, as raw bytes; None: not in the text


@final
class OutputText(Struct, array_like=True):
    """One output of a response."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    raw_bytes: int = -1  # raw bytes that follow the text; -1: the elements are in the text


@final
class WriteText(Struct, array_like=True, tag="write"):
    """How to write the text of a response."""

    format: str
    model: str
    id: str
    outputs: list[OutputText]


@final
class _Instances(Struct, gc=False):
    instances: Raw | UnsetType = UNSET


def read_text(
    message: ReadText, text: bytes | bytearray | memoryview, limits: GatewayConfig
) -> ParsedRequest:
    """Read the text of a request. Raises `RequestError`."""
    if message.format == "oip":
        return _oip(oip.decode(text, limits), limits)
    if message.format == "csv":
        return _rows(_csv(text), message, limits, "csv")
    if message.format == "json":
        if bytes(text[:64]).lstrip()[:1] == b"[":
            return _rows(bytes(text), message, limits, "rows")
        body = _decode(text, _Instances, "the body")
        if body.instances is not UNSET:
            rows = bytes(memoryview(body.instances))
            return _rows(rows, message, limits, "predictions")
    return _oip(oip.decode(text, limits), limits)


def _oip(request: InferRequest, limits: GatewayConfig) -> ParsedRequest:
    data: list[memoryview | None] = []
    strings = 0
    for given in request.inputs:
        if given.data is UNSET:
            data.append(None)
            continue
        data.append(memoryview_of(oip.tensor(given, limits)))
        given.data = UNSET
        if given.datatype == "BYTES":
            strings += prod(given.shape)
            check_strings(strings)
    return ParsedRequest("oip", request, data)


def _rows(text: bytes, message: ReadText, limits: GatewayConfig, format: str) -> ParsedRequest:
    """Read rows in JSON as the only input of the model."""
    spec = message.spec
    if spec is None:
        raise RequestError(400, f"rows need a model with one input, unlike {message.model!r}")
    if spec.datatype == "BYTES":
        given = _shape(_decode(text, object, "the body"), limits.dims_max)
    else:
        _decode(text, Raw, "the body")  # raises unless it is JSON
        given = shape_of_numbers(text, limits.dims_max)
    shape = _with_missing_dimension(given, spec)
    count = element_count(shape, spec.name, limits.dims_max, limits.elements_max)
    data = from_json(text, spec.name, spec.datatype, given, count)
    described = InputJson(spec.name, shape, spec.datatype)  # type: ignore[arg-type]
    return ParsedRequest(format, InferRequest([described]), [data])


def _decode(text: bytes | bytearray | memoryview, kind: type[_T], what: str) -> _T:
    try:
        return msgspec.json.decode(text, type=kind)
    except RecursionError:
        raise RequestError(400, f"{what} is too deeply nested") from None
    except ValueError as problem:
        raise RequestError(400, f"{what} cannot be parsed: {problem}") from None


def _shape(level: object, dims_max: int) -> tuple[int, ...]:
    """The shape of nested lists, taken from the first list of each level."""
    shape = []
    while isinstance(level, list):
        shape.append(len(level))
        if len(shape) > dims_max:
            raise RequestError(400, f"the rows are nested more than {dims_max} deep")
        level = level[0] if level else None
    if not shape:
        raise RequestError(400, "rows must be a list")
    return tuple(shape)


def _with_missing_dimension(shape: tuple[int, ...], spec: TensorSpec) -> tuple[int, ...]:
    """Add a missing dimension: rows of one number each, or a single row."""
    if len(shape) + 1 != len(spec.shape):
        return shape
    return (*shape, 1) if spec.shape[-1] == 1 else (1, *shape)


def _csv(text: bytes | bytearray | memoryview) -> bytes:
    """Turn rows of numbers in CSV into JSON, which is then checked as such."""
    body = bytes(text)
    if b"[" in body or b"]" in body:
        raise RequestError(400, "CSV must consist of numbers and commas")
    rows: list[bytes] = []
    at = 0
    while at < len(body):  # in pieces: a line as an object takes far more memory than its text
        end = body.find(b"\n", at + PIECE) + 1 or len(body)
        lines = [line.strip() for line in body[at:end].split(b"\n")]
        rows.append(b"],[".join(line for line in lines if line))
        at = end
    return b"[[%b]]" % b"],[".join(row for row in rows if row)


def write_text(message: WriteText, data: Sequence[memoryview], limits: GatewayConfig) -> bytes:
    """Write the text of a response; `data` are the elements of the outputs in the text, in order.

    Raises `RequestError` where the elements have no form in text, or the text is too large.
    """
    parts = iter(data)
    tensors = [
        Tensor(each.name, each.datatype, each.shape, next(parts))
        for each in message.outputs
        if each.raw_bytes < 0
    ]
    text_max = limits.response_bytes_max
    if message.format == "oip":
        text = _write_oip(message, tensors, text_max)
    elif message.format == "csv":
        text = _write_csv(tensors, text_max)
    else:
        text = _write_rows(tensors, text_max)
        if message.format == "predictions":
            text = b'{"predictions":%b}' % text
    check_response_size(len(text), text_max)
    return text


def _write_oip(message: WriteText, tensors: list[Tensor], text_max: int) -> bytes:
    outputs: list[OutputJson] = []
    parts = iter(tensors)
    for each in message.outputs:
        if each.raw_bytes >= 0:
            size = {"binary_data_size": each.raw_bytes}
            outputs.append(OutputJson(each.name, each.datatype, each.shape, size))
            continue
        output = oip.output(next(parts), text_max)
        if isinstance(output.data, Raw):
            text_max -= len(memoryview(output.data))
        outputs.append(output)
    return oip.encode(InferResponse(message.model, outputs, VERSION, message.id))


def _write_rows(tensors: list[Tensor], text_max: int) -> bytes:
    """Rows of the only output; of several outputs, objects with each row's elements by name."""
    if sum(map(_elements, tensors)) <= PIECE or any(
        not tensor.shape or tensor.datatype == "BYTES" for tensor in tensors
    ):
        return _ENCODER.encode(
            _predictions(tensors, [_nested_elements(tensor) for tensor in tensors])
        )
    pieces: list[bytes] = []
    size = 0
    for first, last in _row_ranges(tensors):
        rows = [nested(rows_of(tensor, first, last), tensor.shape) for tensor in tensors]
        pieces.append(_ENCODER.encode(_predictions(tensors, rows))[1:-1])
        size += len(pieces[-1]) + 1
        check_response_size(size, text_max)
    return b"[%b]" % b",".join(pieces)


def _predictions(tensors: list[Tensor], outputs: Sequence[object]) -> object:
    if len(tensors) == 1:
        return outputs[0]
    names = [tensor.name for tensor in tensors]
    lists = [output for output in outputs if isinstance(output, list)]
    if len(lists) < len(outputs):  # one of them is a scalar, which has no rows
        return dict(zip(names, outputs, strict=True))
    return [dict(zip(names, row, strict=True)) for row in zip(*lists, strict=False)]


def _write_csv(tensors: list[Tensor], text_max: int) -> bytes:
    if len(tensors) != 1:
        raise RequestError(406, "CSV can hold only one output; send the request in JSON")
    (tensor,) = tensors
    width = prod(tensor.shape[1:])
    if _elements(tensor) <= PIECE or tensor.datatype == "BYTES" or not tensor.shape:
        return _csv_lines(list(to_json(tensor)), width)
    pieces: list[bytes] = []
    size = 0
    for first, last in _row_ranges(tensors):
        pieces.append(_csv_lines(rows_of(tensor, first, last), width))
        size += len(pieces[-1])
        check_response_size(size, text_max)
    return b"".join(pieces)


def _csv_lines(values: list[object], width: int) -> bytes:
    texts = list(map(str, values))
    if width != 1:
        texts = [",".join(texts[at : at + width]) for at in range(0, len(texts), width or 1)]
    return "\n".join((*texts, "")).encode()


def _row_ranges(tensors: list[Tensor]) -> list[tuple[int, int]]:
    """Ranges of rows that are written at a time."""
    rows = min(tensor.shape[0] for tensor in tensors)
    widest = max(prod(tensor.shape[1:]) for tensor in tensors)
    step = max(1, PIECE // max(1, widest * len(tensors)))
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]


def _nested_elements(tensor: Tensor) -> object:
    level: list[object] = list(to_json(tensor))
    return nested(level, tensor.shape) if tensor.shape else level[0]


def _elements(tensor: Tensor) -> int:
    return elements_in(tensor.datatype, len(memoryview_of(tensor)))
