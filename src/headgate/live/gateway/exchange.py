"""An exchange: one request of a connection and its answer, of which there is exactly one."""

from __future__ import annotations

import logging
from asyncio import TimerHandle
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, final

from headgate.core.outcome import Outcome
from headgate.live.call import Call
from headgate.live.gateway.answers import (
    STATUS_LINES,
    Form,
    PlainForm,
    expired,
    outcome_line,
    retry_lines,
    timing_line,
    verdict,
)
from headgate.live.gateway.keys import Tenant
from headgate.live.gateway.refusal import Refused
from headgate.live.gateway.traceparent import traceparent
from headgate.live.metrics.responses import HTTP

if TYPE_CHECKING:
    from headgate.live.gateway.access import Asked
    from headgate.live.gateway.protocol import Connection
    from headgate.live.gateway.routes import Route
    from headgate.live.gateway.server import HttpServer

_LOG: Final = logging.getLogger(__name__)
_PLAIN: Final = PlainForm()


@final
class Exchange:
    """What handlers see of a request, and how they answer it."""

    __slots__ = (
        "_connection",
        "_is_done",
        "_is_head",
        "_timer",
        "asked",
        "body",
        "call",
        "closes",
        "form",
        "headers",
        "held_bytes",
        "refused",
        "request_id",
        "route",
        "server",
        "tenant",
        "trace",
    )

    def __init__(
        self,
        connection: Connection,
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
        self.body: bytes | bytearray = b""
        self.held_bytes = 0  # of the body, as the server counts them
        self.closes = False  # the connection ends with this answer
        self.refused: Refused | None = None  # known before the body came
        self.form: Form = _PLAIN
        self.call: Call | None = None
        self.asked: Asked | None = None  # for the access log, where there is one
        self.request_id = server.request_id(headers.get(b"x-request-id"))
        self.trace = traceparent(headers[b"traceparent"]) if b"traceparent" in headers else b""
        self._timer: TimerHandle | None = None
        self._is_done = False

    def handle(self) -> None:
        """Have it answered, now or later. Never raises."""
        try:
            if self.refused is not None:
                raise self.refused
            assert self.route is not None
            self.route.handler(self)
        except Refused as refused:
            self.refuse(refused)
        except Exception:
            self._break()

    def submit(self, call: Call) -> None:
        """Hand a call to the runtime, and wait for its answer in this exchange's form.

        Raises `Refused` where the tenant is at a limit.
        """
        assert self.tenant is not None
        self.tenant.enter(call.arrived_ns)
        self.call = call
        call.client_request_id = self.request_id
        if self.trace:
            call.trace = self.trace
        if call.gives_up:
            wait_s = (call.deadline_ns - call.arrived_ns) * 1e-9
            self._timer = self.server.loop.call_later(wait_s, self._expire)
        self.server.serving.submit(call)

    def answered(self, call: Call) -> None:
        """What the runtime calls when it is done with the call."""
        if self._is_done:
            self.release()  # at its deadline the call was answered, not over
            return
        try:
            refused = verdict(call, self.server.config, self.request_id)
            if refused is not None:
                self.refuse(refused)
                return
            lines, body = self.form.answer(call)
            if call.outcome == Outcome.LATE:
                lines += outcome_line(call)
            lines += timing_line(call, self.server.serving.now_ns())
            self.server.check_room(len(body))
            self.respond(200, lines, body)
        except Refused as refused:
            self.refuse(refused)
        except Exception:
            self._break()

    def refuse(self, refused: Refused) -> None:
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

    def respond(self, status: int, lines: bytes, body: bytes, reason: str = "") -> None:
        """Send the answer: the connection goes on to its next request."""
        self._is_done = True
        call = self.call
        self._let_go()
        server = self.server
        server.responses.count(HTTP, status, reason)
        if self.trace:
            lines += b"traceparent: %b\r\n" % self.trace
        if self.closes or server.is_leaving:
            self.closes = True
            lines += b"Connection: close\r\n"
        elif b"connection" in self.headers:
            lines += b"Connection: keep-alive\r\n"
        self._connection.send(
            b"%b%b%bX-Request-Id: %b\r\nContent-Length: %d\r\n\r\n%b"
            % (
                STATUS_LINES[status],
                server.common_lines,
                lines,
                self.request_id,
                len(body),
                b"" if self._is_head else body,
            ),
            self,
        )
        if server.access is not None:
            server.access.answered_http(self, call, status, reason, len(body))

    def abandon(self) -> None:
        """The client has gone: nobody wants the answer."""
        if not self._is_done:
            self._is_done = True
            if self.call is not None:
                self.server.serving.cancel(self.call)
                self.server.responses.count(HTTP, 499, "client_gone")
            self._let_go()

    def give_up(self, refused: Refused) -> None:
        """Answer now, for the call will not be."""
        call = self.call
        if call is not None:
            call.outcome = Outcome.CANCELLED
            self.server.serving.cancel(call)
        self.refuse(refused)

    def release(self) -> None:
        """Let others have the room that the body took."""
        self.server.bodies_bytes -= self.held_bytes
        self.held_bytes = 0

    def _expire(self) -> None:
        self._timer = None
        if not self._is_done and self.call is not None:
            # The call has the body until the runtime is done with it: see `answered`.
            held_bytes, self.held_bytes = self.held_bytes, 0
            self.refuse(expired(self.call))
            self.held_bytes = held_bytes

    def _break(self) -> None:
        """A defect of ours: say so once, here and to the client, and go on."""
        about = {"request_id": self.request_id.decode("latin-1")}
        _LOG.exception("a request broke the gateway", extra=about)
        if not self._is_done:
            self.form = _PLAIN
            self.refuse(Refused(500, "the gateway made a mistake", reason="internal"))

    def _let_go(self) -> None:
        if self.held_bytes:
            self.release()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.call is not None:
            # The call knows its exchange: let go of it, or both wait for the garbage collector.
            self.call = None
            if self.tenant is not None:
                self.tenant.leave()
