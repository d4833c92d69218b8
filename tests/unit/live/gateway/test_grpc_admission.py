"""Admission of RPCs: keys, limits and memory before a message is read, and slow senders."""

from __future__ import annotations

import asyncio
import gc
import logging
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from typing import Any

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_rig import Rig, run

from headgate.http.interface import HttpLimits
from headgate.live.call import GatewayPhase
from headgate.live.gateway.config import ApiKey, GatewayConfig, TenantLimit
from headgate.live.gateway.grpc import admission as grpc_admission
from headgate.live.gateway.grpc.admission import LOOKAHEAD_BYTES, WAITING_MAX
from headgate.live.gateway.grpc.server import SERVICE

INFER = f"/{SERVICE}/ModelInfer"
CHECK = "/grpc.health.v1.Health/Check"
KEYS = tuple(ApiKey(sha256(f"key {n}".encode()).hexdigest(), n) for n in (1, 2))
MEGABYTE = 1 << 20
# Each of three tenants (the first has no key) can have one message being read.
SMALL = GatewayConfig(body_bytes_max=MEGABYTE, memory_bytes_max=6 * MEGABYTE)
KEYED = GatewayConfig(body_bytes_max=MEGABYTE, memory_bytes_max=6 * MEGABYTE, keys=KEYS)


class Sender:
    """An RPC whose message is sent when a test says so."""

    def __init__(self, rig: Rig, path: str = INFER, key: str = "") -> None:
        metadata = (("x-api-key", key),) if key else ()
        stub: Any = rig.channel.stream_unary(path)
        self.call = stub(timeout=60, metadata=metadata)

    async def send(self, message: bytes) -> bytes:
        """Send a message, and wait for the response."""
        await self.call.write(message)
        answer = await self.call
        assert isinstance(answer, bytes)
        return answer

    async def refused(self) -> tuple[StatusCode, str]:
        """The status and the reason of an RPC whose message was never sent."""
        with pytest.raises(AioRpcError) as error:
            await self.call
        trailers = dict(error.value.trailing_metadata())
        assert trailers["x-request-id"]
        return error.value.code(), str(trailers.get("headgate-reason", ""))


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.005)


def reading(rig: Rig) -> int:
    """How many RPCs hold memory for a message that has not arrived."""
    return rig.context.budget.used // MEGABYTE


def test_without_a_key_nothing_is_read_and_nothing_is_held() -> None:
    async def scenario(rig: Rig) -> None:
        for key, path in (("", INFER), ("wrong", INFER), ("", f"/{SERVICE}/ModelReady")):
            refusal = await Sender(rig, path, key).refused()
            assert refusal == (StatusCode.UNAUTHENTICATED, "unauthenticated")
        assert rig.context.budget.used == 0
        assert rig.responses("UNAUTHENTICATED", "unauthenticated") == 3
        answer = await Sender(rig, key="key 1").send(rig.row().SerializeToString())
        assert rig.messages["ModelInferResponse"].FromString(answer).model_name == "echo"
        assert rig.runtime.calls[0].client_id == 1

    run(scenario, KEYED)


def test_limits_of_a_tenant_are_checked_before_its_message() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.infer()
        assert await Sender(rig).refused() == (StatusCode.RESOURCE_EXHAUSTED, "rate_limited")
        assert rig.responses("RESOURCE_EXHAUSTED", "rate_limited") == 1
        assert rig.responses("OK") == 1

    run(scenario, GatewayConfig(tenants=(TenantLimit(0, rate_per_s=0.001),)))


def test_a_message_is_held_until_its_response() -> None:
    """Held: the largest size while a message arrives, then its own size, in the end nothing."""

    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = "never"
        sender = Sender(rig)
        await until(lambda: rig.context.budget.used == MEGABYTE + LOOKAHEAD_BYTES)
        request = rig.messages["ModelInferRequest"](model_name="echo")
        request.inputs.add(name="x", datatype="FP32", shape=(8, 2))
        request.raw_input_contents.append(bytes(64))
        message = request.SerializeToString()
        asking = asyncio.ensure_future(sender.send(message))
        await until(lambda: bool(rig.runtime.calls))
        assert rig.context.budget.used == len(message) + LOOKAHEAD_BYTES
        rig.runtime.mode = "echo"
        rig.runtime.complete(rig.runtime.calls[0])
        await asking
        assert rig.context.budget.used == 0

    run(scenario, SMALL)


def test_memory_is_released_however_an_rpc_ends() -> None:
    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = "never"
        for cancel_at in (0, 1):
            sender = Sender(rig)
            await until(lambda: reading(rig) == 1)
            if cancel_at:
                await sender.call.write(rig.row().SerializeToString())
                await until(lambda: bool(rig.runtime.calls))
            sender.call.cancel()
            await until(lambda: rig.context.budget.used == 0)
        assert rig.runtime.cancelled == rig.runtime.calls
        gone, silent = ("CANCELLED", "client_gone"), ("INVALID_ARGUMENT", "no_message")
        await until(lambda: rig.responses(*gone) + rig.responses(*silent) == 2)
        for message in (b"\xff", b"\x78\x01" * 100_000, bytes(2 * MEGABYTE)):
            await rig.refused(message)
            await until(lambda: rig.context.budget.used == 0)

    run(scenario, SMALL)


def test_an_expired_call_is_held_until_the_runtime_has_finished_it() -> None:
    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = "never"
        request = rig.row()
        request.parameters["timeout"].int64_param = 50_000
        code, _ = await rig.refused(request, timeout_s=None)
        assert code is StatusCode.DEADLINE_EXCEEDED
        assert rig.context.budget.used > 0
        rig.runtime.mode = "expire"
        rig.runtime.complete(rig.runtime.calls[0])
        assert rig.context.budget.used == 0

    run(scenario, SMALL)


def test_a_large_response_is_held_until_it_is_sent() -> None:
    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = "large"
        await rig.infer()
        await until(lambda: rig.context.budget.used == 0)
        taken = (
            rig.context.budget.total - LOOKAHEAD_BYTES - MEGABYTE
        )  # just enough to read a message
        assert rig.context.budget.reserve(0, taken)
        rig.runtime.mode = "never"
        asking = asyncio.ensure_future(rig.refused())
        await until(lambda: bool(rig.runtime.calls[1:]))
        assert rig.context.budget.reserve(0, MEGABYTE - 1000)
        rig.runtime.mode = "large"
        rig.runtime.complete(rig.runtime.calls[1])
        assert (await asking)[0] is StatusCode.UNAVAILABLE
        assert rig.trailers["headgate-reason"] == "answers"
        assert rig.context.budget.used == taken + MEGABYTE - 1000

    run(scenario, SMALL)


def test_slow_senders_of_one_tenant_do_not_delay_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_admission, "SLOW_S", 60.0)

    async def scenario(rig: Rig) -> None:
        silent = [Sender(rig, key="key 1") for _ in range(20)]
        await until(lambda: reading(rig) >= 1)
        row = rig.row().SerializeToString()
        for _ in range(20):
            await Sender(rig, key="key 2").send(row)
        for sender in silent:
            sender.call.cancel()
        await until(lambda: rig.context.budget.used == 0)

    run(scenario, KEYED)


def test_waiting_rpcs_get_memory_in_order() -> None:
    """One message fits at a time: the second is read when the first has arrived."""

    async def scenario(rig: Rig) -> None:
        first = Sender(rig)
        await until(lambda: reading(rig) == 1)
        row = rig.row().SerializeToString()
        others = [asyncio.ensure_future(Sender(rig).send(row)) for _ in range(5)]
        await asyncio.sleep(0.05)
        assert not rig.runtime.calls and reading(rig) == 1
        await first.send(row)
        await asyncio.gather(*others)
        assert len(rig.runtime.calls) == 6 and rig.context.budget.used == 0

    run(scenario, GatewayConfig(body_bytes_max=MEGABYTE, memory_bytes_max=2 * MEGABYTE))


def test_an_rpc_that_waits_too_long_for_memory_may_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_admission, "WAIT_S", 0.05)

    async def scenario(rig: Rig) -> None:
        assert rig.context.budget.reserve(0, 2 * MEGABYTE - LOOKAHEAD_BYTES)
        code, _ = await rig.refused()
        assert (code, rig.trailers["headgate-reason"]) == (StatusCode.UNAVAILABLE, "memory")
        assert int(rig.trailers["grpc-retry-pushback-ms"]) > 0
        assert rig.context.budget.reserve(0, LOOKAHEAD_BYTES)
        assert (await rig.refused())[0] is StatusCode.UNAVAILABLE
        rig.context.budget.release(0, 2 * MEGABYTE)
        await rig.infer()

    run(scenario, GatewayConfig(body_bytes_max=MEGABYTE, memory_bytes_max=2 * MEGABYTE))
    assert WAITING_MAX * LOOKAHEAD_BYTES == 64 * MEGABYTE


def test_a_slow_sender_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the time limit, or earlier when other RPCs wait for memory."""

    async def scenario(rig: Rig) -> None:
        slow = (StatusCode.DEADLINE_EXCEEDED, "slow")
        assert await Sender(rig).refused() == slow
        await until(lambda: rig.context.budget.used == 0)

    run(scenario, GatewayConfig(http=HttpLimits(body_timeout_s=0.1)))

    async def crowded(rig: Rig) -> None:
        silent = Sender(rig)
        await until(lambda: reading(rig) == 1)
        asking = asyncio.ensure_future(Sender(rig).send(rig.row().SerializeToString()))
        assert await silent.refused() == (StatusCode.UNAVAILABLE, "slow")
        await asking

    monkeypatch.setattr(grpc_admission, "SLOW_S", 0.1)
    run(crowded, GatewayConfig(body_bytes_max=MEGABYTE, memory_bytes_max=2 * MEGABYTE))


def test_probes_succeed_beside_slow_senders() -> None:
    """Public methods: their small messages are read one at a time, and nobody waits."""

    async def scenario(rig: Rig) -> None:
        silent = [Sender(rig, CHECK) for _ in range(3)]
        await asyncio.sleep(0.05)
        stub: Any = rig.channel.unary_unary(CHECK)
        answer = await stub(HealthCheckRequest().SerializeToString())
        assert HealthCheckResponse.FromString(answer).status == HealthCheckResponse.SERVING
        live: Any = rig.channel.stream_unary(f"/{SERVICE}/ServerLive")
        assert rig.messages["ServerLiveResponse"].FromString(await live()).live
        codes = [await sender.call.code() for sender in silent]  # the others were not waited for
        assert sorted(code.name for code in codes) == ["DEADLINE_EXCEEDED", "OK", "OK"]
        with pytest.raises(AioRpcError) as error:
            await stub(HealthCheckRequest(service="x" * 5000).SerializeToString())
        assert error.value.code() is StatusCode.INVALID_ARGUMENT
        assert rig.context.budget.used == 0

    run(scenario, KEYED)


def test_unknown_methods_are_refused_and_counted() -> None:
    async def scenario(rig: Rig) -> None:
        stub: Any = rig.channel.unary_unary(f"/{SERVICE}/ModelExplode")
        with pytest.raises(AioRpcError) as error:
            await stub(b"")
        assert error.value.code() is StatusCode.UNIMPLEMENTED
        assert rig.responses("UNIMPLEMENTED", "unknown_method") == 1
        await rig.refused(b"\xff")
        assert rig.responses("INVALID_ARGUMENT", "invalid") == 1

    run(scenario)


def test_shutdown() -> None:
    """New RPCs are refused, probes get responses, and unfinished RPCs get UNAVAILABLE."""

    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = "never"
        waiting = Sender(rig)
        await waiting.call.write(rig.row().SerializeToString())
        await until(lambda: bool(rig.runtime.calls))
        sending = Sender(rig)
        await until(lambda: reading(rig) == 1)
        rig.runtime.phase = GatewayPhase.DRAINING
        code, _ = await rig.refused()
        assert (code, rig.trailers["headgate-reason"]) == (StatusCode.UNAVAILABLE, "draining")
        assert "retry-after-ms" in rig.trailers
        stub: Any = rig.channel.unary_unary(CHECK)
        answer = HealthCheckResponse.FromString(await stub(b""))
        assert answer.status == HealthCheckResponse.NOT_SERVING
        rig.server.abort_all()
        for sender in (waiting, sending):
            assert await sender.refused() == (StatusCode.UNAVAILABLE, "draining")
        assert rig.runtime.cancelled == rig.runtime.calls
        assert rig.context.budget.used == 0

    run(scenario, SMALL)


@pytest.mark.parametrize("exposes", [False, True])
def test_the_text_of_a_functions_exception_is_only_logged(
    exposes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = "fail"
        code, text = await rig.refused(metadata=(("x-request-id", "mine"),))
        assert (code, rig.trailers["x-request-id"]) == (StatusCode["INTERNAL"], "mine")
        assert text == ("division by zero" if exposes else "the function failed")
        rig.runtime.mode = "refuse"
        assert (await rig.refused())[1] == "x must be positive"  # the client's own error

    with caplog.at_level(logging.WARNING):
        run(scenario, GatewayConfig(expose_errors=exposes))
    (record,) = (r for r in caplog.records if "function failed" in r.getMessage())
    assert "division by zero" in record.getMessage()
    assert getattr(record, "request_id", "") == "mine"


def test_a_message_is_freed_without_the_garbage_collector() -> None:
    """However the RPC ends: memory that waits for the collector is outside any budget."""

    async def scenario(rig: Rig) -> None:
        def request(model: str, **fields: Any) -> bytes:
            made = rig.messages["ModelInferRequest"](model_name=model, **fields)
            made.inputs.add(name="x", datatype="FP32", shape=(1, 2))
            made.inputs[0].shape[1] = 100_000
            made.raw_input_contents.append(bytes(400_000))
            return bytes(made.SerializeToString())

        await rig.infer()
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            for mode, model in (
                ("echo", "free"),
                ("fail", "free"),
                ("echo", "nobody"),
                ("echo", "echo"),  # whose rows have two elements
            ):
                rig.runtime.mode = mode
                message = request(model)
                before = tracemalloc.get_traced_memory()[0]
                for _ in range(10):
                    with suppress(AioRpcError):
                        await rig.ask("ModelInfer", message)
                    rig.runtime.calls.clear()
                await asyncio.sleep(0.05)
                grown = tracemalloc.get_traced_memory()[0] - before
                assert grown < 3 * len(message), (mode, model, grown)
        finally:
            tracemalloc.stop()
            gc.enable()

    run(scenario)


def test_a_response_that_is_too_large_is_an_error() -> None:
    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = "large"
        code, text = await rig.refused()
        assert (code, rig.trailers["headgate-reason"]) == (
            StatusCode["INTERNAL"],
            "answer_too_large",
        )
        assert "50000" in text
        assert rig.context.budget.used == 0

    run(scenario, GatewayConfig(response_bytes_max=50_000))
