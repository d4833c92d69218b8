"""Inference over HTTP: requests, errors, and the form of responses."""

from __future__ import annotations

import json
import re

import pytest
from gateway_rig import QUICK, Rig, body, infer, request, run, tensor
from msgspec.structs import replace

from headgate.live.call import GatewayPhase
from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.oip.json import STRINGS_MAX

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NO_COSTS = (0, -1, -0.5, "nan", "inf", "1e999", "-1", "0", "", "$1", True)


def test_infer() -> None:
    async def scenario(rig: Rig) -> None:
        reply = await rig.infer(body(id="7"))
        assert reply.status == 200
        assert reply.json == {
            "model_name": "echo",
            "model_version": "1",
            "id": "7",
            "outputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.5]}],
        }
        assert reply.headers["content-type"] == "application/json"
        assert reply.headers["server-timing"].startswith("queue;dur=0.001, exec;dur=0.002, total;")
        (call,) = rig.runtime.calls
        assert (call.items, call.priority, call.deadline_ns, call.is_hard) == (1, 0, 0, False)

    run(scenario)


@pytest.mark.parametrize(
    ("datatype", "data"),
    [
        ("BOOL", [True, False]),
        ("UINT8", [0, 255]),
        ("UINT64", [0, 2**64 - 1]),
        ("INT8", [-128, 127]),
        ("INT64", [-(2**63), 2**63 - 1]),
        ("FP16", [0.5, -65504.0]),
        ("FP32", [0.5, -(2.0**100)]),
        ("FP64", [0.1, 1e300]),
        ("BYTES", ["", "gr\u00fc\u00dfe \U0001f600"]),
    ],
)
def test_every_datatype_round_trips(datatype: str, data: list[object]) -> None:
    async def scenario(rig: Rig) -> None:
        reply = await rig.infer(body(tensor(data, (1, 2), datatype)), model="free")
        assert reply.json["outputs"][0]["data"] == data

    run(scenario)


def test_nested_data_is_flattened_in_order() -> None:
    async def scenario(rig: Rig) -> None:
        nested = [[[1, 2], [3, 4], [5, 6]], [[7, 8], [9, 10], [11, 12]]]
        reply = await rig.infer(body(tensor(nested, (2, 3, 2), "INT32")), model="free")
        assert reply.json["outputs"][0]["data"] == list(range(1, 13))

    run(scenario)


@pytest.mark.parametrize(
    ("given", "expected_text"),
    [
        (b"", "cannot be parsed"),
        (b"{", "cannot be parsed"),
        (b"[]", "Expected `object`"),
        (b"\xff", "cannot be parsed"),
        (b'{"inputs": [NaN]}', "cannot be parsed"),
        (b'{"more":' + b"[" * 50_000, "nested"),
        ({}, "inputs"),
        (body(id=3), "Expected `str`"),
        ({"inputs": []}, "no inputs"),
        (body(tensor(datatype="FP31")), "FP31"),
        (body(tensor(datatype="FP64")), "FP32 is expected"),
        (body(tensor(shape=[1, -2])), "shape"),
        (body(tensor(shape=[1, 2.0])), "shape"),
        (body(tensor(shape=[1, 2**62])), "shape"),
        (body(tensor(shape=[2**40, 2**40])), "elements"),
        (body(tensor(shape=[1] * 9)), "dimensions"),
        (body(tensor(shape=[2])), "is expected"),
        (body(tensor(shape=[0, 2], data=[])), "no items"),
        (body(tensor([1.0])), "1 elements; its shape needs 2"),
        (body(tensor([1.0, None])), "Expected `float`"),
        (body(tensor([1.0, "2"])), "Expected `float`"),
        (body(tensor([1.0, 1e300])), "out of the range of FP32"),
        (body(tensor([[1.0], [2.0]])), "not nested like its shape"),
        (body(tensor([[1.0, [2.0]]])), "not nested like its shape"),
        (body(tensor([[1.0], [2.0, 3.0, 4.0]], (2, 2))), "not nested like its shape"),
        (body(tensor("12")), "Expected `array`"),
        (body({"name": "x", "shape": [1, 2], "datatype": "FP32"}), "no data"),
        (body(tensor(datatype="BF16")), "binary"),
        (b"", "the request cannot be parsed: the body is empty"),
        (
            body(tensor(datatype="fp32")),
            "Invalid enum value 'fp32' - at `$.inputs[0].datatype` (al",
        ),
        (body(tensor(datatype="FLOAT")), "(allowed: BOOL, UINT8, "),
        (body(tensor(), tensor()), "input 'x' is given twice"),
        (body(tensor(), tensor(name="y")), "the model has no input 'y'"),
        (body(tensor(name="y")), "input 'x' is missing; the request has: 'y'"),
        (body(outputs=[{"name": "z"}]), "no output 'z'; its outputs: x"),
        (body(outputs=[{"name": "x"}, {"name": "x"}]), "twice"),
        (body(outputs=[{"name": "x", "parameters": {"classification": 3}}]), "classification"),
        (body(outputs=[{"name": "x", "parameters": {"binary_data": 1}}]), "true or false"),
        (body(parameters={"timeout": -1}), "microseconds"),
        (body(parameters={"timeout": True}), "microseconds"),
        (body(parameters={"timeout": "1"}), "microseconds"),
        *((body(parameters={"cost_usd": usd}), "a number of dollars above 0") for usd in NO_COSTS),
        (body(parameters={"priority": -1}), "priority"),
        (body(parameters={"priority": 0.5}), "priority"),
        (body(parameters={"priority": 1 << 31}), "from 0 to 2147483647"),
        (body(parameters={"binary_data_output": "yes"}), "true or false"),
    ],
)
def test_bad_requests_get_one_sentence(given: object, expected_text: str) -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.connect()
        client.send(infer(given) + request("GET", "/livez"))
        reply = await client.reply()
        assert reply.status == 400
        assert expected_text in reply.json["error"]
        assert "\n" not in reply.json["error"]
        assert reply.json["request_id"] == reply.headers["x-request-id"]
        assert (await client.reply()).status == 200  # the connection stays open
        assert not rig.runtime.calls

    run(scenario)


@pytest.mark.parametrize(
    ("datatype", "data"),
    [("UINT8", [256]), ("INT8", [-129]), ("INT64", [2**63]), ("FP16", [65536.0]), ("UINT64", [-1])],
)
def test_elements_out_of_range_are_refused(datatype: str, data: list[object]) -> None:
    async def scenario(rig: Rig) -> None:
        reply = await rig.infer(body(tensor(data, (1,), datatype)), model="free")
        assert (reply.status, "out of the range" in reply.json["error"]) == (400, True)

    run(scenario)


def test_inputs_are_reordered_for_the_model() -> None:
    async def scenario(rig: Rig) -> None:
        a, b = tensor([1, 2], [2], "INT64", "a"), tensor([0.0] * 6, [2, 3], "FP32", "b")
        assert (await rig.infer(body(b, a), model="two")).status == 200
        assert [tensor.name for tensor in rig.runtime.calls[0].inputs] == ["a", "b"]
        assert rig.runtime.calls[0].items == 2
        wrong = tensor([0.0] * 3, [1, 3], "FP32", "b")
        reply = await rig.infer(body(a, wrong), model="two")
        assert (reply.status, "first dimension" in reply.json["error"]) == (400, True)

    run(scenario)


def test_only_requested_outputs_are_sent() -> None:
    async def scenario(rig: Rig) -> None:
        a, b = tensor([1], [1], "INT64", "a"), tensor([0.0] * 3, [1, 3], "FP32", "b")
        reply = await rig.infer(body(a, b, outputs=[{"name": "b"}]), model="two")
        assert [output["name"] for output in reply.json["outputs"]] == ["b"]

    run(scenario)


def test_too_many_items_are_refused() -> None:
    async def scenario(rig: Rig) -> None:
        assert (await rig.infer(body(tensor([0.0] * 16, [8, 2])))).status == 200
        reply = await rig.infer(body(tensor([0.0] * 18, [9, 2])))
        assert (reply.status, "at most 8" in reply.json["error"]) == (413, True)
        reply = await rig.infer(body(tensor([0.0] * 18, [9, 2])), model="whole")
        assert (reply.status, rig.runtime.calls[-1].items) == (200, 1)

    run(scenario)


@pytest.mark.parametrize(
    ("mode", "status", "reason"),
    [
        ("overloaded", 429, "overloaded"),
        ("infeasible", 422, "infeasible"),
        ("over_cost", 422, "over_cost"),
        ("too_large", 413, "too_large"),
        ("too_large_at_last", 413, "too_large"),
        ("refuse", 400, "function_refused"),
        ("fail", 500, "function_failed"),
        ("lost", 503, "worker_lost"),
        ("expire", 504, "deadline_exceeded"),
        ("raise", 500, "internal"),
    ],
)
def test_every_outcome_has_its_status(mode: str, status: int, reason: str) -> None:
    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = mode
        client = await rig.connect()
        client.send(infer(body(), "X-Request-Id: abc"))
        reply = await client.reply()
        assert (reply.status, reply.json["reason"], reply.json["code"]) == (status, reason, status)
        assert reply.json["request_id"] == "abc"
        assert reply.headers["x-headgate-reason"] == reason  # one word, wherever it is said
        assert rig.responses(str(status), reason) == 1
        rig.runtime.mode = "echo"
        client.send(infer(body()))
        assert (await client.reply()).status == 200

    run(scenario)


def test_overload_has_a_retry_after() -> None:
    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = "overloaded"
        for _ in range(20):
            reply = await rig.infer(body())
            assert reply.headers["retry-after"] == "2"
            assert 1200 <= int(reply.headers["retry-after-ms"]) <= 1501
            assert int(reply.headers["retry-after-ms"]) == reply.json["retry_after_ms"]
            assert reply.json["predicted_ms"] == 300.0

    run(scenario)


def test_a_refusal_says_why_and_what_would_have_been_accepted() -> None:
    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = "explained"
        reply = await rig.infer(body())
        assert reply.status == 429
        expected = {
            "code": 429,
            "reason": "overloaded",
            "deadline_ms": 200.0,
            "predicted_ms": 240.0,
            "margin_ms": 15.0,
            "accepted_ms": 255.0,
            "objective_usd": 3e-6,
            "predicted_usd": 2.5e-6,
            "accepted_usd": 4e-6,
            "short_of": "cpu",
            "short_ms": 180.0,
            "stage": "classify",
        }
        assert {name: reply.json[name] for name in expected} == expected
        assert reply.json["error"] == (
            "the request would miss its deadline: the server is overloaded; "
            "a deadline of 255 ms or a cost of $4e-06 would have been accepted"
        )
        rig.runtime.mode = "over_cost"
        reply = await rig.infer(body())
        assert reply.json["error"].endswith("; a cost of $5e-06 would have been accepted")
        assert "retry-after" not in reply.headers  # a retry would not help

    run(scenario)


def test_an_error_leaves_out_what_is_not_known() -> None:
    async def scenario(rig: Rig) -> None:
        for mode, also in (
            ("refuse", set()),
            ("infeasible", set()),
            ("over_cost", {"accepted_usd"}),
        ):
            rig.runtime.mode = mode
            reply = await rig.infer(body())
            known = {name for name in reply.json if name.endswith(("_usd", "_ms"))}
            assert known - {"deadline_ms", "predicted_usd"} == also
            assert 0 not in reply.json.values(), "a zero is not known, and nobody's objective"

    run(scenario)


def test_overload_can_be_503() -> None:
    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = "overloaded"
        assert (await rig.infer(body())).status == 503
        rig.runtime.mode = "infeasible"
        reply = await rig.infer(body())
        assert (reply.status, "retry-after" in reply.headers) == (422, False)

    run(scenario, replace(QUICK, overload_status=503))


def test_a_late_response_is_200_with_an_outcome_header() -> None:
    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = "late"
        reply = await rig.infer(body())
        assert (reply.status, reply.headers["x-headgate-outcome"]) == (200, "late")
        reply = await rig.infer(body(), "X-Request-Timeout-Ms: 1000")
        assert reply.status == 504

    run(scenario)


@pytest.mark.parametrize(
    ("given", "header", "expected"),
    [
        ("seven", "", "seven"),
        ("x" * 128, "", "x" * 128),
        ("seven", "X-Request-Id: mine", "mine"),
        ("seven", "X-Request-Id: my id", "seven"),
        ("", "", None),
        ("my id", "", None),
        ("a\r\nSet-Cookie: b", "", None),
        ("zu-spät", "", None),
        ("x" * 129, "", None),
    ],
)
def test_the_id_of_a_response_is_the_id_of_its_call(
    given: str, header: str, expected: str | None
) -> None:
    """An id in the body is used as one in the header is; else the server assigns one."""

    async def scenario(rig: Rig) -> None:
        reply = await rig.infer(body(id=given), *filter(None, [header]))
        assert reply.json.get("id", "") == given  # comes back as it was, whatever it is
        (call,) = rig.runtime.calls
        assert reply.headers["x-request-id"] == call.client_request_id.decode()
        if expected is None:
            assert re.fullmatch(r"[0-9a-f]{12}-[0-9a-f]+", reply.headers["x-request-id"])
        else:
            assert reply.headers["x-request-id"] == expected
        # Only with an id in the header the client may send the request again.
        assert call.is_id_given == (expected == "mine")

    run(scenario)


def test_ids_and_traces_are_sent_back() -> None:
    async def scenario(rig: Rig) -> None:
        reply = await rig.infer(body(), "X-Request-Id: my id", f"traceparent: {TRACE}")
        assert reply.headers["x-request-id"] != "my id"  # has a space, so it is replaced
        assert reply.headers["traceparent"] == TRACE
        assert rig.runtime.calls[0].trace == TRACE.encode()
        reply = await rig.infer(body(), "X-Request-Id: id-1", "traceparent: nonsense")
        assert reply.headers["x-request-id"] == "id-1"
        assert "traceparent" not in reply.headers

    run(scenario)


@pytest.mark.parametrize("given", [b"0", b"-1", b"nan", b"inf", b"1e400", b"1,5", b"\xff", b"1 2"])
def test_a_cost_header_that_is_no_cost_gets_one_line(given: bytes) -> None:
    async def scenario(rig: Rig) -> None:
        reply = await rig.infer(body(), f"X-Request-Cost-Usd: {given.decode('latin-1')}")
        assert reply.status == 400
        problem = reply.json["error"]
        assert problem.startswith("x-request-cost-usd must be a number of dollars above 0, not '")
        assert not rig.runtime.calls

    run(scenario)


def test_a_request_may_carry_a_cost_objective() -> None:
    """The header takes precedence over the parameter; without either the objective counts."""

    async def scenario(rig: Rig) -> None:
        await rig.infer(body(), "X-Request-Cost-Usd: 2.5e-6")
        await rig.infer(body(parameters={"cost_usd": 0.25}))
        await rig.infer(body(parameters={"cost_usd": "0.5"}))
        await rig.infer(body(parameters={"cost_usd": 2}), "x-request-cost-usd: 1")
        await rig.infer(body())
        assert [call.cost_usd for call in rig.runtime.calls] == [2.5e-6, 0.25, 0.5, 1.0, 0.0]

    run(scenario)


def test_priorities() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.infer(body(parameters={"priority": 1}), "Priority: u=7")
        await rig.infer(body(parameters={"priority": 9}))
        await rig.infer(body(), "Priority: u=1, i")
        await rig.infer(body(), "Priority: u=nonsense")
        assert [call.priority for call in rig.runtime.calls] == [-3, 5, -2, 0]

    run(scenario)


def test_output_without_a_json_form_is_406() -> None:
    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = "bytes"
        reply = await rig.infer(body(tensor(["a"], (1, 1), "BYTES")), model="bytes")
        assert (reply.status, "binary" in reply.json["error"]) == (406, True)

    run(scenario)


def test_nan_and_infinity_are_null() -> None:
    async def scenario(rig: Rig) -> None:
        described = {"name": "x", "shape": [1, 2], "datatype": "FP32"}
        text = json.dumps({"inputs": [described | {"parameters": {"binary_data_size": 8}}]})
        raw = text.encode() + b"\x00\x00\xc0\x7f\x00\x00\x80\x7f"
        reply = await rig.infer(raw, f"Inference-Header-Content-Length: {len(text)}")
        assert reply.json["outputs"][0]["data"] == [None, None]

    run(scenario)


@pytest.mark.parametrize(
    ("phase", "ready", "answer"),
    [
        (GatewayPhase.STARTING, 503, 503),
        (GatewayPhase.READY, 200, 200),
        (GatewayPhase.LAME_DUCK, 503, 200),
        (GatewayPhase.DRAINING, 503, 503),
    ],
)
def test_phases(phase: GatewayPhase, ready: int, answer: int) -> None:
    async def scenario(rig: Rig) -> None:
        rig.runtime.phase = phase
        for path in ("/v2/health/ready", "/readyz", "/ping"):
            assert (await rig.ask(request("GET", path))).status == ready
        assert (await rig.ask(request("GET", "/v2/health/live"))).status == 200
        reply = await rig.infer(body())
        assert reply.status == answer
        assert ("retry-after" in reply.headers) == (answer == 503)
        is_leaving = phase in (GatewayPhase.LAME_DUCK, GatewayPhase.DRAINING)
        assert (reply.headers.get("connection") == "close") == is_leaving

    run(scenario)


def test_unknown_names() -> None:
    async def scenario(rig: Rig) -> None:
        assert (await rig.infer(body(), model="nobody")).status == 404
        assert (await rig.infer(body(), model="%65cho")).status == 200
        assert (await rig.infer(body(), model="echo/versions/1")).status == 200
        assert (await rig.infer(body(), model="echo/versions/2")).status == 404
        assert (await rig.ask(request("GET", "/nothing"))).status == 404
        reply = await rig.ask(request("GET", "/v2/models/echo/infer"))
        assert (reply.status, reply.headers["allow"]) == (405, "POST")
        reply = await rig.infer(body(), "Content-Encoding: gzip")
        assert reply.status == 415

    run(scenario)


def test_models_without_declared_inputs_have_limits() -> None:
    async def scenario(rig: Rig) -> None:
        assert (await rig.infer(body(), model="free")).status == 400
        many = [tensor(name=str(number)) for number in range(3)]
        assert (await rig.infer(body(*many), model="free")).status == 400

    run(scenario, replace(GatewayConfig(), elements_max=1, inputs_max=2))


def test_text_is_bounded_more_tightly_than_bytes() -> None:
    async def scenario(rig: Rig) -> None:
        text = json.dumps(body()).encode()
        assert (await rig.infer(text.ljust(1000))).status == 200
        reply = await rig.infer(text.ljust(1001))
        assert (reply.status, "binary" in reply.json["error"]) == (413, True)

    run(scenario, replace(QUICK, json_bytes_max=1000))


def test_strings_are_bounded() -> None:
    async def scenario(rig: Rig) -> None:
        many = tensor([""] * (STRINGS_MAX + 1), [1, STRINGS_MAX + 1], "BYTES")
        reply = await rig.infer(body(many), model="free")
        assert (reply.status, "strings" in reply.json["error"]) == (400, True)

    run(scenario)


def test_strings_of_all_inputs_are_counted_together() -> None:
    async def scenario(rig: Rig) -> None:
        half = STRINGS_MAX // 2 + 1
        size = {"binary_data_size": 4 * half}
        described = {"shape": [1, half], "datatype": "BYTES", "parameters": size}
        inputs = [{"name": name, **described} for name in "ab"]
        for count, status in ((1, 200), (2, 400)):
            binary = {"binary_data_output": True}
            text = json.dumps({"inputs": inputs[:count], "parameters": binary}).encode()
            length = f"Inference-Header-Content-Length: {len(text)}"
            reply = await rig.infer(text + bytes(4 * half * count), length, model="free")
            assert reply.status == status

    run(scenario)


def test_an_internal_error_is_logged_with_the_request_id(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = "raise"
        await rig.infer(body(), "X-Request-Id: abc")
        await rig.infer(b"{", "X-Request-Id: bad")  # errors of clients are not logged

    run(scenario)
    (record,) = caplog.records
    assert record.__dict__["request_id"] == "abc"
    assert record.exc_info
