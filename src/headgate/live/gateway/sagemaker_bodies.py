"""Bodies that SageMaker's clients send, and the answers each kind of them expects.

Beside the Open Inference Protocol (JSON, or Triton's binary form under its own media type) there
are rows for a model of one input: `{"instances": [...]}`, a bare JSON array, or CSV. Anything else
is one opaque string of bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod
from typing import Final, cast, final

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from headgate.functions.tensor import Tensor, TensorSpec
from headgate.live.call import Call
from headgate.live.gateway import binary, oip
from headgate.live.gateway.answers import JSON
from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.elements import (
    count_of,
    from_json,
    joined,
    memoryview_of,
    split,
    to_json,
)
from headgate.live.gateway.infer import OipForm
from headgate.live.gateway.oip import InferRequest
from headgate.live.gateway.refusal import Refused
from headgate.live.serving import Model

TRITON: Final = "application/vnd.sagemaker-triton.binary+json"
_TRITON_SIZE: Final = re.compile(rb";\s*json-header-size=(\d+)\s*$")
# Header lines and body of an answer.
Answer = Callable[[Call], tuple[bytes, bytes]]


@final
class Understood(Struct, gc=False):
    """A body: the request it amounts to, its tensors, and how to answer it."""

    request: InferRequest
    inputs: list[Tensor]
    answer: Answer
    outputs: list[str] = []


@final
class _Envelope(Struct, gc=False):
    instances: Raw | UnsetType = UNSET


def understand(
    media_type: bytes, body: bytes | bytearray, model: Model, limits: GatewayConfig
) -> Understood:
    """What a body means. Raises `Refused`."""
    kind = media_type.partition(b";")[0].strip().lower().decode("latin-1")
    if kind == TRITON:
        return _triton(media_type, body, model, limits)
    is_text = kind in ("application/json", "text/csv")
    if is_text and len(body) > limits.json_bytes_max:
        raise oip.too_much_text(limits)
    if kind == "application/json":
        return _json(body, model, limits)
    if kind == "text/csv":
        return _rows(_csv(body), model, limits, _csv_answer)
    return _opaque(body, model)


def _triton(
    media_type: bytes, body: bytes | bytearray, model: Model, limits: GatewayConfig
) -> Understood:
    size = _TRITON_SIZE.search(media_type)
    if size is None:
        raise Refused(400, f"{TRITON} needs json-header-size=N")
    view = memoryview(body)
    at = binary.json_bytes(size[1], len(view))
    request = oip.decode(view[:at], limits)
    form = OipForm(model.name, request)

    def answer(call: Call) -> tuple[bytes, bytes]:
        text, raw = form.parts(call)
        line = f"Content-Type: {TRITON};json-header-size={len(text)}\r\n".encode()
        return line, b"".join((text, *raw))

    return Understood(request, binary.tensors(request, view[at:], limits), answer, form.names)


def _json(body: bytes | bytearray, model: Model, limits: GatewayConfig) -> Understood:
    if body[:64].lstrip()[:1] == b"[":
        return _rows(bytes(body), model, limits, _bare_answer)
    try:
        envelope = msgspec.json.decode(body, type=_Envelope)
    except (ValueError, RecursionError) as problem:
        raise Refused(400, f"the body is not understood: {problem}") from None
    if envelope.instances is not UNSET:
        return _rows(bytes(memoryview(envelope.instances)), model, limits, _predictions_answer)
    request = oip.decode(body, limits)
    form = OipForm(model.name, request)
    return Understood(request, oip.tensors(request, limits), form.answer, form.names)


def _rows(text: bytes, model: Model, limits: GatewayConfig, answer: Answer) -> Understood:
    """Rows, as JSON, for the only input that the model has."""
    if len(model.inputs) != 1:
        raise Refused(400, f"rows are for models of one input; {model.name!r} has other")
    spec = model.inputs[0]
    given = _shape(text, limits.dims_max)
    shape = _fitted(given, spec)
    count = count_of(shape, spec.name, limits.dims_max, limits.elements_max)
    data = from_json(text, spec.name, spec.datatype, given, count)
    return Understood(InferRequest([]), [Tensor(spec.name, spec.datatype, shape, data)], answer)


def _shape(text: bytes, dims_max: int) -> tuple[int, ...]:
    """The shape that nested lists have, going by their first elements."""
    try:
        level: object = msgspec.json.decode(text)
    except (ValueError, RecursionError) as problem:
        raise Refused(400, f"the rows are not understood: {problem}") from None
    shape = []
    while isinstance(level, list):
        shape.append(len(level))
        if len(shape) > dims_max:
            raise Refused(400, f"the rows are nested more than {dims_max} deep")
        level = level[0] if level else None
    if not shape:
        raise Refused(400, "rows must be a list")
    return tuple(shape)


def _fitted(shape: tuple[int, ...], spec: TensorSpec) -> tuple[int, ...]:
    """Where one dimension is missing: rows of one number each, or one row alone."""
    if len(shape) + 1 != len(spec.shape):
        return shape
    return (*shape, 1) if spec.shape[-1] == 1 else (1, *shape)


def _csv(body: bytes | bytearray) -> bytes:
    """Rows of numbers as JSON, which is then checked as such."""
    if b"[" in body:
        raise Refused(400, "CSV must have numbers and commas alone")
    lines = [line for line in bytes(body).split(b"\n") if line.strip()]
    return b"[%b]" % b",".join(b"[%b]" % line.strip() for line in lines)


def _opaque(body: bytes | bytearray, model: Model) -> Understood:
    rank = len(model.inputs[0].shape) if len(model.inputs) == 1 else 1
    name = model.inputs[0].name if len(model.inputs) == 1 else "body"
    tensor = Tensor(name, "BYTES", (1,) * rank, memoryview(joined([memoryview(body)])))
    form = OipForm(model.name, InferRequest([]))

    def answer(call: Call) -> tuple[bytes, bytes]:
        outputs = call.outputs
        if len(outputs) == 1 and outputs[0].datatype == "BYTES":
            parts = split(memoryview_of(outputs[0]))
            if len(parts) == 1:
                return b"Content-Type: application/octet-stream\r\n", bytes(parts[0])
        return form.answer(call)

    return Understood(InferRequest([]), [tensor], answer)


def _predictions_answer(call: Call) -> tuple[bytes, bytes]:
    return JSON, msgspec.json.encode({"predictions": _predictions(call)})


def _bare_answer(call: Call) -> tuple[bytes, bytes]:
    return JSON, msgspec.json.encode(_predictions(call))


def _predictions(call: Call) -> object:
    """The only output, row by row; of several, each row's by name."""
    if len(call.outputs) == 1:
        return _nested(call.outputs[0])
    columns = {tensor.name: _nested(tensor) for tensor in call.outputs}
    if not all(isinstance(column, list) for column in columns.values()):
        return columns
    rows = zip(*(cast("list[object]", column) for column in columns.values()), strict=False)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _csv_answer(call: Call) -> tuple[bytes, bytes]:
    if len(call.outputs) != 1:
        raise Refused(406, "CSV is for one output; ask in JSON")
    tensor = call.outputs[0]
    width = prod(tensor.shape[1:])
    values = [str(value) for value in to_json(tensor)]
    lines = (",".join(values[at : at + width]) for at in range(0, len(values), width or 1))
    return b"Content-Type: text/csv; charset=utf-8\r\n", "\n".join((*lines, "")).encode()


def _nested(tensor: Tensor) -> object:
    level: list[object] = list(to_json(tensor))
    if not tensor.shape:
        return level[0]
    for size in reversed(tensor.shape[1:]):
        level = [level[at : at + size] for at in range(0, len(level), size or 1)]
    return level
