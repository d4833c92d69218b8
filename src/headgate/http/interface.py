"""What a server brings to its connections: limits, requests, and the errors that end them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, Protocol

BACKLOG: Final = 4_096  # connections waiting to be accepted; the kernel may allow fewer
SHUTDOWN_MESSAGE: Final = "the server shut down before the request was completed"
STATUS_LINES: Final[Mapping[int, bytes]] = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of connections. A client that reaches one gets an error; the server goes on."""

    # Sizes
    body_bytes_max: int = 64 << 20
    header_bytes_max: int = 16 << 10
    headers_max: int = 100
    # Connections
    connections_max: int = 4096
    pipelined_max: int = 64  # requests queued on one connection behind the current one
    write_high_water: int = 1 << 16  # unread bytes of a connection before reading from it pauses
    # Times
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    body_bytes_per_s_min: float = 8192.0  # slowest body, once `header_timeout_s` has passed
    idle_timeout_s: float = 75.0
    write_timeout_s: float = 60.0  # a client that stops reading is disconnected after this time
    linger_s: float = 2.0  # wait between the last response and closing on a client that still sends
    sweep_s: float = 0.25  # period of the sweep that checks all timeouts


class HttpError(Exception):
    """A request that is not served: an HTTP status, and one sentence that says why.

    `reason` is a code for programs. `closes` says that the connection cannot be used for another
    request.
    """

    def __init__(
        self, status: int, message: str, *, reason: str = "", closes: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.reason = reason
        self.closes = closes


class HeldMemory(Protocol):
    """Memory that is reserved for a response."""

    def release(self) -> None:
        """Give the memory back. A second call does nothing."""


class IncomingRequest(Protocol):
    """One request as its connection sees it. A server makes it when the head has arrived."""

    body: bytes | bytearray | memoryview
    body_bytes: int  # received, whether or not they were kept
    keeps_body: bool  # otherwise the body is read and discarded
    closes: bool  # the connection is closed after the response
    error: HttpError | None  # known before the whole body has arrived

    def admit(self, body_bytes: int) -> None:
        """Reserve what the request needs, before its body is read.

        `body_bytes` is the announced size; 0 for a chunked body. Raises `HttpError`.
        """

    def reserve_more(self, size: int, total: int) -> HttpError | None:
        """Reserve memory for more of a chunked body, now `total` bytes; return the error if any."""

    def reject_body(self, error: HttpError) -> None:
        """Respond with `error` once the body has arrived, and discard the rest of the body."""

    def handle(self) -> None:
        """Respond, now or later. Never raises."""

    def cancel(self) -> None:
        """The client has disconnected: send nothing."""

    def abort(self, error: HttpError) -> None:
        """Respond with `error` at once: the server shuts down."""
