"""HTTP responses: from how a call ended to a status, header lines and a body, as bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, final

from msgspec import Struct
from msgspec.json import Encoder

from headgate.core.clock import MILLISECOND_NS, SECOND_NS
from headgate.core.states import (
    DEADLINE_EXCEEDED,
    OUTCOME_NAMES,
    Failure,
    Outcome,
    Rejection,
    Settlement,
)
from headgate.live.call import FUNCTION_REFUSED, INTERNAL, Call
from headgate.live.gateway.codec.text import WriteText
from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.errors import OUTCOME_UNKNOWN, RequestError, internal_error

JSON_HEADER: Final = b"Content-Type: application/json\r\n"
FUNCTION_FAILED: Final = "the function failed"

_LOG: Final = logging.getLogger(__name__)
_WORKER_LOST: Final = "worker_lost"
_ENCODER: Final = Encoder()

_REJECTIONS: Final[Mapping[str, str]] = {
    Rejection.OVERLOADED: "the request would miss its deadline: the server is overloaded",
    Rejection.UNFAIR: "the client is over its fair share",
    Rejection.INFEASIBLE: "the deadline cannot be met, not even by an idle server",
    Rejection.OVER_COST: "what could meet the deadline costs more than the request may cost",
    Rejection.UNAVAILABLE: "no worker is available for this model",
    Rejection.FULL: "too many requests are open",
    Rejection.LOAD_FAILED: "a function of this model cannot be loaded; loading is retried",
    Rejection.TOO_LARGE: "the request exceeds a function call's size limit; no worker can run it",
}
# Other rejections are a matter of load, and get the configured overload status.
_REJECTION_STATUSES: Final[Mapping[str, int]] = {
    Rejection.INFEASIBLE: 422,
    Rejection.OVER_COST: 422,
    Rejection.TOO_LARGE: 413,
    Rejection.UNAVAILABLE: 503,
    Rejection.LOAD_FAILED: 503,
}
# Rejections that a retry cannot change, whatever the load.
_FINAL_REJECTIONS: Final = (Rejection.INFEASIBLE, Rejection.OVER_COST, Rejection.TOO_LARGE)


def json_headers(text_bytes: int) -> bytes:
    """Header lines of a response that is JSON and nothing else."""
    return JSON_HEADER


@final
class ResponseBody(Struct, gc=False):
    """The body for a call that succeeded: text, or the outputs to write as text; then raw bytes."""

    text: bytes | WriteText
    data: Sequence[memoryview] = ()  # elements of the outputs that belong in the text
    raw: Sequence[memoryview] = ()  # follow the text
    headers: Callable[[int], bytes] = json_headers  # header lines, given the length of the text


@final
class ErrorJson(Struct, gc=False, omit_defaults=True):
    """The body of an error. The Open Inference Protocol defines `error`; the rest is ours."""

    error: str
    code: int
    request_id: str
    reason: str = ""
    deadline_ms: float | None = None
    retry_after_ms: int = 0
    # Fields of the `Settlement` of a rejected request: same names, `_ms` for `_ns`.
    predicted_ms: float | None = None
    stage: str = ""  # also of a failed one
    predicted_usd: float = 0.0
    margin_ms: float | None = None
    accepted_ms: float | None = None
    accepted_usd: float = 0.0
    short_of: str = ""
    short_ms: float | None = None
    objective_usd: float = 0.0


_FIRST: Final = ErrorJson.__struct_fields__.index("predicted_ms")
_NAMES: Final = ErrorJson.__struct_fields__[_FIRST:]  # of what a settlement tells
_TELL: Final = attrgetter(*(n[:-3] + "_ns" if n.endswith("_ms") else n for n in _NAMES))
# Of each: whether it is a duration; and the default, which msgspec omits by its identity.
_DEFAULTS: Final = ErrorJson.__struct_defaults__[-len(_NAMES) :]
_KINDS: Final = [(n.endswith("_ms"), d) for n, d in zip(_NAMES, _DEFAULTS, strict=True)]


class ResponseFormat:
    """How responses to one kind of request look; this one is for requests that lead to no call."""

    __slots__ = ()

    def response(self, call: Call) -> ResponseBody:
        """The response to a call that succeeded. May raise `RequestError`."""
        raise NotImplementedError

    def error(self, error: RequestError, request_id: bytes) -> tuple[int, bytes, bytes]:
        """Status, header lines and body for a request that failed."""
        return error.status, JSON_HEADER, error_json(error, request_id)


ERRORS_ONLY: Final = ResponseFormat()


def error_fields(error: RequestError, request_id: bytes) -> ErrorJson:
    """The fields of an error, for the body over HTTP and the trailing metadata over gRPC."""
    request, retry_ms = request_id.decode("latin-1"), -(-error.retry_ns // MILLISECOND_NS)
    told = error.settlement
    if told is None:
        deadline_ms = _ms(error.deadline_ns)
        return ErrorJson(error.message, error.status, request, error.reason, deadline_ms, retry_ms)
    fields: list[Any] = [
        (_ms(value) if is_duration else value) if value else default
        for value, (is_duration, default) in zip(_TELL(told), _KINDS, strict=True)
    ]
    deadline_ms = _ms(error.deadline_ns or told.objective_ns)
    return ErrorJson(
        error.message, error.status, request, error.reason, deadline_ms, retry_ms, *fields
    )


def error_json(error: RequestError, request_id: bytes) -> bytes:
    return _ENCODER.encode(error_fields(error, request_id))


def error_of(call: Call, config: GatewayConfig, request_id: bytes) -> RequestError | None:
    """The error that a call ended with; None if it succeeded.

    The text of a function's exception is for its operator, not for clients: the client gets the id
    of its request, and the log has the text under that id.
    """
    settlement = call.settlement
    assert settlement is not None
    outcome, reason = settlement.outcome, settlement.reason
    if outcome == Outcome.MET or (outcome == Outcome.LATE and not call.is_hard):
        return None
    if outcome == Outcome.LATE or outcome == Outcome.EXPIRED:
        return deadline_exceeded(call)
    # A call admitted before a function failed to load gets the same error as one that came after.
    if outcome == Outcome.REJECTED or reason == Rejection.LOAD_FAILED:
        return _rejected(call, settlement, config.overload_status)
    prefix = f"stage {settlement.stage}: " if settlement.stage else ""
    if outcome == Outcome.FAILED and call.error:
        if call.status == 503:
            return RequestError(
                503,
                prefix + call.error,
                reason=OUTCOME_UNKNOWN,
                settlement=settlement,
                may_retry=False,
            )
        if not call.is_refused:
            extra = _log_extra(request_id)
            _LOG.warning("%sthe function failed: %s", prefix, call.error, extra=extra)
        message = call.error if call.is_refused or config.expose_errors else FUNCTION_FAILED
        code = FUNCTION_REFUSED if call.is_refused else "function_failed"
        return RequestError(call.status, prefix + message, reason=code, settlement=settlement)
    if reason == INTERNAL:
        return internal_error()
    if outcome == Outcome.FAILED and reason == Failure.TOO_LARGE:
        message = prefix + _REJECTIONS[Rejection.TOO_LARGE]
        return RequestError(413, message, reason=Rejection.TOO_LARGE, settlement=settlement)
    return _incomplete(call, settlement, prefix, config, request_id)


def _incomplete(
    call: Call, settlement: Settlement, prefix: str, config: GatewayConfig, request_id: bytes
) -> RequestError:
    """The error of a call that ended without a result of its function."""
    reason = settlement.reason
    code = _failure_code(reason)
    is_lost = code == _WORKER_LOST
    if code == "failed" or is_lost:  # the reason may hold the text of an exception, or a function
        _LOG.warning("a request failed: %s", reason, extra=_log_extra(request_id))
    detail = (reason if config.expose_errors else code) or "unknown cause"
    what = "the request could not be completed"
    if is_lost:
        what = "the worker that ran the request died or was cut off"
    return RequestError(
        503,
        f"{prefix}{what} ({detail})",
        reason=code,
        retry_ns=settlement.retry_ns,
        settlement=settlement,
        may_retry=call.is_idempotent or not is_lost,
    )


def deadline_exceeded(call: Call) -> RequestError:
    """The response at the deadline of a call that has not ended."""
    return RequestError(
        504, "the deadline has passed", reason=DEADLINE_EXCEEDED, deadline_ns=_allowed_ns(call)
    )


def retry_headers(retry_ns: int) -> bytes:
    r"""When to retry, rounded up: a client that retries too early has waited for nothing.

    >>> retry_headers(1_200_000_000)
    b'Retry-After: 2\r\nretry-after-ms: 1200\r\n'
    """
    return b"Retry-After: %d\r\nretry-after-ms: %d\r\n" % (
        -(-retry_ns // SECOND_NS),
        -(-retry_ns // MILLISECOND_NS),
    )


def outcome_header(call: Call) -> bytes:
    """The outcome of a call; none at the deadline of one that runs, which may yet end as any."""
    if call.settlement is None:
        return b""
    return b"X-Headgate-Outcome: %b\r\n" % OUTCOME_NAMES[call.settlement.outcome].encode()


def reason_header(reason: str) -> bytes:
    r"""The reason of an error: the word that the body, the metrics and the logs have, too.

    >>> reason_header("over_cost"), reason_header("")
    (b'X-Headgate-Reason: over_cost\r\n', b'')
    """
    return b"X-Headgate-Reason: %b\r\n" % reason.encode() if reason else b""


def timing_header(call: Call, now_ns: int) -> bytes:
    """Queueing, execution and total time in milliseconds, as browsers show them."""
    total_ms = (now_ns - call.arrived_ns) * 1e-6
    if not call.began_ns:
        return b"Server-Timing: total;dur=%.3f\r\n" % total_ms
    return b"Server-Timing: queue;dur=%.3f, exec;dur=%.3f, total;dur=%.3f\r\n" % (
        (call.began_ns - call.arrived_ns) * 1e-6,
        (call.ended_ns - call.began_ns) * 1e-6,
        total_ms,
    )


def _rejected(call: Call, settlement: Settlement, overload_status: int) -> RequestError:
    reason = settlement.reason
    return RequestError(
        _REJECTION_STATUSES.get(reason, overload_status),
        _REJECTIONS.get(reason, "the request was rejected") + _what_helps(settlement),
        reason=reason,
        retry_ns=0 if reason in _FINAL_REJECTIONS else max(settlement.retry_ns, 1_000_000),
        deadline_ns=_allowed_ns(call),
        settlement=settlement,
    )


def _what_helps(settlement: Settlement) -> str:
    """What would have been accepted instead, as the rest of a sentence.

    The same numbers as in the fields: one that is rounded down would be refused again.

    >>> _what_helps(Settlement(Outcome.REJECTED, accepted_ns=12_345_678_000, accepted_usd=2e-6))
    '; a deadline of 12345.678 ms or a cost of $2e-06 would have been accepted'
    """
    parts = []
    if settlement.accepted_ns:
        parts.append(f"a deadline of {_ms(settlement.accepted_ns):.10g} ms")
    if settlement.accepted_usd:
        parts.append(f"a cost of ${settlement.accepted_usd}")
    return f"; {' or '.join(parts)} would have been accepted" if parts else ""


def _failure_code(sentence: str) -> str:
    """The reason code for the sentence with which the Scheduler describes a failure."""
    if sentence.endswith((f": {Failure.LOST}", f": {Failure.KILLED_WORKER}")):
        return _WORKER_LOST
    if sentence == Failure.POLICY_FAULT:
        return "policy_fault"
    return "refused" if sentence.startswith(Failure.REFUSED) else "failed"


def _log_extra(request_id: bytes) -> dict[str, str]:
    return {"request_id": request_id.decode("latin-1")}


def _allowed_ns(call: Call) -> int:
    return max(0, call.deadline_ns - call.arrived_ns) if call.deadline_ns else 0


def _ms(duration_ns: int) -> float | None:
    # Of a quotient of integers the text is the shortest one: three decimals at most.
    return (duration_ns + 500) // 1_000 / 1_000 if duration_ns else None
