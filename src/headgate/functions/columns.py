"""Columns: what belongs to several items, one after the other, so that requests can go together.

An array is a column along its first dimension, a list is one of its elements, and a dict of columns
of one length is a column. Requests are joined into one and its answer is cut apart again.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import cast

import numpy as np

from headgate.functions.arrays import Array


def length(column: object) -> int:
    """Return how many items there are. Raises `ValueError` where that cannot be said.

    >>> length({"x": np.zeros((3, 2)), "label": ["a", "b", "c"]})
    3
    """
    if isinstance(column, dict) and column:
        lengths = [length(part) for part in column.values()]
        if len(lengths) == 1 or len(set(lengths)) == 1:
            return lengths[0]
        raise ValueError(f"has parts with different numbers of items: {lengths}")
    if isinstance(column, np.ndarray):
        if not column.ndim:
            raise ValueError("is an array without dimensions, which counts no items")
        return len(column)
    if isinstance(column, list):
        return len(column)
    raise ValueError(f"is {_kind(column)}, not an array, a list or a dict of them")


def likeness(column: object) -> Hashable:
    """Return what columns must have in common to be joined without changing one another.

    >>> likeness(np.zeros((3, 2))) == likeness(np.zeros((5, 2)))
    True
    >>> likeness(np.zeros((3, 2))) == likeness(np.zeros((3, 2), np.float32))
    False
    """
    if isinstance(column, np.ndarray):
        return type(column), column.dtype, column.shape[1:]
    if isinstance(column, dict):
        return frozenset((name, likeness(part)) for name, part in column.items())
    return "list"


def join(columns: Sequence[object]) -> object:
    """Return columns that are alike as one. A single one is returned as it is.

    >>> join([{"x": np.int8([1])}, {"x": np.int8([2, 3])}])
    {'x': array([1, 2, 3], dtype=int8)}
    """
    first = columns[0]
    if len(columns) == 1:
        return first
    if isinstance(first, np.ndarray):
        joined: Array = np.concatenate(cast("Sequence[Array]", columns))
        joined.flags.writeable = False  # as a single one is
        return joined
    if isinstance(first, dict):
        dicts = cast("Sequence[dict[str, object]]", columns)
        return {name: join([column[name] for column in dicts]) for name in first}
    return [element for column in cast("Sequence[list[object]]", columns) for element in column]


def split(column: object, lengths: Sequence[int]) -> list[object]:
    """Return the parts of a column. Raises `ValueError` if they are not all of it.

    >>> split([1, 2, 3], [1, 2])
    [[1], [2, 3]]
    """
    there, wanted = length(column), sum(lengths)
    if there != wanted:
        raise ValueError(f"has {there} items for a batch of {wanted}")
    if len(lengths) == 1:
        return [column]
    parts, start = [], 0
    for count in lengths:
        parts.append(_cut(column, start, start + count))
        start += count
    return parts


def _cut(column: object, start: int, end: int) -> object:
    if isinstance(column, dict):
        return {name: _cut(part, start, end) for name, part in column.items()}
    return cast("list[object]", column)[start:end]


def _kind(thing: object) -> str:
    return "nothing" if thing is None else f"a {type(thing).__name__}"
