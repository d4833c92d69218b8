"""What a gateway allows: every limit of its front ends, in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

BACKLOG: Final = 4_096  # connections that wait to be accepted; the kernel may allow fewer


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key that a tenant may use, kept as its SHA-256 in hexadecimal digits."""

    sha256: str
    client_id: int


@dataclass(frozen=True, slots=True)
class TenantLimit:
    """How much one tenant may ask for. 0 is no limit."""

    client_id: int
    rate_per_s: float = 0.0
    burst: int = 1  # requests that may come at once
    concurrency_max: int = 0


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Limits of the front ends. Reaching one is an answer the client gets, never a crash."""

    # Sizes
    body_bytes_max: int = 64 << 20
    answer_bytes_max: int = 64 << 20
    # Of all bodies that are not answered and all answers that are not read, together. Room for one
    # of the largest of each there always is.
    bodies_bytes_max: int = 512 << 20
    # Text up to here is read by the gateway itself: that takes up to 40 ns a byte (numbers of one
    # digit, or of hundreds), and everybody waits for it. What is longer is read in another process.
    inline_bytes_max: int = 128 << 10
    inline_elements_max: int = 1 << 16  # of an answer in text: up to 90 ns each
    json_bytes_max: int = 16 << 20
    # Of tensors in types over gRPC: their elements are read one by one, 50 ns each.
    typed_bytes_max: int = 1 << 20
    typed_elements_max: int = 1 << 18
    header_bytes_max: int = 16 << 10
    headers_max: int = 100
    inputs_max: int = 64
    dims_max: int = 8  # at most 32
    elements_max: int = 1 << 26
    # Connections
    connections_max: int = 4096
    pipelined_max: int = 64  # requests that may wait behind another
    write_high_water: int = 1 << 16  # unread bytes of a connection that are not counted
    # Times
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    body_bytes_per_s_min: float = 8192.0  # after the time for headers: who announces, must send
    idle_timeout_s: float = 75.0
    write_timeout_s: float = 60.0  # a slow reader is let go after so long
    linger_s: float = 2.0  # how long a refused sender may go on sending unheard
    sweep_s: float = 0.25
    timeout_max_s: float = 3600.0  # the longest deadline a client may ask for
    # Texts that are read and written in another process
    codec_timeout_s: float = 10.0  # for one, and to wait for one's turn
    codec_queue_max: int = 64  # of one tenant
    # Answers
    overload_status: Literal[429, 503] = 429
    retry_after_s: float = 1.0  # while it is starting or leaving
    server_name: str = "headgate"
    expose_errors: bool = False  # clients get the text of a function's exception
    # Who may ask; nobody is asked for a key where there are none.
    keys: tuple[ApiKey, ...] = ()
    tenants: tuple[TenantLimit, ...] = ()
