"""Requests, responses and errors of the emulator, and its HTTP server.

Clients are boto3 and the Lambda runtime. Errors have the shapes that clients of AWS know.

A response is sent in one write: a runtime that gets headers and body in two packets waits 40 ms for
the second, because its kernel delays the acknowledgement of the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias, final
from urllib.parse import parse_qsl, unquote

import httptools
import msgspec

from headgate.http.connection import HttpConnection
from headgate.http.interface import STATUS_LINES, HttpError, HttpLimits
from headgate.http.server import HttpServer

ThrottleReason: TypeAlias = Literal[
    "ConcurrentInvocationLimitExceeded",
    "ReservedFunctionConcurrentInvocationLimitExceeded",
    "FunctionInvocationRateLimitExceeded",
    "ReservedFunctionInvocationRateLimitExceeded",
    "CallerRateLimitExceeded",
]

# AWS spells the key of the message in two variants; its own clients read both.
_CAPITAL: Final = frozenset(("ResourceNotFoundException", "ServiceException"))
# A body that is too long is read to its end and discarded, up to this size: a client that still
# sends reads no response.
_DISCARDED_BYTES_MAX: Final = 1 << 30

Address: TypeAlias = tuple[str, int]  # host and port
Handler: TypeAlias = Callable[["EmulatorRequest", "Reply"], None]
# Checks the head of a request. Raises `HttpError` to reject it: its body is discarded, and the
# connection is closed.
HeadCheck: TypeAlias = Callable[["EmulatorRequest", HttpConnection], None]


@dataclass(frozen=True, slots=True)
class Response:
    """A response: JSON unless a header sets another content type."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)

    def encode(self, *, is_last: bool) -> bytes:
        """Return the bytes to send; `is_last` adds `Connection: close`."""
        # Without a content type, the client of awslambdaric crashes with a null pointer.
        headers = {"Content-Type": "application/json", **self.headers}
        headers["X-Content-Type-Options"] = "nosniff"  # no browser may render it as a page
        if self.status != 204:
            headers["Content-Length"] = str(len(self.body))
        if is_last:
            headers["Connection"] = "close"
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return STATUS_LINES[self.status] + lines.encode("latin-1") + b"\r\n" + self.body


class ServiceError(HttpError):
    """A request that is rejected. No function has run because of it."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(status, message)
        self.code = code

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"

    def response(self) -> Response:
        """Return the HTTP response for this error."""
        key = "Message" if self.code in _CAPITAL else "message"
        kind = "User" if self.status < 500 else "Service"
        return self._response({"Type": kind, key: self.message}, {})

    def _response(self, body: dict[str, str], headers: dict[str, str]) -> Response:
        return Response(
            self.status, msgspec.json.encode(body), {"x-amzn-ErrorType": self.code, **headers}
        )


class Throttled(ServiceError):
    """Concurrency or rate limit exceeded: the client may retry after `wait_s`."""

    def __init__(self, reason: ThrottleReason, *, wait_s: float = 1.0) -> None:
        super().__init__(429, "TooManyRequestsException", "Rate Exceeded.")
        self.reason = reason
        self.wait_s = wait_s

    def response(self) -> Response:
        """Return the HTTP response, with the reason and `Retry-After`."""
        body = {"Reason": self.reason, "Type": "User", "message": self.message}
        # Whole seconds, at least 1: with 0 a client would retry at once.
        return self._response(body, {"Retry-After": str(max(1, math.ceil(self.wait_s)))})


def not_found(problem: str) -> ServiceError:
    """Return the error for a resource that does not exist."""
    return ServiceError(404, "ResourceNotFoundException", problem)


def conflict(problem: str) -> ServiceError:
    """Return the error for a resource that exists already, or is in use."""
    return ServiceError(409, "ResourceConflictException", problem)


def invalid(problem: str) -> ServiceError:
    """Return the error for an invalid parameter."""
    return ServiceError(400, "InvalidParameterValueException", problem)


@dataclass(frozen=True, slots=True)
class EmulatorRequest:
    """A request. Header names are lower case; repeated headers are joined by commas."""

    method: str
    path: str  # still percent-encoded: an encoded slash does not separate
    query_string: str  # still percent-encoded
    headers: Mapping[str, str]
    local: Address = ("", 0)  # local address of the connection
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


@final
@dataclass(slots=True, eq=False)
class Reply:
    """What a connection keeps of a request, and what sends its response, once, at any time."""

    _server: EmulatorServer
    _connection: HttpConnection
    head: EmulatorRequest | None = None  # None: it could not be read
    body: bytes | bytearray | memoryview = b""
    body_bytes: int = 0
    keeps_body: bool = False
    closes: bool = False
    error: HttpError | None = None
    _is_too_long: bool = False

    @property
    def is_open(self) -> bool:
        """Whether the client is still connected."""
        return self._connection.is_open

    def send(self, response: Response) -> None:
        """Send the response. Does nothing if the client has disconnected."""
        self._connection.send(response.encode(is_last=self.closes), (), self, None)

    def admit(self, body_bytes: int) -> None:
        """Decide whether the body is kept."""
        self._is_too_long = body_bytes > self._server.body_bytes_max
        self.keeps_body = not self._is_too_long

    def reserve_more(self, size: int, total: int) -> None:
        """Stop keeping a body that has become too long."""
        self.admit(total)

    def reject_body(self, error: HttpError) -> None:
        """Respond with `error` instead of handling the request."""
        self.error = error
        self.keeps_body = False

    def handle(self) -> None:
        """Have the request handled, or respond with the error that is known already."""
        if self.error is not None:
            self.abort(self.error)
            return
        assert self.head is not None, "a request without a head"
        body = b"" if self._is_too_long else bytes(self.body)
        self.body = b""
        request = replace(self.head, body=body, is_too_long=self._is_too_long)
        self._server.handler(request, self)

    def cancel(self) -> None:
        """The client has disconnected. As on AWS, a function that runs goes on."""

    def abort(self, error: HttpError) -> None:
        """Respond with an error at once."""
        self.closes |= error.closes
        if not isinstance(error, ServiceError):  # the connection's own
            code = "ServiceException" if error.status >= 500 else "BadRequestException"
            error = ServiceError(error.status, code, error.message)
        self.send(error.response())


@final
class EmulatorServer(HttpServer):
    """An HTTP server on one address."""

    def __init__(self, handler: Handler, check_head: HeadCheck, limits: HttpLimits) -> None:
        super().__init__(replace(limits, body_bytes_max=_DISCARDED_BYTES_MAX), self._begin)
        self.handler = handler
        self.body_bytes_max = limits.body_bytes_max
        self._check_head = check_head

    async def open(self, host: str, port: int) -> list[Address]:
        """Listen, and return the bound addresses; port 0 is any free port. Raises `OSError`."""
        listener = await self.listen(host=host, port=port)
        assert listener is not None
        return [each.getsockname()[:2] for each in listener.sockets]

    def _begin(
        self, connection: HttpConnection, method: bytes, target: bytes, headers: dict[bytes, bytes]
    ) -> Reply:
        reply = Reply(self, connection)
        if not method:
            return reply
        try:
            reply.head = _head(connection, method, target, headers)
            self._check_head(reply.head, connection)
        except HttpError as problem:
            problem.closes = True
            reply.error = problem.with_traceback(None)  # a traceback and its frame would be a cycle
        return reply


def _head(
    connection: HttpConnection, method: bytes, target: bytes, headers: dict[bytes, bytes]
) -> EmulatorRequest:
    try:
        url = httptools.parse_url(target)
    except httptools.HttpParserError:
        url = None
    if url is None or url.path is None or not target.startswith(b"/"):
        raise HttpError(400, "the request target is not a path")
    return EmulatorRequest(
        method=method.decode("latin-1"),
        path=url.path.decode("latin-1"),
        query_string=(url.query or b"").decode("latin-1"),
        headers={key.decode("latin-1"): text.decode("latin-1") for key, text in headers.items()},
        local=connection.address("sockname"),
    )
