"""The event log: what one Scheduler was told, when, and what it answered. JSON, one line per event.

    {"headgate_log": 1, "app": {...}, "policy": "fifo", "settings": {...}, "seed": 7, ...}
    [seq, now_ns, event, [action, ...]]
    [seq, now_ns, ["end"], []]

The last line, the end mark, tells a run that ended from one that was cut short. It has the shape
of an entry, so its number says how many there are.

Because the Scheduler is deterministic, its log is more than a record: `replay` feeds the events to
another Scheduler and compares the answers, so a live incident is a unit test.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TextIO, final

from headgate.core.actions import Action
from headgate.core.errors import ConfigError, PolicyError
from headgate.core.events import Event
from headgate.core.scheduler import Scheduler
from headgate.core.wire import Wire, from_wire, is_int, to_wire

LOG_VERSION: Final = 1


@dataclass(frozen=True)
class LogHeader:
    """All that it takes to build the Scheduler again."""

    app: Mapping[str, object]
    policy: str
    settings: Mapping[str, object]
    seed: int
    index: int = 0
    peers: int = 1
    version: int = LOG_VERSION


@dataclass(frozen=True)
class LogEntry:
    """One event and the actions it was answered with."""

    seq: int
    now_ns: int
    event: Event
    actions: list[Action]


@final
class LogWriter:
    """Writes a header, one line per event, numbered from 0, and at the end of a run its end mark.

    `emit` turns what it is given into a line of JSON and puts it where the log is kept: see
    `json_lines`.
    """

    def __init__(self, emit: Callable[[object], None], header: LogHeader) -> None:
        self._emit = emit
        self._events = 0
        self._last_ns = 0
        fields: dict[str, object] = {"headgate_log": header.version}
        for name in _HEADER_TYPES:
            fields[name] = getattr(header, name)
        self._emit(fields)

    def write(self, seq: int, now_ns: int, event: Event, actions: Iterable[Action]) -> None:
        """Write one event and the actions it was answered with."""
        self._emit([seq, now_ns, to_wire(event), [to_wire(action) for action in actions]])
        self._events += 1
        self._last_ns = now_ns

    def close(self) -> None:
        """Say that nothing is missing. Not for a run that broke: its log ends where it broke."""
        self._emit([self._events, self._last_ns, [_END], []])


def json_lines(stream: TextIO) -> Callable[[object], None]:
    """Return what writes to a stream for a `LogWriter`. The stream is the caller's to close."""

    def emit(content: object) -> None:
        # One write per line, so that a crash can only cut off the end of the last one.
        stream.write(json.dumps(content, separators=(",", ":")) + "\n")

    return emit


@final
class LogReader:
    """The entries of a log, one by one.

    `events` says how many were read so far. A crash leaves a log without its end mark, perhaps cut
    off within a line. That is no error: the entries end there and `is_complete` stays false.
    """

    def __init__(self, path: Path, stream: TextIO) -> None:
        self.events = 0
        self.is_complete = False
        self._path = path
        self._stream = stream
        self._line = 0
        self._last_ns = 0

    def __iter__(self) -> Iterator[LogEntry]:
        return self

    def __next__(self) -> LogEntry:
        line = self.next_line()
        if not line:
            raise StopIteration
        try:
            content = _parse(line, self.where)
        except ConfigError:
            if line.endswith("\n"):
                raise
            self.close()
            raise StopIteration from None
        entry = self._entry(content)
        if entry is None:
            if self.next_line():
                raise ConfigError("follows the end mark", where=self.where)
            self.is_complete = True
            raise StopIteration
        self.events += 1
        self._last_ns = entry.now_ns
        return entry

    def next_line(self) -> str:
        """Return the next line as it stands; empty, and the file closed, after the last one."""
        self._line += 1
        line = ""
        if not self._stream.closed:
            try:
                line = self._stream.readline()
            except EOFError:
                pass  # compressed, and cut off
            except (OSError, zlib.error) as error:
                raise ConfigError(f"cannot be read: {error}", where=self.where) from None
            if not line:
                self.close()
        return line

    @property
    def where(self) -> str:
        """The file and the line last read."""
        return f"{self._path}:{self._line}"

    def close(self) -> None:
        """Stop reading; needed only before the end."""
        self._stream.close()

    def _entry(self, content: object) -> LogEntry | None:
        """Return the entry, or None if it is the end mark."""
        if not isinstance(content, list) or len(content) != 4:
            raise ConfigError("is not an entry", where=self.where, allowed=_ENTRY)
        seq, now_ns, wire, wires = content
        if not is_int(seq) or not is_int(now_ns) or not isinstance(wires, list):
            raise ConfigError("is not an entry", where=self.where, allowed=_ENTRY)
        if seq > self.events:
            raise ConfigError(
                f"entry {self.events} is missing before it", where=self.where, value=seq
            )
        if seq < self.events or now_ns < self._last_ns:
            raise ConfigError("is out of order", where=self.where, value=[seq, now_ns])
        if wire == [_END] and not wires:
            return None
        event = from_wire(wire, where=self.where)
        if not isinstance(event, Event):
            raise ConfigError("is not an event", where=self.where, value=wire)
        return LogEntry(seq, now_ns, event, [self._action(wire) for wire in wires])

    def _action(self, wire: object) -> Action:
        action = from_wire(wire, where=self.where)
        if not isinstance(action, Action):
            raise ConfigError("is not an action", where=self.where, value=wire)
        return action


def open_log(path: Path) -> TextIO:
    """Open a file for a `LogWriter`, compressed if it is called `.gz`.

    The same content gives the same bytes, whenever it is written: a compressed file has no date.
    """
    return _open(path, "w")


def read_log(path: Path) -> tuple[LogHeader, LogReader]:
    """Return what a log says about itself, and its entries.

    Raises `ConfigError` naming the file and the line if it is not a log or is damaged, except for
    an end cut off by a crash; damage further down is found when the entries are read.
    """
    try:
        stream = _open(path, "r")
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path)) from None
    reader = LogReader(path, stream)
    try:
        return _header(reader.next_line(), reader.where), reader
    except ConfigError:
        reader.close()
        raise


@dataclass(frozen=True)
class Difference:
    """Where a replay first answered something else."""

    seq: int
    now_ns: int
    event: Event
    expected: list[Wire]
    got: list[Wire]

    def __str__(self) -> str:
        return (
            f"event {self.seq} at {self.now_ns} ns, {to_wire(self.event)}: "
            f"expected {self.expected}, got {self.got}"
        )


@dataclass(frozen=True)
class ReplayResult:
    """How many events were fed and actions compared, and the first that differed, if any."""

    events: int
    actions: int
    first_difference: Difference | None


def replay(entries: Iterable[LogEntry], scheduler: Scheduler) -> ReplayResult:
    """Feed the events of a log to a fresh Scheduler and compare its actions with the logged ones.

    Ends at the first difference: what follows would speak of batches that never were. A fault of
    the policy is among the actions, as it is in the log.
    """
    events = actions = 0
    for entry in entries:
        events += 1
        expected = [to_wire(action) for action in entry.actions]
        try:
            decided: Iterable[object] = scheduler.handle(entry.now_ns, entry.event)
        except PolicyError as error:
            decided = error.actions
        got = [to_wire(action) for action in decided if isinstance(action, Action)]
        if got != expected:
            difference = Difference(entry.seq, entry.now_ns, entry.event, expected, got)
            return ReplayResult(events, actions, difference)
        actions += len(got)
    return ReplayResult(events, actions, None)


_END: Final = "end"
_ENTRY: Final = "[seq, now_ns, event, [action, ...]]"
_HEADER_TYPES: Final[Mapping[str, type]] = {
    "app": dict,
    "policy": str,
    "settings": dict,
    "seed": int,
    "index": int,
    "peers": int,
}


def _open(path: Path, mode: Literal["r", "w"]) -> TextIO:
    # Entries are ASCII; what is not is damage, and shows as such when the line is parsed.
    if path.suffix == ".gz":
        binary = gzip.GzipFile(path, f"{mode}b", mtime=0)
        return io.TextIOWrapper(binary, encoding="ascii", errors="replace")
    return path.open(mode, encoding="ascii", errors="replace")


def _parse(line: str, where: str) -> object:
    try:
        content: object = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"is not JSON: {error}", where=where) from None
    return content


def _header(line: str, where: str) -> LogHeader:
    content = _parse(line, where)
    version = content.get("headgate_log") if isinstance(content, dict) else None
    if not isinstance(content, dict) or version is None:
        raise ConfigError("is not an event log", where=where)
    if version != LOG_VERSION:
        raise ConfigError(
            "unknown version", where=where, key="headgate_log", value=version, allowed="1"
        )
    for key, kind in _HEADER_TYPES.items():
        if not isinstance(content.get(key), kind):
            raise ConfigError(
                "is missing or of a wrong type",
                where=where,
                key=key,
                value=content.get(key),
                allowed=kind.__name__,
            )
    return LogHeader(**{key: content[key] for key in _HEADER_TYPES})
