"""Tensors of gRPC messages: typed contents or raw bytes, and never both in one message."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from headgate.functions.tensor import ITEM_BYTES, Tensor
from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.elements import (
    STRINGS_MAX,
    check_bytes,
    count_of,
    joined,
    memoryview_of,
    split,
)
from headgate.live.gateway.refusal import Refused

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

assert sys.byteorder == "little", "elements are little-endian, as `array` has them here"


def check_size(message: bytes, limits: GatewayConfig) -> None:
    """See that a request does not name more tensors than allowed, before it is parsed.

    An empty input takes two bytes on the wire and some hundred in memory, so that a message of
    legal size could otherwise fill the machine. Raises `Refused`.
    """
    counts = {_INPUTS: 0, _OUTPUTS: 0, _RAW_INPUTS: 0}
    for number in _fields(message):
        if number in counts:
            counts[number] += 1
            if counts[number] > limits.inputs_max:
                raise Refused(400, f"more than {limits.inputs_max} inputs or outputs")


def tensors(request: Any, limits: GatewayConfig) -> list[Tensor]:
    """The inputs of a request. Raises `Refused` (400) for whatever is wrong with them."""
    raw = request.raw_input_contents
    given = request.inputs
    if not raw:
        return [_typed(each, _count(each, limits)) for each in given]
    if len(raw) != len(given):
        raise Refused(400, f"there are {len(given)} inputs and {len(raw)} raw contents")
    return [_raw(each, data, _count(each, limits)) for each, data in zip(given, raw, strict=True)]


def fill(response: Any, outputs: Sequence[Tensor], *, is_raw: bool) -> None:
    """Put the outputs into a response: typed only if all of them can be."""
    is_raw = is_raw or any(tensor.datatype not in _CONTENTS for tensor in outputs)
    for tensor in outputs:
        made = response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        data = memoryview_of(tensor)
        if is_raw:
            response.raw_output_contents.append(bytes(data))
            continue
        field, code = _CONTENTS[tensor.datatype]
        elements = _elements(code, data) if code else map(bytes, split(data))
        getattr(made.contents, field).extend(elements)


def _count(given: Any, limits: GatewayConfig) -> int:
    name = given.name
    if given.datatype not in ITEM_BYTES:
        raise Refused(400, f"{name[:80]!r} has the unknown datatype {given.datatype[:40]!r}")
    if "shared_memory_region" in given.parameters:
        raise Refused(400, f"{name[:80]!r}: shared memory is not offered")
    return count_of(given.shape, name[:80], limits.dims_max, limits.elements_max)


def _raw(given: Any, data: bytes, count: int) -> Tensor:
    if given.contents.ListFields():
        raise Refused(400, f"{given.name[:80]!r} has typed contents, beside raw ones")
    view = memoryview(data)
    check_bytes(view, given.name[:80], given.datatype, count)
    return Tensor(given.name, given.datatype, tuple(given.shape), view)


def _typed(given: Any, count: int) -> Tensor:
    name = given.name[:80]
    datatype = given.datatype
    if datatype not in _CONTENTS:
        raise Refused(400, f"{name!r}: {datatype} can be sent as raw contents only")
    field, code = _CONTENTS[datatype]
    for used, _ in given.contents.ListFields():
        if used.name != field:
            raise Refused(400, f"{name!r} has {used.name}; {datatype} is in {field}")
    elements = getattr(given.contents, field)
    if datatype == "BYTES" and count > STRINGS_MAX:
        raise Refused(400, f"{name!r} has more than {STRINGS_MAX} strings")
    if len(elements) != count:
        raise Refused(400, f"{name!r} has {len(elements)} elements; its shape asks for {count}")
    try:
        data = array(code, elements).tobytes() if code else joined(elements)
    except OverflowError:
        raise Refused(400, f"{name!r} has an element out of the range of {datatype}") from None
    return Tensor(given.name, datatype, tuple(given.shape), memoryview(data))


def _elements(code: str, data: memoryview) -> array[float]:
    elements: array[float] = array(code)
    elements.frombytes(data)
    return elements


def _fields(message: bytes) -> Iterator[int]:
    """The numbers of the fields of a message, from the outside; it ends where it is broken.

    >>> list(_fields(bytes.fromhex("0a0161" "2a00" "1005")))
    [1, 5, 2]
    """
    at = 0
    end = len(message)
    while at < end:
        tag, at = _varint(message, at)
        yield tag >> 3
        wire_type = tag & 7
        if wire_type == 0:
            _, at = _varint(message, at)
        elif wire_type == 2:
            length, at = _varint(message, at)
            at += length
        elif wire_type in (1, 5):
            at += 8 if wire_type == 1 else 4
        else:
            return  # groups are not of this protocol, and the rest is not of any


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
