"""An exchange: one request of a connection and its answer, of which there is exactly one.

What a request needs (a place among those of its tenant, memory for its body, its tensors and its
answer) is taken as soon as its headers are known, and is given back once, whichever way it ends.
"""

from __future__ import annotations

import logging
from asyncio import TimerHandle
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, cast, final

from headgate.core.states import Outcome
from headgate.live.call import Call
from headgate.live.gateway.auth import Tenant
from headgate.live.gateway.codec.client import Part, Result, TextJob
from headgate.live.gateway.codec.text import ParsedRequest, ReadText, WriteText, write_text
from headgate.live.gateway.errors import RequestError
from headgate.live.gateway.http.headers import traceparent
from headgate.live.gateway.http.responses import (
    PLAIN,
    STATUS_LINES,
    ResponseBody,
    ResponseFormat,
    error_of,
    expired,
    outcome_line,
    retry_lines,
    timing_line,
)
from headgate.live.gateway.memory_budget import Hold
from headgate.live.gateway.oip.json import (
    check_answer,
    elements_in,
    least_text_bytes,
    too_much_text,
)
from headgate.live.telemetry.metrics import HTTP

if TYPE_CHECKING:
    from headgate.live.gateway.access_log import AccessEntry
    from headgate.live.gateway.http.connection import HttpConnection
    from headgate.live.gateway.http.router import Route
    from headgate.live.gateway.http.server import HttpServer

_LOG: Final = logging.getLogger(__name__)
_SHORT_BYTES: Final = 4096


@final
class HttpRequest:
    """What handlers see of a request, and how they answer it."""

    __slots__ = (
        "_connection",
        "_hold",
        "_is_done",
        "_is_head",
        "_is_in_service",
        "_job",
        "_timer",
        "asked",
        "body",
        "body_bytes",
        "body_bytes_max",
        "call",
        "closes",
        "form",
        "headers",
        "refused",
        "request_id",
        "route",
        "server",
        "tenant",
        "trace",
        "wants_body",
    )

    def __init__(
        self,
        connection: HttpConnection,
        server: HttpServer,
        route: Route | None,
        tenant: Tenant | None,
        headers: Mapping[bytes, bytes],
        is_head: bool,
    ) -> None:
        self._connection = connection
        self.server = server
        self.route = route
        self.tenant = tenant
        self.headers = headers
        self._is_head = is_head
        self.body: bytes | bytearray | memoryview = b""
        self.body_bytes = 0  # that have come, whether or not they were kept
        self.body_bytes_max = server.config.body_bytes_max
        self.wants_body = False  # else it is read and thrown away
        self.closes = False  # the connection ends with this answer
        self.refused: RequestError | None = None  # known before the body came
        self.form: ResponseFormat = PLAIN
        self.call: Call | None = None
        self.asked: AccessEntry | None = None  # for the access log, where there is one
        self.request_id = server.request_id(headers.get(b"x-request-id"))
        self.trace = traceparent(headers[b"traceparent"]) if b"traceparent" in headers else b""
        self._hold: Hold | None = None  # of the memory budget
        self._is_in_service = False  # its tenant has one request less to spare
        self._job: TextJob | None = None  # text of it that is being read or written elsewhere
        self._timer: TimerHandle | None = None
        self._is_done = False

    # --- before the body -----------------------------------------------------------------------

    def admit(self, body_bytes: int) -> None:
        """Take what a request of this tenant takes, before its body is read.

        `body_bytes` are those that are announced; they are taken whole. Raises `RequestError`
        where the text is too long, the tenant is at a limit, or there is no memory.
        """
        assert self.route is not None and self.tenant is not None
        server, rule = self.server, self.route.rule
        if rule.is_text is None:
            return
        self.form = rule.form
        text_max = server.config.json_bytes_max
        if (body_bytes > text_max or not body_bytes) and rule.is_text(self.headers):
            self.body_bytes_max = min(self.body_bytes_max, text_max)
            if body_bytes > text_max:
                raise too_much_text(server.config)
        tenant = self.tenant
        tenant.enter(server.serving.now_ns())
        self._hold = hold = Hold(server.budget, tenant.client_id)
        if not hold.grow(body_bytes):
            tenant.turn_away()
            raise no_memory()
        self._is_in_service = True
        self.wants_body = True

    def hold_more(self, size: int) -> bool:
        """Take room for more of the body. False: there is none."""
        return self._hold is not None and self._hold.grow(size)

    def turn_down(self, refused: RequestError) -> None:
        """Refuse it while its body is coming; the rest of that is thrown away."""
        self.refused = refused
        self.wants_body = False
        self.body = b""
        if self._hold is not None:
            self._hold.release()

    # --- a call --------------------------------------------------------------------------------

    def handle(self) -> None:
        """Have it answered, now or later. Never raises."""
        if self.refused is not None:
            self.refuse(self.refused)
            return
        try:
            assert self.route is not None
            self.route.rule.handler(self)
        except RequestError as refused:
            self.refuse(refused)
        except Exception:
            self._break()

    def read_elsewhere(
        self, message: ReadText, text: Part, deadline_ns: int, then: Callable[[ParsedRequest], None]
    ) -> None:
        """Have long text read in another process; `then` goes on, and may raise `RequestError`.

        `deadline_ns` is 0 where headers give none. Raises `RequestError` where too many wait.
        """
        if deadline_ns:
            self._expire_at(deadline_ns)

        def read(result: ParsedRequest | memoryview) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            then(cast("ParsedRequest", result))

        self._have_done(message, [text], read)

    def submit(self, call: Call, held_bytes: int) -> None:
        """Hand a call to the runtime, and wait for its answer in this exchange's form.

        `held_bytes` is what its tensors take; whatever else was held is not needed any more. Raises
        `RequestError` where there is no memory.
        """
        hold = self._hold
        assert hold is not None
        # Short texts are left as they were counted, which is not less than what they became.
        if not held_bytes <= hold.size <= _SHORT_BYTES and not hold.resize(held_bytes):
            raise no_memory()
        self.body = b""
        self.call = call
        call.client_request_id = self.request_id
        if self.trace:
            call.trace = self.trace
        if call.is_hard:
            self._expire_at(call.deadline_ns)
        self.server.serving.submit(call)

    def answered(self, call: Call) -> None:
        """What the runtime calls when it is done with the call."""
        if self._is_done:
            if self._hold is not None:
                self._hold.release()  # at its deadline the call was answered, not over
            return
        try:
            refused = error_of(call, self.server.config, self.request_id)
            if refused is not None:
                self.refuse(refused)
                return
            answer = self.form.answer(call)
            if answer.raw or not isinstance(answer.text, bytes):
                self._write(call, answer)
            else:
                self._send(call, answer, answer.text)
        except RequestError as refused:
            self.refuse(refused)
        except Exception:
            self._break()

    def refuse(self, refused: RequestError) -> None:
        """Answer that it is not served, and why."""
        if refused.closes:
            self.closes = True
        if refused.retry_ns or refused.status == 503:
            refused.retry_ns = self.server.retry_ns(refused.retry_ns)
        status, lines, body = self.form.refusal(refused, self.request_id)
        if refused.retry_ns:
            lines += retry_lines(refused.retry_ns)
        if refused.allow:
            lines += b"Allow: %b\r\n" % refused.allow.encode()
        if refused.status == 401:
            lines += b'WWW-Authenticate: Bearer realm="headgate"\r\n'
        if self.call is not None:
            lines += outcome_line(self.call)
            lines += timing_line(self.call, self.server.serving.now_ns())
        self.respond(status, lines, body, refused.reason)

    def respond(
        self,
        status: int,
        lines: bytes,
        body: bytes | memoryview,
        reason: str = "",
        *,
        raw: Sequence[memoryview] = (),
    ) -> None:
        """Send the answer, `raw` behind its body: the connection goes on to its next request."""
        server = self.server
        size = len(body) + sum(map(len, raw)) if raw else len(body)
        hold: Hold | None = None
        if size > server.config.write_high_water:  # less waits in the socket's own buffer
            hold = self._hold or Hold(server.budget, self.tenant.client_id if self.tenant else 0)
            if not hold.resize(size):  # whatever else it held is not needed any more
                self.refuse(
                    RequestError(503, "too many answers are not read yet", reason="answers")
                )
                return
            self._hold = None
        self._is_done = True
        call = self.call
        self._let_go()
        server.responses.count(HTTP, status, reason)
        if self.trace:
            lines += b"traceparent: %b\r\n" % self.trace
        if self.closes or server.is_leaving:
            self.closes = True
            lines += b"Connection: close\r\n"
        elif b"connection" in self.headers:
            lines += b"Connection: keep-alive\r\n"
        parts: Sequence[bytes | memoryview] = ()
        if self._is_head:
            body = b""
        elif hold is not None:
            parts, body = (body, *raw), b""
        elif raw or not isinstance(body, bytes):
            body = b"".join((body, *raw))
        head = b"%b%b%bX-Request-Id: %b\r\nContent-Length: %d\r\n\r\n%b" % (
            STATUS_LINES[status],
            server.common_lines,
            lines,
            self.request_id,
            size,
            body,
        )
        self._connection.send(head, parts, self, hold)
        if server.access is not None:
            server.access.answered_http(self, call, status, reason, size)

    # --- other ends ----------------------------------------------------------------------------

    def abandon(self) -> None:
        """The client has gone: nobody wants the answer."""
        if not self._is_done:
            self._is_done = True
            if self.call is not None or self._job is not None:
                self.server.responses.count(HTTP, 499, "client_gone")
            if self.call is not None:
                self.server.serving.cancel(self.call)
            self._let_go()

    def give_up(self, refused: RequestError) -> None:
        """Answer now, for the call will not be; unless its answer is being written already."""
        call = self.call
        if self.is_writing:
            self.closes = True
            return
        if call is not None:
            call.outcome = Outcome.CANCELLED
            self.server.serving.cancel(call)
        self.refuse(refused)

    @property
    def is_writing(self) -> bool:
        """Whether the text of its answer is being written elsewhere."""
        return self.call is not None and self._job is not None

    def _expire_at(self, deadline_ns: int) -> None:
        wait_s = (deadline_ns - self.server.serving.now_ns()) * 1e-9
        self._timer = self.server.loop.call_later(max(0.0, wait_s), self._expire)

    def _expire(self) -> None:
        self._timer = None
        if self._is_done:
            return
        if self.call is None:  # its text is still being read
            self.refuse(RequestError(504, "the deadline has passed", reason="deadline_exceeded"))
            return
        # The call has its tensors until the runtime is done with it: see `answered`.
        hold = None
        if self._job is None:
            hold, self._hold = self._hold, None
        self.refuse(expired(self.call))
        self._hold = hold

    def _break(self) -> None:
        """A defect of ours: say so once, here and to the client, and go on."""
        about = {"request_id": self.request_id.decode("latin-1")}
        _LOG.exception("a request broke the gateway", extra=about)
        if not self._is_done:
            self.form = PLAIN
            self.refuse(RequestError(500, "the gateway made a mistake", reason="internal"))

    # --- writing the answer --------------------------------------------------------------------

    def _write(self, call: Call, answer: ResponseBody) -> None:
        """Make the text of an answer and send it, or have the text made elsewhere first."""
        limits, text = self.server.config, answer.text
        check_answer(sum(map(len, answer.raw)), limits.answer_bytes_max, is_text=False)
        if isinstance(text, bytes):
            self._send(call, answer, text)
            return
        size = sum(map(len, answer.data))
        most = limits.inline_elements_max
        if size <= most or _sum(elements_in, text, answer.data) <= most:
            self._send(call, answer, write_text(text, answer.data, limits))
            return
        check_answer(_sum(least_text_bytes, text, answer.data), limits.answer_bytes_max)
        # From here on it is the outputs that are held. They are here already, whatever is said.
        if self._hold is not None and not self._hold.resize(size + sum(map(len, answer.raw))):
            raise no_memory()
        self._have_done(
            text,
            answer.data,
            lambda made: self._send(call, answer, cast("memoryview", made)),
        )

    def _send(self, call: Call, answer: ResponseBody, text: bytes | memoryview) -> None:
        size = whole = len(text)
        if answer.raw:
            whole += sum(map(len, answer.raw))
        if whole > self.server.config.answer_bytes_max:
            check_answer(whole, self.server.config.answer_bytes_max, is_text=size > whole // 2)
        lines = answer.lines(size)
        if call.outcome == Outcome.LATE:
            lines += outcome_line(call)
        lines += timing_line(call, self.server.serving.now_ns())
        self.respond(200, lines, text, raw=answer.raw)

    def _have_done(
        self,
        message: ReadText | WriteText,
        parts: Sequence[Part],
        then: Callable[[ParsedRequest | memoryview], None],
    ) -> None:
        """Have text read or written in another process, and go on with what came of it."""
        assert self._hold is not None and self.tenant is not None

        def done(result: Result) -> None:
            self._job = None
            if isinstance(result, RequestError):
                self.refuse(result)
                return
            try:
                then(result)
            except RequestError as refused:
                self.refuse(refused)
            except Exception:
                self._break()

        self._job = TextJob(message, parts, self._hold, self.tenant.client_id, done)
        try:
            self.server.codec.submit(self._job)
        except RequestError:
            self._job = None
            raise

    def _let_go(self) -> None:
        """Give back what was taken; but what is used elsewhere, only when that has ended."""
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
        # The call knows its exchange: let go of it, or both wait for the garbage collector.
        self.call = None
        if self._is_in_service:
            self._is_in_service = False
            assert self.tenant is not None
            self.tenant.leave()


def _sum(measure: Callable[[str, int], int], text: WriteText, data: Sequence[memoryview]) -> int:
    """Something about all outputs that are in a text."""
    outputs = [output for output in text.outputs if output.raw_bytes < 0]
    return sum(
        measure(output.datatype, len(part)) for output, part in zip(outputs, data, strict=True)
    )


def no_memory() -> RequestError:
    """What is said where the budget has no room."""
    return RequestError(503, "there is no memory for it just now", reason="memory")
