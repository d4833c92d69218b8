"""Limits of the gateway's front ends, all in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headgate.http.interface import HttpLimits


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An API key of a tenant, as its SHA-256 in hexadecimal digits."""

    sha256: str
    client_id: int


@dataclass(frozen=True, slots=True)
class TenantLimit:
    """Limits of one tenant. 0 means no limit."""

    client_id: int
    rate_per_s: float = 0.0
    burst: int = 1  # requests that may arrive at once: the size of the token bucket
    concurrency_max: int = 0


@dataclass(frozen=True, slots=True)
class GatewayConfig(HttpLimits):
    """Limits of the front ends. A client that reaches one gets an error; the gateway goes on."""

    # Sizes
    response_bytes_max: int = 64 << 20
    # The memory budget: bodies of unanswered requests plus unread responses of all clients. The
    # gateway raises it where it could not hold one body and one response of the largest size.
    bodies_bytes_max: int = 512 << 20
    # Longer texts are decoded in another process. Decoding costs up to 40 ns a byte (for numbers of
    # one digit, or of hundreds), during which the event loop serves nobody else.
    inline_bytes_max: int = 128 << 10
    inline_elements_max: int = 1 << 16  # likewise for encoding a response: up to 90 ns an element
    json_bytes_max: int = 16 << 20
    # Typed contents over gRPC, whose elements are read one by one, 50 ns each.
    typed_bytes_max: int = 1 << 20
    typed_elements_max: int = 1 << 18
    inputs_max: int = 64
    dims_max: int = 8  # at most 32
    elements_max: int = 1 << 26
    # Times
    timeout_max_s: float = 3600.0  # the longest deadline that a client may ask for
    # The codec: texts that are decoded and encoded in another process
    codec_timeout_s: float = 10.0  # to process one text, and to wait in the queue
    codec_queue_max: int = 64  # texts of one tenant
    # Responses
    overload_status: Literal[429, 503] = 429
    retry_after_s: float = 1.0  # while the server is starting or shutting down
    server_name: str = "headgate"
    expose_errors: bool = False  # clients see the text of a function's exception
    # Authentication. Without keys, every client is anonymous.
    keys: tuple[ApiKey, ...] = ()
    tenants: tuple[TenantLimit, ...] = ()
