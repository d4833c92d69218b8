"""Answers: from how a call ended to a status, header lines and a body, as bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from math import ceil
from typing import Final, Protocol, final

from msgspec import Struct
from msgspec.json import Encoder

from headgate.core.clock import SECOND_NS
from headgate.core.states import OUTCOME_NAMES, Failure, Outcome, Rejection
from headgate.live.call import INTERNAL, Call
from headgate.live.gateway.codec.text import WriteText
from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.errors import RequestError

JSON: Final = b"Content-Type: application/json\r\n"
STATUS_LINES: Final[Mapping[int, bytes]] = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}
CONTINUE: Final = STATUS_LINES[100] + b"\r\n"
FUNCTION_FAILED: Final = "the function failed"

_LOG: Final = logging.getLogger(__name__)

_REJECTIONS: Final[Mapping[str, str]] = {
    Rejection.OVERLOADED: "it would be late behind what is being served already",
    Rejection.UNFAIR: "this client has more than its share in service already",
    Rejection.INFEASIBLE: "the deadline cannot be met, not even by an idle server",
    Rejection.UNAVAILABLE: "nothing that could run it is there just now",
    Rejection.FULL: "too many requests are open",
    Rejection.LOAD_FAILED: "a function that it needs cannot be loaded; it is tried again",
    Rejection.TOO_LARGE: "it is too large for a function's call, and nothing else can run it",
}


# What is not merely a matter of load.
_REJECTION_STATUSES: Final[Mapping[str, int]] = {
    Rejection.INFEASIBLE: 422,
    Rejection.TOO_LARGE: 413,
    Rejection.UNAVAILABLE: 503,
    Rejection.LOAD_FAILED: 503,
}
# What would be the same the next time.
_FINAL_REJECTIONS: Final = (Rejection.INFEASIBLE, Rejection.TOO_LARGE)


def json_lines(text_bytes: int) -> bytes:
    """Header lines of an answer that is JSON and nothing else."""
    return JSON


@final
class ResponseBody(Struct, gc=False):
    """What a call that went well is answered with: text, or what to write there; then raw bytes."""

    text: bytes | WriteText
    data: Sequence[memoryview] = ()  # elements of the outputs that are to be in the text
    raw: Sequence[memoryview] = ()  # follow the text
    lines: Callable[[int], bytes] = json_lines  # header lines, given how long the text is


class ResponseFormat(Protocol):
    """How answers of one kind of request look."""

    def answer(self, call: Call) -> ResponseBody:
        """The answer to a call that went well. May raise `RequestError`."""

    def refusal(self, refused: RequestError, request_id: bytes) -> tuple[int, bytes, bytes]:
        """Status, header lines and body for one that did not."""


@final
class ErrorJson(Struct, gc=False, omit_defaults=True):
    """The body of a refusal. The protocol knows `error` alone; programs like the rest."""

    error: str
    code: int
    request_id: str
    reason: str = ""
    predicted_ms: float | None = None
    deadline_ms: float | None = None
    retry_after_ms: int = 0


_ENCODER: Final = Encoder()


@final
class PlainFormat:
    """The form of whatever has no call: only refusals come from it."""

    def answer(self, call: Call) -> ResponseBody:
        """Nothing that is asked this way has one."""
        raise NotImplementedError

    def refusal(self, refused: RequestError, request_id: bytes) -> tuple[int, bytes, bytes]:
        """As the Open Inference Protocol has it."""
        return refused.status, JSON, error_json(refused, request_id)


PLAIN: Final = PlainFormat()


def error_json(refused: RequestError, request_id: bytes) -> bytes:
    """The body of a refusal."""
    return _ENCODER.encode(
        ErrorJson(
            refused.message,
            refused.status,
            request_id.decode("latin-1"),
            refused.reason,
            _ms(refused.predicted_ns),
            _ms(refused.deadline_ns),
            -(-refused.retry_ns // 1_000_000),
        )
    )


def error_of(call: Call, config: GatewayConfig, request_id: bytes) -> RequestError | None:
    """Why a call has no answer; None if it has one.

    What a function says when it breaks is for whoever runs it: the client gets the id of its
    request, and the log has the text under that id.
    """
    outcome = call.outcome
    if outcome == Outcome.MET or (outcome == Outcome.LATE and not call.is_hard):
        return None
    if outcome == Outcome.LATE or outcome == Outcome.EXPIRED:
        return expired(call)
    # What was admitted before a function broke is told the same as what comes after.
    if outcome == Outcome.REJECTED or call.reason == Rejection.LOAD_FAILED:
        return _rejected(call, config.overload_status)
    if outcome == Outcome.FAILED and call.error:
        if call.status < 500:
            return RequestError(call.status, call.error, reason="function_refused")
        _LOG.warning("the function failed: %s", call.error, extra=_about(request_id))
        message = call.error if config.expose_errors else FUNCTION_FAILED
        return RequestError(call.status, message, reason="function_failed")
    if call.reason == INTERNAL:
        return RequestError(500, "the gateway made a mistake", reason=INTERNAL)
    if outcome == Outcome.FAILED and call.reason == Failure.TOO_LARGE:
        return RequestError(413, _REJECTIONS[Rejection.TOO_LARGE], reason=Rejection.TOO_LARGE)
    word = _failure(call.reason)
    if word == "failed":  # what else is said of it may be the text of an exception
        _LOG.warning("could not be run to its end: %s", call.reason, extra=_about(request_id))
    shown = call.reason if config.expose_errors else word
    message = f"it could not be run to its end ({shown or 'nobody knows why'})"
    return RequestError(503, message, reason=word, retry_ns=call.retry_ns)


def expired(call: Call) -> RequestError:
    """The answer at the deadline where there is no other."""
    return RequestError(
        504, "the deadline has passed", reason="deadline_exceeded", deadline_ns=_allowed_ns(call)
    )


def retry_lines(retry_ns: int) -> bytes:
    r"""When to try again, rounded up: a client that comes early has waited for nothing.

    >>> retry_lines(1_200_000_000)
    b'Retry-After: 2\r\nretry-after-ms: 1200\r\n'
    """
    return b"Retry-After: %d\r\nretry-after-ms: %d\r\n" % (
        ceil(retry_ns / SECOND_NS),
        ceil(retry_ns / 1_000_000),
    )


def outcome_line(call: Call) -> bytes:
    """How a call ended, where that is not the usual way; at its own deadline it has expired."""
    outcome = Outcome.EXPIRED if call.outcome is None else call.outcome
    return b"X-Headgate-Outcome: %b\r\n" % OUTCOME_NAMES[outcome].encode()


def timing_line(call: Call, now_ns: int) -> bytes:
    """Where the time went, in milliseconds, for browsers and people."""
    total_ms = (now_ns - call.arrived_ns) * 1e-6
    if not call.began_ns:
        return b"Server-Timing: total;dur=%.3f\r\n" % total_ms
    return b"Server-Timing: queue;dur=%.3f, exec;dur=%.3f, total;dur=%.3f\r\n" % (
        (call.began_ns - call.arrived_ns) * 1e-6,
        (call.ended_ns - call.began_ns) * 1e-6,
        total_ms,
    )


def _rejected(call: Call, overload_status: int) -> RequestError:
    return RequestError(
        _REJECTION_STATUSES.get(call.reason, overload_status),
        _REJECTIONS.get(call.reason, "it was turned away"),
        reason=call.reason,
        # More of the same would not help what no capacity can do.
        retry_ns=0 if call.reason in _FINAL_REJECTIONS else max(call.retry_ns, 1_000_000),
        predicted_ns=call.predicted_ns,
        deadline_ns=_allowed_ns(call),
    )


def _failure(said: str) -> str:
    """The word for what the Scheduler says of a failure in a sentence."""
    if said.endswith((f": {Failure.LOST}", f": {Failure.KILLED_WORKER}")):
        return "worker_lost"
    if said == Failure.POLICY_FAULT:
        return "policy_fault"
    return "refused" if said.startswith(Failure.REFUSED) else "failed"


def _about(request_id: bytes) -> dict[str, str]:
    """What a message about a request says beside itself."""
    return {"request_id": request_id.decode("latin-1")}


def _allowed_ns(call: Call) -> int:
    return max(0, call.deadline_ns - call.arrived_ns) if call.deadline_ns else 0


def _ms(duration_ns: int) -> float | None:
    return round(duration_ns * 1e-6, 3) if duration_ns else None
