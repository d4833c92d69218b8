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
from types import TracebackType
from typing import Final, NoReturn, Protocol, TextIO, final

QUEUE_BYTES_MAX: Final = 4 << 20
WRITE_BYTES: Final = 64 << 10  # about as much goes out at once
CHUNK_BYTES_MAX: Final = 256 << 10  # of one line or message; the rest of it is cut off
_TRUNCATED: Final = b"... (cut off)\n"


@final
class Output:
    """A file descriptor that is written to by a daemon thread."""

    def __init__(self, fd: int, *, queue_bytes_max: int = QUEUE_BYTES_MAX) -> None:
        self.fd = fd
        self.on_recovered: Callable[[int], None] = (
            _ignore_dropped  # gets how many pieces were dropped
        )
        self._queue_bytes_max = queue_bytes_max
        self._chunks: deque[bytes] = deque()
        self._queued_bytes = 0  # in the queue, and of what is being written
        self._dropped = 0  # pieces, since that was last told
        self._is_writing = False
        self._ends_mid_line = False  # the last thing that was written ends in the middle of a line
        self._is_forked = False
        # A lock that its owner may take again: a signal handler or a destructor may have
        # something to say while this very thread is putting something here.
        self._changed = threading.Condition(threading.RLock())
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()
        os.register_at_fork(after_in_child=self._after_fork)

    def put(self, chunk: bytes) -> None:
        """Have it written. Never raises, and never waits for whoever reads."""
        if self._is_forked:
            self._write(chunk)
            return
        if len(chunk) > CHUNK_BYTES_MAX:
            chunk = chunk[: CHUNK_BYTES_MAX - len(_TRUNCATED)] + _TRUNCATED
        with self._changed:
            if self._queued_bytes + len(chunk) > self._queue_bytes_max:
                self._dropped += 1
                return
            self._chunks.append(chunk)
            self._queued_bytes += len(chunk)
            self._changed.notify_all()

    def flush(self, limit_s: float) -> bool:
        """Wait until everything has been written, for so long at most; whether it has."""
        if self._is_forked:
            return True
        with self._changed:
            return self._changed.wait_for(lambda: not self._queued_bytes, limit_s)

    @property
    def dropped(self) -> int:
        """Pieces that were dropped and not told of yet."""
        return self._dropped

    def _after_fork(self) -> None:
        """Be of use in a child, which has no thread, and a lock that may be held for ever."""
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
            if is_written and self._dropped:
                with self._changed:
                    dropped, self._dropped = self._dropped, 0
                self.on_recovered(dropped)
            with self._changed:
                self._queued_bytes -= size
                if not is_written:
                    self._dropped += len(chunks)
                self._changed.notify_all()

    def _write(self, data: bytes) -> bool:
        left = memoryview(b"\n" + data if self._ends_mid_line else data)
        size = len(left)
        while left:
            try:
                left = left[os.write(self.fd, left) :]
            except BlockingIOError:  # whoever started us made it so
                with suppress(OSError, ValueError):
                    select.select((), (self.fd,), (), 1.0)
            except OSError:
                self._ends_mid_line = self._ends_mid_line or len(left) < size
                return False
        self._ends_mid_line = False
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
        chunk = bytes(data)  # type: ignore[call-overload]  # whatever has a buffer
        for start in range(0, len(chunk), CHUNK_BYTES_MAX):
            self._output.put(chunk[start : start + CHUNK_BYTES_MAX])
        return len(chunk)

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


def reopen_standard_fds() -> None:
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


def _ignore_dropped(dropped: int) -> None:
    """What is done about dropped pieces where nobody wants to know."""


# Logging of the processes of a server: `logging`, to stderr, and never in the way of serving.
#
# Every module has a logger of its own name. What an operator must act on is an error; what has
# recovered by itself is a warning; what belongs to the life of a server is an info. A record that
# concerns a request has its id: `extra={"request_id": ...}`.
#
# `configure` is called once in each process. From then on `print` goes the same way.


REPEATS_MAX: Final = 10  # of one warning or error, within
REPEATS_S: Final = 10.0
EXIT_FLUSH_S: Final = 1.0
_KEYS_MAX: Final = 512  # different warnings that are counted at once

_LOG: Final = logging.getLogger(__name__)


class LogSettings(Protocol):
    """What an application says about logging: a `ServeOptions`."""

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
        self._repeats = RepeatLimiter()

    def emit(self, record: logging.LogRecord) -> None:
        """Have it written, unless much like it has just been."""
        now_s = time.monotonic()
        for summary in self._repeats.expired(now_s):
            self._put(summary)
        if record.levelno < logging.WARNING or self._repeats.allows(record, now_s):
            self._put(record)

    def drain(self, limit_s: float) -> None:
        """Say what has been counted, and wait until all is written, for so long at most."""
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
        except Exception as error:  # arguments that do not fit, or cannot be shown
            text = f"{record.levelname} {record.name!r} {record.msg!r} cannot be shown: {error!r}"
        self._output.put(text.encode("utf-8", "backslashreplace") + b"\n")


@final
class RepeatLimiter:
    """Lets a warning pass so many times within a while, and counts it from then on."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int, str], _RepeatCount] = {}  # oldest first

    def allows(self, record: logging.LogRecord, now_s: float) -> bool:
        """Whether it is to be said. What is said last before the counting begins says so."""
        key = (record.name, record.levelno, str(record.msg))
        repeats = self._counts.get(key)
        if repeats is None:
            if len(self._counts) >= _KEYS_MAX:
                return True  # so many different ones are no repetition
            repeats = self._counts[key] = _RepeatCount(now_s + REPEATS_S)
        repeats.count += 1
        if repeats.count == REPEATS_MAX:
            record.__dict__["note"] = f"more of the same are counted, for {REPEATS_S:g} s"
        return repeats.count <= REPEATS_MAX

    def expired(self, now_s: float) -> list[logging.LogRecord]:
        """Forget what was counted long enough, and return what is to be said of it."""
        summary: list[logging.LogRecord] = []
        while self._counts:
            key = next(iter(self._counts))
            repeats = self._counts[key]
            if now_s < repeats.until_s:
                break
            del self._counts[key]
            if repeats.count > REPEATS_MAX:
                name, level, message = key
                text = "%d more times: %s"
                arguments = (repeats.count - REPEATS_MAX, message)
                summary.append(logging.LogRecord(name, level, "", 0, text, arguments, None))
        return summary


@final
class _RepeatCount:
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
        text = record.getMessage()
        request_id = getattr(record, "request_id", None)
        if request_id is not None:
            text += f" (request {request_id})"
        note = getattr(record, "note", None)
        if note is not None:
            text += f" ({note})"
        trace = _trace(self, record)
        if trace:
            text += f"\n{trace}"
        head = f"{_timestamp(record)} {record.levelname} {record.name} [{self._process_name}]"
        return f"{head} {text}".translate(_ESCAPES)


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


def _log_dropped(dropped: int) -> None:
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
        exc_info = (failed.exc_type, failed.exc_value, failed.exc_traceback)
        _LOG.error("%s has ended: %s", name, failed.exc_type.__name__, exc_info=exc_info)


# Control characters but for tabs, as they are written in source; lines that follow are indented.
_ESCAPES: Final[Mapping[int, str]] = {
    **{code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))},
    ord("\t"): "\t",
    ord("\n"): "\n    ",
}


# How a worker ends: at once, and not leaving behind what its models have started.


HUNG_EXIT: Final = 70  # something took longer than it may
BROKEN_EXIT: Final = 71


def exit_process(status: int) -> NoReturn:
    """End this process, whatever threads of models and libraries do, and its children."""
    flush()
    if os.getpgrp() == os.getpid():  # else the group is that of whoever started us
        os.killpg(os.getpid(), signal.SIGTERM)  # of which we ourselves only take note
    os._exit(status)
