"""Tensors of gRPC messages: typed contents or raw bytes, and never both in one message."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, Final

from headgate.functions.tensor import ITEM_BYTES, Tensor
from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.errors import RequestError
from headgate.live.gateway.oip.json import (
    check_bytes,
    check_strings,
    element_count,
    memoryview_of,
    pack_strings,
    split_strings,
)
from headgate.live.gateway.oip.messages import UNSUPPORTED_OF_OUTPUTS

# By datatype: the field of its elements, and their type code of `array`. The 16-bit floats have no
# field: they can only be sent raw.
_CONTENTS: Final[Mapping[str, tuple[str, str]]] = {
    "BOOL": ("bool_contents", "B"),
    "INT8": ("int_contents", "b"),
    "INT16": ("int_contents", "h"),
    "INT32": ("int_contents", "i"),
    "INT64": ("int64_contents", "q"),
    "UINT8": ("uint_contents", "B"),
    "UINT16": ("uint_contents", "H"),
    "UINT32": ("uint_contents", "I"),
    "UINT64": ("uint64_contents", "Q"),
    "FP32": ("fp32_contents", "f"),
    "FP64": ("fp64_contents", "d"),
    "BYTES": ("bytes_contents", ""),
}
_INPUTS, _OUTPUTS, _RAW_INPUTS = 5, 6, 7  # numbers of the fields of a request
_RAW_OUTPUT: Final = bytes((6 << 3 | 2,))  # tag of that field in a response
FIELDS_MAX: Final = 4096  # of a request, parameters among them

assert sys.byteorder == "little", "`array` must be little-endian, as elements are"


def split_message(message: bytes, limits: GatewayConfig) -> tuple[bytes, list[memoryview]]:
    """Split a request into a message without raw contents, for the parser, and views of those.

    The parser would copy raw contents twice. The rest must be small: an empty input takes two bytes
    on the wire and some hundred in memory, and typed elements are read one by one. Raises
    `RequestError` beyond the limits, before anything is parsed.
    """
    counts = {_INPUTS: 0, _OUTPUTS: 0, _RAW_INPUTS: 0}
    raw: list[memoryview] = []
    view = memoryview(message)
    kept: list[memoryview] = []
    kept_to = 0
    for fields, (number, start, data, end) in enumerate(_fields(message), 1):
        if number in counts:
            counts[number] += 1
            if counts[number] > limits.inputs_max:
                raise RequestError(
                    400, f"the request has more than {limits.inputs_max} inputs or outputs"
                )
        if fields > FIELDS_MAX:
            raise RequestError(400, f"the message has more than {FIELDS_MAX} fields")
        if number == _RAW_INPUTS and data and end <= len(message):
            raw.append(view[data:end])
            kept.append(view[kept_to:start])
            kept_to = end
    rest = b"".join((*kept, view[kept_to:])) if raw else message
    if len(rest) > limits.typed_bytes_max:
        raise _typed_too_large(f"{limits.typed_bytes_max} bytes beside raw contents")
    return rest, raw


def tensors(request: Any, raw: Sequence[memoryview], limits: GatewayConfig) -> list[Tensor]:
    """The inputs of a request. Raises `RequestError` (400, 413)."""
    given = request.inputs
    counts = [_count(each, limits) for each in given]
    # The limit is for all inputs together: strings are walked one by one on the event loop.
    check_strings(
        sum(count for each, count in zip(given, counts, strict=True) if each.datatype == "BYTES")
    )
    if not raw:
        if sum(counts) > limits.typed_elements_max:
            raise _typed_too_large(f"{limits.typed_elements_max} typed elements")
        return [_typed(each, count) for each, count in zip(given, counts, strict=True)]
    if len(raw) != len(given):
        raise RequestError(400, f"the request has {len(given)} inputs and {len(raw)} raw contents")
    return [_raw(each, data, count) for each, data, count in zip(given, raw, counts, strict=True)]


def output_names(request: Any) -> list[str]:
    """Names of the outputs that are asked for. Raises `RequestError` (400) for an extension."""
    for output in request.outputs:
        for unsupported in UNSUPPORTED_OF_OUTPUTS:
            if unsupported in output.parameters:
                problem = f"output {output.name[:80]!r}: {unsupported} is not supported"
                raise RequestError(400, problem)
    return [output.name for output in request.outputs]


def encode_response(
    response: Any, outputs: Sequence[Tensor], limits: GatewayConfig, *, is_raw: bool
) -> bytes:
    """Serialize a response with its outputs: typed only if all can be, and are small enough."""
    views = [memoryview_of(tensor) for tensor in outputs]
    is_raw = (
        is_raw
        or any(tensor.datatype not in _CONTENTS for tensor in outputs)
        or sum(prod(tensor.shape) for tensor in outputs) > limits.typed_elements_max
    )
    for tensor, data in zip(outputs, views, strict=True):
        output = response.outputs.add(
            name=tensor.name, datatype=tensor.datatype, shape=tensor.shape
        )
        if not is_raw:
            field, code = _CONTENTS[tensor.datatype]
            elements = _elements(code, data) if code else map(bytes, split_strings(data))
            getattr(output.contents, field).extend(elements)
    head: bytes = response.SerializeToString()
    if not is_raw:
        return head
    parts: list[bytes | memoryview] = [head]
    for data in views:  # the serializer would copy them twice
        parts += (_RAW_OUTPUT, _encode_varint(data.nbytes), data)
    return b"".join(parts)


def _count(given: Any, limits: GatewayConfig) -> int:
    name = given.name
    if given.datatype not in ITEM_BYTES:
        known = ", ".join(ITEM_BYTES)
        problem = f"has the unknown datatype {given.datatype[:40]!r} (allowed: {known})"
        raise RequestError(400, f"{name[:80]!r} {problem}")
    if "shared_memory_region" in given.parameters:
        raise RequestError(400, f"{name[:80]!r}: shared memory is not supported")
    return element_count(given.shape, name[:80], limits.dims_max, limits.elements_max)


def _raw(given: Any, data: memoryview, count: int) -> Tensor:
    if given.contents.ListFields():
        raise RequestError(400, f"{given.name[:80]!r} has both typed and raw contents")
    check_bytes(data, given.name[:80], given.datatype, count)
    return Tensor(given.name, given.datatype, tuple(given.shape), data)


def _typed(given: Any, count: int) -> Tensor:
    name = given.name[:80]
    datatype = given.datatype
    if datatype not in _CONTENTS:
        raise RequestError(400, f"{name!r}: {datatype} can only be sent as raw contents")
    field, code = _CONTENTS[datatype]
    for used, _ in given.contents.ListFields():
        if used.name != field:
            raise RequestError(400, f"{name!r} has {used.name}; {datatype} belongs in {field}")
    elements = getattr(given.contents, field)
    if len(elements) != count:
        raise RequestError(400, f"{name!r} has {len(elements)} elements; its shape needs {count}")
    try:
        data = array(code, elements).tobytes() if code else pack_strings(elements)
    except OverflowError:
        raise RequestError(400, f"{name!r} has an element out of the range of {datatype}") from None
    return Tensor(given.name, datatype, tuple(given.shape), memoryview(data))


def _elements(code: str, data: memoryview) -> array[float]:
    elements: array[float] = array(code)
    elements.frombytes(data)
    return elements


def _typed_too_large(limit: str) -> RequestError:
    message = f"the request has more than {limit}; send tensors in raw_input_contents"
    return RequestError(413, message, reason="too_large")


def _fields(message: bytes) -> Iterator[tuple[int, int, int, int]]:
    """The fields of a message: number, start, start of the payload, end.

    Only length-delimited fields have a payload; for others its start is 0. Iteration ends where the
    message is malformed; a field may claim to end beyond the message.

    >>> list(_fields(bytes.fromhex("0a0161" "2a00" "1005")))
    [(1, 0, 2, 3), (5, 3, 5, 5), (2, 5, 0, 7)]
    """
    at = 0
    end = len(message)
    while at < end:
        start = at
        tag, at = _varint(message, at)
        data = 0
        wire_type = tag & 7
        if wire_type == 0:
            _, at = _varint(message, at)
        elif wire_type == 2:
            length, data = _varint(message, at)
            at = data + length
        elif wire_type in (1, 5):
            at += 8 if wire_type == 1 else 4
        else:
            return  # groups, which this protocol does not use, or an unknown wire type
        yield tag >> 3, start, data, at


def _encode_varint(value: int) -> bytes:
    r"""The varint encoding of a number.

    >>> _encode_varint(300)
    b'\xac\x02'
    """
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Decode a varint: the number and its end; the end of the message where it has none."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            break
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    return 0, len(message)
