"""Admission of RPCs: authentication, memory for messages, and how long a message may take.

All of this is decided before the message of an RPC is read. That is why every method is registered
as one with a stream of requests: gRPC reads the message of a unary method before it calls any code
of ours. Until the message is read, gRPC has received at most `LOOKAHEAD_BYTES` of it.

The size of a message is unknown until it has arrived. So memory for the largest message is reserved
while one is read, and what it did not need is released. The usual message has arrived already, and
holds that reservation for less than a millisecond. While RPCs wait for memory, slow senders are
aborted.

Public methods, which need no key, are not part of the memory budget. Their messages are small and
are read one at a time; messages that carry nothing are not read at all.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import TYPE_CHECKING, Final, NoReturn, final

import grpc
from grpc import StatusCode
from grpc.aio import BaseError, ServicerContext

from headgate.live.call import Call
from headgate.live.gateway.context import AccessEntry, GatewayContext
from headgate.live.gateway.errors import (
    RequestError,
    internal_error,
    memory_exhausted,
    too_many_unread,
)
from headgate.live.gateway.grpc.rpc import PendingCall, details_of, status_of, trailers_of
from headgate.live.gateway.oip.json import check_response_size
from headgate.live.gateway.tenants import Hold, Tenant
from headgate.live.telemetry.metrics import GRPC

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[bytes, bytes]  # generic only to the type checker

Context = ServicerContext[bytes, bytes]
Method = Callable[["Rpc"], Awaitable[bytes]]
StreamMethod = Callable[["Rpc"], AsyncIterator[bytes]]
Turn = asyncio.Future[RequestError | None]  # resolved when memory is reserved, or with an error

LOOKAHEAD_BYTES: Final = 64 << 10  # that gRPC reads of a message before we ask for it
WAIT_S: Final = 5.0  # for memory
WAITING_MAX: Final = 1024
RECHECK_S: Final = 0.01  # how often waiting RPCs look for memory that HTTP requests have released
SLOW_S: Final = 1.0  # a message that takes longer is aborted if other RPCs wait for memory
READING_PART: Final = 4  # a quarter of the budget is for messages that are being read
TRIM_BYTES: Final = 1 << 20  # after a message of this size, freed memory goes back to the system
PUBLIC_MAX: Final = 256  # concurrent RPCs of public methods
PUBLIC_BYTES_MAX: Final = 4096  # of one of their messages
PUBLIC_READ_S: Final = 1.0
PUBLIC_WAIT_S: Final = 0.1

_LOG: Final = logging.getLogger(__name__)


@final
@dataclass(slots=True, eq=False)
class Rpc:
    """One RPC: its client, and what is reserved for it."""

    access_entry: AccessEntry
    context: Context
    headers: dict[bytes, bytes]
    request_id: bytes
    in_bytes: int = 0
    call: Call | None = None  # that the RPC led to
    is_public: bool = False  # its method needs no key, and has no part in the memory budget
    tenant: Tenant = field(init=False)  # unless public
    client_id: int | None = None  # None: anonymous
    hold: Hold | None = None
    pending: PendingCall | None = None  # the call that it waits for
    reading_since_s: float | None = None  # while its message is being read


@final
class RpcAdmission(grpc.GenericRpcHandler):
    """Dispatches RPCs to methods. Every RPC gets one response, and is counted once."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._config = context.config
        self._loop = asyncio.get_running_loop()
        self._methods: dict[str, Handler] = {}
        self._unknown: Handler = grpc.stream_unary_rpc_method_handler(self._respond_unknown)
        self._message_bytes = message_bytes_max(context)
        self._rpcs: set[Rpc] = set()
        self._public = 0
        self._public_reader = asyncio.Lock()
        self._readers: dict[Rpc, None] = {}  # in the order in which they began
        self._reading: dict[int, int] = {}  # messages being read, by tenant
        self._reading_max = max(1, context.budget.total // READING_PART // self._message_bytes)
        self._waiting: dict[int, deque[tuple[Rpc, Turn]]] = {}  # for memory, by tenant
        self._timer: asyncio.TimerHandle | None = None
        self._aborts: set[asyncio.Task[None]] = set()
        self._is_trimming = False

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler:
        """The handler of an RPC: called by gRPC."""
        return self._methods.get(handler_call_details.method, self._unknown)

    def add_method(self, path: str, method: Method, *, is_public: bool = False) -> None:
        """Register a method with one response."""

        async def handle(messages: object, context: Context) -> bytes:
            return await self._respond(self._rpc(path, context), method, is_public)

        self._methods[path] = grpc.stream_unary_rpc_method_handler(handle)

    def add_stream(self, path: str, method: StreamMethod) -> None:
        """Register a public method with a stream of responses."""

        async def handle(messages: object, context: Context) -> AsyncIterator[bytes]:
            rpc = self._rpc(path, context)
            error: RequestError | None = None
            out_bytes = 0
            try:
                self._admit(rpc, is_public=True)
                async for response in method(rpc):
                    out_bytes += len(response)
                    yield response
            except RequestError as problem:
                error = _without_history(problem)
            except BaseError:  # aborted by us, with a status; or ended by gRPC
                raise
            except asyncio.CancelledError:
                self._count(rpc, StatusCode.CANCELLED, "client_gone")
                raise
            except Exception:
                error = _logged_error(rpc)
            finally:
                self._finish(rpc)
            if error is not None:
                await self._respond_error(rpc, error)
            self._count(rpc, StatusCode.OK, "", out_bytes)

        self._methods[path] = grpc.stream_stream_rpc_method_handler(handle)

    def abort_all(self, message: str) -> None:
        """Respond to every open RPC with UNAVAILABLE (`draining`)."""
        for queue in self._waiting.values():
            for _, turn in queue:
                if not turn.done():
                    turn.set_result(RequestError(503, message, reason="draining"))
        for rpc in list(self._rpcs):
            error = RequestError(503, message, reason="draining")
            if rpc.pending is not None:
                rpc.pending.abort(error)
            elif rpc.reading_since_s is not None:
                self._abort_reading(rpc, error)

    async def read(self, rpc: Rpc) -> bytes:
        """Read the message of an RPC with a key, and hold its size. Raises `RequestError`."""
        assert rpc.hold is not None
        await self._reserve(rpc)
        try:
            message = await self._read(rpc, self._config.http.body_timeout_s)
        finally:
            self._end_reading(rpc)
        if message is None:
            # If the message was too large, gRPC has sent the client an error already.
            problem = f"the RPC has no message, or one larger than {self._message_bytes} bytes"
            raise RequestError(400, problem, reason="no_message")
        rpc.hold.resize(LOOKAHEAD_BYTES + len(message))
        if len(message) > TRIM_BYTES and not self._is_trimming:
            self._is_trimming = True
            self._loop.run_in_executor(None, _trim).add_done_callback(self._on_trimmed)
        if self._waiting:
            self._admit_waiting()
        return message

    async def read_public(self, rpc: Rpc) -> bytes | None:
        """Read the next message of a public RPC. Raises `RequestError`.

        None: there is no more, or the message of another public RPC takes too long.
        """
        try:
            async with asyncio.timeout(PUBLIC_WAIT_S):
                await self._public_reader.acquire()
        except TimeoutError:
            return None
        try:
            message = await self._read(rpc, PUBLIC_READ_S)
        finally:
            self._public_reader.release()
        if message is not None and len(message) > PUBLIC_BYTES_MAX:
            problem = f"the message is larger than {PUBLIC_BYTES_MAX} bytes"
            raise RequestError(413, problem, reason="too_large")
        return message

    async def _read(self, rpc: Rpc, limit_s: float) -> bytes | None:
        rpc.reading_since_s = self._loop.time()
        self._readers[rpc] = None
        timer = self._loop.call_later(limit_s, self._on_read_timeout, rpc)
        try:
            message: object = await rpc.context.read()  # `EOF` where there is none
        finally:
            timer.cancel()
            rpc.reading_since_s = None
            del self._readers[rpc]
        if not isinstance(message, bytes):
            return None
        rpc.in_bytes += len(message)
        return message

    def _on_read_timeout(self, rpc: Rpc) -> None:
        error = RequestError(408, "the message took too long to arrive", reason="slow")
        self._abort_reading(rpc, error)

    def _abort_reading(self, rpc: Rpc, error: RequestError) -> None:
        """Respond with `error` to an RPC whose message is being read.

        The read is not cancelled: a message that arrives at that moment would never be freed. The
        read ends by itself when the RPC has ended.
        """
        if rpc.reading_since_s is None:
            return
        rpc.reading_since_s = None
        task = self._loop.create_task(self._abort(rpc, error))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, rpc: Rpc, error: RequestError) -> None:
        with suppress(BaseError):  # which `abort` always raises
            await self._respond_error(rpc, error)

    def _on_trimmed(self, done: object) -> None:
        self._is_trimming = False

    async def _reserve(self, rpc: Rpc) -> None:
        """Reserve memory for the largest message, waiting if need be. Raises `RequestError`."""
        assert rpc.hold is not None
        if not self._waiting and self._try_reserve(rpc):
            return
        if sum(map(len, self._waiting.values())) >= WAITING_MAX:
            raise memory_exhausted()
        turn: Turn = self._loop.create_future()
        entry = (rpc, turn)
        queue = self._waiting.setdefault(rpc.tenant.client_id, deque())
        queue.append(entry)
        self._admit_waiting()
        try:
            async with asyncio.timeout(WAIT_S):
                failure = await turn
            if failure is not None:
                raise failure
        except BaseException as error:
            if turn.done() and not turn.cancelled() and turn.result() is None:
                self._end_reading(rpc)  # memory was reserved when it was too late
            if isinstance(error, TimeoutError):
                raise memory_exhausted() from None
            raise
        finally:
            if entry in queue:
                queue.remove(entry)
                if not queue:
                    self._waiting.pop(rpc.tenant.client_id, None)

    def _try_reserve(self, rpc: Rpc) -> bool:
        """Reserve memory for a message if there is room. A tenant may always read one message."""
        client_id = rpc.tenant.client_id
        own = self._reading.get(client_id, 0)
        is_crowded = sum(self._reading.values()) >= self._reading_max
        assert rpc.hold is not None
        if (own and is_crowded) or not rpc.hold.grow(self._message_bytes):
            return False
        self._reading[client_id] = own + 1
        return True

    def _end_reading(self, rpc: Rpc) -> None:
        client_id = rpc.tenant.client_id
        self._reading[client_id] -= 1
        if not self._reading[client_id]:
            del self._reading[client_id]

    def _admit_waiting(self) -> None:
        """Admit waiting RPCs that fit, tenant after tenant, and check again in a moment."""
        has_progress = True
        while has_progress:
            has_progress = False
            for client_id, queue in list(self._waiting.items()):
                rpc, turn = queue[0]
                if not turn.done() and not self._try_reserve(rpc):
                    continue
                queue.popleft()
                if not queue:
                    del self._waiting[client_id]
                if not turn.done():
                    turn.set_result(None)
                has_progress = True
        self._abort_slow_senders()
        if self._waiting and self._timer is None:
            self._timer = self._loop.call_later(RECHECK_S, self._recheck)

    def _recheck(self) -> None:
        self._timer = None
        self._admit_waiting()

    def _abort_slow_senders(self) -> None:
        """Abort one slow sender for each waiting tenant: its own, if it has any."""
        slow_since_s = self._loop.time() - SLOW_S
        for client_id in self._waiting:
            holding = [rpc for rpc in self._readers if rpc.hold is not None]
            own = [rpc for rpc in holding if rpc.tenant.client_id == client_id]
            for rpc in (own or holding)[:1]:
                if rpc.reading_since_s is not None and rpc.reading_since_s < slow_since_s:
                    problem = "the message took too long to arrive while others wait for memory"
                    self._abort_reading(rpc, RequestError(503, problem, reason="slow"))

    def _rpc(self, path: str, context: Context) -> Rpc:
        metadata = context.invocation_metadata() or ()
        headers = {
            name.encode(): value if isinstance(value, bytes) else value.encode()
            for name, value in metadata
        }
        request_id = self._context.request_id(headers.get(b"x-request-id"))
        return Rpc(AccessEntry("gRPC", path, monotonic_ns()), context, headers, request_id)

    def _admit(self, rpc: Rpc, *, is_public: bool) -> None:
        """Authenticate and count an RPC. Raises `RequestError`, and then nothing is held."""
        context = self._context
        if is_public:
            if self._public >= PUBLIC_MAX:
                raise _too_many_rpcs()
            rpc.is_public = True
            self._public += 1
        else:
            rpc.tenant = context.keys.tenant(rpc.headers)
            rpc.client_id = rpc.tenant.client_id
            if len(self._rpcs) - self._public >= self._config.connections_max:
                raise _too_many_rpcs()
            hold = Hold(context.budget, rpc.tenant.client_id)
            if not hold.grow(LOOKAHEAD_BYTES):
                raise memory_exhausted()
            rpc.hold = hold
        self._rpcs.add(rpc)

    def _finish(self, rpc: Rpc) -> None:
        if rpc in self._rpcs:
            self._rpcs.discard(rpc)
            self._public -= rpc.is_public

    async def _respond(self, rpc: Rpc, method: Method, is_public: bool) -> bytes:
        error: RequestError | None = None
        try:
            self._admit(rpc, is_public=is_public)
            response = await method(rpc)
            self._hold_response(rpc, len(response))
        except RequestError as problem:
            error = _without_history(problem)
        except BaseError:  # aborted by us, with a status; or ended by gRPC
            self._release(rpc)
            raise
        except asyncio.CancelledError:
            self._release(rpc)
            self._count(rpc, StatusCode.CANCELLED, "client_gone")
            raise
        except Exception:
            error = _logged_error(rpc)
        finally:
            self._finish(rpc)
        if error is not None:
            self._release(rpc)
            await self._respond_error(rpc, error)
        self._count(rpc, StatusCode.OK, "", len(response))
        return response

    def _hold_response(self, rpc: Rpc, size: int) -> None:
        """Hold a response, and nothing else, until it has been sent. Raises `RequestError`."""
        check_response_size(size, self._config.response_bytes_max, is_text=False)
        if size <= self._config.http.write_high_water:
            self._release(rpc)  # it fits gRPC's own buffers
            return
        if rpc.hold is None or not rpc.hold.resize(size):
            raise too_many_unread()
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _: self._release(rpc))

    def _release(self, rpc: Rpc) -> None:
        if rpc.hold is not None and rpc.hold.size:
            rpc.hold.release()
            if self._waiting:
                self._admit_waiting()

    async def _respond_error(self, rpc: Rpc, error: RequestError) -> NoReturn:
        if error.has_retry_time:
            error.retry_ns = self._context.retry_ns(error.retry_ns)
        status = status_of(error)
        self._count(rpc, status, error.reason)
        trailers = (*trailers_of(error), ("x-request-id", rpc.request_id.decode("latin-1")))
        await rpc.context.abort(status, details_of(error), trailers)

    def _count(self, rpc: Rpc, status: StatusCode, reason: str, out_bytes: int = 0) -> None:
        """Count a response, and write it to the access log."""
        call, rpc.call = rpc.call, None  # frees its inputs
        self._context.responses.count(GRPC, status.name, reason)
        if self._context.access_log is not None:
            self._context.access_log.write(
                rpc.access_entry,
                status.name,
                reason,
                request_id=rpc.request_id,
                client_id=rpc.client_id,
                call=call,
                in_bytes=rpc.in_bytes,
                out_bytes=out_bytes,
            )

    async def _respond_unknown(self, messages: object, context: Context) -> bytes:
        rpc = self._rpc("-", context)  # the path may be anything, and is not logged
        self._count(rpc, StatusCode.UNIMPLEMENTED, "unknown_method")
        await context.abort(StatusCode.UNIMPLEMENTED, "the method does not exist")


def _trim() -> None:
    """Return freed memory to the system.

    gRPC reads a message into many small blocks, and the C library keeps freed ones: the process
    would hold twice what it has reserved in the budget. Trimming takes some ten milliseconds, which
    delay nobody: the blocks are in an arena of the heap that gRPC's own thread uses.
    """
    with suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def message_bytes_max(context: GatewayContext) -> int:
    """The size of the largest message, which each tenant's share of the budget can hold."""
    return max(1, min(context.config.body_bytes_max, context.budget.share - LOOKAHEAD_BYTES))


def _without_history(error: RequestError) -> RequestError:
    """An error without traceback and causes, whose frames hold the message and its tensors.

    gRPC keeps the exception that ends an RPC in a cycle that waits for the garbage collector, and
    all that the exception refers to.
    """
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


def _logged_error(rpc: Rpc) -> RequestError:
    """Log the exception that is being handled. Returns the error for the client."""
    extra = {"request_id": rpc.request_id.decode("latin-1")}
    _LOG.exception("internal error while handling an RPC", extra=extra)
    return internal_error()


def _too_many_rpcs() -> RequestError:
    return RequestError(503, "too many RPCs are open", reason="too_many_rpcs")
