"""Bursts that spill to functions: real boto3, a fake platform, and the real handler behind it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from fake_lambda import FakeLambda
from remote_app import reading, write_app
from served import Served, run_json, until, value

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


def test_burst_spills_and_is_observable(tmp_path: Path) -> None:
    """Responses, deadline and trace in the payload, cost, cold starts, breaker, and a replay."""
    log = tmp_path / "run.log"
    with FakeLambda(tmp_path) as cloud:
        with Served(write_app(tmp_path, cloud.url), "--log", str(log)) as served:
            answers = served.ask_together("double", 12)
            assert [status for status, _ in answers] == [200] * 12
            assert [value(body) for _, body in answers] == [2.0 * n for n in range(12)]
            metrics = served.get("/metrics")[1]
            ready = json.loads(served.get("/v2/health/ready")[1])
        spilled = len(cloud.events)
        assert 1 <= spilled < 12  # the worker ran some of them
        assert all(float(str(event["deadline_ms"])) <= 500 for event in cloud.events)
        assert all(event["tenant"] == "client" for event in cloud.events)
    assert ready == {"ready": True, "live": True, "breakers": {"cloud": "closed"}}
    assert reading(metrics, "headgate_faas_calls_total", outcome="finished") == spilled
    assert reading(metrics, "headgate_faas_breaker_state", pool="cloud") == 0
    assert reading(metrics, "headgate_faas_inflight", pool="cloud") == 0
    usd = reading(metrics, "headgate_cost_usd_total", tier="serverless", basis="usage")
    assert spilled * 0.2e-6 + spilled * 0.03 * 1.647 * 1.6e-5 < usd < spilled * 1e-4
    assert reading(metrics, "headgate_cold_starts_total", function="double") > 1
    reported = run_json(tmp_path, "replay", str(log))
    assert reported["is_identical"]
    assert reported["complete"]
    assert "Dispatch" in log.read_text()


def test_call_carries_trace_and_deadline(tmp_path: Path) -> None:
    with (
        FakeLambda(tmp_path) as cloud,
        Served(write_app(tmp_path, cloud.url, policy="serverless_only")) as served,
    ):
        headers = {"traceparent": TRACE, "X-Request-Timeout-Ms": "30000"}
        assert served.ask("double", [1.0], headers)[0] == 200
        (event,) = cloud.events
        assert event["traceparent"] == TRACE
        assert 500 < float(str(event["deadline_ms"])) <= 30_000
        assert event.get("is_hard", True)


def test_call_carries_no_other_data(tmp_path: Path) -> None:
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
    assert event.pop("tasks") == [[0, 1, [["x", "FP32", [1], "AACAPw=="]], ""]]
    assert event.pop("deadline_ms")
    assert event == {"headgate": 2, "function": "double", "traceparent": TRACE, "tenant": "ali"}


@pytest.mark.parametrize(
    ("exposes", "error"),
    [("false", "the function failed"), ("true", "ArithmeticError: of all numbers, this one")],
)
def test_function_errors_reach_the_client_if_allowed(
    tmp_path: Path, exposes: str, error: str
) -> None:
    with FakeLambda(tmp_path) as cloud:
        app = write_app(tmp_path, cloud.url, policy="serverless_only")
        text = (app / "app.yaml").read_text()
        serve = f"serve: {{expose_errors: {exposes}, "
        (app / "app.yaml").write_text(text.replace("serve: {", serve))
        with Served(app) as served:
            status, body = served.ask("double", [666.0])
            assert (status, body["error"]) == (500, error)
            # a function error is not retried, because it would fail again
            assert len(cloud.events) == 1
            assert reading(served.get("/metrics")[1], "headgate_faas_breaker_state") == 0


def test_remote_only_function_without_source_accepts_any_input(tmp_path: Path) -> None:
    """It has neither code nor model, and its target is named after it."""
    with FakeLambda(write_app(tmp_path, "http://unused")) as cloud:
        (tmp_path / "far.yaml").write_text(ONLY_ELSEWHERE.format(url=cloud.url))
        with Served(tmp_path, app="far.yaml") as served:
            assert "free: any inputs -> any outputs" in served.banner
            cloud.rename = {"free": "double"}
            status, body = served.ask("free", [4.0])
            assert (status, value(body)) == (200, 8.0)
            assert cloud.targets == {"f-free"}
            assert served.workers() == []


def test_remote_only_function_has_the_signature_of_its_code(tmp_path: Path) -> None:
    with FakeLambda(tmp_path) as cloud:
        app = write_app(tmp_path, cloud.url, policy="serverless_only")
        text = (app / "app.yaml").read_text()
        lines = [line for line in text.splitlines() if not line.startswith("  local:")]
        (app / "app.yaml").write_text("\n".join(lines))
        with Served(app) as served:
            assert "double: x FP32[-1] -> y FP32[-1]" in served.banner
            assert value(served.ask("double", [5.0])[1]) == 10.0


def test_shutdown_with_a_hanging_call(tmp_path: Path) -> None:
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


STAGES_CODE = """
import numpy as np

from headgate.functions import Model


class Shaper(Model):
    inputs = {"x": "FP32[-1]"}

    def predict(self, batch):
        x = batch["x"]
        return {"x": x if x.max() < 5 else x[:, None] if x.max() < 6 else x.astype(np.float64)}


class Strict(Model):
    inputs = {"x": "FP32[-1]"}

    def predict(self, batch):
        return {"y": batch["x"]}
"""
STAGES = """
functions:
  shaper: {{code: "stages_code:Shaper", exec_time: 1ms}}
  strict: {{code: "stages_code:Strict", exec_time: 1ms}}
pipelines:
  both: {{stages: {{one: {{function: shaper}}, two: {{function: strict, after: [one]}}}}}}
slo: {{latency: 60s}}
pools:
  local: {{tier: dedicated, nodes: 1, cpus: 1}}
  cloud: {{tier: serverless, provider: lambda, target: f, endpoint_url: {url}, memory: 1GB}}
policy: {policy}
"""


def test_stage_with_wrong_inputs_has_the_same_answer_everywhere(tmp_path: Path) -> None:
    """Through a real gateway: a wrong shape and a wrong datatype, on a worker and on Lambda."""
    (tmp_path / "stages_code.py").write_text(STAGES_CODE)
    answers = []
    with FakeLambda(tmp_path) as cloud:
        for policy in ("dedicated_only", "serverless_only"):
            (tmp_path / "app.yaml").write_text(STAGES.format(url=cloud.url, policy=policy))
            with Served(tmp_path) as served:
                asked = [served.ask("both", [number]) for number in (1.0, 5.0, 6.0)]
            answers.append([(status, body.get("error")) for status, body in asked])
        assert len(cloud.events) == 6
    assert answers[0] == answers[1]
    assert answers[0] == [
        (200, None),
        (400, "stage two: x: is [1, 1], must be [-1]"),
        (400, "stage two: x: is FP64, must be FP32"),
    ]


LARGE_CODE = """
import numpy as np

from headgate.functions import Model


class Shaper(Model):
    inputs = {"x": "FP32[-1]"}
    outputs = {"rows": "FP32[-1, 10000]"}

    def predict(self, batch):
        return {"rows": np.repeat(batch["x"][:, None], 10_000, 1)}


class Strict(Model):
    inputs = {"rows": "FP32[-1, 10000]"}
    outputs = {"y": "FP32[-1]"}

    def predict(self, batch):
        return {"y": batch["rows"].sum(1)}
"""


def test_output_that_stays_on_the_node_is_read_by_a_remote_stage(tmp_path: Path) -> None:
    """The first stage runs on a worker, which keeps its 40 kB; the second one on Lambda."""
    (tmp_path / "large_code.py").write_text(LARGE_CODE)
    with FakeLambda(tmp_path) as cloud:
        app = STAGES.format(url=cloud.url, policy="threshold")
        app = app.replace('stages_code:Shaper", ', 'large_code:Shaper", pools: [local], ')
        app = app.replace('stages_code:Strict", ', 'large_code:Strict", pools: [cloud], ')
        (tmp_path / "app.yaml").write_text(app)
        with Served(tmp_path) as served:
            answers = [served.ask("both", [number]) for number in (1.0, 2.0, 3.0)]
            assert [value(body) for _, body in answers] == [10_000.0, 20_000.0, 30_000.0]
            metrics = served.get("/metrics")[1]
        assert len(cloud.events) == 3
    assert reading(metrics, "headgate_stage_output_bytes") == 0
