"""Text between clients and tensors: what is read of a request, and what is written of an answer.

Everything here is a function of its arguments alone, so that it can be done in the gateway itself,
where the text is short, or in another process, where it is not (see `codec`).
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
    InferRequest,
    InferResponse,
    InputJson,
    OutputJson,
    check_answer,
    check_strings,
    count_of,
    elements_in,
    from_json,
    memoryview_of,
    nested,
    rows_of,
    shape_of_numbers,
    to_json,
)

_T = TypeVar("_T")
_ENCODER: Final = Encoder()


@final
class ReadText(Struct, array_like=True, tag="read"):
    """Text of a client that is to be read."""

    form: str  # oip; or SageMaker's json and csv
    model: str
    spec: TensorSpec | None = None  # the only input of the model, if it has one: rows are for it


@final
class ParsedRequest(Struct, gc=False):
    """What a text says."""

    form: str  # which its answer is to have: oip, predictions, rows or csv
    request: InferRequest  # without the elements of its inputs
    data: list[memoryview | None]  # those, as raw bytes; None: they are not in the text


@final
class OutputText(Struct, array_like=True):
    """One output of an answer."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    raw_bytes: int = -1  # so many follow the text; -1: they are in the text


@final
class WriteText(Struct, array_like=True, tag="write"):
    """Text of an answer that is to be written."""

    form: str
    model: str
    id: str
    outputs: list[OutputText]


@final
class _Envelope(Struct, gc=False):
    instances: Raw | UnsetType = UNSET


# --- reading ------------------------------------------------------------------------------------


def read_text(
    message: ReadText, text: bytes | bytearray | memoryview, limits: GatewayConfig
) -> ParsedRequest:
    """What a text says. Raises `RequestError`."""
    if message.form == "oip":
        return _oip(oip.decode(text, limits), limits)
    if message.form == "csv":
        return _rows(_csv(text), message, limits, "csv")
    if message.form == "json":
        if bytes(text[:64]).lstrip()[:1] == b"[":
            return _rows(bytes(text), message, limits, "rows")
        envelope = _decode(text, _Envelope, "the body is")
        if envelope.instances is not UNSET:
            rows = bytes(memoryview(envelope.instances))
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


def _rows(text: bytes, message: ReadText, limits: GatewayConfig, form: str) -> ParsedRequest:
    """Rows, as JSON, for the only input that the model has."""
    spec = message.spec
    if spec is None:
        raise RequestError(400, f"rows are for models of one input; {message.model!r} has other")
    if spec.datatype == "BYTES":
        given = _shape(_decode(text, object, "the rows are"), limits.dims_max)
    else:
        _decode(text, Raw, "the rows are")  # is it JSON at all?
        given = shape_of_numbers(text, limits.dims_max)
    shape = _fitted(given, spec)
    count = count_of(shape, spec.name, limits.dims_max, limits.elements_max)
    data = from_json(text, spec.name, spec.datatype, given, count)
    described = InputJson(spec.name, shape, spec.datatype)  # type: ignore[arg-type]
    return ParsedRequest(form, InferRequest([described]), [data])


def _decode(text: bytes | bytearray | memoryview, kind: type[_T], what: str) -> _T:
    try:
        return msgspec.json.decode(text, type=kind)
    except RecursionError:
        raise RequestError(400, f"{what} too deeply nested") from None
    except ValueError as problem:
        raise RequestError(400, f"{what} not understood: {problem}") from None


def _shape(level: object, dims_max: int) -> tuple[int, ...]:
    """The shape that nested lists have, going by their first elements."""
    shape = []
    while isinstance(level, list):
        shape.append(len(level))
        if len(shape) > dims_max:
            raise RequestError(400, f"the rows are nested more than {dims_max} deep")
        level = level[0] if level else None
    if not shape:
        raise RequestError(400, "rows must be a list")
    return tuple(shape)


def _fitted(shape: tuple[int, ...], spec: TensorSpec) -> tuple[int, ...]:
    """Where one dimension is missing: rows of one number each, or one row alone."""
    if len(shape) + 1 != len(spec.shape):
        return shape
    return (*shape, 1) if spec.shape[-1] == 1 else (1, *shape)


def _csv(text: bytes | bytearray | memoryview) -> bytes:
    """Rows of numbers as JSON, which is then checked as such."""
    body = bytes(text)
    if b"[" in body or b"]" in body:
        raise RequestError(400, "CSV must have numbers and commas alone")
    rows: list[bytes] = []
    at = 0
    while at < len(body):  # some at a time: a line as an object takes far more than its text
        end = body.find(b"\n", at + PIECE) + 1 or len(body)
        lines = [line.strip() for line in body[at:end].split(b"\n")]
        rows.append(b"],[".join(line for line in lines if line))
        at = end
    return b"[[%b]]" % b"],[".join(row for row in rows if row)


# --- writing ------------------------------------------------------------------------------------


def write_text(message: WriteText, data: Sequence[memoryview], limits: GatewayConfig) -> bytes:
    """An answer as text, `data` being the elements of the outputs that are in it, in their order.

    Raises `RequestError` where the text cannot have them, or would be too large.
    """
    parts = iter(data)
    tensors = [
        Tensor(each.name, each.datatype, each.shape, next(parts))
        for each in message.outputs
        if each.raw_bytes < 0
    ]
    text_max = limits.answer_bytes_max
    if message.form == "oip":
        text = _write_oip(message, tensors, text_max)
    elif message.form == "csv":
        text = _write_csv(tensors, text_max)
    else:
        text = _write_rows(tensors, text_max)
        if message.form == "predictions":
            text = b'{"predictions":%b}' % text
    check_answer(len(text), text_max)
    return text


def _write_oip(message: WriteText, tensors: list[Tensor], text_max: int) -> bytes:
    outputs: list[OutputJson] = []
    parts = iter(tensors)
    for each in message.outputs:
        if each.raw_bytes >= 0:
            size = {"binary_data_size": each.raw_bytes}
            outputs.append(OutputJson(each.name, each.datatype, each.shape, size))
            continue
        made = oip.output(next(parts), text_max)
        if isinstance(made.data, Raw):
            text_max -= len(memoryview(made.data))
        outputs.append(made)
    return oip.encode(InferResponse(message.model, outputs, oip.VERSION, message.id))


def _write_rows(tensors: list[Tensor], text_max: int) -> bytes:
    """The only output, row by row; of several, each row's by name."""
    if sum(map(_elements, tensors)) <= PIECE or any(
        not tensor.shape or tensor.datatype == "BYTES" for tensor in tensors
    ):
        return _ENCODER.encode(_predictions(tensors, [_whole(tensor) for tensor in tensors]))
    pieces: list[bytes] = []
    size = 0
    for first, last in _groups(tensors):
        rows = [nested(rows_of(tensor, first, last), tensor.shape) for tensor in tensors]
        pieces.append(_ENCODER.encode(_predictions(tensors, rows))[1:-1])
        size += len(pieces[-1]) + 1
        check_answer(size, text_max)
    return b"[%b]" % b",".join(pieces)


def _predictions(tensors: list[Tensor], columns: Sequence[object]) -> object:
    if len(tensors) == 1:
        return columns[0]
    names = [tensor.name for tensor in tensors]
    lists = [column for column in columns if isinstance(column, list)]
    if len(lists) < len(columns):  # one without rows is among them
        return dict(zip(names, columns, strict=True))
    return [dict(zip(names, row, strict=True)) for row in zip(*lists, strict=False)]


def _write_csv(tensors: list[Tensor], text_max: int) -> bytes:
    if len(tensors) != 1:
        raise RequestError(406, "CSV is for one output; ask in JSON")
    (tensor,) = tensors
    width = prod(tensor.shape[1:])
    if _elements(tensor) <= PIECE or tensor.datatype == "BYTES" or not tensor.shape:
        return _csv_lines(list(to_json(tensor)), width)
    pieces: list[bytes] = []
    size = 0
    for first, last in _groups(tensors):
        pieces.append(_csv_lines(rows_of(tensor, first, last), width))
        size += len(pieces[-1])
        check_answer(size, text_max)
    return b"".join(pieces)


def _csv_lines(values: list[object], width: int) -> bytes:
    texts = list(map(str, values))
    if width != 1:
        texts = [",".join(texts[at : at + width]) for at in range(0, len(texts), width or 1)]
    return "\n".join((*texts, "")).encode()


def _groups(tensors: list[Tensor]) -> list[tuple[int, int]]:
    """Rows that are written at a time, from one to another."""
    rows = min(tensor.shape[0] for tensor in tensors)
    widest = max(prod(tensor.shape[1:]) for tensor in tensors)
    step = max(1, PIECE // max(1, widest * len(tensors)))
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]


def _whole(tensor: Tensor) -> object:
    level: list[object] = list(to_json(tensor))
    return nested(level, tensor.shape) if tensor.shape else level[0]


def _elements(tensor: Tensor) -> int:
    return elements_in(tensor.datatype, len(memoryview_of(tensor)))
