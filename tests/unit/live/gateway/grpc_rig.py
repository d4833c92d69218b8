"""A gRPC front end on a loop of its own, and a client that speaks its messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import uvloop
from fake_runtime import FakeRuntime
from grpc.aio import AioRpcError, Channel, UnaryUnaryMultiCallable, insecure_channel

from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.context import AccessLog, GatewayContext
from headgate.live.gateway.grpc.server import SERVICE, GrpcServer, Messages

DEFAULTS = GatewayConfig()
Trailers = dict[str, str | bytes]


class Rig:
    """The fake runtime, the server in front of it, a channel to the server, and messages."""

    def __init__(
        self,
        runtime: FakeRuntime,
        channel: Channel,
        port: int,
        context: GatewayContext,
        server: GrpcServer,
    ) -> None:
        self.context = context
        self.server = server
        self.runtime = runtime
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
        """Run `echo` on one row."""
        return await self.ask("ModelInfer", self.row(), **options)

    async def refused(self, request: Any = None, **options: Any) -> tuple[grpc.StatusCode, str]:
        """Send an inference that fails. Returns the status and the message."""
        try:
            await self.ask("ModelInfer", self.row() if request is None else request, **options)
        except AioRpcError as error:
            self.trailers = dict(error.trailing_metadata())
            return error.code(), error.details() or ""
        raise AssertionError("the RPC succeeded")

    def row(self, **fields: Any) -> Any:
        """A request to echo (1, 2), with typed contents."""
        request = self.messages["ModelInferRequest"](model_name="echo", **fields)
        tensor = request.inputs.add(name="x", datatype="FP32", shape=(1, 2))
        tensor.contents.fp32_contents.extend((1, 2))
        return request

    def responses(self, code: str, reason: str = "") -> int:
        """How many RPCs had this status and reason."""
        return dict(self.context.responses.counted()).get(("grpc", code, reason), 0)


def context_of(runtime: FakeRuntime, config: GatewayConfig = DEFAULTS) -> GatewayContext:
    """A context without an HTTP server."""
    return GatewayContext(runtime, config, lambda accept: (b"", ""))


@asynccontextmanager
async def served(
    config: GatewayConfig = DEFAULTS, access_log: AccessLog | None = None
) -> AsyncIterator[Rig]:
    runtime = FakeRuntime()
    context = context_of(runtime, config)
    context.access_log = access_log
    server = GrpcServer(context)
    port = await server.start("127.0.0.1", 0)
    try:
        async with insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Rig(runtime, channel, port, context, server)
    finally:
        await server.stop()


def run(
    scenario: Callable[[Rig], Awaitable[None]],
    config: GatewayConfig = DEFAULTS,
    access_log: AccessLog | None = None,
) -> None:
    """Run a scenario on the event loop that gateways use."""

    async def main() -> None:
        async with served(config, access_log) as rig, asyncio.timeout(60):
            await scenario(rig)

    uvloop.run(main())
