"""Fuzz target: messages between worker and gateway. Invalid ones close the connection, no more.

The first byte of the input is the position at which the stream is split.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import cast

from fuzzing import fuzz

from headgate.core.actions import StartInstance
from headgate.core.errors import ConfigError
from headgate.core.event_log import from_wire, to_wire
from headgate.core.events import BatchRefused, Event, InstanceStarted
from headgate.functions.arrays import to_array
from headgate.functions.tensor import Block, Signature, TaskInputs, TaskResult, Tensor, TensorSpec
from headgate.live.deployment import NodeSpec
from headgate.live.ipc.messages import (
    ActionMessage,
    AnyMessage,
    BatchRan,
    EventMessage,
    ForgetMemory,
    Frames,
    FunctionLoaded,
    Hello,
    MeasuredFunction,
    Release,
    RunBatch,
    frame,
)
from headgate.live.ipc.node_memory import NodeMemories, channel_pair
from headgate.live.ipc.shared_memory import Arena
from headgate.live.ipc.worker_link import WorkerLink

ARENA_BYTES = 1 << 16
SMALL = Tensor("x", "FP32", (1, 2), memoryview(b"\0" * 8))
LARGE = Tensor("y", "INT8", (4096,), Block(4096, 4096))
SPECS = (TensorSpec("x", "FP32", (-1, 2)),)
SEEDS = [
    b"\x05" + b"".join(frame(message) for message in messages)
    for messages in (
        [RunBatch(1, 0, 2, 1, [TaskInputs(64, 1, [SMALL, LARGE])], released=[0])],
        [ActionMessage(to_wire(StartInstance(1, 0, 0, 0)))],
        [Hello(0, 7, [MeasuredFunction("f", Signature(SPECS, SPECS), (5,), 1, 2, "no")])],
        [FunctionLoaded(MeasuredFunction("f", Signature(SPECS, SPECS), (5,), 1, 2))],
        [
            BatchRan(
                1, 5, 9, [TaskResult(64, [LARGE, SMALL]), TaskResult(65, [], "no", 400, True)], [0]
            )
        ],
        [Release([Block(0, 4096, 2)]), ForgetMemory(2)],
        [EventMessage(to_wire(BatchRefused(1, 0))), EventMessage(to_wire(InstanceStarted(1, 0)))],
    )
]


class Listener:
    """Checks messages as closely as the gateway does."""

    def on_batch_ran(self, pool_id: int, message: BatchRan) -> None:
        for result in message.results:
            for tensor in result.outputs:
                assert not isinstance(tensor.data, Block)

    def on_event(self, event: Event) -> None:
        assert isinstance(event, Event)

    def on_worker_event(self, link: WorkerLink, event: Event) -> None:
        assert isinstance(event, Event)

    def keeps_on_node(self, task_id: int, is_unsure: bool) -> bool:
        return task_id % 2 == 0

    def on_function_loaded(self, function: MeasuredFunction) -> None:
        assert isinstance(function, MeasuredFunction)

    def on_worker_lost(self, link: WorkerLink, batch_ids: list[int]) -> None:
        pass


class Transport:
    """Discards everything."""

    def write(self, data: bytes) -> None:
        pass

    def close(self) -> None:
        pass


def read(pieces: list[bytes]) -> list[AnyMessage] | None:
    """Return the messages of a stream; None if it is invalid."""
    frames = Frames()
    messages: list[AnyMessage] = []
    try:
        for piece in pieces:
            messages += frames.feed(piece)
    except ValueError:
        return None
    return messages


def process(message: AnyMessage, arena: Arena) -> None:
    """Process a message as a worker does."""
    if isinstance(message, ActionMessage | EventMessage):
        with suppress(ConfigError):
            assert to_wire(from_wire(message.wire)) == message.wire
    elif isinstance(message, RunBatch):
        for work in message.tasks:
            for tensor in work.inputs:
                with suppress(ValueError):
                    if isinstance(tensor.data, Block):
                        tensor.data = arena.view(tensor.data)
                    assert to_array(tensor).shape == tensor.shape


def on_fault(kind: str) -> None:
    """Invalid messages are faults of the worker; the listener must never have one."""
    assert kind == "worker_message"


def target(data: bytes) -> None:
    """Read a stream, whole and in two pieces; then pass it to a gateway's link."""
    position, stream = data[:1], data[1:]
    at = position[0] if position else 0
    whole = read([stream])
    assert (read([stream[:at], stream[at:]]) is None) == (whole is None)
    own, theirs = Arena.create(ARENA_BYTES), Arena.create(ARENA_BYTES)
    try:
        for message in whole or ():
            assert read([frame(message)]) == [message]
            process(message, theirs)
        own.allocate(memoryview(b"input"))
        link = WorkerLink(
            NodeSpec(0, 0, "n", []), Hello(0, 0, []), Listener(), own, theirs, on_fault
        )
        channel, worker_channel = channel_pair()
        memories = NodeMemories()
        link.share_memory(memories, os.dup(theirs.fd), channel)
        worker_channel.close()
        link.connection_made(cast(asyncio.Transport, Transport()))
        link.data_received(stream)
        link.connection_lost(None)
    finally:
        for arena in (own, theirs):
            with suppress(ValueError):  # the link has closed it
                arena.close()


async def main() -> None:
    """A link needs a running event loop."""
    fuzz(target, SEEDS)


if __name__ == "__main__":
    asyncio.run(main())
