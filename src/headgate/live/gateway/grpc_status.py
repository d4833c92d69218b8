"""Refusals as gRPC has them: a status, one sentence, and trailing metadata for programs."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Final

from grpc import StatusCode

from headgate.live.gateway.refusal import Refused

DETAIL_CHARACTERS_MAX: Final = 1000  # peers take some 8 KiB of metadata in all

# By HTTP's status. What is too large is never worth a retry, so it is not "exhausted".
_CODES: Final[Mapping[int, StatusCode]] = {
    400: StatusCode.INVALID_ARGUMENT,
    401: StatusCode.UNAUTHENTICATED,
    403: StatusCode.PERMISSION_DENIED,
    404: StatusCode.NOT_FOUND,
    408: StatusCode.DEADLINE_EXCEEDED,
    413: StatusCode.INVALID_ARGUMENT,
    422: StatusCode.FAILED_PRECONDITION,
    429: StatusCode.RESOURCE_EXHAUSTED,
    499: StatusCode.CANCELLED,
    500: StatusCode["INTERNAL"],
    503: StatusCode.UNAVAILABLE,
    504: StatusCode.DEADLINE_EXCEEDED,
}


def status_of(refused: Refused) -> StatusCode:
    """The status that says the same."""
    return _CODES.get(refused.status) or _CODES[400 if refused.status < 500 else 500]


def detail_of(refused: Refused) -> str:
    """The sentence, of bounded length: a function may have said anything."""
    return refused.message[:DETAIL_CHARACTERS_MAX]


def trailers_of(refused: Refused) -> tuple[tuple[str, str], ...]:
    """What the HTTP front end says in headers and JSON.

    >>> trailers_of(Refused(429, "busy", reason="overloaded", retry_ns=1_500_000))[:2]
    (('headgate-reason', 'overloaded'), ('retry-after-ms', '2'))
    """
    made = []
    if refused.reason:
        made.append(("headgate-reason", printable(refused.reason)))
    if refused.retry_ns:
        retry_ms = str(ceil(refused.retry_ns / 1_000_000))
        # The second is what gRPC's own retries listen to.
        made += [("retry-after-ms", retry_ms), ("grpc-retry-pushback-ms", retry_ms)]
    for name, duration_ns in (
        ("headgate-predicted-ms", refused.predicted_ns),
        ("headgate-deadline-ms", refused.deadline_ns),
    ):
        if duration_ns:
            made.append((name, f"{duration_ns * 1e-6:.3f}"))
    return tuple(made)


def printable(text: str) -> str:
    """Metadata is printable ASCII, and gRPC breaks the call over anything else."""
    return "".join(c if " " <= c <= "~" else "?" for c in text[:200]).strip()
