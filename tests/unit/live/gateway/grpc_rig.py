"""A gRPC front end on a loop of its own, and a client that speaks its messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import uvloop
from fake_serving import FakeServing
from grpc.aio import AioRpcError, Channel, UnaryUnaryMultiCallable, insecure_channel

from headgate.live.gateway.access_log import AccessLog
from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.grpc.messages import SERVICE, Messages
from headgate.live.gateway.grpc.server import GrpcServer
from headgate.live.gateway.http.server import HttpServer

DEFAULTS = GatewayConfig()
Trailers = dict[str, str | bytes]


class Rig:
    """The fake runtime, the channel to the server before it, and messages."""

    def __init__(
        self,
        serving: FakeServing,
        channel: Channel,
        port: int,
        http: HttpServer,
        server: GrpcServer,
    ) -> None:
        self.http = http
        self.server = server
        self.serving = serving
        self.channel = channel
        self.port = port
        self.messages = Messages()
        self.trailers: Trailers = {}

    async def ask(
        self,
        method: str,
        request: Any,
        *,
        timeout_s: float | None = 60.0,
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> Any:
        """The response. Raises `AioRpcError`."""
        stub: UnaryUnaryMultiCallable[bytes, bytes] = self.channel.unary_unary(
            f"/{SERVICE}/{method}"
        )
        call = stub(
            request if isinstance(request, bytes) else request.SerializeToString(),
            timeout=timeout_s,
            metadata=metadata,
        )
        answer = await call
        self.trailers = dict(await call.trailing_metadata() or ())
        return self.messages[f"{method}Response"].FromString(answer)

    async def infer(self, **options: Any) -> Any:
        """Ask `echo` for one row."""
        return await self.ask("ModelInfer", self.row(), **options)

    async def refused(self, request: Any = None, **options: Any) -> tuple[grpc.StatusCode, str]:
        """Ask for an inference and be turned down: the status and the sentence."""
        try:
            await self.ask("ModelInfer", self.row() if request is None else request, **options)
        except AioRpcError as error:
            self.trailers = dict(error.trailing_metadata())
            return error.code(), error.details() or ""
        raise AssertionError("it was served")

    def row(self, **fields: Any) -> Any:
        """A request to echo (1, 2), in types."""
        request = self.messages["ModelInferRequest"](model_name="echo", **fields)
        tensor = request.inputs.add(name="x", datatype="FP32", shape=(1, 2))
        tensor.contents.fp32_contents.extend((1, 2))
        return request

    def responses(self, code: str, reason: str = "") -> int:
        """How many RPCs were answered so."""
        return dict(self.http.responses.counted()).get(("grpc", code, reason), 0)


def http_of(serving: FakeServing, config: GatewayConfig = DEFAULTS) -> HttpServer:
    """What a gRPC front end shares with HTTP, which nobody listens for."""
    return HttpServer(serving, config, lambda accept: (b"", ""))


@asynccontextmanager
async def served(
    config: GatewayConfig = DEFAULTS, access: AccessLog | None = None
) -> AsyncIterator[Rig]:
    serving = FakeServing()
    http = http_of(serving, config)
    http.access = access
    server = GrpcServer(http)
    port = await server.start("127.0.0.1", 0)
    try:
        async with insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Rig(serving, channel, port, http, server)
    finally:
        await server.stop()


def run(
    story: Callable[[Rig], Awaitable[None]],
    config: GatewayConfig = DEFAULTS,
    access: AccessLog | None = None,
) -> None:
    """Have a story told on the loop that gateways use."""

    async def told() -> None:
        async with served(config, access) as rig, asyncio.timeout(60):
            await story(rig)

    uvloop.run(told())
