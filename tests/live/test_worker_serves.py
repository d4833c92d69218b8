"""A worker process does what a gateway asks it to."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from worker_rig import code, row, worker

from headgate.core.actions import (
    CancelBatch,
    EvictWeights,
    LoadWeights,
    StartInstance,
    StopInstance,
)
from headgate.core.event_log import to_wire
from headgate.core.events import (
    BatchRefused,
    InstanceStarted,
    InstanceStopped,
    Refusal,
    WeightsEvicted,
    WeightsLoaded,
)
from headgate.functions.tensor import Block, Signature, TensorSpec
from headgate.live.deployment import socket_path
from headgate.live.ipc.messages import ActionMessage, RunBatch, TaskInputs, frame


@pytest.fixture
def onnx_file(tmp_path: Path) -> Path:
    """A file that adds one to rows of three."""
    inputs = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])
    outputs = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])
    one = helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0])
    node = helper.make_node("Add", ["x", "one"], ["y"])
    graph = helper.make_graph([node], "increment", [inputs], [outputs], [one])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    path = tmp_path / "increment.onnx"
    onnx.save(model, path)
    return path


def test_a_batch_is_joined_and_cut_apart_again(tmp_path: Path) -> None:
    with worker(tmp_path, {"double": code("double")}) as process:
        gateway = process.gateway()
        gateway.start()
        first = {"x": np.array([[1, 2]], np.float32)}
        second = {"x": np.array([[3, 4], [5, 6]], np.float32)}
        gateway.run(first, second, batch_id=7)
        ran = gateway.ran()
        assert ran.batch_id == 7
        assert 0 < ran.began_ns <= ran.ended_ns <= time.monotonic_ns()
        assert [result.task_id for result in ran.results] == [0, 1]
        answers = [gateway.arrays(result)["y"].tolist() for result in ran.results]
        assert answers == [[[2, 4]], [[6, 8], [10, 12]]]


def test_an_onnx_file_is_served_and_measured(tmp_path: Path, onnx_file: Path) -> None:
    with worker(tmp_path, {"increment": {"model": onnx_file.name, "batch_max": 6}}) as process:
        gateway = process.gateway()
        (facts,) = gateway.hello.facts
        assert facts.function == "increment"
        assert facts.signature == Signature(
            (TensorSpec("x", "FP32", (-1, 3)),),
            (TensorSpec("y", "FP32", (-1, 3)),),
            True,
            "onnxruntime_onnx",
        )
        assert len(facts.exec_ns) == 6
        assert 0 < facts.exec_ns[0] <= facts.exec_ns[-1] < 10**9
        assert facts.start_ns > 0
        gateway.start()
        one, two = np.array([[1, 2, 3]], np.float32), np.array([[4, 5, 6], [7, 8, 9]], np.float32)
        answers = [gateway.arrays(r)["y"].tolist() for r in gateway.ask({"x": one}, {"x": two})]
        assert answers == [(one + 1).tolist(), (two + 1).tolist()]


def test_facts_of_plain_functions(tmp_path: Path) -> None:
    """One whose inputs are declared is measured; of another nothing is known; one is declared."""
    functions = {
        "double": {"code": "code_of_worker:double", "batch_max": 4},
        "echo": {"code": "code_of_worker:echo"},
        "picky": code("picky"),
        "broken": code("Broken"),
    }
    with worker(tmp_path, functions) as process:
        facts = {facts.function: facts for facts in process.gateway().hello.facts}
        assert list(facts) == list(functions)
        assert len(facts["double"].exec_ns) == 4
        assert facts["echo"].exec_ns == facts["picky"].exec_ns == ()
        assert process.has_complained("broken: cannot be loaded: OSError: no weights today")


def test_large_tensors_go_through_shared_memory(tmp_path: Path) -> None:
    with worker(tmp_path, {"echo": code("echo")}, serve={"shared_memory": "1MiB"}) as process:
        gateway = process.gateway()
        gateway.start()
        sent = np.arange(100_000, dtype=np.float64).reshape(2, -1)
        for _ in range(5):  # more than there is room for, were it not released
            gateway.run({"x": sent}, shares=True)
            (result,) = gateway.ran().results
            assert isinstance(result.outputs[0].data, Block)
            assert np.array_equal(gateway.arrays(result)["x"], sent)


def test_full_shared_memory_is_slow_and_right(tmp_path: Path) -> None:
    """The gateway never gives back what it has read: outputs come in the message."""
    with worker(tmp_path, {"echo": code("echo")}, serve={"shared_memory": "64KiB"}) as process:
        gateway = process.gateway()
        gateway.start()
        sent = np.arange(6_000, dtype=np.float64)
        ways = []
        for _ in range(3):
            gateway.run({"x": sent})
            (result,) = gateway.ran().results
            ways.append(type(result.outputs[0].data))
        assert ways == [Block, memoryview, memoryview]
        assert np.array_equal(gateway.arrays(result)["x"], sent)


def test_text_goes_through_all_four_verbs(tmp_path: Path) -> None:
    functions = {"word": code("Word", options={"suffix": "?"})}
    with worker(tmp_path, functions) as process:
        gateway = process.gateway()
        gateway.start()
        good = {"text": np.array([b"ab", b""], object)}
        bad = {"text": np.array([b"\xff"], object)}
        first, broken, last = gateway.ask(good, bad, good)
        assert gateway.arrays(first)["text"].tolist() == [b"AB?", b"?"]
        assert broken.status == 400
        assert broken.error.startswith("UnicodeDecodeError: ")
        assert gateway.arrays(last)["text"].tolist() == [b"AB?", b"?"]


def test_unsure_is_told_to_the_cascade(tmp_path: Path) -> None:
    with worker(tmp_path, {"picky": code("picky")}) as process:
        gateway = process.gateway()
        gateway.start()
        assert [r.is_unsure for r in gateway.ask(row(4), row(4, 400), row(9))] == [0, 1, 0]


def test_slots_limit_what_runs_at_once(tmp_path: Path) -> None:
    """Two slots, one place to wait: of four naps one is refused, and one takes twice as long."""
    functions = {"nap": code("nap", concurrency=4)}
    with worker(tmp_path, functions, pool={"slots": 2, "queue_max": 1}) as process:
        gateway = process.gateway()
        gateway.start()
        for batch_id in range(4):
            gateway.run(row(0.5), batch_id=batch_id)
        refused = gateway.event(BatchRefused)
        assert (refused.batch_id, refused.reason) == (3, Refusal.BUSY)
        ran = sorted((gateway.ran() for _ in range(3)), key=lambda ran: ran.batch_id)
        assert ran[1].began_ns < ran[0].ended_ns
        assert ran[2].began_ns >= min(ran[0].ended_ns, ran[1].ended_ns)


def test_short_batches_are_answered_as_well(tmp_path: Path) -> None:
    """Once it is known to be quick, it is run by the thread that listens; a nap is not."""
    functions = {"echo": code("echo"), "nap": code("nap")}
    with worker(tmp_path, functions, pool={"queue_max": 99}) as process:
        gateway = process.gateway()
        gateway.start(0, 0)
        gateway.start(1, 1)
        for batch_id in range(100):
            assert gateway.arrays(gateway.ask(row(batch_id))[0])["x"].tolist() == [batch_id]
        gateway.run(row(0.05), batch_id=1, instance_id=1)
        for batch_id in range(2, 60):
            gateway.run(row(batch_id), batch_id=batch_id)
        assert [gateway.ran().batch_id for _ in range(59)] == list(range(1, 60))


def test_a_batch_that_waits_can_be_called_back(tmp_path: Path) -> None:
    """The instance is to stop after it: that happens when the batch is gone.

    All orders come in one piece, so the slot is still taken by the start of the first instance.
    """
    with worker(tmp_path, {"echo": code("echo"), "nap": code("nap")}) as process:
        gateway = process.gateway()
        starts = [ActionMessage(to_wire(StartInstance(id, id, 0, 0))) for id in range(2)]
        waits = RunBatch(1, 1, 1, 1, [TaskInputs(0, 1, [])])
        ends = [
            ActionMessage(to_wire(StopInstance(1, 0))),
            ActionMessage(to_wire(CancelBatch(1, 0, 0))),
        ]
        gateway.sock.sendall(b"".join(frame(message) for message in (*starts, waits, *ends)))
        assert gateway.event(BatchRefused).reason == Refusal.CANCELLED
        assert gateway.event(InstanceStopped).instance_id == 1
        assert gateway.event(InstanceStarted).instance_id == 0
        gateway.run(row(1), batch_id=2, instance_id=1)
        assert gateway.event(BatchRefused).reason == Refusal.GONE


def test_weights_come_and_go(tmp_path: Path) -> None:
    with worker(tmp_path, {"nap": code("nap")}) as process:
        gateway = process.gateway()
        gateway.start()
        gateway.run(row(0.05))
        gateway.order(EvictWeights(0, 0))
        gateway.ran()  # the work ends first
        gateway.event(WeightsEvicted)
        gateway.order(LoadWeights(0, 0))
        gateway.run(row(0.01))  # waits for its own instance
        gateway.event(WeightsLoaded)
        gateway.ran()


def test_a_batch_waits_for_its_instance_to_start(tmp_path: Path) -> None:
    with worker(tmp_path, {"broken": code("Broken"), "echo": code("echo")}) as process:
        gateway = process.gateway()
        gateway.order(StartInstance(0, 0, 0, 0))
        gateway.run(row(1), batch_id=1, instance_id=0)
        gateway.order(StartInstance(1, 1, 0, 0))
        gateway.run(row(1), batch_id=2, instance_id=1)
        assert gateway.event(InstanceStopped).reason == "OSError: no weights today"
        assert gateway.event(BatchRefused).reason == Refusal.GONE
        assert gateway.event(InstanceStarted).instance_id == 1
        assert gateway.ran().batch_id == 2


def test_an_idle_instance_retires(tmp_path: Path) -> None:
    with worker(tmp_path, {"echo": code("echo")}, pool={"idle_timeout": "1s"}) as process:
        gateway = process.gateway()
        gateway.start()
        gateway.ask(row(1))
        assert gateway.event(InstanceStopped).reason == "idle for too long"


def test_only_our_own_user_may_connect(tmp_path: Path) -> None:
    with worker(tmp_path, {"echo": code("echo")}) as process:
        process.gateway()
        mode = os.stat(socket_path(tmp_path, 0)).st_mode  # noqa: PTH116
        assert stat.S_IMODE(mode) == 0o600
