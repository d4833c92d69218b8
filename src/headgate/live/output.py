"""Output that never stands in the way of serving: what is written to stdout and stderr.

A pipe that nobody reads blocks whoever writes to it; one that is closed, or a disk that is full,
raises an exception. Neither may reach a request. So a thread of its own writes, from a queue that
is bounded, and whoever has something to say puts it there and goes on. What finds no room, or
cannot be written, is dropped and counted, and that is said once output works again.

In a process that was forked (functions may do that) there is no such thread: there, what is
written is written at once, and errors are ignored.
"""

from __future__ import annotations

import io
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TextIO, final

QUEUE_BYTES_MAX: Final = 4 << 20
WRITE_BYTES: Final = 64 << 10  # about as much goes out at once
PIECE_BYTES_MAX: Final = 256 << 10  # of one line or message; the rest of it is cut off
_CUT: Final = b"... (cut off)\n"


@final
class Output:
    """A file descriptor that is written to by a daemon thread."""

    def __init__(self, fd: int, *, queue_bytes_max: int = QUEUE_BYTES_MAX) -> None:
        self.fd = fd
        self.on_recovered: Callable[[int], None] = _ignore  # gets how many pieces were dropped
        self._queue_bytes_max = queue_bytes_max
        self._pieces: deque[bytes] = deque()
        self._held_bytes = 0  # in the queue, and of what is being written
        self._dropped = 0  # pieces, since that was last told
        self._is_writing = False
        self._is_torn = False  # the last thing that was written ends in the middle of a line
        self._is_forked = False
        # A lock that its owner may take again: a signal handler or a destructor may have
        # something to say while this very thread is putting something here.
        self._changed = threading.Condition(threading.RLock())
        self._thread = threading.Thread(target=self._write_on, name="output", daemon=True)
        self._thread.start()
        os.register_at_fork(after_in_child=self._after_fork)

    def put(self, piece: bytes) -> None:
        """Have it written. Never raises, and never waits for whoever reads."""
        if self._is_forked:
            self._write(piece)
            return
        if len(piece) > PIECE_BYTES_MAX:
            piece = piece[: PIECE_BYTES_MAX - len(_CUT)] + _CUT
        with self._changed:
            if self._held_bytes + len(piece) > self._queue_bytes_max:
                self._dropped += 1
                return
            self._pieces.append(piece)
            self._held_bytes += len(piece)
            self._changed.notify_all()

    def flush(self, limit_s: float) -> bool:
        """Wait until everything has been written, for so long at most; whether it has."""
        if self._is_forked:
            return True
        with self._changed:
            return self._changed.wait_for(lambda: not self._held_bytes, limit_s)

    @property
    def dropped(self) -> int:
        """Pieces that were dropped and not told of yet."""
        return self._dropped

    def _after_fork(self) -> None:
        """Be of use in a child, which has no thread, and a lock that may be held for ever."""
        self._is_forked = True
        self._pieces = deque()

    def _write_on(self) -> None:
        while True:
            with self._changed:
                while not self._pieces:
                    self._changed.wait()
                pieces = [self._pieces.popleft()]
                size = len(pieces[0])
                while self._pieces and size < WRITE_BYTES:
                    pieces.append(self._pieces.popleft())
                    size += len(pieces[-1])
            is_written = self._write(b"".join(pieces))
            if is_written and self._dropped:
                with self._changed:
                    dropped, self._dropped = self._dropped, 0
                self.on_recovered(dropped)
            with self._changed:
                self._held_bytes -= size
                if not is_written:
                    self._dropped += len(pieces)
                self._changed.notify_all()

    def _write(self, data: bytes) -> bool:
        left = memoryview(b"\n" + data if self._is_torn else data)
        size = len(left)
        while left:
            try:
                left = left[os.write(self.fd, left) :]
            except BlockingIOError:  # whoever started us made it so
                with suppress(OSError, ValueError):
                    select.select((), (self.fd,), (), 1.0)
            except OSError:
                self._is_torn = self._is_torn or len(left) < size
                return False
        self._is_torn = False
        return True


@final
class _Stream(io.RawIOBase):
    """The bytes below `sys.stdout` or `sys.stderr`."""

    def __init__(self, output: Output, fd: int) -> None:
        super().__init__()
        self._output = output
        self._fd = fd

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        piece = bytes(data)  # type: ignore[call-overload]  # whatever has a buffer
        for start in range(0, len(piece), PIECE_BYTES_MAX):
            self._output.put(piece[start : start + PIECE_BYTES_MAX])
        return len(piece)

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def close(self) -> None:
        """Stay open: a function that closes `sys.stdout` must not break those after it."""


def text_stream(output: Output, fd: int) -> TextIO:
    """Return what takes the place of `sys.stdout` or `sys.stderr`: writing to it never raises."""
    return io.TextIOWrapper(
        _Stream(output, fd),  # type: ignore[type-var]
        encoding="utf-8",
        errors="backslashreplace",
        line_buffering=True,
    )


def keep_descriptors() -> None:
    """Open what is closed of stdin, stdout and stderr, or the next socket would take its place."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != fd:
                os.dup2(opened, fd)
                os.close(opened)
            os.set_inheritable(fd, True)


def is_same_file(fd: int, other_fd: int) -> bool:
    """Whether two descriptors lead to the same place, as after `2>&1`."""
    try:
        return os.path.sameopenfile(fd, other_fd)
    except OSError:
        return False


def _ignore(dropped: int) -> None:
    """What is done about dropped pieces where nobody wants to know."""
