"""The event log of a gateway, in the format that `headgate replay` reads.

Every event is logged, so this is on the hot path: msgspec encodes the lines, which are buffered and
passed in chunks to a writer thread, because a disk may block. The log is rotated by size and by
age, and the oldest segments are deleted. The total size is therefore bounded, also over many
gateways that write to the same path one after the other.

A log that cannot be written (the disk is full or far too slow) ends with one error. Serving
continues.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from time import monotonic_ns
from typing import Final, final

import msgspec

from headgate.core.actions import Action
from headgate.core.clock import NEVER_NS
from headgate.core.errors import ConfigError
from headgate.core.event_log import LogHeader, LogWriter, is_log, segment_paths
from headgate.core.events import Event

CHUNK_BYTES: Final = 64 * 1024
BACKLOG_BYTES_MAX: Final = 32 << 20  # submitted to the writer thread and not written yet
CLOSE_S: Final = 5.0

_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rotation:
    """When a segment is full, and how many older segments are kept."""

    size_bytes: int = 256 << 20
    age_ns: int = NEVER_NS
    keep: int = 8


@final
class EventLog:
    """Writes the log of one Scheduler, with rotation.

    Used from one thread. Raises `ConfigError` if the file cannot be opened, and nothing after that.
    """

    def __init__(
        self,
        path: Path,
        header: LogHeader,
        rotation: Rotation,
        *,
        clock: Callable[[], int] = monotonic_ns,
    ) -> None:
        self._file = _LogFile(path, rotation.keep)
        self._rotation = rotation
        self._clock = clock
        self._encode = msgspec.json.Encoder().encode
        self._lines: list[bytes] = []
        self._buffered_bytes = 0
        self._segment_bytes = 0
        self._began_ns = clock()
        self._chunk_bytes = min(CHUNK_BYTES, rotation.size_bytes)
        self._seq = 0
        self._last_ns = 0
        self._is_open = True
        self._header = replace(header, log_id=secrets.token_hex(8))
        self._writer = LogWriter(self._emit, self._header)
        self.flush()
        self.sync()  # a reader never finds an empty file

    def record(self, now_ns: int, event: Event, actions: list[Action]) -> None:
        if not self._is_open:
            return
        try:
            self._writer.write(self._seq, now_ns, event, actions)
        except Exception as error:  # a log with a gap cannot be replayed
            self._stop(f"an event cannot be written: {error!r}")
            return
        self._seq += 1
        self._last_ns = now_ns
        if self._buffered_bytes >= self._chunk_bytes:
            self.flush()

    def flush(self) -> None:
        """Submit the buffered lines to the writer thread. A crash loses lines not yet written."""
        if not self._is_open:
            return
        if self._file.is_closed:
            self._is_open = False  # the writer thread has logged why
            return
        if self._file.backlog_bytes > BACKLOG_BYTES_MAX:
            self._stop("the disk is too slow")
            return
        if self._lines:
            self._segment_bytes += self._buffered_bytes
            self._file.write(self._take_lines())
        if self._file.can_rotate and self._is_full():
            self._rotate()

    def close(self) -> None:
        """Write the end mark, which says that the log is complete, and close the file."""
        if self._is_open:
            self._is_open = False
            self._writer.close()
            self._file.write(self._take_lines())
        self._file.close()

    def sync(self, limit_s: float = CLOSE_S) -> bool:
        """Wait until everything submitted has been written; return whether it has."""
        return self._file.sync(limit_s)

    def _is_full(self) -> bool:
        if self._seq == self._header.first_seq:
            return False  # a segment has at least one entry
        is_old = self._clock() - self._began_ns >= self._rotation.age_ns
        return is_old or self._segment_bytes >= self._rotation.size_bytes

    def _rotate(self) -> None:
        self._writer.rotate()
        mark = self._take_lines()
        self._writer.stop("another gateway writes to the path now")
        stop = self._take_lines()
        segment = self._header.segment + 1
        self._header = replace(self._header, segment=segment, first_seq=self._seq)
        self._writer = LogWriter(self._emit, self._header, last_ns=self._last_ns)
        self._segment_bytes = self._buffered_bytes
        self._began_ns = self._clock()
        self._file.rotate(mark, stop, self._take_lines())

    def _stop(self, why: str) -> None:
        self._is_open = False
        self._writer.stop(why)
        self._file.write(self._take_lines())
        self._file.close(wait_s=0.0)
        _LOG.error("the event log %s ends here: %s; serving continues", self._file.path, why)

    def _take_lines(self) -> bytes:
        chunk = b"".join(self._lines)
        self._lines.clear()
        self._buffered_bytes = 0
        return chunk

    def _emit(self, content: object) -> None:
        line = self._encode(content)
        self._lines.append(line)
        self._lines.append(b"\n")
        self._buffered_bytes += len(line) + 1


@final
class _LogFile:
    """The file that a log is written to by a thread of its own."""

    def __init__(self, path: Path, keep: int) -> None:
        self.path = path
        self.is_closed = False  # nothing more is written
        self._keep = keep
        try:
            self._fd = self._open_first()
            self.can_rotate = stat.S_ISREG(os.fstat(self._fd).st_mode)
        except OSError as error:
            problem = f"cannot be written: {error.strerror}"
            raise ConfigError(problem, where=str(path), key="--log") from None
        # Each counter is incremented by one thread only, so neither needs a lock.
        self._submitted_bytes = 0
        self._written_bytes = 0
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._run, name="event log", daemon=True)
        self._writer.start()

    @property
    def backlog_bytes(self) -> int:
        """Bytes submitted and not yet written."""
        return self._submitted_bytes - self._written_bytes

    def write(self, chunk: bytes) -> None:
        self._submitted_bytes += len(chunk)
        self._queue.put(lambda: self._write(chunk))

    def rotate(self, mark: bytes, stop: bytes, header: bytes) -> None:
        """End the segment with a mark and begin the next; stop if another process owns the path."""
        self._queue.put(lambda: self._rotate(mark, stop, header))

    def sync(self, limit_s: float) -> bool:
        """Wait until the queue is empty; return whether it is."""
        done = threading.Event()
        self._queue.put(done.set)
        return done.wait(limit_s)

    def close(self, wait_s: float = CLOSE_S) -> None:
        """Write what is queued, for at most `wait_s`, and close."""
        self._queue.put(None)
        self._writer.join(wait_s)

    def _run(self) -> None:
        while (do := self._queue.get()) is not None:
            try:
                do()
            except Exception as error:
                self._fail(getattr(error, "strerror", None) or repr(error))
        self.is_closed = True
        with suppress(OSError):
            os.close(self._fd)

    def _fail(self, why: str) -> None:
        if not self.is_closed:
            self.is_closed = True
            _LOG.error("the event log %s ends here: %s; serving continues", self.path, why)

    def _write(self, chunk: bytes) -> None:
        self._written_bytes += len(chunk)
        unwritten = memoryview(chunk)
        while unwritten and not self.is_closed:
            written = os.write(self._fd, unwritten)
            unwritten = unwritten[written:]

    def _rotate(self, mark: bytes, stop: bytes, header: bytes) -> None:
        if self.is_closed:
            return
        if not self._owns_path():
            self._write(stop)
            self._fail("another gateway writes to the path now")
            return
        try:
            self._archive()
            fd = self._create()
        except OSError as error:
            self._write(stop)
            self._fail(f"it cannot be rotated: {error.strerror}")
            return
        try:
            self._write(mark)
        finally:
            os.close(self._fd)
            self._fd = fd
        self._write(header)
        self._prune()

    def _owns_path(self) -> bool:
        """Whether the path still leads to our file: another gateway may have replaced it."""
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self._fd))
        except OSError:
            return False

    def _open_first(self) -> int:
        """Create the file. An older log at the path is archived."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return self._create()
        if not stat.S_ISREG(status.st_mode) or not status.st_size:
            return os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        check_log_path(self.path)
        self._archive()
        fd = self._create()
        self._prune()
        return fd

    def _create(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def _archive(self) -> None:
        """Rename the file at the path to the next segment number."""
        number = max(segment_paths(self.path), default=0) + 1
        self.path.rename(f"{self.path}.{number}")

    def _prune(self) -> None:
        """Delete the oldest segments, those of earlier gateways included, and no other files."""
        with suppress(OSError):
            numbered = segment_paths(self.path)
            for number in sorted(numbered, reverse=True)[self._keep :]:
                if is_log(numbered[number]):
                    numbered[number].unlink()


def check_log_path(path: Path) -> None:
    """Check that a log can be created at a path, and do nothing. Raises `ConfigError`."""
    problem = ""
    if path.is_dir():
        problem = "is a directory"
    elif not path.parent.is_dir():
        problem = f"cannot be written: {path.parent} is not a directory"
    elif path.is_file() and path.stat().st_size and not is_log(path):
        problem = "exists and is not an event log"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        problem = "cannot be written: Permission denied"
    if problem:
        raise ConfigError(
            problem, where=str(path), key="--log", allowed="a new file, or an event log"
        )
