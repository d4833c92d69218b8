"""Shared memory that one process writes and another reads.

The owner copies tensors into the memory and sends their offsets; the reader reports when it has
finished with them. The reader can neither resize nor write the memory. The worst a peer can do is
to send wrong offsets, and those are checked.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import Any, Final, final
from weakref import ref

import numpy as np

from headgate.functions.arrays import Array
from headgate.functions.tensor import Block

# Smaller tensors are sent inside the message, which is faster up to this size.
INLINE_BYTES_MAX: Final = 16 * 1024
_LARGE_BYTES: Final = 1 << 20


def allocate_buffer(size: int) -> memoryview:
    """Return a buffer to read this many bytes into.

    A large buffer is mapped from the kernel and costs nothing until it is written. A `bytearray`
    would be zeroed first, which blocks the event loop.
    """
    if size < _LARGE_BYTES:
        return memoryview(bytearray(size))
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


@final
class Arena:
    """A region of shared memory and its allocator.

    A block of a size that was freed before is found in constant time. Otherwise the end of the
    region is used, or the free blocks are merged and searched. Thread-safe.
    """

    def __init__(self, memory: mmap.mmap, fd: int | None) -> None:
        self._memory = memory
        self._view = memoryview(memory)
        self._fd = fd
        self._size = len(memory)
        self._end = 0  # end of the part that was ever allocated
        self._used: dict[int, int] = {}  # size by offset
        self._free: dict[int, list[int]] = {}  # offsets by size
        self._too_large = self._size + 1  # allocations of this size fail until something is freed
        self._lock = Lock()

    @staticmethod
    def create(size: int) -> Arena:
        """Create shared memory owned by this process. Pages that are never written cost nothing."""
        fd = os.memfd_create("headgate", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            # Mapped before the seal, so that this mapping stays writable.
            memory = mmap.mmap(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(fd)
            raise
        return Arena(memory, fd)

    @staticmethod
    def attach(fd: int, size: int) -> Arena:
        """Map the memory of another process for reading. Takes ownership of the descriptor and
        closes it.

        Raises `ValueError` if the memory is not sealed: access would kill this process if the
        memory shrank.
        """
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _NEEDED_SEALS != _NEEDED_SEALS:
                raise ValueError("the shared memory is not sealed against shrinking")
            memory = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        except OSError as error:
            raise ValueError(f"cannot map shared memory: {error}") from None
        finally:
            os.close(fd)
        return Arena(memory, None)

    @property
    def fd(self) -> int:
        """The descriptor that the reader attaches to. Only the owner has it."""
        assert self._fd is not None, "only the owner has the descriptor"
        return self._fd

    @property
    def size(self) -> int:
        return self._size

    def allocate(self, data: memoryview) -> Block | None:
        """Copy bytes into a new block; return None if there is no room."""
        size = data.nbytes
        room = -(-size // _GRAIN) * _GRAIN or _GRAIN
        with self._lock:
            offset = self._take(room)
            if offset is None:
                return None
            self._used[offset] = room
            self._view[offset : offset + size] = data
        return Block(offset, size)

    def reserve(self, size: int) -> tuple[Block, memoryview] | None:
        """Allocate a block that is filled later, in chunks; return None if there is no room."""
        room = -(-size // _GRAIN) * _GRAIN or _GRAIN
        with self._lock:
            offset = self._take(room)
            if offset is None:
                return None
            self._used[offset] = room
            return Block(offset, size), self._view[offset : offset + size]

    def free(self, offset: int) -> None:
        """Free a block. Raises `ValueError` if no block begins at the offset."""
        with self._lock:
            room = self._used.pop(offset, 0)
            if not room:
                raise ValueError(f"no block begins at {offset}")
            self._free.setdefault(room, []).append(offset)
            self._too_large = self._size + 1

    def view(self, block: Block) -> memoryview:
        """Return the content of a block, read-only. Raises `ValueError` outside the region."""
        offset, size = block.offset, block.size
        if offset < 0 or size < 0 or offset + size > self._size:
            raise ValueError(f"{size} bytes at {offset} are outside the region of {self._size}")
        return self._view[offset : offset + size].toreadonly()

    def close(self) -> None:
        """Release the memory. Arrays that still reference it stay valid."""
        with self._lock:
            self._too_large = 0  # every further allocation fails
            self._view.release()
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
            with suppress(BufferError):  # the mapping is freed with the last view of it
                self._memory.close()

    def _take(self, room: int) -> int | None:
        if room >= self._too_large:
            return None
        same = self._free.get(room)
        if same:
            return same.pop()
        if self._end + room > self._size:
            return self._search(room)
        self._end += room
        return self._end - room

    def _search(self, room: int) -> int | None:
        """Merge adjacent free blocks and take the first that is large enough."""
        holes: list[list[int]] = []  # [offset, size]
        for offset, size in sorted((o, s) for s, offsets in self._free.items() for o in offsets):
            if holes and sum(holes[-1]) == offset:
                holes[-1][1] += size
            else:
                holes.append([offset, size])
        if holes and sum(holes[-1]) == self._end:
            self._end = holes.pop()[0]
        taken: int | None = None
        self._free = {}
        for offset, size in holes:
            if taken is None and size >= room:
                taken, offset, size = offset, offset + room, size - room
            if size:
                self._free.setdefault(size, []).append(offset)
        if taken is None and self._end + room <= self._size:
            taken = self._end
            self._end += room
        if taken is None:
            self._too_large = min(self._too_large, room)
        return taken


_GRAIN: Final = 4096  # a page: blocks of similar size are interchangeable
_SEAL_FUTURE_WRITE: Final = 0x10  # in Linux since 5.1; missing in the module `fcntl`
_NEEDED_SEALS: Final = fcntl.F_SEAL_SHRINK
_SEALS: Final = _NEEDED_SEALS | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL


@final
class BorrowedBlocks:
    """Blocks that this process reads in place, each with the array that owns its content here.

    The owner of the memory may reuse a block once the last array or view of it is freed, wherever
    that array is kept and however its request ends. So a block is counted by the references to it,
    and nobody has to remember to release it.
    """

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
