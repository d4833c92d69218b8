"""Refusals as gRPC has them: a status, one sentence, and trailing metadata for programs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from math import ceil
from typing import Final, final

from grpc import StatusCode

from headgate.live.call import Call, FrontEndApi
from headgate.live.gateway.errors import RequestError
from headgate.live.gateway.http.responses import expired
from headgate.live.gateway.memory_budget import Hold

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


def status_of(refused: RequestError) -> StatusCode:
    """The status that says the same."""
    return _CODES.get(refused.status) or _CODES[400 if refused.status < 500 else 500]


def detail_of(refused: RequestError) -> str:
    """The sentence, of bounded length: a function may have said anything."""
    return refused.message[:DETAIL_CHARACTERS_MAX]


def trailers_of(refused: RequestError) -> tuple[tuple[str, str], ...]:
    """What the HTTP front end says in headers and JSON.

    >>> trailers_of(RequestError(429, "busy", reason="overloaded", retry_ns=1_500_000))[:2]
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


# A call that an RPC waits for.


_LOG: Final = logging.getLogger(__name__)


@final
class Pending:
    """Turns the callback of a call into something to wait for."""

    def __init__(self, respond: Callable[[Call], bytes]) -> None:
        self.is_expired = False  # answered at its deadline; the runtime may have the call still
        self._is_over = False  # the runtime is done with the call
        self._left: Hold | None = None  # what is held for the call until then
        self._respond = respond
        self._withdraw: Callable[[], None] | None = None
        # A refusal is a result here: an exception that nobody fetches would be complained about.
        self._answer: asyncio.Future[bytes | RequestError] = (
            asyncio.get_running_loop().create_future()
        )

    def answered(self, call: Call) -> None:
        """For the runtime to call.

        The response is made at once, for the outputs may lie in memory that is lent until then.
        """
        self._is_over = True
        if self._answer.done():
            if self._left is not None:
                self._left.release()
            return
        try:
            self._answer.set_result(self._respond(call))
        except RequestError as refused:
            self._answer.set_result(refused)
        except Exception:
            _LOG.exception("an answer broke the gateway")
            self._answer.set_result(
                RequestError(500, "the gateway made a mistake", reason="internal")
            )

    async def wait(self, serving: FrontEndApi, call: Call) -> bytes:
        """The response. Raises `RequestError`, also at the deadline of a call that gives up then.

        When the RPC is cancelled, so is the call; but not at its deadline, where its end is that it
        was late and not that it was unwanted: the runtime finds that out by itself.
        """
        timer = None
        self._withdraw = lambda: serving.cancel(call)
        if call.is_hard:
            left_s = (call.deadline_ns - serving.now_ns()) * 1e-9
            timer = asyncio.get_running_loop().call_later(left_s, self._expire, call)
        try:
            answer = await self._answer
        except asyncio.CancelledError:
            is_late = call.is_hard and serving.now_ns() >= call.deadline_ns
            if self._answer.cancelled() and not is_late:
                serving.cancel(call)
            raise
        finally:
            self._withdraw = None
            if timer is not None:
                timer.cancel()
        if isinstance(answer, RequestError):
            raise answer
        return answer

    def leave(self, hold: Hold) -> None:
        """Hold this until the runtime is done with the call, which nobody waits for any more."""
        if self._is_over:
            hold.release()
        else:
            self._left = hold

    def give_up(self, refused: RequestError) -> None:
        """Answer now, for the call will not be."""
        if not self._answer.done():
            if self._withdraw is not None:
                self._withdraw()
            self._answer.set_result(refused)

    def _expire(self, call: Call) -> None:
        if not self._answer.done():
            self.is_expired = True
            self._answer.set_result(expired(call))
