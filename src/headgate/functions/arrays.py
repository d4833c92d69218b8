"""Conversion between tensors and NumPy arrays, without copies where possible; and batches of them.

Arrays made from tensors are aligned and read-only: large ones are in shared memory owned by another
process, and small ones behave alike. Arrays of `BYTES` contain Python `bytes`. NumPy has no `BF16`:
only a function that declares it gets it, as raw bits in `uint16`.

A batch, in `item_count`, `batch_key`, `concatenate` and `split`, is an array whose first dimension
counts items, a list with one element per item, or a dict of batches of equal size. Batches of
several requests are concatenated, and the result is split again.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from math import prod
from typing import Any, Final, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from headgate.functions.tensor import ITEM_BYTES, Block, Tensor

Array: TypeAlias = NDArray[Any]  # of any datatype: it is known only at run time
DIMENSIONS_MAX: Final = 32


def to_array(tensor: Tensor, *, raw_bf16: bool = False) -> Array:
    """Return the elements of a tensor. Raises `ValueError` if its metadata and data disagree.

    >>> to_array(Tensor("x", "INT16", (2,), memoryview(b"\\x01\\x00\\x02\\x00"))).tolist()
    [1, 2]
    """
    data, shape = tensor.data, tensor.shape
    if isinstance(data, Block):
        raise ValueError(f"{tensor.name}: its elements are in shared memory of another process")
    if len(shape) > DIMENSIONS_MAX:
        raise ValueError(f"{tensor.name}: has {len(shape)} dimensions, at most {DIMENSIONS_MAX}")
    dtype = _DTYPES.get(tensor.datatype)
    if dtype is None:
        return _to_special_array(tensor, data, raw_bf16)
    size = prod(shape) * dtype.itemsize
    if size != data.nbytes or (shape and min(shape) < 0):
        raise ValueError(_size_problem(tensor, size, data.nbytes))
    array: Array = np.ndarray(shape, dtype, data)
    flags = array.flags
    if not flags.aligned:
        array = array.copy()
        flags = array.flags
    flags.writeable = False
    return array


def to_tensor(name: str, array: Array, *, datatype: str = "") -> Tensor:
    """Return an array as a tensor that shares its memory.

    With `datatype` `BF16`, `uint16` is taken as raw bits. Raises `ValueError` for an unsupported
    array.

    >>> to_tensor("x", np.float32([[1, 2]])).shape
    (1, 2)
    """
    actual = _DATATYPES.get(array.dtype)
    if actual is None:
        return _special_to_tensor(name, array)
    if datatype == "BF16" and actual == "UINT16":
        actual = "BF16"
    if not array.size:
        return Tensor(name, actual, array.shape, memoryview(b""))
    flat = np.ascontiguousarray(array).reshape(-1)
    return Tensor(name, actual, array.shape, flat.view(np.uint8).data)


def dtype_of(datatype: str) -> np.dtype[Any]:
    """Return the NumPy dtype of a datatype; `BYTES` are objects."""
    if datatype == "BF16":
        return np.dtype(np.uint16)
    return _DTYPES.get(datatype, np.dtype(object))


def item_count(batch: object) -> int:
    """Return the number of items of a batch. Raises `ValueError` if the value is not a batch.

    >>> item_count({"x": np.zeros((3, 2)), "label": ["a", "b", "c"]})
    3
    """
    if isinstance(batch, dict) and batch:
        lengths = [item_count(part) for part in batch.values()]
        if len(lengths) == 1 or len(set(lengths)) == 1:
            return lengths[0]
        raise ValueError(f"has parts with different item counts: {lengths}")
    if isinstance(batch, np.ndarray):
        if not batch.ndim:
            raise ValueError("is an array without dimensions, which has no item count")
        return len(batch)
    if isinstance(batch, list):
        return len(batch)
    kind = "nothing" if batch is None else f"a {type(batch).__name__}"
    raise ValueError(f"is {kind}, not an array, a list or a dict of them")


def batch_key(batch: object) -> Hashable:
    """Return a key that batches must share to be concatenated without changing one another.

    >>> batch_key(np.zeros((3, 2))) == batch_key(np.zeros((5, 2)))
    True
    >>> batch_key(np.zeros((3, 2))) == batch_key(np.zeros((3, 2), np.float32))
    False
    """
    if isinstance(batch, np.ndarray):
        return type(batch), batch.dtype, batch.shape[1:]
    if isinstance(batch, dict):
        return frozenset((name, batch_key(part)) for name, part in batch.items())
    return "list"


def concatenate(batches: Sequence[object]) -> object:
    """Concatenate batches of equal key. A single batch is returned as it is.

    >>> concatenate([{"x": np.int8([1])}, {"x": np.int8([2, 3])}])
    {'x': array([1, 2, 3], dtype=int8)}
    """
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, np.ndarray):
        joined: Array = np.concatenate(cast("Sequence[Array]", batches))
        joined.flags.writeable = False  # like a single batch
        return joined
    if isinstance(first, dict):
        dicts = cast("Sequence[dict[str, object]]", batches)
        return {name: concatenate([batch[name] for batch in dicts]) for name in first}
    return [element for batch in cast("Sequence[list[object]]", batches) for element in batch]


def split(batch: object, lengths: Sequence[int]) -> list[object]:
    """Split a batch by numbers of items. Raises `ValueError` if they do not add up to its size.

    >>> split([1, 2, 3], [1, 2])
    [[1], [2, 3]]
    """
    size, expected = item_count(batch), sum(lengths)
    if size != expected:
        raise ValueError(f"has {size} items for a batch of {expected}")
    if len(lengths) == 1:
        return [batch]
    parts, start = [], 0
    for count in lengths:
        parts.append(_slice(batch, start, start + count))
        start += count
    return parts


def _to_special_array(tensor: Tensor, data: memoryview, raw_bf16: bool) -> Array:
    if tensor.datatype == "BYTES":
        return _unpack_strings(tensor, data)
    if tensor.datatype != "BF16":
        raise ValueError(f"{tensor.name}: {tensor.datatype!r} is not a datatype")
    if not raw_bf16:
        raise ValueError(f"{tensor.name}: BF16 is taken only by functions that declare it")
    return to_array(Tensor(tensor.name, "UINT16", tensor.shape, data))


def _unpack_strings(tensor: Tensor, data: memoryview) -> Array:
    """Return the elements of a `BYTES` tensor, each of which is preceded by its length."""
    name, shape = tensor.name, tensor.shape
    count, size = prod(shape), data.nbytes
    if count < 0 or (shape and min(shape) < 0) or count * _LENGTH > size:
        raise ValueError(_size_problem(tensor, max(count, 0) * _LENGTH, size))
    array: Array = np.empty(count, object)
    start = 0
    for index in range(count):
        end = start + _LENGTH
        item_count = int.from_bytes(data[start:end], "little")
        start = end + item_count
        if end > size or start > size:
            raise ValueError(f"{name}: element {index} exceeds the {size} bytes of the tensor")
        array[index] = bytes(data[end:start])
    if start != size:
        raise ValueError(f"{name}: {size - start} bytes are left over after {count} elements")
    array = array.reshape(shape)
    array.flags.writeable = False
    return array


def _special_to_tensor(name: str, array: Array) -> Tensor:
    if array.dtype.kind not in "OSU":
        little = array.dtype.newbyteorder("<")
        if little in _DATATYPES:
            return to_tensor(name, array.astype(little))
        raise ValueError(f"{name}: an array of {array.dtype} cannot be sent")
    parts: list[bytes] = []
    for element in array.reshape(-1).tolist():
        if isinstance(element, str):
            element = element.encode()
        elif not isinstance(element, bytes):
            kind = type(element).__name__
            raise ValueError(f"{name}: holds a {kind}; only bytes and str can be sent")
        parts += (len(element).to_bytes(_LENGTH, "little"), element)
    return Tensor(name, "BYTES", array.shape, memoryview(b"".join(parts)))


def _size_problem(tensor: Tensor, expected: int, actual: int) -> str:
    if any(size < 0 for size in tensor.shape):
        return f"{tensor.name}: its shape {list(tensor.shape)} has a negative size"
    least = "at least " if tensor.datatype == "BYTES" else ""
    return (
        f"{tensor.name}: {tensor.datatype}{list(tensor.shape)} needs {least}{expected} bytes, "
        f"there are {actual}"
    )


def _slice(batch: object, start: int, end: int) -> object:
    if isinstance(batch, dict):
        return {name: _slice(part, start, end) for name, part in batch.items()}
    return cast("list[object]", batch)[start:end]


_LENGTH: Final = 4  # bytes of the length prefix of an element of BYTES
_KINDS: Final = {"BOOL": "?", "UINT": "<u", "INT": "<i", "FP": "<f"}  # by name without its bits
_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    name: np.dtype(_KINDS[name.rstrip("0123456789")] + (str(size) if name != "BOOL" else ""))
    for name, size in ITEM_BYTES.items()
    if name not in ("BF16", "BYTES")  # NumPy has neither
}
_DATATYPES: Final = {dtype: name for name, dtype in _DTYPES.items()}
