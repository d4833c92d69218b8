"""SageMaker's container contract and its clients' interface."""

from __future__ import annotations

import json
import struct

import pytest
from gateway_rig import Reply, Rig, body, request, run, tensor

from headgate.live.call import GatewayPhase

JSON = "application/json"
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def invoke(
    rig: Rig, data: object, kind: str = JSON, *lines: str, model: str = "echo"
) -> Reply:
    sent = data if isinstance(data, bytes) else json.dumps(data).encode()
    target = f"X-Amzn-SageMaker-Target-Model: {model}"
    return await rig.ask(
        request("POST", "/invocations", sent, f"Content-Type: {kind}", target, *lines)
    )


async def call_endpoint(rig: Rig, data: object, *lines: str, model: str = "echo") -> Reply:
    sent = json.dumps(data).encode()
    path = f"/endpoints/{model}/invocations"
    return await rig.ask(request("POST", path, sent, f"Content-Type: {JSON}", *lines))


@pytest.mark.parametrize(
    ("sent", "kind", "expected"),
    [
        ({"instances": [[1, 2], [3, 4]]}, JSON, {"predictions": [[1.0, 2.0], [3.0, 4.0]]}),
        ({"instances": [1, 2]}, JSON, {"predictions": [[1.0, 2.0]]}),
        ([[1, 2]], "application/json; charset=utf-8", [[1.0, 2.0]]),
        (b" [[1,2]]", JSON, [[1.0, 2.0]]),
    ],
)
def test_rows(sent: object, kind: str, expected: object) -> None:
    async def scenario(rig: Rig) -> None:
        reply = await invoke(rig, sent, kind)
        assert (reply.status, json.loads(reply.body)) == (200, expected)
        assert reply.headers["x-amzn-invoked-production-variant"] == "AllTraffic"

    run(scenario)


def test_rows_of_text() -> None:
    async def scenario(rig: Rig) -> None:
        reply = await invoke(rig, {"instances": ["a", "b"]}, model="bytes")
        assert reply.json == {"predictions": [["a"], ["b"]]}

    run(scenario)


def test_csv() -> None:
    async def scenario(rig: Rig) -> None:
        reply = await invoke(rig, b"1,2\r\n3, 4.5\n\n", "text/csv")
        assert (reply.body, reply.headers["content-type"][:8]) == (
            b"1.0,2.0\n3.0,4.5\n",
            "text/csv",
        )

    run(scenario)


def test_oip_bodies_in_json_and_binary() -> None:
    async def scenario(rig: Rig) -> None:
        assert (await invoke(rig, body(id="3"))).json["id"] == "3"
        described = {"name": "x", "shape": [1, 2], "datatype": "FP32"}
        described["parameters"] = {"binary_data_size": 8}  # type: ignore[assignment]
        parameters = {"binary_data_output": True}
        text = json.dumps({"inputs": [described], "parameters": parameters}).encode()
        raw = struct.pack("<2f", 1, 2)
        kind = "application/vnd.sagemaker-triton.binary+json;json-header-size="
        reply = await invoke(rig, text + raw, f"{kind}{len(text)}")
        given, _, size = reply.headers["content-type"].rpartition("=")
        assert f"{given}=" == kind
        assert reply.body[int(size) :] == raw
        assert (await invoke(rig, text + raw, kind)).status == 400

    run(scenario)


def test_other_media_types_are_one_opaque_string() -> None:
    async def scenario(rig: Rig) -> None:
        reply = await invoke(rig, b"\xff\xd8 picture", "image/jpeg", model="bytes")
        assert reply.body == b"\xff\xd8 picture"
        assert reply.headers["content-type"] == "application/octet-stream"
        reply = await invoke(rig, b"picture", "image/jpeg", model="free")
        assert reply.body == b"picture"
        assert rig.runtime.calls[-1].inputs[0].name == "body"

    run(scenario)


@pytest.mark.parametrize(
    ("sent", "kind", "model"),
    [
        (b"", JSON, "echo"),
        (b"7", JSON, "echo"),
        (b"{}", JSON, "echo"),
        (b"[" * 100_000, JSON, "echo"),
        (b"[" * 20 + b"]" * 20, JSON, "echo"),
        ([], JSON, "echo"),
        ([[1, 2], [3]], JSON, "echo"),
        ([[1, "2"]], JSON, "echo"),
        ({"instances": 7}, JSON, "echo"),
        ({"instances": [[1, 2]]}, JSON, "two"),
        ([[1, 2]], JSON, "free"),
        (b"1,x", "text/csv", "echo"),
        (b"1,2\n3", "text/csv", "echo"),
        (b"1],[2", "text/csv", "bytes"),
        (b"1,2", "image/jpeg", "echo"),
    ],
)
def test_malformed_bodies_are_refused(sent: object, kind: str, model: str) -> None:
    async def scenario(rig: Rig) -> None:
        reply = await invoke(rig, sent, kind, model=model)
        assert reply.status == 400
        assert "error" in reply.json

    run(scenario)


def test_custom_attributes_set_deadline_priority_and_trace() -> None:
    async def scenario(rig: Rig) -> None:
        attributes = f"timeout_ms=250;cost_usd=0.5;priority=1; traceparent={TRACE};other"
        line = f"X-Amzn-SageMaker-Custom-Attributes: {attributes}"
        reply = await invoke(rig, body(), JSON, line)
        assert reply.headers["traceparent"] == TRACE
        (call,) = rig.runtime.calls
        assert (call.priority, call.is_hard, call.trace) == (-3, True, TRACE.encode())
        assert call.deadline_ns - call.arrived_ns == 250_000_000
        assert call.cost_usd == 0.5
        for wrong in ("timeout_ms=soon", "priority=high", "cost_usd=free"):
            line = f"X-Amzn-SageMaker-Custom-Attributes: {wrong}"
            assert (await invoke(rig, body(), JSON, line)).status == 400

    run(scenario)


def test_the_only_model_needs_no_name() -> None:
    async def scenario(rig: Rig) -> None:
        request_bytes = request("POST", "/invocations", b"[[1,2]]", f"Content-Type: {JSON}")
        assert (await rig.ask(request_bytes)).status == 400
        rig.runtime.models = {"echo": rig.runtime.models["echo"]}
        assert (await rig.ask(request_bytes)).status == 200

    run(scenario)


@pytest.mark.parametrize(
    ("mode", "status", "kind"),
    [
        ("fail", 424, "ModelError"),
        ("refuse", 424, "ModelError"),
        ("infeasible", 424, "ModelError"),
        ("expire", 424, "ModelError"),
        ("overloaded", 429, "ModelNotReadyException"),
        ("lost", 503, "ServiceUnavailable"),
    ],
)
def test_errors_have_the_services_format(mode: str, status: int, kind: str) -> None:
    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = mode
        reply = await call_endpoint(rig, body())
        assert (reply.status, reply.headers["x-amzn-errortype"]) == (status, kind)
        assert reply.json["Message"]
        assert ("OriginalStatusCode" in reply.json) == (kind == "ModelError")

    run(scenario)


def test_early_errors_have_the_services_format() -> None:
    async def scenario(rig: Rig) -> None:
        for reply in (
            await call_endpoint(rig, body(), model="nobody"),
            await call_endpoint(rig, body(tensor(datatype="FP64"))),
            await call_endpoint(rig, body(tensor([0.0] * 18, [9, 2]))),
        ):
            assert (reply.status, reply.headers["x-amzn-errortype"]) == (400, "ValidationError")
        rig.runtime.phase = GatewayPhase.STARTING
        reply = await call_endpoint(rig, body())
        assert reply.headers["x-amzn-errortype"] == "ModelNotReadyException"

    run(scenario)
