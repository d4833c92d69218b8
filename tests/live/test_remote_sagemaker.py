"""SageMaker endpoints as nodes: real boto3, and a second Headgate as the remote server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from remote_app import CODE, reading
from served import Served, until, value

pytest.importorskip("boto3")

FAR = """
functions:
  double: {code: "numbers_elsewhere:Doubles", exec_time: 30ms, concurrency: 4}
pools:
  local: {tier: dedicated, cpus: 1, slots: 4}
policy: balance
serve: {lame_duck: 0, drain: 1s}
"""
NEAR = """
functions:
  double: {{exec_time: [30ms, 32ms, 34ms], concurrency: 4, model: nowhere.onnx}}
pools:
  rented:
    {{tier: dedicated, nodes: 1, slots: 4, price: $0.12/h, provider: sagemaker, target: double,
     endpoint_url: {url}}}
policy: {policy}
limits: {{backoff: 20ms}}
serve: {{lame_duck: 0, drain: 1s}}
"""


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Served]:
    directory = tmp_path / "far"
    directory.mkdir()
    (directory / "numbers_elsewhere.py").write_text(CODE)
    (directory / "app.yaml").write_text(FAR)
    with Served(directory) as served:
        yield served


def near(tmp_path: Path, url: str, policy: str = "balance") -> Served:
    directory = tmp_path / "near"
    directory.mkdir(exist_ok=True)
    (directory / "app.yaml").write_text(NEAR.format(url=url, policy=policy))
    return Served(directory)


def test_endpoint_runs_up_to_its_concurrency(far: Served, tmp_path: Path) -> None:
    with near(tmp_path, far.url) as served:
        answers = served.ask_together("double", 8)
        assert [status for status, _ in answers] == [200] * 8
        assert [value(body) for _, body in answers] == [2.0 * n for n in range(8)]
        metrics = served.get("/metrics")[1]
        assert reading(metrics, "headgate_cost_usd_total", tier="dedicated") > 0
        assert reading(metrics, "headgate_replicas", function="double", state="idle") == 1
        assert served.workers() == []  # no local worker runs it
    done = reading(far.get("/metrics")[1], "headgate_requests_total", outcome="met")
    assert done == 8  # each once


def test_endpoint_errors_reach_the_client(far: Served, tmp_path: Path) -> None:
    with near(tmp_path, far.url) as served:
        status, body = served.ask("double", [666.0])
        assert status == 503  # possibly the fault of the endpoint: retried, then failed
        # the details are in the log of the endpoint only
        assert "of all numbers" not in str(body["error"])
        assert until(lambda: "of all numbers, this one" in far.errors())
        connection = served.connect()
        wrong = b'{"inputs":[{"name":"z","datatype":"INT8","shape":[1],"data":[7]}]}'
        connection.request("POST", "/v2/models/double/infer", wrong)
        answer = connection.getresponse()
        assert (answer.status, b"input 'x' is missing" in answer.read()) == (400, True)
        connection.close()


def test_hard_deadline_holds_at_the_endpoint(far: Served, tmp_path: Path) -> None:
    with near(tmp_path, far.url) as served:
        assert served.ask("double", [1.0], {"X-Request-Timeout-Ms": "5"})[0] in (422, 504)
        assert served.ask("double", [1.0], {"X-Request-Timeout-Ms": "30000"})[0] == 200


def test_unreachable_endpoint_is_a_lost_node(far: Served, tmp_path: Path) -> None:
    with near(tmp_path, far.url) as served:
        assert served.ask("double", [1.0])[0] == 200
        port = far.url.rpartition(":")[2]
        far.__exit__(None, None, None)
        statuses = [served.ask("double", [1.0], {"X-Request-Timeout-Ms": "300"})[0]]
        assert statuses[0] in (503, 504)
        with Served(far.directory, "--port", port):
            assert until(lambda: served.ask("double", [3.0])[0] == 200)
        assert until(lambda: "Could not connect" in served.errors())


def test_readiness_waits_for_the_endpoint(tmp_path: Path) -> None:
    directory = tmp_path / "near"
    directory.mkdir()
    text = NEAR.format(url="http://127.0.0.1:9", policy="headgate")
    (directory / "app.yaml").write_text(text)
    served = Served(directory)
    try:
        assert until(lambda: "does not respond yet" in served.errors())
        assert served.process.poll() is None
    finally:
        served.__exit__(None, None, None)
