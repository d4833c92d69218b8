"""What gateways and workers say to each other, over a Unix socket.

Messages are MessagePack behind a length of four bytes. Rare ones carry an action or an event of the
core as it stands in a log (`core.wire`), so there is one vocabulary; only what carries tensors has
a shape of its own. Nothing is ever unpickled.
"""

from __future__ import annotations

from typing import Final, final

from msgspec import MsgspecError, Struct
from msgspec.msgpack import Decoder, Encoder

from headgate.functions.tensor import Signature, Tensor


class Message(Struct, array_like=True, tag=True, gc=False):
    """What may be sent. The subclasses below are the whole vocabulary."""


@final
class TaskInputs(Struct, array_like=True, gc=False):
    """One task of a batch, with its inputs."""

    task_id: int
    items: int
    inputs: list[Tensor]


@final
class TaskResult(Struct, array_like=True, gc=False):
    """What became of one task: outputs, or an error and whose it is (400 or 500)."""

    task_id: int
    outputs: list[Tensor]
    error: str = ""
    status: int = 200
    is_unsure: bool = False


# --- from a gateway to a worker ----------------------------------------------------------------


@final
class RunBatch(Message, tag=1):
    """A core `Dispatch`, with what it is to run on."""

    batch_id: int
    variant_id: int
    instance_id: int
    items: int
    tasks: list[TaskInputs]


@final
class ActionMessage(Message, tag=2):
    """Any other action for a worker, as `core.wire.to_wire` has it."""

    wire: list[object]


@final
class Release(Message, tag=3):
    """Blocks of the receiver's shared memory that the sender has finished reading."""

    offsets: list[int]


# --- from a worker to its gateways -------------------------------------------------------------


@final
class MeasuredFunction(Struct, array_like=True):
    """What a worker found out about a function: how it looks and how long it takes."""

    function: str
    signature: Signature
    exec_ns: tuple[int, ...]  # by batch size; empty where it was declared
    start_ns: int
    memory_bytes: int
    problem: str = ""  # why its last load failed: exception type and message, in one line


@final
class Hello(Message, tag=4):
    """First of all. The descriptor of the worker's shared memory comes with it."""

    node_id: int
    pid: int
    functions: list[MeasuredFunction]


@final
class BatchRan(Message, tag=5):
    """A batch ran to its end.

    `released` are blocks of the gateway's shared memory that nobody in the worker looks at any
    more: those of this batch's inputs, unless the function keeps one, and those it kept before.
    """

    batch_id: int
    began_ns: int
    ended_ns: int
    results: list[TaskResult]
    released: list[int] = []


@final
class EventMessage(Message, tag=6):
    """Any other event, as `core.wire.to_wire` has it."""

    wire: list[object]


@final
class FunctionLoaded(Message, tag=7):
    """A function that could not be loaded when the worker said hello can be by now."""

    function: MeasuredFunction


AnyMessage = RunBatch | ActionMessage | Release | Hello | BatchRan | EventMessage | FunctionLoaded

ENCODER: Final = Encoder()
DECODER: Final[Decoder[AnyMessage]] = Decoder(AnyMessage)
LENGTH_BYTES: Final = 4
MESSAGE_BYTES_MAX: Final = 1 << 30


# Messages on a stream: each behind its length, in four bytes.


def frame(message: Message) -> bytes:
    """Return a message as it is sent. Raises `ValueError` if it is too long for that.

    >>> from headgate.live.ipc.messages import Release
    >>> Frames().feed(frame(Release([64])))
    [Release(offsets=[64])]
    """
    body = ENCODER.encode(message)
    if len(body) > MESSAGE_BYTES_MAX:
        raise ValueError(f"a message of {len(body)} bytes; at most {MESSAGE_BYTES_MAX}")
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


@final
class Frames:
    """Puts messages together again, however the stream was cut.

    Tensors in them share the memory that was read, so nothing is copied but what arrives in pieces,
    and that once.
    """

    __slots__ = ("_partial", "_wanted")

    def __init__(self) -> None:
        self._partial = bytearray()
        self._wanted = 0  # bytes of `_partial` that are worth another look

    def feed(self, data: bytes) -> list[AnyMessage]:
        """Return the messages that are complete with this.

        Raises `ValueError` if it is no message or too long for one; then the stream is lost.
        """
        if not self._partial:
            return self._read(data)
        self._partial += data
        if len(self._partial) < self._wanted:
            return []
        whole, self._partial = self._partial, bytearray()
        return self._read(whole)

    def _read(self, data: bytes | bytearray) -> list[AnyMessage]:
        messages: list[AnyMessage] = []
        view = memoryview(data)
        start, end = 0, len(data)
        self._wanted = LENGTH_BYTES
        while end - start >= LENGTH_BYTES:
            body = start + LENGTH_BYTES
            size = int.from_bytes(view[start:body], "little")
            if size > MESSAGE_BYTES_MAX:
                raise ValueError(f"a message of {size} bytes; at most {MESSAGE_BYTES_MAX}")
            if end - body < size:
                self._wanted = LENGTH_BYTES + size
                break
            start = body + size
            try:
                messages.append(DECODER.decode(view[body:start]))
            except MsgspecError as error:
                raise ValueError(f"no message: {error}") from None
        if start < end:
            self._partial = bytearray(view[start:])
        return messages
