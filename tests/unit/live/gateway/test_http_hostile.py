"""Clients that would take too much memory or time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256

import pytest
from gateway_rig import QUICK, Rig, body, infer, raw, request, run, with_limits
from msgspec.structs import replace

from headgate.core.states import Outcome, Settlement
from headgate.live.call import Call, GatewayPhase
from headgate.live.gateway.config import ApiKey, GatewayConfig
from headgate.live.gateway.http.responses import error_of
from headgate.live.gateway.http.server import CACHED_MAX

BINARY = {"binary_data_output": True}
ROW = infer(body()).partition(b"\r\n\r\n")[2]
MEMORY = replace(
    QUICK, memory_bytes_max=1_000_000, body_bytes_max=400_000, response_bytes_max=400_000
)


@contextmanager
def deaf_client(port: int) -> Iterator[socket.socket]:
    """A client that reads nothing."""
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        yield client


def test_bodies_are_held_until_their_calls_end() -> None:
    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = "never"
        for _ in range(2):
            client = await rig.connect()
            client.send(raw(400_000))
        await rig.until(lambda: len(rig.runtime.calls) == 2)
        assert rig.server.context.budget.used == 800_000
        reply = await rig.ask(raw(300_000))
        assert (reply.status, reply.json["reason"]) == (503, "memory")
        assert "retry-after" in reply.headers
        rig.runtime.mode = "echo"
        assert (await rig.infer(ROW)).status == 200
        rig.runtime.complete(rig.runtime.calls[0])
        assert (await rig.clients[0].reply()).status == 500  # 400,000 zeros are longer in JSON
        assert (await rig.ask(raw(300_000, parameters=BINARY))).status == 200

    run(scenario, MEMORY)


@pytest.mark.parametrize("case", ["answered", "gone", "gone_waiting", "pipelined", "expired"])
def test_bodies_are_released_however_requests_end(case: str) -> None:
    """Also for requests that were never started."""

    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = "never"
        client = await rig.connect()
        timeout = ("X-Request-Timeout-Ms: 30",) if case == "expired" else ()
        times = {"gone_waiting": 2, "pipelined": 6}.get(case, 1)
        client.send(infer(body(), *timeout) * times)
        await rig.until(lambda: bool(rig.runtime.calls))
        assert rig.server.context.budget.used >= len(ROW)
        if case == "expired":  # the body is in use until the call ends
            assert (await client.reply()).status == 504
            assert rig.server.context.budget.used == len(ROW)
        if case.startswith("gone"):
            client.reset()
        else:
            rig.runtime.mode = "echo"
            rig.runtime.complete(rig.runtime.calls[0])
        await rig.until(lambda: not rig.server.context.budget.used)

    run(scenario, with_limits(QUICK, pipelined_max=2))


def test_unread_responses_are_held() -> None:
    """They keep new bodies out, until their client is disconnected."""

    async def scenario(rig: Rig) -> None:
        with deaf_client(rig.port) as client:
            loop = asyncio.get_running_loop()
            for _ in range(40):  # the kernel's buffers take some
                await loop.sock_sendall(client, raw(390_000, parameters=BINARY))
                await asyncio.sleep(0.01)
                if any(connection._unread_holds for connection in rig.server.connections):
                    break
            assert rig.server.context.budget.used >= 389_000
            (await rig.connect()).send(raw(350_000)[:-1])
            (await rig.connect()).send(raw(350_000))
            await rig.until(lambda: rig.responses("503") == 1)
            await rig.until(lambda: not rig.server.context.budget.used)

    run(scenario, with_limits(MEMORY, write_timeout_s=2.0, body_timeout_s=2.0))


def test_a_response_without_memory_is_dropped() -> None:
    """Small requests with large responses: the budget is full only when they are made."""

    async def scenario(rig: Rig) -> None:
        assert rig.server.context.budget.reserve(0, 950_000)
        client = await rig.connect()
        client.send(infer(body()))
        assert (await client.reply()).status == 200
        rig.runtime.mode = "large"
        client.send(infer(body(parameters=BINARY)))
        reply = await client.reply()
        assert (reply.status, reply.json["reason"]) == (503, "answers")
        assert rig.server.context.budget.used == 950_000

    run(scenario, MEMORY)


def test_made_up_targets_do_not_grow_the_route_cache() -> None:
    async def scenario(rig: Rig) -> None:
        known = rig.server.router._cached
        client = await rig.connect()
        for target in ("/v2/models/nobody", "/v2/models/" + "x" * 9000, "/livez?" + "x" * 300):
            client.send(request("GET", target))
            await client.reply()
        assert not known
        client.send(infer(body()) + request("GET", "/livez"))
        assert (await client.reply()).status == (await client.reply()).status == 200
        assert set(known) == {b"/v2/models/echo/infer", b"/livez"}
        for number in range(2 * CACHED_MAX):
            rig.server.router.find(b"GET", b"/livez?%d" % number)
        assert len(known) <= CACHED_MAX

    run(scenario)


def test_headers_are_not_charged_for_the_previous_body() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.connect()
        client.send(infer(ROW.ljust(40_000)) + b"GET /livez HT")
        assert (await client.reply()).status == 200
        client.send(b"TP/1.1\r\nHost: x\r\n\r\n")
        assert (await client.reply()).status == 200

    run(scenario)


def test_space_around_header_values_is_stripped() -> None:
    async def scenario(rig: Rig) -> None:
        lines = (
            "X-API-Key: \t key \t",
            "X-Request-Timeout-Ms: 5000 ",
            "Content-Encoding: identity",
        )
        assert (await rig.infer(body(), *lines)).status == 200
        (call,) = rig.runtime.calls
        assert call.deadline_ns - call.arrived_ns == 5_000_000_000
        reply = await rig.infer(body(), lines[0], "Content-Encoding: gzip")
        assert reply.status == 415
        # llhttp accepts a space after `chunked` and no tab; its view and ours must agree.
        for space, status in ((" ", 200), ("\t", 400)):
            chunked = request("GET", "/livez", b"", f"Transfer-Encoding: chunked{space}")
            assert (await rig.ask(chunked + b"0\r\n\r\n")).status == status

    keys = (ApiKey(sha256(b"key").hexdigest(), 1),)
    run(scenario, replace(QUICK, keys=keys))


def test_clients_that_leave_before_their_responses() -> None:
    """At shutdown a client that has sent a request gets 503; an idle one is just closed."""

    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = "never"
        waiting, sending, idle = [await rig.connect() for _ in range(3)]
        waiting.send(infer(body()) * 2)
        sending.send(infer(body())[:-1])
        await rig.until(lambda: bool(rig.runtime.calls) and len(rig.server.connections) == 3)
        await asyncio.sleep(0.02)
        rig.runtime.phase = GatewayPhase.DRAINING
        rig.server.abort_all("the server has ended")
        for client in (waiting, sending):
            reply = await client.reply()
            assert (reply.status, reply.headers["connection"]) == (503, "close")
            assert (reply.json["reason"], reply.json["error"]) == (
                "draining",
                "the server has ended",
            )
            assert "retry-after" in reply.headers
            assert reply.headers.get("x-headgate-outcome") != "expired"
            assert await client.is_closed()
        assert await idle.is_closed()
        assert rig.runtime.cancelled == rig.runtime.calls
        await rig.until(lambda: not rig.server.connections)
        assert not rig.server.context.budget.used

    run(scenario)


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        ("f: lost", "worker_lost"),
        ("refused too often, last reason: busy", "refused"),
        ("f: OSError: disk", "failed"),
        ("refused: OSError", "failed"),
        ("", "failed"),
    ],
)
def test_failures_have_a_reason_code(failure: str, reason: str) -> None:
    call = Call(0, [], 1, print)
    call.settlement = Settlement(Outcome.FAILED, failure)
    refused = error_of(call, GatewayConfig(), b"")
    assert refused is not None
    assert (refused.status, refused.reason) == (503, reason)
    assert "OSError" not in refused.message, "which is for the log"
    exposed = error_of(call, GatewayConfig(expose_errors=True), b"")
    assert exposed is not None and failure in exposed.message


def test_the_budget_always_holds_the_largest_body_and_its_response() -> None:
    async def scenario(rig: Rig) -> None:
        assert (await rig.infer(ROW.ljust(300_000))).status == 200

    run(scenario, with_limits(memory_bytes_max=1, body_bytes_max=300_000))


@pytest.mark.parametrize(("size", "status"), [(1, 400), (64, 200)])
def test_tiny_chunks_are_refused(size: int, status: int) -> None:
    """Each chunk costs more than its bytes: a million chunks of one byte would be an attack."""

    async def scenario(rig: Rig) -> None:
        head = (
            b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        text = ROW.ljust(2000 * size)
        chunks = [text[at : at + size] for at in range(0, len(text), size)]
        client = await rig.connect()
        client.send(head + b"".join(b"%x\r\n%b\r\n" % (len(c), c) for c in chunks) + b"0\r\n\r\n")
        reply = await client.reply()
        assert reply.status == status
        assert (b"too small" in reply.body) == (status == 400)

    run(scenario)
