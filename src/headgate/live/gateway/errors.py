"""`RequestError`: a request that is not served, with its status and one sentence that says why.

The errors that several modules raise are made here, so that clients read the same sentence
whichever front end or stage of a request ran into the problem.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from headgate.core.states import Settlement
from headgate.http.interface import HttpError

OUTCOME_UNKNOWN: Final = "outcome_unknown"  # the reason of a 503 that no retry can change
# Of errors without a reason of their own: body, header, metrics and logs always have one.
_REASONS: Final[Mapping[int, str]] = {
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


class RequestError(HttpError):
    """Raised wherever a request turns out to be one that is not served.

    `status` is an HTTP status; front ends of other protocols map it.

    >>> RequestError(405, "'/metrics' allows only GET, HEAD").reason
    'method_not_allowed'
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        reason: str = "",
        retry_ns: int = 0,
        deadline_ns: int = 0,
        settlement: Settlement | None = None,
        allow: str = "",
        closes: bool = False,
        may_retry: bool = True,
    ) -> None:
        super().__init__(status, message, reason=reason or _REASONS.get(status, ""), closes=closes)
        self.retry_ns = retry_ns  # when to retry; 0: a retry would not help, or nobody can tell
        self.deadline_ns = deadline_ns  # latency that the deadline allowed
        self.settlement = settlement  # of a request that the Scheduler rejected
        self.allow = allow  # methods that the path has, for a 405
        self.may_retry = may_retry  # False: it may have run, and must not run twice

    @property
    def has_retry_time(self) -> bool:
        """Whether the client is told when to retry: also where nobody can tell, but it may help."""
        return self.retry_ns > 0 or (self.status == 503 and self.may_retry)


def memory_exhausted() -> RequestError:
    """The memory budget has no room for the request."""
    return RequestError(503, "the memory budget of the gateway is exhausted", reason="memory")


def too_many_unread() -> RequestError:
    """The memory budget has no room for a response that its client would read slowly."""
    return RequestError(503, "too many responses have not been read by clients", reason="answers")


def draining() -> RequestError:
    """The server accepts no new requests."""
    return RequestError(503, "the server is shutting down", reason="draining")


def internal_error() -> RequestError:
    """A defect of the gateway; the log has the traceback under the request's id."""
    return RequestError(500, "internal error of the gateway", reason="internal")
