"""The Open Inference Protocol's JSON: requests in, responses out.

The elements of an input stay text (`Raw`) until its shape and datatype have been looked at, and are
then read once, straight into their type.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from typing import Annotated, Final, Literal, cast, final

from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from msgspec.json import Decoder, Encoder

from headgate.functions.tensor import ITEM_BYTES, Tensor
from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.errors import RequestError

# The elements of a tensor: between JSON and the raw bytes that tensors carry.
#
# A shape is checked against the limits before anything is made for it, and every element against
# its datatype; nothing is rounded, cut or wrapped to make it fit.
#
# Numbers are converted some ten thousand at a time: as Python objects they take sixteen times the
# memory of their text. Nested lists are never built: how they must be nested follows from the
# shape, so their brackets and commas are compared with what that shape has.


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
# Of one request. Strings are walked one by one, while everybody else waits.
STRINGS_MAX: Final = 1 << 16
PIECE: Final = 1 << 16  # characters that are read, or elements that are written, at a time

_SPACE: Final = b" \t\r\n"
_NESTED_START: Final = re.compile(rb"[ \t\r\n]*\[[ \t\r\n]*\[")
_NOT_STRUCTURE: Final = bytes(byte for byte in range(256) if byte not in b"[],")
_NO_BRACKETS: Final = bytes.maketrans(b"[]", b"  ")


def count_of(shape: Sequence[int], name: str, dims_max: int, elements_max: int) -> int:
    """How many elements a shape has. Raises `RequestError` beyond the limits.

    >>> count_of((2, 3), "x", 8, 100), count_of((), "x", 8, 100)
    (6, 1)
    """
    if len(shape) > dims_max:
        raise RequestError(400, f"{name!r} has {len(shape)} dimensions; {dims_max} are allowed")
    count = 1
    for size in shape:
        if size < 0:
            raise RequestError(400, f"{name!r} has a negative dimension")
        count *= size
        if count > elements_max:
            raise RequestError(400, f"{name!r} has more than {elements_max} elements")
    return count


# --- from JSON ----------------------------------------------------------------------------------


def from_json(
    text: bytes | memoryview, name: str, datatype: str, shape: Sequence[int], count: int
) -> memoryview:
    """The raw bytes of `count` elements that are written as JSON, flat or nested like `shape`.

    The text is taken to be valid JSON. Raises `RequestError` if the elements are of another type,
    too large for it, too few or too many.
    """
    flat = _FLAT.get(datatype)
    if flat is None:
        raise RequestError(400, f"{name!r}: {datatype} can be sent as binary data only")
    if len(text) <= PIECE and datatype != "BYTES":  # as nearly all are: flat, and at once
        try:
            values = cast("Sequence[object]", flat.decode(text))
        except (ValueError, RecursionError):
            pass
        else:
            if len(values) == count:
                return memoryview(_packed(values, name, datatype))
    is_nested = len(shape) > 1 and _NESTED_START.match(text) is not None
    if datatype == "BYTES":
        return _strings(text, name, shape, count, is_nested=is_nested)
    if is_nested:
        text = _flattened(text, name, shape, count)
    packed: list[bytes] = []
    found = 0
    for piece in _pieces(text):
        try:
            values = cast("Sequence[object]", flat.decode(piece))
        except (ValueError, RecursionError) as problem:
            raise RequestError(400, f"{name!r}: {_said(problem)}") from None
        packed.append(_packed(values, name, datatype))
        found += len(values)
        if found > count:
            break
    if found != count:
        found_text = f"more than {count}" if found > count else str(found)
        raise RequestError(400, f"{name!r} has {found_text} elements; its shape asks for {count}")
    return memoryview(b"".join(packed))


def _packed(values: Sequence[object], name: str, datatype: str) -> bytes:
    try:
        return struct.pack(f"<{len(values)}{_CODES[datatype]}", *values)
    except (struct.error, OverflowError):
        raise RequestError(400, f"{name!r} has an element out of the range of {datatype}") from None


def _pieces(text: bytes | memoryview) -> Iterator[bytes | memoryview]:
    """A flat list of numbers as lists that are shorter; cut at commas, of which it has no others.

    >>> [bytes(piece) for piece in _pieces(b"[1,2]")]
    [b'[1,2]']
    """
    size = len(text)
    if size <= 2 * PIECE:
        yield text
        return
    data = bytes(text).strip(_SPACE)
    if not data.startswith(b"["):
        yield data  # no list: the decoder says so
        return
    at, end = 1, len(data) - 1
    while True:
        cut = data.find(b",", at + PIECE, end)
        if cut < 0:
            yield b"[%b]" % data[at:end]
            return
        yield b"[%b]" % data[at:cut]
        at = cut + 1


def _flattened(
    text: bytes | memoryview, name: str, shape: Sequence[int], count: int
) -> bytes | memoryview:
    """Numbers that are nested like their shape, as a flat list. Raises `RequestError` if they are
    not.

    >>> bytes(_flattened(b"[[1,2],[3,4]]", "x", (2, 2), 4))
    b'[  1,2 , 3,4  ]'
    """
    data = text if isinstance(text, bytes) else bytes(text)
    structure = data.translate(None, _NOT_STRUCTURE)
    if len(structure) != _structure_bytes(shape) or structure != _structure(shape):
        raise RequestError(400, f"{name!r} is not nested as its shape has it")
    if count == 0:
        return b"[%b]" % data.translate(None, b"[]," + _SPACE)  # empty, or too many
    return b"[%b]" % data.translate(_NO_BRACKETS)


def _structure(shape: Sequence[int]) -> bytes:
    """The brackets and commas of nested lists.

    >>> _structure((2, 3)), _structure((2, 0)), _structure((0, 2))
    (b'[[,,],[,,]]', b'[[],[]]', b'[]')
    """
    inner = b""
    for size in reversed(shape):
        inner = b"[%b]" % ((inner + b",") * size)[:-1]  # `join` takes 80 bytes for each of them
    return inner


def _structure_bytes(shape: Sequence[int]) -> int:
    """How long that is, before it is made: a short text may claim any shape.

    >>> _structure_bytes((2, 3)), _structure_bytes((2, 0)), _structure_bytes((0, 2))
    (11, 7, 2)
    """
    inner = 0
    for size in reversed(shape):
        inner = 2 + size * inner + max(0, size - 1)
    return inner


def shape_of_numbers(text: bytes, dims_max: int) -> tuple[int, ...]:
    """The shape that nested lists of numbers have, going by the first of each.

    Raises `RequestError` where they are nested too deeply, or are no lists.

    >>> shape_of_numbers(b"[[1,2,3],[4,5,6]]", 8), shape_of_numbers(b"[[], []]", 8)
    ((2, 3), (2, 0))
    """
    structure = text.translate(None, _NOT_STRUCTURE)
    depth = len(structure) - len(structure.lstrip(b"["))
    if not depth:
        raise RequestError(400, "rows must be a list")
    if depth > dims_max:
        raise RequestError(400, f"the rows are nested more than {dims_max} deep")
    if not text.lstrip(b"[" + _SPACE).startswith(b"]"):
        sizes = [structure.index(b"]") - depth + 1]  # its commas, and one
    else:
        sizes = [0]
    inner = 2 + max(0, sizes[0] - 1)
    for closing in range(2, depth + 1):
        # Where so many lists end at once for the first time, the first one of that level ends.
        end = structure.find(b"]" * closing)
        if end < 0:
            raise RequestError(400, "the rows differ in length")
        whole = end + 2 * closing - depth
        sizes.append((whole - 1) // (inner + 1))
        inner = whole
    return tuple(reversed(sizes))


def _strings(
    text: bytes | memoryview, name: str, shape: Sequence[int], count: int, *, is_nested: bool
) -> memoryview:
    check_strings(count)
    depth = len(shape) if is_nested else 1
    if depth > _DEPTH_MAX:
        raise RequestError(400, f"{name!r} is nested more than {_DEPTH_MAX} deep")
    try:
        level = cast("list[object]", _STRINGS[depth].decode(text))
    except (ValueError, RecursionError) as problem:
        raise RequestError(400, f"{name!r}: {_said(problem)}") from None
    if is_nested:
        level = _level(level, name, shape)
    if len(level) != count:
        raise RequestError(400, f"{name!r} has {len(level)} elements; its shape asks for {count}")
    return memoryview(pack_strings([cast("str", value).encode() for value in level]))


def _level(level: list[object], name: str, shape: Sequence[int]) -> list[object]:
    """What is nested like its shape, made flat."""
    wrong = RequestError(400, f"{name!r} is not nested as its shape has it")
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


# --- to JSON ------------------------------------------------------------------------------------


def to_json(tensor: Tensor) -> Sequence[object]:
    """The elements, flat, for JSON. NaN and infinities become null there.

    Raises `RequestError` (406) where JSON cannot have them.
    """
    data = memoryview_of(tensor)
    code = _CODES.get(tensor.datatype)
    if code is None:
        return _values(tensor, 0, len(data))
    return struct.unpack(f"<{len(data) // ITEM_BYTES[tensor.datatype]}{code}", data)


def to_json_text(tensor: Tensor, text_max: int) -> Raw:
    """The same, encoded, and made in pieces. Raises `RequestError` beyond so many bytes of text."""
    pieces: list[bytes] = []
    size = 1
    for values in _values_in_pieces(tensor):
        pieces.append(_ELEMENT_ENCODER.encode(values)[1:-1])
        size += len(pieces[-1]) + 1
        check_answer(size, text_max)
    return Raw(b"[%b]" % b",".join(pieces))


def _values_in_pieces(tensor: Tensor) -> Iterator[Sequence[object]]:
    data = memoryview_of(tensor)
    at, end = 0, len(data)
    if tensor.datatype == "BYTES":
        while at < end:
            texts, at = _texts(tensor.name, data, at, PIECE)
            yield texts
        return
    step = PIECE * ITEM_BYTES[tensor.datatype]
    for start in range(0, end, step):
        yield _values(tensor, start, min(start + step, end))


def rows_of(tensor: Tensor, first: int, last: int) -> list[object]:
    """The elements of some of the rows of a tensor that has a first dimension, flat.

    Strings are not cut here: `to_json` has them. Raises `RequestError` like that.
    """
    width = prod(tensor.shape[1:]) * ITEM_BYTES[tensor.datatype]
    return list(_values(tensor, first * width, last * width))


def nested(level: list[object], shape: Sequence[int]) -> list[object]:
    """Flat elements as lists in lists.

    >>> nested([1, 2, 3, 4], (2, 2))
    [[1, 2], [3, 4]]
    """
    for size in reversed(shape[1:]):
        level = [level[at : at + size] for at in range(0, len(level), size or 1)]
    return level


def elements_in(datatype: str, size: int) -> int:
    """How many elements so many bytes are; of `BYTES`, what takes as long to write, about.

    >>> elements_in("FP32", 400), elements_in("BYTES", 400)
    (100, 400)
    """
    return size // (ITEM_BYTES.get(datatype) or 1)


def least_text_bytes(datatype: str, size: int) -> int:
    """How long the text of so many bytes is at least: a digit, or a float's `0.0`, and a comma.

    >>> least_text_bytes("FP16", 200), least_text_bytes("INT8", 100)
    (400, 200)
    """
    if datatype == "BYTES":
        return size * 3 // 4  # two quotes and a comma, where the tensor has a length of four bytes
    return elements_in(datatype, size) * (4 if datatype.startswith("FP") else 2)


def check_answer(size: int, size_max: int, *, is_text: bool = True) -> None:
    """See that an answer is not larger than answers may be. Raises `RequestError` (500)."""
    if size > size_max:
        hint = "; binary output is smaller (binary_data_output)" if is_text else ""
        raise RequestError(
            500,
            f"the answer is larger than {size_max} bytes, which is the most that is sent{hint}",
            reason="answer_too_large",
        )


def _values(tensor: Tensor, at: int, end: int) -> Sequence[object]:
    """Elements from one byte to another."""
    data = memoryview_of(tensor)
    if tensor.datatype == "BYTES":
        return _texts(tensor.name, data, at, len(data))[0]
    code = _CODES.get(tensor.datatype)
    if code is None:
        raise RequestError(
            406, f"output {tensor.name!r} is {tensor.datatype}; ask for it as binary data"
        )
    return struct.unpack_from(f"<{(end - at) // ITEM_BYTES[tensor.datatype]}{code}", data, at)


def _texts(name: str, data: memoryview, at: int, count_max: int) -> tuple[list[object], int]:
    """So many elements of `BYTES`, as text; and where the next one begins."""
    length_at = _LENGTH.unpack_from
    texts: list[object] = []
    end = len(data)
    try:
        while at < end and len(texts) < count_max:
            start = at + 4
            at = start + length_at(data, at)[0]
            if at > end:
                raise ValueError
            texts.append(str(data[start:at], "utf-8"))
    except (ValueError, struct.error):
        raise RequestError(
            406, f"output {name!r} is not UTF-8; ask for it as binary data"
        ) from None
    return texts, at


# --- raw bytes ----------------------------------------------------------------------------------


def check_strings(count: int) -> None:
    """See that a request has no more strings than may be walked. Raises `RequestError` (400)."""
    if count > STRINGS_MAX:
        raise RequestError(400, f"the request has more than {STRINGS_MAX} strings")


def check_bytes(data: memoryview, name: str, datatype: str, count: int) -> None:
    """See that raw bytes are what they should be: `count` elements, whole.

    Raises `RequestError` if not.
    """
    if datatype == "BYTES":
        check_strings(count)
        if not is_whole(data, count):
            raise RequestError(400, f"{name!r} is not {count} strings, or a length in it lies")
    elif len(data) != count * ITEM_BYTES[datatype]:
        raise RequestError(
            400,
            f"{name!r} has {len(data)} bytes; its shape and datatype ask for "
            f"{count * ITEM_BYTES[datatype]}",
        )


def split(data: memoryview) -> Sequence[memoryview]:
    """The elements of a `BYTES` tensor. Raises `ValueError` where lengths and bytes disagree.

    >>> [bytes(part) for part in split(memoryview(pack_strings([b"a", b""])))]
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


def pack_strings(parts: Sequence[bytes | memoryview]) -> bytes:
    """A `BYTES` tensor's raw bytes: each element behind its length.

    >>> pack_strings([b"ab"])
    b'\\x02\\x00\\x00\\x00ab'
    """
    return b"".join(chain.from_iterable((_LENGTH.pack(len(part)), part) for part in parts))


def memoryview_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor that has come to this process."""
    assert isinstance(tensor.data, memoryview)
    return tensor.data


def is_whole(data: memoryview, count: int) -> bool:
    """Whether these are so many strings, and nothing more. Keeps none of them."""
    length_at = _LENGTH.unpack_from
    at, end = 0, len(data)
    last = end - 4
    for _ in range(count):
        if at > last:
            return False
        at += 4 + length_at(data, at)[0]
    return at == end


def _string_decoders() -> tuple[Decoder[object], ...]:
    """By depth of nesting, 0 for a bare string."""
    made: list[Decoder[object]] = []
    wanted: object = str
    for _ in range(_DEPTH_MAX + 1):
        made.append(Decoder(cast("type[object]", wanted)))
        wanted = list[wanted]  # type: ignore[valid-type]
    return tuple(made)


def _kind(datatype: str) -> type:
    if datatype == "BOOL":
        return bool
    return float if datatype.startswith("FP") else int


_STRINGS: Final = _string_decoders()
_FLAT: Final[Mapping[str, Decoder[object]]] = {
    **{datatype: Decoder(cast("type[object]", list[_kind(datatype)])) for datatype in _CODES},  # type: ignore[misc]
    "BYTES": _STRINGS[1],
}
_ELEMENT_ENCODER: Final = Encoder()


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
    """A request, its form checked. Raises `RequestError` (400, 413)."""
    if len(text) > limits.json_bytes_max:
        raise too_much_text(limits)
    try:
        request = _DECODER.decode(text)
    except RecursionError:
        raise RequestError(400, "the request is too deeply nested") from None
    except ValueError as problem:  # of msgspec, or text that is not UTF-8
        raise RequestError(400, f"the request is not understood: {problem}") from None
    most = limits.inputs_max
    if len(request.inputs) > most or (request.outputs and len(request.outputs) > most):
        raise RequestError(400, f"more than {most} inputs or outputs")
    return request


def too_much_text(limits: GatewayConfig) -> RequestError:
    """What is said of text that would take too long to read."""
    return RequestError(
        413,
        f"more than {limits.json_bytes_max} bytes of text; send tensors as binary data "
        "(Inference-Header-Content-Length, and binary_data_size of each input)",
        reason="too_large",
    )


def encode(response: InferResponse) -> bytes:
    """A response as JSON."""
    return _ENCODER.encode(response)


def tensor(given: InputJson, limits: GatewayConfig) -> Tensor:
    """One input whose elements are in the JSON. Raises `RequestError` (400)."""
    name = given.name
    count = count_of(given.shape, name, limits.dims_max, limits.elements_max)
    if given.data is UNSET:
        raise RequestError(400, f"input {name!r} has no data")
    return Tensor(
        name,
        given.datatype,
        given.shape,
        from_json(memoryview(given.data), name, given.datatype, given.shape, count),
    )


def output(given: Tensor, text_max: int = 1 << 30) -> OutputJson:
    """An output with its elements in the JSON.

    Raises `RequestError` if JSON cannot have them (406), or in more than `text_max` bytes (500).
    """
    is_short = elements_in(given.datatype, len(memoryview_of(given))) <= PIECE
    data = to_json(given) if is_short else to_json_text(given, text_max)
    return OutputJson(given.name, given.datatype, given.shape, data=data)
