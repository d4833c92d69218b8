"""Shared memory that one process writes and another one reads.

Its owner puts tensors into it and says where they are; the reader says when it has read them. The
memory can be neither resized nor written by the reader, so that the worst a peer can do is to lie
about where things are, and that is checked.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import suppress
from threading import Lock
from typing import Final, final

from headgate.functions.tensor import Block

# Smaller tensors travel in the message itself: that is quicker up to here.
INLINE_BYTES_MAX: Final = 16 * 1024
_LARGE_BYTES: Final = 1 << 20


def allocate_buffer(size: int) -> memoryview:
    """Memory to read so many bytes into.

    A large piece comes straight from the kernel, and costs nothing before it is written to: a
    `bytearray` is filled with zeros first, and everybody waits.
    """
    if size < _LARGE_BYTES:
        return memoryview(bytearray(size))
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


@final
class Arena:
    """A piece of shared memory, and who has which part of it.

    Blocks of a size that was freed before are found at once; else there is room at the end, or the
    free ones are merged and searched. Safe between threads.
    """

    def __init__(self, memory: mmap.mmap, fd: int | None) -> None:
        self._memory = memory
        self._view = memoryview(memory)
        self._fd = fd
        self._size = len(memory)
        self._end = 0  # nothing was ever given away beyond
        self._used: dict[int, int] = {}  # size by offset
        self._free: dict[int, list[int]] = {}  # offsets by size
        self._too_large = self._size + 1  # no block of so many bytes since something was freed
        self._lock = Lock()

    @staticmethod
    def create(size: int) -> Arena:
        """Make shared memory of our own. Pages that are never used cost nothing."""
        fd = os.memfd_create("headgate", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            memory = mmap.mmap(fd, size)  # before the seal: this mapping stays writable
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(fd)
            raise
        return Arena(memory, fd)

    @staticmethod
    def attach(fd: int, size: int) -> Arena:
        """Read somebody else's. The descriptor is ours from now on, and closed.

        Raises `ValueError` if it is not such memory: if it could shrink under us, that would kill
        us.
        """
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _NEEDED_SEALS != _NEEDED_SEALS:
                raise ValueError("shared memory that is not sealed against shrinking")
            memory = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        except OSError as error:
            raise ValueError(f"no shared memory: {error}") from None
        finally:
            os.close(fd)
        return Arena(memory, None)

    @property
    def fd(self) -> int:
        """What the reader attaches to. Only our own has it."""
        assert self._fd is not None, "it is somebody else's"
        return self._fd

    @property
    def size(self) -> int:
        """Its bytes in all."""
        return self._size

    def allocate(self, data: memoryview) -> Block | None:
        """Put bytes into it; None if there is no room."""
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
        """Take room for bytes that are put there later, piece by piece; None if there is none."""
        room = -(-size // _GRAIN) * _GRAIN or _GRAIN
        with self._lock:
            offset = self._take(room)
            if offset is None:
                return None
            self._used[offset] = room
            return Block(offset, size), self._view[offset : offset + size]

    def free(self, offset: int) -> None:
        """Take a block back. Raises `ValueError` if there is none."""
        with self._lock:
            room = self._used.pop(offset, 0)
            if not room:
                raise ValueError(f"no block begins at {offset}")
            self._free.setdefault(room, []).append(offset)
            self._too_large = self._size + 1

    def view(self, block: Block) -> memoryview:
        """Return what is in a block, read-only. Raises `ValueError` if it is not within."""
        offset, size = block.offset, block.size
        if offset < 0 or size < 0 or offset + size > self._size:
            raise ValueError(f"{size} bytes at {offset} are not within {self._size}")
        return self._view[offset : offset + size].toreadonly()

    def close(self) -> None:
        """Let go of it; arrays that are still in use keep what they look at."""
        with self._lock:
            self._too_large = 0  # no more room for anything
            self._view.release()
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
            with suppress(BufferError):  # it goes when the last of its views goes
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
        """Merge neighbours that are free, and take the first that is large enough."""
        holes: list[list[int]] = []  # [offset, size]
        for offset, size in sorted((o, s) for s, offsets in self._free.items() for o in offsets):
            if holes and sum(holes[-1]) == offset:
                holes[-1][1] += size
            else:
                holes.append([offset, size])
        if holes and sum(holes[-1]) == self._end:
            self._end = holes.pop()[0]
        offset_found: int | None = None
        self._free = {}
        for offset, size in holes:
            if offset_found is None and size >= room:
                offset_found, offset, size = offset, offset + room, size - room
            if size:
                self._free.setdefault(size, []).append(offset)
        if offset_found is None and self._end + room <= self._size:
            offset_found = self._end
            self._end += room
        if offset_found is None:
            self._too_large = min(self._too_large, room)
        return offset_found


_GRAIN: Final = 4096  # a page: sizes that are nearly alike use the same blocks
_SEAL_FUTURE_WRITE: Final = 0x10  # Linux has it since 5.1; the module does not name it
_NEEDED_SEALS: Final = fcntl.F_SEAL_SHRINK
_SEALS: Final = _NEEDED_SEALS | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
