"""The HTTP connection compared with uvicorn, in one run: speed, and hostile clients.

Both servers have a process of their own, read the same small JSON body and answer it from memory.
uvicorn runs a raw ASGI application on uvloop with httptools, the fastest that it has. Rounds
alternate, and only ratios within a round count, because machines are noisy. The second table is
what clients can do to each server; both have their limits set as tight as they can be.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from statistics import median
from time import monotonic, sleep
from typing import Any, Final, cast, final

import httptools
import msgspec
import uvloop

from headgate.http.connection import HttpConnection
from headgate.http.interface import STATUS_LINES, HttpError, HttpLimits
from headgate.http.server import HttpServer
from headgate.lab.experiments import Check, Progress, Result, Row

NAME = "http"
TITLE = "the HTTP connection compared with uvicorn: requests per second, and hostile clients"

ROUNDS = 7
ROUND_S = 2.0
_RESPONSE_S_MAX: Final = 60.0
CONNECTIONS = (1, 32)
TIMEOUT_S = 1  # all time limits of both servers, in the table of hostile clients
_SOURCE = "docs/adr/0007-http-over-httptools.md"
_SLOW_S: Final = 0.5  # until the response of `/slow`
_CONNECTIONS_MAX: Final = 8
_BODY_BYTES_MAX: Final = 1 << 16
_LARGE: Final = b" " * (8 << 20)
_BODY: Final = b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1.0,2.5]}]}'
_ANSWER: Final = b'{"outputs":[{"name":"y","shape":[1,2],"datatype":"FP32","data":[1.0,2.5]}]}'
_ECHO: Final = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
_SPACES: Final = b"400\r\n%b\r\n" % (b" " * 1024)  # a chunk
_POST: Final = _ECHO + b"Content-Length: %d\r\n\r\n%b" % (len(_BODY), _BODY)

Observed = tuple[str, bool]  # what happened, and whether the server was protected


def run(*, progress: Progress) -> Result:
    """Measure both servers, and attack both."""
    servers = ["headgate", *(["uvicorn"] if find_spec("uvicorn") is not None else [])]
    rates: dict[tuple[str, int], list[float]] = {}
    for number in range(ROUNDS):
        for connections in CONNECTIONS:
            for server in servers:
                progress(f"round {number + 1} of {ROUNDS}: {server}, {connections} connections")
                with _serving(server, has_limits=False) as port:
                    rate = uvloop.run(_load(port, connections))
                rates.setdefault((server, connections), []).append(rate)
    rows: list[Row] = []
    checks: list[Check] = []
    for connections in CONNECTIONS:
        rows.append(_speed_row(rates, connections))
        checks.append(_speed_check(rates, connections))
    observed: dict[str, dict[str, Observed]] = {}
    for case, attack in _CASES.items():
        progress(case)
        observed[case] = {}
        for server in servers:
            with _serving(server, has_limits=True) as port:
                observed[case][server] = attack(port)
    rows += [_case_row(case, by_server) for case, by_server in observed.items()]
    held = sum(by_server["headgate"][1] for by_server in observed.values())
    claim = "hostile clients that the HTTP connection withstands"
    checks.append(Check(claim, _SOURCE, len(_CASES), held, held == len(_CASES)))
    return Result(NAME, rows, checks)


def _speed_row(rates: dict[tuple[str, int], list[float]], connections: int) -> Row:
    peer = rates.get(("uvicorn", connections))
    return {
        "connections": connections,
        "headgate_per_s": round(median(rates["headgate", connections])),
        "uvicorn_per_s": round(median(peer)) if peer else None,
        "ratio": _ratio(rates, connections),
    }


def _ratio(rates: dict[tuple[str, int], list[float]], connections: int) -> float | None:
    """The median over rounds of our rate divided by that of uvicorn."""
    peer = rates.get(("uvicorn", connections))
    if peer is None:
        return None
    ours = rates["headgate", connections]
    return round(median(a / b for a, b in zip(ours, peer, strict=True)), 2)


def _speed_check(rates: dict[tuple[str, int], list[float]], connections: int) -> Check:
    claim = f"the HTTP connection is as fast as uvicorn, at {connections} connections"
    ratio = _ratio(rates, connections)
    measured = "uvicorn is not installed" if ratio is None else f"{ratio}x"
    return Check(claim, _SOURCE, ">= 1x", measured, ratio is not None and ratio >= 1)


def _case_row(case: str, by_server: dict[str, Observed]) -> Row:
    texts = {
        server: f"{text}{'' if is_held else ' (lost)'}"
        for server, (text, is_held) in by_server.items()
    }
    return {"case": case, "headgate": texts["headgate"], "uvicorn": texts.get("uvicorn")}


@contextmanager
def _serving(server: str, *, has_limits: bool) -> Iterator[int]:
    """Run a server in a process of its own, with usual or tight limits. Yields its port."""
    limits = "limits" if has_limits else "usual"
    command = [sys.executable, "-m", "headgate.lab.bench.http", server, limits]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"{server} has not started")
            yield int(line)
        finally:
            process.kill()


# The load: each connection sends its next request when it has the response to the last.


@final
class _LoadConnection(asyncio.Protocol):
    def __init__(self) -> None:
        self.responses = 0
        self._parser = httptools.HttpResponseParser(self)
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.write(_POST)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        assert self._parser.get_status_code() == 200
        self.responses += 1
        self.transport.write(_POST)


async def _load(port: int, connections: int) -> float:
    """Responses per second, after a tenth of the time for warming up."""
    loop = asyncio.get_running_loop()
    made = [
        (await loop.create_connection(_LoadConnection, "127.0.0.1", port))[1]
        for _ in range(connections)
    ]
    await asyncio.sleep(ROUND_S / 10)
    before, began_s = sum(each.responses for each in made), loop.time()
    responses = 0
    while not responses and loop.time() < began_s + _RESPONSE_S_MAX:  # on a very busy machine
        await asyncio.sleep(ROUND_S)
        responses = sum(each.responses for each in made) - before
    rate = responses / (loop.time() - began_s)
    for each in made:
        each.transport.abort()
    await asyncio.sleep(0)  # until they are closed
    return rate


# Hostile clients. Each case returns what it saw, and whether the server was protected.


@contextmanager
def _client(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=5 * TIMEOUT_S) as client:
        yield client


def _answer(client: socket.socket) -> str:
    """The statuses that a client reads until nothing more comes, and how that ends."""
    received, end = b"", "stays open"
    try:
        while data := client.recv(1 << 16):
            received += data
        end = "closed"
    except TimeoutError:
        pass
    except ConnectionError:
        end = "reset"
    statuses = re.findall(rb"HTTP/1\.1 ([0-9]{3}) ", received)
    return ", ".join([*(status.decode() for status in statuses), end])


def _refused(data: bytes) -> Callable[[int], Observed]:
    """A case that must be answered with an error of the client, and a closed connection."""

    def attack(port: int) -> Observed:
        with _client(port) as client:
            with suppress(ConnectionError):  # refused before all of it was sent
                client.sendall(data)
            text = _answer(client)
        return text, text.startswith("4") and not text.endswith("stays open")

    return attack


def _ends(data: bytes) -> Callable[[int], Observed]:
    """A case in which the server must end the connection of a client that does nothing more."""

    def attack(port: int) -> Observed:
        with _client(port) as client:
            client.sendall(data)
            text = _answer(client)
        return text, not text.endswith("stays open")

    return attack


def _trickle(port: int) -> Observed:
    """Valid headers, a byte at a time, for three times the limit."""
    with _client(port) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX: ")
        end_s = monotonic() + 3 * TIMEOUT_S
        try:
            while monotonic() < end_s:
                client.sendall(b"y")
                sleep(0.05)
        except ConnectionError:
            return "closed", True
    return "stays open", False


def _unread(port: int) -> Observed:
    """A client that requests large responses and reads nothing is disconnected."""
    with _client(port) as client:
        client.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n" * 2)
        sleep(4 * TIMEOUT_S)
        received = 0
        with suppress(ConnectionError, TimeoutError):
            while received < 2 * len(_LARGE) and (data := client.recv(1 << 20)):
                received += len(data)
    is_cut = received < 2 * len(_LARGE)
    return "disconnected" if is_cut else "kept in memory", is_cut


def _silent(port: int) -> Observed:
    """How many of many silent connections the server keeps open at a time."""
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(2 * _CONNECTIONS_MAX)]
    try:
        sleep(0.4 * TIMEOUT_S)
        is_open = []
        for client in clients:
            client.setblocking(False)
            try:
                is_open.append(bool(client.recv(1 << 16)) and bool(client.recv(1 << 16)))
            except BlockingIOError:
                is_open.append(True)
            except ConnectionError:
                is_open.append(False)
    finally:
        for client in clients:
            client.close()
    return f"{sum(is_open)} open of {len(clients)}", sum(is_open) <= _CONNECTIONS_MAX


def _disconnect(port: int) -> Observed:
    """Whether the work for a client ends when the client resets its connection."""
    with _client(port) as client:
        client.sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        sleep(0.2 * _SLOW_S)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sleep(1.5 * _SLOW_S)
    with _client(port) as client:
        client.sendall(b"GET /finished HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        finished = client.makefile("rb").read().rpartition(b"\r\n\r\n")[2]
    return ("work goes on", False) if int(finished) else ("cancelled", True)


def _pipeline(port: int) -> Observed:
    with _client(port) as client:
        client.sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n" + _POST * 20)
        text = _answer(client)
    return f"{text.count('200')} of 21 responses", text.count("200") == 21


def _half_close(port: int) -> Observed:
    """A client that has sent its request and closed its side still gets its response."""
    with _client(port) as client:
        client.sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        client.shutdown(socket.SHUT_WR)
        text = _answer(client)
    return text, text.startswith("200")


_CASES: Final[dict[str, Callable[[int], Observed]]] = {
    "header of 1 MiB": _refused(b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 2**20 + b"\r\n\r\n"),
    "10,000 headers": _refused(b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 10_000 + b"\r\n"),
    "body beyond the limit": _refused(
        _ECHO + b"Content-Length: %d\r\n\r\n%b" % (2**20, _BODY.ljust(2**20))
    ),
    "chunks beyond the limit": _refused(
        _ECHO
        + b"Transfer-Encoding: chunked\r\n\r\n"
        + b"400\r\n%b\r\n" % _BODY.ljust(1024)
        + _SPACES * 1023
        + b"0\r\n\r\n"
    ),
    "Content-Length twice": _refused(_ECHO + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}"),
    "Content-Length and chunks": _refused(
        _ECHO + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    ),
    "Host twice": _refused(b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\nConnection: close\r\n\r\n"),
    "no Host": _refused(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n"),
    "silent connections": _silent,
    "silent connection, time limit": _ends(b""),
    "idle connection, time limit": _ends(_POST),
    "incomplete headers, time limit": _ends(b"GET / HTTP/1.1\r\nHost: x\r\n"),
    "headers byte by byte, time limit": _trickle,
    "incomplete body, time limit": _ends(_POST[:-1]),
    "unread responses, time limit": _unread,
    "client disconnects": _disconnect,
    "client closes its side": _half_close,
    "pipelined requests": _pipeline,
}

# The servers.


@final
class _EchoRequest:
    """A request to our server, with the same work as in the ASGI application."""

    def __init__(self, connection: HttpConnection, target: bytes, finished: list[bytes]) -> None:
        self.body: bytes | bytearray | memoryview = b""
        self.body_bytes = 0
        self.keeps_body = False
        self.closes = False
        self.error: HttpError | None = None
        self._connection = connection
        self._target = target
        self._finished = finished
        self._timer: asyncio.TimerHandle | None = None

    def admit(self, body_bytes: int) -> None:
        self.keeps_body = True

    def reserve_more(self, size: int, total: int) -> None:
        pass

    def reject_body(self, error: HttpError) -> None:
        self.error = error

    def handle(self) -> None:
        if self.error is not None:
            self.abort(self.error)
        elif self._target == b"/":
            if self.body:
                msgspec.json.decode(self.body)
            self._send(200, _ANSWER)
        elif self._target == b"/slow":
            self._timer = asyncio.get_running_loop().call_later(_SLOW_S, self._finish)
        else:
            self._send(200, _LARGE if self._target == b"/large" else b"%d" % len(self._finished))

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def abort(self, error: HttpError) -> None:
        self.closes |= error.closes
        self._send(error.status, error.message.encode())

    def _finish(self) -> None:
        self._finished.append(self._target)
        self._send(200, _ANSWER)

    def _send(self, status: int, body: bytes) -> None:
        head = b"%bContent-Type: application/json\r\nContent-Length: %d\r\n%b\r\n%b" % (
            STATUS_LINES[status],
            len(body),
            b"Connection: close\r\n" if self.closes else b"",
            b"" if body is _LARGE else body,
        )
        self._connection.send(head, (body,) if body is _LARGE else (), self, None)


async def _serve_headgate(sock: socket.socket, limits: HttpLimits) -> None:
    finished: list[bytes] = []
    server = HttpServer(limits, lambda made, _, target, __: _EchoRequest(made, target, finished))
    await server.listen(sock=sock)
    await asyncio.Event().wait()


def _asgi_application() -> Callable[..., Any]:
    finished: list[str] = []

    async def application(scope: dict[str, Any], receive: Any, send: Any) -> None:
        path, body = scope["path"], b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        answer = _ANSWER
        if path == "/" and body:
            msgspec.json.decode(body)
        elif path == "/slow":
            await asyncio.sleep(_SLOW_S)
            finished.append(path)
        elif path != "/":
            answer = _LARGE if path == "/large" else b"%d" % len(finished)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(answer)),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    return application


def _main(server: str, has_limits: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        print(sock.getsockname()[1], flush=True)
        if server == "headgate":
            limits = HttpLimits()
            if has_limits:
                limits = HttpLimits(
                    body_bytes_max=_BODY_BYTES_MAX,
                    connections_max=_CONNECTIONS_MAX,
                    header_timeout_s=TIMEOUT_S,
                    body_timeout_s=TIMEOUT_S,
                    idle_timeout_s=TIMEOUT_S,
                    write_timeout_s=TIMEOUT_S,
                    linger_s=TIMEOUT_S / 5,
                    sweep_s=TIMEOUT_S / 20,
                )
            uvloop.run(_serve_headgate(sock, limits))
            return
        import uvicorn  # noqa: PLC0415  an extra

        options: dict[str, Any] = {}
        if has_limits:
            options = {"timeout_keep_alive": TIMEOUT_S, "limit_concurrency": _CONNECTIONS_MAX}
        config = uvicorn.Config(
            _asgi_application(),
            loop="uvloop",
            http="httptools",
            lifespan="off",
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            **options,
        )
        uvicorn.Server(config).run(sockets=[sock])


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2] == "limits")
