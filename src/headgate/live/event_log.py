"""The event log of a gateway, as `headgate replay` reads it.

Every event is logged, so this is on the hot path: lines are encoded by msgspec, gathered, and
written in pieces. A log that cannot be written (the disk is full, the bound is reached) ends there,
without its end mark; serving goes on.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, final

import msgspec

from headgate.core.actions import Action
from headgate.core.errors import ConfigError
from headgate.core.events import Event
from headgate.core.log import LogHeader, LogWriter

PIECE_BYTES: Final = 64 * 1024
LOG_BYTES_MAX: Final = 4 << 30


@final
class EventLog:
    """Writes the log of one Scheduler to a file."""

    def __init__(
        self,
        path: Path,
        header: LogHeader,
        *,
        complain: Callable[[str], None],
        size_max: int = LOG_BYTES_MAX,
    ) -> None:
        self._path = path
        self._complain = complain
        self._left_bytes = size_max
        self._encode = msgspec.json.Encoder().encode
        self._lines: list[bytes] = []
        self._gathered = 0
        self._seq = 0
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._fd: int | None = os.open(path, flags, 0o600)
        except OSError as error:
            problem = f"cannot be written: {error.strerror}"
            raise ConfigError(problem, where=str(path), key="--log") from None
        self._writer = LogWriter(self._emit, header)
        self.flush()  # whoever looks at it now sees a log, and no empty file

    def record(self, now_ns: int, event: Event, actions: list[Action]) -> None:
        """Write one event down."""
        if self._fd is not None:
            self._writer.write(self._seq, now_ns, event, actions)
            self._seq += 1

    def flush(self) -> None:
        """Write what is gathered; what has not been written is lost in a crash."""
        if self._fd is None or not self._lines:
            return
        piece = b"".join(self._lines)
        self._lines.clear()
        self._gathered = 0
        self._left_bytes -= len(piece)
        if self._left_bytes < 0:
            self._end("it has reached its largest size")
            return
        try:
            while piece:
                piece = piece[os.write(self._fd, piece) :]
        except OSError as error:
            self._end(str(error.strerror))

    def close(self) -> None:
        """Say that nothing is missing."""
        if self._fd is not None:
            self._writer.close()
            self.flush()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _emit(self, content: object) -> None:
        line = self._encode(content)
        self._lines.append(line)
        self._lines.append(b"\n")
        self._gathered += len(line)
        if self._gathered >= PIECE_BYTES:
            self.flush()

    def _end(self, why: str) -> None:
        assert self._fd is not None
        os.close(self._fd)
        self._fd = None
        self._lines.clear()
        self._complain(f"the event log {self._path} ends here: {why}; serving goes on")
