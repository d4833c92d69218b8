"""Several gateways on one port and one set of workers, as real processes."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from served import Served, ask_on, executions, run_headgate, until, value

FUNCTIONS = '''
import os
import time
from functools import partial
from pathlib import Path

import numpy as np

from headgate.functions import Model


class Numbers(Model):
    """One number in, one out. Executions leave a line in `ran.txt`, loads in `loaded.txt`."""

    inputs = {"x": "FP32[-1]"}
    outputs = {"y": "FP32[-1]"}
    seconds = 0.0

    def load(self):
        with Path(__file__).with_name("loaded.txt").open("a") as file:
            file.write(f"{type(self).__name__} {os.getpid()}\\n")

    def example(self):
        return {"x": np.array([-1], np.float32)}

    def predict(self, batch):
        with Path(__file__).with_name("ran.txt").open("a") as file:
            file.writelines(f"{value:g}\\n" for value in batch["x"] if value >= 0)
        if (batch["x"] >= 0).any():
            time.sleep(self.seconds)
        return {"y": batch["x"] * 2}


class Slow(Numbers):
    seconds = 0.4


class Long(Numbers):
    seconds = 3.0
'''

APP = """
functions:
  quick: {code: "numbers_app:Numbers", batch_max: 8, exec_time: {1: 1ms, 8: 2ms}}
  slow: {code: "numbers_app:Slow", batch_max: 1, exec_time: 400ms}
  once: {code: "numbers_app:Long", batch_max: 1, exec_time: 3s, idempotent: false}
  again: {code: "numbers_app:Long", batch_max: 1, exec_time: 3s}
pools:
  local: {tier: dedicated, nodes: 2, cpus: 1}
serve: {lame_duck: 200ms, drain: 20s, gateways: 2}
"""


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    (tmp_path / "numbers_app.py").write_text(FUNCTIONS)
    (tmp_path / "app.yaml").write_text(APP)
    return tmp_path


def samples(page: str, name: str) -> dict[str, float]:
    """Return the sums of the samples of a metric by its label `gateway`."""
    sums: dict[str, float] = {}
    for gateway, number in re.findall(rf'^{name}\{{gateway="(\d+)"[^}}]*\}} (\S+)$', page, re.M):
        sums[gateway] = sums.get(gateway, 0.0) + float(number)
    return sums


def gateway_of(connection: http.client.HTTPConnection, served: Served) -> int | None:
    """Return the process id of the gateway at the other end; None: none has accepted it yet.

    Raises `OSError` if the connection was reset.
    """
    # Both ports: another server's client may have the same port, or have had it until just now.
    ends = (connection.sock.getpeername()[1], connection.sock.getsockname()[1])
    inodes = {row[9] for row in socket_table() if (port_in(row[1]), port_in(row[2])) == ends}
    for pid in served.gateways():
        with contextlib.suppress(FileNotFoundError):  # it has just ended
            if inodes & sockets_of(pid):
                return pid
    return None


def socket_table() -> list[list[str]]:
    """Return the kernel's table of TCP sockets: local address in 1, remote in 2, inode in 9."""
    paths = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    lines = [line for path in paths if path.exists() for line in path.read_text().splitlines()[1:]]
    return [line.split() for line in lines]


def listening_on(port: int) -> set[str]:
    return {row[9] for row in socket_table() if port_in(row[1]) == port and row[3] == "0A"}


def port_in(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


def sockets_of(pid: int) -> set[str]:
    """Return the inodes of the sockets of a process."""
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.update(re.findall(r"^socket:\[(\d+)\]$", str(link.readlink())))
        except OSError:
            continue
    return found


def connect_to(served: Served, pid: int) -> http.client.HTTPConnection:
    """Return a connection to one of the gateways; the kernel chooses, so it may take a few.

    A gateway that was killed a moment ago may still be given connections, which are then reset.
    """
    for _ in range(200):
        connection = served.connect()
        with contextlib.suppress(OSError):
            connection.connect()
            assert until(partial(gateway_of, connection, served))
            if gateway_of(connection, served) == pid:
                return connection
        connection.close()
    raise AssertionError(f"the kernel gives no connection to process {pid}")


class Asker:
    """Sends one request in a thread of its own, on a connection to a certain gateway."""

    def __init__(
        self, connection: http.client.HTTPConnection, model: str, number: float, id: str = ""
    ) -> None:
        self.status = 0
        self.body: dict[str, object] = {}
        self.error: Exception | None = None
        self._request = (connection, model, [number], {"X-Request-Id": id} if id else {})
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.status, self.body = ask_on(*self._request)
        except (OSError, http.client.HTTPException) as error:
            self.error = error
        finally:
            self._request[0].close()

    def join(self) -> Asker:
        self._thread.join()
        return self


def test_gateways_share_port_workers_and_instances(shared: Path) -> None:
    """1. Both gateways answer. 2. The second uses the instances of the first. 3. One scrape has the
    figures of both, and each its own event log that replays.
    """
    with Served(shared, "--log", "run.log") as served:
        first, second = sorted(served.gateways())
        for pid in (first, second):
            connection = connect_to(served, pid)
            for number in range(5):
                status, body = ask_on(connection, "quick", [float(number)])
                assert (status, value(body)) == (200, 2.0 * number)
            connection.close()
        page = served.get("/metrics")[1]
        assert samples(page, "headgate_requests_total") == {"0": 5.0, "1": 5.0}
        assert samples(page, "headgate_gateway_up") == {"0": 1.0, "1": 1.0}
        assert sum(samples(page, "headgate_cold_starts_total").values()) == sum(
            samples(page, "headgate_cold_starts_total").get(slot, 0.0) for slot in "0"
        )
    assert " ERROR " not in served.errors()
    for name in ("run-0.log", "run-1.log"):
        done = run_headgate(shared, "replay", name)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "replayed and identical" in done.stdout


def test_killed_gateway_resets_its_clients_alone_and_the_count_is_corrected(shared: Path) -> None:
    """1. Each gateway runs a request. 2. One is killed: its client sees a reset, the other gets its
    answer. 3. The survivor learns that it is alone, then that there are two again. 4. The new
    gateway serves, on the instances that were there before.
    """
    with Served(shared) as served:
        first, second = sorted(served.gateways())
        loads = (shared / "loaded.txt").read_text()
        survivors_connection = connect_to(served, first)
        victim = Asker(connect_to(served, second), "again", 1.0)
        other = Asker(survivors_connection, "again", 2.0)
        assert until(lambda: "1" in executions(shared))
        os.kill(second, signal.SIGKILL)
        assert isinstance(victim.join().error, OSError | http.client.HTTPException)
        assert (other.join().status, value(other.body)) == (200, 4.0)
        assert until(lambda: len(served.gateways()) == 2 and second not in served.gateways())
        assert until(lambda: served.errors().count("2 of 2 gateways serve") >= 2)
        assert "[gateway 0] 1 of 2 gateways serve" in served.errors()
        (new,) = set(served.gateways()) - {first}
        last = Asker(connect_to(served, new), "slow", 3.0).join()
        assert (last.status, value(last.body)) == (200, 6.0)
        assert (shared / "loaded.txt").read_text() == loads


def test_clients_of_the_other_gateway_notice_nothing_under_load(shared: Path) -> None:
    """Half of the clients lose their connection, and the others get every answer meanwhile."""
    is_over = threading.Event()
    answers: dict[int, list[int]] = {}
    lost: list[int] = []

    def client(connection: http.client.HTTPConnection, number: int) -> None:
        answers[number] = []
        try:
            while not is_over.is_set():
                answers[number].append(ask_on(connection, "quick", [1.0])[0])
        except (OSError, http.client.HTTPException):
            lost.append(number)
        finally:
            connection.close()

    with Served(shared) as served:
        first, second = sorted(served.gateways())
        connections = [connect_to(served, pid) for pid in (first, second) for _ in range(3)]
        threads = [
            threading.Thread(target=client, args=(connection, number))
            for number, connection in enumerate(connections)
        ]
        for thread in threads:
            thread.start()
        assert until(
            lambda: len(answers) == 6 and all(len(each) >= 20 for each in answers.values())
        )
        os.kill(second, signal.SIGKILL)
        assert until(lambda: len(lost) == 3)
        enough = {number: len(answers[number]) + 50 for number in range(3)}
        assert until(lambda: all(len(answers[number]) >= enough[number] for number in range(3)))
        is_over.set()
        for thread in threads:
            thread.join()
    assert sorted(lost) == [3, 4, 5]
    assert {status for each in answers.values() for status in each} == {200}


def test_request_sent_again_after_its_gateway_died_runs_only_if_that_is_safe(shared: Path) -> None:
    """Functions that are not idempotent refuse an id that has begun, on whichever gateway."""
    with Served(shared) as served:
        first, second = sorted(served.gateways())
        connections = [connect_to(served, second) for _ in range(2)]
        askers = [
            Asker(connections[0], "once", 1.0, "id-1"),
            Asker(connections[1], "again", 2.0, "id-2"),
        ]
        assert until(lambda: executions(shared).keys() >= {"1", "2"})
        os.kill(second, signal.SIGKILL)
        assert all(asker.join().error is not None for asker in askers)
        repeated = [
            Asker(connect_to(served, first), "once", 1.0, "id-1"),
            Asker(connect_to(served, first), "again", 2.0, "id-2"),
            Asker(connect_to(served, first), "once", 3.0, "id-3"),
        ]
        once, again, new = (asker.join() for asker in repeated)
        assert (once.status, once.body["reason"]) == (503, "outcome_unknown")
        assert "retry_after_ms" not in once.body
        assert (again.status, new.status) == (200, 200)
        assert executions(shared) == {"1": 1, "2": 2, "3": 1}


@pytest.mark.parametrize("policy", ["headgate", "balance", "round_robin"])
def test_no_request_is_lost_under_a_step_of_load_with_a_killed_worker(
    shared: Path, policy: str
) -> None:
    """Clients of both gateways send one request after the other; then four times as many do, and a
    worker is killed. Every request that was sent has exactly one answer.
    """
    answers: Counter[int] = Counter()
    values: list[object] = []
    problems: list[str] = []
    is_over = threading.Event()

    def client(served: Served, number: int) -> None:
        connection = served.connect()
        sent = 0
        try:
            while not is_over.is_set():
                status, body = ask_on(connection, "quick", [float(number * 10_000 + sent)])
                answers[status] += 1
                if status == 200:
                    values.append(value(body))
                sent += 1
        except (OSError, http.client.HTTPException) as error:
            problems.append(repr(error))
        finally:
            connection.close()

    with Served(shared, "--policy", policy) as served:
        threads = [threading.Thread(target=client, args=(served, i)) for i in range(16)]
        for thread in threads[:4]:
            thread.start()
        assert until(lambda: answers[200] >= 100)
        for thread in threads[4:]:
            thread.start()
        assert until(lambda: answers[200] >= 500)
        os.kill(served.workers()[0], signal.SIGKILL)
        before = answers[200]
        assert until(lambda: len(served.workers()) == 2 and answers[200] >= before + 500)
        is_over.set()
        for thread in threads:
            thread.join()
        page = served.get("/metrics")[1]
    assert not problems
    # A batch that may have killed the worker fails where its tasks were alone on it.
    assert set(answers) <= {200, 503}
    assert answers[503] <= 16
    assert len(set(values)) == len(values)
    errors = [line for line in served.errors().splitlines() if " ERROR " in line]
    assert len(errors) == 1  # the worker that was killed
    counted = samples(page, "headgate_requests_total")
    assert sum(counted.values()) == sum(answers.values())
    assert len(counted) == 2


def test_shared_pool_grows_under_a_step_of_load_and_shrinks_after_it(tmp_path: Path) -> None:
    """1. Gateways of `swayam` begin with one backend or none. 2. Four times the load needs more:
    the Broker grants nodes, and both see the same backends. 3. Every request is answered. 4. With
    no load the backends leave service and retire by themselves. 5. One is started when needed.
    """
    (tmp_path / "numbers_app.py").write_text(FUNCTIONS.replace("seconds = 0.4", "seconds = 0.05"))
    (tmp_path / "app.yaml").write_text(SHARED_POOL)
    statuses: list[int] = []
    askers: list[threading.Thread] = []

    def send(served: Served, per_s: float, is_over: threading.Event) -> None:
        """Send requests at fixed times, each on a connection of its own."""
        began_s, number = time.monotonic(), 0
        while not is_over.wait(max(0.0, began_s + number / per_s - time.monotonic())):
            askers.append(threading.Thread(target=ask, args=(served, len(askers))))
            askers[-1].start()
            number += 1

    def ask(served: Served, number: int) -> None:
        statuses.append(served.ask("slow", [float(number)])[0])

    def load_until(served: Served, per_s: float, is_true: Callable[[], bool]) -> None:
        is_over = threading.Event()
        sender = threading.Thread(target=send, args=(served, per_s, is_over))
        sender.start()
        assert until(is_true)
        is_over.set()
        sender.join()

    def backends(served: Served) -> set[float]:
        page = served.get("/metrics")[1]
        found = dict.fromkeys("01", 0.0)
        for slot, number in re.findall(REPLICAS, page, re.MULTILINE):
            found[slot] += float(number)
        return set(found.values())

    with Served(tmp_path) as served:
        assert max(backends(served)) <= 1.0
        load_until(served, 5, lambda: len(statuses) >= 15)
        load_until(served, 20, lambda: backends(served) in ({2.0}, {3.0}))  # both see the same
        assert until(lambda: backends(served) == {0.0})
        assert served.ask("slow", [1.0])[0] == 200
        assert backends(served) == {1.0}
        assert "ERROR" not in served.errors()
    for asker in askers:
        asker.join()
    assert statuses == [200] * len(askers)


REPLICAS = r'^headgate_replicas\{gateway="(\d)",function="slow",state="(?:idle|busy)"\} (\S+)$'
SHARED_POOL = """
functions:
  slow:
    {code: "numbers_app:Slow", batch_max: 1, exec_time: 50ms, prewarm_nodes: 1,
     unused_after: 2s, retire_after: 2s}
slo: {latency: 20s}
pools:
  local: {tier: dedicated, nodes: 3, cpus: 1}
policy: {name: swayam, plan_every: 200ms, window: 4s, bucket: 200ms}
serve: {lame_duck: 200ms, drain: 20s, gateways: 2}
"""


def test_both_gateways_drain(shared: Path) -> None:
    """SIGTERM: open requests on both gateways get their answers, and the server exits with 0."""
    with Served(shared) as served:
        connections = [connect_to(served, pid) for pid in served.gateways()]
        askers = [Asker(connection, "slow", 1.0) for connection in connections]
        assert until(lambda: sum(executions(shared).values()) >= 1)
        served.process.send_signal(signal.SIGTERM)
        assert [asker.join().status for asker in askers] == [200, 200]
        assert served.process.wait(60) == 0


def test_everything_ends_with_the_supervisor(shared: Path) -> None:
    """Both gateways fail their requests, and no process of the server is left."""
    with Served(shared) as served:
        connections = [connect_to(served, pid) for pid in served.gateways()]
        askers = [Asker(connection, "again", 1.0) for connection in connections]
        assert until(lambda: sum(executions(shared).values()) >= 1)
        pids = [*served.gateways(), *served.workers()]
        served.process.kill()
        served.process.wait()
        assert until(lambda: not any(is_running(pid) for pid in pids))
        for asker in askers:
            assert asker.join().status in (0, 503)


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def test_both_gateways_speak_grpc(shared: Path) -> None:
    grpc = pytest.importorskip("grpc")
    health = pytest.importorskip("grpc_health.v1.health_pb2")
    with Served(shared, "--grpc-port", "0") as served:
        port = int(served.grpc_address.rpartition(":")[2])
        for pid in served.gateways():
            assert not sockets_of(pid).isdisjoint(listening_on(port))
        with grpc.insecure_channel(served.grpc_address) as channel:
            check = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=health.HealthCheckRequest.SerializeToString,
                response_deserializer=health.HealthCheckResponse.FromString,
            )
            assert check(health.HealthCheckRequest()).status == 1


def test_reload_replaces_both_gateways(shared: Path) -> None:
    with Served(shared) as served:
        before = served.gateways()
        served.process.send_signal(signal.SIGHUP)
        assert until(lambda: "the new configuration is ready and serves" in served.errors())
        deadline_s = time.monotonic() + 60
        while set(before) & set(served.gateways()):
            assert served.ask("quick", [1.0])[0] == 200
            assert time.monotonic() < deadline_s
        assert len(served.gateways()) == 2
        assert served.ask("quick", [1.0])[0] == 200


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--gateways", "0"], "--gateways"),
        (["--gateways", "33"], "--gateways"),
        (["--policy", "autoscale"], "policy"),
    ],
)
def test_bad_input_is_one_line(shared: Path, arguments: list[str], problem: str) -> None:
    done = run_headgate(shared, "serve", "app.yaml", "--port", "0", *arguments)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert problem in line
