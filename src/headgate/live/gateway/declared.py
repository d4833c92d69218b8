"""What an application file declares about its gateway."""

from __future__ import annotations

import ssl
from pathlib import Path

from headgate.app import LoadedApp, ServeChoice
from headgate.core.errors import ConfigError
from headgate.live.gateway.config import ApiKey, GatewayConfig, TenantLimit


def gateway_config(loaded: LoadedApp) -> GatewayConfig:
    """What the application file says of the front ends."""
    serve = loaded.serve
    return GatewayConfig(
        body_bytes_max=serve.body_bytes,
        answer_bytes_max=serve.answer_bytes,
        bodies_bytes_max=serve.memory_bytes,
        connections_max=serve.connections,
        timeout_max_s=serve.timeout_ns / 1e9,
        overload_status=serve.overload_status,
        expose_errors=serve.expose_errors,
        keys=tuple(
            ApiKey(tenant.key_sha256, tenant.client_id)
            for tenant in loaded.tenants
            if tenant.key_sha256 is not None
        ),
        tenants=tuple(
            TenantLimit(
                tenant.client_id,
                rate_per_s=tenant.rate_per_s or 0.0,
                burst=tenant.burst,
                concurrency_max=tenant.concurrency or 0,
            )
            for tenant in loaded.tenants
        ),
    )


def tls_context(serve: ServeChoice, base: Path) -> ssl.SSLContext | None:
    """How connections are encrypted, if they are."""
    if serve.tls_certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    key = None if serve.tls_key is None else base / serve.tls_key
    try:
        context.load_cert_chain(base / serve.tls_certificate, key)
    except (OSError, ssl.SSLError) as error:
        problem = f"is no certificate with its key: {error}"
        raise ConfigError(
            problem, key="serve.tls_certificate", value=serve.tls_certificate
        ) from None
    return context
