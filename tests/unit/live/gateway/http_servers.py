"""The servers that share one HTTP connection: the gateway, the Lambda API, and a Runtime API.

Each can be asked three things: a request that is answered at once, one whose response is held until
`release`, and one with a large response.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import uvloop
from gateway_rig import (
    QUICK,
    Connected,
    Reply,
    body,
    infer,
    request,
    rig,
    tensor,
    with_limits,
)

from headgate.http.server import HttpServer
from headgate.lambda_emulator import instance as instances
from headgate.lambda_emulator.auth import RequestAuth
from headgate.lambda_emulator.http import EmulatorRequest, EmulatorServer, Response
from headgate.lambda_emulator.http import Reply as EmulatorReply
from headgate.lambda_emulator.instance import FunctionInstance, InstanceHost
from headgate.lambda_emulator.platform import LambdaPlatform
from headgate.lambda_emulator.settings import PlatformSettings

SERVERS = ("gateway", "lambda_api", "runtime_api")
LARGE_BYTES = 1_000_000
NO_LIMITS: Mapping[str, float] = MappingProxyType({})
RUNTIME = "/2018-06-01/runtime"


@dataclass
class Served(Connected):
    """A running server and its clients."""

    server: HttpServer
    quick: bytes  # answered at once, with `quick_status`
    quick_status: int
    held: bytes  # answered by `release`
    large: bytes  # with a large response
    waiting: Callable[[], int]  # requests that were held so far
    release: Callable[[], None]  # answers the oldest request that is held, if any, and later ones

    def named(self, data: bytes) -> bytes:
        """Raw bytes with the path of `quick` for `/quick`, and a `Host` of this server."""
        path = self.quick.split(b" ")[1]
        return data.replace(b"/quick", path).replace(b"Host: x", self._host_line)

    @property
    def _host_line(self) -> bytes:
        return self.quick.split(b"\r\n")[1]

    async def refused(self, data: bytes, status: int) -> None:
        """The only response has this status, and the connection is closed."""
        client = await self.connect()
        client.send(data)
        reply = await client.reply()
        assert (reply.status, reply.headers["connection"]) == (status, "close"), reply
        assert message(reply)
        assert await client.is_closed()


def message(reply: Reply) -> str:
    """The sentence of an error, in the shape of the gateway or of AWS."""
    text = reply.json.get("error") or reply.json.get("message") or reply.json.get("Message")
    assert isinstance(text, str)
    return text


def run(
    name: str,
    scenario: Callable[[Served], Awaitable[None]],
    directory: Path,
    limits: Mapping[str, float] = NO_LIMITS,
) -> None:
    """Run a scenario against one of `SERVERS`, on the event loop that the server has in use."""
    start = {"gateway": _gateway, "lambda_api": _lambda_api, "runtime_api": _runtime_api}[name]

    async def main() -> None:
        async with start(directory, limits) as served:
            try:
                await scenario(served)
            finally:
                for client in served.clients:
                    client.writer.close()
                served.server.close()
                await served.until(lambda: not served.server.connections)
                await asyncio.sleep(0)

    uvloop.run(main()) if name == "gateway" else asyncio.run(main())


@asynccontextmanager
async def _gateway(_: Path, limits: Mapping[str, float]) -> AsyncIterator[Served]:
    config = with_limits(QUICK, **limits)
    async with rig(config) as made:
        runtime = made.runtime
        runtime.mode = "never"

        def release() -> None:
            runtime.mode = "echo"
            if runtime.calls:
                runtime.complete(runtime.calls[0])

        yield Served(
            made.port,
            made.server,
            request("GET", "/livez"),
            200,
            infer(body()),
            infer(body(tensor(["y" * LARGE_BYTES], (1, 1), "BYTES")), model="bytes"),
            lambda: len(runtime.calls),
            release,
        )


async def _open(
    server: EmulatorServer, limits: Mapping[str, float], method: str, path: str, status: int
) -> Served:
    """Serve. Requests with a path that names it are held, or get a large response."""
    changed: dict[str, Any] = {"sweep_s": 0.02, "linger_s": 0.1, **limits}
    server.state.limits = replace(server.state.limits, **changed)
    handler, held = server.handler, list[EmulatorReply]()
    is_released = False

    def handle(arrived: EmulatorRequest, reply: EmulatorReply) -> None:
        if arrived.path == "/large":
            reply.send(Response(200, b"y" * LARGE_BYTES))
        elif arrived.path == "/held" and not is_released:
            held.append(reply)
        elif arrived.path == "/held":
            reply.send(Response(200))
        else:
            handler(arrived, reply)

    def release() -> None:
        nonlocal is_released
        is_released = True
        if held:
            held[0].send(Response(200))

    server.handler = handle
    ((_, port),) = await server.open("127.0.0.1", 0)
    host = f"127.0.0.1:{port}".encode()
    ask = {
        each: request(each_method, f"/{each}" if each != "quick" else path).replace(b"test", host)
        for each, each_method in (("quick", method), ("held", "GET"), ("large", "GET"))
    }
    return Served(
        port, server, ask["quick"], status, ask["held"], ask["large"], lambda: len(held), release
    )


@asynccontextmanager
async def _lambda_api(directory: Path, limits: Mapping[str, float]) -> AsyncIterator[Served]:
    auth = RequestAuth(None, "127.0.0.1")
    platform = LambdaPlatform(directory, PlatformSettings(cpu="none"), auth)
    try:
        yield await _open(platform._server, limits, "GET", "/2015-03-31/functions", 200)
    finally:
        await platform.close()


@asynccontextmanager
async def _runtime_api(_: Path, limits: Mapping[str, float]) -> AsyncIterator[Served]:
    """The Runtime API of an instance without a process; this process may call it."""
    absent: Any = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(instances, "is_from_session", lambda peer, local, session: True)
        host = InstanceHost(PlatformSettings(), absent, absent)
        instance = FunctionInstance(absent, host, absent, lambda _: None, is_provisioned=False)
        yield await _open(instance._server, limits, "POST", f"{RUNTIME}/init/error", 202)
