"""Shutdown of a server.

By signals, to one or all processes, and after the death of the supervisor.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from served import Served, ask_on, until

from headgate.live.gateway.grpc.server import SERVICE, Messages

FUNCTIONS = '''
import ctypes
import subprocess
import time

from headgate.functions import Model


class Naps(Model):
    """Sleeps for as many seconds as it is told; a child of its own goes on for longer."""

    inputs = {"x": "FP32[-1]"}
    outputs = {"y": "FP32[-1]"}

    def load(self):
        self.child = subprocess.Popen(["sleep", "987"])

    def predict(self, batch):
        time.sleep(float(batch["x"][0]))
        return {"y": batch["x"]}


class Hangs(Naps):
    """Nobody else can run meanwhile: the lock on the interpreter is held."""

    def predict(self, batch):
        ctypes.PyDLL(None).sleep(int(batch["x"][0]))
        return {"y": batch["x"]}
'''

APP = """
functions:
  naps: {{code: "napping:Naps", batch_max: 1, exec_time: 1ms}}
  hangs: {{code: "napping:Hangs", batch_max: 1, exec_time: 1ms}}
pools: {{local: {{tier: dedicated, nodes: 1, cpus: 1, slots: 2}}}}
serve: {{lame_duck: {lame_duck}, drain: {drain}, execution_timeout: 100s, deadline_max: 100s}}
"""


@pytest.fixture
def run_dirs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of its own with a short path for the run directories of servers."""
    with tempfile.TemporaryDirectory(prefix="hg", dir="/tmp") as directory:
        monkeypatch.setenv("TMPDIR", directory)
        yield Path(directory)


def served(directory: Path, *, lame_duck: str = "0s", drain: str = "60s") -> Served:
    (directory / "napping.py").write_text(FUNCTIONS)
    (directory / "app.yaml").write_text(APP.format(lame_duck=lame_duck, drain=drain))
    return Served(directory, "--grpc-port", "0")


def processes(server: Served) -> list[int]:
    """Return all processes of a server, and those that its functions have started."""
    found, todo = [], [server.process.pid]
    while todo:
        pid = todo.pop()
        found.append(pid)
        for path in Path(f"/proc/{pid}/task").glob("*/children"):  # by the thread that started them
            todo += [int(child) for child in path.read_text().split()]
    return found


def is_running(pid: int) -> bool:
    """Whether a process is running; a zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class InFlightRequest(threading.Thread):
    """A request in flight, and its result."""

    def __init__(self, server: Served, model: str, seconds: float) -> None:
        super().__init__()
        self.status = 0
        self.body: dict[str, object] = {}
        self.error = ""
        self._server, self._model, self._seconds = server, model, seconds
        before = in_flight(server)
        self.start()
        assert until(lambda: in_flight(server) == before + 1)

    def run(self) -> None:
        try:
            self.status, self.body = self._server.ask(self._model, [self._seconds])
        except OSError as error:
            self.error = type(error).__name__


def in_flight(server: Served) -> float:
    """Return the number of requests that the gateway has and has not answered."""
    lines = server.get("/metrics")[1].splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("headgate_inflight{"))


def infer(channel: grpc.Channel, seconds: float, timeout_s: float = 60.0) -> Message:
    messages = Messages()
    request = messages["ModelInferRequest"](model_name="naps")
    tensor = request.inputs.add(name="x", datatype="FP32", shape=(1,))
    tensor.contents.fp32_contents.append(seconds)
    stub: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/{SERVICE}/ModelInfer")
    answer = stub(request.SerializeToString(), timeout=timeout_s)
    made = messages["ModelInferResponse"].FromString(answer)
    assert isinstance(made, Message)
    return made


def test_draining_answers_probes_and_refuses_requests(tmp_path: Path) -> None:
    """On open connections, on new ones, and over gRPC; open requests finish."""
    with served(tmp_path) as server, grpc.insecure_channel(server.grpc_address) as channel:
        kept = server.connect()
        assert ask_on(kept, "naps", [0.0])[0] == 200
        infer(channel, 0.0)
        asked = InFlightRequest(server, "naps", 8.0)
        server.process.send_signal(signal.SIGTERM)
        assert until(lambda: server.get("/readyz")[0] == 503)
        assert server.get("/livez")[0] == 200
        for connection in (kept, server.connect()):
            connection.request("POST", "/v2/models/naps/infer", b"{}")
            answer = connection.getresponse()
            assert (answer.status, answer.headers["Connection"]) == (503, "close")
            assert int(answer.headers["Retry-After"]) >= 1
            assert b"draining" in answer.read()
            connection.close()
        with pytest.raises(grpc.RpcError) as error:
            infer(channel, 0.0)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            "/grpc.health.v1.Health/Check"
        )
        health = HealthCheckResponse.FromString(check(HealthCheckRequest().SerializeToString()))
        assert health.status == HealthCheckResponse.NOT_SERVING
        assert server.process.poll() is None
        asked.join()
        assert (asked.status, asked.error) == (200, "")
        assert until(lambda: server.process.poll() == 0)


def test_sigterm_to_all_processes_keeps_the_lame_duck_time(tmp_path: Path) -> None:
    """As systemd sends it.

    A second SIGTERM to the other processes does not count for the server.
    """
    with served(tmp_path, lame_duck="6s") as server:
        asked = InFlightRequest(server, "naps", 1.0)
        everybody = [server.process.pid, *server.gateways(), *server.workers()]
        assert len(everybody) == 3
        for pid in everybody:
            os.kill(pid, signal.SIGTERM)
        assert until(lambda: server.get("/readyz")[0] == 503)
        assert server.ask("naps", [0.0])[0] == 200
        for pid in everybody[1:]:
            os.kill(pid, signal.SIGTERM)
        assert server.ask("naps", [0.0])[0] == 200
        asked.join()
        assert asked.status == 200
        assert [server.process.pid, *server.gateways(), *server.workers()] == everybody
        assert until(lambda: server.process.poll() == 0)


@pytest.mark.parametrize("model", ["naps", "hangs"])
def test_second_signal_kills_all_processes(tmp_path: Path, run_dirs: Path, model: str) -> None:
    """The worker is busy or stopped; the gateway is stuck."""
    with served(tmp_path) as server:
        asked = InFlightRequest(server, model, 50.0)
        everybody = processes(server)
        assert len(everybody) > 3, "the functions have children"
        server.process.send_signal(signal.SIGTERM)
        assert until(lambda: server.get("/readyz")[0] == 503)
        os.kill(server.gateways()[0], signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        assert until(lambda: server.process.poll() is not None, 30)
        assert not [pid for pid in everybody if is_running(pid)]
        assert not list(run_dirs.glob("headgate-*"))
        asked.join()


def test_http_and_grpc_drain_together(tmp_path: Path) -> None:
    """Slower requests get an error, over gRPC and over HTTP, and no connection is just closed."""
    drain_s = 5.0
    with (
        served(tmp_path, drain=f"{drain_s:g}s") as server,
        grpc.insecure_channel(server.grpc_address) as channel,
    ):
        errors: list[grpc.RpcError] = []

        def ask() -> None:
            try:
                infer(channel, 60.0)
            except grpc.RpcError as error:
                errors.append(error)

        over_grpc = threading.Thread(target=ask)
        over_grpc.start()
        assert until(lambda: in_flight(server) == 1)
        asked = InFlightRequest(server, "naps", 60.0)
        server.process.send_signal(signal.SIGTERM)
        began_s = time.monotonic()
        assert until(lambda: server.process.poll() is not None, 60)
        assert time.monotonic() - began_s < 2 * drain_s - 0.5
        asked.join()
        over_grpc.join()
        assert (asked.status, asked.body["reason"]) == (503, "draining")
        assert errors[0].code() is grpc.StatusCode.UNAVAILABLE
        assert "draining" in str(errors[0].trailing_metadata())
    assert "2 requests were not finished in time" in server.errors()


@pytest.mark.parametrize("model", ["naps", "hangs"])
def test_killed_supervisor_leaves_no_processes_or_files(
    tmp_path: Path, run_dirs: Path, model: str
) -> None:
    """Its worker is busy or stopped; its client gets a response; its files are removed."""
    with served(tmp_path, drain="60s") as server:
        asked = InFlightRequest(server, model, 50.0)
        everybody = processes(server)
        assert len(everybody) > 3, "the functions have children"
        assert list(run_dirs.glob("headgate-*"))
        server.process.kill()
        assert until(lambda: not [pid for pid in everybody if is_running(pid)])
        assert until(lambda: not list(run_dirs.glob("headgate-*")))
        asked.join()
        assert (asked.status, asked.error) == (503, "")


def test_killed_supervisor_with_stuck_gateway(tmp_path: Path, run_dirs: Path) -> None:
    with served(tmp_path) as server:
        everybody = processes(server)
        os.kill(server.gateways()[0], signal.SIGSTOP)
        server.process.kill()
        assert until(lambda: not [pid for pid in everybody if is_running(pid)])
        assert until(lambda: not list(run_dirs.glob("headgate-*")))
