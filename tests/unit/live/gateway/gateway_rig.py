"""A server on a loopback socket in front of a fake runtime, and a client that sends raw bytes."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import uvloop
from fake_runtime import FakeRuntime
from msgspec import structs

from headgate.http.interface import HttpLimits
from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.http.server import GatewayServer

PATIENCE_S = 60.0  # machines may be busy with something else
QUICK = GatewayConfig(codec_timeout_s=PATIENCE_S, http=HttpLimits(sweep_s=0.02, linger_s=0.1))


def with_limits(config: GatewayConfig = QUICK, **changes: Any) -> GatewayConfig:
    """Change settings of `serve:` and limits of HTTP connections."""
    http = {name: changes.pop(name) for name in [*changes] if name not in _SETTINGS}
    return structs.replace(config, http=replace(config.http, **http), **changes)


_SETTINGS = frozenset(GatewayConfig.__struct_fields__)


@dataclass
class Reply:
    """A response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        """The body as JSON."""
        content = json.loads(self.body)
        assert isinstance(content, dict)
        return content


@dataclass
class Client:
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def reply(self, *, is_head: bool = False) -> Reply:
        """The next response. Raises `IncompleteReadError` if the connection ends before it."""
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
        first, *lines = head.decode("latin-1").split("\r\n")[:-2]
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
        size = 0 if is_head else int(headers.get("content-length", "0"))
        body = await asyncio.wait_for(self.reader.readexactly(size), PATIENCE_S)
        return Reply(int(first.split(" ")[1]), headers, body)

    def reset(self) -> None:
        """Reset the connection."""
        connection = self.writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def is_closed(self) -> bool:
        """Whether the server closes the connection without sending anything more."""
        return await asyncio.wait_for(self.reader.read(1), PATIENCE_S) == b""


@dataclass
class Connected:
    """A port, and the clients that were connected to it."""

    port: int
    clients: list[Client] = field(default_factory=list, kw_only=True)

    async def connect(self) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        self.clients.append(client)
        return client

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.005)


@dataclass
class Rig(Connected):
    """Server, runtime and clients."""

    runtime: FakeRuntime
    server: GatewayServer

    async def ask(self, data: bytes) -> Reply:
        """The response to one request on a connection of its own."""
        client = await self.connect()
        client.send(data)
        return await client.reply(is_head=data.startswith(b"HEAD"))

    async def infer(self, body: object, *lines: str, model: str = "echo") -> Reply:
        return await self.ask(infer(body, *lines, model=model))

    def responses(self, code: str, reason: str | None = None) -> int:
        """How many responses had this status, for any reason or for one."""
        return sum(
            count
            for (_, status, why), count in self.server.context.responses.counted()
            if status == code and reason in (None, why)
        )


def request(method: str, path: str, body: bytes = b"", *lines: str) -> bytes:
    """A request as bytes."""
    head = [f"{method} {path} HTTP/1.1", "Host: test", *lines]
    if body or method == "POST":
        head.append(f"Content-Length: {len(body)}")
    return "\r\n".join((*head, "", "")).encode("latin-1") + body


def infer(body: object, *lines: str, model: str = "echo") -> bytes:
    """An inference request; a body that is not bytes is encoded as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return request("POST", f"/v2/models/{model}/infer", data, *lines)


def tensor(
    data: object = (1.0, 2.5), shape: object = (1, 2), datatype: str = "FP32", name: str = "x"
) -> dict[str, object]:
    """An input."""
    return {"name": name, "shape": shape, "datatype": datatype, "data": data}


def body(*inputs: dict[str, object], **more: object) -> dict[str, object]:
    """A request's body."""
    return {"inputs": inputs or (tensor(),), **more}


def raw(size: int, *lines: str, model: str = "free", **more: object) -> bytes:
    """A request with a body of `size` bytes, nearly all of them one binary tensor."""

    def text(elements: int) -> bytes:
        described = {"name": "x", "shape": [1, elements], "datatype": "UINT8"}
        parameters = {"binary_data_size": elements}
        return json.dumps({"inputs": [described | {"parameters": parameters}], **more}).encode()

    elements = size - len(text(size))
    elements += size - elements - len(text(elements))  # its number may be a digit shorter
    header = text(elements)
    length = f"Inference-Header-Content-Length: {len(header)}"
    return infer(header + bytes(elements), length, *lines, model=model)


@asynccontextmanager
async def rig(
    config: GatewayConfig = QUICK,
    runtime: FakeRuntime | None = None,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[Rig]:
    """A running server, closed afterwards with all its connections."""
    runtime = runtime or FakeRuntime()
    server = GatewayServer(runtime, config, lambda accept: (b"up 1\n", "text/plain"))
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    await server.listen(sock=listener, ssl=tls)
    made = Rig(listener.getsockname()[1], runtime, server)
    try:
        yield made
    finally:
        for client in made.clients:
            client.writer.close()
        server.close()
        await made.until(lambda: not server.connections and not server.state.handshakes)
        await asyncio.sleep(0 if tls is None else 0.01)


def run(scenario: Callable[[Rig], Awaitable[None]], config: GatewayConfig = QUICK) -> None:
    """Run a scenario against a server of its own."""

    async def main() -> None:
        async with rig(config) as made:
            await scenario(made)

    run_on_loop(main())


def run_on_loop(scenario: Coroutine[Any, Any, None]) -> None:
    """Run on an event loop of its own."""
    uvloop.run(scenario)


async def send_in_halves(port: int, data: bytes) -> None:
    """Send bytes in two halves: the connection ends with a response or without, but with no 500."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data[: len(data) // 2])
        await asyncio.sleep(0)
        writer.write(data[len(data) // 2 :])
        received = await asyncio.wait_for(reader.read(), 60)  # until it is closed
    except ConnectionError:
        return
    finally:
        writer.close()
    assert not re.search(rb"HTTP/1.1 5(?!03)", received), (data, received)
    assert received == b"" or received.startswith(b"HTTP/1.1 ")
