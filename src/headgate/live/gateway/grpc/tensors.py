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
    count_of,
    memoryview_of,
    pack_strings,
    split,
)

# By datatype: the field its elements are in, and what `array` calls them. The
# 16-bit floats have none: they go raw.
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
_RAW_OUTPUT: Final = bytes((6 << 3 | 2,))  # what each of them begins with in a response
FIELDS_MAX: Final = 4096  # of a request, parameters among them

assert sys.byteorder == "little", "elements are little-endian, as `array` has them here"


def take_apart(message: bytes, limits: GatewayConfig) -> tuple[bytes, list[memoryview]]:
    """A request without its raw contents, for the parser; and those, which stay where they are.

    The parser would copy them twice. What it is left with is small: an empty input takes two bytes
    on the wire and some hundred in memory, and elements in types are read one by one. Raises
    `RequestError` for more than that, before anything is parsed.
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
                raise RequestError(400, f"more than {limits.inputs_max} inputs or outputs")
        if fields > FIELDS_MAX:
            raise RequestError(400, f"more than {FIELDS_MAX} fields")
        if number == _RAW_INPUTS and data and end <= len(message):
            raw.append(view[data:end])
            kept.append(view[kept_to:start])
            kept_to = end
    rest = b"".join((*kept, view[kept_to:])) if raw else message
    if len(rest) > limits.typed_bytes_max:
        raise _too_much_typed(f"more than {limits.typed_bytes_max} bytes beside raw contents")
    return rest, raw


def tensors(request: Any, raw: Sequence[memoryview], limits: GatewayConfig) -> list[Tensor]:
    """The inputs of a request. Raises `RequestError` (400, 413) for whatever is wrong with them."""
    given = request.inputs
    counts = [_count(each, limits) for each in given]
    # Of all inputs together: they are walked one by one, while everybody else waits.
    check_strings(
        sum(count for each, count in zip(given, counts, strict=True) if each.datatype == "BYTES")
    )
    if not raw:
        if sum(counts) > limits.typed_elements_max:
            raise _too_much_typed(f"more than {limits.typed_elements_max} elements in types")
        return [_typed(each, count) for each, count in zip(given, counts, strict=True)]
    if len(raw) != len(given):
        raise RequestError(400, f"there are {len(given)} inputs and {len(raw)} raw contents")
    return [_raw(each, data, count) for each, data, count in zip(given, raw, counts, strict=True)]


def encoded(
    response: Any, outputs: Sequence[Tensor], limits: GatewayConfig, *, is_raw: bool
) -> bytes:
    """A response with its outputs: in types only if all of them can be, and soon enough."""
    views = [memoryview_of(tensor) for tensor in outputs]
    is_raw = (
        is_raw
        or any(tensor.datatype not in _CONTENTS for tensor in outputs)
        or sum(prod(tensor.shape) for tensor in outputs) > limits.typed_elements_max
    )
    for tensor, data in zip(outputs, views, strict=True):
        made = response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        if not is_raw:
            field, code = _CONTENTS[tensor.datatype]
            elements = _elements(code, data) if code else map(bytes, split(data))
            getattr(made.contents, field).extend(elements)
    head: bytes = response.SerializeToString()
    if not is_raw:
        return head
    parts: list[bytes | memoryview] = [head]
    for data in views:  # the serializer would copy them twice
        parts += (_RAW_OUTPUT, _as_varint(data.nbytes), data)
    return b"".join(parts)


def _count(given: Any, limits: GatewayConfig) -> int:
    name = given.name
    if given.datatype not in ITEM_BYTES:
        raise RequestError(400, f"{name[:80]!r} has the unknown datatype {given.datatype[:40]!r}")
    if "shared_memory_region" in given.parameters:
        raise RequestError(400, f"{name[:80]!r}: shared memory is not offered")
    return count_of(given.shape, name[:80], limits.dims_max, limits.elements_max)


def _raw(given: Any, data: memoryview, count: int) -> Tensor:
    if given.contents.ListFields():
        raise RequestError(400, f"{given.name[:80]!r} has typed contents, beside raw ones")
    check_bytes(data, given.name[:80], given.datatype, count)
    return Tensor(given.name, given.datatype, tuple(given.shape), data)


def _typed(given: Any, count: int) -> Tensor:
    name = given.name[:80]
    datatype = given.datatype
    if datatype not in _CONTENTS:
        raise RequestError(400, f"{name!r}: {datatype} can be sent as raw contents only")
    field, code = _CONTENTS[datatype]
    for used, _ in given.contents.ListFields():
        if used.name != field:
            raise RequestError(400, f"{name!r} has {used.name}; {datatype} is in {field}")
    elements = getattr(given.contents, field)
    if len(elements) != count:
        raise RequestError(
            400, f"{name!r} has {len(elements)} elements; its shape asks for {count}"
        )
    try:
        data = array(code, elements).tobytes() if code else pack_strings(elements)
    except OverflowError:
        raise RequestError(400, f"{name!r} has an element out of the range of {datatype}") from None
    return Tensor(given.name, datatype, tuple(given.shape), memoryview(data))


def _elements(code: str, data: memoryview) -> array[float]:
    elements: array[float] = array(code)
    elements.frombytes(data)
    return elements


def _too_much_typed(problem: str) -> RequestError:
    return RequestError(413, f"{problem}; send tensors in raw_input_contents", reason="too_large")


def _fields(message: bytes) -> Iterator[tuple[int, int, int, int]]:
    """The fields of a message, from the outside: number, where it starts, its bytes, where it ends.

    Of a field that is no string of bytes, these start at 0. It ends where the message is broken; a
    field may claim to end beyond it.

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
            return  # groups are not of this protocol, and the rest is not of any
        yield tag >> 3, start, data, at


def _as_varint(value: int) -> bytes:
    r"""A number as messages have it.

    >>> _as_varint(300)
    b'\xac\x02'
    """
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A number and where it ends; past the end of the message where it does not."""
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
