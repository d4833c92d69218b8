"""By when an answer is of use: what clients say about it, in the order in which they are believed.

`grpc-timeout`, then `X-Request-Timeout-Ms`, then what Envoy sends, then the protocol's own
parameter. All are durations, because clocks of clients cannot be trusted.
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


def timeout_ns(headers: Mapping[bytes, bytes], timeout_us: object, max_ns: int) -> int:
    """How long the client will wait, at most `max_ns`; 0 where it does not say.

    Raises `RequestError` where what it says cannot be understood.

    >>> timeout_ns({b"grpc-timeout": b"20m", b"x-request-timeout-ms": b"5"}, None, 10**12)
    20000000
    >>> timeout_ns({}, 1500, 10**12)
    1500000
    """
    asked_ns = 0
    if b"grpc-timeout" in headers:
        asked_ns = _grpc_ns(headers[b"grpc-timeout"])
    elif _MS_HEADERS[0] in headers:
        asked_ns = _header_ns(_MS_HEADERS[0], headers)
    elif _MS_HEADERS[1] in headers:
        asked_ns = _header_ns(_MS_HEADERS[1], headers)
    elif timeout_us is not None:
        asked_ns = _parameter_ns(timeout_us)
    return asked_ns if asked_ns < max_ns else max_ns


def milliseconds_ns(text: bytes, what: str) -> int:
    """A duration in milliseconds. Raises `RequestError` if it is not one above zero."""
    if _MILLISECONDS.fullmatch(text):
        duration_ns = int(float(text) * 1e6)
        if duration_ns > 0:
            return duration_ns
    raise RequestError(400, f"{what} must be a number of milliseconds above 0, not {_shown(text)}")


def _header_ns(name: bytes, headers: Mapping[bytes, bytes]) -> int:
    return milliseconds_ns(headers[name], name.decode())


def _grpc_ns(text: bytes) -> int:
    match = _GRPC.fullmatch(text)
    if match is None:
        raise RequestError(
            400, f"grpc-timeout must be 1 to 8 digits and one of HMSmun, not {_shown(text)}"
        )
    return max(1, int(match[1]) * GRPC_UNITS_NS[match[2].decode()])


def _parameter_ns(timeout_us: object) -> int:
    # A bool is an int to Python, though not to a client.
    if type(timeout_us) is not int or timeout_us < 0:
        raise RequestError(
            400, "parameters.timeout must be a whole number of microseconds, 0 or above"
        )
    return timeout_us * 1000  # 0: none, as in Triton


def _shown(text: bytes) -> str:
    return repr(text[:40].decode("latin-1"))


# How urgent a request is, as clients say it and as calls have it (smaller first, 0 is usual).
#
# RFC 9218 has urgencies from 0 to 7, usually 3. The protocol's parameter has 1 for the highest, and
# 0 for the usual one. Both are put on one scale, so that 1 means what `u=0` means.


URGENCY_USUAL: Final = 3
PRIORITY_MAX: Final = 1 << 32
_URGENCY: Final = re.compile(rb"(?:^|,)[ \t]*u=([0-7])[ \t]*(?:$|[,;])")


def priority_of(headers: Mapping[bytes, bytes], parameter: object) -> int:
    """The priority of a call. The parameter goes before the header.

    Raises `RequestError` if the parameter is malformed; a malformed header counts as absent, as
    its RFC demands.

    >>> priority_of({}, 1), priority_of({b"priority": b"u=0, i"}, None), priority_of({}, 0)
    (-3, -3, 0)
    """
    if parameter is not None:
        if type(parameter) is not int or not 0 <= parameter < PRIORITY_MAX:
            raise RequestError(
                400, f"parameters.priority must be a whole number below {PRIORITY_MAX}"
            )
        return parameter - 1 - URGENCY_USUAL if parameter else 0
    if b"priority" in headers:
        match = _URGENCY.search(headers[b"priority"])
        if match is not None:
            return int(match[1]) - URGENCY_USUAL
    return 0


# The W3C's `traceparent`: kept and sent back where it is well formed, ignored where it is not.


_FORM: Final = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)


def traceparent(text: bytes | None) -> bytes:
    """The trace that a request belongs to; empty where it names none.

    >>> traceparent(b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")[:5]
    b'00-0a'
    >>> traceparent(b"00-00000000000000000000000000000000-b7ad6b7169203331-01")
    b''
    """
    return text if text and _FORM.fullmatch(text) else b""
