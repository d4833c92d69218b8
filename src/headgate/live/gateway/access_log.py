"""The access log: one line for each request that was answered, on the logger `headgate.access`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import monotonic_ns
from typing import TYPE_CHECKING, Final, NamedTuple, final

from headgate.live.call import Call

if TYPE_CHECKING:
    from headgate.live.gateway.http.request import HttpRequest

TARGET_BYTES_MAX: Final = 1_000  # of what is shown of it

_LOG: Final = logging.getLogger("headgate.access")


class AccessEntry(NamedTuple):
    """What a request asks for, and since when."""

    method: str
    target: str
    began_ns: int


@final
class AccessLog:
    """Says how requests ended. Names of models and tenants are by their ids."""

    def __init__(self, models: Sequence[str], tenants: Sequence[str]) -> None:
        self._models = models
        self._tenants = tenants

    def asked(self, method: bytes, target: bytes) -> AccessEntry:
        """Keep the beginning of a request over HTTP. Its query may hold what is nobody's business.

        >>> AccessLog([], []).asked(b"GET", b"/v2?key=secret").target
        '/v2'
        """
        path = target.partition(b"?")[0][:TARGET_BYTES_MAX]
        return AccessEntry(method.decode("latin-1"), path.decode("latin-1"), monotonic_ns())

    def answered_http(
        self, exchange: HttpRequest, call: Call | None, status: int, reason: str, out_bytes: int
    ) -> None:
        """Say how a request over HTTP ended."""
        route, tenant = exchange.route, exchange.tenant
        # What is open to everybody is asked by nobody in particular.
        is_known = tenant is not None and route is not None and not route.rule.is_open
        self.answered(
            exchange.asked or AccessEntry("-", "-", monotonic_ns()),  # none of it was understood
            status,
            reason,
            request_id=exchange.request_id.decode("latin-1"),
            client_id=tenant.client_id if tenant is not None and is_known else None,
            call=call,
            in_bytes=exchange.body_bytes,
            out_bytes=out_bytes,
        )

    def answered(
        self,
        asked: AccessEntry,
        status: int | str,
        reason: str,
        *,
        request_id: str,
        client_id: int | None,
        call: Call | None,
        in_bytes: int,
        out_bytes: int,
    ) -> None:
        """Say how a request ended, in whatever protocol."""
        fields: dict[str, object] = {
            "method": asked.method,
            "target": asked.target,
            "status": status,
            "reason": reason or None,
            "tenant": None if client_id is None else self._tenants[client_id],
            "model": None if call is None else self._models[call.pipeline_id],
            "number": None if call is None else call.request_id,
            "in_bytes": in_bytes,
            "out_bytes": out_bytes,
            "total_ms": _ms(monotonic_ns() - asked.began_ns),
            "queue_ms": None,
            "exec_ms": None,
        }
        if call is not None and call.began_ns:
            fields["queue_ms"] = _ms(call.began_ns - call.arrived_ns)
            fields["exec_ms"] = _ms(call.ended_ns - call.began_ns)
        shown = {name: "-" if value is None else value for name, value in fields.items()}
        _LOG.info(_TEXT, shown, extra={"fields": fields, "request_id": request_id})


def _ms(duration_ns: int) -> float:
    return round(duration_ns * 1e-6, 3)


_TEXT: Final = (
    "%(method)s %(target)s %(status)s %(reason)s tenant=%(tenant)s model=%(model)s "
    "number=%(number)s in_bytes=%(in_bytes)d out_bytes=%(out_bytes)d total_ms=%(total_ms)s "
    "queue_ms=%(queue_ms)s exec_ms=%(exec_ms)s"
)
