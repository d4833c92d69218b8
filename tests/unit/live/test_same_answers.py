"""A bad request gets the same answer on a worker and on Lambda: outputs, status and error.

Both paths are those of a server, without its processes: to a worker as messages over a socket, to
Lambda as JSON through the client of the pool and the handler.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from remote_rig import remote_call

from headgate.config import load
from headgate.config.providers import Provider
from headgate.core.actions import Dispatch
from headgate.functions.arrays import Array, to_array, to_tensor
from headgate.functions.lambda_handler import Handler
from headgate.functions.loader import load_runner
from headgate.functions.tensor import Block, TaskInputs, TaskResult, Tensor
from headgate.live.ipc.messages import BatchRan, Frames, RunBatch, frame
from headgate.live.ipc.shared_memory import Arena
from headgate.live.pools.lambda_pool import LambdaFunctions
from headgate.live.pools.remote_pool import Done
from headgate.live.worker.executor import BatchJob

CODE = """
import numpy as np

from headgate.functions import Model


class Odd(Model):
    inputs = {"x": "FP32[-1, 2]", "n": "INT32[-1]"}
    outputs = {"y": "FP32[-1, 2]"}

    def decode(self, inputs):
        if (inputs["n"] == 400).any():
            raise KeyError("not this one")
        if (inputs["n"] == 401).any():
            raise SystemExit("in decode")
        return inputs if not (inputs["n"] == 402).any() else 7

    def predict(self, batch):
        if (batch["n"] == 500).any():
            raise ArithmeticError("of all numbers, this one")
        if (batch["n"] == 501).any():
            raise SystemExit("in predict")
        if (batch["n"] == 502).any():
            return {"y": batch["x"][:-1], "n": batch["n"][:-1]}
        return {"y": batch["x"], "n": batch["n"]}

    def encode(self, part):
        number = int(part["n"][0])
        y = part["y"]
        return {
            1: {"y": y, "unsure": np.array([True])},
            503: {"y": y.astype(np.float64)},
            504: {"y": y[:, :1]},
            505: {"z": y},
            506: {"y": y.tolist()},
            507: {"y": y, 3: y},
            508: [y],
            509: {"y": y, "more": np.array([1j])},
            510: {"y": np.concatenate([y, y])},
            511: {"y": y, "caf\\udce9": y},
        }.get(number, {"y": y})


class Undeclared(Odd):
    inputs = {}
    outputs = {}
"""
SPEC = {
    "functions": {
        name: {"code": f"odd_code:{code}", "exec_time": ["1ms"] * 9, "idempotent": is_idempotent}
        for name, code, is_idempotent in (
            ("odd", "Odd", True),
            ("once", "Odd", False),
            ("undeclared", "Undeclared", True),
        )
    },
    "pools": {"cloud": {"tier": "serverless", "memory": "1GB"}},
}


def x(rows: int = 1, columns: int = 2, kind: str = "f4") -> Tensor:
    return to_tensor("x", np.ones((rows, columns), kind))


def n(*numbers: int) -> Tensor:
    return to_tensor("n", np.array(numbers, np.int32))


def forged(**changes: Any) -> Tensor:
    tensor = x()
    for name, value in changes.items():
        setattr(tensor, name, value)
    return tensor


# By name: the inputs of a request of one item, and the status.
REQUESTS: dict[str, tuple[list[Tensor], int]] = {
    "good": ([x(), n(0)], 200),
    "unsure": ([x(), n(1)], 200),
    "an output with an odd name": ([x(), n(511)], 200),
    "wrong shape": ([x(columns=3), n(0)], 400),
    "wrong number of dimensions": ([to_tensor("x", np.ones(1, np.float32)), n(0)], 400),
    "wrong datatype": ([x(kind="f8"), n(0)], 400),
    "an unknown datatype": ([forged(datatype="FP1"), n(0)], 400),
    "missing input": ([x()], 400),
    "no inputs": ([], 400),
    "unknown input": ([x(), n(0), to_tensor("z", np.ones(1))], 400),
    "input sent twice": ([x(), x(), n(0)], 400),
    "too many items": ([x(2), n(0, 0)], 400),
    "no items": ([x(0), n()], 400),
    "too few bytes": ([forged(data=memoryview(b"1234")), n(0)], 400),
    "a negative size": ([forged(shape=(1, -2)), n(0)], 400),
    "decode raises": ([x(), n(400)], 400),
    "decode exits": ([x(), n(401)], 400),
    "decode returns no batch": ([x(), n(402)], 500),
    "predict raises": ([x(), n(500)], 500),
    "predict exits": ([x(), n(501)], 500),
    "predict returns too few items": ([x(), n(502)], 500),
    "wrong datatype returned": ([x(), n(503)], 500),
    "wrong shape returned": ([x(), n(504)], 500),
    "declared output missing": ([x(), n(505)], 500),
    "a list returned": ([x(), n(506)], 500),
    "a name that is no text": ([x(), n(507)], 500),
    "no dict returned": ([x(), n(508)], 500),
    "a datatype that cannot be sent": ([x(), n(509)], 500),
    "too many items returned": ([x(), n(510)], 500),
}


class Client:
    """Lambda as boto3 shows it, with the handler of Headgate behind it."""

    def __init__(self, directory: Path) -> None:
        environment = {"LAMBDA_TASK_ROOT": str(directory), "HEADGATE_APP": "app.yaml"}
        self._handler = Handler(environment)

    def invoke(self, *, FunctionName: str, Payload: bytes) -> dict[str, object]:
        answer = self._handler.handle(json.loads(Payload), None)
        return {"Payload": io.BytesIO(json.dumps(answer).encode())}


class Connection:
    """The part of a connection that a batch needs."""

    def __init__(self) -> None:
        self.arena = Arena.create(1 << 20)

    def take_released(self) -> list[int | Block]:
        return []


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "odd_code.py").write_text(CODE)
    (tmp_path / "app.yaml").write_text(json.dumps(SPEC))
    return tmp_path


def on_worker(directory: Path, function: str, tasks: list[TaskInputs]) -> list[TaskResult]:
    (sent,) = Frames().feed(frame(RunBatch(0, 0, 0, len(tasks), tasks)))
    assert isinstance(sent, RunBatch)
    config = load(str(directory / "app.yaml"))
    (variant,) = next(f for f in config.app.functions if f.name == function).variants
    runner = load_runner(config.app, config.sources, str(directory), variant)
    action = Dispatch(0, 0, [], len(tasks), 0, 0, 0)
    job = BatchJob(action, sent.tasks, runner, Connection(), lambda job: None, 0)  # type: ignore[arg-type]
    job.run()
    (ran,) = Frames().feed(job.reply)
    assert isinstance(ran, BatchRan)
    return ran.results


def on_lambda(directory: Path, function: str, tasks: list[TaskInputs]) -> list[TaskResult]:
    functions = LambdaFunctions(Client(directory), Provider("lambda", "f"), 6_000_000)
    done = functions.call(remote_call(tasks=tasks, function=function))
    assert isinstance(done, Done), done
    return done.results


def answer(result: TaskResult) -> tuple[int, int, str, bool, list[tuple[str, Array]]]:
    outputs = [(tensor.name, to_array(tensor).tolist()) for tensor in result.outputs]
    return result.task_id, result.status, result.error, result.is_unsure, outputs


def tasks_of(names: list[str]) -> list[TaskInputs]:
    return [TaskInputs(id, 1, list(REQUESTS[name][0])) for id, name in enumerate(names)]


@pytest.mark.parametrize("name", REQUESTS)
def test_request_alone(directory: Path, name: str) -> None:
    (worker,) = on_worker(directory, "odd", tasks_of([name]))
    (cloud,) = on_lambda(directory, "odd", tasks_of([name]))
    assert answer(worker) == answer(cloud)
    assert worker.status == REQUESTS[name][1], worker.error
    assert bool(worker.error) == (worker.status != 200)


@pytest.mark.parametrize("function", ["odd", "once", "undeclared"])
def test_all_requests_in_one_batch(directory: Path, function: str) -> None:
    """Also for a function that is not idempotent, and for one that declares no tensors."""
    names = list(REQUESTS)
    worker = on_worker(directory, function, tasks_of(names))
    cloud = on_lambda(directory, function, tasks_of(names))
    assert list(map(answer, worker)) == list(map(answer, cloud))
    if function == "odd":  # each fails by itself
        assert [result.status for result in worker] == [REQUESTS[name][1] for name in names]
