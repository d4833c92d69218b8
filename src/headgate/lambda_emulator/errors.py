"""Errors of the service, in the shapes that clients of AWS know."""

from __future__ import annotations

import math
from typing import Final, Literal, TypeAlias

import msgspec

from headgate.lambda_emulator.http import Response

ThrottleReason: TypeAlias = Literal[
    "ConcurrentInvocationLimitExceeded",
    "ReservedFunctionConcurrentInvocationLimitExceeded",
    "FunctionInvocationRateLimitExceeded",
    "ReservedFunctionInvocationRateLimitExceeded",
    "CallerRateLimitExceeded",
]

# AWS spells the key of the message in two variants; its own clients read both.
_CAPITAL: Final = frozenset(("ResourceNotFoundException", "ServiceException"))


class ServiceError(Exception):
    """A request that is rejected. No function has run because of it."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.status = status
        self.code = code
        self.message = message

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
