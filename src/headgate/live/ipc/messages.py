"""Messages between gateways and workers, over a Unix socket.

A message is MessagePack, preceded by its length in four bytes. Rare messages carry an action or an
event of the core in the encoding of the event log (`core.event_log.to_wire`), so that there is one
vocabulary. Only messages that carry tensors have a format of their own. Nothing is ever unpickled.
"""

from __future__ import annotations

from struct import Struct as Length
from typing import Final, Literal, Protocol, final

from msgspec import MsgspecError, Struct
from msgspec.msgpack import Decoder, Encoder

from headgate.core.events import Event
from headgate.functions.tensor import Block, Signature, TaskInputs, TaskResult


class Message(Struct, array_like=True, tag=True, gc=False):
    """Base class of all messages. The subclasses in this module are the whole vocabulary."""


@final
class RunBatch(Message, tag=1):
    """To a worker: the `Dispatch` action of the core, with the inputs of its tasks.

    `released` are blocks of the worker's memory, by offset, that nobody reads any more. They need
    no message of their own: the worker writes to its memory only what batches put out.
    """

    batch_id: int
    variant_id: int
    instance_id: int
    items: int
    tasks: list[TaskInputs]
    shape_id: int = 0
    released: list[int] = []


@final
class ActionMessage(Message, tag=2):
    """To a worker: any other action, encoded by `to_wire`."""

    wire: list[object]


@final
class Release(Message, tag=3):
    """To a gateway: blocks that the worker has finished reading, after their batch has run.

    A number is the offset of a block in the gateway's memory. A `Block` is one of the memory of a
    worker that the gateway has lent to the sender.
    """

    blocks: list[int | Block]


@final
class MeasuredFunction(Struct, array_like=True):
    """What a worker measured about a function: its signature, execution times and memory."""

    function: str
    signature: Signature
    exec_ns: tuple[int, ...]  # by batch size; empty if the application declares them
    start_ns: int
    memory_bytes: int
    problem: str = ""  # why the last load failed: exception type and message, in one line


InstanceStage = Literal["starting", "ready", "evicted", "stopping"]


@final
class PresentInstance(Struct, array_like=True):
    """An instance of a worker. Whoever started it, every gateway may use it."""

    id: int
    variant_id: int
    shape_id: int
    stage: InstanceStage
    is_in_use: bool = True  # nobody has used it for a while, if not


@final
class Hello(Message, tag=4):
    """To a gateway, first, with the descriptor of the worker's shared memory.

    `instances` are those that exist now. What becomes of them, and later ones, follow in events.
    Where functions run in processes of their own, the end of this one is the fault of none of them.
    """

    node_id: int
    pid: int
    functions: list[MeasuredFunction]
    instances: list[PresentInstance] = []
    runs_functions: bool = True


@final
class BatchRan(Message, tag=5):
    """To a gateway: a batch has run.

    `released` are blocks that the worker no longer references, as in `Release`: those of the inputs
    of this batch, unless the function keeps an array, and those it kept before.
    """

    batch_id: int
    began_ns: int
    ended_ns: int
    results: list[TaskResult]
    released: list[int | Block] = []


@final
class EventMessage(Message, tag=6):
    """To a gateway: any other event, encoded by `to_wire`."""

    wire: list[object]


@final
class FunctionLoaded(Message, tag=7):
    """To a gateway: a function has been loaded that could not be at the time of the `Hello`."""

    function: MeasuredFunction


@final
class ForgetMemory(Message, tag=8):
    """To a worker: no further batch refers to the memory with this id, whose owner is gone."""

    memory_id: int


class BatchListener(Protocol):
    """Receives the results of batches, from workers and from remote pools."""

    def on_batch_ran(self, pool_id: int, message: BatchRan) -> None:
        """Handle the results of a batch. The listener owns the tensors."""

    def on_event(self, event: Event) -> None:
        """Handle any other event."""


AnyMessage = (
    RunBatch
    | ActionMessage
    | Release
    | Hello
    | BatchRan
    | EventMessage
    | FunctionLoaded
    | ForgetMemory
)

ENCODER: Final = Encoder()
DECODER: Final[Decoder[AnyMessage]] = Decoder(AnyMessage)
_LENGTH: Final = Length("<I")
LENGTH_BYTES: Final = _LENGTH.size
MESSAGE_BYTES_MAX: Final = 1 << 30


def frame(message: Struct) -> bytes:
    """Return a message with its length prefix. Raises `ValueError` if it is too long.

    >>> from headgate.live.ipc.messages import Release
    >>> Frames().feed(frame(Release([64])))
    [Release(blocks=[64])]
    """
    body = ENCODER.encode(message)
    if len(body) > MESSAGE_BYTES_MAX:
        raise ValueError(f"the message has {len(body)} bytes; at most {MESSAGE_BYTES_MAX}")
    return _LENGTH.pack(len(body)) + body


@final
class Frames:
    """Reassembles messages from a stream, however it was split.

    Tensors share the memory of the received bytes. Only messages that arrive in several reads are
    copied, once.
    """

    __slots__ = ("_partial", "_wanted")

    def __init__(self) -> None:
        self._partial = bytearray()
        self._wanted = 0  # length of `_partial` at which the next message is complete

    def feed(self, data: bytes) -> list[AnyMessage]:
        """Add received bytes; return the messages that they complete.

        Raises `ValueError` if the bytes are not a message or too long; the stream is then unusable.
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
            (size,) = _LENGTH.unpack_from(data, start)
            if size > MESSAGE_BYTES_MAX:
                raise ValueError(f"the message has {size} bytes; at most {MESSAGE_BYTES_MAX}")
            if end - body < size:
                self._wanted = LENGTH_BYTES + size
                break
            start = body + size
            try:
                messages.append(DECODER.decode(view[body:start]))
            except MsgspecError as error:
                raise ValueError(f"invalid message: {error}") from None
        if start < end:
            self._partial = bytearray(view[start:])
        return messages
