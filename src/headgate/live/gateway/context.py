"""What requests and connections of all front ends share: limits, tenants, memory, ids, counters.

The HTTP server makes the context and refreshes it a few times a second (`refresh`). The gRPC front
end uses the same one, so a tenant has one rate, one concurrency limit and one share of the memory
budget, whichever protocol it speaks.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from email.utils import formatdate
from random import Random
from time import monotonic_ns
from typing import Final, NamedTuple, TypeGuard, final

from headgate.core.clock import SECOND_NS
from headgate.live.call import Call, FrontEndApi, GatewayPhase
from headgate.live.gateway.codec.client import Codec
from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.tenants import ApiKeys, Budget
from headgate.live.telemetry.metrics import Responses

CollectMetrics = Callable[[str], Coroutine[object, object, tuple[bytes, str]]]
TARGET_BYTES_MAX: Final = 1_000  # logged of a request's target

_LOG: Final = logging.getLogger("headgate.access")
_TEXT: Final = (
    "%(method)s %(target)s %(status)s %(reason)s tenant=%(tenant)s model=%(model)s "
    "number=%(number)s in_bytes=%(in_bytes)d out_bytes=%(out_bytes)d total_ms=%(total_ms)s "
    "queue_ms=%(queue_ms)s exec_ms=%(exec_ms)s"
)
# Ids of clients go to logs and to the event log, so they are short, and one line of plain text.
_ID_BYTES_MAX: Final = 128
_REQUEST_ID: Final = re.compile(rb"[!-~]{1,%d}" % _ID_BYTES_MAX)
_RETRY_JITTER: Final = 0.25  # of the time after which a client may retry


@final
class GatewayContext:
    """State shared by the front ends of one gateway. All of it is used on one event loop."""

    def __init__(
        self,
        api: FrontEndApi,
        config: GatewayConfig,
        render_metrics: Callable[[str], tuple[bytes, str]],
        responses: Responses | None = None,
    ) -> None:
        """`render_metrics` maps a scraper's `Accept` header to a page and its media type."""
        self.api = api
        self.config = config
        self.render_metrics = render_metrics
        # Where there are several gateways: likewise, but of all of them, and it takes a while.
        self.collect_metrics: CollectMetrics | None = None
        self.deferred: set[asyncio.Future[object]] = set()  # what responses wait for
        self.responses = responses or Responses()
        self.access_log: AccessLog | None = None
        self.keys = ApiKeys(config)
        self.timeout_max_ns = config.deadline_max_ns
        self.budget = Budget(
            # The largest request and its response always fit.
            max(config.memory_bytes_max, 2 * config.body_bytes_max),
            self.keys.client_ids,
            largest=config.body_bytes_max,
        )
        self.loop: asyncio.AbstractEventLoop
        self.common_headers = b""  # header lines of every HTTP response
        self._codec: Codec | None = None
        self._rng = Random(secrets.randbits(64))
        self._id_prefix = secrets.token_hex(6).encode()
        self._ids = 0

    @property
    def is_leaving(self) -> bool:
        """Whether every HTTP connection is closed with its next response."""
        phase = self.api.phase
        return phase is GatewayPhase.LAME_DUCK or phase is GatewayPhase.DRAINING

    @property
    def codec(self) -> Codec:
        """Reads and writes long texts. Made on first use: most gateways never need it."""
        if self._codec is None:
            self._codec = Codec(self.loop, self.config)
        return self._codec

    def refresh(self, now_s: float) -> None:
        """Update the `Date` header, and expire texts that wait for the codec."""
        self.common_headers = b"Server: %b\r\nDate: %b\r\n" % (
            self.config.server_name.encode(),
            formatdate(usegmt=True).encode(),
        )
        if self._codec is not None:
            self._codec.sweep(now_s)

    def close(self) -> None:
        """End the codec's processes."""
        if self._codec is not None:
            self._codec.close()

    def request_id(self, given: bytes | None) -> bytes:
        """The id of a request: the client's `X-Request-Id` if it is printable, or a new one."""
        if is_request_id(given):
            return given
        self._ids += 1
        return b"%b-%x" % (self._id_prefix, self._ids)

    def retry_ns(self, wait_ns: int) -> int:
        """When a client may retry, with jitter so that not all clients come back at once."""
        wait_ns = wait_ns or int(self.config.retry_after_s * SECOND_NS)
        return int(wait_ns * (1.0 + _RETRY_JITTER * self._rng.random()))


def is_request_id(given: bytes | None) -> TypeGuard[bytes]:
    """Whether a client has given its request an id that is used."""
    return given is not None and _REQUEST_ID.fullmatch(given) is not None


def with_body_id(assigned: bytes, headers: Mapping[bytes, bytes], given: str) -> bytes:
    """The id of a request whose body has been read: the client's own, wherever it has put it.

    The `id` in a body comes back in the response, and is what such a client knows its request by.
    A header goes first, and what cannot be an id does not replace the assigned one.

    >>> with_body_id(b"c0ffee-1", {}, "seven"), with_body_id(b"c0ffee-1", {}, "no id")
    (b'seven', b'c0ffee-1')
    """
    if not given or not given.isascii() or is_request_id(headers.get(b"x-request-id")):
        return assigned
    id = given[: _ID_BYTES_MAX + 1].encode()  # a longer text is not copied as a whole
    return id if is_request_id(id) else assigned


class AccessEntry(NamedTuple):
    """What is known about a request when it arrives."""

    method: str
    target: str
    began_ns: int


@final
@dataclass(eq=False)
class AccessLog:
    """Logs one line per response. `models` and `tenants` are names by pipeline and client id."""

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
