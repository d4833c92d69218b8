"""The gateway's end of the codec, which reads and writes long texts in other processes.

There are two processes, one for long texts and one for very long ones, so that the latter delay
only each other. A process is started when it is first needed, does one job at a time, and is killed
and restarted when a job takes too long. Queued jobs are taken tenant by tenant, round robin.

All of this runs on the event loop. Nothing larger than a socket's buffer is copied in one step.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, final

import msgspec

from headgate.live.gateway.codec.process import (
    NO_MEMORY,
    REPLIES,
    AnyReply,
    CodecJob,
    ErrorResult,
    FailedResult,
    ReadResult,
)
from headgate.live.gateway.codec.text import ParsedRequest, ReadText, WriteText
from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.errors import RequestError, draining, internal_error, memory_exhausted
from headgate.live.gateway.tenants import Hold
from headgate.live.ipc.messages import LENGTH_BYTES, frame
from headgate.live.ipc.shared_memory import allocate_buffer

_LOG: Final = logging.getLogger(__name__)
_LARGE_BYTES: Final = 1 << 20  # a job with more is for the second process
_HEADER_BYTES_MAX: Final = 1 << 24  # of a reply; a longer one is malformed
_READ_BYTES: Final = 1 << 18  # at a time
_PARTS_AT_ONCE: Final = 64  # that one system call sends

Part = bytes | bytearray | memoryview
Result = ParsedRequest | memoryview | RequestError  # what was read or written, or why not


@final
@dataclass(slots=True, eq=False)
class TextJob:
    """One text to read or write, and the callback that gets the result."""

    message: ReadText | WriteText
    parts: Sequence[Part]
    hold: Hold  # of the memory budget, for the text and its result
    tenant: int
    on_done: Callable[[Result], None] | None
    since_s: float = 0.0
    process: CodecProcess | None = None

    def cancel(self) -> None:
        """Drop the result. The hold is released when the job no longer uses its memory."""
        self.on_done = None
        if self.process is not None:
            self.process.cancel(self)

    def finish(self, result: Result) -> None:
        """Pass the result to the callback; release the hold if the job was cancelled."""
        self.process = None
        self.parts = ()
        on_done, self.on_done = self.on_done, None
        if on_done is None:
            self.hold.release()
        else:
            on_done(result)


@final
class Codec:
    """Both processes."""

    def __init__(self, loop: asyncio.AbstractEventLoop, config: GatewayConfig) -> None:
        self.processes = (CodecProcess(loop, config), CodecProcess(loop, config))

    def submit(self, job: TextJob) -> None:
        """Queue a job. Raises `RequestError` (503) where the queue is full."""
        size = sum(len(part) for part in job.parts)
        self.processes[size > _LARGE_BYTES].submit(job)

    def sweep(self, now_s: float) -> None:
        for process in self.processes:
            process.sweep(now_s)

    def close(self) -> None:
        for process in self.processes:
            process.close()


@final
class CodecProcess:
    """One process and its queue."""

    def __init__(self, loop: asyncio.AbstractEventLoop, config: GatewayConfig) -> None:
        self.command = (sys.executable, "-m", "headgate.live.gateway.codec.process")
        self.starts = 0
        self._loop = loop
        self._limits = config
        self._waiting: dict[int, deque[TextJob]] = {}  # by tenant; the next tenant first
        self._last_tenant = -1  # whose job was taken last
        self._job: TextJob | None = None  # that is running
        self._process: subprocess.Popen[bytes] | None = None
        self._killed: list[subprocess.Popen[bytes]] = []  # killed, perhaps not reaped yet
        self._socket: socket.socket | None = None
        self._out: list[memoryview] = []
        self._reply = _Reply()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def submit(self, job: TextJob) -> None:
        """Queue a job. Raises `RequestError` (503) where its tenant's queue is full."""
        if self._is_closed:
            raise draining()
        waiting = self._waiting.setdefault(job.tenant, deque())
        if len(waiting) >= self._limits.codec_queue_max:
            raise RequestError(
                503, "too many long texts of this client are queued", reason="codec_busy"
            )
        job.process = self
        job.since_s = self._loop.time()
        waiting.append(job)
        self._start_next()

    def cancel(self, job: TextJob) -> None:
        """Take a job out of the queue; a job that is running goes on."""
        if job is not self._job:
            self._waiting[job.tenant].remove(job)
            job.finish(_codec_busy())

    def sweep(self, now_s: float) -> None:
        """Fail jobs that have been queued for too long."""
        oldest_s = now_s - self._limits.codec_timeout_s
        for waiting in list(self._waiting.values()):
            while waiting and waiting[0].since_s < oldest_s:
                waiting.popleft().finish(_codec_busy())
        self._killed = [process for process in self._killed if process.poll() is None]

    def close(self) -> None:
        """Kill the process; unfinished jobs fail."""
        self._is_closed = True
        for waiting in list(self._waiting.values()):
            while waiting:
                waiting.popleft().finish(draining())
        self._kill(draining())
        for process in self._killed:
            process.wait()
        self._killed.clear()

    def _start_next(self) -> None:
        if self._job is not None or self._is_closed:
            return
        tenants = [tenant for tenant, jobs in self._waiting.items() if jobs]
        if not tenants:
            return
        tenant = tenants[0]
        if tenant == self._last_tenant and len(tenants) > 1:
            tenant = tenants[1]
        self._last_tenant = tenant
        jobs = self._waiting.pop(tenant)
        job = jobs.popleft()
        if jobs:
            self._waiting[tenant] = jobs  # behind all others
        self._job = job
        self._timer = self._loop.call_later(self._limits.codec_timeout_s, self._on_timeout)
        try:
            self._start()
        except OSError as error:
            _LOG.error("the codec process cannot be started: %s", error)
            self._kill(_codec_lost())
            return
        header = frame(CodecJob(job.message, [len(part) for part in job.parts]))
        self._out = [memoryview(header), *(memoryview(part) for part in job.parts)]
        self._write()

    def _finish(self, result: Result) -> None:
        job, self._job = self._job, None
        self._reply = _Reply()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        assert job is not None
        job.finish(result)
        self._loop.call_soon(self._start_next)

    def _on_timeout(self) -> None:
        self._timer = None
        limit_s = self._limits.codec_timeout_s
        _LOG.warning("a text took longer than %g s: the codec process is killed", limit_s)
        message = f"processing the text took longer than {limit_s:g} s; use binary tensors"
        self._kill(RequestError(503, message, reason="codec_timeout"))

    def _start(self) -> None:
        if self._process is not None:
            return
        ours, theirs = socket.socketpair()
        limits = msgspec.json.encode(
            msgspec.structs.replace(self._limits, keys=(), tenants=())
        ).decode()
        command = [*self.command, "--fd", str(theirs.fileno()), "--limits", limits]
        try:
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self.starts += 1
        ours.setblocking(False)
        self._socket = ours
        self._loop.add_reader(ours, self._read)

    def _kill(self, error: RequestError) -> None:
        """Kill the process and fail its job."""
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.kill()
            self._killed.append(self._process)
            self._process = None
        self._out = []
        if self._job is not None:
            self._finish(error)

    def _write(self) -> None:
        """Send as much of the job as the socket takes."""
        assert self._socket is not None
        try:
            sent = self._socket.sendmsg(self._out[:_PARTS_AT_ONCE])
        except BlockingIOError:
            sent = 0
        except OSError:
            self._on_exit()
            return
        out = self._out
        while out and sent >= len(out[0]):
            sent -= len(out.pop(0))
        if out:
            out[0] = out[0][sent:]
            self._loop.add_writer(self._socket, self._write)
        else:
            self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        """Receive a piece of the reply."""
        assert self._socket is not None
        try:
            count = self._socket.recv_into(self._reply.buffer()[:_READ_BYTES])
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if not count or self._job is None:
            self._on_exit()
            return
        try:
            is_whole = self._reply.on_bytes(count, self._job)
        except ValueError as error:  # also msgspec's
            _LOG.error("the codec process sent a malformed reply: %s", error)
            self._on_exit()
            return
        if is_whole:
            result = self._reply.result()
            if isinstance(result, RequestError) and result.reason == NO_MEMORY:
                self._kill(result)  # the process exits after this error
            else:
                self._finish(result)

    def _on_exit(self) -> None:
        """The process has ended or cannot be understood."""
        if self._job is not None:
            _LOG.warning("the codec process ended during a job")
        self._kill(_codec_lost())


@final
class _Reply:
    """A reply being received. Its parts are read into memory that the budget has reserved."""

    def __init__(self) -> None:
        self._header: AnyReply | None = None
        self._buffer = memoryview(bytearray(LENGTH_BYTES))  # what is being read
        self._at = 0  # position in it
        self._has_length = False
        self._parts: list[memoryview] = []  # received
        self._part_sizes: list[int] = []  # sizes of the parts to come
        self._discarded_left = 0  # bytes still to be received and discarded
        self._is_kept = True

    def buffer(self) -> memoryview:
        """Where to put the next bytes."""
        return self._buffer[self._at :]

    def on_bytes(self, size: int, job: TextJob) -> bool:
        """Bytes have been received. Returns whether the reply is complete."""
        if not self._is_kept:
            self._discarded_left -= size
            self._buffer = self._buffer[: self._discarded_left]
            return not self._discarded_left
        self._at += size
        if self._at < len(self._buffer):
            return False
        if not self._has_length:
            self._has_length = True
            length = int.from_bytes(self._buffer, "little")
            if length > _HEADER_BYTES_MAX:
                raise ValueError(f"a header of {length} bytes")
            self._new_buffer(length)
            return False
        if self._header is None:
            self._begin_parts(REPLIES.decode(self._buffer), job)
        else:
            self._parts.append(self._buffer.toreadonly())
        return self._next_part()

    def result(self) -> Result:
        header = self._header
        if isinstance(header, ErrorResult):
            return RequestError(header.status, header.message, reason=header.reason)
        if isinstance(header, FailedResult):
            _LOG.error("internal error in the codec process:\n%s", header.trace)
            return internal_error()
        if not self._is_kept:
            return memory_exhausted()
        if isinstance(header, ReadResult):
            parts = iter(self._parts)
            data = [None if size < 0 else next(parts) for size in header.sizes]
            return ParsedRequest(header.format, header.request, data)
        return self._parts[0]

    def _begin_parts(self, header: AnyReply, job: TextJob) -> None:
        self._header = header
        self._part_sizes = [size for size in header.sizes if size >= 0]
        total = sum(self._part_sizes)
        # The reply of a cancelled job is received all the same: the next job's reply is behind it.
        self._is_kept = job.on_done is not None and job.hold.grow(total)
        if not self._is_kept:
            self._part_sizes = []
            self._discarded_left = total
            self._new_buffer(min(total, _READ_BYTES))

    def _next_part(self) -> bool:
        if not self._is_kept:
            return not self._discarded_left
        while self._part_sizes:
            self._new_buffer(self._part_sizes.pop(0))
            if len(self._buffer):
                return False
            self._parts.append(self._buffer)  # an empty part
        return True

    def _new_buffer(self, size: int) -> None:
        self._buffer = allocate_buffer(size)
        self._at = 0


def _codec_busy() -> RequestError:
    return RequestError(503, "the text was queued for too long", reason="codec_busy")


def _codec_lost() -> RequestError:
    message = "the process that was reading or writing the text ended"
    return RequestError(503, message, reason="codec_lost")
