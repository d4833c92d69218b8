"""What one RPC needs: errors as gRPC status and trailers, and a future for its call."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final, final

from grpc import StatusCode

from headgate.live.call import Call, FrontEndApi
from headgate.live.gateway.errors import RequestError, internal_error
from headgate.live.gateway.http.responses import ErrorJson, deadline_exceeded, error_fields
from headgate.live.gateway.inference import DeadlineTimer
from headgate.live.gateway.tenants import Hold

DETAILS_CHARACTERS_MAX: Final = 1000  # peers accept some 8 KiB of metadata in all

_LOG: Final = logging.getLogger(__name__)
# Message, status and request id have places of their own.
_FIRST_TRAILER: Final = ErrorJson.__struct_fields__.index("reason")

# By HTTP status. A request that is too large is not worth a retry: not RESOURCE_EXHAUSTED.
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


def status_of(error: RequestError) -> StatusCode:
    return _CODES.get(error.status) or _CODES[400 if error.status < 500 else 500]


def details_of(error: RequestError) -> str:
    """The message of an error, of bounded length: it may be the text of a function's exception."""
    return error.message[:DETAILS_CHARACTERS_MAX]


def trailers_of(error: RequestError) -> tuple[tuple[str, str], ...]:
    """Trailing metadata with what the HTTP front end sends in headers and JSON.

    >>> trailers_of(RequestError(429, "busy", reason="overloaded", retry_ns=1_500_000))[:2]
    (('headgate-reason', 'overloaded'), ('retry-after-ms', '2'))
    """
    fields = error_fields(error, b"")
    trailers = []
    for name in fields.__struct_fields__[_FIRST_TRAILER:]:
        value = getattr(fields, name)
        if name == "retry_after_ms" and value:
            # gRPC's own retries use the second one.
            trailers += [("retry-after-ms", str(value)), ("grpc-retry-pushback-ms", str(value))]
        elif value:
            text = printable(str(value))
            if isinstance(value, float):
                text = f"{value:.6g}" if name.endswith("_usd") else f"{value:.3f}"
            trailers.append((f"headgate-{name.replace('_', '-')}", text))
    return tuple(trailers)


def printable(text: str) -> str:
    """Text as metadata can have it: gRPC fails the call over anything but printable ASCII."""
    return "".join(c if " " <= c <= "~" else "?" for c in text[:200]).strip()


# Of a client's timeout: what a request that arrives late may have spent on its way. A client that
# gives up within this share of its deadline is taken for one whose deadline has passed.
_TRAVEL_SHARE = 0.1


@final
class PendingCall:
    """Turns the callback of a call into something to await."""

    def __init__(self, respond: Callable[[Call], bytes]) -> None:
        self.is_expired = False  # failed at its deadline; the runtime may still run the call
        self._has_ended = False  # the runtime has finished the call
        self._hold: Hold | None = None  # to be released then
        self._respond = respond
        self._cancel: Callable[[], None] | None = None
        # Errors are results here: asyncio warns about exceptions that are never retrieved.
        self._response: asyncio.Future[bytes | RequestError] = (
            asyncio.get_running_loop().create_future()
        )

    def on_result(self, call: Call) -> None:
        """Called by the runtime when the call has ended.

        The response is made at once: the outputs may lie in shared memory that is reused later.
        """
        self._has_ended = True
        if self._response.done():
            if self._hold is not None:
                self._hold.release()
            return
        try:
            self._response.set_result(self._respond(call))
        except RequestError as error:
            self._response.set_result(error)
        except Exception:
            _LOG.exception("internal error while responding to an RPC")
            self._response.set_result(internal_error())

    async def wait(self, api: FrontEndApi, call: Call) -> bytes:
        """The response. Raises `RequestError`, also at the deadline of a call with a hard deadline.

        When the client cancels the RPC, the call is cancelled. An RPC that is cancelled at its
        deadline is different: its call is late rather than unwanted, and the runtime expires it.
        The client's deadline passes before the server's, by the time that the request travelled.
        """
        timer = None
        self._cancel = lambda: api.cancel(call)
        if call.is_hard:
            left_ns = call.deadline_ns - api.now_ns()
            loop = asyncio.get_running_loop()
            timer = DeadlineTimer(loop, left_ns, lambda: self._expire(call))
        try:
            response = await self._response
        except asyncio.CancelledError:
            travel_ns = int(_TRAVEL_SHARE * (call.deadline_ns - call.arrived_ns))
            is_late = call.is_hard and api.now_ns() >= call.deadline_ns - travel_ns
            if self._response.cancelled() and not is_late:
                api.cancel(call)
            raise
        finally:
            self._cancel = None
            if timer is not None:
                timer.cancel()
        if isinstance(response, RequestError):
            raise response
        return response

    def keep_hold(self, hold: Hold) -> None:
        """Release `hold` when the runtime has finished the call, which nobody waits for."""
        if self._has_ended:
            hold.release()
        else:
            self._hold = hold

    def abort(self, error: RequestError) -> None:
        if not self._response.done():
            if self._cancel is not None:
                self._cancel()
            self._response.set_result(error)

    def _expire(self, call: Call) -> None:
        if not self._response.done():
            self.is_expired = True
            self._response.set_result(deadline_exceeded(call))
