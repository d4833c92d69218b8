"""Remembers which requests have begun to run, for functions that must not run a request twice.

A client whose gateway died cannot know whether its request ran. It may send the request again with
the same `X-Request-Id`, and reach another gateway and another worker. So the memory is shared by
all workers of a server. The supervisor makes it, because it lives longer than any of them: a file
without a name, whose descriptor the workers inherit. A worker enters a request right before it
runs it, and refuses one that is entered already: its outcome is unknown.

The file is a ring of entries, each a digest and a time. It bounds what is remembered: the last
`ENTRIES_MAX` requests, for `REMEMBERED_NS`.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from hashlib import blake2b
from struct import Struct
from threading import Lock
from time import monotonic_ns
from typing import Final, final

from headgate.core.clock import MINUTE_NS

ENTRIES_MAX: Final = 1 << 17
REMEMBERED_NS: Final = 10 * MINUTE_NS
DIGEST_BYTES: Final = 16
_COUNT: Final = Struct("=Q")  # entries ever made, at the beginning of the file
_ENTRY: Final = Struct(f"={DIGEST_BYTES}sQ")


def create_memory() -> int:
    """Return the descriptor of an empty memory."""
    fd = os.memfd_create("headgate-begun")
    os.ftruncate(fd, _COUNT.size + ENTRIES_MAX * _ENTRY.size)
    return fd


@final
class BegunRequests:
    """One worker's access to the memory. Thread-safe, and safe between processes."""

    def __init__(self, fd: int, clock: Callable[[], int] = monotonic_ns) -> None:
        self._fd = fd
        self._clock = clock  # the same in all processes of a machine
        self._lock = Lock()  # the lock on the file excludes other processes only
        self._seen = 0  # entries read so far
        self._begun_ns: dict[bytes, int] = {}  # by digest, oldest first

    def try_begin(self, key: bytes) -> bool:
        """Enter a request that is about to run. False if it is entered already. O(new entries)."""
        digest = blake2b(key, digest_size=DIGEST_BYTES).digest()
        with self._lock:
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
            try:
                self._read_new()
                now_ns = self._clock()
                self._forget_old(now_ns)
                if digest in self._begun_ns:
                    return False
                self._append(digest, now_ns)
                return True
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def _read_new(self) -> None:
        """Read what other workers have entered."""
        (count,) = _COUNT.unpack(os.pread(self._fd, _COUNT.size, 0))
        first = max(self._seen, count - ENTRIES_MAX)
        while first < count:
            slot = first % ENTRIES_MAX
            length = min(count - first, ENTRIES_MAX - slot)
            data = os.pread(self._fd, length * _ENTRY.size, _offset(slot))
            for digest, begun_ns in _ENTRY.iter_unpack(data):
                self._remember(digest, begun_ns)
            first += length
        self._seen = count

    def _append(self, digest: bytes, now_ns: int) -> None:
        # The count is written last: a worker that dies before has not begun the request.
        os.pwrite(self._fd, _ENTRY.pack(digest, now_ns), _offset(self._seen % ENTRIES_MAX))
        self._seen += 1
        os.pwrite(self._fd, _COUNT.pack(self._seen), 0)
        self._remember(digest, now_ns)

    def _remember(self, digest: bytes, begun_ns: int) -> None:
        self._begun_ns.pop(digest, None)  # so that the order stays that of the ring
        self._begun_ns[digest] = begun_ns

    def _forget_old(self, now_ns: int) -> None:
        begun_ns = self._begun_ns
        while begun_ns:
            digest = next(iter(begun_ns))
            if len(begun_ns) <= ENTRIES_MAX and now_ns - begun_ns[digest] < REMEMBERED_NS:
                return
            del begun_ns[digest]


def _offset(slot: int) -> int:
    return _COUNT.size + slot * _ENTRY.size
