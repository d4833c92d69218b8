"""Logging of the processes of a server: `logging`, to stderr, and never in the way of serving.

Every module has a logger of its own name. What an operator must act on is an error; what has
recovered by itself is a warning; what belongs to the life of a server is an info. A record that
concerns a request has its id: `extra={"request_id": ...}`.

`configure` is called once in each process. From then on `print` goes the same way.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Final, Protocol, final

from headgate.live.output import Output, is_same_file, keep_descriptors, text_stream

REPEATS_MAX: Final = 10  # of one warning or error, within
REPEATS_S: Final = 10.0
EXIT_FLUSH_S: Final = 1.0
_KEYS_MAX: Final = 512  # different warnings that are counted at once

_LOG: Final = logging.getLogger(__name__)


class LogSettings(Protocol):
    """What an application says about logging: a `ServeChoice`."""

    @property
    def log_level(self) -> str:
        """One of `debug`, `info`, `warning` and `error`."""

    @property
    def log_format(self) -> str:
        """`text` or `json`."""


def configure(settings: LogSettings, process_name: str) -> None:
    """Have this process log to stderr, and print, without ever waiting or failing for it.

    Before it ends, `flush`.
    """
    keep_descriptors()
    errors = Output(2)
    prints = errors if is_same_file(1, 2) else Output(1)
    errors.on_recovered = prints.on_recovered = _tell_dropped
    form = JsonFormatter if settings.log_format == "json" else TextFormatter
    handler = OutputHandler(form(process_name), errors, prints)
    level = getattr(logging, settings.log_level.upper())
    ours, root = logging.getLogger("headgate"), logging.getLogger()
    ours.handlers[:] = root.handlers[:] = [handler]
    ours.setLevel(level)
    ours.propagate = False  # whatever a function does to the root logger
    logging.getLogger("headgate.access").setLevel(logging.INFO)  # it has a switch of its own
    root.setLevel(max(level, logging.WARNING))
    logging.captureWarnings(True)
    sys.stdout = text_stream(prints, 1)
    sys.stderr = text_stream(errors, 2)
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread


def flush(limit_s: float = EXIT_FLUSH_S) -> None:
    """Wait until what was said has been written, for so long at most: before this process ends."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # a function may have put anything there
            stream.flush()
    for handler in logging.getLogger("headgate").handlers:
        if isinstance(handler, OutputHandler):
            handler.drain(limit_s)


@contextmanager
def configured(settings: LogSettings, process_name: str) -> Iterator[None]:
    """`configure`, and afterwards `flush` and leave everything as it was."""
    loggers = (logging.getLogger("headgate"), logging.getLogger())
    states = [(logger, list(logger.handlers), logger.level) for logger in loggers]
    streams, hooks = (sys.stdout, sys.stderr), (sys.excepthook, threading.excepthook)
    configure(settings, process_name)
    try:
        yield
    finally:
        flush()
        sys.stdout, sys.stderr = streams
        sys.excepthook, threading.excepthook = hooks
        logging.captureWarnings(False)
        for logger, handlers, level in states:
            logger.handlers[:] = handlers
            logger.setLevel(level)
        loggers[0].propagate = True


@final
class OutputHandler(logging.Handler):
    """Puts records into an `Output`, and counts those that are repeated too often."""

    def __init__(self, formatter: logging.Formatter, output: Output, *others: Output) -> None:
        """`others` are to be drained with it."""
        super().__init__()
        self.setFormatter(formatter)
        self._output = output
        self._others = others
        self._repeats = Repeats()

    def emit(self, record: logging.LogRecord) -> None:
        """Have it written, unless much like it has just been."""
        now_s = time.monotonic()
        for told in self._repeats.over(now_s):
            self._put(told)
        if record.levelno < logging.WARNING or self._repeats.lets_pass(record, now_s):
            self._put(record)

    def drain(self, limit_s: float) -> None:
        """Say what has been counted, and wait until all is written, for so long at most."""
        self.acquire()
        try:
            for told in self._repeats.over(float("inf")):
                self._put(told)
        finally:
            self.release()
        end_s = time.monotonic() + limit_s
        for output in (self._output, *self._others):
            output.flush(max(0.0, end_s - time.monotonic()))

    def _put(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception as error:  # arguments that do not fit, or cannot be shown
            text = f"{record.levelname} {record.name!r} {record.msg!r} cannot be shown: {error!r}"
        self._output.put(text.encode("utf-8", "backslashreplace") + b"\n")


@final
class Repeats:
    """Lets a warning pass so many times within a while, and counts it from then on."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int, str], _Seen] = {}  # oldest first

    def lets_pass(self, record: logging.LogRecord, now_s: float) -> bool:
        """Whether it is to be said. What is said last before the counting begins says so."""
        key = (record.name, record.levelno, str(record.msg))
        seen = self._seen.get(key)
        if seen is None:
            if len(self._seen) >= _KEYS_MAX:
                return True  # so many different ones are no repetition
            seen = self._seen[key] = _Seen(now_s + REPEATS_S)
        seen.count += 1
        if seen.count == REPEATS_MAX:
            record.__dict__["note"] = f"more of the same are counted, for {REPEATS_S:g} s"
        return seen.count <= REPEATS_MAX

    def over(self, now_s: float) -> list[logging.LogRecord]:
        """Forget what was counted long enough, and return what is to be said of it."""
        told: list[logging.LogRecord] = []
        while self._seen:
            key = next(iter(self._seen))
            seen = self._seen[key]
            if now_s < seen.until_s:
                break
            del self._seen[key]
            if seen.count > REPEATS_MAX:
                name, level, message = key
                text = "%d more times: %s"
                arguments = (seen.count - REPEATS_MAX, message)
                told.append(logging.LogRecord(name, level, "", 0, text, arguments, None))
        return told


@final
class _Seen:
    """How often something was said in a while that ends at a time."""

    __slots__ = ("count", "until_s")

    def __init__(self, until_s: float) -> None:
        self.until_s = until_s
        self.count = 0


class TextFormatter(logging.Formatter):
    """One line per record, for people. What follows a line break is indented.

    So nothing that a client or a function sends can look like a line of our own, and no control
    character of theirs reaches a terminal.
    """

    def __init__(self, process_name: str) -> None:
        super().__init__()
        self._process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        said = record.getMessage()
        request_id = getattr(record, "request_id", None)
        if request_id is not None:
            said += f" (request {request_id})"
        note = getattr(record, "note", None)
        if note is not None:
            said += f" ({note})"
        trace = _trace(self, record)
        if trace:
            said += f"\n{trace}"
        head = f"{_timestamp(record)} {record.levelname} {record.name} [{self._process_name}]"
        return f"{head} {said}".translate(_ESCAPES)


class JsonFormatter(logging.Formatter):
    """One JSON object per record."""

    def __init__(self, process_name: str) -> None:
        super().__init__()
        self._process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        """Return the object."""
        content: dict[str, object] = {
            "ts": _timestamp(record),
            "level": record.levelname,
            "logger": record.name,
            "process": self._process_name,
            "pid": os.getpid(),
            "message": record.getMessage(),
        }
        for name in ("request_id", "note"):
            value = getattr(record, name, None)
            if value is not None:
                content[name] = str(value)
        content.update(getattr(record, "fields", {}))
        trace = _trace(self, record)
        if trace:
            content["exc"] = trace
        return json.dumps(content, default=str)


def _timestamp(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    parts = []
    if record.exc_info:
        parts.append(formatter.formatException(record.exc_info))
    if record.stack_info:
        parts.append(formatter.formatStack(record.stack_info))
    return "\n".join(parts)


def _tell_dropped(dropped: int) -> None:
    _LOG.warning("%d lines of output were dropped: they could not be written", dropped)


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    else:
        _LOG.critical("the process ends: %s", kind.__name__, exc_info=(kind, error, trace))
        flush()


def _uncaught_in_thread(failed: threading.ExceptHookArgs) -> None:
    if failed.exc_value is not None and not issubclass(failed.exc_type, SystemExit):
        name = "a thread" if failed.thread is None else f"thread {failed.thread.name}"
        about = (failed.exc_type, failed.exc_value, failed.exc_traceback)
        _LOG.error("%s has ended: %s", name, failed.exc_type.__name__, exc_info=about)


# Control characters but for tabs, as they are written in source; lines that follow are indented.
_ESCAPES: Final[Mapping[int, str]] = {
    **{code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))},
    ord("\t"): "\t",
    ord("\n"): "\n    ",
}
