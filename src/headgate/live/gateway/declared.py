"""What an application file declares about its gateway."""

from __future__ import annotations

import ssl
from pathlib import Path

from headgate.app import LoadedApp
from headgate.app.spec import ServeSpec
from headgate.core.errors import ConfigError
from headgate.core.units import parse_duration, parse_rate, parse_size
from headgate.live.gateway.config import ApiKey, GatewayConfig, TenantLimit


def gateway_config(loaded: LoadedApp) -> GatewayConfig:
    """What the application file says of the front ends."""
    serve = loaded.serve
    keys: list[ApiKey] = []
    tenants: list[TenantLimit] = []
    specs = loaded.clients
    for client in loaded.app.clients:
        spec = specs.get(client.name)
        if spec is None:
            continue
        if spec.key is not None:
            keys.append(ApiKey(spec.key.removeprefix("sha256:"), client.id))
        tenants.append(
            TenantLimit(
                client.id,
                rate_per_s=0.0 if spec.rate is None else parse_rate(spec.rate),
                burst=spec.burst,
                concurrency_max=spec.concurrency or 0,
            )
        )
    return GatewayConfig(
        body_bytes_max=parse_size(serve.body),
        connections_max=serve.connections,
        timeout_max_s=parse_duration(serve.timeout) / 1e9,
        overload_status=serve.overload_status,
        keys=tuple(keys),
        tenants=tuple(tenants),
    )


def tls_context(serve: ServeSpec, base: Path) -> ssl.SSLContext | None:
    """How connections are encrypted, if they are."""
    if serve.tls_certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    key = None if serve.tls_key is None else base / serve.tls_key
    try:
        context.load_cert_chain(base / serve.tls_certificate, key)
    except (OSError, ssl.SSLError) as error:
        problem = f"is no certificate with its key: {error}"
        raise ConfigError(problem, key="serve.tls_certificate") from None
    return context
