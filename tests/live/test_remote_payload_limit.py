"""Requests, results and responses beyond the payload limit of a call run on nodes.

The limit is 6 MiB of JSON, which is 4.5 MiB of elements.
"""

from __future__ import annotations

import http.client
import json
import struct
from pathlib import Path

import pytest
from fake_lambda import FakeLambda
from remote_app import reading
from served import Served, until

pytest.importorskip("boto3")

CODE = """
import time

import numpy as np

from headgate.functions import Model


class Grow(Model):
    '''Many numbers of few, or few of many: as many as the first of them says.'''

    inputs = {"x": "FP32[-1, -1]"}
    outputs = {"x": "FP32[-1, -1]"}

    def example(self):
        return {"x": np.zeros((1, 1), np.float32)}

    def predict(self, batch):
        count = int(batch["x"][0, 0])
        if count:
            time.sleep(0.05)
        return {"x": np.full((len(batch["x"]), max(1, count)), 3, np.float32)}
"""
APP = """
functions:
  grow: {{code: "sizes_elsewhere:Grow", exec_time: 50ms, cold_start: 100ms{idempotent}}}
  shrink: {{code: "sizes_elsewhere:Grow", exec_time: 50ms, cold_start: 100ms}}
pipelines:
  grow: {{stages: {{only: {{function: grow}}}}, slo: {{latency: 20s}}}}
  both:
    stages: {{first: {{function: grow}}, second: {{function: shrink, after: [first]}}}}
    slo: {{latency: 20s}}
pools:
{local}
  cloud:
    tier: serverless
    provider: lambda
    target: sizes
    endpoint_url: {url}
    memory: 1769MB
    price: $0.0000166667/GB-s
    circuit_breaker: {{failure_threshold: 1, cooldown: 60s}}
policy: {policy}
"""
LOCAL = "  local: {tier: dedicated, nodes: 1, cpus: 1}"
FITS = 1_000_000  # numbers
TOO_MANY = 1_300_000


def write(directory: Path, url: str, policy: str, local: str = LOCAL, idempotent: str = "") -> Path:
    (directory / "sizes_elsewhere.py").write_text(CODE)
    text = APP.format(url=url, policy=policy, local=local, idempotent=idempotent)
    (directory / "app.yaml").write_text(text)
    return directory


def send(served: Served, model: str, count: int, first: float) -> http.client.HTTPConnection:
    """Send a request of this many numbers, as binary data."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, count]}
    parameters = {"binary_data_size": 4 * count}
    head = json.dumps({"inputs": [{**tensor, "parameters": parameters}]}).encode()
    connection = served.connect(60)
    body = head + struct.pack("<f", first) + bytes(4 * count - 4)
    lengths = {"Inference-Header-Content-Length": str(len(head))}
    connection.request("POST", f"/v2/models/{model}/infer", body, lengths)
    return connection


def receive(connection: http.client.HTTPConnection) -> tuple[int, dict[str, object]]:
    answer = connection.getresponse()
    body = json.loads(answer.read())
    connection.close()
    return answer.status, body


def ask(served: Served, model: str, count: int, first: float) -> tuple[int, dict[str, object]]:
    return receive(send(served, model, count, first))


def refused(body: dict[str, object]) -> tuple[object, bool]:
    return body.get("reason"), "size limit" in str(body["error"])


def calls(served: Served, outcome: str) -> float:
    return reading(served.get("/metrics")[1], "headgate_faas_calls_total", outcome=outcome)


@pytest.mark.parametrize("policy", ["serverless_only", "{name: threshold, threshold: 1}"])
def test_large_request_is_served_by_the_node(tmp_path: Path, policy: str) -> None:
    """Although the node is busy, and everything else goes to functions."""
    with FakeLambda(tmp_path) as cloud, Served(write(tmp_path, cloud.url, policy)) as served:
        large = [send(served, "grow", TOO_MANY, 1) for _ in range(3)]
        assert all(receive(connection)[0] == 200 for connection in large)
        assert cloud.events == []
        assert ask(served, "grow", FITS, 1)[0] == 200
        assert len(cloud.events) == (1 if policy == "serverless_only" else 0)


def test_large_request_without_a_node_is_rejected(tmp_path: Path) -> None:
    with (
        FakeLambda(tmp_path) as cloud,
        Served(write(tmp_path, cloud.url, "serverless_only", local="")) as served,
    ):
        status, body = ask(served, "grow", TOO_MANY, 1)
        assert (status, *refused(body)) == (413, "too_large", True)
        assert cloud.events == []
        assert ask(served, "grow", FITS, 1)[0] == 200
        metrics = served.get("/metrics")[1]
    name = "headgate_admission_rejections_total"
    assert reading(metrics, name, model="grow", reason="too_large") == 1


def test_large_results_between_stages_move_to_the_node(
    tmp_path: Path,
) -> None:
    """The response of the first stage is too large, and so is the input of the second."""
    with (
        FakeLambda(tmp_path) as cloud,
        Served(write(tmp_path, cloud.url, "serverless_only")) as served,
    ):
        status, body = ask(served, "both", 1, TOO_MANY)
        assert status == 200
        outputs = body["outputs"]
        assert isinstance(outputs, list)
        assert outputs[0]["shape"] == [1, 3]
        assert [event["function"] for event in cloud.events] == ["grow"]
        assert (calls(served, "finished"), calls(served, "refused")) == (1, 1)
        assert reading(served.get("/metrics")[1], "headgate_faas_breaker_state") == 0


@pytest.mark.parametrize(
    ("local", "idempotent", "model"),
    [("", "", "grow"), (LOCAL, ", idempotent: false", "grow"), ("", "", "both")],
)
def test_large_result_fails_only_without_a_node(
    tmp_path: Path, local: str, idempotent: str, model: str
) -> None:
    with FakeLambda(tmp_path) as cloud:
        app = write(tmp_path, cloud.url, "serverless_only", local, idempotent)
        with Served(app) as served:
            status, body = ask(served, model, 1, TOO_MANY)
            assert (status, *refused(body)) == (413, "too_large", True)
            assert ask(served, "grow", 1, 1)[0] == 200


def test_open_breaker_stops_keep_warm(tmp_path: Path) -> None:
    """Two are pinged every 100 ms, until a request fails there, which then runs on the worker."""
    policy = "{name: threshold, threshold: 1, warm_instances: 2}"
    with FakeLambda(tmp_path) as cloud:
        app = write(tmp_path, cloud.url, policy)
        text = (app / "app.yaml").read_text()
        (app / "app.yaml").write_text(
            text.replace("    circuit_breaker:", "    keep_alive: 200ms\n    circuit_breaker:")
        )
        with Served(app) as served:
            assert until(lambda: len(cloud.events) >= 6)
            assert all(event.get("ping") for event in cloud.events)
            cloud.mode = "fail"

            def is_open() -> bool:
                """One of several at once has found the worker busy, and then the cloud broken."""
                asked = [send(served, "grow", 1, 1) for _ in range(4)]
                assert all(receive(connection)[0] == 200 for connection in asked)
                reported = json.loads(served.get("/readyz")[1])
                return bool(reported["breakers"] == {"cloud": "open"})

            assert until(is_open)
            pings = reading(served.get("/metrics")[1], "headgate_faas_pings_total")
            assert not until(
                lambda: reading(served.get("/metrics")[1], "headgate_faas_pings_total") > pings, 1
            )
            metrics = served.get("/metrics")[1]
    assert reading(metrics, "headgate_faas_calls_blocked", reason="breaker") == 1
    assert reading(metrics, "headgate_faas_spent_usd_total") > 0
