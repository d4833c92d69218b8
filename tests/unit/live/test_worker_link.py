"""The gateway's end of a worker connection: large tensors are copied in chunks, in order."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any, cast

import pytest

from headgate.core.actions import StopInstance
from headgate.core.event_log import to_wire
from headgate.core.events import (
    BatchFailed,
    BatchLost,
    BatchRefused,
    Event,
    InstanceStopped,
    Refusal,
)
from headgate.functions.tensor import Block, TaskInputs, TaskResult, Tensor
from headgate.live.deployment import NodeSpec
from headgate.live.ipc.messages import (
    ActionMessage,
    BatchRan,
    EventMessage,
    Frames,
    Hello,
    Release,
    RunBatch,
    frame,
)
from headgate.live.ipc.shared_memory import Arena
from headgate.live.ipc.worker_link import COPY_BYTES_MAX, WorkerLink

LARGE = 3 * COPY_BYTES_MAX + 5
ACTION = to_wire(StopInstance(1, 0))
REPORT = EventMessage(to_wire(InstanceStopped(7, "gone")))
PICKLED = pickle.dumps(REPORT.wire)


class RecordingListener:
    """Records the calls of a link."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.outputs: list[bytes] = []

    def on_batch_ran(self, pool_id: int, message: BatchRan) -> None:
        self.order.append(f"ran {message.batch_id}")
        for result in message.results:
            self.outputs += [bytes(cast(memoryview, tensor.data)) for tensor in result.outputs]

    def on_worker_event(self, link: WorkerLink, event: object) -> None:
        self.order.append("event")

    def on_function_loaded(self, function: object) -> None:
        self.order.append("loaded")

    def keeps_on_node(self, task_id: int, is_unsure: bool) -> bool:
        return False

    def on_worker_lost(self, link: WorkerLink, batch_ids: list[int]) -> None:
        self.order.append(f"lost {batch_ids}")


class RecordingTransport:
    """Decodes and keeps what is written."""

    def __init__(self) -> None:
        self.frames = Frames()
        self.messages: list[object] = []
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.messages += self.frames.feed(data)

    def close(self) -> None:
        self.is_closed = True


class Rig:
    """A link between two arenas, of which the second is the worker's."""

    def __init__(self, arena_bytes: int = 16 << 20) -> None:
        self.arena, self.peer_arena = Arena.create(arena_bytes), Arena.create(arena_bytes)
        self.listener, self.transport = RecordingListener(), RecordingTransport()
        node = NodeSpec(0, 0, "worker", [])
        self.link = WorkerLink(
            node, Hello(0, 0, []), cast(Any, self.listener), self.arena, self.peer_arena
        )
        self.link.connection_made(cast(Any, self.transport))

    def run(self, batch_id: int, size: int) -> bytes:
        content = bytes(number % 251 for number in range(size))
        tensor = Tensor("x", "UINT8", (size,), memoryview(content))
        self.link.run(RunBatch(batch_id, 0, 0, 1, [TaskInputs(8, 1, [tensor])]))
        return content

    def ran(self, batch_id: int, *contents: bytes) -> bytes:
        outputs = []
        for content in contents:
            block = self.peer_arena.allocate(memoryview(content))
            assert block is not None
            outputs.append(Tensor("y", "UINT8", (len(content),), block))
        return frame(BatchRan(batch_id, 0, 0, [TaskResult(8, outputs)], []))


def test_messages_are_sent_in_order() -> None:
    async def scenario() -> None:
        rig = Rig()
        rig.link.send_action(ACTION)
        content = rig.run(1, LARGE)
        rig.link.send_action(ACTION)
        rig.run(2, 20_000)
        assert len(rig.transport.messages) == 1  # the rest waits for the copy
        for _ in range(10):
            await asyncio.sleep(0)
        kinds = [type(message) for message in rig.transport.messages]
        assert kinds == [ActionMessage, RunBatch, ActionMessage, RunBatch]
        (tensor,) = cast(RunBatch, rig.transport.messages[1]).tasks[0].inputs
        assert bytes(rig.arena.view(cast(Block, tensor.data))) == content
        rig.link.send_action(ACTION)
        assert len(rig.transport.messages) == 5  # sent at once again
        rig.link.connection_lost(None)
        assert rig.listener.order == ["lost [1, 2]"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "event", [BatchLost(1), BatchFailed(1, "it fails"), BatchRefused(1, Refusal.GONE)]
)
def test_a_batch_that_the_worker_gave_up_is_not_lost_again(event: Event) -> None:
    async def scenario() -> None:
        rig = Rig()
        rig.run(1, 5)
        rig.run(2, 5)
        rig.link.data_received(frame(EventMessage(to_wire(event))))
        rig.link.connection_lost(None)
        assert rig.listener.order == ["event", "lost [2]"]

    asyncio.run(scenario())


def test_other_callbacks_run_between_chunks() -> None:
    """One iteration of the event loop copies one chunk."""

    async def scenario() -> None:
        rig = Rig()
        rig.run(1, LARGE)
        turns = 0
        while not rig.transport.messages:
            await asyncio.sleep(0)
            turns += 1
        assert turns >= LARGE // COPY_BYTES_MAX
        rig.link.connection_lost(None)

    asyncio.run(scenario())


def test_messages_are_handled_in_order() -> None:
    async def scenario() -> None:
        rig = Rig()
        rig.run(1, 10)
        rig.run(2, 10)
        large = bytes(number % 241 for number in range(LARGE))
        data = rig.ran(1, b"small" * 5_000, large) + frame(REPORT) + rig.ran(2, b"y" * 20_000)
        rig.link.data_received(data[:100])
        rig.link.data_received(data[100:])
        assert rig.listener.order == []
        for _ in range(10):
            await asyncio.sleep(0)
        assert rig.listener.order == ["ran 1", "event", "ran 2"]
        assert rig.listener.outputs == [b"small" * 5_000, large, b"y" * 20_000]
        rig.run(3, 10)
        rig.run(4, 10)
        batches = [m for m in rig.transport.messages if isinstance(m, RunBatch)]
        assert [len(batch.released) for batch in batches] == [0, 0, 3, 0]
        rig.link.connection_lost(None)
        assert rig.listener.order[-1] == "lost [3, 4]"

    asyncio.run(scenario())


def test_disconnect_during_a_copy_loses_the_batch() -> None:
    async def scenario() -> None:
        rig = Rig()
        rig.run(1, 10)
        rig.run(2, LARGE)
        rig.link.data_received(rig.ran(1, bytes(LARGE)) + frame(REPORT))
        rig.link.connection_lost(None)
        for _ in range(10):
            await asyncio.sleep(0)
        assert rig.listener.order == ["lost [1, 2]"]
        assert len(rig.transport.messages) == 1

    asyncio.run(scenario())


def out_of_bounds_result() -> BatchRan:
    """A result whose block is outside the worker's memory."""
    lie = Tensor("y", "UINT8", (9,), Block(16 << 20, 9))
    return BatchRan(1, 0, 0, [TaskResult(8, [lie])], [])


@pytest.mark.parametrize(
    "text",
    [
        b"\xff\xff\xff\xff",
        b"\x01\x00\x00\x00\xc1",
        b"\x04\x00\x00\x00" + b"GET ",
        len(PICKLED).to_bytes(4, "little") + PICKLED,
        frame(ActionMessage(ACTION)),
        frame(EventMessage(ACTION)),
        frame(EventMessage(["NoSuchEvent", 1])),
        frame(Release([4096])),
        frame(out_of_bounds_result()),
        frame(BatchRan(1, 0, 0, [], [12345])),
    ],
    ids=[
        "a message without end",
        "a byte that is no MessagePack",
        "another protocol",
        "a pickle",
        "an order",
        "an order as a report",
        "an unknown event",
        "a block that is not ours",
        "a block outside of its memory",
        "inputs that were never sent",
    ],
)
def test_worker_with_an_invalid_message_is_disconnected(text: bytes) -> None:
    """Nothing of the message is passed on, and the batches in flight are lost."""

    async def scenario() -> None:
        rig = Rig()
        rig.run(1, 10)
        rig.link.data_received(text + frame(REPORT))
        assert rig.transport.is_closed
        rig.link.connection_lost(None)
        assert rig.listener.order == ["lost [1]"]

    asyncio.run(scenario())


def test_invalid_message_after_a_large_one() -> None:
    async def scenario() -> None:
        rig = Rig()
        rig.run(1, 10)
        rig.link.data_received(rig.ran(1, bytes(LARGE)) + frame(ActionMessage(ACTION)))
        for _ in range(10):
            await asyncio.sleep(0)
        assert rig.listener.order == ["ran 1"]
        assert rig.transport.is_closed

    asyncio.run(scenario())
