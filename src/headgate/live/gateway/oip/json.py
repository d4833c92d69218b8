"""The Open Inference Protocol's JSON: requests in, responses out, and the elements of tensors.

Decoding has two steps. `decode` checks the form of a request and leaves the elements of each input
as text (`Raw`). `tensor` then checks the shape against the limits, before anything is allocated for
it, and reads the elements once, straight into the raw little-endian bytes that tensors carry. Every
element is checked against its datatype; nothing is rounded, truncated or wrapped to make it fit.

Memory: numbers as Python objects take sixteen times the memory of their text, so long lists are
converted some ten thousand numbers at a time (`PIECE`). Nested lists are never built. How they must
be nested follows from the shape, so the brackets and commas of the text, without everything else,
are compared with those that the shape implies (`_structure`); the text is then read as a flat list.
The length of that structure is computed before the structure is made, because a short text may
claim any shape.

Encoding is the reverse: flat lists of elements, in pieces where the tensor is large, and an error
as soon as the text exceeds the limit. BF16 has no JSON form here, and `BYTES` only if it is UTF-8.

`BYTES` tensors hold strings, each behind its length of four bytes. They are walked one by one while
the event loop serves nobody else, so a request may have at most `STRINGS_MAX` of them.

The functions on elements serve the other formats as well: SageMaker's rows, Triton's binary
extension, gRPC, and the pool that calls SageMaker endpoints.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from typing import Final, cast, get_args

from msgspec import UNSET, Raw
from msgspec.json import Decoder, Encoder

from headgate.functions.tensor import ITEM_BYTES, Tensor
from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.errors import RequestError
from headgate.live.gateway.oip.messages import (
    Datatype,
    InferRequest,
    InferResponse,
    InputJson,
    OutputJson,
)

# Format characters of `struct` for the datatypes that have a JSON form.
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
STRINGS_MAX: Final = 1 << 16  # of one request
PIECE: Final = 1 << 16  # characters read, or elements written, at a time

_SPACE: Final = b" \t\r\n"
_NESTED_START: Final = re.compile(rb"[ \t\r\n]*\[[ \t\r\n]*\[")
_NOT_STRUCTURE: Final = bytes(byte for byte in range(256) if byte not in b"[],")
_NO_BRACKETS: Final = bytes.maketrans(b"[]", b"  ")

_DECODER: Final = Decoder(InferRequest)


def decode(text: bytes | bytearray | memoryview, limits: GatewayConfig) -> InferRequest:
    """Parse a request, leaving elements as text. Raises `RequestError` (400, 413)."""
    if len(text) > limits.json_bytes_max:
        raise text_too_long(limits)
    try:
        request = _DECODER.decode(text)
    except RecursionError:
        raise RequestError(400, "the request is too deeply nested") from None
    except ValueError as error:  # msgspec's, or text that is not UTF-8
        problem = str(error) if len(text) else "the body is empty"
        if problem.startswith("Invalid enum value"):  # nothing but a datatype is one
            problem += f" (allowed: {', '.join(get_args(Datatype))})"
        raise RequestError(400, f"the request cannot be parsed: {problem}") from None
    count_max = limits.inputs_max
    if len(request.inputs) > count_max or (request.outputs and len(request.outputs) > count_max):
        raise RequestError(400, f"the request has more than {count_max} inputs or outputs")
    return request


def text_too_long(limits: GatewayConfig) -> RequestError:
    """The error for text that would take too long to read."""
    return RequestError(
        413,
        f"the request has more than {limits.json_bytes_max} bytes of text; send tensors as binary "
        "data (Inference-Header-Content-Length, and binary_data_size of each input)",
        reason="too_large",
    )


def encode(response: InferResponse) -> bytes:
    return _ENCODER.encode(response)


def tensor(given: InputJson, limits: GatewayConfig) -> Tensor:
    """The tensor of an input whose elements are in the JSON. Raises `RequestError` (400)."""
    name = given.name
    count = element_count(given.shape, name, limits.dims_max, limits.elements_max)
    if given.data is UNSET:
        raise RequestError(400, f"input {name!r} has no data")
    return Tensor(
        name,
        given.datatype,
        given.shape,
        from_json(memoryview(given.data), name, given.datatype, given.shape, count),
    )


def output(given: Tensor, text_max: int = 1 << 30) -> OutputJson:
    """The JSON of an output, elements included.

    Raises `RequestError` if the elements have no JSON form (406), or if the text would be longer
    than `text_max` bytes (500).
    """
    is_short = elements_in(given.datatype, len(memoryview_of(given))) <= PIECE
    data = to_json(given) if is_short else to_json_text(given, text_max)
    return OutputJson(given.name, given.datatype, given.shape, data=data)


def element_count(shape: Sequence[int], name: str, dims_max: int, elements_max: int) -> int:
    """The number of elements of a shape. Raises `RequestError` beyond the limits.

    >>> element_count((2, 3), "x", 8, 100), element_count((), "x", 8, 100)
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


def from_json(
    text: bytes | memoryview, name: str, datatype: str, shape: Sequence[int], count: int
) -> memoryview:
    """The raw bytes of `count` elements in JSON, flat or nested like `shape`.

    The text must be valid JSON. Raises `RequestError` if the elements have another type,
    exceed its range, or are too few or too many.
    """
    flat = _FLAT.get(datatype)
    if flat is None:
        raise RequestError(400, f"{name!r}: {datatype} can only be sent as binary data")
    if len(text) <= PIECE and datatype != "BYTES":  # nearly always: one flat list, decoded at once
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
    total = 0
    for piece in _pieces(text):
        try:
            values = cast("Sequence[object]", flat.decode(piece))
        except (ValueError, RecursionError) as problem:
            raise RequestError(400, f"{name!r}: {_problem_text(problem)}") from None
        packed.append(_packed(values, name, datatype))
        total += len(values)
        if total > count:
            break
    if total != count:
        number = f"more than {count}" if total > count else str(total)
        raise RequestError(400, f"{name!r} has {number} elements; its shape needs {count}")
    return memoryview(b"".join(packed))


def _packed(values: Sequence[object], name: str, datatype: str) -> bytes:
    try:
        return struct.pack(f"<{len(values)}{_CODES[datatype]}", *values)
    except (struct.error, OverflowError):
        raise RequestError(400, f"{name!r} has an element out of the range of {datatype}") from None


def _pieces(text: bytes | memoryview) -> Iterator[bytes | memoryview]:
    """Split a flat list of numbers into shorter lists, at its commas.

    >>> [bytes(piece) for piece in _pieces(b"[1,2]")]
    [b'[1,2]']
    """
    size = len(text)
    if size <= 2 * PIECE:
        yield text
        return
    data = bytes(text).strip(_SPACE)
    if not data.startswith(b"["):
        yield data  # not a list: the decoder raises the error
        return
    at, end = 1, len(data) - 1
    while True:
        comma = data.find(b",", at + PIECE, end)
        if comma < 0:
            yield b"[%b]" % data[at:end]
            return
        yield b"[%b]" % data[at:comma]
        at = comma + 1


def _flattened(
    text: bytes | memoryview, name: str, shape: Sequence[int], count: int
) -> bytes | memoryview:
    """Turn nested lists of numbers into a flat list.

    Raises `RequestError` unless they are nested like their shape.

    >>> bytes(_flattened(b"[[1,2],[3,4]]", "x", (2, 2), 4))
    b'[  1,2 , 3,4  ]'
    """
    data = text if isinstance(text, bytes) else bytes(text)
    structure = data.translate(None, _NOT_STRUCTURE)
    if len(structure) != _structure_bytes(shape) or structure != _structure(shape):
        raise RequestError(400, f"{name!r} is not nested like its shape")
    if count == 0:  # whatever is left must be nothing: the number of elements is checked later
        return b"[%b]" % data.translate(None, b"[]," + _SPACE)
    return b"[%b]" % data.translate(_NO_BRACKETS)


def _structure(shape: Sequence[int]) -> bytes:
    """The brackets and commas of nested lists of this shape.

    >>> _structure((2, 3)), _structure((2, 0)), _structure((0, 2))
    (b'[[,,],[,,]]', b'[[],[]]', b'[]')
    """
    inner = b""
    for size in reversed(shape):
        inner = b"[%b]" % ((inner + b",") * size)[:-1]  # `join` would take 80 bytes per item
    return inner


def _structure_bytes(shape: Sequence[int]) -> int:
    """The length of `_structure(shape)`, without making it.

    >>> _structure_bytes((2, 3)), _structure_bytes((2, 0)), _structure_bytes((0, 2))
    (11, 7, 2)
    """
    inner = 0
    for size in reversed(shape):
        inner = 2 + size * inner + max(0, size - 1)
    return inner


def shape_of_numbers(text: bytes, dims_max: int) -> tuple[int, ...]:
    """The shape of nested lists of numbers, taken from the first list of each level.

    Raises `RequestError` where they are nested too deeply, or are not lists.

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
        sizes = [structure.index(b"]") - depth + 1]  # one more than its commas
    else:
        sizes = [0]
    inner = 2 + max(0, sizes[0] - 1)
    for closing in range(2, depth + 1):
        # The first list of a level ends where that many closing brackets first come together.
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
        raise RequestError(400, f"{name!r}: {_problem_text(problem)}") from None
    if is_nested:
        level = _flat_strings(level, name, shape)
    if len(level) != count:
        raise RequestError(400, f"{name!r} has {len(level)} elements; its shape needs {count}")
    return memoryview(pack_strings([cast("str", value).encode() for value in level]))


def _flat_strings(level: list[object], name: str, shape: Sequence[int]) -> list[object]:
    """Flatten nested lists of strings. Raises `RequestError` unless nested like their shape."""
    wrong = RequestError(400, f"{name!r} is not nested like its shape")
    if len(level) != shape[0]:
        raise wrong
    for size in shape[1:]:
        rows = cast("list[list[object]]", level)
        if any(len(row) != size for row in rows):
            raise wrong
        level = list(chain.from_iterable(rows))
    return level


def _problem_text(problem: Exception) -> str:
    return "too deeply nested" if isinstance(problem, RecursionError) else str(problem)


def to_json(tensor: Tensor) -> Sequence[object]:
    """The elements as a flat list for JSON, where NaN and infinities become null.

    Raises `RequestError` (406) where the elements have no JSON form.
    """
    data = memoryview_of(tensor)
    code = _CODES.get(tensor.datatype)
    if code is None:
        return _values(tensor, 0, len(data))
    return struct.unpack(f"<{len(data) // ITEM_BYTES[tensor.datatype]}{code}", data)


def to_json_text(tensor: Tensor, text_max: int) -> Raw:
    """The elements as JSON, made in pieces. Raises `RequestError` beyond `text_max` bytes."""
    pieces: list[bytes] = []
    size = 1
    for values in _values_in_pieces(tensor):
        pieces.append(_ENCODER.encode(values)[1:-1])
        size += len(pieces[-1]) + 1
        check_response_size(size, text_max)
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
    """The elements of the rows from `first` to before `last`, as a flat list.

    Not for strings, whose rows differ in size: use `to_json`. Raises `RequestError` like `to_json`.
    """
    width = prod(tensor.shape[1:]) * ITEM_BYTES[tensor.datatype]
    return list(_values(tensor, first * width, last * width))


def nested(level: list[object], shape: Sequence[int]) -> list[object]:
    """Nest a flat list of elements like a shape.

    >>> nested([1, 2, 3, 4], (2, 2))
    [[1, 2], [3, 4]]
    """
    for size in reversed(shape[1:]):
        level = [level[at : at + size] for at in range(0, len(level), size or 1)]
    return level


def elements_in(datatype: str, size: int) -> int:
    """The number of elements in `size` bytes; for `BYTES`, the bytes, which take as long to write.

    >>> elements_in("FP32", 400), elements_in("BYTES", 400)
    (100, 400)
    """
    return size // (ITEM_BYTES.get(datatype) or 1)


def min_text_bytes(datatype: str, size: int) -> int:
    """The least length of the text for `size` bytes: per element a digit (or `0.0`) and a comma.

    >>> min_text_bytes("FP16", 200), min_text_bytes("INT8", 100)
    (400, 200)
    """
    if datatype == "BYTES":
        return size * 3 // 4  # two quotes and a comma for each length of four bytes
    return elements_in(datatype, size) * (4 if datatype.startswith("FP") else 2)


def check_response_size(size: int, size_max: int, *, is_text: bool = True) -> None:
    """Raise `RequestError` (500) if a response is larger than the limit."""
    if size > size_max:
        hint = "; binary output is smaller (binary_data_output)" if is_text else ""
        raise RequestError(
            500,
            f"the response is larger than the limit of {size_max} bytes{hint}",
            reason="answer_too_large",
        )


def _values(tensor: Tensor, at: int, end: int) -> Sequence[object]:
    """The elements in the bytes from `at` to `end`."""
    data = memoryview_of(tensor)
    if tensor.datatype == "BYTES":
        return _texts(tensor.name, data, at, len(data))[0]
    code = _CODES.get(tensor.datatype)
    if code is None:
        raise RequestError(
            406, f"output {tensor.name!r} is {tensor.datatype}; request it as binary data"
        )
    return struct.unpack_from(f"<{(end - at) // ITEM_BYTES[tensor.datatype]}{code}", data, at)


def _texts(name: str, data: memoryview, at: int, count_max: int) -> tuple[list[object], int]:
    """At most `count_max` strings of a `BYTES` tensor, and the position of the next one."""
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
            406, f"output {name!r} is not UTF-8; request it as binary data"
        ) from None
    return texts, at


def check_strings(count: int) -> None:
    """Raise `RequestError` (400) if a request has more than `STRINGS_MAX` strings."""
    if count > STRINGS_MAX:
        raise RequestError(400, f"the request has more than {STRINGS_MAX} strings")


def check_bytes(data: memoryview, name: str, datatype: str, count: int) -> None:
    """Raise `RequestError` (400) unless raw bytes are exactly `count` elements."""
    if datatype == "BYTES":
        check_strings(count)
        if not holds_strings(data, count):
            raise RequestError(400, f"{name!r} is not {count} strings: a length does not fit")
    elif len(data) != count * ITEM_BYTES[datatype]:
        raise RequestError(
            400,
            f"{name!r} has {len(data)} bytes; its shape and datatype need "
            f"{count * ITEM_BYTES[datatype]}",
        )


def split_strings(data: memoryview) -> Sequence[memoryview]:
    """The strings of a `BYTES` tensor. Raises `ValueError` where lengths and bytes disagree.

    >>> [bytes(part) for part in split_strings(memoryview(pack_strings([b"a", b""])))]
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
    """The raw bytes of a `BYTES` tensor: each string behind its length.

    >>> pack_strings([b"ab"])
    b'\\x02\\x00\\x00\\x00ab'
    """
    return b"".join(chain.from_iterable((_LENGTH.pack(len(part)), part) for part in parts))


def memoryview_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor that is in this process's memory."""
    assert isinstance(tensor.data, memoryview)
    return tensor.data


def holds_strings(data: memoryview, count: int) -> bool:
    """Whether `data` is exactly `count` strings. Makes no objects of them."""
    length_at = _LENGTH.unpack_from
    at, end = 0, len(data)
    last = end - 4
    for _ in range(count):
        if at > last:
            return False
        at += 4 + length_at(data, at)[0]
    return at == end


def _string_decoders() -> tuple[Decoder[object], ...]:
    """Decoders of nested lists of strings by depth; 0 is a bare string."""
    decoders: list[Decoder[object]] = []
    nested_type: object = str
    for _ in range(_DEPTH_MAX + 1):
        decoders.append(Decoder(cast("type[object]", nested_type)))
        nested_type = list[nested_type]  # type: ignore[valid-type]
    return tuple(decoders)


def _python_type(datatype: str) -> type:
    if datatype == "BOOL":
        return bool
    return float if datatype.startswith("FP") else int


_STRINGS: Final = _string_decoders()
_FLAT: Final[Mapping[str, Decoder[object]]] = {
    **{name: Decoder(cast("type[object]", list[_python_type(name)])) for name in _CODES},  # type: ignore[misc]
    "BYTES": _STRINGS[1],
}
_ENCODER: Final = Encoder()
