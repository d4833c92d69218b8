"""Live pipelines: outputs that stay on the node, one deadline, and stages that fail or die."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from served import Served, ask_on, until, value

from headgate.live.gateway.grpc.server import SERVICE, Messages

STAGES = '''
import os
import time
from pathlib import Path

import numpy as np

from headgate.functions import Model

SIZE = 300_000  # elements: 1.2 MB per item


class Numbers(Model):
    """What it was given leaves a line in a file."""

    def note(self, values):
        path = Path(__file__).with_name(f"{type(self).__name__}.txt")
        with path.open("a") as file:
            file.writelines(f"{value:g} {os.getpid()}\\n" for value in values)


class Grow(Numbers):
    inputs = {"x": "FP32[-1]"}
    outputs = {"rows": "FP32[-1, -1]"}

    def example(self):
        return {"x": np.array([1], np.float32)}

    def predict(self, batch):
        self.note(batch["x"])
        if (batch["x"] == 13).any():
            raise ArithmeticError("not this one either")
        return {"rows": np.repeat(batch["x"][:, None], SIZE, 1)}


class Sum(Numbers):
    """A tenth of a second for each one; 666 raises, and 7 waits for as long as a file exists."""

    inputs = {"rows": "FP32[-1, -1]"}
    outputs = {"y": "FP32[-1]"}

    def predict(self, batch):
        rows = batch["rows"]
        self.note(rows[:, 0])
        time.sleep(float(rows[0, 0]) / 10 if rows[0, 0] < 6 else 0)
        if (rows == 666).any():
            raise ArithmeticError("of all numbers, this one")
        while rows[0, 0] == 7 and Path(__file__).with_name("wait").exists():
            time.sleep(0.01)
        return {"y": rows.mean(1)}


class Last(Sum):
    inputs = {"y": "FP32[-1]"}
    outputs = {"z": "FP32[-1]"}

    def predict(self, batch):
        self.note(batch["y"])
        return {"z": batch["y"] + 1}


class Negative(Model):
    """Raises in `decode`, which is an error of the client."""

    inputs = {"rows": "FP32[-1, -1]"}
    outputs = {"y": "FP32[-1]"}

    def decode(self, inputs):
        if (inputs["rows"] < 0).any():
            raise ValueError("is negative")
        return inputs

    def predict(self, batch):
        return {"y": batch["rows"].mean(1)}
'''

# Two blocks of the first stage have room in the memory of its worker.
APP = """
functions:
  grow: {code: "stages:Grow", exec_time: 1ms, batch_max: 1, pools: [left]}
  sum: {code: "stages:Sum", exec_time: 100ms, batch_max: 1, pools: [right]}
  last: {code: "stages:Last", exec_time: 1ms, batch_max: 1, pools: [left]}
  negative: {code: "stages:Negative", exec_time: 1ms, batch_max: 1, pools: [right]}
pipelines:
  line: {stages: {first: {function: grow}, second: {function: sum, after: [first]},
                  third: {function: last, after: [second]}}}
  alone: {stages: {only: {function: grow}}}
  checked: {stages: {first: {function: grow}, check: {function: negative, after: [first]}}}
pools:
  left: {tier: dedicated, nodes: 1, cpus: 1}
  right: {tier: dedicated, nodes: 1, cpus: 1}
limits: {attempts_max: 3, admission: observe}
serve: {shared_memory: 2560KiB, lame_duck: 100ms}
"""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    (tmp_path / "stages.py").write_text(STAGES)
    (tmp_path / "app.yaml").write_text(APP)
    with Served(tmp_path, "--grpc-port", "0") as served:
        yield served


def kept_bytes(served: Served) -> float:
    """Return how many bytes of outputs stay in the memory of workers, as `/metrics` has it."""
    found = re.search(r"^headgate_stage_output_bytes (\S+)$", served.get("/metrics")[1], re.M)
    assert found is not None
    return float(found[1])


def pids_of(served: Served, stage: str) -> set[int]:
    """Return the processes that ran a stage."""
    path = served.directory / f"{stage}.txt"
    return {int(line.split()[1]) for line in path.read_text().splitlines()}


def runs_of(served: Served, stage: str) -> list[str]:
    path = served.directory / f"{stage}.txt"
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


def mapped(pid: int) -> int:
    """Return how many memories a process has mapped, its own and those of its peers."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:headgate")


def until_replaced(served: Served, pid: int) -> bool:
    """Return whether a killed worker is replaced within a while."""
    return until(lambda: pid not in served.workers() and len(served.workers()) == 2)


class Waiting:
    """A request that is in its second stage until it is let go."""

    def __init__(self, served: Served, **headers: str) -> None:
        self._wait = served.directory / "wait"
        self._wait.touch()
        before = runs_of(served, "Sum").count("7")
        self.connection = served.connect()
        self.answer: tuple[int, dict[str, object]] | None = None
        self._thread = threading.Thread(target=self._ask, args=(headers,))
        self._thread.start()
        assert until(lambda: runs_of(served, "Sum").count("7") > before)

    def _ask(self, headers: dict[str, str]) -> None:
        try:
            self.answer = ask_on(self.connection, "line", [7.0], headers)
        except (OSError, http.client.HTTPException):
            self.answer = None

    def let_go(self) -> tuple[int, dict[str, object]] | None:
        self._wait.unlink(missing_ok=True)
        self._thread.join()
        self.connection.close()
        return self.answer


def cancel_in_second_stage(served: Served) -> None:
    """Send a request whose client resets its connection while the second stage runs."""
    (served.directory / "wait").touch()
    before = runs_of(served, "Sum").count("7")
    connection = served.connect()
    tensor = {"name": "x", "datatype": "FP32", "shape": [1], "data": [7.0]}
    connection.request("POST", "/v2/models/line/infer", json.dumps({"inputs": [tensor]}))
    assert until(lambda: runs_of(served, "Sum").count("7") > before)
    linger = struct.pack("ii", 1, 0)  # closing sends a reset and not a FIN
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    connection.close()
    (served.directory / "wait").unlink()
    assert until(lambda: kept_bytes(served) == 0)


def assert_all_is_free(served: Served) -> None:
    """Nothing is kept; and the memory of the first worker has room for two blocks again.

    If blocks had leaked, the output of a further request would not be in that memory.
    """
    assert until(lambda: kept_bytes(served) == 0)
    waiting = Waiting(served)
    assert kept_bytes(served) == 1_200_000
    assert waiting.let_go() is not None
    assert until(lambda: kept_bytes(served) == 0)


def test_outputs_stay_on_the_node_however_requests_end(served: Served) -> None:
    assert value(served.ask("line", [2.0])[1]) == 3.0
    assert pids_of(served, "Grow").isdisjoint(pids_of(served, "Sum"))
    (reader,) = pids_of(served, "Sum")
    assert mapped(reader) == 3  # its own, the gateway's, and the other worker's
    for _ in range(4):  # more than there is room for
        assert served.ask("line", [666.0])[0] == 500
    assert_all_is_free(served)
    for _ in range(4):
        assert served.ask("line", [3.0], {"X-Request-Timeout-Ms": "150"})[0] == 504
    assert_all_is_free(served)
    for _ in range(4):
        cancel_in_second_stage(served)
    assert_all_is_free(served)


def test_outputs_without_room_go_through_the_gateway(served: Served) -> None:
    answers = served.ask_together("line", 5)
    assert [value(body) for _, body in answers] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert_all_is_free(served)


def test_killed_reader_leaks_nothing(served: Served) -> None:
    for _ in range(3):
        waiting = Waiting(served)
        (reader,) = pids_of(served, "Sum").intersection(served.workers())
        os.kill(reader, signal.SIGKILL)
        answer = waiting.let_go()
        # It was alone on its worker, so it is not tried again: it may be what kills.
        assert answer is not None
        assert (answer[0], answer[1]["reason"], answer[1]["stage"]) == (
            503,
            "worker_lost",
            "second",
        )
        assert until_replaced(served, reader)
    assert_all_is_free(served)


def test_output_outlives_the_killed_worker_that_wrote_it(served: Served) -> None:
    """The second stage reads it to the end, and the dead worker's memory is unmapped then."""
    served.ask("line", [1.0])
    (reader,) = pids_of(served, "Sum")
    before = mapped(reader)
    for _ in range(3):
        waiting = Waiting(served)
        (writer,) = pids_of(served, "Grow").intersection(served.workers())
        os.kill(writer, signal.SIGKILL)
        assert until_replaced(served, writer)
        answer = waiting.let_go()
        assert answer is not None
        assert value(answer[1]) == 8.0
        assert served.ask("line", [1.0])[0] == 200
        assert until(lambda: mapped(reader) == before)
    assert_all_is_free(served)


def test_killed_gateway_leaves_nothing_behind(served: Served) -> None:
    served.ask("line", [1.0])
    workers = served.workers()
    before = {pid: mapped(pid) for pid in workers}
    for _ in range(2):
        waiting = Waiting(served)
        (gateway,) = served.gateways()
        os.kill(gateway, signal.SIGKILL)
        waiting.let_go()
        assert until(lambda: is_ready(served))
        assert served.ask("line", [1.0])[0] == 200
    assert served.workers() == workers
    assert until(lambda: {pid: mapped(pid) for pid in workers} == before)
    assert_all_is_free(served)


def is_ready(served: Served) -> bool:
    try:
        return served.get("/readyz")[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def test_failed_stage_is_named_once(served: Served) -> None:
    status, body = served.ask("line", [666.0])
    assert (status, body["reason"], body["stage"]) == (500, "function_failed", "second")
    assert body["error"] == "stage second: the function failed"
    assert runs_of(served, "Sum").count("666") == 1  # it raised: nobody tries again
    assert runs_of(served, "Last") == []
    status, body = served.ask("checked", [-1.0])
    assert (status, body["reason"], body["stage"]) == (400, "function_refused", "check")
    assert body["error"] == "stage check: ValueError: is negative"
    status, body = served.ask("alone", [13.0])
    assert (status, body["error"], "stage" in body) == (500, "the function failed", False)
    total = re.search(
        r'^headgate_requests_total\{[^}]*model="line"[^}]*outcome="failed"[^}]*\} (\S+)$',
        served.get("/metrics")[1],
        re.M,
    )
    assert total is not None
    assert float(total[1]) == 1


def test_failed_stage_is_named_over_grpc(served: Served) -> None:
    request = Messages()["ModelInferRequest"](model_name="line")
    given = request.inputs.add(name="x", datatype="FP32", shape=[1])
    given.contents.fp32_contents.append(666.0)
    with grpc.insecure_channel(served.grpc_address) as channel:
        infer: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            f"/{SERVICE}/ModelInfer"
        )
        with pytest.raises(grpc.RpcError) as caught:
            infer(request.SerializeToString(), timeout=60)
    assert caught.value.code() is grpc.StatusCode["INTERNAL"]
    assert caught.value.details() == "stage second: the function failed"
    trailers = {each.key: str(each.value) for each in caught.value.trailing_metadata()}
    assert trailers["headgate-stage"] == "second"


def test_one_deadline_for_all_stages(served: Served) -> None:
    """The second stage takes 300 ms: a request with 200 ms is answered then, and has no third."""
    headers = {"X-Request-Timeout-Ms": "200"}
    status, body = served.ask("line", [3.0], headers)
    assert (status, body["reason"], body["deadline_ms"]) == (504, "deadline_exceeded", 200.0)
    assert served.ask("line", [1.0])[0] == 200  # behind it, on the same workers
    assert runs_of(served, "Last") == ["1"]


TOLD = """
import numpy as np
from headgate.functions import Model

class Told(Model):
    inputs = {"x": "FP32[-1]"}
    outputs = {"threads": "INT64[-1]"}
    def __init__(self, threads=0):
        self.threads = threads
    def predict(self, batch):
        return {"threads": np.full(len(batch["x"]), self.threads)}
"""
SHAPES = """
functions:
  soon: &told {code: "told:Told", cpus: 1, exec_time: 21s, shapes: [{cpus: 2, exec_time: 12s}]}
  late: *told
pipelines:
  soon: {stages: {only: {function: soon}}, slo: {latency: 20s}}
  late: {stages: {only: {function: late}}, slo: {latency: 60s}}
pools: {cpu: {tier: dedicated, nodes: 1, cpus: 2, slots: 2, price: $1/h}}
"""


def test_the_policy_chooses_the_threads_of_a_batch(tmp_path: Path) -> None:
    """One thread is cheaper, and takes too long by its profile where the objective is tight."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    (tmp_path / "told.py").write_text(TOLD)
    (tmp_path / "app.yaml").write_text(SHAPES)
    with Served(tmp_path) as served:
        threads = {model: value(served.ask(model, [1.0])[1]) for model in ("soon", "late")}
    assert threads == {"soon": 2, "late": 1}
