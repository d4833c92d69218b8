"""Logging and console output that never block or fail a request.

A pipe that nobody reads blocks its writer, and a closed pipe or a full disk raises. Neither may
affect a request. So a thread of its own writes, from a bounded queue. Chunks that find no room or
cannot be written are dropped and counted, and the count is logged once output works again. In a
forked process (functions may fork) there is no such thread: output is written at once, and errors
are ignored.

`configure` is called once per process; from then on `logging` writes to stderr this way, and so
does `print`. Every module has a logger of its own name. Errors are for what an operator must act
on, warnings for what has recovered by itself, infos for the lifecycle of a server. A record about a
request has its id: `extra={"request_id": ...}`.
"""

from __future__ import annotations

import io
import json
import logging
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Final, NoReturn, TextIO, final

from headgate.config import ServeSpec

QUEUE_BYTES_MAX: Final = 4 << 20
WRITE_BYTES: Final = 64 << 10  # approximate size of one write
CHUNK_BYTES_MAX: Final = 256 << 10  # of one line or message; the rest is truncated
# Of a traceback, and of a message in JSON: as JSON a character takes up to twelve bytes, and a line
# that is truncated would be no object.
TRACE_CHARS_MAX: Final = 16 << 10
MESSAGE_CHARS_MAX: Final = 4 << 10
REPEATS_MAX: Final = 10  # identical warnings or errors within `REPEATS_S`
REPEATS_S: Final = 10.0
EXIT_FLUSH_S: Final = 1.0
HUNG_EXIT: Final = 70  # a job exceeded its timeout
INTERNAL_ERROR_EXIT: Final = 71
_KEYS_MAX: Final = 512  # different messages that are counted at once
_TRUNCATED: Final = b"... (cut off)\n"
_LOG: Final = logging.getLogger(__name__)


def configure(settings: ServeSpec, process_name: str) -> None:
    """Make logging and `print` non-blocking and failsafe. Call `flush` before the process exits."""
    reopen_standard_fds()
    errors = Output(2)
    prints = errors if is_same_file(1, 2) else Output(1)
    errors.on_recovered = prints.on_recovered = _log_dropped
    formatter = JsonFormatter if settings.log_format == "json" else TextFormatter
    handler = OutputHandler(formatter(process_name), errors, prints)
    level = getattr(logging, settings.log_level.upper())
    ours, root = logging.getLogger("headgate"), logging.getLogger()
    ours.handlers[:] = root.handlers[:] = [handler]
    ours.setLevel(level)
    ours.propagate = False  # whatever a function does to the root logger
    logging.getLogger("headgate.access").setLevel(logging.INFO)  # enabled by an option of its own
    root.setLevel(max(level, logging.WARNING))
    logging.captureWarnings(True)
    sys.stdout = text_stream(prints, 1)
    sys.stderr = text_stream(errors, 2)
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread


def flush(limit_s: float = EXIT_FLUSH_S) -> None:
    """Wait until all output has been written, for at most `limit_s`, before the process exits."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # a function may have replaced the stream
            stream.flush()
    for handler in logging.getLogger("headgate").handlers:
        if isinstance(handler, OutputHandler):
            handler.drain(limit_s)


@contextmanager
def configured(settings: ServeSpec, process_name: str) -> Iterator[None]:
    """`configure` for the duration of a block, then `flush` and restore the previous state."""
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


def exit_process(status: int) -> NoReturn:
    """Exit at once, whatever threads of models and libraries do, with all child processes."""
    flush()
    if os.getpgrp() == os.getpid():  # otherwise the group belongs to the parent
        os.killpg(os.getpid(), signal.SIGTERM)  # this process itself ignores SIGTERM
    os._exit(status)


@final
class OutputHandler(logging.Handler):
    """Passes records to an `Output`, and suppresses and counts frequent repetitions."""

    def __init__(self, formatter: logging.Formatter, output: Output, *others: Output) -> None:
        """`others` are flushed with it."""
        super().__init__()
        self.setFormatter(formatter)
        self._output = output
        self._others = others
        self._repeats = RepeatLimiter()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record, unless it has been repeated too often."""
        now_s = time.monotonic()
        for summary in self._repeats.expired(now_s):
            self._put(summary)
        if record.levelno < logging.WARNING or self._repeats.allows(record, now_s):
            self._put(record)

    def drain(self, limit_s: float) -> None:
        """Log the suppressed counts, and wait until all is written, for at most `limit_s`."""
        self.acquire()
        try:
            for summary in self._repeats.expired(float("inf")):
                self._put(summary)
        finally:
            self.release()
        end_s = time.monotonic() + limit_s
        for output in (self._output, *self._others):
            output.flush(max(0.0, end_s - time.monotonic()))

    def _put(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception as error:  # arguments that do not match or cannot be formatted
            text = (
                f"{record.levelname} {record.name!r} {record.msg!r} cannot be formatted: {error!r}"
            )
        self._output.put(text.encode("utf-8", "backslashreplace") + b"\n")


@final
class RepeatLimiter:
    """Allows a message `REPEATS_MAX` times per `REPEATS_S`, and counts it from then on."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int, str], _RepeatCount] = {}  # oldest first

    def allows(self, record: logging.LogRecord, now_s: float) -> bool:
        """Whether to log a record. The last one before suppression gets a note about it."""
        key = (record.name, record.levelno, str(record.msg))
        repeats = self._counts.get(key)
        if repeats is None:
            if len(self._counts) >= _KEYS_MAX:
                return True  # too many different messages to be repetitions
            repeats = self._counts[key] = _RepeatCount(now_s + REPEATS_S)
        repeats.count += 1
        if repeats.count == REPEATS_MAX:
            record.__dict__["note"] = f"repetitions are suppressed and counted for {REPEATS_S:g} s"
        return repeats.count <= REPEATS_MAX

    def expired(self, now_s: float) -> list[logging.LogRecord]:
        """Remove expired counts; return a summary record for each that was suppressed."""
        summary: list[logging.LogRecord] = []
        while self._counts:
            key = next(iter(self._counts))
            repeats = self._counts[key]
            if now_s < repeats.until_s:
                break
            del self._counts[key]
            if repeats.count > REPEATS_MAX:
                name, level, message = key
                text = "suppressed %d repetitions: %s"
                arguments = (repeats.count - REPEATS_MAX, message)
                summary.append(logging.LogRecord(name, level, "", 0, text, arguments, None))
        return summary


@final
@dataclass(slots=True, eq=False)
class _RepeatCount:
    """Repetitions of one message until a point in time."""

    until_s: float
    count: int = 0


class TextFormatter(logging.Formatter):
    """One line per record, for people. Continuation lines are indented.

    So nothing that a client or a function sends can look like a log line of its own, and no control
    character reaches a terminal.
    """

    def __init__(self, process_name: str) -> None:
        super().__init__()
        self.process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        request_id = getattr(record, "request_id", None)
        if request_id is not None:
            text += f" (request {request_id})"
        note = getattr(record, "note", None)
        if note is not None:
            text += f" ({note})"
        trace = self.trace(record)
        if trace:
            text += f"\n{trace}"
        head = f"{_timestamp(record)} {record.levelname} {record.name} [{self.process_name}]"
        return f"{head} {text}"[: CHUNK_BYTES_MAX + 1].translate(_ESCAPES)  # which is slow

    def trace(self, record: logging.LogRecord) -> str:
        """Return the traceback and the stack of a record, as far as it has them.

        An exception may hold a whole tensor as text, so what is too long is cut in the middle.
        """
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        stack = self.formatStack(record.stack_info) if record.stack_info else ""
        return _cut("\n".join(filter(None, (trace, stack))), TRACE_CHARS_MAX)


class JsonFormatter(TextFormatter):
    """One JSON object per record."""

    def format(self, record: logging.LogRecord) -> str:
        content: dict[str, object] = {
            "ts": _timestamp(record),
            "level": record.levelname,
            "logger": record.name,
            "process": self.process_name,
            "pid": os.getpid(),
            "message": _cut(record.getMessage(), MESSAGE_CHARS_MAX),
        }
        for name in ("request_id", "note"):
            value = getattr(record, name, None)
            if value is not None:
                content[name] = str(value)
        content.update(getattr(record, "fields", {}))
        trace = self.trace(record)
        if trace:
            content["exc"] = trace
        return json.dumps(content, default=str)


@final
class Output:
    """A file descriptor that a daemon thread writes to."""

    def __init__(self, fd: int, *, queue_bytes_max: int = QUEUE_BYTES_MAX) -> None:
        self.fd = fd
        # Gets the number of dropped chunks.
        self.on_recovered: Callable[[int], object] = lambda dropped: None
        self._queue_bytes_max = queue_bytes_max
        self._chunks: deque[bytes] = deque()
        self._queued_bytes = 0  # queued and being written
        self.dropped = 0  # chunks since the last report
        self._ends_mid_line = False  # the last write ended in the middle of a line
        self._is_forked = False
        # A reentrant lock: a signal handler or a destructor may log while this thread is in `put`.
        self._changed = threading.Condition(threading.RLock())
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()
        os.register_at_fork(after_in_child=self._after_fork)

    def put(self, chunk: bytes) -> None:
        """Queue a chunk. Never raises, and never waits for the reader."""
        if self._is_forked:
            self._write(chunk)
            return
        if len(chunk) > CHUNK_BYTES_MAX:
            chunk = chunk[: CHUNK_BYTES_MAX - len(_TRUNCATED)] + _TRUNCATED
        with self._changed:
            if self._queued_bytes + len(chunk) > self._queue_bytes_max:
                self.dropped += 1
                return
            self._chunks.append(chunk)
            self._queued_bytes += len(chunk)
            self._changed.notify_all()

    def flush(self, limit_s: float) -> bool:
        """Wait until everything has been written, for at most `limit_s`; return whether it has."""
        if self._is_forked:
            return True
        with self._changed:
            return self._changed.wait_for(lambda: not self._queued_bytes, limit_s)

    def _after_fork(self) -> None:
        """Write directly in a forked child: it has no thread, and its lock may be held forever."""
        self._is_forked = True
        self._chunks = deque()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._chunks:
                    self._changed.wait()
                chunks = [self._chunks.popleft()]
                size = len(chunks[0])
                while self._chunks and size < WRITE_BYTES:
                    chunks.append(self._chunks.popleft())
                    size += len(chunks[-1])
            is_written = self._write(b"".join(chunks))
            if is_written and self.dropped:
                with self._changed:
                    dropped, self.dropped = self.dropped, 0
                self.on_recovered(dropped)
            with self._changed:
                self._queued_bytes -= size
                if not is_written:
                    self.dropped += len(chunks)
                self._changed.notify_all()

    def _write(self, data: bytes) -> bool:
        unwritten = memoryview(b"\n" + data if self._ends_mid_line else data)
        size = len(unwritten)
        while unwritten:
            try:
                unwritten = unwritten[os.write(self.fd, unwritten) :]
            except BlockingIOError:  # the parent has made the descriptor non-blocking
                with suppress(OSError, ValueError):
                    select.select((), (self.fd,), (), 1.0)
            except OSError:
                self._ends_mid_line = self._ends_mid_line or len(unwritten) < size
                return False
        self._ends_mid_line = False
        return True


@final
class _Stream(io.RawIOBase):
    """The raw stream below `sys.stdout` or `sys.stderr`."""

    def __init__(self, output: Output, fd: int) -> None:
        super().__init__()
        self._output = output
        self._fd = fd

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        chunk = bytes(data)  # type: ignore[call-overload]  # whatever has a buffer
        for start in range(0, len(chunk), CHUNK_BYTES_MAX):
            self._output.put(chunk[start : start + CHUNK_BYTES_MAX])
        return len(chunk)

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def close(self) -> None:
        """Do nothing: a function that closes `sys.stdout` must not break later ones."""


def text_stream(output: Output, fd: int) -> TextIO:
    """Return a replacement for `sys.stdout` or `sys.stderr`. Writing to it never raises."""
    return io.TextIOWrapper(
        _Stream(output, fd),  # type: ignore[type-var]
        encoding="utf-8",
        errors="backslashreplace",
        line_buffering=True,
    )


def reopen_standard_fds() -> None:
    """Open closed ones of stdin, stdout and stderr, or the next socket would take their number."""
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
    """Whether two descriptors refer to the same file, as after `2>&1`."""
    try:
        return os.path.sameopenfile(fd, other_fd)
    except OSError:
        return False


def _cut(text: str, chars_max: int) -> str:
    """Return a text without its middle if it is too long.

    >>> _cut("abcdefgh" * 10, 30)
    'abc ... 74 characters ... fgh'
    """
    if len(text) <= chars_max:
        return text
    half = (chars_max - len(f" ... {len(text)} characters ... ")) // 2
    return f"{text[:half]} ... {len(text) - 2 * half} characters ... {text[-half:]}"


def _timestamp(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def _log_dropped(dropped: int) -> None:
    _LOG.warning("%d lines of output could not be written and were dropped", dropped)


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    else:
        _LOG.critical(
            "uncaught exception, the process exits: %s",
            kind.__name__,
            exc_info=(kind, error, trace),
        )
        flush()


def _uncaught_in_thread(failed: threading.ExceptHookArgs) -> None:
    if failed.exc_value is not None and not issubclass(failed.exc_type, SystemExit):
        name = "a thread" if failed.thread is None else f"thread {failed.thread.name}"
        exc_info = (failed.exc_type, failed.exc_value, failed.exc_traceback)
        _LOG.error(
            "uncaught exception in %s: %s", name, failed.exc_type.__name__, exc_info=exc_info
        )


# Control characters except tabs are escaped as in source code; continuation lines are indented.
_ESCAPES: Final[Mapping[int, str]] = {
    **{code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))},
    ord("\t"): "\t",
    ord("\n"): "\n    ",
}
