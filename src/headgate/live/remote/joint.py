"""Requests that go together as one, and answers that are cut apart again, by items."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from headgate.functions.tensor import Tensor
from headgate.live.gateway.elements import joined, memoryview_of, split
from headgate.live.messages import Work


def join(works: Sequence[Work]) -> list[Tensor] | None:
    """Return the inputs of one request for all items; None if they are not alike."""
    if len(works) == 1:
        return works[0].inputs
    likenesses = {
        tuple((tensor.name, tensor.datatype, tensor.shape[1:]) for tensor in work.inputs)
        for work in works
    }
    counts = all(tensor.shape[:1] == (work.items,) for work in works for tensor in work.inputs)
    if len(likenesses) > 1 or not counts:
        return None
    items = sum(work.items for work in works)
    return [
        Tensor(
            tensor.name,
            tensor.datatype,
            (items, *tensor.shape[1:]),
            memoryview(b"".join(memoryview_of(work.inputs[place]) for work in works)),
        )
        for place, tensor in enumerate(works[0].inputs)
    ]


def cut(outputs: Sequence[Tensor], items: Sequence[int]) -> list[list[Tensor]]:
    """Return the outputs of each request, which have so many items. Raises `ValueError`.

    >>> tensor = Tensor("y", "UINT8", (3,), memoryview(b"abc"))
    >>> [bytes(part[0].data) for part in cut([tensor], [1, 2])]
    [b'a', b'bc']
    """
    if len(items) == 1:
        return [list(outputs)]
    parts: list[list[Tensor]] = [[] for _ in items]
    for tensor in outputs:
        if tensor.shape[:1] != (sum(items),):
            raise ValueError(f"output {tensor.name!r} is {list(tensor.shape)} for {sum(items)}")
        at = 0
        for part, count in zip(parts, items, strict=True):
            shape = (count, *tensor.shape[1:])
            part.append(Tensor(tensor.name, tensor.datatype, shape, _rows(tensor, at, count)))
            at += count
    return parts


def _rows(tensor: Tensor, at: int, count: int) -> memoryview:
    data = memoryview_of(tensor)
    if tensor.datatype == "BYTES":
        width = prod(tensor.shape[1:])
        return memoryview(joined(split(data)[at * width : (at + count) * width]))
    width = len(data) // tensor.shape[0]
    return data[at * width : (at + count) * width]
