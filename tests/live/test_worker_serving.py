"""A worker process serves a gateway."""

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
from headgate.functions.tensor import Block, Signature, TaskInputs, TensorSpec
from headgate.live.deployment import socket_path
from headgate.live.ipc.messages import ActionMessage, RunBatch, frame


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


def test_batch_is_concatenated_and_split(tmp_path: Path) -> None:
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


def test_onnx_file_is_served_and_measured(tmp_path: Path, onnx_file: Path) -> None:
    with worker(tmp_path, {"increment": {"model": onnx_file.name, "batch_max": 6}}) as process:
        gateway = process.gateway()
        (measured,) = gateway.hello.functions
        assert measured.function == "increment"
        assert measured.signature == Signature(
            (TensorSpec("x", "FP32", (-1, 3)),),
            (TensorSpec("y", "FP32", (-1, 3)),),
            True,
            "onnxruntime_onnx",
        )
        assert len(measured.exec_ns) == 6
        assert 0 < measured.exec_ns[0] <= measured.exec_ns[-1] < 10**9
        assert measured.start_ns > 0
        gateway.start()
        one, two = np.array([[1, 2, 3]], np.float32), np.array([[4, 5, 6], [7, 8, 9]], np.float32)
        answers = [gateway.arrays(r)["y"].tolist() for r in gateway.ask({"x": one}, {"x": two})]
        assert answers == [(one + 1).tolist(), (two + 1).tolist()]


def test_measured_functions_in_hello(tmp_path: Path) -> None:
    """One with declared inputs is measured; another has no signature; one has declared times."""
    functions = {
        "double": {"code": "code_of_worker:double", "batch_max": 4},
        "echo": {"code": "code_of_worker:echo"},
        "picky": code("picky"),
        "broken": code("Broken"),
    }
    with worker(tmp_path, functions) as process:
        measured = {measured.function: measured for measured in process.gateway().hello.functions}
        assert list(measured) == list(functions)
        assert len(measured["double"].exec_ns) == 4
        assert measured["echo"].exec_ns == measured["picky"].exec_ns == ()
        assert process.has_logged("broken: cannot be loaded: OSError: no weights today")


def test_large_tensors_go_through_shared_memory(tmp_path: Path) -> None:
    with worker(tmp_path, {"echo": code("echo")}, serve={"shared_memory": "1MiB"}) as process:
        gateway = process.gateway()
        gateway.start()
        sent = np.arange(100_000, dtype=np.float64).reshape(2, -1)
        for _ in range(5):  # more than there is room for, unless it is released
            gateway.run({"x": sent}, shares=True)
            (result,) = gateway.ran().results
            assert isinstance(result.outputs[0].data, Block)
            assert np.array_equal(gateway.arrays(result)["x"], sent)


def test_full_shared_memory_falls_back_to_messages(tmp_path: Path) -> None:
    """The gateway never releases what it has read: outputs come inside the message."""
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


def test_text_goes_through_all_four_methods(tmp_path: Path) -> None:
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


def test_unsure_output_is_reported(tmp_path: Path) -> None:
    with worker(tmp_path, {"picky": code("picky")}) as process:
        gateway = process.gateway()
        gateway.start()
        assert [r.is_unsure for r in gateway.ask(row(4), row(4, 400), row(9))] == [0, 1, 0]


def test_slots_limit_concurrency(tmp_path: Path) -> None:
    """Two slots, one place in the queue.

    Of four naps one is refused, and one takes twice as long.
    """
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


def test_short_batches_run_inline(tmp_path: Path) -> None:
    """Once known to be quick, it is run by the reading thread; a nap is not."""
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


def test_held_batch_can_be_cancelled(tmp_path: Path) -> None:
    """The instance is to stop after the batch: it stops when the batch is cancelled.

    All actions arrive at once, so the slot is still taken by the start of the first instance.
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


def test_weights_are_loaded_and_evicted(tmp_path: Path) -> None:
    with worker(tmp_path, {"nap": code("nap")}) as process:
        gateway = process.gateway()
        gateway.start()
        gateway.run(row(0.05))
        gateway.order(EvictWeights(0, 0))
        gateway.ran()  # the batch ends first
        gateway.event(WeightsEvicted)
        gateway.order(LoadWeights(0, 0))
        gateway.run(row(0.01))  # waits for its own instance
        gateway.event(WeightsLoaded)
        gateway.ran()


def test_batch_waits_for_its_instance(tmp_path: Path) -> None:
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


def test_idle_instance_is_stopped(tmp_path: Path) -> None:
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


def test_a_batch_has_the_threads_of_its_shape(tmp_path: Path) -> None:
    """Where the shape is chosen at dispatch, one instance runs batches in all of them."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    function = code("Threads", cpus=1, shapes=[{"cpus": 2, "exec_time": "1ms"}])
    pool = {"tier": "dedicated", "cpus": 2, "slots": 2}
    with worker(tmp_path, {"threads": function}, pool=pool, core_count=2) as process:
        gateway = process.gateway()
        gateway.start()
        for shape_id, threads in ((0, 1), (1, 2), (0, 1)):
            (result,) = gateway.ask(row(1), shape_id=shape_id)
            arrays = gateway.arrays(result)
            assert arrays["threads"].tolist() == [threads]
            assert arrays["libraries"].tolist() == [2]


def test_an_instance_with_a_shape_takes_no_batch_in_another(tmp_path: Path) -> None:
    function = code("Threads", cpus=1, shapes=[{"cpus": 2, "exec_time": "1ms"}])
    pool = {"tier": "dedicated", "cpus": 2, "slots": 2, "compute": "per_instance"}
    with worker(tmp_path, {"threads": function}, pool=pool, core_count=2) as process:
        gateway = process.gateway()
        gateway.start(shape_id=1)
        (result,) = gateway.ask(row(1), shape_id=1)
        cores = min(2, len(os.sched_getaffinity(0)))
        assert gateway.arrays(result)["threads"].tolist() == [cores]
        gateway.run(row(1), shape_id=0)
        with pytest.raises(ConnectionError):
            gateway.receive()
        assert process.has_logged("instance 0 has the shape 1")
