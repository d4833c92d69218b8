"""A real worker process, and a gateway whose messages a test controls."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np

import headgate
from headgate.config import declare
from headgate.core.actions import Action, StartInstance
from headgate.core.event_log import from_wire, to_wire
from headgate.core.events import Event, InstanceAppeared, InstanceStarted
from headgate.functions.arrays import Array, to_array, to_tensor
from headgate.functions.tensor import Block, TaskInputs, TaskResult, Tensor
from headgate.live.deployment import Deployment, NodeSpec, socket_path, write_deployment
from headgate.live.ipc.messages import (
    ActionMessage,
    BatchRan,
    EventMessage,
    Frames,
    FunctionLoaded,
    Hello,
    Message,
    Release,
    RunBatch,
    frame,
)
from headgate.live.ipc.node_memory import channel_pair
from headgate.live.ipc.shared_memory import Arena

T = TypeVar("T")
CODE = '''
import os, time
import numpy as np
from headgate.functions import Model, function

@function(inputs={"x": "FP32[-1, 2]"}, outputs={"y": "FP32[-1, 2]"})
def double(x):
    return x * np.float32(2)

@function
def echo(x):
    return {"x": x}

@function
def count(x):
    """Says how many items it was called with."""
    return np.full(len(x), len(x), np.int64)

@function
def nap(x):
    time.sleep(float(x[0]))
    return x

@function
def picky(x):
    if (x < 0).any():
        raise ArithmeticError("a negative one among %d" % len(x))
    if (x > 1000).any():
        raise MemoryError("too large")
    return {"y": np.sqrt(x), "unsure": x > 100}

@function
def wrong(x):
    return x[:1]

@function
def die(x):
    os._exit(3)

class Keeps(Model):
    """Keeps every input it is given, in its own way, and answers with the sums of all."""
    inputs = {"x": "FP32[-1, -1]"}
    outputs = {"sums": "FP64[-1, -1]"}
    def __init__(self, how="array"):
        self.how = how
        self.kept = []
    def decode(self, inputs):
        if self.how == "decoded":
            self.kept.append(inputs["x"])
        return inputs
    def predict(self, batch):
        x = batch["x"]
        kept = {"array": x, "view": x.reshape(-1)[1:-1], "memory": memoryview(x)}
        if self.how in kept:
            self.kept.append(kept[self.how])
        if (x == 0).all():
            self.kept.clear()
        sums = [float(np.asarray(array, np.float64).sum()) for array in self.kept]
        return {"sums": np.tile(np.array(sums, np.float64), (len(x), 1))}

class Word(Model):
    def __init__(self, suffix="!"):
        self.suffix = suffix.encode()
    def decode(self, inputs):
        return [text.decode("ascii") for text in inputs["text"].tolist()]
    def predict(self, batch):
        return [text.upper() for text in batch]
    def encode(self, result):
        return {"text": np.array([r.encode() + self.suffix for r in result], object)}

class Threads(Model):
    """Says how many threads it was made with, and those of the libraries behind NumPy."""
    def __init__(self, threads=0):
        self.threads = threads
    def predict(self, batch):
        count = len(batch["x"])
        libraries = int(os.environ["OPENBLAS_NUM_THREADS"])
        return {"threads": np.full(count, self.threads), "libraries": np.full(count, libraries)}

class Broken(Model):
    def load(self):
        raise OSError("no weights today")

class Once(Model):
    """Says which load this is: how often was it loaded from scratch?"""
    loads = 0
    def load(self):
        Once.loads += 1
        self.serial = Once.loads
    def predict(self, batch):
        return {"serial": np.full(len(batch["x"]), self.serial)}
'''


class Gateway:
    """One connection to a worker, blocking."""

    def __init__(self, path: Path, *, wait_s: float = 60.0, arena_bytes: int = 1 << 22) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(wait_s)
        until = time.monotonic() + wait_s
        while True:
            try:
                self.sock.connect(str(path))
                break
            except OSError:
                assert time.monotonic() < until, "the worker does not listen"
                time.sleep(0.005)
        self._frames = Frames()
        self._pending: list[Message] = []
        self._read: list[int] = []  # offsets of outputs that the worker may free
        self.in_use: set[int] = set()  # offsets of blocks that the worker has not released
        self.appeared: list[int] = []  # instances that other gateways have started
        self.returned: list[Block] = []  # blocks of lent memory that it has released
        data, descriptors, _, _ = socket.recv_fds(self.sock, 1 << 16, 1)
        assert data, "the worker left"
        hello, *pending = self._frames.feed(data)
        self._pending += pending
        assert isinstance(hello, Hello)
        self.hello = hello
        self.theirs = Arena.attach(descriptors[0], os.fstat(descriptors[0]).st_size)
        self.own = Arena.create(arena_bytes)
        self.channel, worker_channel = channel_pair()
        with worker_channel:
            socket.send_fds(self.sock, [b"\0"], [self.own.fd, worker_channel.fileno()])

    def close(self) -> None:
        self.sock.close()
        self.channel.close()
        self.own.close()
        self.theirs.close()

    def send(self, message: Message) -> None:
        self.sock.sendall(frame(message))

    def order(self, action: Action) -> None:
        self.send(ActionMessage(to_wire(action)))

    def receive(self) -> Message:
        while True:
            while not self._pending:
                data = self.sock.recv(1 << 16)
                if not data:
                    raise ConnectionError("the worker has closed the connection")
                self._pending.extend(self._frames.feed(data))
            message = self._pending.pop(0)
            if isinstance(message, Release):
                self._take_back(message.blocks)
            elif not self._has_appeared(message):
                return message

    def _has_appeared(self, message: Message) -> bool:
        """Note an instance that another gateway has started."""
        event = from_wire(message.wire) if isinstance(message, EventMessage) else None
        if isinstance(event, InstanceAppeared):
            self.appeared.append(event.instance_id)
        return isinstance(event, InstanceAppeared)

    def ran(self) -> BatchRan:
        message = self.receive()
        while isinstance(message, FunctionLoaded):
            message = self.receive()
        assert isinstance(message, BatchRan), message
        self._take_back(message.released)
        return message

    def event(self, cls: type[T]) -> T:
        message = self.receive()
        assert isinstance(message, EventMessage), message
        event = from_wire(message.wire)
        assert isinstance(event, Event)
        assert isinstance(event, cls), message.wire
        return event

    def start(self, instance_id: int = 0, variant_id: int = 0, shape_id: int = 0) -> None:
        self.order(StartInstance(instance_id, variant_id, 0, 0, shape_id))
        assert self.event(InstanceStarted).instance_id == instance_id

    def run(
        self,
        *requests: Mapping[str, Array],
        batch_id: int = 0,
        instance_id: int = 0,
        shares: bool = False,
        shape_id: int = 0,
    ) -> None:
        tasks = [TaskInputs(i, _items(request), self._tensors(request, shares))
                 for i, request in enumerate(requests)]  # fmt: skip
        items = sum(task.items for task in tasks)
        released, self._read = self._read, []
        self.send(RunBatch(batch_id, 0, instance_id, items, tasks, shape_id, released))

    def ask(
        self, *requests: Mapping[str, Array], instance_id: int = 0, shape_id: int = 0
    ) -> list[TaskResult]:
        self.run(*requests, instance_id=instance_id, shape_id=shape_id)
        return self.ran().results

    def arrays(self, result: TaskResult) -> dict[str, Array]:
        assert not result.error, result.error
        arrays = {}
        for tensor in result.outputs:
            if isinstance(tensor.data, Block):
                self._read.append(tensor.data.offset)
                tensor.data = memoryview(bytes(self.theirs.view(tensor.data)))
            arrays[tensor.name] = to_array(tensor)
        return arrays

    def _tensors(self, request: Mapping[str, Array], shares: bool) -> list[Tensor]:
        tensors = [to_tensor(name, array) for name, array in request.items()]
        for tensor in tensors:
            if shares and isinstance(tensor.data, memoryview):
                tensor.data = self.own.allocate(tensor.data) or tensor.data
            if isinstance(tensor.data, Block):
                self.in_use.add(tensor.data.offset)
        return tensors

    def _take_back(self, blocks: list[int | Block]) -> None:
        for block in blocks:
            if isinstance(block, Block):
                self.returned.append(block)
                continue
            self.in_use.remove(block)
            self.own.free(block)


class WorkerProcess:
    """A worker process and connections to it."""

    def __init__(self, run_dir: Path, process: subprocess.Popen[bytes]) -> None:
        self.run_dir = run_dir
        self.process = process
        self.gateways: list[Gateway] = []

    def gateway(self, **options: float) -> Gateway:
        gateway = Gateway(socket_path(self.run_dir, 0), **options)  # type: ignore[arg-type]
        self.gateways.append(gateway)
        return gateway

    def errors(self) -> str:
        return (self.run_dir / "stderr").read_text()

    def has_logged(self, text: str) -> bool:
        """Whether it logs a text, within a moment: a thread of its own writes the log."""
        end_s = time.monotonic() + 60
        while text not in self.errors():
            if time.monotonic() > end_s:
                return False
            time.sleep(0.01)
        return True

    def end(self) -> int:
        self.process.send_signal(signal.SIGUSR1)
        return self.process.wait(60)


@contextmanager
def worker(
    base: Path,
    functions: Mapping[str, object],
    *,
    pool: Mapping[str, object] | None = None,
    serve: Mapping[str, object] | None = None,
    arguments: tuple[str, ...] = (),
    pass_fds: tuple[int, ...] = (),
    core_count: int = 1,
) -> Iterator[WorkerProcess]:
    """Start a worker of these functions, from `CODE` by default, on so many cores."""
    (base / "code_of_worker.py").write_text(CODE)
    config = declare(
        functions=functions, pools={"cpu": pool or {}}, **({"serve": serve} if serve else {})
    )
    cores = sorted(os.sched_getaffinity(0))[:core_count]
    write_deployment(base, Deployment(config.spec, str(base), [NodeSpec(0, 0, "cpu-0", cores)]))
    source = str(Path(headgate.__file__).parents[1])
    with (base / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "headgate.live.worker", str(base), "0", *arguments],
            env={**os.environ, "PYTHONPATH": source},
            stderr=stderr,
            pass_fds=pass_fds,
            start_new_session=True,  # as the supervisor starts it
        )
    running = WorkerProcess(base, process)
    try:
        yield running
    finally:
        for gateway in running.gateways:
            gateway.close()
        process.kill()
        process.wait()


def code(name: str, **more: object) -> dict[str, object]:
    """Return the section of a function of `CODE` for an application file."""
    return {"code": f"code_of_worker:{name}", "exec_time": "1ms", **more}


def row(*values: float) -> dict[str, Array]:
    """Return a request of one numeric input."""
    return {"x": np.array(values, np.float32)}


def _items(request: Mapping[str, Array]) -> int:
    return len(next(iter(request.values())))
