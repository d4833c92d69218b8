"""One instance of a function in a process of Ray, and the messages between it and its host.

The host starts the class as a Ray actor, on the node that the Scheduler chose. Inside, batches
run as in a local worker: `functions.batch_runner` is the same. This module does not import Ray.

A message is MessagePack, as between a gateway and a worker. Large tensors are left out of it and
travel beside it as arrays of bytes, which Ray writes into its object store and maps into the memory
of the reader: nothing but the copy into the store is copied on one node.

What a function logs stays in the files of Ray, on a machine that nobody looks at. So warnings and
errors come back with the next reply, and the host logs them.
"""

from __future__ import annotations

import logging
import traceback
from collections import deque
from collections.abc import Sequence
from threading import Event
from time import monotonic_ns
from typing import Any, Final, final

import numpy as np
from msgspec import Struct
from msgspec.msgpack import Decoder, Encoder

import headgate
from headgate.config import from_spec
from headgate.core.errors import ConfigError
from headgate.functions.arrays import Array
from headgate.functions.batch_runner import BatchRunner
from headgate.functions.loader import load_runner
from headgate.functions.tensor import Block, Signature, TaskInputs, TaskResult, Tensor
from headgate.live.ipc.messages import MeasuredFunction
from headgate.live.worker.model_cache import failure_reason
from headgate.live.worker.warmup import BUDGET_NS, MeasuredSizes
from headgate.system.process import private_bytes

# A smaller tensor is sent inside the message. Ray sends messages below 100 KiB inside the call.
LARGE_BYTES_MIN: Final = 64 * 1024
LOG_RECORDS_MAX: Final = 100  # kept for the next reply; the oldest are dropped
LOG_CHARS_MAX: Final = 8_192  # of one record
Packed = tuple[bytes, list[Array]]  # a message, and its large tensors as arrays of bytes


@final
class LogRecord(Struct, array_like=True):
    """A warning or error of a function, with its traceback."""

    level: int
    text: str


@final
class LoadReply(Struct, array_like=True):
    """Whether an instance has loaded, on a node with the same version of Headgate."""

    version: str
    problem: str = ""  # why it could not be loaded: exception type and message, in one line
    trace: str = ""  # with its traceback
    records: list[LogRecord] = []
    signature: Signature = Signature()


@final
class BatchReply(Struct, array_like=True):
    """The results of one batch."""

    took_ns: int
    results: list[TaskResult]
    records: list[LogRecord] = []


@final
class RayActor:
    """The actor: loads one variant of a function, then runs its batches.

    Ray calls the methods from as many threads as the instance runs batches at once, and one more.
    """

    def __init__(self, spec: dict[str, Any], base: str, variant_id: int, shape_id: int = 0) -> None:
        """Do nothing that can fail: Ray would wrap it into an error of its own."""
        self._spec = spec
        self._base = base
        self._variant_id = variant_id
        self._shape_id = shape_id
        self._runner: BatchRunner | None = None
        self._own_bytes = private_bytes()  # memory of the process without a model
        self._records = _RecentRecords()
        logging.getLogger("headgate").addHandler(self._records)

    def load(self) -> bytes:
        """Load the function; return a `LoadReply`."""
        reply = LoadReply(headgate.__version__)
        name = ""
        try:
            config = from_spec(self._spec, "the application")
            variant = config.app.variants[self._variant_id]
            name = variant.name
            cores = variant.shapes[self._shape_id].shape.cores
            self._runner = load_runner(config.app, config.sources, self._base, variant, cores)
            reply.signature = self._runner.signature
        except BaseException as error:  # a model may raise anything
            reply.problem = failure_reason(error, name)
            # The text of a `ConfigError` is complete, but its cause may be in the user's code.
            cause = error.__cause__ if isinstance(error, ConfigError) else error
            if cause is not None:
                reply.trace = "".join(traceback.format_exception(cause))[-LOG_CHARS_MAX:].rstrip()
        reply.records = self._records.take()
        return _ENCODER.encode(reply)

    def measure(self, batch_max: int) -> bytes:
        """Measure the loaded function; return a `MeasuredFunction`. 0: its times are declared."""
        runner = self._loaded()
        exec_ns = MeasuredSizes(runner, batch_max, BUDGET_NS).exec_ns() if batch_max else ()
        grown_bytes = max(0, private_bytes() - self._own_bytes)
        return _ENCODER.encode(
            MeasuredFunction(runner.name, runner.signature, exec_ns, 0, grown_bytes)
        )

    def run(self, message: bytes, *large: Array) -> Packed:
        """Run a batch of tasks; return a `BatchReply`. Ray has resolved references to arrays."""
        tasks = _TASKS.decode(message)
        for task in tasks:
            _attach(task.inputs, large)
        began_ns = monotonic_ns()
        results = self._loaded().run(tasks)
        took_ns = monotonic_ns() - began_ns
        arrays: list[Array] = []
        for result in results:
            result.outputs = _detach(result.outputs, arrays)
        return _ENCODER.encode(BatchReply(took_ns, results, self._records.take())), arrays

    def wait(self) -> None:
        """Never return. The call ends with the actor, which is how the host learns of that."""
        Event().wait()

    def unload(self) -> None:
        """Unload the model. Nothing may run on it any more."""
        if self._runner is not None:
            self._runner.unload()

    def _loaded(self) -> BatchRunner:
        assert self._runner is not None, "only a loaded instance runs batches"
        return self._runner


@final
class _RecentRecords(logging.Handler):
    """Keeps warnings and errors until the next reply."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._records: deque[LogRecord] = deque(maxlen=LOG_RECORDS_MAX)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record, with its traceback."""
        self._records.append(LogRecord(record.levelno, self.format(record)[-LOG_CHARS_MAX:]))

    def take(self) -> list[LogRecord]:
        taken: list[LogRecord] = []
        while True:
            try:
                taken.append(self._records.popleft())
            except IndexError:
                return taken


def pack_tasks(tasks: Sequence[TaskInputs]) -> Packed:
    """Return the message for `RayActor.run`, and the large tensors beside it.

    >>> small = Tensor("x", "UINT8", (2,), memoryview(b"ab"))
    >>> large = Tensor("y", "UINT8", (1 << 20,), memoryview(bytes(1 << 20)))
    >>> message, arrays = pack_tasks([TaskInputs(7, 1, [small, large])])
    >>> len(message) < 100, [array.nbytes for array in arrays]
    (True, [1048576])
    """
    arrays: list[Array] = []
    packed = [TaskInputs(task.task_id, task.items, _detach(task.inputs, arrays)) for task in tasks]
    return _ENCODER.encode(packed), arrays


def unpack_reply(packed: Packed) -> BatchReply:
    """Return the reply of `RayActor.run`, with its tensors in memory that Ray has mapped."""
    reply = _REPLY.decode(packed[0])
    for result in reply.results:
        _attach(result.outputs, packed[1])
    return reply


def decode_load(message: bytes) -> LoadReply:
    """Return the reply of `RayActor.load`."""
    return _LOAD.decode(message)


def decode_measured(message: bytes) -> MeasuredFunction:
    """Return the reply of `RayActor.measure`."""
    return _MEASURED.decode(message)


def _detach(tensors: list[Tensor], arrays: list[Array]) -> list[Tensor]:
    """Return the tensors with a `Block` in place of large elements: the number of the array."""
    detached: list[Tensor] = []
    for tensor in tensors:
        data = tensor.data
        if isinstance(data, memoryview) and data.nbytes >= LARGE_BYTES_MIN:
            arrays.append(np.frombuffer(data, np.uint8))
            block = Block(len(arrays) - 1, data.nbytes)
            tensor = Tensor(tensor.name, tensor.datatype, tensor.shape, block)
        detached.append(tensor)
    return detached


def _attach(tensors: list[Tensor], arrays: Sequence[Array]) -> None:
    """Put the elements back in place of the `Block`s."""
    for tensor in tensors:
        if isinstance(tensor.data, Block):
            tensor.data = arrays[tensor.data.offset].data


_ENCODER: Final = Encoder()
_TASKS: Final = Decoder(list[TaskInputs])
_REPLY: Final = Decoder(BatchReply)
_LOAD: Final = Decoder(LoadReply)
_MEASURED: Final = Decoder(MeasuredFunction)
