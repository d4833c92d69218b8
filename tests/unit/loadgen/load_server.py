"""A small HTTP server in a thread, whose responses each test determines."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import httptools
import uvloop

METADATA = {
    "name": "echo",
    "inputs": [
        {"name": "x", "datatype": "FP32", "shape": [-1, 8]},
        {"name": "n", "datatype": "INT64", "shape": [-1]},
    ],
}


@dataclass
class Response:
    """A response, and the delay or the condition after which it is sent."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    after_s: float = 0.0
    until: Callable[[], bool] | None = None
    content: bytes = b"{}"
    closes: bool = False


Responder = Callable[[int], Response]  # called with the number of the request, from 0


@dataclass
class Server:
    """The address of the server, and the requests it received."""

    port: int = 0
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[bytes, bytes]] = field(default_factory=list)
    metadata_headers: list[dict[bytes, bytes]] = field(default_factory=list)
    paths: list[bytes] = field(default_factory=list)
    open_count: int = 0  # received and not answered
    open_count_max: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def serving(respond: Responder = lambda _: Response()) -> Iterator[Server]:
    """Run the server until the end of the block."""
    server = Server()
    ready, stop = threading.Event(), threading.Event()
    thread = threading.Thread(target=_serve, args=(server, respond, ready, stop))
    thread.start()
    assert ready.wait(60)
    try:
        yield server
    finally:
        stop.set()
        thread.join(60)


def _serve(
    server: Server, respond: Responder, ready: threading.Event, stop: threading.Event
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        listening = await loop.create_server(lambda: _Peer(server, respond), "127.0.0.1", 0)
        server.port = listening.sockets[0].getsockname()[1]
        ready.set()
        while not stop.is_set():
            await asyncio.sleep(0.01)
        listening.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


class _Peer(asyncio.Protocol):
    def __init__(self, server: Server, respond: Responder) -> None:
        self._server, self._respond = server, respond
        self._parser = httptools.HttpRequestParser(self)
        self._headers: dict[bytes, bytes] = {}
        self._body = b""
        self._path = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path, self._body, self._headers = url, b"", {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._parser.get_method() == b"GET":
            self._server.metadata_headers.append(self._headers)
            self._write(Response(content=json.dumps(METADATA).encode()))
            return
        server = self._server
        response = self._respond(len(server.bodies))
        server.bodies.append(self._body)
        server.paths.append(self._path)
        server.headers.append(self._headers)
        server.open_count += 1
        server.open_count_max = max(server.open_count_max, server.open_count)
        if response.after_s:
            asyncio.get_running_loop().call_later(response.after_s, self._finish, response)
        else:
            self._finish(response)

    def _finish(self, response: Response) -> None:
        if response.until is not None and not response.until():
            asyncio.get_running_loop().call_later(0.002, self._finish, response)
            return
        self._server.open_count -= 1
        self._write(response)

    def _write(self, response: Response) -> None:
        if response.closes:
            self._transport.abort()
            return
        headers = {"Content-Length": str(len(response.content)), **response.headers}
        lines = [
            f"HTTP/1.1 {response.status} X",
            *(f"{k}: {v}" for k, v in headers.items()),
            "",
            "",
        ]
        self._transport.write("\r\n".join(lines).encode() + response.content)
        if headers.get("Connection") == "close":
            self._transport.close()
