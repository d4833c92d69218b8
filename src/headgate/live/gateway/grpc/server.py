"""The gRPC front end: the server with its options, and its services."""

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
from headgate.http.interface import SHUTDOWN_MESSAGE
from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.context import GatewayContext
from headgate.live.gateway.errors import RequestError
from headgate.live.gateway.grpc.admission import (
    LOOKAHEAD_BYTES,
    Rpc,
    RpcAdmission,
    message_bytes_max,
)
from headgate.live.gateway.grpc.messages import SERVICE, Messages
from headgate.live.gateway.grpc.service import HEALTH, Health, InferenceService

STREAMS_MAX: Final = 256  # concurrent RPCs of one connection; clients queue more
_PING_MS_MIN: Final = 5_000  # clients that ping more often are disconnected
_KEEPALIVE_MS: Final = 20_000  # a silent connection is pinged after this time
# Maximum age of a connection. A client that does not read its response holds part of its tenant's
# memory budget, and can only be cut off by ending its connection. Clients reconnect by themselves.
_AGE_MS: Final = 300_000
_PENDING_MAX: Final = 256  # RPCs that have arrived and are not handled yet


@final
class GrpcServer:
    """Listens on the running event loop, next to the HTTP server and for the same runtime.

    gRPC opens its own socket. To reserve or choose the port beforehand, bind a socket with
    `SO_REUSEPORT` and do not listen on it.
    """

    def __init__(self, context: GatewayContext) -> None:
        """`context` is the HTTP server's: tenants have one budget whichever protocol they use."""
        messages = Messages()
        self._admission = RpcAdmission(context)
        self._server = server(options=_options(context.config, message_bytes_max(context)))
        InferenceService(context, self._admission, messages)
        self._health = Health(context.api, self._admission)
        _Reflection(self._admission, messages)
        self._server.add_generic_rpc_handlers((self._admission,))

    async def start(
        self, host: str, port: int, certificate: Path | None = None, key: Path | None = None
    ) -> int:
        """Listen. Returns the port, which gRPC chooses for 0. Raises `ConfigError` if it is taken.

        With a certificate (PEM; its key in the same file unless given), TLS is required.
        """
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if certificate is None:
                bound = self._server.add_insecure_port(address)
            else:
                pair = ((key or certificate).read_bytes(), certificate.read_bytes())
                bound = self._server.add_secure_port(address, ssl_server_credentials([pair]))
        except (OSError, RuntimeError) as error:
            problem = f"gRPC cannot listen on this address: {error}"
            raise ConfigError(problem, key="serve.grpc_port", value=address) from None
        await self._server.start()
        return bound

    def abort_all(self, message: str = SHUTDOWN_MESSAGE) -> None:
        """Respond to every open RPC with UNAVAILABLE (`draining`)."""
        self._admission.abort_all(message)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Accept no more RPCs; those in progress are cancelled after `grace_s`."""
        self._health.is_closed = True
        await self._server.stop(grace_s)


def _options(config: GatewayConfig, message_bytes: int) -> list[tuple[str, int]]:
    return [
        # Messages. The first limit is checked when a message begins, not when it has arrived.
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.max_send_message_length", config.response_bytes_max),
        ("grpc.compression_enabled_algorithms_bitset", 1),  # no compression, as over HTTP
        ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
        ("grpc.http2.bdp_probe", 0),  # it would raise the lookahead to what the network carries
        ("grpc.max_metadata_size", config.http.header_bytes_max),
        ("grpc.absolute_max_metadata_size", config.http.header_bytes_max),
        # Connections.
        ("grpc.so_reuseport", 1),
        ("grpc.max_allowed_incoming_connections", config.connections_max),
        ("grpc.max_concurrent_streams", STREAMS_MAX),
        ("grpc.server.max_pending_requests", _PENDING_MAX),
        ("grpc.server.max_pending_requests_hard_limit", 2 * _PENDING_MAX),
        ("grpc.server_handshake_timeout_ms", int(config.http.header_timeout_s * 1000)),
        ("grpc.http2.settings_timeout", int(config.http.header_timeout_s * 1000)),
        ("grpc.http2.min_ping_interval_without_data_ms", _PING_MS_MIN),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", int(config.http.header_timeout_s * 1000)),
        ("grpc.max_connection_idle_ms", int(config.http.idle_timeout_s * 1000)),
        ("grpc.max_connection_age_ms", _AGE_MS),
        (
            "grpc.max_connection_age_grace_ms",
            int(1000 * (config.deadline_max_ns / 1e9 + config.http.write_timeout_s)),
        ),
    ]


@final
class _Reflection:
    """Server reflection: tools list the services and their messages."""

    def __init__(self, admission: RpcAdmission, messages: Messages) -> None:
        for file in (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
            messages.pool.AddSerializedFile(file.serialized_pb)
        self._admission = admission
        self._servicer = ReflectionServicer((SERVICE, HEALTH, REFLECTION), messages.pool)
        admission.add_stream(f"/{REFLECTION}/ServerReflectionInfo", self._reflect)

    async def _reflect(self, rpc: Rpc) -> AsyncIterator[bytes]:
        while (message := await self._admission.read_public(rpc)) is not None:
            try:
                request = reflection_pb2.ServerReflectionRequest.FromString(message)
            except DecodeError:
                raise RequestError(400, "the message is not a ServerReflectionRequest") from None
            for response in self._servicer.ServerReflectionInfo(iter((request,)), rpc.context):
                yield response.SerializeToString()
