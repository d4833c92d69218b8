"""The memory budget: shares of tenants, reservations before reading, and no leaks."""

from __future__ import annotations

import asyncio
import os
import signal
from hashlib import sha256
from random import Random

import pytest
from gateway_rig import QUICK, Client, Rig, body, infer, raw, request, run, tensor, with_limits
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headgate.live.gateway.config import ApiKey, TenantLimit
from headgate.live.gateway.tenants import Budget, Hold

KEYS = (ApiKey(sha256(b"first").hexdigest(), 1), ApiKey(sha256(b"second").hexdigest(), 2))
BINARY = {"binary_data_output": True}
CHUNKED = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@given(
    st.integers(1, 1000),
    st.integers(1, 5),
    st.integers(0, 400),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 300), st.booleans()), max_size=60),
)
def test_guaranteed_shares_survive_what_other_tenants_reserve(
    total: int, tenants: int, largest: int, steps: list[tuple[int, int, bool]]
) -> None:
    budget = Budget(total, range(tenants), largest)
    held: dict[int, list[int]] = {tenant: [] for tenant in range(tenants)}
    for tenant, size, takes in steps:
        tenant %= tenants
        if takes:
            used = sum(held[tenant])
            is_taken = budget.reserve(tenant, size)
            if is_taken:
                held[tenant].append(size)
            assert is_taken or used + size > budget.share, "a share is not there"
        elif held[tenant]:
            budget.release(tenant, held[tenant].pop())
        assert budget.used == sum(map(sum, held.values())) <= total
    for tenant, sizes in held.items():
        for size in sizes:
            budget.release(tenant, size)
    assert budget.used == 0
    assert all(budget.reserve(tenant, budget.share) for tenant in range(tenants))


def test_a_single_tenant_has_the_whole_budget_and_one_of_several_half() -> None:
    assert Budget(100, [0], 10).reserve(0, 100)
    several = Budget(100, [0, 1, 2], 10)
    assert several.reserve(0, 50)
    assert not several.reserve(0, 1)
    assert Budget(100, [0, 1, 2, 3, 4], 20).reserve(4, 20)  # room for the largest, if there is any


def test_a_hold_is_released_once() -> None:
    budget = Budget(100, [0], 10)
    hold = Hold(budget, 0)
    assert hold.grow(60)
    assert not hold.grow(60)
    assert not hold.resize(101)
    assert hold.size == budget.used == 60
    assert hold.resize(10)
    assert budget.used == 10
    hold.release()
    hold.release()
    assert budget.used == 0


def test_an_announced_body_is_reserved_before_it_arrives() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.connect()
        client.send(raw(100_000).partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
        await rig.until(lambda: rig.server.context.budget.used == 100_000)
        client.reset()
        await rig.until(lambda: not rig.server.context.budget.used)

    run(scenario)


def test_a_body_without_a_key_or_a_use_is_not_held() -> None:
    async def scenario(rig: Rig) -> None:
        paths = ("/v2/models/echo/infer", "/livez", "/nowhere", "/v2/models/echo")
        for path in paths:
            client = await rig.connect()
            client.send(request("POST", path, bytes(100_000))[:-1])
        client = await rig.connect()
        client.send(CHUNKED + b"10000\r\n" + bytes(0x10000) + b"\r\n")
        await asyncio.sleep(0.1)
        assert rig.server.context.budget.used == 0
        for client in rig.clients:
            assert client.reader.at_eof() is False

    run(scenario, replace(QUICK, keys=KEYS))


def test_bodies_of_one_tenant_leave_memory_for_another() -> None:
    """The first tenant reserves all it can and finishes nothing; the second is served."""

    async def scenario(rig: Rig) -> None:
        for _ in range(12):
            client = await rig.connect()
            client.send(raw(100_000, "X-API-Key: first")[:-1])
        await rig.until(lambda: rig.server.context.budget.used == 500_000)
        refused = await rig.ask(raw(100_000, "X-API-Key: first"))
        assert (refused.status, refused.json["reason"]) == (503, "memory")
        request_bytes = raw(100_000, "X-API-Key: second", parameters=BINARY)
        for _ in range(3):
            assert (await rig.ask(request_bytes)).status == 200

    run(scenario, replace(QUICK, keys=KEYS, memory_bytes_max=1_000_000, body_bytes_max=100_000))


def test_an_announced_body_must_be_sent() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.connect()
        client.send(raw(100_000)[:1000])
        reply = await client.reply()
        assert (reply.status, "body" in reply.json["error"]) == (408, True)
        await rig.until(lambda: not rig.server.context.budget.used)

    run(scenario, with_limits(QUICK, header_timeout_s=0.5))


def test_decoded_text_is_counted_at_its_decoded_size() -> None:
    """Numbers of one digit are two bytes of text, and eight as FP64."""

    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = "never"
        described = b'{"inputs":[{"name":"x","shape":[1,50000],"datatype":"FP64","data":[%b]}]}'
        text = described % b",".join([b"1"] * 50_000)
        for size in (len(text), 200_000):  # once in the gateway, once in the codec process
            client = await rig.connect()
            client.send(infer(text.ljust(size), model="free"))
            await rig.until(lambda: bool(rig.runtime.calls))
            assert rig.server.context.budget.used == 400_000
            client.reset()
            await rig.until(lambda: not rig.server.context.budget.used)
            rig.runtime.calls.clear()
        refused = await rig.infer(body(tensor([1] * 100_000, [100_000], "FP64")), model="whole")
        assert (refused.status, refused.json["reason"]) == (503, "memory")

    run(scenario, replace(QUICK, memory_bytes_max=700_000, body_bytes_max=350_000))


def test_the_rate_limit_is_checked_before_the_body() -> None:
    async def scenario(rig: Rig) -> None:
        assert (await rig.infer(body())).status == 200
        for nonsense in (b"{", b"[" * 100_000):
            client = await rig.connect()
            client.send(infer(nonsense))
            reply = await client.reply()
            assert (reply.status, reply.json["reason"]) == (429, "rate_limited")
            client.send(request("GET", "/livez"))
            assert (await client.reply()).status == 200  # the body was read and discarded
        head = infer(body(), "Expect: 100-continue").partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
        assert (await rig.ask(head)).status == 429

    run(scenario, replace(QUICK, tenants=(TenantLimit(0, rate_per_s=0.001, burst=1),)))


def test_concurrency_is_counted_from_the_headers_and_always_released() -> None:
    async def scenario(rig: Rig) -> None:
        anonymous = rig.server.context.keys.anonymous
        unfinished = await rig.connect()
        unfinished.send(infer(body())[:-1])
        await rig.until(lambda: anonymous.in_flight == 1)
        assert (await rig.infer(body())).json["reason"] == "concurrency_limited"
        unfinished.reset()
        await rig.until(lambda: anonymous.in_flight == 0)
        for request_bytes in (infer(b"{"), infer(body(), model="nobody"), infer(b" " * 70_000)):
            assert (await rig.ask(request_bytes)).status in (400, 404, 413)
            assert anonymous.in_flight == 0
        client = await rig.connect()
        client.send(infer(body())[:-1])
        assert (await client.reply()).status == 408
        assert (await rig.infer(body())).status == 200
        assert anonymous.in_flight == 0

    limits = (TenantLimit(0, concurrency_max=1),)
    run(scenario, with_limits(QUICK, tenants=limits, body_timeout_s=1.5, json_bytes_max=65_536))


def test_a_request_without_memory_costs_no_token() -> None:
    async def scenario(rig: Rig) -> None:
        assert rig.server.context.budget.reserve(0, 800_000)
        for _ in range(5):
            assert (await rig.ask(raw(300_000))).json["reason"] == "memory"
        assert (await rig.infer(body())).status == 200

    limits = (TenantLimit(0, rate_per_s=0.001, burst=1),)
    run(
        scenario, replace(QUICK, tenants=limits, memory_bytes_max=1_000_000, body_bytes_max=300_000)
    )


def test_long_text_is_refused_by_its_headers_with_advice() -> None:
    async def scenario(rig: Rig) -> None:
        for request_bytes in (
            infer(b" " * 2000),
            CHUNKED + b"7d0\r\n" + b" " * 2000 + b"\r\n0\r\n\r\n",
            request("POST", "/invocations", b" " * 2000, "Content-Type: text/csv"),
        ):
            client = await rig.connect()
            client.send(request_bytes)
            reply = await client.reply()
            assert (reply.status, "binary_data_size" in reply.json["error"]) == (413, True)
            client.send(request("GET", "/livez"))
            assert (await client.reply()).status == 200

    run(scenario, replace(QUICK, json_bytes_max=1000))


def test_an_early_error_has_the_format_of_the_clients_interface() -> None:
    async def scenario(rig: Rig) -> None:
        for path, status, kind in (
            ("/endpoints/echo/invocations", 429, "ModelNotReadyException"),
            ("/invocations", 429, None),
        ):
            request_bytes = request("POST", path, b"[[1,2]]", "Content-Type: application/json")
            reply = await rig.ask(request_bytes)
            assert (reply.status, reply.headers.get("x-amzn-errortype")) == (status, kind)

    limit = TenantLimit(0, rate_per_s=0.001, burst=1)

    async def spent(rig: Rig) -> None:
        await rig.infer(body())
        await scenario(rig)

    run(spent, replace(QUICK, tenants=(limit,)))


ANY_ORDER = with_limits(
    sweep_s=0.02,
    linger_s=0.05,
    inline_bytes_max=400,
    inline_elements_max=64,
    memory_bytes_max=400_000,
    body_bytes_max=100_000,
    response_bytes_max=200_000,
    body_timeout_s=0.2,
    write_timeout_s=0.2,
    write_high_water=4096,
    pipelined_max=3,
    tenants=(TenantLimit(1, concurrency_max=6), TenantLimit(2)),
    keys=KEYS,
)


def _requests(rng: Random) -> bytes:
    key = rng.choice(["X-API-Key: first", "X-API-Key: second", "X-API-Key: wrong"])
    lines = [key] + ["X-Request-Timeout-Ms: 20"] * rng.randrange(2)
    kinds = [
        infer(body(), *lines),
        infer(b"{", *lines),
        infer(body(tensor([1.5] * 2_000, [1, 2_000])), *lines, model="free"),  # long in and out
        infer(body(tensor([1.5] * 2_001, [1, 2_000])), *lines, model="free"),
        raw(90_000, *lines, parameters=BINARY),
        raw(30_000, *lines),
        raw(100_000, *lines),
        request("POST", "/invocations", b"1," * 900 + b"1", "Content-Type: text/csv", *lines),
        CHUNKED.replace(b"\r\n\r\n", f"\r\n{key}\r\n\r\n".encode()) + b"5\r\nhello\r\n0\r\n\r\n",
        infer(body(), "Expect: 100-continue", *lines),
        request("GET", "/livez"),
    ]
    return b"".join(rng.choices(kinds, k=rng.randrange(1, 4)))


async def _one_client(rig: Rig, rng: Random) -> None:
    client = await rig.connect()
    request_bytes = _requests(rng)
    if rng.random() < 0.3:
        request_bytes = request_bytes[: rng.randrange(len(request_bytes))]
    for part in (
        request_bytes[: len(request_bytes) // 2],
        request_bytes[len(request_bytes) // 2 :],
    ):
        client.send(part)
        await asyncio.sleep(rng.random() * 0.03)
    await _leave(client, rng)


async def _leave(client: Client, rng: Random) -> None:
    how = rng.randrange(4)
    if how == 0:
        client.reset()
    elif how == 1 and not client.writer.transport.is_closing():
        client.writer.write_eof()
    elif how == 2:
        client.reader._transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(0.1)
        client.reset()
    else:
        try:
            await asyncio.wait_for(client.reader.read(), 0.3)
        except (TimeoutError, ConnectionError):
            client.writer.close()


SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 20))]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_budget_is_empty_in_the_end(seed: int) -> None:
    """Requests, disconnects, expiries, a codec that dies, in any order: nothing leaks."""

    async def scenario(rig: Rig) -> None:
        rng = Random(seed)
        rig.runtime.mode = "echo"

        async def disturb() -> None:
            for _ in range(40):
                await asyncio.sleep(0.03)
                rig.runtime.mode = rng.choice(["echo", "echo", "never", "fail", "large", "raise"])
                pid = rig.server.context.codec.processes[0].pid
                if pid is not None and rng.random() < 0.1:
                    os.kill(pid, signal.SIGKILL)

        async def many_clients() -> None:
            for _ in range(12):
                await _one_client(rig, rng)

        await asyncio.gather(disturb(), *(many_clients() for _ in range(8)))
        rig.runtime.mode = "echo"
        for call in list(rig.runtime.calls):  # calls of mode `never`, after their responses
            if call.settlement is None:
                rig.runtime.complete(call)
        for client in rig.clients:
            client.writer.close()
        keys = rig.server.context.keys
        await rig.until(lambda: not rig.server.connections)
        await rig.until(lambda: not rig.server.context.budget.used)
        assert all(not tenant.in_flight for tenant in keys._tenants.values())
        key = "X-API-Key: first"
        assert (await rig.infer(body(), key)).status == 200
        assert (await rig.ask(raw(90_000, key, parameters=BINARY))).status == 200

    run(scenario, ANY_ORDER)
