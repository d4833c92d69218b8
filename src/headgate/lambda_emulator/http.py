"""A minimal HTTP/1.1 server for boto3 and for the Lambda runtime.

A response is sent in one write: a runtime that gets headers and body in two packets waits 40 ms for
the second, because its kernel delays the acknowledgement of the first.
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

_PIPELINED_MAX: Final = 64  # queued requests of a connection behind the current one
_HEADERS_MAX: Final = 256
_REQUEST_S_MAX: Final = 60.0  # from the first byte of a request to the last
_MALFORMED: Final = b'{"Type":"User","message":"This is no HTTP request that can be read."}'

Address: TypeAlias = tuple[str, int]  # host and port
Handler: TypeAlias = Callable[["EmulatorRequest", "Reply"], None]
# Checks the head of a request. A response rejects the request: it is sent, the body is discarded
# and the connection is closed.
HeadCheck: TypeAlias = Callable[["EmulatorRequest"], "Response | None"]


@dataclass(frozen=True, slots=True)
class EmulatorRequest:
    """A request. Header names are lower case; repeated headers are joined by commas."""

    method: str
    path: str  # still percent-encoded: an encoded slash is no separator
    query_string: str  # still percent-encoded
    headers: Mapping[str, str]
    peer: Address = ("", 0)
    local: Address = ("", 0)  # local address of the connection
    is_first: bool = True  # first request of its connection
    body: bytes = b""
    is_too_long: bool = False  # the body exceeds the limit and was discarded

    @property
    def parts(self) -> tuple[str, ...]:
        """Segments of the path, percent-decoded."""
        return tuple(unquote(part) for part in self.path.split("/") if part)

    @property
    def query(self) -> Mapping[str, str]:
        """Query parameters; the last value of a repeated one."""
        return dict(parse_qsl(self.query_string, keep_blank_values=True))


@dataclass(frozen=True, slots=True)
class Response:
    """A response: JSON unless a header sets another content type."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)

    def encode(self, *, is_last: bool) -> bytes:
        """Return the bytes to send; `is_last` adds `Connection: close`."""
        lines = [f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}"]
        # Without a content type, the client of awslambdaric crashes with a null pointer.
        headers = {"Content-Type": "application/json", **self.headers}
        headers["X-Content-Type-Options"] = "nosniff"  # no browser may render it as a page
        if self.status != HTTPStatus.NO_CONTENT:
            headers["Content-Length"] = str(len(self.body))
        if is_last:
            headers["Connection"] = "close"
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join((*lines, "", "")).encode("latin-1") + self.body


@final
class Reply:
    """Sends the response to one request, once, at any later time."""

    __slots__ = ("_connection", "_is_keep_alive")

    def __init__(self, connection: _Connection, is_keep_alive: bool) -> None:
        self._connection = connection
        self._is_keep_alive = is_keep_alive

    @property
    def is_open(self) -> bool:
        """Whether the client is still connected."""
        return not self._connection.is_closing

    def send(self, response: Response) -> None:
        """Send the response. Does nothing if the client has disconnected."""
        self._connection.send(response, is_last=not self._is_keep_alive)


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of what clients can make a server hold in memory."""

    head_bytes: int
    body_bytes: int
    connections: int


@final
class EmulatorHttpServer:
    """An HTTP server on one address, which tracks its connections."""

    def __init__(self, handler: Handler, check_head: HeadCheck, limits: HttpLimits) -> None:
        self.handler = handler
        self.check_head = check_head
        self.limits = limits
        self.connections: set[_Connection] = set()
        self._listener: asyncio.Server | None = None

    async def open(self, host: str, port: int) -> list[Address]:
        """Listen, and return the bound addresses; port 0 is any free port. Raises `OSError`."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(lambda: _Connection(self), host, port)
        return [_address(each.getsockname()) for each in self._listener.sockets]

    def close(self) -> None:
        """Stop listening and abort all connections: no client waits for a response in vain."""
        if self._listener is not None:
            self._listener.close()
        for connection in list(self.connections):
            connection.abort()


@final
class _Connection(asyncio.Protocol):
    """One connection. Its requests are handled one after the other."""

    def __init__(self, server: EmulatorHttpServer) -> None:
        self._server = server
        self._transport: asyncio.Transport
        self._parser = httptools.HttpRequestParser(self)
        self._pipelined: deque[tuple[EmulatorRequest, Reply, Response | None]] = deque()
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
        self._early_response: Response | None = None

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
            self._transport.write(Response(400, _MALFORMED).encode(is_last=True))
            self._transport.close()

    def send(self, response: Response, *, is_last: bool) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(response.encode(is_last=is_last))
        self._is_busy = False
        if is_last:
            self._transport.close()
        else:
            self._handle_next()

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        self._url, self._headers, self._body = b"", {}, bytearray()
        self._is_too_long = False
        self._head, self._early_response = None, None
        self._head_bytes = self._header_count = 0
        self._start_timer()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        self._header_count += 1
        if self._header_count > _HEADERS_MAX:
            raise ValueError("a request has too many headers")  # becomes an HttpParserError
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        # Join repeated headers: no two checks may see different values of one header.
        before = self._headers.get(key)
        self._headers[key] = text if before is None else f"{before},{text}"

    def on_headers_complete(self) -> None:
        url = httptools.parse_url(self._url)
        if not self._url.startswith(b"/") or url.path is None:
            raise ValueError("the request target is not a path")
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
        self._early_response = self._server.check_head(self._head)
        if (
            self._early_response is None
            and self._headers.get("expect", "").lower() == "100-continue"
        ):
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        # A body that is too long is read to its end: a client that still sends reads no response.
        self._is_too_long |= len(self._body) + len(body) > self._server.limits.body_bytes
        if not self._is_too_long and self._early_response is None:
            self._body += body

    def on_message_complete(self) -> None:
        self._stop_timer()
        assert self._head is not None, "a request without a head"
        if self._transport.is_closing():  # ignore whatever follows the last request
            return
        reply = Reply(self, self._parser.should_keep_alive() and self._early_response is None)
        request = replace(self._head, body=bytes(self._body), is_too_long=self._is_too_long)
        if len(self._pipelined) == _PIPELINED_MAX:
            self._transport.close()
            return
        self._pipelined.append((request, reply, self._early_response))
        self._handle_next()
        if self._pipelined:  # a client that pipelines has to wait for the pending response
            self._transport.pause_reading()

    def _count(self, head_bytes: int) -> None:
        self._head_bytes += head_bytes
        if self._head_bytes > self._server.limits.head_bytes:
            raise ValueError("the head of a request is too long")  # becomes an HttpParserError

    def _start_timer(self) -> None:
        """Close the connection of a client that does not complete a request in time."""
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(_REQUEST_S_MAX, self._transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _handle_next(self) -> None:
        if self._pipelined and not self._is_busy:
            self._is_busy = True
            request, reply, early_response = self._pipelined.popleft()
            if not self._pipelined:
                self._transport.resume_reading()
            if early_response is not None:
                reply.send(early_response)
            else:
                self._server.handler(request, reply)


def _address(socket_name: tuple[Any, ...]) -> Address:
    """Return host and port, without the flow and scope fields of IPv6."""
    return str(socket_name[0]), int(socket_name[1])
