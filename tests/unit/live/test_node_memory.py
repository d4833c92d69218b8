"""Outputs of stages that stay in the memory of workers: who keeps and reads them, and who dies."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
from test_worker_link import RecordingListener, RecordingTransport

from headgate.functions.tensor import RECEIVERS, Block, TaskInputs, TaskResult, Tensor
from headgate.live.deployment import NodeSpec
from headgate.live.ipc.messages import BatchRan, ForgetMemory, Hello, Release, RunBatch, frame
from headgate.live.ipc.node_memory import MappedMemories, NodeMemories, channel_pair
from headgate.live.ipc.shared_memory import Arena
from headgate.live.ipc.worker_link import WorkerLink

SIZE = 20_000


class KeepingListener(RecordingListener):
    """Keeps the outputs of every task for another stage."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def keeps_on_node(self, task_id: int, is_unsure: bool) -> bool:
        return True

    def on_batch_ran(self, pool_id: int, message: BatchRan) -> None:
        self.kept += [tensor for result in message.results for tensor in result.outputs]


class Peer:
    """A worker that a test plays, and the gateway's link to it."""

    is_alive = True

    def __init__(self, memories: NodeMemories, arena_bytes: int = 1 << 20) -> None:
        self.memory = Arena.create(arena_bytes)
        fd = os.dup(self.memory.fd)
        self.listener, self.transport = KeepingListener(), RecordingTransport()
        self.link = WorkerLink(
            NodeSpec(0, 0, "worker", []),
            Hello(0, 0, []),
            cast(Any, self.listener),
            Arena.create(arena_bytes),
            Arena.attach(os.dup(fd), arena_bytes),
        )
        channel, worker_channel = channel_pair()
        self.link.share_memory(memories, fd, channel)
        self.others = MappedMemories(worker_channel)
        self.link.connection_made(cast(Any, self.transport))

    def write(self, content: bytes) -> Tensor:
        """Finish a batch with one output; return it as the gateway has it."""
        block = self.memory.allocate(memoryview(content))
        assert block is not None
        tensor = Tensor("y", "UINT8", (len(content),), block)
        self.link.data_received(frame(BatchRan(0, 0, 0, [TaskResult(8, [tensor])])))
        return self.listener.kept.pop()

    def send(self, tensor: Tensor) -> Block | memoryview:
        """Send a batch with one input; return where the worker finds it."""
        return self._run([TaskInputs(8, 1, [tensor])]).tasks[0].inputs[0].data

    def _run(self, tasks: list[TaskInputs]) -> RunBatch:
        """Send a batch, and free what the gateway has released by then."""
        self.link.run(RunBatch(1, 0, 0, 1, tasks))
        message = self.transport.messages.pop()
        assert isinstance(message, RunBatch)
        for offset in message.released:
            self.memory.free(offset)
        return message

    def read(self, block: Block) -> bytes:
        if block.memory == RECEIVERS:
            return bytes(self.memory.view(block))
        return bytes(self.others.arena(block.memory).view(block))

    def give_back(self, block: Block) -> None:
        self.link.data_received(frame(Release([block])))

    def obey(self) -> None:
        """Free what the gateway has released, and forget what it says."""
        self._run([])
        for message in self.transport.messages:
            if isinstance(message, ForgetMemory):
                self.others.forget(message.memory_id)
        self.transport.messages.clear()

    def die(self) -> None:
        self.link.connection_lost(None)
        self.memory.close()
        self.others.close()
        self.is_alive = False


class Host:
    """A gateway and its workers."""

    def __init__(self) -> None:
        self.memories = NodeMemories()
        self.peers: list[Peer] = []

    def add(self) -> Peer:
        self.peers.append(Peer(self.memories))
        return self.peers[-1]


def run(scenario: Callable[[Host], Awaitable[None]]) -> None:
    async def main() -> None:
        host = Host()
        await scenario(host)
        for peer in host.peers:
            if peer.is_alive:
                peer.die()

    asyncio.run(main())


async def settle(*peers: Peer) -> None:
    for _ in range(2):
        await asyncio.sleep(0)
    for peer in peers:
        peer.obey()


def used(peer: Peer) -> int:
    return len(peer.memory._used)


def content(seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(SIZE)


def test_another_worker_reads_the_block_in_place() -> None:
    """Written by one, lent to another, and free when both the request and the reader are done."""

    async def scenario(host: Host) -> None:
        writer, reader = host.add(), host.add()
        tensor = writer.write(content())
        assert host.memories.kept_bytes() == SIZE
        block = reader.send(tensor)
        assert isinstance(block, Block)
        assert reader.read(block) == content()
        del tensor  # the request is over, and the batch is still running
        await settle(writer)
        assert used(writer) == 1
        reader.give_back(block)
        await settle(writer)
        assert (used(writer), host.memories.kept_bytes()) == (0, 0)

    run(scenario)


def test_the_same_worker_reads_its_own_memory() -> None:
    async def scenario(host: Host) -> None:
        peer = host.add()
        block = peer.send(peer.write(content()))
        assert isinstance(block, Block)
        assert (block.memory, peer.read(block)) == (RECEIVERS, content())
        peer.give_back(block)
        await settle(peer)
        assert used(peer) == 0

    run(scenario)


def test_a_block_may_be_lent_several_times() -> None:
    """Two stages of an ensemble read it; the descriptor of the memory is sent once."""

    async def scenario(host: Host) -> None:
        writer, reader = host.add(), host.add()
        tensor = writer.write(content())
        first, second = reader.send(tensor), reader.send(tensor)
        assert first == second and isinstance(first, Block)
        reader.give_back(first)
        del tensor
        await settle(writer)
        assert used(writer) == 1
        reader.give_back(first)
        await settle(writer)
        assert used(writer) == 0
        reader.give_back(first)  # once too often
        assert reader.transport.is_closed

    run(scenario)


def test_what_a_dead_reader_had_is_taken_back() -> None:
    async def scenario(host: Host) -> None:
        writer, reader = host.add(), host.add()
        tensor = writer.write(content())
        reader.send(tensor)
        del tensor
        reader.die()
        await settle(writer)
        assert used(writer) == 0

    run(scenario)


def test_what_a_dead_writer_wrote_can_be_read() -> None:
    """By the reader that has it, and by another one, which gets a copy."""

    async def scenario(host: Host) -> None:
        writer, reader, late = host.add(), host.add(), host.add()
        tensor = writer.write(content())
        block = reader.send(tensor)
        assert isinstance(block, Block)
        view = reader.others.arena(block.memory).view(block)
        writer.die()
        await settle(reader)
        assert bytes(view) == content()
        with pytest.raises(ValueError, match="was not sent"):
            reader.others.arena(block.memory)  # it is forgotten: no further batch refers to it
        copied = late.send(tensor)
        assert isinstance(copied, Block)
        assert copied.memory == 0
        assert bytes(late.link.arena.view(copied)) == content()
        again = reader.send(tensor)
        assert isinstance(again, Block)
        assert again.memory == 0
        reader.give_back(block)
        del tensor
        await settle(reader, late)
        assert host.memories.kept_bytes() == 0

    run(scenario)


def test_a_memory_that_was_sent_and_never_used_is_forgotten() -> None:
    async def scenario(host: Host) -> None:
        writer, reader = host.add(), host.add()
        reader.send(writer.write(content()))
        writer.die()
        await settle(reader)
        assert not reader.others._arenas

    run(scenario)


def test_a_worker_that_lies_about_its_memory_is_disconnected() -> None:
    async def scenario(host: Host) -> None:
        for lie in (Block(1 << 20, 9), Block(0, 9, 77)):
            peer = host.add()
            tensor = Tensor("y", "UINT8", (9,), lie)
            peer.link.data_received(frame(BatchRan(0, 0, 0, [TaskResult(8, [tensor])])))
            assert peer.transport.is_closed

    run(scenario)


@pytest.mark.parametrize("seed", range(20))
def test_no_order_of_events_leaks_a_block(seed: int) -> None:
    """Requests end, readers return blocks and workers die in any order: in the end, all is free."""
    rng = random.Random(seed)

    async def scenario(host: Host) -> None:
        peers = [host.add() for _ in range(3)]
        tensors: list[tuple[Tensor, bytes]] = []
        lent: list[tuple[Peer, Block]] = []
        for step in range(120):
            tensor = None
            action = rng.choice(["write", "send", "send", "drop", "return", "die"])
            peer = rng.choice(peers)
            if action == "write":
                tensors.append((peer.write(content(step)), content(step)))
            elif action == "send" and tensors:
                tensor, expected = rng.choice(tensors)
                block = peer.send(tensor)
                assert isinstance(block, Block)
                if block.memory:
                    assert peer.read(block) == expected
                    lent.append((peer, block))
                else:  # its writer is dead
                    assert bytes(peer.link.arena.view(block)) == expected
            elif action == "drop" and tensors:
                tensors.pop(rng.randrange(len(tensors)))
            elif action == "return" and lent:
                reader, block = lent.pop(rng.randrange(len(lent)))
                reader.give_back(block)
            elif action == "die" and step % 4 == 0:
                peer.die()
                lent = [(reader, block) for reader, block in lent if reader is not peer]
                peers[peers.index(peer)] = host.add()
            await settle(*peers)
        del tensor
        tensors.clear()
        for reader, block in lent:
            reader.give_back(block)
        await settle(*peers)
        assert [used(peer) for peer in peers] == [0, 0, 0]
        assert host.memories.kept_bytes() == 0

    run(scenario)
