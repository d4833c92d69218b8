"""What stands before every RPC: who asks, whether there is room, and how long a message may take.

All of that is decided before the message of an RPC is read, which is why every method is served as
one with a stream of requests: gRPC reads the message of any other before it calls anybody. Until
then gRPC has read no more of an RPC than `LOOKAHEAD_BYTES`.

How large a message is, nobody knows before it has come. So room for the largest is taken while a
message is read, and what it did not need is given back. The usual message is there already, and has
that room for less than a millisecond. While others wait for room, a sender that is slow is let go.

Methods that need no key have no budget. Their messages are small and are read one at a time; those
that say nothing are not read at all.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from time import monotonic_ns
from typing import TYPE_CHECKING, Final, NoReturn, final

import grpc
from grpc import StatusCode
from grpc.aio import BaseError, ServicerContext

from headgate.live.call import Call
from headgate.live.gateway.access_log import AccessEntry
from headgate.live.gateway.auth import Tenant
from headgate.live.gateway.errors import RequestError
from headgate.live.gateway.grpc.rpc import detail_of, status_of, trailers_of
from headgate.live.gateway.http.request import no_memory
from headgate.live.gateway.memory_budget import Hold
from headgate.live.gateway.oip.json import check_answer
from headgate.live.telemetry.metrics import GRPC

if TYPE_CHECKING:
    from headgate.live.gateway.grpc.rpc import Pending
    from headgate.live.gateway.http.server import HttpServer

    Handler = grpc.RpcMethodHandler[bytes, bytes]  # which only the type checker's can be

Context = ServicerContext[bytes, bytes]
Method = Callable[["Rpc"], Awaitable[bytes]]
StreamMethod = Callable[["Rpc"], AsyncIterator[bytes]]
Turn = asyncio.Future[RequestError | None]  # whose result says why there is no room after all

LOOKAHEAD_BYTES: Final = 64 << 10  # of a message, before anybody asks for it
WAIT_S: Final = 5.0  # for room
WAITING_MAX: Final = 1024
LOOK_S: Final = 0.01  # how often those who wait look for room that others have given back
SLOW_S: Final = 1.0  # a message takes longer: its sender is let go if others wait for its room
READING_PART: Final = 4  # of the budget: one part is for messages on their way
TRIM_BYTES: Final = 1 << 20  # a message of this size leaves a hole that is worth closing
PUBLIC_MAX: Final = 256  # RPCs without a key
PUBLIC_BYTES_MAX: Final = 4096  # of their messages
PUBLIC_READ_S: Final = 1.0
PUBLIC_WAIT_S: Final = 0.1

_LOG: Final = logging.getLogger(__name__)


@final
class Rpc:
    """One RPC: who sent it, and what is held for it."""

    __slots__ = (
        "asked",
        "call",
        "client_id",
        "context",
        "headers",
        "hold",
        "in_bytes",
        "is_public",
        "pending",
        "reading_since_s",
        "request_id",
        "tenant",
    )

    def __init__(
        self, path: str, context: Context, headers: dict[bytes, bytes], request_id: bytes
    ) -> None:
        self.asked = AccessEntry("gRPC", path, monotonic_ns())
        self.in_bytes = 0
        self.call: Call | None = None  # what it has led to
        self.context = context
        self.headers = headers
        self.request_id = request_id
        self.is_public = False  # it needs no key, and is given nothing of the budget
        self.tenant: Tenant  # of one that has a key
        self.client_id: int | None = None  # None: nobody in particular
        self.hold: Hold | None = None
        self.pending: Pending | None = None  # what it waits for
        self.reading_since_s: float | None = None  # it waits for its message


@final
class RpcAdmission(grpc.GenericRpcHandler):
    """Finds the method of an RPC, and sees to it that it is answered once and counted."""

    def __init__(self, http: HttpServer) -> None:
        """`http` has the tenants, the budget and the counters: they are the same for both."""
        self._http = http
        self._config = http.config
        self._loop = asyncio.get_running_loop()
        self._methods: dict[str, Handler] = {}
        self._unknown: Handler = grpc.stream_unary_rpc_method_handler(self._refuse_unknown)
        self._message_bytes = message_bytes_max(http)
        self._rpcs: set[Rpc] = set()
        self._public = 0
        self._public_reader = asyncio.Lock()
        self._readers: dict[Rpc, None] = {}  # the one that began first comes first
        self._reading: dict[int, int] = {}  # messages on their way, by tenant
        self._reading_max = max(1, http.budget.total // READING_PART // self._message_bytes)
        self._waiting: dict[int, deque[tuple[Rpc, Turn]]] = {}  # for room, by tenant
        self._timer: asyncio.TimerHandle | None = None
        self._aborts: set[asyncio.Task[None]] = set()
        self._is_trimming = False

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler:
        """Who handles it: for gRPC to ask."""
        return self._methods.get(handler_call_details.method, self._unknown)

    def add(self, path: str, method: Method, *, is_public: bool = False) -> None:
        """Serve a method that has one answer."""

        async def handle(messages: object, context: Context) -> bytes:
            return await self._answer(self._rpc(path, context), method, is_public)

        self._methods[path] = grpc.stream_unary_rpc_method_handler(handle)

    def add_stream(self, path: str, method: StreamMethod) -> None:
        """Serve a method that needs no key and has many answers."""

        async def handle(messages: object, context: Context) -> AsyncIterator[bytes]:
            rpc = self._rpc(path, context)
            refused: RequestError | None = None
            out_bytes = 0
            try:
                self._enter(rpc, is_public=True)
                async for answer in method(rpc):
                    out_bytes += len(answer)
                    yield answer
            except RequestError as error:
                refused = _bare(error)
            except BaseError:  # it was cut, and told so; or gRPC has ended it
                raise
            except asyncio.CancelledError:
                self._count(rpc, StatusCode.CANCELLED, "client_gone")
                raise
            except Exception:
                refused = _mistake(rpc)
            finally:
                self._leave(rpc)
            if refused is not None:
                await self._refuse(rpc, refused)
            self._count(rpc, StatusCode.OK, "", out_bytes)

        self._methods[path] = grpc.stream_stream_rpc_method_handler(handle)

    def abandon_all(self, message: str) -> None:
        """Answer every RPC that is open with UNAVAILABLE (`draining`)."""
        for queue in self._waiting.values():
            for _, turn in queue:
                if not turn.done():
                    turn.set_result(RequestError(503, message, reason="draining"))
        for rpc in list(self._rpcs):
            refused = RequestError(503, message, reason="draining")
            if rpc.pending is not None:
                rpc.pending.give_up(refused)
            elif rpc.reading_since_s is not None:
                self._cut(rpc, refused)

    # --- messages ------------------------------------------------------------------------------

    async def read(self, rpc: Rpc) -> bytes:
        """The message of an RPC that has a key. Its size is held. Raises `RequestError`."""
        assert rpc.hold is not None
        await self._make_room(rpc)
        try:
            message = await self._read(rpc, self._config.body_timeout_s)
        finally:
            self._has_read(rpc)
        if message is None:
            # gRPC has told the client already if the message was too large.
            problem = f"no message has come, or one of more than {self._message_bytes} bytes"
            raise RequestError(400, problem, reason="no_message")
        rpc.hold.resize(LOOKAHEAD_BYTES + len(message))
        if len(message) > TRIM_BYTES and not self._is_trimming:
            self._is_trimming = True
            self._loop.run_in_executor(None, _trim).add_done_callback(self._trimmed)
        if self._waiting:
            self._serve_waiting()
        return message

    async def read_public(self, rpc: Rpc) -> bytes | None:
        """The next message of an RPC without a key. Raises `RequestError`.

        None: there is no more, or others take too long with theirs. Nobody waits for them.
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
        timer = self._loop.call_later(limit_s, self._cut_slow, rpc)
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

    def _cut_slow(self, rpc: Rpc) -> None:
        self._cut(rpc, RequestError(408, "the message took too long to come", reason="slow"))

    def _cut(self, rpc: Rpc, refused: RequestError) -> None:
        """Refuse an RPC whose message is being read.

        The reading is not cancelled: a message that comes just then would never be let go. It ends
        by itself when the RPC has.
        """
        if rpc.reading_since_s is None:
            return
        rpc.reading_since_s = None
        task = self._loop.create_task(self._abort(rpc, refused))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, rpc: Rpc, refused: RequestError) -> None:
        with suppress(BaseError):  # that is how it ends; or the client has gone
            await self._refuse(rpc, refused)

    def _trimmed(self, done: object) -> None:
        self._is_trimming = False

    # --- room ----------------------------------------------------------------------------------

    async def _make_room(self, rpc: Rpc) -> None:
        """Take what the largest message needs, and wait for that if need be. Raises
        `RequestError`.
        """
        assert rpc.hold is not None
        if not self._waiting and self._may_read(rpc):
            return
        if sum(map(len, self._waiting.values())) >= WAITING_MAX:
            raise no_memory()
        turn: Turn = self._loop.create_future()
        place = (rpc, turn)
        queue = self._waiting.setdefault(rpc.tenant.client_id, deque())
        queue.append(place)
        self._serve_waiting()
        try:
            async with asyncio.timeout(WAIT_S):
                refused = await turn
            if refused is not None:
                raise refused
        except BaseException as error:
            if turn.done() and not turn.cancelled() and turn.result() is None:
                self._has_read(rpc)  # its turn came when it was too late
            if isinstance(error, TimeoutError):
                raise no_memory() from None
            raise
        finally:
            if place in queue:
                queue.remove(place)
                if not queue:
                    self._waiting.pop(rpc.tenant.client_id, None)

    def _may_read(self, rpc: Rpc) -> bool:
        """Take room for a message, if there is any: a tenant can always have one on its way."""
        client_id = rpc.tenant.client_id
        own = self._reading.get(client_id, 0)
        is_crowded = sum(self._reading.values()) >= self._reading_max
        assert rpc.hold is not None
        if (own and is_crowded) or not rpc.hold.grow(self._message_bytes):
            return False
        self._reading[client_id] = own + 1
        return True

    def _has_read(self, rpc: Rpc) -> None:
        client_id = rpc.tenant.client_id
        self._reading[client_id] -= 1
        if not self._reading[client_id]:
            del self._reading[client_id]

    def _serve_waiting(self) -> None:
        """Let in whoever there is room for, tenant after tenant, and look again in a moment."""
        is_room = True
        while is_room:
            is_room = False
            for client_id, queue in list(self._waiting.items()):
                rpc, turn = queue[0]
                if not turn.done() and not self._may_read(rpc):
                    continue
                queue.popleft()
                if not queue:
                    del self._waiting[client_id]
                if not turn.done():
                    turn.set_result(None)
                is_room = True
        self._let_slow_go()
        if self._waiting and self._timer is None:
            self._timer = self._loop.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        self._serve_waiting()

    def _let_slow_go(self) -> None:
        """For each tenant that waits, refuse a slow sender: one of its own, if it has any."""
        late_s = self._loop.time() - SLOW_S
        for client_id in self._waiting:
            holding = [rpc for rpc in self._readers if rpc.hold is not None]
            own = [rpc for rpc in holding if rpc.tenant.client_id == client_id]
            for rpc in (own or holding)[:1]:
                if rpc.reading_since_s is not None and rpc.reading_since_s < late_s:
                    problem = "the message took too long to come, and others wait for its room"
                    self._cut(rpc, RequestError(503, problem, reason="slow"))

    # --- one RPC -------------------------------------------------------------------------------

    def _rpc(self, path: str, context: Context) -> Rpc:
        metadata = context.invocation_metadata() or ()
        headers = {
            name.encode(): value if isinstance(value, bytes) else value.encode()
            for name, value in metadata
        }
        return Rpc(path, context, headers, self._http.request_id(headers.get(b"x-request-id")))

    def _enter(self, rpc: Rpc, *, is_public: bool) -> None:
        """Let an RPC in. Raises `RequestError`, and then nothing is held."""
        http = self._http
        if is_public:
            if self._public >= PUBLIC_MAX:
                raise _too_many()
            rpc.is_public = True
            self._public += 1
        else:
            rpc.tenant = http.keys.tenant(rpc.headers)
            rpc.client_id = rpc.tenant.client_id
            if len(self._rpcs) - self._public >= self._config.connections_max:
                raise _too_many()
            hold = Hold(http.budget, rpc.tenant.client_id)
            if not hold.grow(LOOKAHEAD_BYTES):
                raise no_memory()
            rpc.hold = hold
        self._rpcs.add(rpc)

    def _leave(self, rpc: Rpc) -> None:
        if rpc in self._rpcs:
            self._rpcs.discard(rpc)
            self._public -= rpc.is_public

    async def _answer(self, rpc: Rpc, method: Method, is_public: bool) -> bytes:
        refused: RequestError | None = None
        try:
            self._enter(rpc, is_public=is_public)
            answer = await method(rpc)
            self._hold_answer(rpc, len(answer))
        except RequestError as error:
            refused = _bare(error)
        except BaseError:  # it was cut, and told so; or gRPC has ended it
            self._release(rpc)
            raise
        except asyncio.CancelledError:
            self._release(rpc)
            self._count(rpc, StatusCode.CANCELLED, "client_gone")
            raise
        except Exception:
            refused = _mistake(rpc)
        finally:
            self._leave(rpc)
        if refused is not None:
            self._release(rpc)
            await self._refuse(rpc, refused)
        self._count(rpc, StatusCode.OK, "", len(answer))
        return answer

    def _hold_answer(self, rpc: Rpc, size: int) -> None:
        """Hold an answer, and nothing else, until it has been sent. Raises `RequestError`."""
        check_answer(size, self._config.answer_bytes_max, is_text=False)
        if size <= self._config.write_high_water:
            self._release(rpc)  # it waits in gRPC's own buffers
            return
        if rpc.hold is None or not rpc.hold.resize(size):
            raise RequestError(503, "too many answers are not read yet", reason="answers")
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _: self._release(rpc))

    def _release(self, rpc: Rpc) -> None:
        if rpc.hold is not None and rpc.hold.size:
            rpc.hold.release()
            if self._waiting:
                self._serve_waiting()

    async def _refuse(self, rpc: Rpc, refused: RequestError) -> NoReturn:
        if refused.retry_ns or refused.status == 503:
            refused.retry_ns = self._http.retry_ns(refused.retry_ns)
        status = status_of(refused)
        self._count(rpc, status, refused.reason or _REASONS.get(status, ""))
        trailers = (*trailers_of(refused), ("x-request-id", rpc.request_id.decode("latin-1")))
        await rpc.context.abort(status, detail_of(refused), trailers)

    def _count(self, rpc: Rpc, status: StatusCode, reason: str, out_bytes: int = 0) -> None:
        """Count an answer, and tell the access log of it."""
        call, rpc.call = rpc.call, None  # whose inputs nobody needs any more
        self._http.responses.count(GRPC, status.name, reason)
        if self._http.access is not None:
            self._http.access.answered(
                rpc.asked,
                status.name,
                reason,
                request_id=rpc.request_id.decode("latin-1"),
                client_id=rpc.client_id,
                call=call,
                in_bytes=rpc.in_bytes,
                out_bytes=out_bytes,
            )

    async def _refuse_unknown(self, messages: object, context: Context) -> bytes:
        rpc = self._rpc("-", context)  # what it asks for may be anything
        self._count(rpc, StatusCode.UNIMPLEMENTED, "unknown_method")
        await context.abort(StatusCode.UNIMPLEMENTED, "there is no such method")


def _trim() -> None:
    """Give memory back to the system that has been freed.

    gRPC reads a message into many small blocks, and the C library keeps what is freed of them: the
    process would hold twice what it has taken of the budget. It takes some ten milliseconds, in
    which nobody waits: the blocks are in an area of the heap that gRPC's own thread uses.
    """
    with suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def message_bytes_max(http: HttpServer) -> int:
    """The largest message: no larger than what each tenant can have of the budget."""
    return max(1, min(http.config.body_bytes_max, http.budget.share - LOOKAHEAD_BYTES))


def _bare(refused: RequestError) -> RequestError:
    """A refusal without its history, in which are the message and whatever was made of it.

    gRPC keeps the exception that ends an RPC, in a cycle that waits for the garbage collector; what
    that one was raised after is kept with it.
    """
    refused.__traceback__ = refused.__context__ = refused.__cause__ = None
    return refused


def _mistake(rpc: Rpc) -> RequestError:
    """What is said of the defect that is just being handled: to the client, little."""
    shown = rpc.request_id.decode("latin-1")
    _LOG.exception("an RPC broke the gateway", extra={"request_id": shown})
    return RequestError(500, "the gateway made a mistake", reason="internal")


def _too_many() -> RequestError:
    return RequestError(503, "too many RPCs are open", reason="too_many_rpcs")


# Refusals that give no reason have one all the same.
_REASONS: Final = {StatusCode.INVALID_ARGUMENT: "invalid", StatusCode.NOT_FOUND: "unknown_model"}
