"""Failures in a worker stay contained."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from worker_rig import Gateway, code, row, worker

from headgate.core.actions import SetTimer, StartInstance, StopInstance
from headgate.core.backend import NO_ROOM
from headgate.core.event_log import to_wire
from headgate.core.events import BatchRefused, InstanceStarted, InstanceStopped, Refusal
from headgate.functions.arrays import Array
from headgate.functions.tensor import Block, TaskInputs, Tensor
from headgate.live.ipc.messages import (
    ActionMessage,
    BatchRan,
    EventMessage,
    Hello,
    Message,
    PresentInstance,
    Release,
    RunBatch,
)

MODEL = "from headgate.functions import Model\nclass F(Model):\n"


def has_exited(pid: int) -> bool:
    """Whether a process exits in time; a zombie counts as exited."""
    stat = Path(f"/proc/{pid}/stat")
    for _ in range(3_000):
        try:
            if stat.read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def test_only_the_bad_request_of_a_batch_fails(tmp_path: Path) -> None:
    """One request makes the concatenated batch fail; run one by one, the others succeed."""
    with worker(tmp_path, {"picky": code("picky")}) as process:
        gateway = process.gateway()
        gateway.start()
        first, poison, last = gateway.ask(row(4), row(-1), row(9))
        assert gateway.arrays(first)["y"].tolist() == [2]
        assert (poison.status, poison.error) == (500, "ArithmeticError: a negative one among 1")
        assert gateway.arrays(last)["y"].tolist() == [3]
        assert process.has_logged("Traceback")


def test_non_idempotent_batch_fails_as_a_whole(tmp_path: Path) -> None:
    with worker(tmp_path, {"picky": code("picky", idempotent=False)}) as process:
        gateway = process.gateway()
        gateway.start()
        results = gateway.ask(row(4), row(-1), row(9))
        assert {r.error for r in results} == {"ArithmeticError: a negative one among 3"}
        assert {r.status for r in results} == {500}


def test_memory_error_fails_the_request(tmp_path: Path) -> None:
    with worker(tmp_path, {"picky": code("picky")}) as process:
        gateway = process.gateway()
        gateway.start()
        assert gateway.ask(row(1e6))[0].error == "MemoryError: too large"
        assert gateway.ask(row(4))[0].status == 200


def test_invalid_inputs_are_client_errors(tmp_path: Path) -> None:
    with worker(tmp_path, {"double": code("double")}) as process:
        gateway = process.gateway()
        gateway.start()
        one = np.ones((1, 2), np.float32)
        results = gateway.ask(
            {"x": one.astype(np.float64)},
            {"x": np.ones((1, 3), np.float32)},
            {"z": one},
            {"x": one, "z": one},
            {"x": one},
        )
        assert [(r.status, r.error) for r in results] == [
            (400, "x: is FP64, must be FP32"),
            (400, "x: is [1, 3], must be [-1, 2]"),
            (400, "z: is not an input of the function"),
            (400, "z: is not an input of the function"),
            (200, ""),
        ]
        gateway.send(RunBatch(0, 0, 0, 1, [TaskInputs(0, 1, [])]))
        assert gateway.ran().results[0].error == "x: missing"
        short = Tensor("x", "FP32", (1, 2), memoryview(b"1234"))
        gateway.send(RunBatch(0, 0, 0, 1, [TaskInputs(0, 1, [short])]))
        assert gateway.ran().results[0].error == "x: FP32[1, 2] needs 8 bytes, there are 4"
        gateway.send(RunBatch(0, 0, 0, 2, [TaskInputs(0, 2, gateway._tensors({"x": one}, False))]))
        assert gateway.ran().results[0].error == "x: [1, 2] for 2 items"


def test_requests_of_different_dtypes_are_not_concatenated(tmp_path: Path) -> None:
    """Concatenated, the integers would come back as floats."""
    with worker(tmp_path, {"count": code("count"), "echo": code("echo")}) as process:
        gateway = process.gateway()
        gateway.start(0, 0)
        gateway.start(1, 1)
        requests: list[dict[str, Array]] = [
            {"x": np.array([1], np.int8)},
            {"x": np.array([2], np.float64)},
            {"x": np.array([3, 4], np.int8)},
        ]
        echoed = [gateway.arrays(r)["x"] for r in gateway.ask(*requests, instance_id=1)]
        assert [a.dtype.name for a in echoed] == ["int8", "float64", "int8"]
        counted = [gateway.arrays(r)["output"].tolist() for r in gateway.ask(*requests)]
        assert counted == [[3], [1], [3, 3]]


def test_invalid_result_is_a_function_error(tmp_path: Path) -> None:
    with worker(tmp_path, {"wrong": code("wrong")}) as process:
        gateway = process.gateway()
        gateway.start()
        (result,) = gateway.ask(row(1, 2))
        assert result.status == 500
        assert result.error == "ValueError: the result of predict has 1 items for a batch of 2"


@pytest.mark.parametrize(
    "message",
    [
        RunBatch(0, 0, 0, 1, [TaskInputs(0, 1, [Tensor("x", "INT8", (9,), Block(1 << 22, 9))])]),
        RunBatch(0, 0, 0, 1, [TaskInputs(0, 1, [Tensor("x", "INT8", (9,), Block(-9, 9))])]),
        RunBatch(-1, 0, 0, 1, []),
        RunBatch(0, 0, 0, 1, [], shape_id=1),
        RunBatch(0, 0, 0, 1, [], shape_id=-1),
        RunBatch(0, 0, 0, 1, [], released=[12345]),
        Release([12345]),
        ActionMessage(["Nonsense"]),
        ActionMessage(to_wire(SetTimer(("t", 0), 0))),
        ActionMessage(to_wire(StartInstance(0, 0, 0, 0))),  # it exists already
        ActionMessage(to_wire(StartInstance(-1, 0, 0, 0))),
        ActionMessage(to_wire(StartInstance(1, 99, 0, 0))),
        ActionMessage(to_wire(StartInstance(1, 0, 0, 0, shape_id=1))),
        Hello(0, 0, []),
    ],
    ids=lambda message: str(message)[:40],
)
def test_only_the_gateway_that_sends_invalid_messages_is_disconnected(
    tmp_path: Path, message: Message
) -> None:
    with worker(tmp_path, {"echo": code("echo")}) as process:
        honest, liar = process.gateway(), process.gateway()
        honest.start()
        liar.start(9)
        liar.send(message)
        with pytest.raises(ConnectionError):
            liar.receive()
        assert honest.arrays(honest.ask(row(5))[0])["x"].tolist() == [5]


def test_invalid_bytes_end_the_connection(tmp_path: Path) -> None:
    with worker(tmp_path, {"echo": code("echo")}) as process:
        honest = process.gateway()
        honest.start()
        for nonsense in (b"\xff" * 64, b"\x04\0\0\0abcd"):
            liar = process.gateway()
            liar.sock.sendall(nonsense)
            with pytest.raises(ConnectionError):
                liar.receive()
        with socket.socket(socket.AF_UNIX) as bare:  # no shared memory with its first byte
            bare.connect(str(tmp_path / "node-0.sock"))
            bare.sendall(b"\0")
            bare.settimeout(60)
            while bare.recv(1 << 16):
                pass
        assert honest.ask(row(5))[0].status == 200


def test_gateway_that_does_not_read_is_not_read_from(tmp_path: Path) -> None:
    """80 MiB of replies are pending before it begins to read; none is lost."""
    functions = {"echo": code("echo", concurrency=999)}
    serve = {"shared_memory": "64KiB"}
    with worker(tmp_path, functions, pool={"queue_max": 999}, serve=serve) as process:
        deaf, other = process.gateway(), process.gateway()
        deaf.start()
        other.start(1 << 40)
        sent = {"x": np.arange(1 << 17, dtype=np.float32)}

        def send_all() -> None:
            for batch_id in range(160):
                deaf.run(sent, batch_id=batch_id)

        thread = Thread(target=send_all)
        thread.start()
        time.sleep(0.2)
        other.run(row(5), batch_id=1 << 40, instance_id=1 << 40)
        assert other.ran().results[0].status == 200
        for batch_id in range(160):
            ran = deaf.ran()
            assert (ran.batch_id, ran.results[0].status) == (batch_id, 200)
        thread.join()


def test_gateways_share_instances(tmp_path: Path) -> None:
    """1. One gateway starts an instance, and the other learns of it. 2. Both use it. 3. A third one
    finds it in the `Hello`. 4. One stops it while another's batch runs: that finishes, and all
    learn that it is gone.
    """
    functions = {"nap": code("nap")}
    with worker(tmp_path, functions, pool={"queue_max": 8}) as process:
        one, other = process.gateway(), process.gateway()
        assert one.hello.instances == []
        one.start(3)
        for number, gateway in enumerate((one, other)):
            for batch_id in range(4):
                id = (number << 40) + batch_id
                gateway.run(row(number / 100), batch_id=id, instance_id=3)
        for number, gateway in enumerate((one, other)):
            for batch_id in range(4):
                ran = gateway.ran()
                assert ran.batch_id == (number << 40) + batch_id
                (result,) = ran.results
                assert gateway.arrays(result)["output"].tolist() == [np.float32(number / 100)]
        assert (one.appeared, other.appeared) == ([], [3])
        third = process.gateway()
        assert third.hello.instances == [PresentInstance(3, 0, 0, "ready")]
        third.run(row(1.0), batch_id=2 << 40, instance_id=3)
        third.run(row(0.0), batch_id=(2 << 40) + 1, instance_id=3)
        third.run(row(0.0), batch_id=(2 << 40) + 2, instance_id=77)
        assert third.event(BatchRefused).reason == Refusal.GONE  # so the others have arrived
        other.order(StopInstance(3, 0))
        for gateway in (one, third):
            assert gateway.event(InstanceStopped).instance_id == 3
        other.run(row(0.0), batch_id=(1 << 40) + 9, instance_id=3)
        assert other.event(BatchRefused).reason == Refusal.GONE
        assert [third.ran().batch_id for _ in range(2)] == [2 << 40, (2 << 40) + 1]
        assert other.event(InstanceStopped).instance_id == 3
        assert process.gateway().hello.instances == []


def test_start_for_which_another_gateway_left_no_memory_is_refused(tmp_path: Path) -> None:
    """1. Each gateway has room for its function, as far as it knows. 2. The later one is refused.
    3. It knows what is there, makes room, and starts its function.
    """
    functions = {name: code(name, memory="400MB") for name in ("nap", "echo")}
    with worker(tmp_path, functions, pool={"memory": "700MB"}) as process:
        one, other = process.gateway(), process.gateway()
        one.start(0, 0)
        other.order(StartInstance(1 << 40, 1, 0, 0))
        assert other.event(InstanceStopped).reason == NO_ROOM
        other.order(StopInstance(0, 0))
        other.order(StartInstance((1 << 40) + 1, 1, 0, 0))
        assert other.event(InstanceStopped).instance_id == 0
        assert other.event(InstanceStarted).instance_id == (1 << 40) + 1
        assert other.appeared == [0]


def test_instances_of_a_gateway_that_left_stay(tmp_path: Path) -> None:
    """It leaves a batch running, one waiting, and an instance that is being started."""
    functions = {"nap": code("nap"), "echo": code("echo")}
    with worker(tmp_path, functions, pool={"queue_max": 1}) as process:
        gateway, other = process.gateway(), process.gateway()
        gateway.start(0, 0)
        gateway.run(row(0.5), instance_id=0)
        gateway.run(row(30), batch_id=1, instance_id=0)
        gateway.order(StartInstance(1, 1, 0, 0))
        gateway.close()
        other.run(row(5), batch_id=1 << 40, instance_id=1)
        message = other.receive()
        while isinstance(message, EventMessage):  # refused until the worker has read the start
            other.run(row(5), batch_id=1 << 40, instance_id=1)
            message = other.receive()
        assert isinstance(message, BatchRan)
        assert other.arrays(message.results[0])["x"].tolist() == [5]
        assert other.appeared == [0, 1]
        present = {each.id: each.stage for each in process.gateway().hello.instances}
        assert present == {0: "ready", 1: "ready"}


def test_disconnected_gateway_leaves_warm_models(tmp_path: Path) -> None:
    """It leaves a batch running and one waiting. The next gateway finds a free node and loads
    nothing.

    A model that was stopped on purpose is unloaded, and loaded again.
    """
    functions = {"once": code("Once"), "nap": code("nap")}
    with worker(tmp_path, functions, pool={"queue_max": 1}) as process:
        gateway = process.gateway()
        gateway.start(0, 0)
        gateway.start(1, 1)
        gateway.run(row(1), instance_id=1)
        gateway.run(row(30), batch_id=1, instance_id=1)
        gateway.close()
        follower = process.gateway()
        assert follower.arrays(follower.ask(row(1))[0])["serial"].tolist() == [1]
        follower.order(StopInstance(0, 0))
        follower.event(InstanceStopped)
        follower.start(5, 0)
        result = follower.ask(row(1), instance_id=5)[0]
        assert follower.arrays(result)["serial"].tolist() == [2]


def test_killed_worker_closes_its_connections(tmp_path: Path) -> None:
    with worker(tmp_path, {"nap": code("nap"), "die": code("die")}) as process:
        gateway = process.gateway()
        gateway.start(1, 1)
        gateway.run(row(1), instance_id=1)
        with pytest.raises(ConnectionError):
            gateway.receive()
        assert process.process.wait(60) == 3


def test_hanging_batch_exits_the_worker(tmp_path: Path) -> None:
    with worker(tmp_path, {"nap": code("nap")}, arguments=("--hang-s", "1.5")) as process:
        gateway = process.gateway()
        gateway.start()
        assert gateway.ask(row(0.01))[0].status == 200
        gateway.run(row(30))
        with pytest.raises(ConnectionError):
            gateway.receive()
        assert process.process.wait(60) == 70
        assert process.has_logged("worker cpu-0: a batch of 'nap' hung for")


def test_stopped_worker_finishes_running_batches(tmp_path: Path) -> None:
    with worker(tmp_path, {"nap": code("nap")}, pool={"queue_max": 1}) as process:
        gateway = process.gateway()
        gateway.start()
        gateway.run(row(2), batch_id=1)
        gateway.run(row(2), batch_id=2)
        gateway.run(row(2), batch_id=3)
        # the slots are shared with the other gateways
        assert gateway.event(BatchRefused).reason == Refusal.BUSY
        process.process.send_signal(signal.SIGUSR1)
        refused = gateway.event(BatchRefused)
        assert (refused.batch_id, refused.reason) == (2, Refusal.GONE)
        assert gateway.ran().batch_id == 1
        assert gateway.event(InstanceStopped).instance_id == 0
        assert process.process.wait(60) == 0


def test_worker_exits_without_its_supervisor(tmp_path: Path) -> None:
    """It sends two heartbeats per second, and exits when the pipe has no reader."""
    listens, beats = os.pipe()
    arguments = ("--heartbeat-fd", str(beats))
    with worker(
        tmp_path, {"echo": code("echo")}, arguments=arguments, pass_fds=(beats,)
    ) as process:
        os.close(beats)
        process.gateway()
        for _ in range(3):
            assert os.read(listens, 1) == b"."
        os.close(listens)
        assert process.process.wait(60) == 0


@pytest.mark.parametrize("how", ["told", "hung"])
def test_exit_leaves_no_child_processes(tmp_path: Path, how: str) -> None:
    (tmp_path / "starts.py").write_text(
        f"import subprocess, time\n{MODEL}"
        "    def load(self):\n"
        "        child = subprocess.Popen(['sleep', '1000'])\n"
        f"        with open({str(tmp_path / 'child')!r}, 'w') as file: file.write(str(child.pid))\n"
        "    def predict(self, batch): time.sleep(9)"
    )
    functions = {"f": {"code": "starts:F", "exec_time": "1ms"}}
    with worker(tmp_path, functions, arguments=("--hang-s", "1.5")) as process:
        gateway = process.gateway()
        child = int((tmp_path / "child").read_text())
        os.kill(child, 0)
        if how == "hung":
            gateway.start()
            gateway.run(row(1))
            assert process.process.wait(60) == 70
        else:
            assert process.end() == 0
        assert has_exited(child)


def test_models_that_exceed_memory_together_are_not_cached_together(tmp_path: Path) -> None:
    """Their sizes are not declared; a worker that exceeds the memory of its pool is killed."""
    code = f"import numpy as np\n{MODEL}    def load(self): self.w = np.ones(15_000_000)"
    (tmp_path / "large.py").write_text(code)
    functions = {name: {"code": "large:F", "exec_time": "1ms"} for name in "abcd"}
    with worker(tmp_path, functions, pool={"memory": "300MB"}) as process:
        gateway = process.gateway()
        for measured in gateway.hello.functions:
            assert 120_000_000 <= measured.memory_bytes < 200_000_000
        for id in range(4):
            gateway.start(id, id)
            gateway.order(StopInstance(id, 0))
            gateway.event(InstanceStopped)
        status = Path(f"/proc/{process.process.pid}/status").read_text()
        (most,) = [line.split()[1] for line in status.splitlines() if "VmHWM" in line]
        assert int(most) * 1024 < 300_000_000


def test_idle_worker_uses_no_cpu(tmp_path: Path) -> None:
    with worker(tmp_path, {"echo": code("echo")}) as process:
        gateway: Gateway = process.gateway()
        gateway.start()
        gateway.ask(row(1))
        stat = Path(f"/proc/{process.process.pid}/stat")

        def used() -> list[str]:
            return stat.read_text().rsplit(")", 1)[1].split()[11:13]

        def is_idle() -> bool:
            before = used()
            time.sleep(0.5)
            return used() == before

        assert any(is_idle() for _ in range(20))


def test_function_may_end_processes_that_it_has_forked(tmp_path: Path) -> None:
    """`multiprocessing.Pool` ends its processes with SIGTERM, which a worker survives."""
    code = (
        f"import multiprocessing, time\n{MODEL}"
        "    def predict(self, batch):\n"
        "        fork = multiprocessing.get_context('fork')\n"
        "        process = fork.Process(target=time.sleep, args=(60,))\n"
        "        process.start()\n"
        "        process.terminate()\n"
        "        process.join(10)\n"
        "        return {'y': batch['x'] * (process.exitcode or 0)}\n"
    )
    (tmp_path / "forks.py").write_text(code)
    with worker(tmp_path, {"f": {"code": "forks:F", "exec_time": "1ms"}}) as process:
        gateway = process.gateway()
        gateway.start()
        process.process.send_signal(signal.SIGTERM)  # as service managers send it to all
        for _ in range(10):
            (result,) = gateway.ask(row(1))
            assert gateway.arrays(result)["y"].tolist() == [-signal.SIGTERM]
