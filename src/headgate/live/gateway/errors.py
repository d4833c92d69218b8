"""A refusal: a request that is not served, the status it gets, and one sentence that says why."""

from __future__ import annotations


class RequestError(Exception):
    """Raised wherever a request turns out to be one that is not served.

    `status` is HTTP's; front ends of other protocols map it. `reason` is a word for programs.
    `closes` says that nothing sensible can follow on the same connection.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        reason: str = "",
        retry_ns: int = 0,
        predicted_ns: int = 0,
        deadline_ns: int = 0,
        allow: str = "",
        closes: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.reason = reason
        self.retry_ns = retry_ns  # worth trying again after so long; 0: it is not, or who knows
        self.predicted_ns = predicted_ns  # how long it would have taken
        self.deadline_ns = deadline_ns  # how long it might have taken
        self.allow = allow  # the methods that would do
        self.closes = closes
