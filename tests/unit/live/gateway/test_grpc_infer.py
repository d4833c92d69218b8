"""Inference over gRPC: results, deadlines, and the status of every error."""

from __future__ import annotations

import asyncio
import re
from hashlib import sha256

import pytest
from grpc import StatusCode
from grpc_rig import Rig, run

from headgate.core.clock import MILLISECOND_NS
from headgate.live.call import GatewayPhase
from headgate.live.gateway.config import ApiKey, GatewayConfig, TenantLimit


def test_a_response_is_typed_or_raw_like_its_request() -> None:
    """Typed in, typed out; raw in, raw out."""

    async def scenario(rig: Rig) -> None:
        typed = await rig.ask("ModelInfer", rig.row(id="7"))
        assert (typed.model_name, typed.model_version, typed.id) == ("echo", "1", "7")
        (output,) = typed.outputs
        assert (output.name, output.datatype, list(output.shape)) == ("x", "FP32", [1, 2])
        assert list(output.contents.fp32_contents) == [1, 2]
        assert not typed.raw_output_contents

        request = rig.row()
        request.inputs[0].ClearField("contents")
        request.raw_input_contents.append(b"\0\0\x80?\0\0\0@")
        raw = await rig.ask("ModelInfer", request)
        assert list(raw.raw_output_contents) == [b"\0\0\x80?\0\0\0@"]
        assert not raw.outputs[0].HasField("contents")

    run(scenario)


def test_the_id_of_a_response_is_the_id_of_its_call() -> None:
    """Whether the client gives it in the metadata, in the message, or not at all."""

    async def scenario(rig: Rig) -> None:
        asked: list[tuple[str, str | None, str]] = [
            ("", None, ""),
            ("seven", None, "seven"),
            ("seven", "mine", "mine"),
            ("no id", None, ""),
        ]
        for in_message, in_metadata, expected in asked:
            metadata = () if in_metadata is None else (("x-request-id", in_metadata),)
            response = await rig.ask("ModelInfer", rig.row(id=in_message), metadata=metadata)
            assert response.id == in_message
            call = rig.runtime.calls[-1]
            assert rig.trailers["x-request-id"] == call.client_request_id.decode()
            assert call.is_id_given == (in_metadata is not None)
            if expected:
                assert rig.trailers["x-request-id"] == expected
            else:
                assert re.fullmatch(r"[0-9a-f]{12}-[0-9a-f]+", str(rig.trailers["x-request-id"]))

    run(scenario)


def test_only_requested_outputs_are_sent_over_grpc() -> None:
    async def scenario(rig: Rig) -> None:
        request = rig.messages["ModelInferRequest"](model_name="two")
        a = request.inputs.add(name="a", datatype="INT64", shape=(1,))
        a.contents.int64_contents.append(-5)
        b = request.inputs.add(name="b", datatype="FP32", shape=(1, 3))
        b.contents.fp32_contents.extend((1, 2, 3))
        request.outputs.add(name="b")
        response = await rig.ask("ModelInfer", request)
        assert [output.name for output in response.outputs] == ["b"]
        request.outputs.add(name="c")
        code, text = await rig.refused(request)
        assert code is StatusCode.INVALID_ARGUMENT and "'c'" in text

    run(scenario)


@pytest.mark.parametrize("name", ["classification", "shared_memory_region"])
def test_extensions_of_outputs_are_refused_over_grpc_as_over_http(name: str) -> None:
    async def scenario(rig: Rig) -> None:
        request = rig.messages["ModelInferRequest"](model_name="two")
        output = request.outputs.add(name="b")
        output.parameters[name].int64_param = 2
        code, text = await rig.refused(request)
        assert code is StatusCode.INVALID_ARGUMENT and f"'b': {name} is not supported" in text

    run(scenario)


@pytest.mark.parametrize(
    ("mode", "code", "reason"),
    [
        ("overloaded", StatusCode.RESOURCE_EXHAUSTED, "overloaded"),
        ("infeasible", StatusCode.FAILED_PRECONDITION, "infeasible"),
        ("refuse", StatusCode.INVALID_ARGUMENT, "function_refused"),
        ("fail", StatusCode["INTERNAL"], "function_failed"),
        ("lost", StatusCode.UNAVAILABLE, "worker_lost"),
        ("expire", StatusCode.DEADLINE_EXCEEDED, "deadline_exceeded"),
        ("raise", StatusCode["INTERNAL"], "internal"),
    ],
)
def test_every_outcome_has_its_status(mode: str, code: StatusCode, reason: str) -> None:
    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = mode
        got, text = await rig.refused(timeout_s=None)
        assert got is code and text
        assert rig.trailers["headgate-reason"] == reason

    run(scenario)


def test_rejections_have_a_retry_pushback() -> None:
    """Also in the metadata that gRPC's own retries use."""

    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = "overloaded"
        await rig.refused()
        assert 1200 <= int(rig.trailers["retry-after-ms"]) <= 1500
        assert rig.trailers["grpc-retry-pushback-ms"] == rig.trailers["retry-after-ms"]
        assert rig.trailers["headgate-predicted-ms"] == "300.000"
        rig.runtime.mode = "infeasible"
        await rig.refused()
        assert "retry-after-ms" not in rig.trailers, "more time will not help it"

    run(scenario)


def test_a_late_result_is_sent_unless_the_deadline_is_hard() -> None:
    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = "late"
        await rig.infer(timeout_s=None)
        id = rig.runtime.calls[0].client_request_id.decode()
        assert rig.trailers == {"x-request-id": id, "headgate-outcome": "late"}
        code, _ = await rig.refused(timeout_s=60)
        assert code is StatusCode.DEADLINE_EXCEEDED

    run(scenario)


@pytest.mark.parametrize(
    ("phase", "model", "code"),
    [
        (GatewayPhase.STARTING, "echo", StatusCode.UNAVAILABLE),
        (GatewayPhase.DRAINING, "echo", StatusCode.UNAVAILABLE),
        (GatewayPhase.READY, "none", StatusCode.NOT_FOUND),
    ],
)
def test_unknown_names_are_refused(phase: GatewayPhase, model: str, code: StatusCode) -> None:
    async def scenario(rig: Rig) -> None:
        rig.runtime.phase = phase
        request = rig.row()
        request.model_name = model
        got, _ = await rig.refused(request)
        assert got is code
        assert ("retry-after-ms" in rig.trailers) == (code is StatusCode.UNAVAILABLE)

    run(scenario)


def test_a_refusal_says_why_in_its_trailers() -> None:
    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = "explained"
        code, _ = await rig.refused(timeout_s=None)
        assert code is StatusCode.RESOURCE_EXHAUSTED
        expected = {
            "headgate-reason": "overloaded",
            "headgate-deadline-ms": "200.000",
            "headgate-predicted-ms": "240.000",
            "headgate-margin-ms": "15.000",
            "headgate-accepted-ms": "255.000",
            "headgate-accepted-usd": "4e-06",
            "headgate-predicted-usd": "2.5e-06",
            "headgate-objective-usd": "3e-06",
            "headgate-short-of": "cpu",
            "headgate-short-ms": "180.000",
            "headgate-stage": "classify",
        }
        assert {name: rig.trailers[name] for name in expected} == expected

    run(scenario)


def test_a_cost_objective_comes_by_metadata_or_parameter() -> None:
    async def scenario(rig: Rig) -> None:
        request = rig.row()
        request.parameters["cost_usd"].double_param = 0.25
        await rig.ask("ModelInfer", request, timeout_s=None)
        await rig.infer(timeout_s=None, metadata=(("x-request-cost-usd", "0.5"),))
        await rig.infer(timeout_s=None)
        assert [call.cost_usd for call in rig.runtime.calls] == [0.25, 0.5, 0.0]
        for usd in (float("nan"), float("inf"), 0.0, -1.0):
            request.parameters["cost_usd"].double_param = usd
            code, text = await rig.refused(request, timeout_s=None)
            assert code is StatusCode.INVALID_ARGUMENT
            assert "must be a number of dollars above 0" in text

    run(scenario)


def test_the_rpc_deadline_takes_precedence_over_the_parameter() -> None:
    async def scenario(rig: Rig) -> None:
        request = rig.row()
        request.parameters["timeout"].int64_param = 20_000_000
        request.parameters["priority"].uint64_param = 1
        await rig.ask("ModelInfer", request, timeout_s=None)
        await rig.ask("ModelInfer", request, timeout_s=30)
        await rig.infer(timeout_s=None, metadata=(("x-request-timeout-ms", "50000"),))
        await rig.infer(timeout_s=None)
        by_parameter, by_rpc, by_metadata, by_objective = rig.runtime.calls
        assert by_parameter.is_hard and by_parameter.priority < 0
        assert by_parameter.deadline_ns - by_parameter.arrived_ns == 20_000 * MILLISECOND_NS
        left_ms = (by_rpc.deadline_ns - by_rpc.arrived_ns) / MILLISECOND_NS
        assert by_rpc.is_hard and 20_000 < left_ms < 31_000  # gRPC rounds it on the way
        assert by_metadata.deadline_ns - by_metadata.arrived_ns == 50_000 * MILLISECOND_NS
        assert not by_objective.is_hard and by_objective.deadline_ns == 0
        request.parameters["timeout"].string_param = "soon"
        code, _ = await rig.refused(request, timeout_s=None)
        assert code is StatusCode.INVALID_ARGUMENT

    run(scenario)


def test_what_the_runtime_refuses_has_not_expired() -> None:
    """A deadline of a microsecond, too: the answer is what the Scheduler decides."""

    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = "infeasible"
        request = rig.row()
        request.parameters["timeout"].int64_param = 1
        code, _ = await rig.refused(request, timeout_s=None)
        assert code is StatusCode.FAILED_PRECONDITION
        assert rig.trailers["headgate-reason"] == "infeasible"

    run(scenario)


@pytest.mark.parametrize("by_rpc", [True, False])
def test_at_the_deadline_the_rpc_fails_and_the_call_goes_on(by_rpc: bool) -> None:
    """The runtime counts it as expired or late; a cancelled call would count as no miss.

    The timeout is long, since a tenth of it is what the request may take to arrive.
    """

    async def scenario(rig: Rig) -> None:
        await rig.infer()  # so that none of the time goes into connecting
        rig.runtime.mode = "never"
        request = rig.row()
        if not by_rpc:
            request.parameters["timeout"].int64_param = 500_000
        code, _ = await rig.refused(request, timeout_s=3.0 if by_rpc else None)
        assert code is StatusCode.DEADLINE_EXCEEDED
        await asyncio.sleep(0.05)
        assert len(rig.runtime.calls) == 2
        assert not rig.runtime.cancelled
        rig.runtime.mode = "late"
        rig.runtime.complete(rig.runtime.calls[1])  # after the response: must be harmless

    run(scenario)


def test_cancelling_an_rpc_cancels_its_call() -> None:
    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = "never"
        asking = asyncio.ensure_future(rig.infer(timeout_s=None))
        while not rig.runtime.calls:
            await asyncio.sleep(0.01)
        asking.cancel()
        while not rig.runtime.cancelled:
            await asyncio.sleep(0.01)
        assert rig.runtime.cancelled == rig.runtime.calls

    run(scenario)


def test_keys_and_tenant_limits_over_grpc() -> None:
    config = GatewayConfig(
        keys=(ApiKey(sha256(b"open").hexdigest(), 3),),
        tenants=(TenantLimit(3, concurrency_max=1),),
    )
    key = (("x-api-key", "open"),)

    async def scenario(rig: Rig) -> None:
        assert (await rig.refused())[0] is StatusCode.UNAUTHENTICATED
        code, _ = await rig.refused(metadata=(("authorization", "Bearer shut"),))
        assert code is StatusCode.UNAUTHENTICATED
        await rig.infer(metadata=key)
        await rig.infer(metadata=(("authorization", "Bearer open"),))
        assert {call.client_id for call in rig.runtime.calls} == {3}
        rig.runtime.mode = "never"
        first = asyncio.ensure_future(rig.infer(timeout_s=None, metadata=key))
        while len(rig.runtime.calls) < 3:
            await asyncio.sleep(0.01)
        code, _ = await rig.refused(metadata=key)
        assert code is StatusCode.RESOURCE_EXHAUSTED
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)

    run(scenario, config)


def test_traces_over_grpc() -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

    async def scenario(rig: Rig) -> None:
        await rig.infer(metadata=(("traceparent", trace),))
        await rig.infer(metadata=(("traceparent", "nonsense"),))
        assert [call.trace for call in rig.runtime.calls] == [trace.encode(), None]

    run(scenario)


def test_a_message_that_is_too_large_is_not_read() -> None:
    async def scenario(rig: Rig) -> None:
        request = rig.row(raw_input_contents=[bytes(20_000)])
        assert (await rig.refused(request))[0] is StatusCode.RESOURCE_EXHAUSTED

    run(scenario, GatewayConfig(body_bytes_max=10_000))
