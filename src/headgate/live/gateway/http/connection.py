"""A connection: exchanges in their order, answers out, and how long all that may take.

Requests that come before the answer to the one before them wait, and are begun one after the
other, so that answers cannot change places. After a request that could not be understood the
connection is closed, but only once the client has had time to read why: closing on a sender at
once would take the answer away from it.

Time is kept by one sweep of the server over all connections, with marks as coarse as the sweep.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, cast, final

from headgate.live.gateway.errors import RequestError
from headgate.live.gateway.http.request import HttpRequest
from headgate.live.gateway.http.responses import CONTINUE
from headgate.live.gateway.memory_budget import Hold

if TYPE_CHECKING:
    from headgate.live.gateway.http.server import HttpServer


from typing import TYPE_CHECKING

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from headgate.live.gateway.auth import Tenant
from headgate.live.gateway.http.request import no_memory
from headgate.live.gateway.http.router import Route
from headgate.live.gateway.oip.json import too_much_text
from headgate.live.ipc.shared_memory import allocate_buffer

if TYPE_CHECKING:
    from headgate.live.gateway.http.server import HttpServer


# Incoming: from the bytes of a connection to exchanges, within limits.
#
# llhttp (through `httptools`) reads the bytes and is strict about what smuggles requests past
# proxies: lengths that contradict each other, folded headers, odd chunks. What it leaves open is
# closed here: how much there may be of everything, before it is kept.
#
# A request that is refused before its body has come (an unknown path, no key, a limit of its
# tenant, no memory) has its body read and thrown away. One after which nothing can be understood
# is the last: `RequestError` with `closes`.


_LARGE_BYTES: Final = 1 << 20  # of a body
_CHUNK_BYTES_MIN: Final = 64  # on average, once there are more chunks than
_CHUNKS_FREE: Final = 1024


class ParserState:
    """What is being read. Small integers rather than an `Enum`: they are on the hot path."""

    NOTHING: Final = 0  # between requests
    HEAD: Final = 1
    BODY: Final = 2
    NO_MORE: Final = 3  # the last request has come: whatever follows is thrown away


@final
class RequestParser:
    """The reading half of a connection. The parser calls the methods that begin with `on_`."""

    __slots__ = (
        "_announced_bytes",
        "_body",
        "_body_bytes",
        "_chunks",
        "_connection",
        "_exchange",
        "_head_bytes",
        "_headers",
        "_limits",
        "_parser",
        "_plain_left",
        "_server",
        "_target",
        "_unended_bytes",
        "reading",
        "since_s",
    )

    def __init__(self, connection: HttpConnection, server: HttpServer) -> None:
        self.reading: int = ParserState.NOTHING
        self.since_s = server.clock_s  # when what is being read began
        self._connection = connection
        self._server = server
        self._limits = server.config
        self._parser = HttpRequestParser(self)
        self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._head_bytes = 0
        self._exchange: HttpRequest | None = None  # whose body is being read
        self._announced_bytes = 0  # of the body
        self._body: bytes | bytearray | memoryview = b""
        self._body_bytes = 0  # that have come
        self._chunks = 0  # that these came in
        self._plain_left = 0  # bytes of a body that the parser does not see
        self._unended_bytes = 0  # read since anything came of it; -1: something has just begun

    def feed(self, data: bytes) -> None:
        """Read on: whole requests go to the connection. Raises `RequestError`, after which it
        ends.
        """
        while data:
            if self._plain_left:
                data = self._read_plain(data)
            try:
                self._parser.feed_data(data)
                break
            except HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]  # there is no upgrade: it goes on as it was
            except HttpParserError as problem:
                raise _refused(problem) from None
        if self.reading == ParserState.HEAD or self.reading == ParserState.BODY:
            self._count_unended(len(data))

    def body_seconds_max(self) -> float:
        """How long the body may take, which depends on how much of it has come.

        Whoever has announced a body has memory put aside for it, and must send it.
        """
        limits = self._limits
        earned_s = self._body_bytes / limits.body_bytes_per_s_min
        return min(limits.body_timeout_s, limits.header_timeout_s + earned_s)

    def last(self, refused: RequestError) -> HttpRequest:
        """The exchange to end with: the one that was coming in, or one for what was none."""
        self.reading = ParserState.NO_MORE
        exchange, self._exchange = self._exchange, None
        self.let_go()
        if exchange is None:
            exchange = HttpRequest(self._connection, self._server, None, None, {}, False)
        exchange.turn_down(refused)
        exchange.closes = True
        return exchange

    def let_go(self) -> None:
        """Keep nothing of what is unfinished."""
        if self._exchange is not None:
            self._exchange.abandon()
            self._exchange = None
        self._body_bytes = self._plain_left = 0
        self._body = b""

    def on_message_begin(self) -> None:
        """Mark the time."""
        if self.reading == ParserState.NO_MORE:
            raise RequestError(400, "a request after the last", closes=True)
        self.reading = ParserState.HEAD
        self.since_s = self._server.clock_s
        self._head_bytes = 0
        self._chunks = 0
        self._unended_bytes = -1

    def on_url(self, url: bytes) -> None:
        """Keep the target, which may come in pieces."""
        self._target += url
        if len(self._target) > self._limits.header_bytes_max:
            raise RequestError(414, "the target is too long", closes=True)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header. Those that are repeated are one list, as HTTP has it."""
        headers = self._headers
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > self._limits.header_bytes_max:
            raise _too_many_headers()
        if self.reading == ParserState.BODY:
            return  # a trailer, which could overrule what has been looked at
        name, value = name.lower(), value.strip()  # the parser leaves the space that follows
        if name in headers:
            if name in (b"content-length", b"transfer-encoding", b"host", b"authorization"):
                raise RequestError(400, f"{name.decode()} is given twice", closes=True)
            value = b"%b, %b" % (headers[name], value)
        headers[name] = value
        if len(headers) > self._limits.headers_max:
            raise _too_many_headers()

    def on_headers_complete(self) -> None:
        """Decide whether the body is wanted."""
        parser, server = self._parser, self._server
        headers, target = self._headers, self._target
        self._headers, self._target = {}, b""
        self.reading = ParserState.BODY
        self.since_s = server.clock_s
        method = parser.get_method()
        refused: RequestError | None = None
        route: Route | None = None
        tenant: Tenant | None = None
        if b"host" not in headers and parser.get_http_version() == "1.1":
            raise RequestError(400, "there is no Host", closes=True)
        try:
            route = server.router.find(method, target)
            is_open = route.rule.is_open
            tenant = server.keys.anyone if is_open else server.keys.tenant(headers)
        except RequestError as error:
            refused = error.with_traceback(None)  # which knows this frame, and that knows it
        exchange = HttpRequest(self._connection, server, route, tenant, headers, method == b"HEAD")
        if server.access is not None:
            exchange.asked = server.access.asked(method, target)
        self._exchange = exchange
        size = 0
        if b"content-length" in headers or b"transfer-encoding" in headers:
            size = self._announced(headers)
        self._announced_bytes = size
        if refused is None:
            try:
                exchange.admit(size)
            except RequestError as error:
                refused = error.with_traceback(None)
        exchange.refused = refused
        if b"expect" in headers:
            self._expect(headers[b"expect"], refused)

    def on_chunk_header(self) -> None:
        """Bound what chunks cost: each takes longer than the bytes that it carries."""
        before, self._chunks = self._chunks, self._chunks + 1
        if before > _CHUNKS_FREE and self._body_bytes < before * _CHUNK_BYTES_MIN:
            raise RequestError(
                400,
                f"the chunks of the body are too small: {_CHUNK_BYTES_MIN} bytes each, on average",
                reason="malformed",
                closes=True,
            )

    def on_body(self, chunk: bytes) -> None:
        """Keep a piece of the body, if somebody wants it and there is room."""
        exchange = self._exchange
        self._head_bytes = 0  # from here on it counts trailers
        self._unended_bytes = -1
        self._body_bytes += len(chunk)
        if self._body_bytes > self._limits.body_bytes_max:
            raise self._too_large()
        if exchange is None or not exchange.wants_body:
            return
        if self._body_bytes > exchange.body_bytes_max:
            self._turn_down(exchange, too_much_text(self._limits))
            return
        if self._body_bytes > self._announced_bytes and not exchange.hold_more(len(chunk)):
            self._turn_down(exchange, no_memory())
            return
        self._keep(chunk)

    def _keep(self, chunk: bytes) -> None:
        """Put a piece of the body behind those that were before it.

        They are one buffer rather than a list: a million tiny chunks would cost far more than what
        they carry. Where it is known to become large it is made at once, for to move one that grows
        takes longer than anything else here.
        """
        if not self._body:
            if not len(chunk) < self._announced_bytes >= _LARGE_BYTES:
                self._body = chunk
                return
            self._body = allocate_buffer(self._announced_bytes)
        if isinstance(self._body, memoryview):
            self._body[self._body_bytes - len(chunk) : self._body_bytes] = chunk
            return
        if not isinstance(self._body, bytearray):
            self._body = bytearray(self._body)
        self._body += chunk

    def on_message_complete(self) -> None:
        """Hand the request over, unless its body comes past the parser."""
        exchange = self._exchange
        assert exchange is not None
        if self._parser.should_upgrade():
            if b"transfer-encoding" in exchange.headers:
                raise RequestError(400, "no upgrade is offered for chunks", closes=True)
            self._plain_left = int(exchange.headers.get(b"content-length", b"0"))
        if not self._plain_left:
            self._complete(exchange, closes=not self._parser.should_keep_alive())

    def _turn_down(self, exchange: HttpRequest, refused: RequestError) -> None:
        exchange.turn_down(refused)
        self._body = b""

    def _complete(self, exchange: HttpRequest, *, closes: bool) -> None:
        exchange.body = self._body
        exchange.body_bytes = self._body_bytes
        exchange.closes = closes
        self.reading = ParserState.NO_MORE if closes else ParserState.NOTHING
        if self._body_bytes:
            self._body_bytes = 0
            self._body = b""
        self._exchange = None
        self._connection.arrived(exchange)

    def _count_unended(self, size: int) -> None:
        """Bound what the parser keeps to itself: a header, trailer or extension without an end."""
        if self._unended_bytes < 0:
            self._unended_bytes = 0  # it began in this piece, after who knows what else
            return
        self._unended_bytes += size
        if self._unended_bytes > 3 * self._limits.header_bytes_max:
            raise _too_many_headers()

    def _read_plain(self, data: bytes) -> bytes:
        """Read a body that the parser does not see; returns what follows it."""
        piece = data[: self._plain_left]
        self._plain_left -= len(piece)
        self.on_body(piece)
        if not self._plain_left and self._exchange is not None:
            self._complete(self._exchange, closes=False)
        return data[len(piece) :]

    def _announced(self, headers: dict[bytes, bytes]) -> int:
        """How large the body will be; 0: it comes in chunks.

        Looks at what the parser lets pass and proxies could see otherwise.
        """
        coding = headers.get(b"transfer-encoding")
        if coding is not None:
            if coding.lower() != b"chunked" or b"content-length" in headers:
                raise RequestError(400, "the length of the body is ambiguous", closes=True)
            if self._parser.get_http_version() != "1.1":
                raise RequestError(400, "chunks are not part of HTTP/1.0", closes=True)
            return 0
        size = int(headers[b"content-length"])
        if size > self._limits.body_bytes_max:
            raise self._too_large()
        return size

    def _expect(self, expected: bytes, refused: RequestError | None) -> None:
        if expected.lower() != b"100-continue":
            raise RequestError(417, "only 100-continue can be expected", closes=True)
        if refused is not None:
            refused.closes = True
            raise refused  # before the client has sent what nobody wants
        self._connection.owes_continue = True

    def _too_large(self) -> RequestError:
        return RequestError(
            413,
            f"the body is larger than {self._limits.body_bytes_max} bytes",
            reason="too_large",
            closes=True,
        )


def _refused(problem: HttpParserError) -> RequestError:
    """Our own reason for stopping the parser, or the parser's."""
    own = problem.__context__
    if isinstance(own, RequestError):
        return own
    if own is not None:
        raise own  # a defect
    return RequestError(400, f"this is not HTTP: {problem}", reason="malformed", closes=True)


def _too_many_headers() -> RequestError:
    return RequestError(431, "there are too many headers", reason="too_large", closes=True)


REFUSED_MAX: Final = 64  # connections beyond the limit that are told so, at a time
_PIECE_BYTES: Final = 1 << 20  # of an answer that are written at a time
_CLOSED: Final = 7  # TCP_CLOSE of Linux: the state of a connection that was reset


@final
class HttpConnection(asyncio.Protocol):
    """One client's connection, from its first byte to its last."""

    __slots__ = (
        "_current",
        "_incoming",
        "_is_cut",
        "_is_deaf",
        "_is_encrypted",
        "_is_ending",
        "_is_half_closed",
        "_is_paused",
        "_is_pumping",
        "_limits",
        "_server",
        "_since_s",
        "_transport",
        "_unread",
        "_unwritable_since_s",
        "_unwritten",
        "_waiting",
        "owes_continue",
    )

    def __init__(self, server: HttpServer, *, is_encrypted: bool = False) -> None:
        self.owes_continue = False  # the client waits to be told to send its body
        self._server = server
        self._limits = server.config
        self._transport: asyncio.Transport
        self._incoming = RequestParser(self, server)
        self._current: HttpRequest | None = None  # whose answer is next
        self._waiting: deque[HttpRequest] = deque()
        self._is_pumping = False
        self._is_cut = False  # the client was refused in the middle of something
        self._is_deaf = False  # nothing is read for now
        self._since_s = server.clock_s  # when the last answer went out
        self._unwritable_since_s: float | None = None  # when the client stopped reading
        self._is_paused = False  # the transport has enough for now
        self._unwritten: deque[bytes | memoryview] = deque()  # what is left of large answers
        self._unread: list[Hold] = []  # of answers since the client stopped reading
        self._is_ending = False  # it is closed when everything is written
        self._is_encrypted = is_encrypted
        self._is_half_closed = False  # the client sends no more, and may listen

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way in either direction."""
        return self._current is None and self._incoming.reading == ParserState.NOTHING

    @property
    def is_answering(self) -> bool:
        """Whether an answer is being made, or was written and has not left yet."""
        if self._current is not None or self._unwritten:
            return True
        return self._transport.get_write_buffer_size() > 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin, unless there are too many already: then it is told so, or just closed."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=self._limits.write_high_water)
        if self._is_encrypted:  # it was counted when it was accepted
            self._server.connections.add(self)
        elif self._server.excess() >= REFUSED_MAX:
            self._transport.abort()
        elif not self._server.enter(self):
            self._fail(RequestError(503, "too many connections", reason="connections", closes=True))

    def connection_lost(self, exc: Exception | None) -> None:
        """Withdraw whatever nobody waits for any more."""
        self._incoming.reading = ParserState.NO_MORE
        self._incoming.let_go()
        self._forget_waiting()
        self._unwritten.clear()
        self._release_unread()
        current, self._current = self._current, None
        if current is not None:
            current.abandon()
        self._server.leave(self)

    def eof_received(self) -> bool:
        """The client has closed its side: it may still listen, so what it has asked is answered.

        What it has begun to ask is not: that will never be whole. Over TLS there is no such thing
        as closing one side. The transport closes itself unless this returns True.
        """
        self._incoming.reading = ParserState.NO_MORE
        self._incoming.let_go()
        last = self._waiting[-1] if self._waiting else self._current
        if last is None or self._is_encrypted:
            return False
        last.closes = True
        self._is_half_closed = True
        return True

    def data_received(self, data: bytes) -> None:
        """Read on."""
        if self._incoming.reading == ParserState.NO_MORE:
            return
        try:
            self._incoming.feed(data)
        except RequestError as refused:
            self._fail(refused)
        else:
            if self.owes_continue and self._current is None:
                self._tell_to_go_on()

    def pause_writing(self) -> None:
        """The client reads too slowly: it is not listened to, and the sweep watches it."""
        self._is_paused = True
        if self._unwritable_since_s is None:
            self._unwritable_since_s = self._server.clock_s
        self._listen()

    def resume_writing(self) -> None:
        """It has caught up with what was written; perhaps there is more."""
        self._is_paused = False
        self._write_on()
        if self._is_paused:
            return
        self._unwritable_since_s = None
        self._release_unread()
        if self._is_ending:
            self._end()
            return
        self._pump()
        self._listen()

    def arrived(self, exchange: HttpRequest) -> None:
        """Put a request in line; it is begun at once if there is nobody before it."""
        waiting = self._waiting
        if len(waiting) >= self._limits.pipelined_max:
            # More than was agreed came in one piece. HTTP lets a server close after any answer.
            waiting[-1].closes = True
            self._incoming.reading = ParserState.NO_MORE
            exchange.abandon()
            return
        waiting.append(exchange)
        self._pump()
        if waiting:
            self._listen()

    def send(
        self,
        head: bytes,
        body: Sequence[bytes | memoryview],
        exchange: HttpRequest,
        hold: Hold | None,
    ) -> None:
        """Send the answer of the exchange whose turn it is, and go on to the next.

        `hold` is what a large answer takes of the budget, until it has been read.
        """
        if exchange is not self._current or self._transport.is_closing():
            if hold is not None:
                hold.release()  # its client has gone
            if exchange is self._current:
                self._current = None
            return
        self._current = None
        self._since_s = self._server.clock_s
        self._transport.write(head)
        if body:
            self._unwritten.extend(body)
            self._write_on()
        if hold is not None:
            if self._unwritable_since_s is None:
                hold.release()
            else:
                self._unread.append(hold)
        if exchange.closes:
            self._end()
        elif self._waiting:
            self._pump()
            self._listen()
        elif self.owes_continue:
            self._tell_to_go_on()

    def close(self) -> None:
        """Close it once its answers have been sent."""
        if self._unwritten:
            self._is_ending = True
        else:
            self._transport.close()

    def give_up(self, refused: RequestError) -> None:
        """Answer whatever is under way with a refusal, and close.

        Where nothing is, a request may be on its way all the same. The client gets the end of the
        stream, and not a reset, which could also take the answer before from it.
        """
        if self.is_idle:
            self._is_cut = True
            self._since_s = self._server.clock_s
            self._end()
        elif self._current is None:
            self._fail(refused)
        else:
            self._current.give_up(refused)

    def sweep(self, now_s: float) -> None:
        """See whether the client takes too long over something."""
        limits, reading = self._limits, self._incoming.reading
        if self._is_half_closed and self._is_reset():
            self._transport.abort()
        elif self._unwritable_since_s is not None:
            if now_s - self._unwritable_since_s > limits.write_timeout_s:
                self._transport.abort()
        elif reading == ParserState.NO_MORE:
            if self._current is None and now_s - self._since_s > limits.linger_s:
                self._transport.abort()
        elif reading == ParserState.NOTHING:
            if self._current is None and now_s - self._since_s > limits.idle_timeout_s:
                self._transport.close()
        elif not self._is_deaf and not self.owes_continue:
            is_head = reading == ParserState.HEAD
            timeout_s = limits.header_timeout_s if is_head else self._incoming.body_seconds_max()
            if now_s - self._incoming.since_s > timeout_s:
                part = "headers" if is_head else "body"
                self._fail(RequestError(408, f"the {part} took too long to come", closes=True))

    def _is_reset(self) -> bool:
        """Whether the client has gone altogether. Nothing is read any more that would say so."""
        try:
            connection = self._transport.get_extra_info("socket")
            return bool(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CLOSED)
        except OSError:
            return True

    def _pump(self) -> None:
        """Begin whatever is next, as long as answers come at once."""
        if self._is_pumping:
            return
        self._is_pumping = True
        waiting = self._waiting
        try:
            while waiting and self._current is None and self._unwritable_since_s is None:
                self._current = exchange = waiting.popleft()
                exchange.handle()
        finally:
            self._is_pumping = False

    def _fail(self, refused: RequestError) -> None:
        """Refuse what is coming in, when its turn comes; nothing is read after it."""
        if self._incoming.reading != ParserState.NO_MORE:
            self._is_cut = True
            self.owes_continue = False
            self._waiting.append(self._incoming.last(refused))
            self._pump()

    def _write_on(self) -> None:
        """Write more of large answers, a piece at a time: to encrypt all at once takes long."""
        unwritten = self._unwritten
        if self._transport.is_closing():
            unwritten.clear()
        while unwritten and not self._is_paused:
            part = unwritten[0]
            if len(part) > _PIECE_BYTES:
                part = memoryview(part)
                unwritten[0] = part[_PIECE_BYTES:]
                part = part[:_PIECE_BYTES]
            else:
                unwritten.popleft()
            self._transport.write(part)

    def _end(self) -> None:
        """Close after the answer that was the last."""
        self._forget_waiting()
        self._incoming.reading = ParserState.NO_MORE
        self._is_ending = bool(self._unwritten)
        if self._is_ending:
            return
        if self._is_cut and self._transport.can_write_eof():
            self._transport.write_eof()  # the sweep closes it later
        else:
            self._transport.close()

    def _forget_waiting(self) -> None:
        while self._waiting:
            self._waiting.pop().abandon()

    def _release_unread(self) -> None:
        while self._unread:
            self._unread.pop().release()

    def _listen(self) -> None:
        """Read from the client, or not: not while it does not read, nor while a crowd waits."""
        # A crowd is let pass before more are heard, who may be as many again.
        crowd = 1 if self._is_deaf else self._limits.pipelined_max
        is_deaf = self._unwritable_since_s is not None or len(self._waiting) >= crowd
        if is_deaf == self._is_deaf or self._transport.is_closing():
            return
        self._is_deaf = is_deaf
        if is_deaf:
            self._transport.pause_reading()
        else:
            self._incoming.since_s = self._server.clock_s  # the wait was ours
            self._transport.resume_reading()

    def _tell_to_go_on(self) -> None:
        self.owes_continue = False
        if self._incoming.reading == ParserState.BODY:
            self._incoming.since_s = self._server.clock_s  # the wait was ours
            self._transport.write(CONTINUE)
