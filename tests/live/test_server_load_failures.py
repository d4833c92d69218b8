"""Functions that cannot be loaded, in a server: named, rejected at once, retried with back-off."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from load_failures_app import KINDS, loads, mend, write_app
from served import Served, run_headgate, until, value


def readiness(served: Served) -> tuple[int, dict[str, object]]:
    status, body = served.get("/readyz")
    return status, json.loads(body)


@pytest.mark.parametrize("name", list(KINDS))
def test_failed_load_is_named_and_other_models_serve(tmp_path: Path, name: str) -> None:
    model, why = name.lower(), f"cannot be loaded: {KINDS[name]}"
    with Served(write_app(tmp_path, name, "Healthy")) as served:
        assert readiness(served) == (
            503,
            {"ready": False, "live": True, "reason": f"not ready: {model}", "models": {model: why}},
        )
        status, body = served.get(f"/v2/models/{model}/ready")
        assert (status, json.loads(body)["reason"]) == (503, why)
        assert served.get("/v2/models/healthy/ready")[0] == 200
        workers, began_s = served.workers(), time.monotonic()
        for number in range(40):
            status, answer = served.ask(model, [1.0])
            assert (status, answer["reason"]) == (503, "load_failed")
            assert value(served.ask("healthy", [float(number)])[1]) == 2.0 * number
        assert served.workers() == workers
        taken_s = time.monotonic() - began_s
        assert len(loads(tmp_path, name)) <= 3 + taken_s  # at most one per second
        assert f"{model!r}" in served.errors() or f"{model}: cannot" in served.errors()
    assert served.errors().count("Traceback") == (1 if name in ("Raises", "Exits") else 0)


@pytest.mark.parametrize("name", ["Raises", "Crashes"])
def test_failed_load_is_retried(tmp_path: Path, name: str) -> None:
    """Without any request; then clients see the signature."""
    model = name.lower()
    with Served(write_app(tmp_path, name, "Healthy")) as served:
        assert readiness(served)[0] == 503
        mend(served)
        assert until(lambda: readiness(served) == (200, {"ready": True, "live": True}), 60)
        assert value(served.ask(model, [21.0])[1]) == 42.0
        described = json.loads(served.get(f"/v2/models/{model}")[1])
        assert described["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1]}]


def test_crashing_load_kills_one_worker_once(tmp_path: Path) -> None:
    """Three such functions on two workers: no worker loads any of them twice in its own process."""
    names = ("Crashes", "Dies", "HoldsTheInterpreter")
    with Served(write_app(tmp_path, *names, "Healthy", nodes=2)) as served:
        assert set(readiness(served)[1]["models"]) == {name.lower() for name in names}  # type: ignore[call-overload]
        assert until(lambda: len(served.workers()) == 2, 30)
        assert value(served.ask("healthy", [1.0])[1]) == 2.0
        for name in names:
            assert f"while loading '{name.lower()}'" in served.errors()
        assert served.errors().count(" died (") <= 2 * len(names)


def test_restarted_gateway_knows_failed_loads(tmp_path: Path) -> None:
    with Served(write_app(tmp_path, "Raises", "Healthy")) as served:
        (before,) = served.gateways()
        os.kill(before, signal.SIGKILL)
        assert until(lambda: served.gateways() not in ([], [before]), 30)
        assert until(lambda: served.ask("healthy", [1.0])[0] == 200, 30)
        assert readiness(served)[1]["models"] == {"raises": "cannot be loaded: OSError"}


def test_restart_survives_when_no_function_loads(
    tmp_path: Path,
) -> None:
    """Only a first start may fail like that.

    Here all processes are restarted, one after the other.
    """
    with Served(write_app(tmp_path, "Raises", "Healthy")) as served:
        code = tmp_path / "loads.py"
        code.write_text(code.read_text().replace("class Healthy(Model):", "class Healthy:"))
        for pids in (served.workers, served.gateways):
            (before,) = pids()
            os.kill(before, signal.SIGKILL)
            assert until(lambda: pids() not in ([], [before]), 30)  # noqa: B023
        assert until(lambda: set(readiness(served)[1].get("models", ())) == {"raises", "healthy"})  # type: ignore[call-overload]
        assert served.process.poll() is None


def test_first_start_fails_when_no_function_loads(tmp_path: Path) -> None:
    write_app(tmp_path, "Raises", "Exits", "Crashes")
    done = run_headgate(tmp_path, "serve", "app.yaml", "--port", "0")
    assert done.returncode == 2
    assert done.stdout == ""
    for line in (
        "raises: cannot be loaded: OSError: there is no secret/weights",
        "exits: cannot be loaded: SystemExit: enough",
        "crashes: cannot be loaded: ProcessDied: signal 11, SIGSEGV while loading",
    ):
        assert sum(text.endswith(line) for text in done.stderr.splitlines()) >= 1, done.stderr


@pytest.mark.parametrize("name", ["Raises", "Crashes"])
def test_reload_with_a_failed_load_keeps_the_old_configuration(tmp_path: Path, name: str) -> None:
    with Served(write_app(tmp_path, "Healthy")) as served:
        before = served.gateways(), served.workers()
        write_app(tmp_path, "Healthy", name)
        served.process.send_signal(signal.SIGHUP)
        text = "the running configuration stays"
        while text not in served.errors():
            assert value(served.ask("healthy", [1.0])[1]) == 2.0
        (line,) = [line for line in served.errors().splitlines() if text in line]
        assert f"{name.lower()}: cannot be loaded: " in line
        assert until(lambda: (served.gateways(), served.workers()) == before)
        assert readiness(served)[0] == 200
        assert served.ask(name.lower(), [1.0])[0] == 404
        assert len(served.errors().splitlines()) < 40
        mend(served)
        served.process.send_signal(signal.SIGHUP)
        assert until(lambda: served.ask(name.lower(), [1.0])[0] == 200, 60)
