"""One instance of a function: a process with Lambda's own runtime, and the API it asks for work.

Every instance has its own port for the Runtime API, because the runtime says nowhere in its
requests which instance it is; only processes of the instance's own session are answered there. An
instance is given one call at a time: it answers `next` with it, and waits for the response, for an
error, for the end of the process, or for time to be up.

An instance may be given a call when it has answered the last one but not yet asked for the next:
a client that calls again at once would otherwise find it busy, and start another. Should it die
before it asks, the call has not run (`InvocationResult.has_run`).
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
from dataclasses import dataclass, field
from pathlib import Path
from socket import inet_aton
from sys import byteorder
from typing import IO, Final, TypeAlias, final

import msgspec

import headgate
from headgate.lambda_emulator.cleanup_process import CleanupProcess
from headgate.lambda_emulator.cpu_limits import THREAD_VARIABLES, CpuLimiter, threads
from headgate.lambda_emulator.functions import FunctionVersion
from headgate.lambda_emulator.http import (
    EmulatorHttpServer,
    EmulatorRequest,
    HttpLimits,
    Reply,
    Response,
)
from headgate.lambda_emulator.settings import PlatformSettings

# One call of a function, and how it ended.


@dataclass(frozen=True, slots=True)
class Invocation:
    """What is to run, with what. The id is the same for every try of an event."""

    function: FunctionVersion
    arn: str
    payload: bytes
    client_context: str = ""  # JSON
    id: str = field(default_factory=lambda: str(uuid.uuid4()))

    @property
    def trace(self) -> str:
        """A trace id of the kind that AWS gives: the platform traces nothing itself."""
        digits = self.id.replace("-", "")
        return f"Root=1-{int(time.time()):08x}-{digits[:24]};Parent={digits[16:]};Sampled=0"


@dataclass(frozen=True, slots=True)
class InvocationResult:
    """How a call ended, as far as the instance that was to run it knows.

    With `has_run` false, the instance has died before it could be given the call, which is free
    to run elsewhere. `error_type` is empty if all went well.
    """

    payload: bytes = b""
    error_type: str = ""
    has_run: bool = True
    started_s: float = 0.0  # seconds since 1970
    init_ms: float = 0.0
    duration_ms: float = 0.0
    is_cold: bool = False
    log: bytes = b""


def failure(kind: str, message: str) -> bytes:
    """What a client reads of a failure that the function did not report itself."""
    return msgspec.json.encode({"errorType": kind, "errorMessage": message})


def error_type_of(payload: bytes) -> str:
    """The type of error that a runtime has reported."""
    try:
        return msgspec.json.decode(payload, type=_Reported).errorType or "Unknown"
    except msgspec.DecodeError:
        return "Unknown"


class _Reported(msgspec.Struct):
    errorType: str = ""


# How an instance is started: the command, and the environment that AWS promises.


# Set by the platform for every function: AWS refuses functions that want to set them.
RESERVED: Final = frozenset(
    (
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
    )
)

# The runtime of AWS, in a process that does not outlive the platform: the kernel kills it when the
# platform's thread is gone, and if that was already so when it asked for this, it ends itself.
_START: Final = """
import ctypes, os, runpy, signal, sys
platform = int(sys.argv.pop(1))
sys.path[0] = os.getcwd()
ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
if os.getppid() == platform:
    runpy.run_module("awslambdaric", run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True, slots=True)
class Launch:
    """The start of one instance, whose Runtime API is on the given port."""

    function: FunctionVersion
    settings: PlatformSettings
    port: int
    is_provisioned: bool

    @property
    def command(self) -> tuple[str, ...]:
        """The runtime of AWS, as a plain process."""
        return (sys.executable, "-c", _START, str(os.getpid()), self.function.handler)

    @property
    def environment(self) -> dict[str, str]:
        """Nothing of ours but what `PlatformSettings.inherits` names: AWS gives a clean one as
        well.
        """
        function, region = self.function, self.settings.region
        root = str(function.code.directory)
        inherited = {
            name: os.environ[name] for name in self.settings.inherits if name in os.environ
        }
        count = str(threads(self.settings.vcpus(function.memory_mb)))
        start = "provisioned-concurrency" if self.is_provisioned else "on-demand"
        return {
            **inherited,
            **dict.fromkeys(THREAD_VARIABLES, count),
            "LANG": "C.UTF-8",
            "TZ": ":UTC",
            "PYTHONPATH": os.pathsep.join((root, _beside_headgate())),
            "AWS_DEFAULT_REGION": region,
            **function.environment,
            "_HANDLER": function.handler,
            "AWS_REGION": region,
            "AWS_EXECUTION_ENV": f"AWS_Lambda_{function.runtime}",
            "AWS_LAMBDA_FUNCTION_NAME": function.name,
            "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": str(function.memory_mb),
            "AWS_LAMBDA_FUNCTION_VERSION": function.version,
            "AWS_LAMBDA_INITIALIZATION_TYPE": start,
            "AWS_LAMBDA_LOG_GROUP_NAME": f"/aws/lambda/{function.name}",
            "AWS_LAMBDA_LOG_STREAM_NAME": f"[{function.version}]{self.port}",
            "AWS_LAMBDA_RUNTIME_API": f"127.0.0.1:{self.port}",
            "LAMBDA_TASK_ROOT": root,
            "LAMBDA_RUNTIME_DIR": root,
        }


def _beside_headgate() -> str:
    """Where Headgate is imported from, so that a function need not bring it along."""
    return str(Path(headgate.__file__).resolve().parents[1])


# Which process is at the other end of a connection within this machine.
#
# The Runtime API has no place for a secret: the runtime makes its URLs of a host and a port. What
# can be known is whose socket it is. The kernel lists every TCP socket with the number of its inode
# in `/proc/net/tcp`, and the open files of every process, sockets with their inodes among them, in
# `/proc/PID/fd`.


Address: TypeAlias = tuple[str, int]

SOCKETS: Final = Path("/proc/net/tcp")


def is_from_session(peer: Address, local: Address, session: int) -> bool:
    """Whether a connection comes from a process of a session, which is named after its leader.

    `peer` and `local` are both ends of it, as the side that has accepted it sees them: IPv4.
    """
    inode = _inode(peer, local)
    if not inode or not session:
        return False
    link = f"socket:[{inode}]"
    return any(_has_open(pid, link) for pid in _members(session))


def _inode(peer: Address, local: Address) -> str:
    """The inode of the other side's socket; empty if it is another user's, or gone."""
    ends = f"{_written(peer)} {_written(local)}"
    uid = str(os.geteuid())
    with SOCKETS.open(encoding="ascii") as lines:
        for line in lines:
            if ends in line:
                fields = line.split()
                is_it = (fields[1], fields[2]) == tuple(ends.split()) and fields[7] == uid
                return fields[9] if is_it and fields[9] != "0" else ""
    return ""


def _written(address: Address) -> str:
    """An address as the kernel writes it: the bytes of the host as a number of this machine.

    >>> _written(("127.0.0.1", 8080)) in ("0100007F:1F90", "7F000001:1F90")
    True
    """
    host = int.from_bytes(inet_aton(address[0]), byteorder)
    return f"{host:08X}:{address[1]:04X}"


def _members(session: int) -> Iterator[int]:
    """The leader of a session first: nobody else is asked about as a rule."""
    yield session
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdecimal() and int(entry.name) != session:
                with suppress(OSError):  # it has ended
                    if os.getsid(int(entry.name)) == session:
                        yield int(entry.name)


def _has_open(pid: int, link: str) -> bool:
    with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:  # unless it has ended
        for entry in entries:
            with suppress(OSError):  # it has been closed
                if os.readlink(entry.path) == link:  # noqa: PTH115  # many of them
                    return True
    return False


_LOG: Final = logging.getLogger(__name__)
_HEAD_BYTES_MAX: Final = 2**21  # a runtime may say in a header what went wrong, at some length
_CONNECTIONS_MAX: Final = 32  # the runtime has one, and one more to report that it cannot start
_FORBIDDEN: Final = Response(403, b'{"errorType":"Forbidden"}')
_ACCEPTED: Final = Response(202, b'{"status":"OK"}')
_LOG_BYTES_MAX: Final = 4_096  # of the tail that a client may ask for
_LOG_READS_MAX: Final = 16  # at a time: one that never stops printing must not stop us
_RESPONSE_SLACK_BYTES: Final = 100  # AWS takes a little more than it says


@final
class FunctionInstance:
    """A process that runs one function. `on_end` is called once, when it has ended."""

    def __init__(
        self,
        function: FunctionVersion,
        settings: PlatformSettings,
        shares: CpuLimiter,
        log: IO[bytes],
        on_end: Callable[[FunctionInstance], None],
        janitor: CleanupProcess,
        *,
        is_provisioned: bool,
    ) -> None:
        self.function = function
        self.is_provisioned = is_provisioned
        self.has_ended = False
        self._is_killed = False
        self.init_error: bytes | None = None
        self.pid = 0
        self.started_s = time.monotonic()
        self.idle_since_s = self.started_s
        self._settings = settings
        self._shares = shares
        self._log_file = log
        self._on_end = on_end
        self._janitor = janitor
        self._ready = asyncio.Event()  # it has asked for work
        self._init_ms = 0.0
        self._has_run = False
        limits = HttpLimits(_HEAD_BYTES_MAX, settings.sync_payload_bytes + 2**20, _CONNECTIONS_MAX)
        self._server = EmulatorHttpServer(self._serve, self._screen, limits)
        self._asking: Reply | None = None  # the open request for the next call
        self._call: Invocation | None = None
        self._given_s: float | None = None  # when the call was given out
        self._began_s = 0.0  # the same, in seconds since 1970
        self._done: asyncio.Future[InvocationResult] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._log = bytearray()
        self._log_fd: int | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it has started and asked for work."""
        return self._ready.is_set()

    @property
    def is_usable(self) -> bool:
        """Whether it can be given a call, as far as is known."""
        is_gone = self.has_ended or self._is_killed
        return not is_gone and (self._asking is None or self._asking.is_open)

    async def start(self) -> None:
        """Start the process; it gets ready by itself."""
        ((_, port),) = await self._server.open("127.0.0.1", 0)
        launch = Launch(self.function, self._settings, port, self.is_provisioned)
        self._log_fd, write_fd = os.pipe()
        os.set_blocking(self._log_fd, False)
        asyncio.get_running_loop().add_reader(self._log_fd, self._read_log)
        self.started_s = time.monotonic()
        try:
            process = await asyncio.create_subprocess_exec(
                *launch.command,
                cwd=self.function.code.directory,
                env=launch.environment,
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
        self._janitor.tell("started", self.pid)
        self._watch = asyncio.create_task(self._await_end(process))
        try:
            self._shares.confine(self.pid, self._settings.vcpus(self.function.memory_mb))
        except OSError:
            self.kill()
            raise

    async def run(self, call: Invocation) -> InvocationResult:
        """Run a call to its end. Never raises; must not be called while another runs."""
        assert self._call is None, "an instance runs one call at a time"
        loop = asyncio.get_running_loop()
        self._call, self._given_s = call, None
        self._done = loop.create_future()
        if self._has_run:
            self._log.clear()
        if self.has_ended:
            self._finish(self._exit_words(None))
        elif self._asking is not None:
            self._give()
        else:
            limit_s = self._settings.init_timeout_s + call.function.timeout_s
            self._timer = loop.call_later(limit_s, self._time_out)
        return await self._done

    async def get_ready(self, limit_s: float) -> bool:
        """Wait until it asks for work. False if it has ended, or takes longer than the limit."""
        assert self._watch is not None, "not started"
        ready = asyncio.create_task(self._ready.wait())
        await asyncio.wait((ready, self._watch), timeout=limit_s, return_when="FIRST_COMPLETED")
        ready.cancel()
        return self.is_ready and not self.has_ended

    def kill(self) -> None:
        """End it now, with all processes it has started."""
        self._is_killed = True
        if self.pid and not self.has_ended:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def close(self) -> None:
        """End it and wait until it has ended."""
        self.kill()
        if self._watch is not None:
            await self._watch

    # The Runtime API.

    def _screen(self, request: EmulatorRequest) -> Response | None:
        """Refuse whoever is not a process of this instance, and whatever is a web page."""
        is_page = "origin" in request.headers or "sec-fetch-site" in request.headers
        is_meant = request.headers.get("host") == f"127.0.0.1:{request.local[1]}"
        is_ours = not request.is_first or is_from_session(request.peer, request.local, self.pid)
        if is_meant and is_ours and not is_page:
            return None
        _LOG.warning("%s: refused a stranger at its Runtime API", self.function.name)
        return _FORBIDDEN

    def _serve(self, request: EmulatorRequest, reply: Reply) -> None:
        match (request.method, *request.parts[2:]):
            case ("GET", "invocation", "next"):
                self._ask(reply)
            case ("POST", "invocation", id, "response") if self._is_current(id):
                limit_bytes = self._settings.sync_payload_bytes + _RESPONSE_SLACK_BYTES
                if request.is_too_long or len(request.body) > limit_bytes:
                    reply.send(Response(413, b'{"errorType":"RequestEntityTooLarge"}'))
                    kind = "Function.ResponseSizeTooLarge"
                    text = "Response payload size exceeded maximum allowed payload size"
                    self._finish((kind, failure(kind, f"{text} ({limit_bytes} bytes).")))
                else:
                    reply.send(_ACCEPTED)
                    self._finish(("", request.body))
            case ("POST", "invocation", id, "error") if self._is_current(id):
                reply.send(_ACCEPTED)
                self._finish((error_type_of(request.body), request.body))
            case ("POST", "init", "error"):
                reply.send(_ACCEPTED)
                self.init_error = request.body  # the process ends by itself
            case ("POST", "invocation", _, _):
                reply.send(Response(400, b'{"errorType":"InvalidRequestID"}'))
            case _:
                reply.send(Response(404, b"{}"))

    def _ask(self, reply: Reply) -> None:
        self._asking = reply
        if not self.is_ready:
            self._ready.set()
            self._init_ms = (time.monotonic() - self.started_s) * 1000
        if self._call is not None:
            self._give()

    def _is_current(self, id: str) -> bool:
        return self._call is not None and self._given_s is not None and self._call.id == id

    def _give(self) -> None:
        """Give the call to the runtime, which is asking for one."""
        assert self._asking is not None and self._call is not None
        if not self._asking.is_open:
            return  # the process has died and we are about to hear of it
        call, timeout_s = self._call, self._call.function.timeout_s
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._time_out)
        self._given_s, self._began_s = time.monotonic(), time.time()
        headers = {
            "Lambda-Runtime-Aws-Request-Id": call.id,
            "Lambda-Runtime-Deadline-Ms": str(int((self._began_s + timeout_s) * 1000)),
            "Lambda-Runtime-Invoked-Function-Arn": call.arn,
            "Lambda-Runtime-Trace-Id": call.trace,
        }
        if call.client_context:
            headers["Lambda-Runtime-Client-Context"] = call.client_context
        reply, self._asking = self._asking, None
        reply.send(Response(200, call.payload, headers))

    # How a call ends.

    def _finish(self, ended: tuple[str, bytes] | None) -> None:
        """Settle the call: with a type of error and a payload, or as not having run."""
        call, done, now_s = self._call, self._done, time.monotonic()
        if call is None or done is None or done.done():  # nobody waits any more
            return
        self._stop_timer()
        self._read_log()
        is_cold = not self._has_run and not self.is_provisioned
        if self._given_s is None:  # it never got so far: all of it was start
            init_ms, duration_ms = (now_s - self.started_s) * 1000, 0.0
        else:
            init_ms, duration_ms = self._init_ms, (now_s - self._given_s) * 1000
        self._call = self._done = None
        self.idle_since_s = now_s
        if ended is None:
            done.set_result(InvocationResult(has_run=False))
            return
        self._has_run = True
        done.set_result(
            InvocationResult(
                payload=ended[1],
                error_type=ended[0],
                started_s=self._began_s or time.time(),
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
        self._finish(("Sandbox.Timedout", failure("Sandbox.Timedout", text)))

    def _exit_words(self, returned: int | None) -> tuple[str, bytes] | None:
        """What a client is told of the end of the process; None if its call has not run."""
        if self._call is None:
            return None
        if self.init_error is not None:
            return error_type_of(self.init_error), self.init_error
        if self.is_ready and self._given_s is None:
            return None
        if not returned:
            why = "Runtime exited without providing a reason"
        elif returned < 0:
            name = "killed" if -returned == signal.SIGKILL else signal.strsignal(-returned)
            why = f"Runtime exited with error: signal: {(name or str(-returned)).lower()}"
        else:
            why = f"Runtime exited with error: exit status {returned}"
        text = f"RequestId: {self._call.id} Error: {why}"
        return "Runtime.ExitError", failure("Runtime.ExitError", text)

    async def _await_end(self, process: asyncio.subprocess.Process) -> None:
        returned = await process.wait()
        self.has_ended = True
        with suppress(ProcessLookupError):  # whom it has left behind in its session
            os.killpg(self.pid, signal.SIGKILL)
        self._janitor.tell("ended", self.pid)
        self._finish(self._exit_words(returned))
        self._shares.release(self.pid)
        self._read_log()
        self._close_channels()
        self._on_end(self)

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
        """Take what the process has printed so far, so that an answer comes with all its lines."""
        for _ in range(_LOG_READS_MAX):
            if self._log_fd is None:
                return
            try:
                said = os.read(self._log_fd, 65_536)
            except BlockingIOError:
                return
            if not said:
                asyncio.get_running_loop().remove_reader(self._log_fd)
                return
            self._log_file.write(said)
            self._log += said
            del self._log[:-_LOG_BYTES_MAX]
