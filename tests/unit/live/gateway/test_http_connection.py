"""The HTTP connection: the protocol, limits, pipelining, timeouts and shutdown."""

from __future__ import annotations

import asyncio
import socket

import pytest
from gateway_rig import Client, Rig, body, infer, raw, request, run, tensor, with_limits

from headgate.live.call import GatewayPhase

LIVE = request("GET", "/livez")


async def refused(rig: Rig, data: bytes, status: int) -> Client:
    """The only response has this status, and the connection is closed."""
    client = await rig.connect()
    client.send(data)
    reply = await client.reply()
    assert reply.status == status, reply
    assert reply.headers["connection"] == "close"
    assert reply.json["error"]
    assert await client.is_closed()
    return client


def test_keep_alive_and_head() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.connect()
        for _ in range(3):
            client.send(request("HEAD", "/livez"))
            reply = await client.reply(is_head=True)
            assert (reply.status, reply.headers["content-length"]) == (200, "13")
        client.send(request("GET", "/livez", b"", "Connection: close"))
        assert (await client.reply()).headers["connection"] == "close"
        assert await client.is_closed()

    run(scenario)


def test_http_1_0_closes_after_the_response_unless_keep_alive() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.connect()
        client.send(b"GET /livez HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert (await client.reply()).headers["connection"] == "keep-alive"
        client.send(b"GET /livez HTTP/1.0\r\n\r\n")
        assert (await client.reply()).status == 200
        assert await client.is_closed()

    run(scenario)


def test_pipelined_requests_get_responses_in_order() -> None:
    """Calls take turns of the loop, health does not: the responses keep their order."""

    async def scenario(rig: Rig) -> None:
        client = await rig.connect()
        request_bytes = [infer(body(id=str(number))) + LIVE for number in range(5)]
        client.send(b"".join(request_bytes))
        for number in range(5):
            assert (await client.reply()).json["id"] == str(number)
            assert (await client.reply()).json == {"live": True}

    run(scenario)


def test_pipelining_beyond_the_limit_in_many_reads_is_served() -> None:
    """Four are queued behind the first; reading pauses until the queue is empty."""

    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = "never"
        client = await rig.connect()
        for number in range(9):
            client.send(infer(body(id=str(number))))
            for _ in range(10):  # turns of the loop, which is the server's too: it reads one
                await asyncio.sleep(0)
        rig.runtime.mode = "echo"
        rig.runtime.complete(rig.runtime.calls[0])
        for number in range(9):
            assert (await client.reply()).json["id"] == str(number)

    run(scenario, with_limits(pipelined_max=4))


def test_chunks() -> None:
    async def scenario(rig: Rig) -> None:
        data = infer(body()).partition(b"\r\n\r\n")[2]
        chunks = b"".join(b"%x;ext=1\r\n%b\r\n" % (len(p), p) for p in (data[:9], data[9:]))
        head = (
            b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        client = await rig.connect()
        # A trailer is read, and cannot override a header of this request or the next.
        client.send(head + chunks + b"0\r\nX-Request-Timeout-Ms: bad\r\n\r\n" + infer(body()))
        assert (await client.reply()).status == 200
        assert (await client.reply()).status == 200

    run(scenario)


@pytest.mark.parametrize("size", [900_000, 3_000_000])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_large_body_in_pieces_is_reassembled(size: int, is_chunked: bool) -> None:
    async def scenario(rig: Rig) -> None:
        head, _, data = raw(size, parameters={"binary_data_output": True}).partition(b"\r\n\r\n")
        data = data[:1000] + bytes(n % 251 for n in range(size - 1000))
        if is_chunked:
            head = head.rpartition(b"\r\n")[0] + b"\r\nTransfer-Encoding: chunked"
            cuts = range(0, size, 70_001)
            parts = [data[at : at + 70_001] for at in cuts]
            data = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
        client = await rig.connect()
        client.send(head + b"\r\n\r\n")
        for at in range(0, len(data), 333_333):
            client.send(data[at : at + 333_333])
            await asyncio.sleep(0)
        reply = await client.reply()
        assert reply.status == 200
        assert reply.body.endswith(bytes(n % 251 for n in range(size - 1000)))

    run(scenario)


def test_expect_continue() -> None:
    async def scenario(rig: Rig) -> None:
        head, _, data = infer(body(), "Expect: 100-continue").partition(b"\r\n\r\n")
        client = await rig.connect()
        client.send(infer(body()) + head + b"\r\n\r\n")
        assert (await client.reply()).status == 200  # of the first
        assert (await client.reply()).status == 100
        client.send(data)
        assert (await client.reply()).status == 200
        await refused(rig, request("POST", "/nowhere", b"", "Expect: 100-continue"), 404)
        await refused(rig, request("POST", "/livez", b"", "Expect: miracles"), 417)

    run(scenario)


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_an_upgrade_is_ignored(method: str) -> None:
    """Clients that try HTTP/2 first (Java's) get a response, with or without a body."""

    async def scenario(rig: Rig) -> None:
        lines = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMA")
        request_bytes = (
            request("GET", "/livez", b"", *lines) if method == "GET" else infer(body(), *lines)
        )
        client = await rig.connect()
        client.send(request_bytes + LIVE)
        assert (await client.reply()).status == 200
        assert (await client.reply()).json == {"live": True}
        client.send(request_bytes[:-3])
        await asyncio.sleep(0.01)
        client.send(request_bytes[-3:])
        assert (await client.reply()).status == 200

    run(scenario)


def test_a_body_of_the_largest_size_is_accepted() -> None:
    async def scenario(rig: Rig) -> None:
        data = infer(body()).partition(b"\r\n\r\n")[2]
        assert (await rig.infer(data.ljust(300_000))).status == 200
        assert (await rig.infer(data.ljust(300_001))).status == 413

    run(scenario, with_limits(body_bytes_max=300_000))


def test_the_sum_of_bodies_is_limited() -> None:
    async def scenario(rig: Rig) -> None:
        first, second, third = [await rig.connect() for _ in range(3)]
        first.send(infer(b" " * 400_000)[:-1])
        second.send(infer(b" " * 400_000)[:-1])
        await rig.until(lambda: rig.server.context.budget.used == 800_000)
        third.send(infer(b" " * 400_000))
        reply = await third.reply()
        assert (reply.status, reply.json["reason"]) == (503, "memory")
        assert (await rig.infer(body())).status == 200
        data = infer(body()).partition(b"\r\n\r\n")[2].ljust(400_000)
        first.writer.close()
        second.writer.close()
        await rig.until(lambda: not rig.server.context.budget.used)
        for _ in range(3):  # earlier reservations were released
            assert (await rig.infer(data)).status == 200

    run(
        scenario,
        with_limits(memory_bytes_max=1_000_000, body_bytes_max=400_000, response_bytes_max=400_000),
    )


def test_slow_readers_are_disconnected() -> None:
    """A client that requests much and reads nothing is paused, and then disconnected."""

    async def scenario(rig: Rig) -> None:
        with socket.create_connection(("127.0.0.1", rig.port)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            request_bytes = infer(body(tensor(["y" * 1_000_000], (1, 1), "BYTES")), model="bytes")
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(client, request_bytes * 3)
            await rig.until(lambda: len(rig.runtime.calls) == 3)
            await loop.sock_sendall(client, request_bytes * 3)
            await rig.until(lambda: not rig.server.connections)
            assert len(rig.runtime.calls) < 6

    run(scenario, with_limits(write_timeout_s=1.5, write_high_water=1 << 16))


def test_a_disconnect_cancels_the_call() -> None:
    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = "never"
        client = await rig.connect()
        client.send(infer(body()) * 2)
        await rig.until(lambda: bool(rig.runtime.calls))
        client.reset()
        await rig.until(lambda: bool(rig.runtime.cancelled))
        assert rig.runtime.cancelled == rig.runtime.calls
        assert len(rig.runtime.calls) == 1  # the second was never started
        rig.runtime.mode = "echo"
        rig.runtime.cancelled.clear()
        rig.runtime.complete(rig.runtime.calls[0])  # after the disconnect: must be harmless

    run(scenario)


def test_a_half_closed_client_gets_its_responses() -> None:
    """Whole requests get their responses; an incomplete one is discarded."""

    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = "never"
        client = await rig.connect()
        client.send(infer(body(id="1")) + infer(body(id="2")) + infer(body())[:-1])
        client.writer.write_eof()
        await rig.until(lambda: bool(rig.runtime.calls))
        await asyncio.sleep(0.05)  # some sweeps
        assert not rig.runtime.cancelled
        rig.runtime.mode = "echo"
        rig.runtime.complete(rig.runtime.calls[0])
        first, second = await client.reply(), await client.reply()
        assert (first.json["id"], second.json["id"]) == ("1", "2")
        assert (first.headers.get("connection"), second.headers["connection"]) == (None, "close")
        assert await client.is_closed()
        await rig.until(lambda: not rig.server.connections)
        assert not rig.server.context.budget.used
        assert not rig.server.context.keys.anonymous.in_flight

    run(scenario)


def test_a_reset_after_half_closing_is_noticed() -> None:
    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = "never"
        client = await rig.connect()
        client.send(infer(body()))
        await rig.until(lambda: bool(rig.runtime.calls))
        client.writer.write_eof()
        await asyncio.sleep(0.05)
        assert not rig.runtime.cancelled
        client.reset()
        await rig.until(lambda: rig.runtime.cancelled == rig.runtime.calls)
        await rig.until(lambda: not rig.server.connections)

    run(scenario)


def test_connections_are_limited() -> None:
    async def scenario(rig: Rig) -> None:
        first = [await rig.connect() for _ in range(2)]
        third = await rig.connect()
        reply = await third.reply()
        assert (reply.status, "retry-after" in reply.headers) == (503, True)
        assert await third.is_closed()
        first[0].send(LIVE)
        assert (await first[0].reply()).status == 200

    run(scenario, with_limits(connections_max=2))


def test_shutdown() -> None:
    """Open requests are completed, new ones get 503, and probes get responses."""

    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = "never"
        busy, kept, idle = await rig.connect(), await rig.connect(), await rig.connect()
        busy.send(infer(body()))
        await rig.until(lambda: bool(rig.runtime.calls))
        rig.runtime.phase = GatewayPhase.DRAINING
        for new in (kept, await rig.connect()):
            new.send(infer(body()))
            reply = await new.reply()
            assert (reply.status, reply.json["reason"]) == (503, "draining")
            assert reply.headers["connection"] == "close" and "retry-after" in reply.headers
        assert (await rig.ask(request("GET", "/livez"))).status == 200
        assert (await rig.ask(request("GET", "/readyz"))).status == 503
        rig.runtime.mode = "echo"
        rig.runtime.complete(rig.runtime.calls[0])
        assert (await busy.reply()).headers["connection"] == "close"
        assert await busy.is_closed()
        rig.server.stop_accepting()
        rig.server.abort_all()
        idle.send(infer(body()))  # crosses the end of the connection, and must not cause a reset
        assert await idle.is_closed()
        with pytest.raises(OSError):
            await rig.connect()

    run(scenario)


def test_requests_beyond_the_drain_time_get_503() -> None:
    """One request waits for its result, one is still being sent; both get a response."""

    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = "never"
        waiting, sending = await rig.connect(), await rig.connect()
        waiting.send(infer(body()))
        sending.send(infer(body())[:-10])
        await rig.until(lambda: bool(rig.runtime.calls))
        await asyncio.sleep(0.05)
        rig.server.abort_all()
        for client in (waiting, sending):
            reply = await client.reply()
            assert (reply.status, reply.json["reason"]) == (503, "draining")
            assert await client.is_closed()
        assert rig.runtime.cancelled == rig.runtime.calls

    run(scenario)


@pytest.mark.parametrize("timeout_ms", ["0.000001", "0.001", "0.4"])
def test_what_the_runtime_refuses_has_not_expired(timeout_ms: str) -> None:
    """However short the deadline is: the answer is what the Scheduler decides, as in its log."""

    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = "infeasible"
        client = await rig.connect()
        client.send(infer(body(), f"X-Request-Timeout-Ms: {timeout_ms}"))
        reply = await client.reply()
        assert (reply.status, reply.json["reason"]) == (422, "infeasible")
        assert reply.headers["x-headgate-outcome"] == "rejected"
        assert (rig.responses("422", "infeasible"), rig.responses("504")) == (1, 0)

    run(scenario)


@pytest.mark.parametrize("timeout_ms", [0.4, 1.4, 3.3])
def test_no_client_is_told_before_its_deadline_that_it_has_passed(timeout_ms: float) -> None:
    """Timers of the event loop count whole milliseconds. Nobody knows yet how the call ends."""

    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = "never"
        client = await rig.connect()
        for _ in range(5):
            client.send(infer(body(), f"X-Request-Timeout-Ms: {timeout_ms}"))
            reply = await client.reply()
            assert (reply.status, reply.json["reason"]) == (504, "deadline_exceeded")
            total_ms = float(reply.headers["server-timing"].partition("total;dur=")[2])
            assert total_ms >= timeout_ms
            assert "x-headgate-outcome" not in reply.headers

    run(scenario)


def test_a_hard_deadline_is_enforced_by_the_front_end() -> None:
    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = "never"
        client = await rig.connect()
        began_s = asyncio.get_running_loop().time()
        client.send(infer(body(), "X-Request-Timeout-Ms: 50"))
        reply = await client.reply()
        assert (reply.status, reply.json["deadline_ms"]) == (504, 50.0)
        assert asyncio.get_running_loop().time() - began_s > 0.045
        assert not rig.runtime.cancelled
        (call,) = rig.runtime.calls
        assert call.is_hard
        assert call.deadline_ns == call.arrived_ns + 50_000_000
        rig.runtime.mode = "echo"
        rig.runtime.complete(call)  # after the response: must be harmless
        client.send(infer(body(id="2"), "X-Request-Timeout-Ms: 5000"))
        assert (await client.reply()).json["id"] == "2"
        assert (rig.responses("504", "deadline_exceeded"), rig.responses("200")) == (1, 1)

    run(scenario)
