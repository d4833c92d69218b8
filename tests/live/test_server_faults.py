"""Real processes that are killed: every accepted request gets exactly one response."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from served import Served, ask_on, executions, run_headgate, until, value

NO_LINGER = struct.pack("ii", 1, 0)  # closing the socket resets its connection


def kill_worker_during(served: Served, model: str) -> list[tuple[int, dict[str, object]]]:
    """Send four requests, and kill the only worker while it runs the first."""
    answers: list[tuple[int, dict[str, object]]] = []
    thread = threading.Thread(target=lambda: answers.extend(served.ask_together(model, 4)))
    thread.start()
    assert until(lambda: sum(executions(served.directory).values()) >= 1)
    os.kill(served.workers()[0], signal.SIGKILL)
    thread.join()
    return answers


def test_killed_worker_fails_only_the_request_it_ran_alone(misbehaving: Path) -> None:
    """That request may have been the cause, so it is not retried.

    The next worker runs the others.
    """
    with Served(misbehaving) as served:
        answers = kill_worker_during(served, "slow")
        ran = executions(misbehaving)
    statuses = Counter(status for status, _ in answers)
    assert statuses == {200: 3, 503: 1}
    (refused,) = (body for status, body in answers if status == 503)
    assert refused["reason"] == "worker_lost" and refused["retry_after_ms"]
    values = [value(body) for status, body in answers if status == 200]
    assert set(values) < {0.0, 2.0, 4.0, 6.0}
    assert set(ran.values()) == {1}


def test_non_idempotent_function_is_never_run_twice(misbehaving: Path) -> None:
    with Served(misbehaving) as served:
        answers = kill_worker_during(served, "once")
        ran = executions(misbehaving)
    statuses = Counter(status for status, _ in answers)
    assert statuses == {200: 3, 503: 1}
    assert max(ran.values()) == 1
    (refused,) = (body for status, body in answers if status == 503)
    assert "died" in str(refused["error"]) and "retry_after_ms" not in refused


@pytest.mark.parametrize("model", ["loops", "hangs", "eats"])
def test_worker_that_hangs_or_exceeds_memory_is_killed(misbehaving: Path, model: str) -> None:
    """Its request was alone in the batch, so it fails at once; the next one is served again."""
    with Served(misbehaving) as served:
        before = served.workers()
        assert served.ask(model, [666.0])[0] == 503
        assert served.ask(model, [21.0])[0] == 200
        assert served.workers() != before
        assert executions(misbehaving)["666"] == 1
    assert "is killed" in served.errors() or "hung" in served.errors()


def test_exception_fails_only_its_own_request(misbehaving: Path) -> None:
    with Served(misbehaving) as served:
        before = served.workers()
        assert served.ask("raises", [666.0])[0] == 500
        assert served.ask("raises", [1.0, 2.0])[0] == 200
        answer = served.ask("raises", [666.0], {"X-Request-Id": "guilty"})[1]
        assert (answer["error"], answer["request_id"]) == ("the function failed", "guilty")
        text = "the function failed: ArithmeticError: of all numbers, this one (request guilty)"
        assert until(lambda: text in served.errors())
        assert served.workers() == before


def test_killed_gateway_is_restarted_and_workers_survive(misbehaving: Path) -> None:
    with Served(misbehaving) as served:
        workers, (gateway,) = served.workers(), served.gateways()
        assert served.ask("plain", [1.0])[0] == 200
        os.kill(gateway, signal.SIGKILL)
        assert until(lambda: served.gateways() not in ([], [gateway]))
        assert until(lambda: served.get("/readyz")[0] == 200)
        assert served.ask("plain", [1.0])[0] == 200
        assert served.workers() == workers


def test_disconnected_clients_leave_nothing_behind(misbehaving: Path) -> None:
    with Served(misbehaving) as served:
        for _ in range(5):
            connection = served.connect()
            connection.putrequest("POST", "/v2/models/slow/infer")
            body = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[7]}]}'
            connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            time.sleep(0.01)
            # With a reset: a client that only closes its side may still be reading.
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
            connection.close()
        gone = 'headgate_requests_total{class="default",model="slow",outcome="cancelled"'
        assert until(
            lambda: any(
                line.startswith(gone) and float(line.split()[-1]) >= 4
                for line in served.get("/metrics")[1].splitlines()
            )
        )
        assert served.ask("slow", [1.0])[0] == 200
        open_calls = 'headgate_inflight{model="slow"} 0.0'
        assert until(lambda: open_calls in served.get("/metrics")[1])


class Load:
    """Clients that send requests in a loop until stopped, on persistent connections."""

    def __init__(self, served: Served, model: str, clients: int) -> None:
        self.served = served
        self.statuses: Counter[int] = Counter()
        self.broken: list[str] = []
        self._model = model
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        connection = self.served.connect()
        while not self._is_over.is_set():
            try:
                connection.connect() if connection.sock is None else None
            except OSError:
                return  # the server is down, and nothing was sent
            try:
                self.statuses[ask_on(connection, self._model, [1.0])[0]] += 1
            except ConnectionError as error:
                # An idle connection may be closed while we begin to use it.
                self.broken.append(type(error).__name__)
                connection.close()
        connection.close()

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()


def test_sigterm_under_load_answers_accepted_requests(misbehaving: Path) -> None:
    with Served(misbehaving) as served:
        load = Load(served, "plain", 4)
        assert until(lambda: load.statuses[200] > 50)
        served.process.send_signal(signal.SIGTERM)
        assert until(lambda: served.process.poll() is not None)
        load.stop()
        assert served.process.returncode == 0
    assert set(load.statuses) <= {200, 503}
    assert "not finished" not in served.errors()


def with_lame_duck(directory: Path, lasts: str) -> Path:
    text = (directory / "app.yaml").read_text().replace("lame_duck: 300ms", f"lame_duck: {lasts}")
    (directory / "app.yaml").write_text(text)
    return directory


def test_lame_duck_is_not_ready_but_serves(misbehaving: Path) -> None:
    with Served(with_lame_duck(misbehaving, "3s")) as served:
        served.process.send_signal(signal.SIGTERM)
        assert until(lambda: served.get("/readyz")[0] == 503)
        assert served.ask("plain", [3.0])[0] == 200
        assert until(lambda: served.process.poll() == 0)


def test_second_signal_stops_a_draining_server(misbehaving: Path) -> None:
    with Served(with_lame_duck(misbehaving, "1h")) as served:
        workers = served.workers()
        served.process.send_signal(signal.SIGTERM)
        assert until(lambda: served.get("/readyz")[0] == 503)
        assert served.process.poll() is None
        served.process.send_signal(signal.SIGTERM)
        assert until(lambda: served.process.poll() is not None)
    assert not any(Path(f"/proc/{pid}/statm").exists() for pid in workers)


def test_reload_drops_no_request(misbehaving: Path) -> None:
    with Served(misbehaving) as served:
        load = Load(served, "plain", 3)
        assert until(lambda: load.statuses[200] > 10)
        text = (misbehaving / "app.yaml").read_text()
        (misbehaving / "app.yaml").write_text(text.replace("raises:", "renamed:"))
        before = served.gateways()
        served.process.send_signal(signal.SIGHUP)
        assert until(lambda: served.gateways() not in ([], before) and len(served.gateways()) == 1)
        time.sleep(0.3)
        load.stop()
        assert set(load.statuses) == {200}
        assert served.ask("renamed", [1.0])[0] == 200
        assert served.ask("raises", [1.0])[0] == 404


def test_reload_of_an_invalid_configuration_changes_nothing(misbehaving: Path) -> None:
    with Served(misbehaving) as served:
        (misbehaving / "app.yaml").write_text("functions: {plain: {exec_time: soon}}\n")
        served.process.send_signal(signal.SIGHUP)
        assert until(lambda: "the running configuration stays" in served.errors())
        assert served.ask("plain", [1.0])[0] == 200


def test_full_disk_ends_only_the_event_log(misbehaving: Path) -> None:
    with Served(misbehaving, "--log", "/dev/full") as served:
        assert until(lambda: "serving continues" in served.errors())
        assert served.ask("plain", [1.0])[0] == 200
    assert served.errors().count("No space left") == 1


@pytest.mark.parametrize("policy", ["balance", "affinity"])
def test_policy_without_prewarming_serves(misbehaving: Path, policy: str) -> None:
    with Served(misbehaving, "--policy", policy) as served:
        assert served.ask("plain", [2.0])[0] == 200


def test_old_gateway_accepts_until_the_new_one_is_ready(misbehaving: Path) -> None:
    """A second process group loads for a second; no connection is refused in the meantime."""
    with Served(misbehaving) as served:
        source = misbehaving / "misbehaving.py"
        source.write_text(
            source.read_text()
            + "\n\nclass Lazy(Numbers):\n    def load(self):\n        time.sleep(1)\n"
        )
        app = misbehaving / "app.yaml"
        app.write_text(app.read_text().replace('"misbehaving:Raises"', '"misbehaving:Lazy"'))
        (before,) = served.gateways()
        served.process.send_signal(signal.SIGHUP)
        statuses = []
        while before in served.gateways():
            statuses.append(served.ask("plain", [1.0])[0])
            time.sleep(0.02)
        assert set(statuses) == {200}
        assert len(statuses) > 3, "it takes a second, and none of them had to wait for it"


def test_reload_during_a_reload_is_deferred(misbehaving: Path) -> None:
    app = misbehaving / "app.yaml"
    with Served(misbehaving) as served:
        for name in ("renamed", "twice"):
            app.write_text(
                app.read_text().replace("raises:", f"{name}:").replace("renamed:", f"{name}:")
            )
            served.process.send_signal(signal.SIGHUP)
            time.sleep(0.1)
        assert until(lambda: served.ask("twice", [1.0])[0] == 200)


def test_hanging_gateway_is_killed_and_restarted(misbehaving: Path) -> None:
    with Served(misbehaving) as served:
        (before,) = served.gateways()
        os.kill(before, signal.SIGSTOP)
        assert until(lambda: served.gateways() not in ([], [before]))
        assert served.ask("plain", [1.0])[0] == 200


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--policy", "nobody"), "unknown policy"),
        (("--log", "nowhere/run.log"), "cannot be written"),
        (("--slo", "soon"), "soon"),
    ],
)
def test_invalid_options_are_one_line(
    misbehaving: Path, arguments: tuple[str, ...], complaint: str
) -> None:
    done = run_headgate(misbehaving, "serve", "app.yaml", "--port", "0", *arguments)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert complaint in done.stderr
