"""TLS connections are counted and timed from the moment they are accepted."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from fake_runtime import FakeRuntime
from gateway_rig import (
    QUICK,
    Client,
    Rig,
    body,
    infer,
    raw,
    request,
    rig,
    run_on_loop,
    with_limits,
)
from msgspec.structs import replace

from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.http.server import GatewayServer

LIVE = request("GET", "/livez")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tls")
    subprocess.run(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout key.pem "
        "-out cert.pem -days 1 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1",
        shell=True,
        cwd=path,
        check=True,
        capture_output=True,
    )
    return path


@asynccontextmanager
async def encrypted(certificate: Path, config: GatewayConfig) -> AsyncIterator[Rig]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    async with rig(config, tls=context) as made:
        yield made


async def connect(rig: Rig, certificate: Path) -> Client:
    context = ssl.create_default_context(cafile=str(certificate / "cert.pem"))
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port, ssl=context)
    client = Client(reader, writer)
    rig.clients.append(client)
    return client


def silent(port: int) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port))
    client.setblocking(False)
    return client


async def is_let_go(client: socket.socket) -> bool:
    loop = asyncio.get_running_loop()
    try:
        return await asyncio.wait_for(loop.sock_recv(client, 1), 60) == b""
    except ConnectionError:
        return True


def test_requests_over_tls(certificate: Path) -> None:
    """Small requests, several at once, and one whose response is written in pieces."""

    async def scenario() -> None:
        async with encrypted(certificate, QUICK) as rig:
            client = await connect(rig, certificate)
            client.send(infer(body(id="1")) + infer(body(id="2")))
            assert [(await client.reply()).json["id"] for _ in range(2)] == ["1", "2"]
            client.send(
                raw(5_000_000, "Connection: close", parameters={"binary_data_output": True})
            )
            reply = await client.reply()
            assert (reply.status, len(reply.body) > 4_900_000) == (200, True)
            assert await client.is_closed()
            await rig.until(lambda: not rig.server.connections)
            assert not rig.server.context.budget.used

    run_on_loop(scenario())


def test_a_slow_reader_gets_the_end_of_the_last_response(certificate: Path) -> None:
    """The response ends the connection, and the client takes far longer than `linger_s` for it."""

    async def scenario() -> None:
        async with encrypted(certificate, with_limits(QUICK, linger_s=0.05)) as rig:
            client = await connect(rig, certificate)
            client.send(
                raw(5_000_000, "Connection: close", parameters={"binary_data_output": True})
            )
            read_bytes = 0
            while part := await client.reader.read(40_000):
                read_bytes += len(part)
                await asyncio.sleep(0.005)
            assert read_bytes > 5_000_000 - 20

    run_on_loop(scenario())


def test_silent_handshakes_are_counted_and_time_out(certificate: Path) -> None:
    async def scenario() -> None:
        config = with_limits(QUICK, connections_max=5, header_timeout_s=0.5)
        async with encrypted(certificate, config) as rig:
            clients = [silent(rig.port) for _ in range(20)]
            try:
                await rig.until(lambda: len(rig.server.state.handshakes) == 5)
                for client in clients[5:]:  # at once
                    assert await is_let_go(client)
                assert rig.server.state.excess() == 0
                for client in clients[:5]:  # in time
                    assert await is_let_go(client)
                await rig.until(lambda: not rig.server.state.handshakes)
                good = await connect(rig, certificate)
                good.send(LIVE)
                assert (await good.reply()).status == 200
            finally:
                for client in clients:
                    client.close()

    run_on_loop(scenario())


def test_handshakes_and_connections_are_counted_together(certificate: Path) -> None:
    async def scenario() -> None:
        async with encrypted(certificate, replace(QUICK, connections_max=2)) as rig:
            good = await connect(rig, certificate)
            good.send(LIVE)
            await good.reply()
            with silent(rig.port), silent(rig.port) as third:
                assert await is_let_go(third)
                good.send(LIVE)
                assert (await good.reply()).status == 200

    run_on_loop(scenario())


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x00\x05hello"]
)
def test_a_malformed_handshake_closes_the_connection(certificate: Path, sent: bytes) -> None:
    async def scenario() -> None:
        async with encrypted(certificate, QUICK) as rig:
            with silent(rig.port) as client:
                client.send(sent)
                loop = asyncio.get_running_loop()
                while True:  # perhaps a TLS alert, then the end
                    try:
                        if not await asyncio.wait_for(loop.sock_recv(client, 100), 60):
                            break
                    except ConnectionError:
                        break
            await rig.until(lambda: not rig.server.state.handshakes and not rig.server.connections)

    run_on_loop(scenario())


def test_a_disconnect_during_the_handshake_is_forgotten(certificate: Path) -> None:
    async def scenario() -> None:
        async with encrypted(certificate, QUICK) as rig:
            with silent(rig.port) as client:
                await rig.until(lambda: len(rig.server.state.handshakes) == 1)
                client.shutdown(socket.SHUT_RDWR)
            await rig.until(lambda: not rig.server.state.handshakes)

    run_on_loop(scenario())


def test_closing_cancels_handshakes(certificate: Path) -> None:
    async def scenario() -> None:
        async with encrypted(certificate, QUICK) as rig:
            with silent(rig.port) as client:
                await rig.until(lambda: len(rig.server.state.handshakes) == 1)
                rig.server.close()
                assert await is_let_go(client)

    run_on_loop(scenario())


def test_half_closing_over_tls_closes(certificate: Path) -> None:
    async def scenario() -> None:
        async with encrypted(certificate, QUICK) as rig:
            rig.runtime.mode = "never"
            client = await connect(rig, certificate)
            client.send(infer(body()))
            await rig.until(lambda: bool(rig.runtime.calls))
            client.writer.close()
            await rig.until(lambda: bool(rig.runtime.cancelled))

    run_on_loop(scenario())


def test_the_backlog_of_the_tls_listener() -> None:
    """500 clients are connected although none is accepted."""
    allowed = int(Path("/proc/sys/net/core/somaxconn").read_text())
    if allowed < 600:
        pytest.skip("the kernel keeps no more than that in line")

    async def scenario() -> None:
        server = GatewayServer(FakeRuntime(), QUICK, lambda accept: (b"", ""))
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        await server.listen(sock=listener)
        clients = [socket.socket() for _ in range(500)]
        try:
            for client in clients:  # in one turn of the loop, so that none is accepted
                client.settimeout(60)
                client.connect(listener.getsockname())
            await asyncio.sleep(0)
        finally:
            for client in clients:
                client.close()
            server.close()
            await asyncio.sleep(0.05)

    run_on_loop(scenario())
