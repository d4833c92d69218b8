"""Limits of the gateway's front ends: those of the application file, and those that are fixed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from msgspec import structs

from headgate.config import AppConfig, ClientSpec, ServeSpec
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


class GatewayConfig(ServeSpec, frozen=True, rename=None):
    """The settings of `serve:`, and limits that nobody has to choose.

    A client that reaches a limit gets an error; the gateway goes on.
    """

    http: HttpLimits = HttpLimits()  # besides `body_bytes_max` and `connections_max`
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
    # The codec: texts that are decoded and encoded in another process
    codec_timeout_s: float = 10.0  # to process one text, and to wait in the queue
    codec_queue_max: int = 64  # texts of one tenant
    # Responses
    retry_after_s: float = 1.0  # while the server is starting or shutting down
    server_name: str = "headgate"
    # Authentication. Without keys, every client is anonymous.
    keys: tuple[ApiKey, ...] = ()
    tenants: tuple[TenantLimit, ...] = ()

    @property
    def http_limits(self) -> HttpLimits:
        return replace(
            self.http, body_bytes_max=self.body_bytes_max, connections_max=self.connections_max
        )


def gateway_config(app_config: AppConfig) -> GatewayConfig:
    """Return the limits of the front ends of an application.

    The file gives the limits of the server. Of several gateways each has an equal part of its
    connections and of its memory; the limits of tenants are divided by the number of gateways that
    there are at the time (`ApiKeys.divide`).
    """
    settings, gateways = structs.asdict(app_config.serve), app_config.serve.gateways
    settings["connections_max"] = max(1, settings["connections_max"] // gateways)
    settings["memory_bytes_max"] = max(1, settings["memory_bytes_max"] // gateways)
    return GatewayConfig(
        **settings,
        keys=tuple(
            ApiKey(tenant.key.removeprefix("sha256:"), client_id)
            for client_id, tenant in enumerate(app_config.tenants)
            if tenant.key is not None
        ),
        tenants=tuple(
            _tenant_limit(client_id, tenant) for client_id, tenant in enumerate(app_config.tenants)
        ),
    )


def _tenant_limit(client_id: int, client: ClientSpec) -> TenantLimit:
    rate_per_s = client.rate_per_s or 0.0
    return TenantLimit(
        client_id,
        rate_per_s=rate_per_s,
        burst=client.burst or max(1, ceil(rate_per_s)),
        concurrency_max=client.concurrency or 0,
    )
