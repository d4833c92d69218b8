"""By when an answer is of use: what clients say about it, in the order in which they are believed.

`grpc-timeout`, then `X-Request-Timeout-Ms`, then what Envoy sends, then the protocol's own
parameter. All are durations, because clocks of clients cannot be trusted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from headgate.live.gateway.refusal import Refused

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

    Raises `Refused` where what it says cannot be understood.

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
    """A duration in milliseconds. Raises `Refused` if it is not one above zero."""
    if _MILLISECONDS.fullmatch(text):
        duration_ns = int(float(text) * 1e6)
        if duration_ns > 0:
            return duration_ns
    raise Refused(400, f"{what} must be a number of milliseconds above 0, not {_shown(text)}")


def _header_ns(name: bytes, headers: Mapping[bytes, bytes]) -> int:
    return milliseconds_ns(headers[name], name.decode())


def _grpc_ns(text: bytes) -> int:
    match = _GRPC.fullmatch(text)
    if match is None:
        raise Refused(
            400, f"grpc-timeout must be 1 to 8 digits and one of HMSmun, not {_shown(text)}"
        )
    return max(1, int(match[1]) * GRPC_UNITS_NS[match[2].decode()])


def _parameter_ns(timeout_us: object) -> int:
    # A bool is an int to Python, though not to a client.
    if type(timeout_us) is not int or timeout_us < 0:
        raise Refused(400, "parameters.timeout must be a whole number of microseconds, 0 or above")
    return timeout_us * 1000  # 0: none, as in Triton


def _shown(text: bytes) -> str:
    return repr(text[:40].decode("latin-1"))
