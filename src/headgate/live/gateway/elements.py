"""The elements of a tensor: between JSON and the raw bytes that tensors carry.

A shape is checked against the limits before anything is made for it, and every element against its
datatype; nothing is rounded, cut or wrapped to make it fit.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Final, cast

from msgspec.json import Decoder

from headgate.functions.tensor import ITEM_BYTES, Tensor
from headgate.live.gateway.refusal import Refused

# How `struct` calls the datatypes that JSON can have. BF16 is not among them.
_CODES: Final[Mapping[str, str]] = {
    "BOOL": "?",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
}
_LENGTH: Final = struct.Struct("<I")
_DEPTH_MAX: Final = 32
# Strings are walked one by one, while everybody else waits.
STRINGS_MAX: Final = 1 << 17


def count_of(shape: Sequence[int], name: str, dims_max: int, elements_max: int) -> int:
    """How many elements a shape has. Raises `Refused` beyond the limits.

    >>> count_of((2, 3), "x", 8, 100), count_of((), "x", 8, 100)
    (6, 1)
    """
    if len(shape) > dims_max:
        raise Refused(400, f"{name!r} has {len(shape)} dimensions; {dims_max} are allowed")
    count = 1
    for size in shape:
        if size < 0:
            raise Refused(400, f"{name!r} has a negative dimension")
        count *= size
        if count > elements_max:
            raise Refused(400, f"{name!r} has more than {elements_max} elements")
    return count


def from_json(
    text: bytes | memoryview, name: str, datatype: str, shape: Sequence[int], count: int
) -> memoryview:
    """The raw bytes of `count` elements that are written as JSON, flat or nested like `shape`.

    Raises `Refused` if they are of another type, too large for it, too few or too many.
    """
    flat = _FLAT.get(datatype)
    if flat is None:
        raise Refused(400, f"{name!r}: {datatype} can be sent as binary data only")
    try:
        values = cast("Sequence[object]", flat.decode(text))
    except (ValueError, RecursionError) as problem:
        values = _nested(text, name, datatype, shape, problem)
    if len(values) != count:
        raise Refused(400, f"{name!r} has {len(values)} elements; its shape asks for {count}")
    if datatype == "BYTES":
        if count > STRINGS_MAX:
            raise Refused(400, f"{name!r} has more than {STRINGS_MAX} strings")
        return memoryview(joined([cast("str", value).encode() for value in values]))
    try:
        return memoryview(struct.pack(f"<{count}{_CODES[datatype]}", *values))
    except (struct.error, OverflowError):
        raise Refused(400, f"{name!r} has an element out of the range of {datatype}") from None


def to_json(tensor: Tensor) -> Sequence[object]:
    """The elements, flat, for JSON. NaN and infinities become null there.

    Raises `Refused` (406) where JSON cannot have them.
    """
    data = memoryview_of(tensor)
    if tensor.datatype == "BYTES":
        try:
            return [str(part, "utf-8") for part in split(data)]
        except ValueError:
            raise Refused(
                406, f"output {tensor.name!r} is not UTF-8; ask for it as binary data"
            ) from None
    code = _CODES.get(tensor.datatype)
    if code is None:
        raise Refused(
            406, f"output {tensor.name!r} is {tensor.datatype}; ask for it as binary data"
        )
    return struct.unpack(f"<{len(data) // ITEM_BYTES[tensor.datatype]}{code}", data)


def check_bytes(data: memoryview, name: str, datatype: str, count: int) -> None:
    """See that raw bytes are what they should be: `count` elements, whole.

    Raises `Refused` if not.
    """
    if datatype == "BYTES":
        if count > STRINGS_MAX:
            raise Refused(400, f"{name!r} has more than {STRINGS_MAX} strings")
        if not _is_whole(data, count):
            raise Refused(400, f"{name!r} is not {count} strings, or a length in it lies")
    elif len(data) != count * ITEM_BYTES[datatype]:
        raise Refused(
            400,
            f"{name!r} has {len(data)} bytes; its shape and datatype ask for "
            f"{count * ITEM_BYTES[datatype]}",
        )


def split(data: memoryview) -> Sequence[memoryview]:
    """The elements of a `BYTES` tensor. Raises `ValueError` where lengths and bytes disagree.

    >>> [bytes(part) for part in split(memoryview(joined([b"a", b""])))]
    [b'a', b'']
    """
    parts = []
    at = 0
    end = len(data)
    while at < end:
        if at + 4 > end:
            raise ValueError
        (length,) = _LENGTH.unpack_from(data, at)
        at += 4 + length
        if at > end:
            raise ValueError
        parts.append(data[at - length : at])
    return parts


def joined(parts: Sequence[bytes | memoryview]) -> bytes:
    """A `BYTES` tensor's raw bytes: each element behind its length.

    >>> joined([b"ab"])
    b'\\x02\\x00\\x00\\x00ab'
    """
    return b"".join(chain.from_iterable((_LENGTH.pack(len(part)), part) for part in parts))


def memoryview_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor that has come to this process."""
    assert isinstance(tensor.data, memoryview)
    return tensor.data


def _is_whole(data: memoryview, count: int) -> bool:
    """Whether these are so many strings, and nothing more. Keeps none of them."""
    at, end = 0, len(data)
    for _ in range(count):
        if at + 4 > end:
            return False
        at += 4 + int(_LENGTH.unpack_from(data, at)[0])
    return at == end


def _nested(
    text: bytes | memoryview, name: str, datatype: str, shape: Sequence[int], problem: Exception
) -> Sequence[object]:
    """What is nested like its shape, made flat; else the problem that the flat form had."""
    is_nested = bytes(text[:64]).lstrip()[1:].lstrip().startswith(b"[")
    if not is_nested or not 2 <= len(shape) <= _DEPTH_MAX:
        raise Refused(400, f"{name!r}: {_said(problem)}") from None
    try:
        level = cast("list[object]", _NESTED[_kind(datatype)][len(shape)].decode(text))
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"{name!r}: {_said(error)}") from None
    wrong = Refused(400, f"{name!r} is not nested as its shape has it")
    if len(level) != shape[0]:
        raise wrong
    for size in shape[1:]:
        rows = cast("list[list[object]]", level)
        if any(len(row) != size for row in rows):
            raise wrong
        level = list(chain.from_iterable(rows))
    return level


def _said(problem: Exception) -> str:
    return "too deeply nested" if isinstance(problem, RecursionError) else str(problem)


def _kind(datatype: str) -> type:
    if datatype == "BYTES":
        return str
    if datatype == "BOOL":
        return bool
    return float if datatype.startswith("FP") else int


def _decoders(kind: type) -> tuple[Decoder[object], ...]:
    """By depth of nesting, 0 for a bare element."""
    made: list[Decoder[object]] = []
    wanted: object = kind
    for _ in range(_DEPTH_MAX + 1):
        made.append(Decoder(cast("type[object]", wanted)))
        wanted = list[wanted]  # type: ignore[valid-type]
    return tuple(made)


_NESTED: Final[Mapping[type, tuple[Decoder[object], ...]]] = {
    kind: _decoders(kind) for kind in (bool, int, float, str)
}
_FLAT: Final[Mapping[str, Decoder[object]]] = {
    datatype: _NESTED[_kind(datatype)][1] for datatype in (*_CODES, "BYTES")
}
