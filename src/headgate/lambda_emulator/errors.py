"""Refusals, in the shapes that clients of AWS know."""

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

# AWS spells the key of the text in two ways; its own clients read both.
_CAPITAL: Final = frozenset(("ResourceNotFoundException", "ServiceException"))


class ServiceError(Exception):
    """A request that is refused; nothing has run because of it."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.status = status
        self.code = code
        self.message = message

    def response(self) -> Response:
        """The refusal as it is sent."""
        key = "Message" if self.code in _CAPITAL else "message"
        kind = "User" if self.status < 500 else "Service"
        return self._response({"Type": kind, key: self.message}, {})

    def _response(self, body: dict[str, str], headers: dict[str, str]) -> Response:
        return Response(
            self.status, msgspec.json.encode(body), {"x-amzn-ErrorType": self.code, **headers}
        )


class Throttled(ServiceError):
    """Too much at once, or too fast: it may be tried again after a while."""

    def __init__(self, reason: ThrottleReason, *, wait_s: float = 1.0) -> None:
        super().__init__(429, "TooManyRequestsException", "Rate Exceeded.")
        self.reason = reason
        self.wait_s = wait_s

    def response(self) -> Response:
        """The refusal as it is sent: with the reason, and with how long to wait."""
        body = {"Reason": self.reason, "Type": "User", "message": self.message}
        # Whole seconds and never none: a client that waits 0 s would come back at once.
        return self._response(body, {"Retry-After": str(max(1, math.ceil(self.wait_s)))})


def not_found(what: str) -> ServiceError:
    """There is no such thing."""
    return ServiceError(404, "ResourceNotFoundException", what)


def conflict(problem: str) -> ServiceError:
    """There is such a thing already, or it is in use."""
    return ServiceError(409, "ResourceConflictException", problem)


def invalid(problem: str) -> ServiceError:
    """A parameter that cannot be."""
    return ServiceError(400, "InvalidParameterValueException", problem)


def too_large(problem: str) -> ServiceError:
    """A payload beyond the limit."""
    return ServiceError(413, "RequestTooLargeException", problem)
