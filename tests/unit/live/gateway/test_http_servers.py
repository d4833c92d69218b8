"""Hostile clients of every server that uses the HTTP connection: the same answers from each."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("awslambdaric")

from gateway_rig import send_in_halves
from http_servers import SERVERS, Served, message, run

pytestmark = pytest.mark.parametrize("name", SERVERS)

CHUNKED = b"POST /quick HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET /quick HTTP/1.1\r\n\r\n", 400),
        (b"GET /quick HTTP/1.1\r\nHost: x\r\nHost: x\r\n\r\n", 400),
        (b"GET /quick HTTP/1.1\r\nHost: x\r\n folded: y\r\n\r\n", 400),
        (b"GET /quick HTTP/1.1\r\nHost : x\r\n\r\n", 400),
        (b"GET /quick HTTP/1.1\r\nHost: x\r\nAuthorization: a\r\nAuthorization: a\r\n\r\n", 400),
        (b"POST /quick HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST /quick HTTP/1.1\r\nHost: x\r\nContent-Length: +1\r\n\r\nx", 400),
        (
            b"POST /quick HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\nx",
            400,
        ),
        (b"POST /quick HTTP/1.1\r\nHost: x\r\nContent-Length: 1, 1\r\n\r\nx", 400),
        (
            b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
        ),
        (
            b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
            b"Content-Length: 4\r\n\r\n0\r\n\r\n",
            400,
        ),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (
            b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
            b"Upgrade: h2c\r\nConnection: upgrade\r\n\r\n0\r\n\r\n",
            400,
        ),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + b"f" * 17, 400),
        (b"GET /quick HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 20_000 + b"\r\n\r\n", 431),
        (b"GET /quick HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 400_000, 431),
        (b"GET /" + b"y" * 400_000, 414),
        (
            b"GET /quick HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X%d: y\r\n" % n for n in range(101)),
            431,
        ),
        (b"POST /quick HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n", 413),
        (b"POST /quick HTTP/1.1\r\nHost: x\r\nExpect: miracles\r\nContent-Length: 1\r\n\r\n", 417),
    ],
)
def test_ambiguous_requests_close_the_connection(
    name: str, data: bytes, status: int, tmp_path: Path
) -> None:
    """Also behind a valid request, which gets its response first."""

    async def scenario(served: Served) -> None:
        hostile = served.named(data)
        await served.refused(hostile, status)
        client = await served.connect()
        client.send(served.quick + hostile)
        assert (await client.reply()).status == served.quick_status
        assert (await client.reply()).status == status
        assert await client.is_closed()

    run(name, scenario, tmp_path, {"header_bytes_max": 16 << 10, "headers_max": 100})


def test_chunked_bodies_and_trailers_are_limited_as_they_arrive(name: str, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        for head in (served.named(CHUNKED), served.named(CHUNKED.replace(b"quick", b"nowhere"))):
            await served.refused(head + b"100\r\n%b\r\n" % (b" " * 256) * 20, 413)
            trailers = b"0\r\n" + b"X: y\r\n" * 9000
            await served.refused(head + b"1\r\n \r\n" + trailers, 431)

    run(name, scenario, tmp_path, {"body_bytes_max": 4096, "header_bytes_max": 16 << 10})


@pytest.mark.parametrize("endless", [b"0\r\nX: ", b"1;"])
def test_endless_trailers_and_extensions_are_refused(
    name: str, endless: bytes, tmp_path: Path
) -> None:
    """A trailer and a chunk extension: the parser would wait for their end."""

    async def scenario(served: Served) -> None:
        client = await served.connect()
        client.send(served.named(CHUNKED))
        client.send(endless)
        for _ in range(10):
            client.send(b"y" * 10_000)
            await asyncio.sleep(0.002)
        assert (await client.reply()).status == 431
        assert await client.is_closed()

    run(name, scenario, tmp_path, {"header_bytes_max": 16 << 10})


def test_tiny_chunks_are_refused(name: str, tmp_path: Path) -> None:
    """Each chunk costs more than its bytes: a million chunks of one byte would be an attack."""

    async def scenario(served: Served) -> None:
        client = await served.connect()
        client.send(served.named(CHUNKED) + b"1\r\n \r\n" * 2000 + b"0\r\n\r\n")
        reply = await client.reply()
        assert (reply.status, "too small" in message(reply)) == (400, True)

    run(name, scenario, tmp_path)


def test_bytes_may_arrive_one_by_one(name: str, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        client = await served.connect()
        for byte in served.quick:
            client.send(bytes((byte,)))
            await asyncio.sleep(0)
        assert (await client.reply()).status == served.quick_status

    run(name, scenario, tmp_path)


def test_headers_in_pieces_may_be_as_large_as_in_one(name: str, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        first, _, rest = served.quick.partition(b"\r\n")
        more = b"".join(b"X-%d: %b\r\n" % (number, b"y" * 1000) for number in range(15))
        data = first + b"\r\n" + more + rest
        client = await served.connect()
        for at in range(0, len(data), 1000):
            client.send(data[at : at + 1000])
            await asyncio.sleep(0.001)
        assert (await client.reply()).status == served.quick_status

    run(name, scenario, tmp_path, {"header_bytes_max": 16 << 10})


@pytest.mark.parametrize(
    ("data", "expected_text"),
    [
        (b"GET /quick HT", "headers"),
        (b"POST /quick HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{", "body"),
        (b"POST /quick HTTP/1.1\r\nHost: x\r\nContent-Le", "headers"),
    ],
)
def test_slow_senders_get_408(name: str, data: bytes, expected_text: str, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        client = await served.connect()
        client.send(served.named(data))
        reply = await client.reply()
        assert (reply.status, expected_text in message(reply)) == (408, True)
        assert await client.is_closed()

    run(name, scenario, tmp_path, {"header_timeout_s": 0.5, "body_timeout_s": 0.5})


def test_headers_that_arrive_byte_by_byte_time_out(name: str, tmp_path: Path) -> None:
    """All of it is valid and the client never pauses: the timeout counts from the first byte."""

    async def scenario(served: Served) -> None:
        client = await served.connect()
        client.send(served.named(b"GET /quick HTTP/1.1\r\nHost: x\r\n"))
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        answer = asyncio.ensure_future(client.reply())
        lines = iter(b"X: y\r\n" * 50)
        while not answer.done():
            client.send(bytes((next(lines),)))
            await asyncio.sleep(0.01)
        reply = await answer
        assert (reply.status, "headers" in message(reply)) == (408, True)
        assert loop.time() - began_s > 0.25
        assert next(lines, None) is not None, "only when it had sent everything"
        assert await client.is_closed()

    run(name, scenario, tmp_path, {"header_timeout_s": 0.3})


def test_idle_connections_are_closed_and_busy_ones_are_not(name: str, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        busy, idle, silent = [await served.connect() for _ in range(3)]
        busy.send(served.held)
        idle.send(served.quick)
        assert (await idle.reply()).status == served.quick_status
        assert await idle.is_closed() and await silent.is_closed()
        served.release()
        assert (await busy.reply()).status == 200

    run(name, scenario, tmp_path, {"idle_timeout_s": 1.0})


def test_slow_readers_are_disconnected(name: str, tmp_path: Path) -> None:
    """A client that requests much and reads nothing is paused, and then disconnected."""

    async def scenario(served: Served) -> None:
        served.release()
        with socket.create_connection(("127.0.0.1", served.port)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await served.until(lambda: len(served.server.connections) == 1)
            (connection,) = served.server.connections
            sending = asyncio.ensure_future(loop.sock_sendall(client, served.large * 30))
            await served.until(lambda: connection._is_read_paused)
            await served.until(lambda: not served.server.connections)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    run(name, scenario, tmp_path, {"write_timeout_s": 1.5})


def test_pipelined_requests_get_responses_in_order(name: str, tmp_path: Path) -> None:
    """Whatever is behind a request that takes long waits for its response."""

    async def scenario(served: Served) -> None:
        client = await served.connect()
        client.send(served.held + served.quick * 3)
        await served.until(lambda: served.waiting() == 1)
        served.release()
        statuses = [(await client.reply()).status for _ in range(4)]
        assert statuses == [200] + [served.quick_status] * 3

    run(name, scenario, tmp_path)


def test_pipelining_beyond_the_limit_in_one_read_closes(name: str, tmp_path: Path) -> None:
    """Four may be queued behind the first. The response of the last one closes the connection."""

    async def scenario(served: Served) -> None:
        client = await served.connect()
        client.send(served.held + served.quick * 50)
        await served.until(lambda: served.waiting() == 1)
        served.release()
        replies = [await client.reply() for _ in range(5)]
        assert replies[-1].headers["connection"] == "close"
        assert await client.is_closed()

    run(name, scenario, tmp_path, {"pipelined_max": 4})


def test_a_half_closed_client_gets_its_responses(name: str, tmp_path: Path) -> None:
    """Whole requests get their responses; an incomplete one is discarded."""

    async def scenario(served: Served) -> None:
        client = await served.connect()
        client.send(served.held + served.quick + served.quick[:-1])
        client.writer.write_eof()
        await served.until(lambda: served.waiting() == 1)
        await asyncio.sleep(0.05)  # some sweeps
        served.release()
        first, second = await client.reply(), await client.reply()
        assert (first.status, second.status) == (200, served.quick_status)
        assert (first.headers.get("connection"), second.headers["connection"]) == (None, "close")
        assert await client.is_closed()
        await served.until(lambda: not served.server.connections)

    run(name, scenario, tmp_path)


def test_half_closing_an_idle_connection_closes_it(name: str, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        for data in (b"", served.quick, served.quick[:-1]):
            client = await served.connect()
            client.send(data)
            await served.until(lambda: bool(served.server.connections))
            if data == served.quick:
                await client.reply()
            client.writer.write_eof()
            assert await client.is_closed()
            await served.until(lambda: not served.server.connections)

    run(name, scenario, tmp_path)


@pytest.mark.parametrize("half_closes", [False, True])
def test_a_client_that_resets_is_let_go(name: str, half_closes: bool, tmp_path: Path) -> None:
    """Also after it has closed its side, when nothing is read any more. A late response is lost."""

    async def scenario(served: Served) -> None:
        client = await served.connect()
        client.send(served.held + served.quick)
        await served.until(lambda: served.waiting() == 1)
        if half_closes:
            client.writer.write_eof()
            await asyncio.sleep(0.05)
        client.reset()
        await served.until(lambda: not served.server.connections)
        served.release()

    run(name, scenario, tmp_path)


def test_silent_clients_beyond_the_limit_get_503(name: str, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        first = [await served.connect() for _ in range(2)]
        third = await served.connect()
        assert (await third.reply()).status == 503
        assert await third.is_closed()
        first[0].send(served.quick)
        assert (await first[0].reply()).status == served.quick_status

    run(name, scenario, tmp_path, {"connections_max": 2})


def test_shutdown_tells_clients_that_wait(name: str, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        waiting, sending, idle = [await served.connect() for _ in range(3)]
        waiting.send(served.held)
        sending.send(served.quick[:-1])
        await served.until(lambda: served.waiting() == 1 and len(served.server.connections) == 3)
        await asyncio.sleep(0.05)
        served.server.abort_all("the server has ended")
        for client in (waiting, sending):
            reply = await client.reply()
            assert (reply.status, message(reply)) == (503, "the server has ended")
            assert await client.is_closed()
        assert await idle.is_closed()

    run(name, scenario, tmp_path)


PIECES = [
    b"GET /quick HTTP/1.1\r\nHost: x\r\n\r\n",
    CHUNKED,
    b"5\r\nhello\r\n0\r\n\r\n",
    b"0\r\n\r\n",
    b"GET ",
    b"/quick",
    b" HTTP/1.1\r\n",
    b"Host: x\r\n",
    b"Content-Length: 5\r\n",
    b"Content-Length: 99999999999999999999999\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Expect: 100-continue\r\n",
    b"Upgrade: h2c\r\nConnection: upgrade\r\n",
    b"Connection: close\r\n",
    b"\r\n",
    b"\n",
    b"\x00",
]


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    streams=st.lists(
        st.lists(st.sampled_from(PIECES) | st.binary(max_size=12), max_size=8).map(b"".join),
        min_size=8,
        max_size=8,
    )
)
def test_arbitrary_bytes_never_break_a_connection(
    name: str, streams: list[bytes], tmp_path: Path
) -> None:
    """Eight clients at a time send bytes in two halves; each connection ends."""

    async def scenario(served: Served) -> None:
        await asyncio.gather(*(send_in_halves(served.port, served.named(data)) for data in streams))
        await served.until(lambda: not served.server.connections)

    limits = {"header_timeout_s": 0.05, "body_timeout_s": 0.05, "idle_timeout_s": 0.05}
    run(name, scenario, tmp_path, limits)
