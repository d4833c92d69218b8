"""The access log: one line per response, on the logger `headgate.access`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic_ns
from typing import Final, NamedTuple, final

from headgate.live.call import Call

TARGET_BYTES_MAX: Final = 1_000  # logged of a request's target

_LOG: Final = logging.getLogger("headgate.access")


class AccessEntry(NamedTuple):
    """What is known about a request when it arrives."""

    method: str
    target: str
    began_ns: int


@final
@dataclass(eq=False)
class AccessLog:
    """Logs responses. `models` and `tenants` are names, indexed by pipeline id and client id."""

    models: Sequence[str]
    tenants: Sequence[str]

    def http_entry(self, method: bytes, target: bytes) -> AccessEntry:
        """The entry of an HTTP request that arrives now, without its query, which may hold secrets.

        >>> AccessLog([], []).http_entry(b"GET", b"/v2?key=secret").target
        '/v2'
        """
        path = target.partition(b"?")[0][:TARGET_BYTES_MAX]
        return AccessEntry(method.decode("latin-1"), path.decode("latin-1"), monotonic_ns())

    def write(
        self,
        entry: AccessEntry,
        status: int | str,
        reason: str,
        *,
        request_id: bytes,
        client_id: int | None,
        call: Call | None,
        in_bytes: int,
        out_bytes: int,
    ) -> None:
        """Log one response, of any protocol. `client_id` is None for an anonymous client."""
        fields: dict[str, object] = {
            "method": entry.method,
            "target": entry.target,
            "status": status,
            "reason": reason or None,
            "tenant": None if client_id is None else self.tenants[client_id],
            "model": None if call is None else self.models[call.pipeline_id],
            "number": None if call is None else call.request_id,
            "in_bytes": in_bytes,
            "out_bytes": out_bytes,
            "total_ms": _ms(monotonic_ns() - entry.began_ns),
            "queue_ms": None,
            "exec_ms": None,
        }
        if call is not None and call.began_ns:
            fields["queue_ms"] = _ms(call.began_ns - call.arrived_ns)
            fields["exec_ms"] = _ms(call.ended_ns - call.began_ns)
        texts = {name: "-" if value is None else value for name, value in fields.items()}
        extra = {"fields": fields, "request_id": request_id.decode("latin-1")}
        _LOG.info(_TEXT, texts, extra=extra)


def _ms(duration_ns: int) -> float:
    return round(duration_ns * 1e-6, 3)


_TEXT: Final = (
    "%(method)s %(target)s %(status)s %(reason)s tenant=%(tenant)s model=%(model)s "
    "number=%(number)s in_bytes=%(in_bytes)d out_bytes=%(out_bytes)d total_ms=%(total_ms)s "
    "queue_ms=%(queue_ms)s exec_ms=%(exec_ms)s"
)
