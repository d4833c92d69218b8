"""Just enough HTTP/1.1 for boto3 on the one side and a Lambda runtime on the other.

An answer goes out in one write: a runtime that gets headers and body in two packets waits 40 ms
for the second, because its kernel delays the acknowledgement of the first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, Final, TypeAlias, cast, final
from urllib.parse import parse_qsl, unquote

import httptools

_WAITING_MAX: Final = 64  # requests of one client behind the one that is handled
_HEADERS_MAX: Final = 256
_REQUEST_S_MAX: Final = 60.0  # from its first byte to its last
_NO_HTTP: Final = b'{"Type":"User","message":"This is no HTTP request that can be read."}'

Address: TypeAlias = tuple[str, int]  # host and port
Handler: TypeAlias = Callable[["EmulatorRequest", "Reply"], None]
# Looks at the head of a request. What it returns is the answer, which ends the connection, and the
# body is not kept.
Screen: TypeAlias = Callable[["EmulatorRequest"], "Response | None"]


@dataclass(frozen=True, slots=True)
class EmulatorRequest:
    """A request. The names of headers are in small letters, and one that comes twice is joined."""

    method: str
    path: str  # not unquoted: a quoted slash is no separator
    query_string: str  # as it came
    headers: Mapping[str, str]
    peer: Address = ("", 0)
    local: Address = ("", 0)  # our end of the connection
    is_first: bool = True  # of its connection
    body: bytes = b""
    is_too_long: bool = False  # and its body is not there

    @property
    def parts(self) -> tuple[str, ...]:
        """The path between its slashes, unquoted."""
        return tuple(unquote(part) for part in self.path.split("/") if part)

    @property
    def query(self) -> Mapping[str, str]:
        """The parameters; of one that comes several times, the last."""
        return dict(parse_qsl(self.query_string, keep_blank_values=True))


@dataclass(frozen=True, slots=True)
class Response:
    """What is answered: JSON unless a header says otherwise."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)

    def encode(self, *, closes: bool) -> bytes:
        """All of it, as it goes over the wire."""
        lines = [f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}"]
        # Without a content type, the runtime's own client dies of a null pointer.
        headers = {"Content-Type": "application/json", **self.headers}
        headers["X-Content-Type-Options"] = "nosniff"  # no browser may take it for a page
        if self.status != HTTPStatus.NO_CONTENT:
            headers["Content-Length"] = str(len(self.body))
        if closes:
            headers["Connection"] = "close"
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join((*lines, "", "")).encode("latin-1") + self.body


@final
class Reply:
    """Where the answer to one request goes; it may be sent at any time later, once."""

    __slots__ = ("_connection", "_keeps_alive")

    def __init__(self, connection: _Connection, keeps_alive: bool) -> None:
        self._connection = connection
        self._keeps_alive = keeps_alive

    @property
    def is_open(self) -> bool:
        """Whether there is still somebody to answer."""
        return not self._connection.is_closing

    def send(self, response: Response) -> None:
        """Answer. Nothing happens if the client has gone."""
        self._connection.answer(response, closes=not self._keeps_alive)


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What clients can make a server hold."""

    head_bytes: int
    body_bytes: int
    connections: int


@final
class EmulatorHttpServer:
    """Listens on one address, and closes its connections with it."""

    def __init__(self, handler: Handler, screen: Screen, limits: HttpLimits) -> None:
        self.handler = handler
        self.screen = screen
        self.limits = limits
        self.connections: set[_Connection] = set()
        self._listener: asyncio.Server | None = None

    async def open(self, host: str, port: int) -> list[Address]:
        """Begin, and return where; port 0 is any that is free. Raises `OSError`."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(lambda: _Connection(self), host, port)
        return [_address(each.getsockname()) for each in self._listener.sockets]

    def close(self) -> None:
        """End, and leave nobody waiting for an answer that will not come."""
        if self._listener is not None:
            self._listener.close()
        for connection in list(self.connections):
            connection.abort()


@final
class _Connection(asyncio.Protocol):
    """One client; its requests are handled one after the other."""

    def __init__(self, server: EmulatorHttpServer) -> None:
        self._server = server
        self._transport: asyncio.Transport
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[tuple[EmulatorRequest, Reply, Response | None]] = deque()
        self._is_busy = False
        self._url = b""
        self._headers: dict[str, str] = {}
        self._head_bytes = self._header_count = 0
        self._timer: asyncio.TimerHandle | None = None
        self._body = bytearray()
        self._is_too_long = False
        self._peer: Address = ("", 0)
        self._local: Address = ("", 0)
        self._is_new = True
        self._head: EmulatorRequest | None = None
        self._refusal: Response | None = None

    @property
    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if len(self._server.connections) >= self._server.limits.connections:
            self._transport.abort()
            return
        self._peer = _address(transport.get_extra_info("peername"))
        self._local = _address(transport.get_extra_info("sockname"))
        self._server.connections.add(self)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self._stop_timer()

    def abort(self) -> None:
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._transport.write(Response(400, _NO_HTTP).encode(closes=True))
            self._transport.close()

    def answer(self, response: Response, *, closes: bool) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(response.encode(closes=closes))
        self._is_busy = False
        if closes:
            self._transport.close()
        else:
            self._go_on()

    # What the parser calls.

    def on_message_begin(self) -> None:
        self._url, self._headers, self._body = b"", {}, bytearray()
        self._is_too_long = False
        self._head, self._refusal = None, None
        self._head_bytes = self._header_count = 0
        self._start_timer()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        self._header_count += 1
        if self._header_count > _HEADERS_MAX:
            raise ValueError("a request has too many headers")  # the parser makes it its own
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        # Joined: no two of those who look at a header may see different ones of several.
        before = self._headers.get(key)
        self._headers[key] = text if before is None else f"{before},{text}"

    def on_headers_complete(self) -> None:
        url = httptools.parse_url(self._url)
        if not self._url.startswith(b"/") or url.path is None:
            raise ValueError("something instead of a path")
        self._head = EmulatorRequest(
            method=self._parser.get_method().decode("latin-1"),
            path=url.path.decode("latin-1"),
            query_string=(url.query or b"").decode("latin-1"),
            headers=self._headers,
            peer=self._peer,
            local=self._local,
            is_first=self._is_new,
        )
        self._is_new = False
        self._refusal = self._server.screen(self._head)
        if self._refusal is None and self._headers.get("expect", "").lower() == "100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        # What is too long is read to its end, because who is still sending hears no answer.
        self._is_too_long |= len(self._body) + len(body) > self._server.limits.body_bytes
        if not self._is_too_long and self._refusal is None:
            self._body += body

    def on_message_complete(self) -> None:
        self._stop_timer()
        assert self._head is not None, "a request without a head"
        if self._transport.is_closing():  # whatever follows the last request is not looked at
            return
        reply = Reply(self, self._parser.should_keep_alive() and self._refusal is None)
        request = replace(self._head, body=bytes(self._body), is_too_long=self._is_too_long)
        if len(self._waiting) == _WAITING_MAX:
            self._transport.close()
            return
        self._waiting.append((request, reply, self._refusal))
        self._go_on()
        if self._waiting:  # somebody who sends more before the answer has to wait with it
            self._transport.pause_reading()

    def _count(self, head_bytes: int) -> None:
        self._head_bytes += head_bytes
        if self._head_bytes > self._server.limits.head_bytes:
            raise ValueError("the head of a request is too long")  # the parser makes it its own

    def _start_timer(self) -> None:
        """Give up on a client that begins a request and does not end it, or never begins one."""
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(_REQUEST_S_MAX, self._transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _go_on(self) -> None:
        if self._waiting and not self._is_busy:
            self._is_busy = True
            request, reply, refusal = self._waiting.popleft()
            if not self._waiting:
                self._transport.resume_reading()
            if refusal is not None:
                reply.send(refusal)
            else:
                self._server.handler(request, reply)


def _address(socket_name: tuple[Any, ...]) -> Address:
    """A host and a port, without what IPv6 says beside them."""
    return str(socket_name[0]), int(socket_name[1])
