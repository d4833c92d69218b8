"""Blocks of shared memory that this process reads in place.

The owner of the memory may reuse a block once the last array or view of it is freed, wherever that
array is kept and however the request that it belongs to ends. So a block is counted by the
references to it, and nobody has to remember to release it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final
from weakref import ref

import numpy as np

from headgate.functions.arrays import Array
from headgate.functions.tensor import Block
from headgate.live.ipc.shared_memory import Arena


@final
class BorrowedBlocks:
    """The blocks in use, each with the array that owns its content for this process."""

    def __init__(self, on_freed: Callable[[Block], None]) -> None:
        """`on_freed` gets each block once. It runs in any thread and must not block or raise."""
        self._on_freed = on_freed
        # By the id of the weak reference that reports the end of an array, with the array's id.
        self._by_ref: dict[int, tuple[ref[Array], int]] = {}
        self._by_array: dict[int, Block] = {}  # by the id of the array

    def borrow(self, arena: Arena, block: Block) -> memoryview:
        """Return the content of a block. Raises `ValueError` if it is outside the memory.

        All views and arrays derived from the result keep the block in use.
        """
        owner: Array = np.frombuffer(arena.view(block), np.uint8)
        freed = ref(owner, self._on_array_freed)
        self._by_ref[id(freed)] = (freed, id(owner))
        self._by_array[id(owner)] = block
        return owner.data

    def find(self, data: memoryview) -> Block | None:
        """Return the block of a view that `borrow` returned; None for any other memory."""
        return self._by_array.get(id(data.obj))

    def size_bytes(self) -> int:
        """Return how many bytes are in use."""
        return sum(block.size for block in list(self._by_array.values()))

    def _on_array_freed(self, freed: ref[Any]) -> None:
        # The array still occupies its id, which Python reuses only after this call.
        _, array_id = self._by_ref.pop(id(freed))
        self._on_freed(self._by_array.pop(array_id))
