"""Serving on Ray: an embedded one, and a cluster that loses and gains nodes under load.

These tests need the extra `ray` and are skipped without it. They start Ray several times, which
takes about ten seconds each.
"""

from __future__ import annotations

import http.client
import http.server
import os
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from ray_nodes import RayNodes
from served import Served, run_headgate, until, value

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra `ray`"),
]

CODE = '''
import os
import time
from pathlib import Path

import numpy as np

from headgate.functions import Model


class Doubles(Model):
    """One number in, two out; every execution leaves a line in `ran.txt`."""

    inputs = {"x": "FP32[-1]"}
    outputs = {"y": "FP32[-1]", "pid": "INT64[-1]"}

    def __init__(self, time_s=0.03):
        self.time_s = time_s

    def example(self):
        return {"x": np.array([-1], np.float32)}

    def predict(self, batch):
        with Path(__file__).with_name("ran.txt").open("a") as file:
            file.writelines(f"{value:g}\\n" for value in batch["x"] if value >= 0)
        if (batch["x"] == 666).any():
            raise ArithmeticError("of all numbers, this one")
        while (batch["x"] == 667).any():
            time.sleep(0.1)
        if batch["x"].max() >= 0:
            time.sleep(self.time_s)
        return {"y": batch["x"] * 2, "pid": np.full(len(batch["x"]), os.getpid(), np.int64)}


class Reverses(Model):
    """A large tensor in, one out."""

    inputs = {"x": "FP32[-1]"}
    outputs = {"y": "FP32[-1]"}
    batches = False

    def predict(self, batch):
        return {"y": batch["x"][::-1].copy()}


class Device(Doubles):
    """Which GPUs Ray lets the process see."""

    def predict(self, batch):
        seen = int(os.environ.get("CUDA_VISIBLE_DEVICES") or -1)
        return {"y": batch["x"] * 0 + seen, "pid": np.full(len(batch["x"]), os.getpid(), np.int64)}


class Broken(Doubles):
    def load(self):
        raise OSError("no weights")
'''
EMBEDDED = """
functions:
  double: {code: "numbers_on_ray:Doubles", batch_max: 4}
  once: {code: "numbers_on_ray:Doubles", options: {time_s: 1.5}, exec_time: 1.5s, idempotent: false}
  reverse: {code: "numbers_on_ray:Reverses", exec_time: 5ms}
  broken: {code: "numbers_on_ray:Broken", exec_time: 5ms}
pools:
  ray: {tier: dedicated, provider: ray, slots: 2}
slo: {latency: 30s}
serve: {lame_duck: 0s, drain: 10s, execution_timeout: 5s}
"""
CLUSTER = """
functions:
  double: {{code: "numbers_on_ray:Doubles", exec_time: 30ms, cpus: 1}}
pools:
  ray:
    {{tier: dedicated, provider: ray, address: "{address}", nodes: 2, cpus: 1, compute: resident}}
slo: {{latency: 60s}}
serve: {{lame_duck: 0s, drain: 10s}}
"""
SHARES = """
functions:
  small: {{code: "numbers_on_ray:Device", exec_time: 5ms, gpu_share: 3/7}}
  large: {{code: "numbers_on_ray:Device", exec_time: 5ms, gpu_share: 4/7}}
pools:
  ray: {{tier: gpu, provider: ray, address: "{address}", gpu_share: 7/7, compute: resident}}
slo: {{latency: 60s}}
serve: {{lame_duck: 0s, drain: 10s}}
"""


def write_app(directory: Path, app: str) -> Path:
    (directory / "numbers_on_ray.py").write_text(CODE)
    (directory / "app.yaml").write_text(app)
    return directory


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = write_app(tmp_path_factory.mktemp("embedded"), EMBEDDED)
    with Served(directory) as served:
        yield served
        served.process.send_signal(signal.SIGINT)
        assert served.process.stdout is not None
        printed = served.process.stdout.read()  # to its end, which is that of the server
    assert printed == "", "Ray prints what its processes do, but not here"
    assert not processes_of(served), "something is left behind"


def processes_of(served: Served) -> list[int]:
    """Process ids of everything that a server has started, whoever their parent is now."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if served.mark.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def pid_of(body: dict[str, object]) -> int:
    """Return the process that ran a request."""
    outputs = body["outputs"]
    assert isinstance(outputs, list)
    return int(outputs[1]["data"][0])


RESET = 0  # instead of a status: the connection has ended, because its gateway was killed


class Load:
    """Clients that send numbers one after the other, and all answers that they got."""

    def __init__(self, served: Served, clients: int) -> None:
        self.answers: dict[int, tuple[int, dict[str, object]]] = {}
        self._served = served
        self._numbers = iter(range(1_000_000))
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._send) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def _send(self) -> None:
        while not self._is_over.is_set():
            with self._lock:
                number = next(self._numbers)
            try:
                answer = self._served.ask("double", [float(number)])
            except (OSError, http.client.HTTPException):
                answer = (RESET, {})
            with self._lock:
                assert number not in self.answers
                self.answers[number] = answer

    def has(self, count: int) -> bool:
        return len(self.answers) >= count

    def end(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        assert sorted(self.answers) == list(range(len(self.answers))), "one answer each"

    def check(self, *allowed: int) -> None:
        """Check that all requests were served, or have another status that is allowed."""
        statuses = Counter(status for status, _ in self.answers.values())
        assert statuses.keys() <= {200, *allowed}, statuses
        for number, (status, body) in self.answers.items():
            assert status != 200 or value(body) == 2.0 * number


def test_requests_are_answered(embedded: Served) -> None:
    answers = embedded.ask_together("double", 40)
    assert Counter(status for status, _ in answers) == {200: 40}
    assert [value(body) for _, body in answers] == [2.0 * n for n in range(40)]


def test_large_tensors_go_through_the_object_store(embedded: Served) -> None:
    values = [float(n % 1000) for n in range(200_000)]
    status, body = embedded.ask("reverse", values)
    assert status == 200
    outputs = body["outputs"]
    assert isinstance(outputs, list)
    assert outputs[0]["data"] == values[::-1]


def test_an_error_of_a_function_is_logged_by_the_gateway(embedded: Served) -> None:
    status, _ = embedded.ask("double", [666.0])
    assert status == 500
    assert until(lambda: "of all numbers, this one" in embedded.errors())
    assert embedded.ask("double", [1.0])[0] == 200


def test_a_function_that_cannot_be_loaded_is_logged_once(embedded: Served) -> None:
    status, _ = embedded.ask("broken", [1.0])
    assert status == 503
    assert embedded.errors().count("broken: cannot be loaded: OSError: no weights") == 1
    assert embedded.errors().count('raise OSError("no weights")') == 1  # in its traceback


def test_each_request_is_answered_once_when_an_actor_dies(embedded: Served) -> None:
    """SIGKILL of the process while eight clients send: others get their results later."""
    load = Load(embedded, 8)
    assert until(lambda: load.has(20))
    victim = pid_of(next(body for status, body in load.answers.values() if status == 200))
    os.kill(victim, signal.SIGKILL)
    killed_at = len(load.answers)
    assert until(lambda: load.has(killed_at + 60))
    load.end()
    statuses = Counter(status for status, _ in load.answers.values())
    assert statuses[200] >= len(load.answers) - 1, statuses  # a request alone may be blamed
    for number, (status, body) in load.answers.items():
        assert status != 200 or value(body) == 2.0 * number
    later = {pid_of(body) for status, body in load.answers.values() if status == 200}
    assert len(later) > 1, "another actor has taken over"


def test_what_is_not_idempotent_never_runs_twice(embedded: Served) -> None:
    """The actor dies within the batch: the outcome is unknown, and the request fails."""
    ran = embedded.directory / "ran.txt"
    _, body = embedded.ask("once", [3.0])
    answers: list[tuple[int, dict[str, object]]] = []
    client = threading.Thread(target=lambda: answers.append(embedded.ask("once", [12345.0])))
    client.start()
    assert until(lambda: "12345\n" in ran.read_text())
    os.kill(pid_of(body), signal.SIGKILL)
    client.join()
    assert answers[0][0] in (500, 503)
    assert ran.read_text().split().count("12345") == 1
    assert embedded.ask("once", [4.0])[0] == 200


def test_an_actor_that_hangs_is_killed(embedded: Served) -> None:
    """667 never ends: after the execution timeout its actor is replaced, and it is not retried."""
    status, _ = embedded.ask("double", [667.0])
    assert status >= 500
    assert (embedded.directory / "ran.txt").read_text().split().count("667") == 1
    assert "a batch of 'double' hung" in embedded.errors()
    assert embedded.ask("double", [2.0])[0] == 200


def test_ray_outlives_a_gateway(embedded: Served) -> None:
    """SIGKILL of the gateway: the next one finds the actors that there are."""
    before = pid_of(embedded.ask("double", [5.0])[1])
    (gateway,) = embedded.gateways()
    os.kill(gateway, signal.SIGKILL)
    assert until(lambda: embedded.gateways() not in ([], [gateway]))
    assert pid_of(embedded.ask("double", [6.0])[1]) == before


def test_each_request_is_answered_once_when_the_host_dies(embedded: Served) -> None:
    """SIGKILL of the process with the nodes of Ray while eight clients send: its Ray ends with it,
    another one starts, and no request is to blame.
    """
    (host,) = embedded.ray_hosts()
    own = {embedded.process.pid, *embedded.gateways()}
    before = set(processes_of(embedded)) - own
    load = Load(embedded, 8)
    assert until(lambda: load.has(20))
    os.kill(host, signal.SIGKILL)
    assert until(lambda: embedded.ray_hosts() not in ([], [host]))
    assert until(lambda: not before.intersection(processes_of(embedded)))
    killed_at = len(load.answers)
    assert until(lambda: load.has(killed_at + 60))
    load.end()
    load.check()


def test_gateways_share_actors(tmp_path: Path) -> None:
    """Two gateways on one embedded Ray: 1. Both use the actor that the first has started. 2. A
    request that must not run twice does not, whichever gateway it reaches, with its id. 3. SIGKILL
    of one gateway under load: the other one serves on, with the actors that there are. 4. SIGKILL
    of the host under load: all requests of both are answered once.
    """
    directory = write_app(tmp_path, EMBEDDED.replace("lame_duck: 0s", "lame_duck: 0s, gateways: 2"))
    with Served(directory) as served:
        answers = served.ask_together("double", 40)
        assert Counter(status for status, _ in answers) == {200: 40}
        assert len({pid_of(body) for _, body in answers}) == 1
        page = served.get("/metrics")[1]
        for slot in "01":
            assert f'headgate_requests_total{{gateway="{slot}"' in page
        sent = {"X-Request-Id": "only-once"}
        statuses = [served.ask("once", [777.0], sent)[0] for _ in range(4)]
        assert sorted(statuses) == [200, 503, 503, 503]
        assert (directory / "ran.txt").read_text().split().count("777") == 1
        load = Load(served, 8)
        assert until(lambda: load.has(20))
        victim = served.gateways()[0]
        os.kill(victim, signal.SIGKILL)
        assert until(lambda: len(set(served.gateways()) - {victim}) == 2)
        gone_at = len(load.answers)
        assert until(lambda: load.has(gone_at + 60))
        load.end()
        load.check(RESET)
        load = Load(served, 8)
        assert until(lambda: load.has(20))
        (host,) = served.ray_hosts()
        os.kill(host, signal.SIGKILL)
        assert until(lambda: served.ray_hosts() not in ([], [host]))
        killed_at = len(load.answers)
        assert until(lambda: load.has(killed_at + 60))
        load.end()
        load.check()


@pytest.mark.parametrize("gateways", [1, 2])
def test_a_node_is_removed_under_load_and_another_joins(tmp_path: Path, gateways: int) -> None:
    """The raylet of one of two nodes is killed: no request is lost. A new node takes its place."""
    with RayNodes(2) as nodes:
        directory = write_app(tmp_path, CLUSTER.format(address=nodes.address))
        with Served(directory, "--gateways", str(gateways)) as served:
            load = Load(served, 6)
            assert until(lambda: len({pid_of(body) for _, body in load.answers.values()}) == 2)
            nodes.remove()
            assert until(lambda: "is lost" in served.errors())
            removed_at = len(load.answers)
            assert until(lambda: load.has(removed_at + 60))
            nodes.add()
            known = {pid_of(body) for _, body in load.answers.values()}
            assert until(
                lambda: {pid_of(body) for _, body in list(load.answers.values())} - known
            ), "the new node runs nothing"
            load.end()
            load.check()


def test_functions_share_a_gpu(tmp_path: Path) -> None:
    """3/7 and 4/7 of a GPU are one GPU: Ray has room for both, and both see the same device.

    To Ray a GPU is a number that a node declares, so the test needs none.
    """
    with RayNodes(1, gpus=1) as nodes:
        directory = write_app(tmp_path, SHARES.format(address=nodes.address))
        with Served(directory) as served:
            bodies = [served.ask(name, [1.0])[1] for name in ("small", "large")]
            assert [value(body) for body in bodies] == [0.0, 0.0]
            assert pid_of(bodies[0]) != pid_of(bodies[1])


def serve_at(address: str, directory: Path) -> subprocess.CompletedProcess[str]:
    write_app(directory, CLUSTER.format(address=address))
    return run_headgate(directory, "serve", "app.yaml", "--port", "0")


def test_no_ray_at_an_address_is_one_line(tmp_path: Path) -> None:
    ended = serve_at("127.0.0.1:1", tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert "pools.ray.address" in ended.stderr
    assert "there is no Ray: Connection refused" in ended.stderr


def test_another_server_at_an_address_is_one_line(tmp_path: Path) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        ended = serve_at(f"127.0.0.1:{server.server_port}", tmp_path)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert "another server responds there" in ended.stderr
