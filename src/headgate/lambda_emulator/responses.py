"""Responses of the emulator, and errors in the shapes that clients of AWS know.

A response is sent in one write: a runtime that gets headers and body in two packets waits 40 ms for
the second, because its kernel delays the acknowledgement of the first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import msgspec

from headgate.http.interface import STATUS_LINES, HttpError

ThrottleReason: TypeAlias = Literal[
    "ConcurrentInvocationLimitExceeded",
    "ReservedFunctionConcurrentInvocationLimitExceeded",
    "FunctionInvocationRateLimitExceeded",
    "ReservedFunctionInvocationRateLimitExceeded",
    "CallerRateLimitExceeded",
]

# AWS spells the key of the message in two variants; its own clients read both.
_CAPITAL: Final = frozenset(("ResourceNotFoundException", "ServiceException"))


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


def too_large(problem: str) -> ServiceError:
    """Return the error for a payload beyond the size limit."""
    return ServiceError(413, "RequestTooLargeException", problem)
