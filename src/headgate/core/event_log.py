"""The event log: every event of one Scheduler and its actions, as JSON, one line per event.

    {"headgate_log": 3, "app": {...}, "policy": "fifo", "settings": {...}, "seed": 7, ...}
    [seq, now_ns, event, [action, ...]]
    [seq, now_ns, ["end"], []]

The last line is the end mark: it tells a run that ended from one that was cut short. It has the
shape of an entry, so its `seq` is the number of entries.

An event or an action is written as a list, `[class name, field, field, ...]`, with its fields in
the order of the constructor's parameters, so that `cls(*fields)` rebuilds it. The vocabulary is
discovered, not listed: every subclass of `Event` and `Action` in their own modules. Field names
come from the constructors' signatures, because those are all that an interpreted and a compiled
build have in common: native classes have neither `__slots__` nor annotations. Where there are
annotations, values are checked against them; a compiled constructor checks its own arguments.
A `Settle` is written with the fields of its `Settlement`, one by one. Those with a default, and the
`shape_id`, the `nth`, the `cost_usd` and the `client_request_id` of other things, may be missing at
the end: a log that is older than a field can still be read.

In the header, `index` is the number of the Scheduler among all that there ever were, and `peers`
how many gateways there were when it was made. Of the ids in a log, `ids.owner` tells the Scheduler.

A log may be rotated into segments, which are files that continue each other: `run.log` is the
newest, and of `run.log.1`, `run.log.2` and so on a larger number is a newer file. Each segment has
the whole header, with the id of the log, the number of the segment and the `seq` of its first
entry; all but the last end with the mark `["rotated"]`. A log that had to be abandoned while its
run continued ends with `["stopped", reason]`.

Because the Scheduler is deterministic, `replay` can feed the events of a log to another Scheduler
and compare the actions, so a live incident becomes a unit test.
"""

from __future__ import annotations

import gzip
import inspect
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from dataclasses import fields as dataclass_fields
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, Literal, TextIO, final

from headgate.core.actions import Action, Settle
from headgate.core.errors import ConfigError, DriverError, PolicyError
from headgate.core.events import Event
from headgate.core.scheduler.scheduler import Scheduler
from headgate.core.states import Settlement

Wire = list[object]


def to_wire(thing: Event | Action) -> Wire:
    """Return an event or an action as a list that shares no mutable state with it.

    >>> from headgate.core.events import TimerFired
    >>> to_wire(TimerFired(("plan", 0)))
    ['TimerFired', ['plan', 0]]
    """
    name = type(thing).__name__
    wire: Wire = [name, *_GETTERS[name](thing)]
    for place in _LIST_POSITIONS[name]:
        value = wire[place]
        assert isinstance(value, list | tuple)
        wire[place] = list(value)
    return wire


def _short_wire(thing: Event | Action) -> Wire:
    """The same, to be encoded at once, without the last fields that may be missing and say nothing.

    Most requests are not rejected, and simulated ones have no client that knows them by an id.

    >>> from headgate.core.states import MET
    >>> _short_wire(Settle(7, MET))
    ['Settle', 7, 0, '', 0, 0, '']
    """
    name = type(thing).__name__
    wire: Wire = [name, *_GETTERS[name](thing)]
    fields_min = _SHORTENED.get(name)
    if fields_min is None or wire[-1]:
        return wire
    end = fields_min
    if any(wire[fields_min:]):
        end = len(wire)
        while not wire[end - 1]:
            end -= 1
    return wire[:end]


def from_wire(wire: object, *, where: str | None = None) -> Event | Action:
    """Return the event or the action that `to_wire` encoded.

    Raises `ConfigError`, naming `where` the text was read, if none can be built from it. Integers
    beyond 64 bits are refused: no clock and no counter of Headgate reaches them.

    >>> from_wire(["TimerFired", ["plan", 0]]).key
    ('plan', 0)
    """
    name = wire[0] if isinstance(wire, list) and wire else None
    if not isinstance(wire, list) or not isinstance(name, str) or name not in _FIELDS:
        raise ConfigError("is neither an event nor an action", where=where, value=wire)
    fields = _FIELDS[name]
    fields_min = len(fields) - _MAY_MISS.get(name, 0)
    if not fields_min < len(wire) <= len(fields) + 1:
        raise ConfigError(
            "has too few or too many fields", where=where, value=wire, allowed=", ".join(fields)
        )
    values: list[Any] = []
    for field, value in zip(fields, wire[1:], strict=False):
        _check(name, field, value, where)
        values.append(tuple(value) if field in _TUPLES else value)
    try:
        if name == "Settle":
            return Settle(values[0], Settlement(*values[1:]))
        return _CLASSES[name](*values)
    except TypeError as error:  # a compiled constructor checks its arguments
        raise ConfigError(
            f"has a field of a wrong type: {error}", where=where, value=wire
        ) from None


def is_int(value: object) -> bool:
    """Whether the value is a 64-bit integer. Unlike in Python, `True` is not one here."""
    return isinstance(value, int) and not isinstance(value, bool) and -_INT_END <= value < _INT_END


_INT_END: Final = 1 << 63


def _is_int_list(value: object) -> bool:
    return isinstance(value, list) and all(is_int(each) for each in value)


def _is_timer_key(value: object) -> bool:
    match value:
        case [str(), number]:
            return isinstance(value, list) and is_int(number)
    return False


# The kinds of fields: the test of a value, and the kind in the words of JSON.
_KINDS: Final[Mapping[str, tuple[Callable[[object], bool], str]]] = {
    "int": (is_int, "an integer of 64 bits"),
    "int | None": (lambda v: v is None or is_int(v), "an integer of 64 bits, or null"),
    "float": (lambda v: isinstance(v, float) or is_int(v), "a number"),
    "str": (lambda v: isinstance(v, str), "a string"),
    "bool": (lambda v: isinstance(v, bool), "true or false"),
    "list[int]": (_is_int_list, "a list of integers"),
    "tuple[int, ...]": (_is_int_list, "a list of integers"),
    "TimerKey": (_is_timer_key, "[string, integer]"),
    # Not known in a compiled build, whose constructors check their own arguments.
    "": (lambda v: not isinstance(v, int) or is_int(v), "an integer of 64 bits"),
}


def _check(name: str, field: str, value: object, where: str | None) -> None:
    is_right, allowed = _KINDS[_FIELDS[name][field]]
    if not is_right(value):
        problem = "null is a wrong type" if value is None else "is of a wrong type"
        key = f"{name}.{field}"
        raise ConfigError(problem, where=where, key=key, value=value, allowed=allowed)


# JSON has lists only; these fields are tuples.
_TUPLES: Final = frozenset(("failed_tasks", "instances", "key", "too_large", "unsure"))
_LISTS: Final = _TUPLES | {"task_ids"}
# A compiled constructor checks that an argument is a list, but not the elements; and like Python it
# takes `True` for an integer.
_STRICT: Final[Mapping[str, str]] = {
    "failed_tasks": "tuple[int, ...]",
    "instances": "tuple[int, ...]",
    "is_hard": "bool",
    "is_in_use": "bool",
    "is_provisioned": "bool",
    "key": "TimerKey",
    "node_died": "bool",
    "task_ids": "list[int]",
    "too_large": "tuple[int, ...]",
    "unsure": "tuple[int, ...]",
}


def _vocabulary() -> dict[str, Callable[..., Event | Action]]:
    classes: dict[str, Callable[..., Event | Action]] = {}
    for base in (Event, Action):
        for cls in base.__subclasses__():
            if cls.__module__ == base.__module__:
                classes[cls.__name__] = cls
    return classes


def _getter(name: str, fields: Mapping[str, str]) -> Callable[[object], tuple[object, ...]]:
    paths = [f"settlement.{f}" if name == "Settle" and f != "request_id" else f for f in fields]
    get = attrgetter(*paths)
    return get if len(paths) > 1 else lambda thing: (get(thing),)


def _fields(cls: Callable[..., Event | Action]) -> dict[str, str]:
    """The kinds of the fields: annotations as they are written; those of a settlement one by one.

    A compiled constructor has no annotations, so `_STRICT` decides.
    """
    kinds: dict[str, str] = {}
    for parameter in inspect.signature(cls).parameters.values():
        if parameter.name == "settlement":
            for field in _SETTLEMENT:  # a compiled dataclass has classes for annotations
                kind = field.type
                kinds[field.name] = kind if isinstance(kind, str) else kind.__name__
        elif isinstance(parameter.annotation, str):
            kinds[parameter.name] = parameter.annotation
        else:
            kinds[parameter.name] = _STRICT.get(parameter.name, "")
    return kinds


_SETTLEMENT: Final = dataclass_fields(Settlement)
# How many fields at the end a log may lack.
_MAY_MISS: Final[Mapping[str, int]] = {
    "Settle": sum(field.default is not MISSING for field in _SETTLEMENT),
    "Dispatch": 1,
    "InstanceAppeared": 1,
    "NodeJoined": 1,
    "RequestArrived": 2,
    "StartInstance": 2,
}
# Fields, with the name, that are always written: those of the first version of the log.
_SHORTENED: Final[Mapping[str, int]] = {"Settle": 7, "RequestArrived": 9}
_CLASSES: Final = _vocabulary()
_FIELDS: Final = {name: _fields(cls) for name, cls in _CLASSES.items()}  # kinds by field by class
# All fields are fetched at once: a live gateway logs every event, so this is on its hot path.
_GETTERS: Final = {name: _getter(name, fields) for name, fields in _FIELDS.items()}
_LIST_POSITIONS: Final = {
    name: tuple(place for place, field in enumerate(fields, start=1) if field in _LISTS)
    for name, fields in _FIELDS.items()
}


LOG_VERSION: Final = 3


@dataclass(frozen=True)
class LogHeader:
    """Everything that is needed to build the same Scheduler again."""

    app: Mapping[str, object]
    policy: str
    settings: Mapping[str, object]
    seed: int
    index: int = 0
    peers: int = 1
    log_id: str = ""  # the same in all segments of a log; empty: the log has only one
    segment: int = 0
    first_seq: int = 0  # `seq` of the first entry of this segment
    version: int = LOG_VERSION


@dataclass(frozen=True)
class LogEntry:
    """One event and the actions that followed from it."""

    seq: int
    now_ns: int
    event: Event
    actions: list[Action]


@final
class LogWriter:
    """Writes a header, one line per event, and a mark at the end of a run or of a segment.

    `emit` encodes a value as one line of JSON and writes it to the log: see `json_lines`.
    """

    def __init__(
        self, emit: Callable[[object], None], header: LogHeader, *, last_ns: int = 0
    ) -> None:
        """`last_ns` is the time of the last event of the previous segment."""
        self._emit = emit
        self._next_seq = header.first_seq
        self._last_ns = last_ns
        fields: dict[str, object] = {"headgate_log": header.version}
        for name in _HEADER_TYPES:
            fields[name] = getattr(header, name)
        self._emit(fields)

    def write(self, seq: int, now_ns: int, event: Event, actions: Iterable[Action]) -> None:
        """Write one event and its actions."""
        self._emit([seq, now_ns, _short_wire(event), [_short_wire(action) for action in actions]])
        self._next_seq = seq + 1
        self._last_ns = now_ns

    def close(self) -> None:
        """Write the end mark. Not called for a run that crashed: its log ends where it crashed."""
        self._emit([self._next_seq, self._last_ns, [_END], []])

    def rotate(self) -> None:
        """Write the mark that another segment follows."""
        self._emit([self._next_seq, self._last_ns, [_ROTATED], []])

    def stop(self, reason: str) -> None:
        """Write the mark that the run continues but its log does not."""
        self._emit([self._next_seq, self._last_ns, [_STOPPED, reason], []])


def json_lines(stream: TextIO) -> Callable[[object], None]:
    """Return an `emit` for a `LogWriter` that writes to a stream. The caller closes the stream."""

    def emit(content: object) -> None:
        # One write per line, so that a crash can cut off only the end of the last line.
        stream.write(json.dumps(content, separators=(",", ":")) + "\n")

    return emit


@final
class LogReader:
    """Iterates over the entries of a log, through all of its segments that exist.

    `events` is the number of entries read so far. A crash leaves a log without its end mark,
    perhaps cut off within a line. That is no error: the entries end there and `is_complete` stays
    false. It is no error either if the oldest segments have been deleted: `missing` says so, and
    `first_seq` is the first entry that is left.
    """

    def __init__(self, path: Path, stream: TextIO) -> None:
        self.events = 0
        self.first_seq = 0
        self.segments_missing = 0
        self.is_complete = False
        self.stopped = ""  # why the log was abandoned before its run ended
        self._path = path
        self._stream = stream
        self._header: LogHeader | None = None
        self._log_id = ""
        self._segments_left: dict[int, Path] = {}  # segments that follow, by number
        self._line = 0
        self._last_ns = 0

    def read_header(self) -> LogHeader:
        """Return the header of the log's first existing segment, and go to that segment."""
        header = _header(self.next_line(), self.where)
        if header.log_id:
            self._log_id = header.log_id
            segments = _segments(self._path, header.log_id)
            self._segments_left = {n: segments[n] for n in segments if n != header.segment}
            if min(self._segments_left, default=header.segment) < header.segment:
                self._segments_left = segments
                header = self._open(min(segments))
        self._header = header
        self.first_seq, self.segments_missing = header.first_seq, header.segment
        return header

    def __iter__(self) -> Iterator[LogEntry]:
        return self

    def __next__(self) -> LogEntry:
        entry = self._next_of_segment()
        while entry is None and self._open_next_segment():
            entry = self._next_of_segment()
        if entry is None:
            raise StopIteration
        self.events += 1
        self._last_ns = entry.now_ns
        return entry

    def next_line(self) -> str:
        """Return the next line; after the last one, close the file and return an empty string."""
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
    def missing(self) -> str:
        """Which part of the log has been deleted, as a sentence; empty if the log is whole."""
        if not self.segments_missing:
            return ""
        last = self.segments_missing - 1
        segments = "segment 0 is" if last == 0 else f"segments 0-{last} are"
        return f"{segments} gone, and with that the first {self.first_seq:,} events"

    @property
    def where(self) -> str:
        """The file and the line that was read last."""
        return f"{self._path}:{self._line}"

    def close(self) -> None:
        """Close the file; needed only if the log is not read to its end."""
        self._stream.close()

    def _next_of_segment(self) -> LogEntry | None:
        """Return the next entry of the open segment; None after the last one."""
        line = self.next_line()
        if not line:
            return None
        try:
            content = _parse(line, self.where)
        except ConfigError:
            if line.endswith("\n"):
                raise
            self.close()
            return None
        entry = self._entry(content)
        if entry is None:
            if self.next_line():
                raise ConfigError("follows the end mark", where=self.where)
            self.close()
        return entry

    def _open_next_segment(self) -> bool:
        """Open the segment after the one that was read to its end; whether one exists."""
        if not self._segments_left or self._header is None or self.is_complete or self.stopped:
            return False
        header = self._open(self._header.segment + 1)
        seq = self.first_seq + self.events
        if header.first_seq != seq:
            problem = f"the segment begins with entry {header.first_seq}"
            raise ConfigError(problem, where=self.where, allowed=f"entry {seq}")
        self._header = header
        return True

    def _open(self, number: int) -> LogHeader:
        """Open a segment. The writer may rename files meanwhile, so look for it twice."""
        for _ in range(2):
            self.close()
            path = self._segments_left.get(number)
            if path is None:
                break
            self._path, self._line = path, 0
            try:
                self._stream = _open(path, "r")
                header = _header(self.next_line(), self.where)
                if (header.log_id, header.segment) == (self._log_id, number):
                    self._segments_left = {
                        n: self._segments_left[n] for n in self._segments_left if n > number
                    }
                    return header
            except (ConfigError, OSError):
                pass  # another file has this name by now
            self._segments_left = _segments(path, self._log_id)
        problem = f"segment {number} of the log is missing, but later ones exist"
        raise ConfigError(problem, where=str(self._path))

    def _entry(self, content: object) -> LogEntry | None:
        """Return the entry, or None if the line is the mark at the end of a log or segment."""
        if not isinstance(content, list) or len(content) != 4:
            raise ConfigError("is not an entry", where=self.where, allowed=_ENTRY)
        seq, now_ns, wire, wires = content
        if not is_int(seq) or not is_int(now_ns) or not isinstance(wires, list):
            raise ConfigError("is not an entry", where=self.where, allowed=_ENTRY)
        expected = self.first_seq + self.events
        if seq > expected:
            raise ConfigError(f"entry {expected} is missing before it", where=self.where, value=seq)
        if seq < expected or now_ns < self._last_ns:
            raise ConfigError("is out of order", where=self.where, value=[seq, now_ns])
        if not wires and self._is_mark(wire):
            return None
        event = from_wire(wire, where=self.where)
        if not isinstance(event, Event):
            raise ConfigError("is not an event", where=self.where, value=wire)
        return LogEntry(seq, now_ns, event, [self._action(wire) for wire in wires])

    def _is_mark(self, wire: object) -> bool:
        if wire == [_END]:
            self.is_complete = True
            return True
        if isinstance(wire, list) and len(wire) == 2 and wire[0] == _STOPPED:
            self.stopped = str(wire[1])
            return True
        return wire == [_ROTATED]

    def _action(self, wire: object) -> Action:
        action = from_wire(wire, where=self.where)
        if not isinstance(action, Action):
            raise ConfigError("is not an action", where=self.where, value=wire)
        return action


def open_log(path: Path) -> TextIO:
    """Open a file for a `LogWriter`, compressed if its name ends in `.gz`.

    The same content gives the same bytes whenever it is written: a compressed file has no date.
    """
    return _open(path, "w")


def read_log(path: Path) -> tuple[LogHeader, LogReader]:
    """Return the header of a log, and a reader of its entries.

    For a rotated log, `path` may be any segment: all segments in the same directory are read, in
    order. Raises `ConfigError` naming the file and the line if the file is not a log or is damaged,
    except for an end that a crash cut off. Damage further down is found when the entries are read.
    """
    try:
        stream = _open(path, "r")
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path)) from None
    reader = LogReader(path, stream)
    try:
        return reader.read_header(), reader
    except ConfigError:
        reader.close()
        raise


def segment_paths(path: Path) -> dict[int, Path]:
    """Return the files that a log at this path was rotated to, by the number in their names."""
    pattern = re.compile(re.escape(path.name) + r"\.([0-9]{1,18})")
    segments = ((pattern.fullmatch(other.name), other) for other in path.parent.iterdir())
    return {int(match[1]): other for match, other in segments if match is not None}


def is_log(path: Path) -> bool:
    """Whether a file begins like an event log."""
    try:
        with path.open("rb") as file:
            return file.read(len(_FIRST_BYTES)) == _FIRST_BYTES
    except OSError:
        return False


@dataclass(frozen=True)
class Difference:
    """The first event for which a replay gave different actions."""

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
    """Number of events fed and actions compared, and the first difference, if any."""

    events: int
    actions: int
    first_difference: Difference | None


def replay(entries: Iterable[LogEntry], scheduler: Scheduler) -> ReplayResult:
    """Feed the events of a log to a fresh Scheduler and compare its actions with the logged ones.

    Stops at the first difference: later events would name batches that this Scheduler never sent.
    A fault of the policy is compared like any action, because the log holds it as one.
    """
    events = actions = 0
    for entry in entries:
        events += 1
        expected = [to_wire(action) for action in entry.actions]
        got = [to_wire(action) for action in _decide(entry, scheduler)]
        if got != expected:
            difference = Difference(entry.seq, entry.now_ns, entry.event, expected, got)
            return ReplayResult(events, actions, difference)
        actions += len(got)
    return ReplayResult(events, actions, None)


def _decide(entry: LogEntry, scheduler: Scheduler) -> list[Action]:
    """Return the Scheduler's actions, also if the policy or the core raises an exception.

    Actions that were ordered before an exception were carried out and logged, so a replay must
    produce them again.
    """
    try:
        return scheduler.handle(entry.now_ns, entry.event)
    except DriverError:
        raise  # no driver logs such an event, because it changes nothing
    except PolicyError as error:
        return [action for action in error.actions if isinstance(action, Action)]
    except Exception:
        return scheduler.actions_so_far


_END: Final = "end"
_ROTATED: Final = "rotated"
_STOPPED: Final = "stopped"
_FIRST_BYTES: Final = b'{"headgate_log":'
_HEADER_CHARACTERS_MAX: Final = 64 << 20
_ENTRY: Final = "[seq, now_ns, event, [action, ...]]"
_HEADER_TYPES: Final[Mapping[str, type]] = {
    "app": dict,
    "policy": str,
    "settings": dict,
    "seed": int,
    "index": int,
    "peers": int,
    "log_id": str,
    "segment": int,
    "first_seq": int,
}


def _open(path: Path, mode: Literal["r", "w"]) -> TextIO:
    # Entries are ASCII. Any other byte is damage, which is reported when the line is parsed.
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
    allowed = "what `headgate serve --log FILE` or `headgate simulate --log FILE` has written"
    is_one = line.lstrip().startswith("{")  # though it may be damaged
    content = _parse(line, where) if is_one else None
    version = content.get("headgate_log") if isinstance(content, dict) else None
    if not isinstance(content, dict) or version is None:
        raise ConfigError("is not an event log", where=where, allowed=allowed)
    if version != LOG_VERSION:
        key, allowed = "headgate_log", str(LOG_VERSION)
        raise ConfigError("unknown version", where=where, key=key, value=version, allowed=allowed)
    for key, kind in _HEADER_TYPES.items():
        value, allowed = content.get(key), kind.__name__
        if not isinstance(value, kind):
            problem = "is missing or of a wrong type"
            raise ConfigError(problem, where=where, key=key, value=value, allowed=allowed)
    for key in ("segment", "first_seq"):
        if not is_int(content[key]) or content[key] < 0:
            problem = "must be an integer, 0 or more"
            raise ConfigError(problem, where=where, key=key, value=content[key])
    return LogHeader(**{key: content[key] for key in _HEADER_TYPES})


def _segments(path: Path, log_id: str) -> dict[int, Path]:
    """Return the segments of a log that are in the same directory as one of them, by number."""
    segments: dict[int, Path] = {}
    for name in {path.name, re.sub(r"\.[0-9]{1,18}$", "", path.name)} - {""}:
        base = path.with_name(name)
        try:
            others = [base, *segment_paths(base).values()]
        except OSError:  # a directory that may not be listed
            others = [base]
        for other in filter(is_log, others):
            try:
                with _open(other, "r") as stream:
                    header = _header(stream.readline(_HEADER_CHARACTERS_MAX), f"{other}:1")
            except (ConfigError, OSError):
                continue  # not a segment of this log
            if header.log_id == log_id:
                segments[header.segment] = other
    return segments
