"""One HTTP/1.1 connection: bytes in, requests handled in order, responses out, all within limits.

Two classes make one state machine. `RequestParser` reads: llhttp (through `httptools`) calls its
`on_...` methods, and it builds requests. `HttpConnection` is the asyncio protocol: it queues those
requests, runs one at a time, writes responses and enforces timeouts. Each knows the other.

**States.** The parser's `state` is one of

    IDLE    between requests;      a first byte      -> HEAD
    HEAD    reading headers;       the headers end   -> BODY
    BODY    reading a body;        the body ends     -> IDLE, or CLOSED after the last request
    CLOSED  nothing more is read:  whatever arrives is discarded.

The last request is one with `Connection: close`, one that could not be parsed, or the one before
the client closed its side. The writing half has no named states. `_current` is the request whose
response is due, `_queue` holds those behind it, `_unwritten` the parts of a large response that the
transport has not taken yet; `_is_closing` says to close once those are written.

**Limits.** llhttp rejects what smuggles requests past proxies: contradicting lengths, folded
headers, odd chunks. It sets no bounds, so this module bounds everything before it is kept: the
target, the number and bytes of headers, trailers, the body, the size of chunks (each chunk costs
more than the bytes that it carries), and what llhttp buffers itself (`_bound_unfinished`). A body's
memory is reserved in the budget before it is read. A request that is refused before its body has
arrived (an unknown path, no key, a limit of its tenant, no memory) has its body read and discarded,
and the connection goes on. After an error that leaves the position in the stream unknown
(`HttpError.closes`) the connection ends.

**Pipelining.** Requests that arrive before the previous response wait in `_queue` and are started
one after the other, so that responses cannot change places. Reading pauses while `pipelined_max`
requests are queued and while the client does not read its responses.

**Timeouts.** One sweep of the server over all connections checks every timeout against marks as
coarse as the sweep, because a timer per request would cost more. Time spent waiting for us (a
paused connection, a `100 Continue` that is due) does not count against the client.

**Closing.** Closing a socket that still receives data resets the connection, which can destroy the
response that says what was wrong. So after an error in the middle of a request only our side is
shut (`_lingers`), input is discarded, and the sweep closes the socket after `linger_s`. A client
that is still reading the last response has `write_timeout_s` for it, over TLS as well.
"""

from __future__ import annotations

import asyncio
import mmap
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias, cast, final

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from headgate.http.interface import STATUS_LINES, HeldMemory, HttpError, HttpLimits, IncomingRequest

REFUSED_MAX: Final = 64  # connections beyond the limit that get a 503, at a time
_PIECE_BYTES: Final = 1 << 20  # of a response that are written at a time
_TCP_CLOSE: Final = 7  # Linux's state of a connection that was reset
_LARGE_BYTES: Final = 1 << 20  # of a body
_CHUNK_BYTES_MIN: Final = 64  # on average, after the first `_CHUNKS_FREE` chunks of a body
_CHUNKS_FREE: Final = 1024
_CONTINUE: Final = STATUS_LINES[100] + b"\r\n"

# Makes a request of its method, target and headers. All are empty where there was no readable head:
# such a request is only there to respond with an error.
BeginRequest: TypeAlias = Callable[
    ["HttpConnection", bytes, bytes, dict[bytes, bytes]], IncomingRequest
]


class ParserState:
    """What is being read. Small integers rather than an `Enum`: they are on the hot path."""

    IDLE: Final = 0
    HEAD: Final = 1
    BODY: Final = 2
    CLOSED: Final = 3


@final
@dataclass(eq=False)
class ServerState:
    """What the connections of one server share; TLS handshakes count as connections."""

    limits: HttpLimits
    begin: BeginRequest
    clock_s: float = 0.0  # the loop's clock at the last sweep
    connections: set[HttpConnection] = field(default_factory=set)
    handshakes: set[asyncio.Task[None]] = field(default_factory=set)

    def excess(self) -> int:
        """How many connections there are beyond the limit; negative: how many may be added."""
        return len(self.connections) + len(self.handshakes) - self.limits.connections_max


@final
class HttpConnection:
    """The writing half of a connection, and its asyncio protocol."""

    __slots__ = (
        "_current",
        "_is_closing",
        "_is_half_closed",
        "_is_handling",
        "_is_read_paused",
        "_is_write_paused",
        "_limits",
        "_lingers",
        "_parser",
        "_queue",
        "_server",
        "_since_s",
        "_transport",
        "_unread_holds",
        "_unwritable_since_s",
        "_unwritten",
        "is_encrypted",
        "is_identified",
        "owes_continue",
    )

    def __init__(self, server: ServerState, is_encrypted: bool = False) -> None:
        self.is_encrypted = is_encrypted
        self.is_identified = False  # for servers that identify a client once per connection
        self.owes_continue = False  # the client waits for `100 Continue` before it sends its body
        self._server = server
        self._limits = server.limits
        self._transport: asyncio.Transport
        self._parser = RequestParser(self, server)
        self._current: IncomingRequest | None = None  # whose response is due
        self._queue: deque[IncomingRequest] = deque()
        self._is_handling = False  # guards `_handle_queued` against recursion
        self._lingers = False  # the client may still be sending: close only our side at first
        self._is_read_paused = False
        self._since_s = server.clock_s  # when the last response was written
        self._unwritable_since_s: float | None = None  # when the client stopped reading
        self._is_write_paused = False  # the transport's buffer is full
        self._unwritten: deque[bytes | memoryview] = deque()  # the rest of large responses
        # Of responses since the client stopped reading.
        self._unread_holds: list[HeldMemory] = []
        self._is_closing = False  # close once everything is written
        self._is_half_closed = False  # the client sends no more, and may still read

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing() and not self._is_half_closed

    def address(self, end: str) -> tuple[str, int]:
        """Host and port of an end of the connection: `peername` or `sockname`."""
        host, port, *_ = self._transport.get_extra_info(end)  # IPv6 has a flow and a scope
        return host, port

    @property
    def is_idle(self) -> bool:
        """Whether no request is being read or handled."""
        return self._current is None and self._parser.state == ParserState.IDLE

    @property
    def is_responding(self) -> bool:
        """Whether a response is due, or was written and has not left the process yet."""
        if self._current is not None or self._unwritten:
            return True
        return self._transport.get_write_buffer_size() > 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin. A connection beyond the limit gets a 503, or is aborted if there are many."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=self._limits.write_high_water)
        if self.is_encrypted:  # it was counted when it was accepted
            self._server.connections.add(self)
            return
        excess = self._server.excess()
        if excess >= REFUSED_MAX:
            self._transport.abort()
            return
        self._server.connections.add(self)
        if excess >= 0:
            self._fail(HttpError(503, "too many connections", reason="connections", closes=True))

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the requests of a client that has disconnected."""
        self._parser.state = ParserState.CLOSED
        self._parser.discard()
        self._cancel_queued()
        self._unwritten.clear()
        self._release_unread()
        current, self._current = self._current, None
        if current is not None:
            current.cancel()
        self._server.connections.discard(self)

    def eof_received(self) -> bool:
        """The client has closed its side. It may still read, so whole requests get responses.

        A request that is incomplete is discarded. TLS has no half-closed connections. The transport
        closes itself unless this returns True.
        """
        self._parser.state = ParserState.CLOSED
        self._parser.discard()
        last = self._queue[-1] if self._queue else self._current
        if last is None or self.is_encrypted:
            return False
        last.closes = True
        self._is_half_closed = True
        return True

    def data_received(self, data: bytes) -> None:
        if self._parser.state == ParserState.CLOSED:
            return
        try:
            self._parser.feed(data)
        except HttpError as error:
            self._fail(error)
        else:
            if self.owes_continue and self._current is None:
                self._send_continue()

    def pause_writing(self) -> None:
        """The client reads too slowly: stop reading from it, and let the sweep time it."""
        self._is_write_paused = True
        if self._unwritable_since_s is None:
            self._unwritable_since_s = self._server.clock_s
        self._update_reading()

    def resume_writing(self) -> None:
        """The transport's buffer has drained: write more, and go on with the queue."""
        self._is_write_paused = False
        self._flush()
        if self._is_write_paused:
            return
        self._unwritable_since_s = None
        self._release_unread()
        if self._is_closing:
            self._finish()
            return
        self._handle_queued()
        self._update_reading()

    def on_request(self, request: IncomingRequest) -> None:
        """Queue a request; it is handled at once if none is before it."""
        queue = self._queue
        if len(queue) >= self._limits.pipelined_max:
            # One read brought more than the limit. HTTP lets a server close after any response.
            queue[-1].closes = True
            self._parser.state = ParserState.CLOSED
            request.cancel()
            return
        queue.append(request)
        self._handle_queued()
        if queue:
            self._update_reading()

    def send(
        self,
        head: bytes,
        body: Sequence[bytes | memoryview],
        request: IncomingRequest,
        hold: HeldMemory | None,
    ) -> None:
        """Write the response of the current request, and go on to the next request.

        `hold` is the budget's share of a large response, released once the client has read it.
        """
        if request is not self._current or self._transport.is_closing():
            if hold is not None:
                hold.release()  # the client has disconnected
            if request is self._current:
                self._current = None
            return
        self._current = None
        self._since_s = self._server.clock_s
        self._transport.write(head)
        if body:
            self._unwritten.extend(body)
            self._flush()
        if hold is not None:
            if self._unwritable_since_s is None:
                hold.release()
            else:
                self._unread_holds.append(hold)
        if request.closes:
            self._finish()
        elif self._queue:
            self._handle_queued()
            self._update_reading()
        elif self.owes_continue:
            self._send_continue()

    def close(self) -> None:
        """Close once all responses have been written."""
        if self._unwritten:
            self._is_closing = True
        else:
            self._transport.close()

    def abort(self, error: HttpError) -> None:
        """Respond to the current request with `error`, and close.

        On an idle connection a request may be on its way. Its client sees the end of the stream
        rather than a reset, which could also destroy the response before it.
        """
        if self.is_idle:
            self._lingers = True
            self._since_s = self._server.clock_s
            self._finish()
        elif self._current is None:
            self._fail(error)
        else:
            self._current.abort(error)

    def sweep(self, now_s: float) -> None:
        limits, state = self._limits, self._parser.state
        if self._is_half_closed and self._is_reset():
            self._transport.abort()
        elif self._unwritable_since_s is not None:
            if now_s - self._unwritable_since_s > limits.write_timeout_s:
                self._transport.abort()
        elif state == ParserState.CLOSED:
            is_writing = self._transport.is_closing() or self._transport.get_write_buffer_size() > 0
            timeout_s = limits.write_timeout_s if is_writing else limits.linger_s
            if self._current is None and now_s - self._since_s > timeout_s:
                self._transport.abort()
        elif state == ParserState.IDLE:
            if self._current is None and now_s - self._since_s > limits.idle_timeout_s:
                self._transport.close()
        elif not self._is_read_paused and not self.owes_continue:
            is_head = state == ParserState.HEAD
            timeout_s = limits.header_timeout_s if is_head else self._parser.body_timeout_s()
            if now_s - self._parser.since_s > timeout_s:
                part = "headers" if is_head else "body"
                message = f"the {part} took too long to arrive"
                self._fail(HttpError(408, message, closes=True))

    def _is_reset(self) -> bool:
        """Whether the client has reset a connection from which nothing is read any more."""
        try:
            connection = self._transport.get_extra_info("socket")
            state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
            return bool(state == _TCP_CLOSE)
        except OSError:
            return True

    def _handle_queued(self) -> None:
        """Handle queued requests, as long as each gets its response at once."""
        if self._is_handling:
            return
        self._is_handling = True
        queue = self._queue
        try:
            while queue and self._current is None and self._unwritable_since_s is None:
                self._current = request = queue.popleft()
                request.handle()
        finally:
            self._is_handling = False

    def _fail(self, error: HttpError) -> None:
        """Queue a last request that responds with `error`; nothing is read after it."""
        if self._parser.state != ParserState.CLOSED:
            self._lingers = True
            self.owes_continue = False
            self._queue.append(self._parser.last_request(error))
            self._handle_queued()

    def _flush(self) -> None:
        """Write more of large responses, a piece at a time: encrypting all at once takes long."""
        unwritten = self._unwritten
        if self._transport.is_closing():
            unwritten.clear()
        while unwritten and not self._is_write_paused:
            part = unwritten[0]
            if len(part) > _PIECE_BYTES:
                part = memoryview(part)
                unwritten[0] = part[_PIECE_BYTES:]
                part = part[:_PIECE_BYTES]
            else:
                unwritten.popleft()
            self._transport.write(part)

    def _finish(self) -> None:
        """Close after the last response, once all of it is written."""
        self._cancel_queued()
        self._parser.state = ParserState.CLOSED
        self._is_closing = bool(self._unwritten)
        if self._is_closing:
            return
        if self._lingers and self._transport.can_write_eof():
            try:
                self._transport.write_eof()  # the sweep closes the socket later
            except OSError:  # asyncio's own loop: the client has disconnected
                self._transport.abort()
        else:
            self._transport.close()

    def _cancel_queued(self) -> None:
        while self._queue:
            self._queue.pop().cancel()

    def _release_unread(self) -> None:
        while self._unread_holds:
            self._unread_holds.pop().release()

    def _update_reading(self) -> None:
        """Pause reading while the client's write buffer is full or the queue is.

        Hysteresis: reading resumes only when the queue is empty, because one read may bring
        `pipelined_max` requests again.
        """
        queued_max = 1 if self._is_read_paused else self._limits.pipelined_max
        pauses = self._unwritable_since_s is not None or len(self._queue) >= queued_max
        if pauses == self._is_read_paused or self._transport.is_closing():
            return
        self._is_read_paused = pauses
        if pauses:
            self._transport.pause_reading()
        else:
            self._parser.since_s = self._server.clock_s  # the pause does not count
            self._transport.resume_reading()

    def _send_continue(self) -> None:
        self.owes_continue = False
        if self._parser.state == ParserState.BODY:
            self._parser.since_s = self._server.clock_s  # the wait for it does not count
            self._transport.write(_CONTINUE)


@final
class RequestParser:
    """The reading half of a connection. llhttp calls the methods that begin with `on_`."""

    __slots__ = (
        "_announced_bytes",
        "_body",
        "_body_bytes",
        "_chunks",
        "_connection",
        "_head_bytes",
        "_headers",
        "_limits",
        "_llhttp",
        "_request",
        "_server",
        "_target",
        "_unfinished_bytes",
        "_unparsed_left",
        "since_s",
        "state",
    )

    def __init__(self, connection: HttpConnection, server: ServerState) -> None:
        self.state = ParserState.IDLE
        self.since_s = server.clock_s  # when the head or body that is being read began
        self._connection = connection
        self._server = server
        self._limits = server.limits
        self._llhttp = HttpRequestParser(self)
        self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._head_bytes = 0
        self._request: IncomingRequest | None = None  # whose body is being read
        self._announced_bytes = 0  # of the body
        self._body: bytes | bytearray | memoryview = b""
        self._body_bytes = 0  # received
        self._chunks = 0  # of the body
        self._unparsed_left = 0  # bytes of a body that llhttp does not see
        # Bytes read since llhttp last called back; -1: it did in this piece, at an unknown point.
        self._unfinished_bytes = 0

    def feed(self, data: bytes) -> None:
        """Parse bytes. Raises `HttpError`, after which the connection must end."""
        while data:
            if self._unparsed_left:
                data = self._read_unparsed(data)
            try:
                self._llhttp.feed_data(data)
                break
            except HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]  # upgrades are ignored: HTTP goes on
            except HttpParserError as problem:
                raise _error_of(problem) from None
        if self.state == ParserState.HEAD or self.state == ParserState.BODY:
            self._bound_unfinished(len(data))

    def body_timeout_s(self) -> float:
        """How long the body may take, given how much of it has arrived.

        Memory is reserved for an announced body, so its client must send it at some minimum rate.
        """
        limits = self._limits
        earned_s = self._body_bytes / limits.body_bytes_per_s_min
        return min(limits.body_timeout_s, limits.header_timeout_s + earned_s)

    def last_request(self, error: HttpError) -> IncomingRequest:
        """Stop reading. Returns the request that was being read, or an empty one, with `error`."""
        self.state = ParserState.CLOSED
        request, self._request = self._request, None
        self.discard()
        if request is None:
            request = self._server.begin(self._connection, b"", b"", {})
        request.reject_body(error)
        request.closes = True
        return request

    def discard(self) -> None:
        """Cancel the request that is being read."""
        if self._request is not None:
            self._request.cancel()
            self._request = None
        self._body_bytes = self._unparsed_left = 0
        self._body = b""

    def on_message_begin(self) -> None:
        if self.state == ParserState.CLOSED:
            raise HttpError(400, "a request follows the last of the connection", closes=True)
        self.state = ParserState.HEAD
        self.since_s = self._server.clock_s
        self._head_bytes = 0
        self._chunks = 0
        self._unfinished_bytes = -1

    def on_url(self, url: bytes) -> None:
        """A piece of the target has arrived."""
        self._target += url
        if len(self._target) > self._limits.header_bytes_max:
            raise HttpError(414, "the request target is too long", closes=True)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header has arrived. Repeated headers are joined to one list, as HTTP defines them."""
        headers = self._headers
        self._head_bytes = head_bytes = self._head_bytes + len(name) + len(value)
        if head_bytes > self._limits.header_bytes_max:
            raise _headers_too_large()
        if self.state == ParserState.BODY:
            return  # a trailer: keeping it could override a header that was checked already
        name = name.lower()
        if name not in headers:
            if len(headers) >= self._limits.headers_max:
                raise _headers_too_large()
            headers[name] = value.strip()  # llhttp keeps the space after a value
        elif name in (b"content-length", b"transfer-encoding", b"host", b"authorization"):
            raise HttpError(400, f"{name.decode()} is given twice", closes=True)
        else:  # without a space, as AWS signs a list
            headers[name] = b"%b,%b" % (headers[name], value.strip())

    def on_headers_complete(self) -> None:
        """All headers have arrived: the server makes a request, and reserves memory for it."""
        llhttp, server = self._llhttp, self._server
        headers, target = self._headers, self._target
        self._headers, self._target = {}, b""
        self.state = ParserState.BODY
        self.since_s = server.clock_s
        if b"host" not in headers and llhttp.get_http_version() == "1.1":
            raise HttpError(400, "the Host header is missing", closes=True)
        request = server.begin(self._connection, llhttp.get_method(), target, headers)
        self._request = request
        size = 0
        if b"content-length" in headers or b"transfer-encoding" in headers:
            size = self._announced(headers)
        self._announced_bytes = size
        if request.error is None:
            try:
                request.admit(size)
            except HttpError as problem:
                # A traceback and its frame would be a cycle.
                request.error = problem.with_traceback(None)
        if b"expect" in headers:
            self._expect(headers[b"expect"], request.error)

    def on_chunk_header(self) -> None:
        """A chunk begins. Bounds their number: a tiny chunk costs more than its bytes."""
        before, self._chunks = self._chunks, self._chunks + 1
        if before > _CHUNKS_FREE and self._body_bytes < before * _CHUNK_BYTES_MIN:
            raise HttpError(
                400,
                "the chunks of the body are too small: "
                f"they must have {_CHUNK_BYTES_MIN} bytes on average",
                reason="malformed",
                closes=True,
            )

    def on_body(self, chunk: bytes) -> None:
        """A piece of the body has arrived. It is kept if the request wants it and has room."""
        request = self._request
        self._head_bytes = 0  # from here on it counts trailers
        self._unfinished_bytes = -1
        self._body_bytes += len(chunk)
        if self._body_bytes > self._limits.body_bytes_max:
            raise self._body_too_large()
        if request is None or not request.keeps_body:
            return
        if self._body_bytes > self._announced_bytes:
            error = request.reserve_more(len(chunk), self._body_bytes)
            if error is not None:
                request.reject_body(error)
                self._body = b""
                return
        self._keep(chunk)

    def on_message_complete(self) -> None:
        """The request has ended, unless its body bypasses llhttp."""
        request = self._request
        assert request is not None
        if self._llhttp.should_upgrade():
            self._unparsed_left = self._announced_bytes
        if not self._unparsed_left:
            self._complete(request, closes=not self._llhttp.should_keep_alive())

    def _keep(self, chunk: bytes) -> None:
        """Append a piece to the body.

        The body is one buffer rather than a list, because a million tiny chunks would cost far more
        than their bytes. A body that is known to be large gets its whole buffer at once: moving a
        growing one would take longer than anything else here.
        """
        if not self._body:
            if not len(chunk) < self._announced_bytes >= _LARGE_BYTES:
                self._body = chunk
                return
            # Mapped memory costs nothing until it is written; a `bytearray` would be zeroed first.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._body = memoryview(mmap.mmap(-1, self._announced_bytes, flags=flags))
        if isinstance(self._body, memoryview):
            self._body[self._body_bytes - len(chunk) : self._body_bytes] = chunk
            return
        if not isinstance(self._body, bytearray):
            self._body = bytearray(self._body)
        self._body += chunk

    def _complete(self, request: IncomingRequest, *, closes: bool) -> None:
        request.body = self._body
        request.body_bytes = self._body_bytes
        request.closes = closes
        self.state = ParserState.CLOSED if closes else ParserState.IDLE
        if self._body_bytes:
            self._body_bytes = 0
            self._body = b""
        self._request = None
        self._connection.on_request(request)

    def _bound_unfinished(self, size: int) -> None:
        """Bound what llhttp buffers itself: a header, trailer or chunk extension without an end."""
        if self._unfinished_bytes < 0:
            self._unfinished_bytes = 0  # it began somewhere in this piece
            return
        self._unfinished_bytes += size
        if self._unfinished_bytes > 3 * self._limits.header_bytes_max:
            raise _headers_too_large()

    def _read_unparsed(self, data: bytes) -> bytes:
        """Read a body that llhttp does not see. Returns what follows it.

        llhttp stops at the headers of a request with an `Upgrade` header; the body is ours to read.
        """
        piece = data[: self._unparsed_left]
        self._unparsed_left -= len(piece)
        self.on_body(piece)
        if not self._unparsed_left and self._request is not None:
            self._complete(self._request, closes=False)
        return data[len(piece) :]

    def _announced(self, headers: dict[bytes, bytes]) -> int:
        """The announced size of the body; 0 if it is chunked.

        Rejects what llhttp lets pass and a proxy might read differently.
        """
        coding = headers.get(b"transfer-encoding")
        if coding is not None:
            if coding.lower() != b"chunked" or b"content-length" in headers:
                raise HttpError(400, "the length of the body is ambiguous", closes=True)
            if self._llhttp.get_http_version() != "1.1":
                raise HttpError(400, "HTTP/1.0 has no chunked bodies", closes=True)
            if self._llhttp.should_upgrade():
                message = "a request with an upgrade must not have a chunked body"
                raise HttpError(400, message, closes=True)
            return 0
        size = int(headers[b"content-length"])
        if size > self._limits.body_bytes_max:
            raise self._body_too_large()
        return size

    def _expect(self, expected: bytes, error: HttpError | None) -> None:
        if expected.lower() != b"100-continue":
            raise HttpError(417, "only 100-continue can be expected", closes=True)
        if error is not None:
            error.closes = True
            raise error  # before the client has sent a body that would be discarded
        self._connection.owes_continue = True

    def _body_too_large(self) -> HttpError:
        return HttpError(
            413,
            f"the body is larger than {self._limits.body_bytes_max} bytes",
            reason="too_large",
            closes=True,
        )


def _error_of(problem: HttpParserError) -> HttpError:
    """The error that one of our callbacks raised in llhttp, or llhttp's own."""
    own = problem.__context__
    if isinstance(own, HttpError):
        return own
    if own is not None:
        raise own  # a defect
    return HttpError(400, f"the request is not HTTP: {problem}", reason="malformed", closes=True)


def _headers_too_large() -> HttpError:
    return HttpError(431, "the headers are too many or too large", reason="too_large", closes=True)
