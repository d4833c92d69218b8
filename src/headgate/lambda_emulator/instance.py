"""One instance of a function: a process that runs `awslambdaric`, and its Runtime API.

Every instance has its own port for the Runtime API, because the requests of the runtime do not say
which instance they come from. The Runtime API serves only processes of the instance's own session.
An instance runs one invocation at a time: the response to the runtime's `next` delivers it, and it
ends with the runtime's response or error, with the exit of the process, or with the timeout.

An instance accepts an invocation when it has responded to the last one but not yet polled `next`:
otherwise a client that calls again at once would find the instance busy, and start another one. If
the process exits before it polls, the invocation has not run (`InvocationResult.has_run`).

The Runtime API cannot authenticate by a secret: the runtime builds its URLs from a host and a port
only. Instead, the process behind a connection is identified. The kernel lists every TCP socket with
its inode number in `/proc/net/tcp`, and the open files of every process, sockets with their inodes
among them, in `/proc/PID/fd`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from inspect import getsource
from pathlib import Path
from socket import inet_aton
from sys import byteorder
from typing import IO, Final, final

import msgspec

import headgate
from headgate.http.connection import HttpConnection
from headgate.lambda_emulator.cleanup_process import CleanupProcess
from headgate.lambda_emulator.cpu_limits import CpuLimiter, threads
from headgate.lambda_emulator.functions import FunctionVersion
from headgate.lambda_emulator.http import (
    Address,
    EmulatorRequest,
    EmulatorServer,
    Reply,
    Response,
    ServiceError,
)
from headgate.lambda_emulator.settings import PlatformSettings
from headgate.system.process import set_parent_death_signal, thread_variables

# Set by the platform for every function; AWS rejects functions that set them.
RESERVED_VARIABLES: Final = frozenset(
    [
        "_HANDLER",
        "_X_AMZN_TRACE_ID",
        "AWS_REGION",
        "AWS_EXECUTION_ENV",
        "AWS_LAMBDA_FUNCTION_NAME",
        "AWS_LAMBDA_FUNCTION_MEMORY_SIZE",
        "AWS_LAMBDA_FUNCTION_VERSION",
        "AWS_LAMBDA_INITIALIZATION_TYPE",
        "AWS_LAMBDA_LOG_GROUP_NAME",
        "AWS_LAMBDA_LOG_STREAM_NAME",
        "AWS_LAMBDA_RUNTIME_API",
        "LAMBDA_TASK_ROOT",
        "LAMBDA_RUNTIME_DIR",
    ]
)
TCP_SOCKETS: Final = Path("/proc/net/tcp")
# Runs awslambdaric in a process that does not outlive the platform: the kernel kills the process
# when the platform's thread exits, and the process exits by itself if that has happened already.
# The function is copied, not imported: a package may contain a Headgate of another version.
_START: Final = f"""
from __future__ import annotations
import ctypes, os, runpy, signal, sys
from contextlib import suppress
{getsource(set_parent_death_signal)}
set_parent_death_signal(signal.SIGKILL, int(sys.argv.pop(1)))
sys.path[0] = os.getcwd()
runpy.run_module("awslambdaric", run_name="__main__", alter_sys=True)
"""
_LOG: Final = logging.getLogger(__name__)
_HEAD_BYTES_MAX: Final = 2**21  # the runtime may report an error, at some length, in a header
_CONNECTIONS_MAX: Final = 32  # the runtime has one, and one more to report a failed start
_SWEEP_FACTOR: Final = 20  # timeouts are checked less often: there may be a thousand instances
_ACCEPTED: Final = Response(202, b'{"status":"OK"}')
_LOG_BYTES_MAX: Final = 4_096  # tail of the log that a client may request
_LOG_READS_MAX: Final = 16  # in one go: a process that never stops printing must not block us
_RESPONSE_SLACK_BYTES: Final = 100  # AWS accepts slightly more than its documented limit


@dataclass(frozen=True, slots=True)
class Invocation:
    """One invocation of a function. The ID is the same for all attempts of an event."""

    function: FunctionVersion
    arn: str
    payload: bytes
    client_context: str = ""  # JSON
    id: str = field(default_factory=lambda: str(uuid.uuid4()))

    @property
    def trace(self) -> str:
        """Trace ID in the format of AWS. The platform itself traces nothing."""
        digits = self.id.replace("-", "")
        return f"Root=1-{int(time.time()):08x}-{digits[:24]};Parent={digits[16:]};Sampled=0"


@dataclass(frozen=True, slots=True)
class InvocationResult:
    """The result of an invocation on an instance.

    With `has_run` false, the process exited before the invocation was delivered to it, so another
    instance may run the invocation. `error_type` is empty if the function succeeded.
    """

    payload: bytes = b""
    error_type: str = ""
    has_run: bool = True
    started_s: float = 0.0  # Unix time
    init_ms: float = 0.0
    duration_ms: float = 0.0
    is_cold: bool = False
    log: bytes = b""


class _ReportedError(msgspec.Struct):
    errorType: str = ""


def _unreported_error(kind: str, message: str) -> tuple[str, bytes]:
    """Return type and payload of an error that the function did not report itself."""
    return kind, msgspec.json.encode({"errorType": kind, "errorMessage": message})


def _reported_error(payload: bytes) -> tuple[str, bytes]:
    """Return type and payload of an error that the runtime has reported."""
    try:
        kind = msgspec.json.decode(payload, type=_ReportedError).errorType
    except msgspec.DecodeError:
        kind = ""
    return kind or "Unknown", payload


@dataclass(frozen=True, slots=True)
class InstanceHost:
    """What all instances of a platform share."""

    settings: PlatformSettings
    cpu_limiter: CpuLimiter
    cleanup: CleanupProcess


def _environment(
    function: FunctionVersion, settings: PlatformSettings, port: int, *, is_provisioned: bool
) -> dict[str, str]:
    """Return the environment that AWS documents, for an instance with its Runtime API on `port`.

    As on AWS, nothing of the platform's own environment is passed on, except
    `PlatformSettings.inherited_variables`.
    """
    root, region = str(function.code.directory), settings.region
    # So that packages need not contain Headgate.
    headgate_root = str(Path(headgate.__file__).resolve().parents[1])
    names = settings.inherited_variables
    return {
        **{name: os.environ[name] for name in names if name in os.environ},
        **thread_variables(threads(settings.vcpus(function.memory_mb))),
        "LANG": "C.UTF-8",
        "TZ": ":UTC",
        "PYTHONPATH": os.pathsep.join((root, headgate_root)),
        "AWS_DEFAULT_REGION": region,
        **function.environment,
        "_HANDLER": function.handler,
        "AWS_REGION": region,
        "AWS_EXECUTION_ENV": f"AWS_Lambda_{function.runtime}",
        "AWS_LAMBDA_FUNCTION_NAME": function.name,
        "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": str(function.memory_mb),
        "AWS_LAMBDA_FUNCTION_VERSION": function.version,
        "AWS_LAMBDA_INITIALIZATION_TYPE": (
            "provisioned-concurrency" if is_provisioned else "on-demand"
        ),
        "AWS_LAMBDA_LOG_GROUP_NAME": f"/aws/lambda/{function.name}",
        "AWS_LAMBDA_LOG_STREAM_NAME": f"[{function.version}]{port}",
        "AWS_LAMBDA_RUNTIME_API": f"127.0.0.1:{port}",
        "LAMBDA_TASK_ROOT": root,
        "LAMBDA_RUNTIME_DIR": root,
    }


def is_from_session(peer: Address, local: Address, session: int) -> bool:
    """Whether a connection comes from a process of a session (the process ID of its leader).

    `peer` and `local` are the IPv4 addresses of the connection, as the accepting side sees them.
    """
    inode = _inode(peer, local)
    if not inode or not session:
        return False
    link = f"socket:[{inode}]"
    return any(_has_open(pid, link) for pid in _session_pids(session))


def _inode(peer: Address, local: Address) -> str:
    """Return the inode of the peer's socket; empty if it is closed or of another user."""
    ends = f"{_kernel_form(peer)} {_kernel_form(local)}"
    uid = str(os.geteuid())
    with TCP_SOCKETS.open(encoding="ascii") as lines:
        for line in lines:
            if ends in line:
                fields = line.split()
                is_match = (fields[1], fields[2]) == tuple(ends.split()) and fields[7] == uid
                return fields[9] if is_match and fields[9] != "0" else ""
    return ""


def _kernel_form(address: Address) -> str:
    """Return an address in the format of `/proc/net/tcp`: the host as a native-endian integer.

    >>> _kernel_form(("127.0.0.1", 8080)) in ("0100007F:1F90", "7F000001:1F90")
    True
    """
    host = int.from_bytes(inet_aton(address[0]), byteorder)
    return f"{host:08X}:{address[1]:04X}"


def _session_pids(session: int) -> Iterator[int]:
    """Yield the processes of a session. The leader comes first: it is nearly always the one."""
    yield session
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdecimal() and int(entry.name) != session:
                with suppress(OSError):  # the process has exited
                    if os.getsid(int(entry.name)) == session:
                        yield int(entry.name)


def _has_open(pid: int, link: str) -> bool:
    with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:  # if the process still exists
        for entry in entries:
            with suppress(OSError):  # the file has been closed
                if os.readlink(entry.path) == link:  # noqa: PTH115  # faster, and there are many
                    return True
    return False


@final
@dataclass(slots=True, eq=False)
class FunctionInstance:
    """A process that runs one function. `on_exit` is called once, when it has exited."""

    function: FunctionVersion
    host: InstanceHost
    log_file: IO[bytes]
    on_exit: Callable[[FunctionInstance], None]
    is_provisioned: bool
    has_exited: bool = False
    init_error: bytes | None = None
    pid: int = 0
    started_s: float = field(default_factory=time.monotonic)
    idle_since_s: float = field(default_factory=time.monotonic)
    _is_killed: bool = False
    _server: EmulatorServer = field(init=False)
    _ready: asyncio.Event = field(default_factory=asyncio.Event)  # the runtime has polled `next`
    _init_ms: float = 0.0
    _has_run: bool = False
    _next_poll: Reply | None = None  # the runtime's open `next` request
    _call: Invocation | None = None
    _delivered_s: float | None = None  # monotonic time of delivery of the current call
    _delivered_epoch_s: float = 0.0  # the same as Unix time
    _done: asyncio.Future[InvocationResult] | None = None
    _timer: asyncio.TimerHandle | None = None
    _log: bytearray = field(default_factory=bytearray)
    _log_fd: int | None = None
    _watch: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        settings = self.host.settings
        limits = replace(
            settings.http,
            header_bytes_max=_HEAD_BYTES_MAX,
            body_bytes_max=settings.sync_payload_bytes + 2**20,
            connections_max=_CONNECTIONS_MAX,
            sweep_s=_SWEEP_FACTOR * settings.http.sweep_s,
        )
        self._server = EmulatorServer(self._serve, self._check_head, limits)

    @property
    def is_ready(self) -> bool:
        """Whether the runtime has started and polled for its first invocation."""
        return self._ready.is_set()

    @property
    def is_usable(self) -> bool:
        """Whether the instance can run an invocation, as far as is known."""
        is_gone = self.has_exited or self._is_killed
        return not is_gone and (self._next_poll is None or self._next_poll.is_open)

    async def start(self) -> None:
        """Start the process. Returns before the runtime is ready."""
        ((_, port),) = await self._server.open("127.0.0.1", 0)
        function, settings, is_provisioned = self.function, self.host.settings, self.is_provisioned
        self._log_fd, write_fd = os.pipe()
        os.set_blocking(self._log_fd, False)
        asyncio.get_running_loop().add_reader(self._log_fd, self._read_log)
        self.started_s = time.monotonic()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", _START, str(os.getpid()), function.handler),
                cwd=function.code.directory,
                env=_environment(function, settings, port, is_provisioned=is_provisioned),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_fd,
                stderr=write_fd,
                start_new_session=True,
            )
        except BaseException:
            self._close_channels()
            raise
        finally:
            os.close(write_fd)
        self.pid = process.pid
        self.host.cleanup.notify("started", self.pid)
        self._watch = asyncio.create_task(self._await_exit(process))
        try:
            self.host.cpu_limiter.confine(self.pid, settings.vcpus(function.memory_mb))
        except OSError:
            self.kill()
            raise

    async def run(self, call: Invocation) -> InvocationResult:
        """Run an invocation to its end. Never raises; must not be called while another runs."""
        assert self._call is None, "an instance runs one call at a time"
        loop = asyncio.get_running_loop()
        self._call, self._delivered_s = call, None
        self._done = loop.create_future()
        if self._has_run:
            self._log.clear()
        if self.has_exited:
            self._finish(self._exit_error(None))
        elif self._next_poll is not None:
            self._deliver()
        else:
            limit_s = self.host.settings.init_timeout_s + call.function.timeout_s
            self._timer = loop.call_later(limit_s, self._time_out)
        return await self._done

    async def wait_ready(self, limit_s: float) -> bool:
        """Wait until the instance is ready. False if it has exited, or the limit is exceeded."""
        assert self._watch is not None, "not started"
        ready = asyncio.create_task(self._ready.wait())
        await asyncio.wait((ready, self._watch), timeout=limit_s, return_when="FIRST_COMPLETED")
        ready.cancel()
        return self.is_ready and not self.has_exited

    def kill(self) -> None:
        """Kill the process and all processes of its process group."""
        self._is_killed = True
        if self.pid and not self.has_exited:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Kill the process and wait until it has exited."""
        self.kill()
        if self._watch is not None:
            await self._watch

    # The Runtime API.

    def _check_head(self, request: EmulatorRequest, connection: HttpConnection) -> None:
        """Reject requests of web pages and of processes that do not belong to this instance."""
        if not connection.is_identified:
            peer = connection.address("peername")
            connection.is_identified = is_from_session(peer, request.local, self.pid)
        is_page = "origin" in request.headers or "sec-fetch-site" in request.headers
        is_meant = request.headers.get("host") == f"127.0.0.1:{request.local[1]}"
        if is_page or not is_meant or not connection.is_identified:
            _LOG.warning("%s: rejected a foreign request at the Runtime API", self.function.name)
            raise ServiceError(403, "AccessDeniedException", "only the instance may call this")

    def _serve(self, request: EmulatorRequest, reply: Reply) -> None:
        match (request.method, *request.parts[2:]):
            case ("GET", "invocation", "next"):
                self._on_next(reply)
            case ("POST", "invocation", id, "response") if self._is_current(id):
                limit_bytes = self.host.settings.sync_payload_bytes + _RESPONSE_SLACK_BYTES
                if request.is_too_long or len(request.body) > limit_bytes:
                    reply.send(Response(413, b'{"errorType":"RequestEntityTooLarge"}'))
                    text = "Response payload size exceeded maximum allowed payload size"
                    text = f"{text} ({limit_bytes} bytes)."
                    self._finish(_unreported_error("Function.ResponseSizeTooLarge", text))
                else:
                    reply.send(_ACCEPTED)
                    self._finish(("", request.body))
            case ("POST", "invocation", id, "error") if self._is_current(id):
                reply.send(_ACCEPTED)
                self._finish(_reported_error(request.body))
            case ("POST", "init", "error"):
                reply.send(_ACCEPTED)
                self.init_error = request.body  # the process exits by itself
            case ("POST", "invocation", _, _):
                reply.send(Response(400, b'{"errorType":"InvalidRequestID"}'))
            case _:
                reply.send(Response(404, b"{}"))

    def _on_next(self, reply: Reply) -> None:
        self._next_poll = reply
        if not self.is_ready:
            self._ready.set()
            self._init_ms = (time.monotonic() - self.started_s) * 1000
        if self._call is not None:
            self._deliver()

    def _is_current(self, id: str) -> bool:
        return self._call is not None and self._delivered_s is not None and self._call.id == id

    def _deliver(self) -> None:
        """Deliver the current invocation to the runtime, which is polling `next`."""
        assert self._next_poll is not None and self._call is not None
        if not self._next_poll.is_open:
            return  # the process has died: `_await_exit` will finish the call
        call, timeout_s = self._call, self._call.function.timeout_s
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._time_out)
        self._delivered_s, self._delivered_epoch_s = time.monotonic(), time.time()
        headers = {
            "Lambda-Runtime-Aws-Request-Id": call.id,
            "Lambda-Runtime-Deadline-Ms": str(int((self._delivered_epoch_s + timeout_s) * 1000)),
            "Lambda-Runtime-Invoked-Function-Arn": call.arn,
            "Lambda-Runtime-Trace-Id": call.trace,
        }
        if call.client_context:
            headers["Lambda-Runtime-Client-Context"] = call.client_context
        reply, self._next_poll = self._next_poll, None
        reply.send(Response(200, call.payload, headers))

    # The end of an invocation.

    def _finish(self, result: tuple[str, bytes] | None) -> None:
        """Complete the call with an error type and a payload, or (None) as not having run."""
        call, done, now_s = self._call, self._done, time.monotonic()
        if call is None or done is None or done.done():  # already finished, or cancelled
            return
        self._stop_timer()
        self._read_log()
        is_cold = not self._has_run and not self.is_provisioned
        if self._delivered_s is None:  # never delivered: all of the time was the start
            init_ms, duration_ms = (now_s - self.started_s) * 1000, 0.0
        else:
            init_ms, duration_ms = self._init_ms, (now_s - self._delivered_s) * 1000
        self._call = self._done = None
        self.idle_since_s = now_s
        if result is None:
            done.set_result(InvocationResult(has_run=False))
            return
        self._has_run = True
        done.set_result(
            InvocationResult(
                payload=result[1],
                error_type=result[0],
                started_s=self._delivered_epoch_s or time.time(),
                init_ms=init_ms if is_cold else 0.0,
                duration_ms=duration_ms,
                is_cold=is_cold,
                log=bytes(self._log),
            )
        )

    def _time_out(self) -> None:
        if self._call is None:
            return
        timeout_s = self._call.function.timeout_s
        text = f"RequestId: {self._call.id} Error: Task timed out after {timeout_s:.2f} seconds"
        self.kill()
        self._finish(_unreported_error("Sandbox.Timedout", text))

    def _exit_error(self, exit_code: int | None) -> tuple[str, bytes] | None:
        """Return error type and payload for an exit of the process; None if no call has run."""
        if self._call is None:
            return None
        if self.init_error is not None:
            return _reported_error(self.init_error)
        if self.is_ready and self._delivered_s is None:
            return None
        if not exit_code:
            reason = "Runtime exited without providing a reason"
        elif exit_code < 0:
            name = "killed" if -exit_code == signal.SIGKILL else signal.strsignal(-exit_code)
            reason = f"Runtime exited with error: signal: {(name or str(-exit_code)).lower()}"
        else:
            reason = f"Runtime exited with error: exit status {exit_code}"
        text = f"RequestId: {self._call.id} Error: {reason}"
        return _unreported_error("Runtime.ExitError", text)

    async def _await_exit(self, process: asyncio.subprocess.Process) -> None:
        exit_code = await process.wait()
        self.has_exited = True
        with suppress(ProcessLookupError):  # child processes that it has left
            os.killpg(self.pid, signal.SIGKILL)
        self.host.cleanup.notify("ended", self.pid)
        self._finish(self._exit_error(exit_code))
        self.host.cpu_limiter.release(self.pid)
        self._read_log()
        self._close_channels()
        self.on_exit(self)

    def _close_channels(self) -> None:
        if self._log_fd is not None:
            asyncio.get_running_loop().remove_reader(self._log_fd)
            os.close(self._log_fd)
            self._log_fd = None
        self._server.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _read_log(self) -> None:
        """Read what the process has printed so far, so that a response has all its log lines."""
        for _ in range(_LOG_READS_MAX):
            if self._log_fd is None:
                return
            try:
                chunk = os.read(self._log_fd, 65_536)
            except BlockingIOError:
                return
            if not chunk:
                asyncio.get_running_loop().remove_reader(self._log_fd)
                return
            self.log_file.write(chunk)
            self._log += chunk
            del self._log[:-_LOG_BYTES_MAX]
