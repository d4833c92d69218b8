"""The gRPC front end as a whole: its services, its limits, its life."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, final

from grpc import ssl_server_credentials
from grpc.aio import Server, server
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import SERVICE_NAME as REFLECTION
from grpc_reflection.v1alpha.reflection import enable_server_reflection

from headgate.core.errors import ConfigError
from headgate.live.gateway.access import AccessLog
from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.grpc_health import HEALTH, Health
from headgate.live.gateway.grpc_messages import SERVICE, Messages
from headgate.live.gateway.grpc_service import InferenceService
from headgate.live.gateway.keys import KeyRing
from headgate.live.serving import Serving

_PING_MS_MIN: Final = 5_000  # clients that ping more often than this are let go


@final
class GrpcServer:
    """Listens on the running event loop, next to the HTTP front end and for the same runtime.

    gRPC opens its own socket. Whoever wants the port kept, or chosen, beforehand binds one with
    `SO_REUSEPORT` and does not listen on it.
    """

    def __init__(
        self,
        serving: Serving,
        config: GatewayConfig,
        keys: KeyRing,
        retry_ns: Callable[[int], int],
        access: AccessLog | None = None,
    ) -> None:
        """`keys` and `retry_ns` are the HTTP server's: tenants are the same, however they ask."""
        messages = Messages()
        self._server = server(
            options=_options(config), maximum_concurrent_rpcs=config.connections_max
        )
        service = InferenceService(serving, config, keys, retry_ns, messages, access)
        self._server.add_generic_rpc_handlers((service.handlers(),))
        add_HealthServicer_to_server(Health(serving), self._server)
        _reflect(self._server, messages)

    async def start(
        self, host: str, port: int, certificate: Path | None = None, key: Path | None = None
    ) -> int:
        """Listen; the port, which is chosen where it is 0. Raises `ConfigError` if it is taken.

        With a certificate (PEM; its key in the same file unless given), only over TLS.
        """
        shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if certificate is None:
                bound = self._server.add_insecure_port(shown)
            else:
                pair = ((key or certificate).read_bytes(), certificate.read_bytes())
                bound = self._server.add_secure_port(shown, ssl_server_credentials([pair]))
        except (OSError, RuntimeError) as error:
            problem = f"gRPC cannot listen there: {error}"
            raise ConfigError(problem, key="serve.grpc_port", value=shown) from None
        await self._server.start()
        return bound

    async def stop(self, grace_s: float = 0.0) -> None:
        """Take no more RPCs; those in progress have so long to end, and are then cut off."""
        await self._server.stop(grace_s)


def _options(config: GatewayConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", config.body_bytes_max),
        ("grpc.max_send_message_length", -1),  # our own answers
        ("grpc.max_metadata_size", config.header_bytes_max),
        ("grpc.so_reuseport", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _PING_MS_MIN),
        ("grpc.max_connection_idle_ms", int(config.idle_timeout_s * 1000)),
    ]


def _reflect(to: Server, messages: Messages) -> None:
    """Let tools ask what there is, out of the pool that knows our messages."""
    for file in (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
        messages.pool.AddSerializedFile(file.serialized_pb)
    enable_server_reflection((SERVICE, HEALTH, REFLECTION), to, messages.pool)
