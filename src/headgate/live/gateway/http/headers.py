"""Request headers that the gateway understands: deadlines, priorities and trace contexts.

Deadlines, by precedence: `grpc-timeout`, `X-Request-Timeout-Ms`, Envoy's header, the `timeout`
parameter of the Open Inference Protocol. All are durations: clocks of clients cannot be trusted.

Priorities: RFC 9218 has urgencies from 0 to 7, 3 by default. The protocol's `priority` parameter
has 1 for the highest, and 0 for the default. Calls have one scale for both, on which smaller is
more urgent and 0 is the default, so that parameter 1 and `u=0` mean the same.

Trace contexts are the W3C's `traceparent`, sent back if well formed and ignored if not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from headgate.live.gateway.errors import RequestError

GRPC_UNITS_NS: Final[Mapping[str, int]] = {
    "H": 3_600_000_000_000,
    "M": 60_000_000_000,
    "S": 1_000_000_000,
    "m": 1_000_000,
    "u": 1_000,
    "n": 1,
}
_GRPC: Final = re.compile(rb"([0-9]{1,8})([HMSmun])")
_MILLISECONDS: Final = re.compile(rb"[0-9]{1,12}(\.[0-9]{1,6})?")
_MS_HEADERS: Final = (b"x-request-timeout-ms", b"x-envoy-expected-rq-timeout-ms")
URGENCY_DEFAULT: Final = 3
PRIORITY_MAX: Final = 1 << 32
_URGENCY: Final = re.compile(rb"(?:^|,)[ \t]*u=([0-7])[ \t]*(?:$|[,;])")
_TRACEPARENT: Final = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)


def timeout_ns(headers: Mapping[bytes, bytes], timeout_us: object, max_ns: int) -> int:
    """The client's timeout, at most `max_ns`; 0 where the client gives none.

    Raises `RequestError` where a timeout is malformed.

    >>> timeout_ns({b"grpc-timeout": b"20m", b"x-request-timeout-ms": b"5"}, None, 10**12)
    20000000
    >>> timeout_ns({}, 1500, 10**12)
    1500000
    """
    given_ns = 0
    if b"grpc-timeout" in headers:
        given_ns = _grpc_ns(headers[b"grpc-timeout"])
    elif _MS_HEADERS[0] in headers:
        given_ns = _header_ns(_MS_HEADERS[0], headers)
    elif _MS_HEADERS[1] in headers:
        given_ns = _header_ns(_MS_HEADERS[1], headers)
    elif timeout_us is not None:
        given_ns = _parameter_ns(timeout_us)
    return given_ns if given_ns < max_ns else max_ns


def milliseconds_ns(text: bytes, what: str) -> int:
    """Parse a duration in milliseconds. Raises `RequestError` unless it is above zero."""
    if _MILLISECONDS.fullmatch(text):
        duration_ns = int(float(text) * 1e6)
        if duration_ns > 0:
            return duration_ns
    raise RequestError(400, f"{what} must be a number of milliseconds above 0, not {_quoted(text)}")


def priority_of(headers: Mapping[bytes, bytes], parameter: object) -> int:
    """The priority of a call; the parameter takes precedence over the header.

    Raises `RequestError` if the parameter is malformed; a malformed header is ignored, as RFC 9218
    demands.

    >>> priority_of({}, 1), priority_of({b"priority": b"u=0, i"}, None), priority_of({}, 0)
    (-3, -3, 0)
    """
    if parameter is not None:
        if type(parameter) is not int or not 0 <= parameter < PRIORITY_MAX:
            raise RequestError(
                400, f"parameters.priority must be a whole number below {PRIORITY_MAX}"
            )
        return parameter - 1 - URGENCY_DEFAULT if parameter else 0
    if b"priority" in headers:
        match = _URGENCY.search(headers[b"priority"])
        if match is not None:
            return int(match[1]) - URGENCY_DEFAULT
    return 0


def traceparent(text: bytes | None) -> bytes:
    """The `traceparent` header if it is well formed, otherwise nothing.

    >>> traceparent(b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")[:5]
    b'00-0a'
    >>> traceparent(b"00-00000000000000000000000000000000-b7ad6b7169203331-01")
    b''
    """
    return text if text and _TRACEPARENT.fullmatch(text) else b""


def _header_ns(name: bytes, headers: Mapping[bytes, bytes]) -> int:
    return milliseconds_ns(headers[name], name.decode())


def _grpc_ns(text: bytes) -> int:
    match = _GRPC.fullmatch(text)
    if match is None:
        raise RequestError(
            400, f"grpc-timeout must be 1 to 8 digits and one of HMSmun, not {_quoted(text)}"
        )
    return max(1, int(match[1]) * GRPC_UNITS_NS[match[2].decode()])


def _parameter_ns(timeout_us: object) -> int:
    # `type` and not `isinstance`: a bool is an int to Python, but not to a client.
    if type(timeout_us) is not int or timeout_us < 0:
        raise RequestError(
            400, "parameters.timeout must be a whole number of microseconds, 0 or above"
        )
    return timeout_us * 1000  # 0 means no timeout, as in Triton


def _quoted(text: bytes) -> str:
    return repr(text[:40].decode("latin-1"))
