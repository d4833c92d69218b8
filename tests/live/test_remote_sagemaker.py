"""Endpoints of SageMaker as nodes: real boto3, and a second Headgate as the far end."""

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


def test_an_endpoint_is_a_node_that_runs_so_many_at_once(far: Served, tmp_path: Path) -> None:
    with near(tmp_path, far.url) as served:
        answers = served.ask_together("double", 8)
        assert [status for status, _ in answers] == [200] * 8
        assert [value(body) for _, body in answers] == [2.0 * n for n in range(8)]
        metrics = served.get("/metrics")[1]
        assert reading(metrics, "headgate_cost_usd_total", tier="dedicated") > 0
        assert reading(metrics, "headgate_replicas", function="double", state="idle") == 1
        assert served.workers() == []  # nobody runs it here
    done = reading(far.get("/metrics")[1], "headgate_requests_total", outcome="met")
    assert done == 8  # each once


def test_what_the_far_end_says_of_a_request_is_what_its_client_hears(
    far: Served, tmp_path: Path
) -> None:
    with near(tmp_path, far.url) as served:
        status, body = served.ask("double", [666.0])
        assert status == 503  # it may have been the endpoint's fault: repeated, then given up
        assert "of all numbers" not in str(body["error"])  # that is for the log of the endpoint
        assert until(lambda: "of all numbers, this one" in far.errors())
        connection = served.connect()
        wrong = b'{"inputs":[{"name":"z","datatype":"INT8","shape":[1],"data":[7]}]}'
        connection.request("POST", "/v2/models/double/infer", wrong)
        answer = connection.getresponse()
        assert (answer.status, b"input 'x' is missing" in answer.read()) == (400, True)
        connection.close()


def test_a_deadline_that_somebody_gives_up_at_holds_at_the_far_end(
    far: Served, tmp_path: Path
) -> None:
    with near(tmp_path, far.url) as served:
        assert served.ask("double", [1.0], {"X-Request-Timeout-Ms": "5"})[0] in (422, 504)
        assert served.ask("double", [1.0], {"X-Request-Timeout-Ms": "30000"})[0] == 200


def test_an_endpoint_that_goes_is_a_node_that_is_lost_until_it_answers_again(
    far: Served, tmp_path: Path
) -> None:
    with near(tmp_path, far.url) as served:
        assert served.ask("double", [1.0])[0] == 200
        port = far.url.rpartition(":")[2]
        far.__exit__(None, None, None)
        statuses = [served.ask("double", [1.0], {"X-Request-Timeout-Ms": "300"})[0]]
        assert statuses[0] in (503, 504)
        with Served(far.directory, "--port", port):
            assert until(lambda: served.ask("double", [3.0])[0] == 200)
        assert until(lambda: "Could not connect" in served.errors())


def test_it_is_not_ready_before_the_endpoint_is(tmp_path: Path) -> None:
    directory = tmp_path / "near"
    directory.mkdir()
    text = NEAR.format(url="http://127.0.0.1:9", policy="headgate")
    (directory / "app.yaml").write_text(text)
    served = Served(directory)
    try:
        assert until(lambda: "does not answer yet" in served.errors())
        assert served.process.poll() is None
    finally:
        served.__exit__(None, None, None)
