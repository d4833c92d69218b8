"""The gateway's end of the codec: long texts are read and written in processes beside it.

There are two lanes, for texts that are long and for those that are very long, so that nobody waits
for the latter but those who send them. Each is one process, which is started when it is first
needed, does one job at a time, and is killed and started again when a job takes too long. Those who
wait are served tenant by tenant, in turn.

All of it runs on the event loop. Nothing larger than a socket's buffer is copied in one go.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, final

import msgspec

from headgate.live.gateway.codec.process import (
    LENGTH_BYTES,
    NO_MEMORY,
    REPLIES,
    AnyReply,
    CodecJob,
    FailedResult,
    ReadResult,
    RefusedResult,
    packed,
)
from headgate.live.gateway.codec.text import ParsedRequest, ReadText, WriteText
from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.errors import RequestError
from headgate.live.gateway.memory_budget import Hold
from headgate.live.ipc.shared_memory import allocate_buffer

_LOG: Final = logging.getLogger(__name__)
_LARGE_BYTES: Final = 1 << 20  # from here on, a job is one for the second lane
_HEADER_BYTES_MAX: Final = 1 << 24  # of a reply; a longer one is nonsense
_READ_BYTES: Final = 1 << 18  # at a time
_PARTS_AT_ONCE: Final = 64  # that one call of the kernel is given

Part = bytes | bytearray | memoryview
Result = ParsedRequest | memoryview | RequestError  # a text that was read or written, or neither


@final
class TextJob:
    """One text, and who wants it. `cancel` says that nobody does any more."""

    __slots__ = ("hold", "lane", "message", "on_done", "parts", "since_s", "tenant")

    def __init__(
        self,
        message: ReadText | WriteText,
        parts: Sequence[Part],
        hold: Hold,
        tenant: int,
        on_done: Callable[[Result], None],
    ) -> None:
        self.message = message
        self.parts = parts
        self.hold = hold  # what the job takes of the budget
        self.tenant = tenant
        self.on_done: Callable[[Result], None] | None = on_done
        self.since_s = 0.0
        self.lane: CodecProcess | None = None

    def cancel(self) -> None:
        """Forget about it. What it holds is given back when nothing of it is left here."""
        self.on_done = None
        if self.lane is not None:
            self.lane.forget(self)

    def finish(self, result: Result) -> None:
        """Hand the result over, or give back what nobody wants."""
        self.lane = None
        self.parts = ()
        on_done, self.on_done = self.on_done, None
        if on_done is None:
            self.hold.release()
        else:
            on_done(result)


@final
class Codec:
    """Both lanes."""

    def __init__(self, loop: asyncio.AbstractEventLoop, config: GatewayConfig) -> None:
        self.lanes = (CodecProcess(loop, config), CodecProcess(loop, config))

    def submit(self, job: TextJob) -> None:
        """Have a job done. Raises `RequestError` (503) where too many wait."""
        size = sum(len(part) for part in job.parts)
        self.lanes[size > _LARGE_BYTES].submit(job)

    def sweep(self, now_s: float) -> None:
        """Turn away those that have waited for too long."""
        for lane in self.lanes:
            lane.sweep(now_s)

    def close(self) -> None:
        """End the processes; jobs that are open are refused."""
        for lane in self.lanes:
            lane.close()


@final
class CodecProcess:
    """One process, and those who wait for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, config: GatewayConfig) -> None:
        self.command = (sys.executable, "-m", "headgate.live.gateway.codec.process")
        self.starts = 0
        self._loop = loop
        self._limits = config
        self._waiting: dict[int, deque[TextJob]] = {}  # by tenant; whose turn it is comes first
        self._last_tenant = -1  # who had the turn before
        self._job: TextJob | None = None  # that is being done
        self._process: subprocess.Popen[bytes] | None = None
        self._ending: list[subprocess.Popen[bytes]] = []  # killed, and perhaps not gone
        self._socket: socket.socket | None = None
        self._out: list[memoryview] = []
        self._reply = _Reply()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Of the process, if there is one."""
        return None if self._process is None else self._process.pid

    def submit(self, job: TextJob) -> None:
        """Have a job done in its turn. Raises `RequestError` (503) where too many wait."""
        if self._is_closed:
            raise _leaving()
        waiting = self._waiting.setdefault(job.tenant, deque())
        if len(waiting) >= self._limits.codec_queue_max:
            raise RequestError(503, "too many long texts are waiting", reason="codec_busy")
        job.lane = self
        job.since_s = self._loop.time()
        waiting.append(job)
        self._next()

    def forget(self, job: TextJob) -> None:
        """Nobody wants it any more: it need not wait, but one that has begun goes on."""
        if job is not self._job:
            self._waiting[job.tenant].remove(job)
            job.finish(_busy())

    def sweep(self, now_s: float) -> None:
        """Turn away those that have waited for too long."""
        oldest_s = now_s - self._limits.codec_timeout_s
        for waiting in list(self._waiting.values()):
            while waiting and waiting[0].since_s < oldest_s:
                waiting.popleft().finish(_busy())
        self._reap()

    def close(self) -> None:
        """End the process; jobs that are open are refused."""
        self._is_closed = True
        for waiting in list(self._waiting.values()):
            while waiting:
                waiting.popleft().finish(_leaving())
        self._end(_leaving())
        for process in self._ending:
            process.wait()
        self._ending.clear()

    # --- one job -------------------------------------------------------------------------------

    def _next(self) -> None:
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
        self._timer = self._loop.call_later(self._limits.codec_timeout_s, self._overdue)
        try:
            self._start()
        except OSError as error:
            _LOG.error("the process that reads and writes long texts cannot be started: %s", error)
            self._end(_lost())
            return
        header = packed(CodecJob(job.message, [len(part) for part in job.parts]))
        self._out = [memoryview(header), *(memoryview(part) for part in job.parts)]
        self._write()

    def _done(self, result: Result) -> None:
        job, self._job = self._job, None
        self._reply = _Reply()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        assert job is not None
        job.finish(result)
        self._loop.call_soon(self._next)

    def _overdue(self) -> None:
        self._timer = None
        limit_s = self._limits.codec_timeout_s
        _LOG.warning("a text took longer than %g s to read or write, and is given up", limit_s)
        message = f"its text took longer than {limit_s:g} s; use binary tensors"
        self._end(RequestError(503, message, reason="codec_timeout"))

    # --- the process ---------------------------------------------------------------------------

    def _start(self) -> None:
        if self._process is not None:
            return
        ours, theirs = socket.socketpair()
        limits = msgspec.json.encode(replace(self._limits, keys=(), tenants=())).decode()
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

    def _end(self, refused: RequestError) -> None:
        """End the process and refuse its job."""
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.kill()
            self._ending.append(self._process)
            self._process = None
        self._out = []
        if self._job is not None:
            self._done(refused)

    def _reap(self) -> None:
        if self._ending:
            self._ending = [process for process in self._ending if process.poll() is None]

    def _write(self) -> None:
        """Send some of the job."""
        assert self._socket is not None
        try:
            sent = self._socket.sendmsg(self._out[:_PARTS_AT_ONCE])
        except BlockingIOError:
            sent = 0
        except OSError:
            self._broken()
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
        """Take some of the reply."""
        assert self._socket is not None
        try:
            got = self._socket.recv_into(self._reply.room()[:_READ_BYTES])
        except BlockingIOError:
            return
        except OSError:
            got = 0
        if not got or self._job is None:
            self._broken()
            return
        try:
            is_whole = self._reply.took(got, self._job)
        except ValueError as error:  # also msgspec's
            _LOG.error("the process that reads and writes long texts makes no sense: %s", error)
            self._broken()
            return
        if is_whole:
            result = self._reply.result()
            if isinstance(result, RequestError) and result.reason == NO_MEMORY:
                self._end(result)  # it ends after that
            else:
                self._done(result)

    def _broken(self) -> None:
        """The process has ended by itself."""
        if self._job is not None:
            _LOG.warning("the process that reads and writes long texts has ended within a job")
        self._end(_lost())


@final
class _Reply:
    """What has come of a reply. Its parts are read into memory that the budget has room for."""

    def __init__(self) -> None:
        self._header: AnyReply | None = None
        self._room = memoryview(bytearray(LENGTH_BYTES))
        self._at = 0  # of what is being read
        self._has_length = False
        self._parts: list[memoryview] = []  # that are whole
        self._wanted: list[int] = []  # sizes of those that are to come
        self._left = 0  # bytes that are thrown away
        self._is_kept = True

    def room(self) -> memoryview:
        """Where the next bytes go."""
        return self._room[self._at :]

    def took(self, size: int, job: TextJob) -> bool:
        """So many bytes have come; whether that was the last of them."""
        if not self._is_kept:
            self._left -= size
            self._room = self._room[: self._left]
            return not self._left
        self._at += size
        if self._at < len(self._room):
            return False
        if not self._has_length:
            self._has_length = True
            length = int.from_bytes(self._room, "little")
            if length > _HEADER_BYTES_MAX:
                raise ValueError(f"a header of {length} bytes")
            self._renew(length)
            return False
        if self._header is None:
            self._begin_parts(REPLIES.decode(self._room), job)
        else:
            self._parts.append(self._room.toreadonly())
        return self._next_part()

    def result(self) -> Result:
        """What it amounts to."""
        header = self._header
        if isinstance(header, RefusedResult):
            return RequestError(header.status, header.message, reason=header.reason)
        if isinstance(header, FailedResult):
            _LOG.error("a long text broke the gateway:\n%s", header.trace)
            return RequestError(500, "the gateway made a mistake", reason="internal")
        if not self._is_kept:
            return RequestError(503, "there is no memory for it just now", reason="memory")
        if isinstance(header, ReadResult):
            parts = iter(self._parts)
            data = [None if size < 0 else next(parts) for size in header.sizes]
            return ParsedRequest(header.form, header.request, data)
        return self._parts[0]

    def _begin_parts(self, header: AnyReply, job: TextJob) -> None:
        self._header = header
        self._wanted = [size for size in header.sizes if size >= 0]
        whole = sum(self._wanted)
        # One that nobody waits for is read all the same: the next one's reply is behind it.
        self._is_kept = job.on_done is not None and job.hold.grow(whole)
        if not self._is_kept:
            self._wanted = []
            self._left = whole
            self._renew(min(whole, _READ_BYTES))

    def _next_part(self) -> bool:
        if not self._is_kept:
            return not self._left
        while self._wanted:
            self._renew(self._wanted.pop(0))
            if len(self._room):
                return False
            self._parts.append(self._room)  # an empty one
        return True

    def _renew(self, size: int) -> None:
        self._room = allocate_buffer(size)
        self._at = 0


def _leaving() -> RequestError:
    return RequestError(503, "the server is leaving", reason="draining")


def _busy() -> RequestError:
    return RequestError(503, "its text has waited for too long to be read", reason="codec_busy")


def _lost() -> RequestError:
    return RequestError(
        503, "the process that read or wrote its text was lost", reason="codec_lost"
    )
