"""One HTTP request and its response, of which there is exactly one.

What a request uses (a slot of its tenant's concurrency, memory for its body, its tensors and its
response) is reserved as soon as its headers are known, and released exactly once, however the
request ends: with a response, an error, its deadline, or a client that disconnects.
"""

from __future__ import annotations

import logging
from asyncio import Future
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar, cast, final

from headgate.core.states import DEADLINE_EXCEEDED, Outcome, Settlement
from headgate.functions.tensor import Tensor
from headgate.http.connection import HttpConnection
from headgate.http.interface import STATUS_LINES, HttpError
from headgate.live.call import Call, ServedModel
from headgate.live.gateway.codec.client import Part, Result, TextJob
from headgate.live.gateway.codec.text import ParsedRequest, ReadText, WriteText, write_text
from headgate.live.gateway.context import AccessEntry, GatewayContext, is_request_id
from headgate.live.gateway.errors import (
    RequestError,
    internal_error,
    memory_exhausted,
    too_many_unread,
)
from headgate.live.gateway.http.responses import (
    ERRORS_ONLY,
    ResponseBody,
    ResponseFormat,
    deadline_exceeded,
    error_of,
    outcome_header,
    reason_header,
    retry_headers,
    timing_header,
)
from headgate.live.gateway.inference import (
    DeadlineTimer,
    cost_objective_usd,
    make_call,
    priority_of,
    timeout_ns,
)
from headgate.live.gateway.oip.json import (
    check_response_size,
    elements_in,
    min_text_bytes,
    text_too_long,
)
from headgate.live.gateway.tenants import Hold, Tenant
from headgate.live.telemetry.metrics import HTTP

_LOG: Final = logging.getLogger(__name__)
_SHORT_BYTES: Final = 4096
_CANCELLED: Final = Settlement(Outcome.CANCELLED)
_CLIENT_GONE: Final = "client_gone"

T = TypeVar("T")
Handler = Callable[["HttpRequest"], None]
Headers = Mapping[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Rule:
    """What a path does for one method. A public rule needs no API key.

    A rule with `is_text` takes a body for a model: `is_text` says, from a request's headers,
    whether the whole body is text. Bodies of requests to other rules are discarded.
    """

    method: bytes
    handler: Handler
    is_public: bool = False
    is_text: Callable[[Headers], bool] | None = None
    error_format: ResponseFormat = ERRORS_ONLY  # of errors before the body has arrived


@dataclass(frozen=True, slots=True)
class Route:
    """The rule that handles a request, and the names that its path contains."""

    rule: Rule
    name: str = ""
    version: str = ""


@final
class HttpRequest:
    """A request as handlers see it, with the methods that respond to it."""

    __slots__ = (
        "_body_bytes_max",
        "_connection",
        "_hold",
        "_is_done",
        "_is_head",
        "_is_in_flight",
        "_job",
        "_timer",
        "access_entry",
        "body",
        "body_bytes",
        "call",
        "closes",
        "context",
        "error",
        "headers",
        "keeps_body",
        "request_id",
        "response_format",
        "route",
        "tenant",
        "trace",
    )

    def __init__(
        self,
        connection: HttpConnection,
        context: GatewayContext,
        route: Route | None,
        tenant: Tenant | None,
        headers: Headers,
        is_head: bool,
        request_id: bytes,
        trace: bytes,
        error: HttpError | None,
        access_entry: AccessEntry | None,
    ) -> None:
        self.context = context
        self.route = route
        self.tenant = tenant
        self.headers = headers
        self.request_id = request_id
        self.trace = trace
        self.error = error  # known before the whole body has arrived
        self.access_entry = access_entry  # where there is an access log
        self.body: bytes | bytearray | memoryview = b""
        self.body_bytes = 0  # received, whether or not they were kept
        self.keeps_body = False  # otherwise the body is read and discarded
        self.closes = False  # the connection is closed after this response
        self.response_format = ERRORS_ONLY
        self.call: Call | None = None
        self._connection = connection
        self._is_head = is_head
        self._body_bytes_max = context.config.body_bytes_max
        self._hold: Hold | None = None  # of the memory budget
        self._is_in_flight = False  # counted in its tenant's concurrency
        self._job: TextJob | None = None  # its text that the codec is reading or writing
        self._timer: DeadlineTimer | None = None
        self._is_done = False

    def admit(self, body_bytes: int) -> None:
        """Reserve what the request needs, before its body is read.

        `body_bytes` is the announced size, reserved whole; 0 for a chunked body. Raises
        `RequestError` where the text is too long, the tenant is at a limit, or the memory budget
        is exhausted.
        """
        assert self.route is not None and self.tenant is not None
        context, rule = self.context, self.route.rule
        if rule.is_text is None:
            return
        self.response_format = rule.error_format
        text_max = context.config.json_bytes_max
        if (body_bytes > text_max or not body_bytes) and rule.is_text(self.headers):
            self._body_bytes_max = min(self._body_bytes_max, text_max)
            if body_bytes > text_max:
                raise text_too_long(context.config)
        tenant = self.tenant
        tenant.admit(context.api.now_ns())
        self._hold = hold = Hold(context.budget, tenant.client_id)
        if not hold.grow(body_bytes):
            tenant.refund()
            raise memory_exhausted()
        self._is_in_flight = True
        self.keeps_body = True

    def reserve_more(self, size: int, total: int) -> RequestError | None:
        if total > self._body_bytes_max:
            return text_too_long(self.context.config)
        if self._hold is None or not self._hold.grow(size):
            return memory_exhausted()
        return None

    def reject_body(self, error: HttpError) -> None:
        self.error = error
        self.keeps_body = False
        self.body = b""
        if self._hold is not None:
            self._hold.release()

    def handle(self) -> None:
        if self.error is not None:
            self.respond_error(self.error)
            return
        try:
            assert self.route is not None
            self.route.rule.handler(self)
        except RequestError as error:
            self.respond_error(error)
        except Exception:
            self._respond_internal_error()

    def read_in_codec(
        self, message: ReadText, text: Part, deadline_ns: int, then: Callable[[ParsedRequest], None]
    ) -> None:
        """Read long text in another process and pass it to `then`, which may raise `RequestError`.

        `deadline_ns` is 0 where the headers give none. Raises `RequestError` where the codec's
        queue is full.
        """
        if deadline_ns:
            self._expire_at(deadline_ns)

        def on_read(result: ParsedRequest | memoryview) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            then(cast("ParsedRequest", result))

        self._run_in_codec(message, [text], on_read)

    def respond_after(self, work: Coroutine[object, object, T], then: Callable[[T], None]) -> None:
        """Pass the result of a coroutine to `then`, unless the client is gone by then."""
        deferred = self.context.deferred

        def on_done(task: Future[T]) -> None:
            deferred.discard(cast("Future[object]", task))
            if self._is_done or task.cancelled():
                return
            try:
                then(task.result())
            except RequestError as error:
                self.respond_error(error)
            except Exception:
                self._respond_internal_error()

        task = self.context.loop.create_task(work)
        deferred.add(cast("Future[object]", task))  # the event loop itself would forget it
        task.add_done_callback(on_done)

    def submit(
        self,
        model: ServedModel,
        inputs: list[Tensor],
        parameters: Mapping[str, object],
        arrived_ns: int,
        held_bytes: int,
    ) -> None:
        """Submit a call of a model; its result is sent in this request's response format.

        `held_bytes` is what its tensors take: everything else that was reserved is released. Raises
        `RequestError` where the inputs do not fit the model, or the memory budget is exhausted.
        """
        hold, context, headers = self._hold, self.context, self.headers
        assert hold is not None and self.tenant is not None
        call = make_call(
            model,
            inputs,
            self.on_result,
            now_ns=arrived_ns,
            timeout_ns=timeout_ns(headers, parameters.get("timeout"), context.timeout_max_ns),
            client_id=self.tenant.client_id,
            priority=priority_of(headers, parameters.get("priority")),
            cost_usd=cost_objective_usd(headers, parameters.get("cost_usd")),
        )
        # A short text keeps its reservation, which is at least as large as its tensors.
        if not held_bytes <= hold.size <= _SHORT_BYTES and not hold.resize(held_bytes):
            raise memory_exhausted()
        self.body = b""
        self.call = call
        call.client_request_id = self.request_id
        call.is_id_given = is_request_id(headers.get(b"x-request-id"))
        if self.trace:
            call.trace = self.trace
        if call.is_hard:
            self._expire_at(call.deadline_ns)
        context.api.submit(call)

    def on_result(self, call: Call) -> None:
        """Called by the runtime when the call has ended."""
        if self._is_done:
            if self._hold is not None:
                self._hold.release()  # the client got 504 at the deadline; the call ends only now
            return
        try:
            error = error_of(call, self.context.config, self.request_id)
            if error is not None:
                self.respond_error(error)
                return
            response = self.response_format.response(call)
            if response.raw or not isinstance(response.text, bytes):
                self._write(call, response)
            else:
                self._send(call, response, response.text)
        except RequestError as error:
            self.respond_error(error)
        except Exception:
            self._respond_internal_error()

    def respond_error(self, error: HttpError) -> None:
        if not isinstance(error, RequestError):  # the connection's own
            error = RequestError(
                error.status, error.message, reason=error.reason, closes=error.closes
            )
        if error.closes:
            self.closes = True
        if error.has_retry_time:
            error.retry_ns = self.context.retry_ns(error.retry_ns)
        status, headers, body = self.response_format.error(error, self.request_id)
        headers += reason_header(error.reason)
        if error.retry_ns:
            headers += retry_headers(error.retry_ns)
        if error.allow:
            headers += b"Allow: %b\r\n" % error.allow.encode()
        if error.status == 401:
            headers += b'WWW-Authenticate: Bearer realm="headgate"\r\n'
        if self.call is not None:
            headers += outcome_header(self.call)
            headers += timing_header(self.call, self.context.api.now_ns())
        self.respond(status, headers, body, error.reason)

    def respond(
        self,
        status: int,
        headers: bytes,
        body: bytes | memoryview,
        reason: str = "",
        *,
        raw: Sequence[memoryview] = (),
    ) -> None:
        """Send the response, `raw` after its body. The connection goes on to its next request.

        `headers` are whole header lines. `reason` is for the metrics and the access log.
        """
        context = self.context
        size = len(body) + sum(map(len, raw)) if raw else len(body)
        hold: Hold | None = None
        if size > context.config.http.write_high_water:  # smaller ones fit the socket's own buffer
            hold = self._hold or Hold(context.budget, self.tenant.client_id if self.tenant else 0)
            if not hold.resize(size):  # the request's other reservations are not needed any more
                self.respond_error(too_many_unread())
                return
            self._hold = None
        self._is_done = True
        call = self.call
        self._release()
        context.responses.count(HTTP, status, reason)
        if self.trace:
            headers += b"traceparent: %b\r\n" % self.trace
        if self.closes or context.is_leaving:
            self.closes = True
            headers += b"Connection: close\r\n"
        elif b"connection" in self.headers:
            headers += b"Connection: keep-alive\r\n"
        parts: Sequence[bytes | memoryview] = ()
        if self._is_head:
            body = b""
        elif hold is not None:
            parts, body = (body, *raw), b""
        elif raw or not isinstance(body, bytes):
            body = b"".join((body, *raw))
        head = b"%b%b%bX-Request-Id: %b\r\nContent-Length: %d\r\n\r\n%b" % (
            STATUS_LINES[status],
            context.common_headers,
            headers,
            self.request_id,
            size,
            body,
        )
        self._connection.send(head, parts, self, hold)
        if context.access_log is not None:
            self._log_access(call, status, reason, size)

    def cancel(self) -> None:
        """The client has disconnected: cancel the call and send nothing."""
        if not self._is_done:
            self._is_done = True
            call, is_handled = self.call, self.call is not None or self._job is not None
            if call is not None:
                self.context.api.cancel(call)
            self._release()
            if is_handled:
                self.context.responses.count(HTTP, 499, _CLIENT_GONE)
                if self.context.access_log is not None:
                    self._log_access(call, 499, _CLIENT_GONE, 0)

    def abort(self, error: HttpError) -> None:
        """Cancel the call and respond with `error`, unless the response is being written."""
        call = self.call
        if call is not None and self._job is not None:  # the codec is writing the response
            self.closes = True
            return
        if call is not None:
            call.settlement = _CANCELLED
            self.context.api.cancel(call)
        self.respond_error(error)

    def _expire_at(self, deadline_ns: int) -> None:
        left_ns = deadline_ns - self.context.api.now_ns()
        self._timer = DeadlineTimer(self.context.loop, left_ns, self._expire)

    def _expire(self) -> None:
        self._timer = None
        if self._is_done:
            return
        if self.call is None:  # the codec is still reading its text
            message = "the deadline has passed"
            self.respond_error(RequestError(504, message, reason=DEADLINE_EXCEEDED))
            return
        # The runtime uses the tensors until the call ends: `on_result` releases the hold.
        hold = None
        if self._job is None:
            hold, self._hold = self._hold, None
        self.respond_error(deadline_exceeded(self.call))
        self._hold = hold

    def _respond_internal_error(self) -> None:
        """Log the exception that is being handled, and respond with 500."""
        extra = {"request_id": self.request_id.decode("latin-1")}
        _LOG.exception("internal error while handling an HTTP request", extra=extra)
        if not self._is_done:
            self.response_format = ERRORS_ONLY
            self.respond_error(internal_error())

    def _write(self, call: Call, response: ResponseBody) -> None:
        """Encode the text of a response and send it; a long text is encoded by the codec."""
        limits, text = self.context.config, response.text
        check_response_size(sum(map(len, response.raw)), limits.response_bytes_max, is_text=False)
        if isinstance(text, bytes):
            self._send(call, response, text)
            return
        size = sum(map(len, response.data))
        inline_max = limits.inline_elements_max
        if size <= inline_max or _sum(elements_in, text, response.data) <= inline_max:
            self._send(call, response, write_text(text, response.data, limits))
            return
        check_response_size(_sum(min_text_bytes, text, response.data), limits.response_bytes_max)
        # From here on the hold covers the outputs, which are in memory already.
        if self._hold is not None and not self._hold.resize(size + sum(map(len, response.raw))):
            raise memory_exhausted()
        self._run_in_codec(
            text,
            response.data,
            lambda written: self._send(call, response, cast("memoryview", written)),
        )

    def _send(self, call: Call, response: ResponseBody, text: bytes | memoryview) -> None:
        text_bytes = size = len(text)
        if response.raw:
            size += sum(map(len, response.raw))
        size_max = self.context.config.response_bytes_max
        if size > size_max:
            check_response_size(size, size_max, is_text=text_bytes > size // 2)
        headers = response.headers(text_bytes)
        if call.settlement is not None and call.settlement.outcome == Outcome.LATE:
            headers += outcome_header(call)
        headers += timing_header(call, self.context.api.now_ns())
        self.respond(200, headers, text, raw=response.raw)

    def _run_in_codec(
        self,
        message: ReadText | WriteText,
        parts: Sequence[Part],
        then: Callable[[ParsedRequest | memoryview], None],
    ) -> None:
        """Read or write text in another process, and pass the result to `then`."""
        assert self._hold is not None and self.tenant is not None

        def on_done(result: Result) -> None:
            self._job = None
            if isinstance(result, RequestError):
                self.respond_error(result)
                return
            try:
                then(result)
            except RequestError as error:
                self.respond_error(error)
            except Exception:
                self._respond_internal_error()

        self._job = TextJob(message, parts, self._hold, self.tenant.client_id, on_done)
        try:
            self.context.codec.submit(self._job)
        except RequestError:
            self._job = None
            raise

    def _release(self) -> None:
        """Release what was reserved. What a codec job uses is released when the job ends."""
        job, self._job = self._job, None
        hold, self._hold = self._hold, None
        if job is not None:
            job.cancel()
        elif hold is not None:
            hold.release()
        self.body = b""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # The call refers to this request: break the cycle, or both wait for the garbage collector.
        self.call = None
        if self._is_in_flight:
            self._is_in_flight = False
            assert self.tenant is not None
            self.tenant.finish()

    def _log_access(self, call: Call | None, status: int, reason: str, out_bytes: int) -> None:
        access_log, route, tenant = self.context.access_log, self.route, self.tenant
        assert access_log is not None and self.access_entry is not None
        # Requests to public paths are anonymous.
        is_known = route is not None and not route.rule.is_public
        access_log.write(
            self.access_entry,
            status,
            reason,
            request_id=self.request_id,
            client_id=tenant.client_id if tenant is not None and is_known else None,
            call=call,
            in_bytes=self.body_bytes,
            out_bytes=out_bytes,
        )


def _sum(measure: Callable[[str, int], int], text: WriteText, data: Sequence[memoryview]) -> int:
    """The sum of a measure over the outputs that are part of a text."""
    outputs = [output for output in text.outputs if output.raw_bytes < 0]
    return sum(
        measure(output.datatype, len(part)) for output, part in zip(outputs, data, strict=True)
    )
