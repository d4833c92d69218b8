"""The gRPC front end as a whole: its services, its limits, its life."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final, final

from google.protobuf.message import DecodeError
from grpc import ssl_server_credentials
from grpc.aio import server
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import SERVICE_NAME as REFLECTION
from grpc_reflection.v1alpha.reflection import ReflectionServicer

from headgate.core.errors import ConfigError
from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.errors import RequestError
from headgate.live.gateway.grpc.admission import (
    LOOKAHEAD_BYTES,
    Rpc,
    RpcAdmission,
    message_bytes_max,
)
from headgate.live.gateway.grpc.messages import SERVICE, Messages
from headgate.live.gateway.grpc.service import HEALTH, Health, InferenceService
from headgate.live.gateway.http.server import HttpServer

STREAMS_MAX: Final = 256  # RPCs of one connection at a time; a client has others wait
_PING_MS_MIN: Final = 5_000  # clients that ping more often than this are let go
_KEEPALIVE_MS: Final = 20_000  # so often a connection that is silent is asked whether it lives
# A client that does not read its answer cannot be cut off from here but with its connection, and
# its tenant is short of what it holds. Connections end well after so long: clients make new ones.
_AGE_MS: Final = 300_000
_PENDING_MAX: Final = 256  # RPCs that have come and were not looked at


@final
class GrpcServer:
    """Listens on the running event loop, next to the HTTP front end and for the same runtime.

    gRPC opens its own socket. Whoever wants the port kept, or chosen, beforehand binds one with
    `SO_REUSEPORT` and does not listen on it.
    """

    def __init__(self, http: HttpServer) -> None:
        """Tenants, budget, ids and counters are the HTTP server's, however clients ask."""
        messages = Messages()
        self._guard = RpcAdmission(http)
        self._server = server(options=_options(http.config, message_bytes_max(http)))
        InferenceService(http, self._guard, messages)
        self._health = Health(http.serving, self._guard)
        _Reflection(self._guard, messages)
        self._server.add_generic_rpc_handlers((self._guard,))

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

    def abandon_all(self, message: str = "the server has ended before it was done") -> None:
        """Answer every RPC that is open with UNAVAILABLE (`draining`)."""
        self._guard.abandon_all(message)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Take no more RPCs; those in progress have so long to end, and are then cut off."""
        self._health.is_over = True
        await self._server.stop(grace_s)


def _options(config: GatewayConfig, message_bytes: int) -> list[tuple[str, int]]:
    return [
        # Messages. The first is looked at when a message begins, not when it is there.
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.max_send_message_length", config.answer_bytes_max),
        ("grpc.compression_enabled_algorithms_bitset", 1),  # none: as over HTTP
        ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
        ("grpc.http2.bdp_probe", 0),  # it would make of the above whatever the network can carry
        ("grpc.max_metadata_size", config.header_bytes_max),
        ("grpc.absolute_max_metadata_size", config.header_bytes_max),
        # Connections.
        ("grpc.so_reuseport", 1),
        ("grpc.max_allowed_incoming_connections", config.connections_max),
        ("grpc.max_concurrent_streams", STREAMS_MAX),
        ("grpc.server.max_pending_requests", _PENDING_MAX),
        ("grpc.server.max_pending_requests_hard_limit", 2 * _PENDING_MAX),
        ("grpc.server_handshake_timeout_ms", int(config.header_timeout_s * 1000)),
        ("grpc.http2.settings_timeout", int(config.header_timeout_s * 1000)),
        ("grpc.http2.min_ping_interval_without_data_ms", _PING_MS_MIN),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", int(config.header_timeout_s * 1000)),
        ("grpc.max_connection_idle_ms", int(config.idle_timeout_s * 1000)),
        ("grpc.max_connection_age_ms", _AGE_MS),
        (
            "grpc.max_connection_age_grace_ms",
            int(1000 * (config.timeout_max_s + config.write_timeout_s)),
        ),
    ]


@final
class _Reflection:
    """Lets tools ask what there is, out of the pool that knows our messages."""

    def __init__(self, guard: RpcAdmission, messages: Messages) -> None:
        for file in (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
            messages.pool.AddSerializedFile(file.serialized_pb)
        self._guard = guard
        self._servicer = ReflectionServicer((SERVICE, HEALTH, REFLECTION), messages.pool)
        guard.add_stream(f"/{REFLECTION}/ServerReflectionInfo", self._reflect)

    async def _reflect(self, rpc: Rpc) -> AsyncIterator[bytes]:
        while (message := await self._guard.read_public(rpc)) is not None:
            try:
                request = reflection_pb2.ServerReflectionRequest.FromString(message)
            except DecodeError:
                raise RequestError(400, "the message is not a ServerReflectionRequest") from None
            for answer in self._servicer.ServerReflectionInfo(iter((request,)), rpc.context):
                yield answer.SerializeToString()
