"""Bursts that spill to functions: real boto3, a fake platform, the real handler behind it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from fake_lambda import FakeLambda
from remote_app import reading, write_app
from served import Served, until, value

pytest.importorskip("boto3")

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ONLY_ELSEWHERE = """
functions:
  free: {{exec_time: 5ms}}
pools:
  cloud: {{tier: serverless, memory: 1GB, provider: lambda, target: "f-{{function}}",
           endpoint_url: {url}}}
policy: serverless_only
"""


def test_a_burst_spills_and_everything_about_it_can_be_seen(tmp_path: Path) -> None:
    """Answers, deadline and trace in the payload, money, cold starts, breaker, and a replay."""
    log = tmp_path / "run.log"
    with FakeLambda(tmp_path) as cloud:
        with Served(write_app(tmp_path, cloud.url), "--log", str(log)) as served:
            answers = served.ask_together("double", 12)
            assert [status for status, _ in answers] == [200] * 12
            assert [value(body) for _, body in answers] == [2.0 * n for n in range(12)]
            metrics = served.get("/metrics")[1]
            ready = json.loads(served.get("/v2/health/ready")[1])
        spilled = len(cloud.events)
        assert 1 <= spilled < 12  # and the worker had its part
        assert all(float(str(event["deadline_ms"])) <= 500 for event in cloud.events)
        assert all(event["tenant"] == "client" for event in cloud.events)
    assert ready == {"ready": True, "live": True, "breakers": {"cloud": "closed"}}
    assert reading(metrics, "headgate_spill_calls_total", outcome="finished") == spilled
    assert reading(metrics, "headgate_spill_breaker_state", pool="cloud") == 0
    assert reading(metrics, "headgate_spill_inflight", pool="cloud") == 0
    usd = reading(metrics, "headgate_cost_usd_total", tier="serverless", basis="usage")
    assert spilled * 0.2e-6 + spilled * 0.03 * 1.647 * 1.6e-5 < usd < spilled * 1e-4
    assert reading(metrics, "headgate_cold_starts_total", function="double") > 1
    replay = [sys.executable, "-m", "headgate", "replay", str(log), "--json"]
    told = json.loads(subprocess.run(replay, capture_output=True, check=True).stdout)
    assert told["is_identical"]
    assert told["complete"]
    assert "Dispatch" in log.read_text()


def test_a_request_takes_its_trace_and_its_own_deadline_along(tmp_path: Path) -> None:
    with (
        FakeLambda(tmp_path) as cloud,
        Served(write_app(tmp_path, cloud.url, policy="serverless_only")) as served,
    ):
        headers = {"traceparent": TRACE, "X-Request-Timeout-Ms": "30000"}
        assert served.ask("double", [1.0], headers)[0] == 200
        (event,) = cloud.events
        assert event["traceparent"] == TRACE
        assert 500 < float(str(event["deadline_ms"])) <= 30_000
        assert event.get("gives_up", True)


def test_nothing_else_of_a_request_leaves_the_machine(tmp_path: Path) -> None:
    """Tensors, deadline, trace and the name of the client: no header, no key, no id."""
    hashed = hashlib.sha256(b"open sesame").hexdigest()
    with FakeLambda(tmp_path) as cloud:
        more = f'clients: {{ali: {{key: "sha256:{hashed}"}}}}\n'
        app = write_app(tmp_path, cloud.url, policy="serverless_only", more=more)
        with Served(app) as served:
            headers = {"traceparent": TRACE, "X-Request-Timeout-Ms": "30000"}
            headers |= {"X-API-Key": "open sesame", "Cookie": "a=b", "X-Request-Id": "my-own-1"}
            assert served.ask("double", [1.0], headers)[0] == 200
        (event,) = cloud.events
    requests = event.pop("requests")
    assert isinstance(requests, list)
    (request,) = requests
    (tensor,) = request.pop("inputs")
    assert event.pop("deadline_ms")
    assert event == {"headgate": 1, "function": "double", "traceparent": TRACE, "tenant": "ali"}
    assert request == {"id": 0, "items": 1}
    assert tensor == {"name": "x", "datatype": "FP32", "shape": [1], "data": "AACAPw=="}


@pytest.mark.parametrize(
    ("exposes", "said"),
    [("false", "the function failed"), ("true", "ArithmeticError: of all numbers, this one")],
)
def test_what_a_function_says_of_one_request_is_what_its_client_hears_if_it_may(
    tmp_path: Path, exposes: str, said: str
) -> None:
    with FakeLambda(tmp_path) as cloud:
        app = write_app(tmp_path, cloud.url, policy="serverless_only")
        text = (app / "app.yaml").read_text()
        serve = f"serve: {{expose_errors: {exposes}, "
        (app / "app.yaml").write_text(text.replace("serve: {", serve))
        with Served(app) as served:
            status, body = served.ask("double", [666.0])
            assert (status, body["error"]) == (500, said)
            assert len(cloud.events) == 1  # it would break again, so it is not repeated
            assert reading(served.get("/metrics")[1], "headgate_spill_breaker_state") == 0


def test_a_function_that_runs_nowhere_here_takes_anything(tmp_path: Path) -> None:
    """Neither code nor model: whoever runs it knows. Its target is named after it."""
    with FakeLambda(write_app(tmp_path, "http://unused")) as cloud:
        (tmp_path / "far.yaml").write_text(ONLY_ELSEWHERE.format(url=cloud.url))
        with Served(tmp_path, app="far.yaml") as served:
            assert "free: any inputs -> any outputs" in served.greeting
            cloud.rename = {"free": "double"}
            status, body = served.ask("free", [4.0])
            assert (status, value(body)) == (200, 8.0)
            assert cloud.targets == {"f-free"}
            assert served.workers() == []


def test_what_code_declares_is_known_though_it_runs_elsewhere_only(tmp_path: Path) -> None:
    with FakeLambda(tmp_path) as cloud:
        app = write_app(tmp_path, cloud.url, policy="serverless_only")
        text = (app / "app.yaml").read_text()
        lines = [line for line in text.splitlines() if not line.startswith("  local:")]
        (app / "app.yaml").write_text("\n".join(lines))
        with Served(app) as served:
            assert "double: x FP32[-1] -> y FP32[-1]" in served.greeting
            assert value(served.ask("double", [5.0])[1]) == 10.0


def test_it_ends_at_once_though_a_call_hangs(tmp_path: Path) -> None:
    with FakeLambda(tmp_path) as cloud:
        cloud.mode = "hang"
        app = write_app(tmp_path, cloud.url, policy="serverless_only", execution_timeout="100s")
        text = (app / "app.yaml").read_text().replace("drain: 5s", "drain: 200ms")
        (app / "app.yaml").write_text(text)
        with Served(app) as served:
            connection = served.connect()
            tensor = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}
            path = "/v2/models/double/infer"
            connection.request("POST", path, json.dumps({"inputs": [tensor]}))
            assert until(lambda: cloud.calls["hang"] == 1)
            served.process.terminate()
            assert until(lambda: served.process.poll() == 0)
            connection.close()
