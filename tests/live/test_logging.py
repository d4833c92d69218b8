"""The log output of a server, and its event log."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from served import Served, ask_on, run_headgate, run_json, until

KEY = {"X-API-Key": "open sesame"}
HASH = hashlib.sha256(b"open sesame").hexdigest()


def with_key(misbehaving: Path, more: str = "") -> Path:
    """The same application, with an API key."""
    app = misbehaving / "app.yaml"
    text = app.read_text().replace("execution_timeout: 2s}", f"execution_timeout: 2s{more}}}")
    app.write_text(text + f'clients: {{ali: {{key: "sha256:{HASH}"}}}}\n')
    return misbehaving


def replayed(directory: Path, log: str) -> dict[str, Any]:
    found: dict[str, Any] = run_json(directory, "replay", log)
    return found


def traced(directory: Path, log: str, request: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run_json(directory, "replay", log, "--request", request)
    return found


def test_json_log_lines(misbehaving: Path) -> None:
    options = ("--log-format", "json", "--log-level", "info", "--access-log")
    with Served(with_key(misbehaving), *options) as served:
        named = {**KEY, "X-Request-Id": "my-own-1"}
        assert served.ask("plain", [1.0], named)[0] == 200
        assert served.ask("plain", [1.0])[0] == 401
        assert served.ask("raises", [666.0], KEY)[0] == 500
        (worker,) = served.workers()
        os.kill(worker, signal.SIGKILL)
        assert until(lambda: served.workers() not in ([], [worker]))
        assert served.ask("plain", [1.0], KEY)[0] == 200
    lines = [json.loads(line) for line in served.errors().splitlines() if line.startswith("{")]
    for line in lines:
        assert {"ts", "level", "logger", "process", "pid", "message"} <= set(line)
    assert {"gateway", "supervisor"} <= {line["process"] for line in lines}
    access = [line for line in lines if line["logger"] == "headgate.access"]
    assert [line["status"] for line in access] == [200, 401, 500, 200]
    assert [line["tenant"] for line in access] == ["ali", None, "ali", "ali"]
    assert (access[0]["request_id"], access[0]["model"]) == ("my-own-1", "plain")
    assert access[0]["number"] == 0
    assert "open sesame" not in served.errors() and HASH not in served.errors()


def test_error_level_logs_no_lifecycle(misbehaving: Path) -> None:
    with Served(misbehaving, "--log-level", "error") as served:
        assert served.ask("plain", [1.0])[0] == 200
    assert served.errors() == ""


@pytest.mark.parametrize("option", ["--log-level", "--log-format"])
def test_unknown_log_options_are_one_line(misbehaving: Path, option: str) -> None:
    done = run_headgate(misbehaving, "serve", "app.yaml", option, "loud")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)


def test_event_log_has_no_keys_and_survives_restarts(misbehaving: Path) -> None:
    """Each gateway has a log of its own; the previous one is archived and can be read."""
    with Served(with_key(misbehaving), "--log", "run.log") as served:
        assert served.ask("plain", [1.0], KEY)[0] == 200
        (gateway,) = served.gateways()
        assert until(lambda: "Settle" in (misbehaving / "run.log").read_text())
        os.kill(gateway, signal.SIGKILL)
        assert until(lambda: served.gateways() not in ([], [gateway]))
        assert until(lambda: served.get("/readyz")[0] == 200)
        assert served.ask("plain", [2.0], KEY)[0] == 200
        served.process.send_signal(signal.SIGHUP)
        assert until((misbehaving / "run.log.2").exists)
        assert until(lambda: len(served.gateways()) == 1)
        assert served.ask("plain", [3.0], KEY)[0] == 200
    logs = sorted(misbehaving.glob("run.log*"))
    assert [log.name for log in logs] == ["run.log", "run.log.1", "run.log.2"]
    for log in logs:
        assert HASH not in log.read_text() and "sha256" not in log.read_text()
        assert log.stat().st_mode & 0o777 == 0o600
        found = replayed(misbehaving, log.name)
        assert found["is_identical"]
        # the gateway that wrote the first log was killed
        assert found["complete"] == (log.name != "run.log.1")


def test_event_log_has_no_inputs_or_outputs(misbehaving: Path) -> None:
    """Nor messages of exceptions: only that the function failed."""
    with Served(misbehaving, "--log", "run.log") as served:
        assert served.ask("plain", [31337.25], {"X-Request-Id": "my-own-1"})[0] == 200
        assert served.ask("raises", [666.0])[0] == 500
        assert until(lambda: "of all numbers" in served.errors())  # written behind the answer
    log = (misbehaving / "run.log").read_text()
    assert log.count('"Settle"') == 2
    for private in ("31337.25", "62674.5", "of all numbers"):
        assert private not in log


def test_the_id_of_an_answer_finds_its_request_in_the_event_log(misbehaving: Path) -> None:
    """Assigned by the gateway, or given by the client in a header or in the body; no access log."""
    with Served(misbehaving, "--log", "run.log") as served:
        connection = served.connect()
        cases = [
            ("plain", {}, {}, 200),
            ("plain", {"X-Request-Id": "my-own-1"}, {}, 200),
            ("plain", {}, {"id": "seven"}, 200),
            ("raises", {}, {}, 500),
        ]
        ids = []
        for model, headers, more, status in cases:
            tensor = {"name": "x", "datatype": "FP32", "shape": [1], "data": [666.0]}
            content = json.dumps({"inputs": [tensor], **more})
            connection.request("POST", f"/v2/models/{model}/infer", content, headers)
            answer = connection.getresponse()
            body = json.loads(answer.read())
            assert answer.status == status
            ids.append(str(answer.headers["X-Request-Id"]))
            assert body.get("id", ids[-1]) == body.get("request_id", ids[-1]) == ids[-1]
        connection.close()
    assert ids[1:3] == ["my-own-1", "seven"]
    assert len(set(ids)) == len(ids)
    for number, id in enumerate(ids):
        trace = traced(misbehaving, "run.log", id)
        assert trace == traced(misbehaving, "run.log", str(number))
        arrived, settled = trace[0]["event"], trace[-1]["actions"][-1]
        assert (arrived[0], arrived[1], arrived[-1]) == ("RequestArrived", number, id)
        assert settled[:2] == ["Settle", number]
    assert replayed(misbehaving, "run.log")["is_identical"]


def test_rotated_log_is_replayed(misbehaving: Path) -> None:
    """Segments of 64 kB, while requests are served; enough are kept for a full replay."""
    with_key(misbehaving, ", log_size: 64KiB, log_keep: 100, log: live.log")
    with Served(misbehaving) as served:
        connection = served.connect()
        for _ in range(1_500):  # about 240 kB
            assert ask_on(connection, "plain", [1.0], KEY)[0] == 200
        connection.close()
    assert len(list(misbehaving.glob("live.log*"))) > 2
    found = replayed(misbehaving, "live.log")
    assert (found["is_identical"], found["complete"]) == (True, True)
    assert found["events"] > 3_000


def test_restart_without_a_writable_log_serves(misbehaving: Path) -> None:
    """A restarted gateway serves without its log rather than not at all."""
    (misbehaving / "logs").mkdir()
    with Served(misbehaving, "--log", "logs/run.log") as served:
        assert served.ask("plain", [1.0])[0] == 200
        (misbehaving / "logs").rename(misbehaving / "gone")
        (gateway,) = served.gateways()
        os.kill(gateway, signal.SIGKILL)
        assert until(lambda: served.gateways() not in ([], [gateway]))
        assert until(lambda: served.get("/readyz")[0] == 200)
        assert served.ask("plain", [2.0])[0] == 200
        assert until(lambda: "the event log cannot be opened" in served.errors())
