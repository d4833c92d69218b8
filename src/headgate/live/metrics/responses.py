"""Counts every answer of a gateway by protocol, code and reason, whatever it was an answer to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, final

from headgate.core.outcome import Rejection

HTTP: Final = "http"
GRPC: Final = "grpc"

# The values that the label `reason` can have. Whatever else is said is `other`: a function, a
# policy or a client must not be able to make new time series.
REASONS: Final = frozenset(
    {
        Rejection.OVERLOADED,
        Rejection.UNFAIR,
        Rejection.INFEASIBLE,
        Rejection.UNAVAILABLE,
        Rejection.FULL,
        Rejection.LOAD_FAILED,
        "answer_too_large",
        "answers",
        "client_gone",
        "codec_busy",
        "codec_lost",
        "codec_timeout",
        "concurrency_limited",
        "connections",
        "deadline_exceeded",
        "draining",
        "failed",
        "function_failed",
        "function_refused",
        "internal",
        "invalid",
        "malformed",
        "memory",
        "method_not_allowed",
        "no_message",
        "not_acceptable",
        "not_ready",
        "policy_fault",
        "rate_limited",
        "refused",
        "slow",
        "starting",
        "too_large",
        "too_many_rpcs",
        "unauthenticated",
        "unknown_method",
        "unknown_model",
        "unknown_path",
        "unsupported",
        "worker_lost",
    }
)
OTHER: Final = "other"

# Refusals that give no reason have one all the same.
_BY_STATUS: Final[Mapping[int, str]] = {
    400: "invalid",
    401: "unauthenticated",
    404: "unknown_path",
    405: "method_not_allowed",
    406: "not_acceptable",
    408: "slow",
    413: "too_large",
    414: "too_large",
    415: "unsupported",
    417: "unsupported",
    431: "too_large",
    500: "internal",
    503: "not_ready",
}


@final
class Responses:
    """How many answers there were of each kind, since the gateway began.

    >>> responses = Responses()
    >>> responses.count(HTTP, 405, "")
    >>> responses.count(GRPC, "NOT_FOUND", "unknown_model")
    >>> sorted(responses.counted())[1]
    (('http', '200', ''), 0)
    >>> sorted(responses.counted())[2]
    (('http', '405', 'method_not_allowed'), 1)
    """

    def __init__(self) -> None:
        # A rate needs a beginning, so the usual answer is there from the start.
        self._counts: dict[tuple[str, int | str, str], int] = {(HTTP, 200, ""): 0}

    def count(self, protocol: str, code: int | str, reason: str) -> None:
        """Count one answer: an HTTP status or the name of a gRPC status, and why it is no success.

        An HTTP status is taken for one that this server knows: their number bounds the label.
        """
        key = (protocol, code, reason)
        if key in self._counts:
            self._counts[key] += 1
            return
        if not reason and isinstance(code, int):
            reason = _BY_STATUS.get(code, OTHER if code >= 400 else "")
        elif reason and reason not in REASONS:
            reason = OTHER
        key = (protocol, code, reason)
        self._counts[key] = self._counts.get(key, 0) + 1

    def counted(self) -> Iterator[tuple[tuple[str, str, str], int]]:
        """Every protocol, code and reason that there was, and how often."""
        for (protocol, code, reason), count in self._counts.items():
            yield (protocol, str(code), reason), count
