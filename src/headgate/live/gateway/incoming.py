"""Incoming: from the bytes of a connection to exchanges, within limits.

llhttp (through `httptools`) reads the bytes and is strict about what smuggles requests past
proxies: lengths that contradict each other, folded headers, odd chunks. What it leaves open is
closed here: how much there may be of everything, before it is kept.

A request that is refused before its body has come (an unknown path, no key, a limit of its tenant,
no memory) has its body read and thrown away. One after which nothing can be understood is the last:
`Refused` with `closes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from headgate.live.arena import room_for
from headgate.live.gateway.exchange import Exchange, no_memory
from headgate.live.gateway.keys import Tenant
from headgate.live.gateway.oip import too_much_text
from headgate.live.gateway.refusal import Refused
from headgate.live.gateway.routes import Route

if TYPE_CHECKING:
    from headgate.live.gateway.protocol import Connection
    from headgate.live.gateway.server import HttpServer

_LARGE_BYTES: Final = 1 << 20  # of a body
_CHUNK_BYTES_MIN: Final = 64  # on average, once there are more chunks than
_CHUNKS_FREE: Final = 1024


class Reading:
    """What is being read. Small integers rather than an `Enum`: they are on the hot path."""

    NOTHING: Final = 0  # between requests
    HEAD: Final = 1
    BODY: Final = 2
    NO_MORE: Final = 3  # the last request has come: whatever follows is thrown away


@final
class Incoming:
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

    def __init__(self, connection: Connection, server: HttpServer) -> None:
        self.reading: int = Reading.NOTHING
        self.since_s = server.clock_s  # when what is being read began
        self._connection = connection
        self._server = server
        self._limits = server.config
        self._parser = HttpRequestParser(self)
        self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._head_bytes = 0
        self._exchange: Exchange | None = None  # whose body is being read
        self._announced_bytes = 0  # of the body
        self._body: bytes | bytearray | memoryview = b""
        self._body_bytes = 0  # that have come
        self._chunks = 0  # that these came in
        self._plain_left = 0  # bytes of a body that the parser does not see
        self._unended_bytes = 0  # read since anything came of it; -1: something has just begun

    def feed(self, data: bytes) -> None:
        """Read on: whole requests go to the connection. Raises `Refused`, after which it ends."""
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
        if self.reading == Reading.HEAD or self.reading == Reading.BODY:
            self._count_unended(len(data))

    def body_seconds_max(self) -> float:
        """How long the body may take, which depends on how much of it has come.

        Whoever has announced a body has memory put aside for it, and must send it.
        """
        limits = self._limits
        earned_s = self._body_bytes / limits.body_bytes_per_s_min
        return min(limits.body_timeout_s, limits.header_timeout_s + earned_s)

    def last(self, refused: Refused) -> Exchange:
        """The exchange to end with: the one that was coming in, or one for what was none."""
        self.reading = Reading.NO_MORE
        exchange, self._exchange = self._exchange, None
        self.let_go()
        if exchange is None:
            exchange = Exchange(self._connection, self._server, None, None, {}, False)
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
        if self.reading == Reading.NO_MORE:
            raise Refused(400, "a request after the last", closes=True)
        self.reading = Reading.HEAD
        self.since_s = self._server.clock_s
        self._head_bytes = 0
        self._chunks = 0
        self._unended_bytes = -1

    def on_url(self, url: bytes) -> None:
        """Keep the target, which may come in pieces."""
        self._target += url
        if len(self._target) > self._limits.header_bytes_max:
            raise Refused(414, "the target is too long", closes=True)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header. Those that are repeated are one list, as HTTP has it."""
        headers = self._headers
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > self._limits.header_bytes_max:
            raise _too_many_headers()
        if self.reading == Reading.BODY:
            return  # a trailer, which could overrule what has been looked at
        name, value = name.lower(), value.strip()  # the parser leaves the space that follows
        if name in headers:
            if name in (b"content-length", b"transfer-encoding", b"host", b"authorization"):
                raise Refused(400, f"{name.decode()} is given twice", closes=True)
            value = b"%b, %b" % (headers[name], value)
        headers[name] = value
        if len(headers) > self._limits.headers_max:
            raise _too_many_headers()

    def on_headers_complete(self) -> None:
        """Decide whether the body is wanted."""
        parser, server = self._parser, self._server
        headers, target = self._headers, self._target
        self._headers, self._target = {}, b""
        self.reading = Reading.BODY
        self.since_s = server.clock_s
        method = parser.get_method()
        refused: Refused | None = None
        route: Route | None = None
        tenant: Tenant | None = None
        if b"host" not in headers and parser.get_http_version() == "1.1":
            raise Refused(400, "there is no Host", closes=True)
        try:
            route = server.router.find(method, target)
            is_open = route.rule.is_open
            tenant = server.keys.anyone if is_open else server.keys.tenant(headers)
        except Refused as error:
            refused = error.with_traceback(None)  # which knows this frame, and that knows it
        exchange = Exchange(self._connection, server, route, tenant, headers, method == b"HEAD")
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
            except Refused as error:
                refused = error.with_traceback(None)
        exchange.refused = refused
        if b"expect" in headers:
            self._expect(headers[b"expect"], refused)

    def on_chunk_header(self) -> None:
        """Bound what chunks cost: each takes longer than the bytes that it carries."""
        before, self._chunks = self._chunks, self._chunks + 1
        if before > _CHUNKS_FREE and self._body_bytes < before * _CHUNK_BYTES_MIN:
            raise Refused(
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
            self._body = room_for(self._announced_bytes)
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
                raise Refused(400, "no upgrade is offered for chunks", closes=True)
            self._plain_left = int(exchange.headers.get(b"content-length", b"0"))
        if not self._plain_left:
            self._complete(exchange, closes=not self._parser.should_keep_alive())

    def _turn_down(self, exchange: Exchange, refused: Refused) -> None:
        exchange.turn_down(refused)
        self._body = b""

    def _complete(self, exchange: Exchange, *, closes: bool) -> None:
        exchange.body = self._body
        exchange.body_bytes = self._body_bytes
        exchange.closes = closes
        self.reading = Reading.NO_MORE if closes else Reading.NOTHING
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
                raise Refused(400, "the length of the body is ambiguous", closes=True)
            if self._parser.get_http_version() != "1.1":
                raise Refused(400, "chunks are not part of HTTP/1.0", closes=True)
            return 0
        size = int(headers[b"content-length"])
        if size > self._limits.body_bytes_max:
            raise self._too_large()
        return size

    def _expect(self, expected: bytes, refused: Refused | None) -> None:
        if expected.lower() != b"100-continue":
            raise Refused(417, "only 100-continue can be expected", closes=True)
        if refused is not None:
            refused.closes = True
            raise refused  # before the client has sent what nobody wants
        self._connection.owes_continue = True

    def _too_large(self) -> Refused:
        return Refused(
            413,
            f"the body is larger than {self._limits.body_bytes_max} bytes",
            reason="too_large",
            closes=True,
        )


def _refused(problem: HttpParserError) -> Refused:
    """Our own reason for stopping the parser, or the parser's."""
    own = problem.__context__
    if isinstance(own, Refused):
        return own
    if own is not None:
        raise own  # a defect
    return Refused(400, f"this is not HTTP: {problem}", reason="malformed", closes=True)


def _too_many_headers() -> Refused:
    return Refused(431, "there are too many headers", reason="too_large", closes=True)
