"""The worker's end of the connection to one gateway."""

from __future__ import annotations

import os
import socket
from collections import deque
from itertools import islice
from typing import Final, final

from headgate.core.event_log import to_wire
from headgate.core.events import Event
from headgate.functions.tensor import RECEIVERS, SENDERS, Block
from headgate.live.ipc.messages import (
    AnyMessage,
    EventMessage,
    Frames,
    Hello,
    Release,
    RunBatch,
    frame,
)
from headgate.live.ipc.node_memory import MappedMemories
from headgate.live.ipc.shared_memory import Arena, BorrowedBlocks

READ_BYTES: Final = 128 * 1024
PIECES_MAX: Final = 64  # buffers per `sendmsg`
# A gateway with more unsent bytes than this is not read from.
UNSENT_BYTES_MAX: Final = 64 << 20


@final
class GatewayConnection:
    """Messages in both directions, and the shared memory of both sides.

    Large inputs are used in place, in the shared memory of the gateway or of the worker that ran
    the stage before, and a function may keep such an array for as long as it likes. So a block is
    released when the last array that references it is freed, not when its batch ends.
    """

    def __init__(self, sock: socket.socket, arena_bytes: int) -> None:
        self.sock = sock
        self.arena = Arena.create(arena_bytes)
        self.unsent_bytes = 0
        self.is_blocked = False  # the socket accepts no more bytes now
        self._peer_arena: Arena | None = None
        self._others: MappedMemories | None = None  # with the peer arena: memory of other workers
        self._frames = Frames()
        self._unsent: deque[bytes | memoryview] = deque()
        self._released: deque[Block] = deque()  # blocks to release
        self._borrowed = BorrowedBlocks(self._released.append)

    def send_hello(self, hello: Hello) -> None:
        """Send the `Hello` with the descriptor of our shared memory."""
        data = frame(hello)
        sent = socket.send_fds(self.sock, [data], [self.arena.fd])
        self.send(data[sent:])

    def read(self) -> list[AnyMessage] | None:
        """Return received messages; None if the gateway has closed. Raises `ValueError`."""
        if self._peer_arena is None:
            return self._read_arena()
        try:
            data = self.sock.recv(READ_BYTES)
        except BlockingIOError:
            return []
        return self._frames.feed(data) if data else None

    def resolve_blocks(self, run: RunBatch) -> None:
        """Replace references to blocks by their content. Raises `ValueError` for invalid ones."""
        for task in run.tasks:
            for tensor in task.inputs:
                data = tensor.data
                if type(data) is Block:
                    tensor.data = self._borrowed.borrow(self._arena_of(data), data)

    def forget_memory(self, memory_id: int) -> None:
        """Unmap the memory of another worker, which is gone."""
        if self._others is not None:
            self._others.forget(memory_id)

    def take_released(self) -> list[int | Block]:
        """Return the blocks that are no longer referenced, each once, as `Release` has them."""
        released: list[int | Block] = []
        while True:
            try:
                block = self._released.popleft()
            except IndexError:
                return released
            released.append(block.offset if block.memory == SENDERS else block)

    def send_released(self) -> None:
        if self._released:
            self.send(frame(Release(self.take_released())))

    def _arena_of(self, block: Block) -> Arena:
        assert self._peer_arena is not None and self._others is not None
        if block.memory == SENDERS:
            return self._peer_arena
        return self.arena if block.memory == RECEIVERS else self._others.arena(block.memory)

    def report(self, event: Event) -> None:
        self.send(frame(EventMessage(to_wire(event))))

    def send(self, data: bytes) -> None:
        """Queue bytes for the next `flush`."""
        if data:
            self._unsent.append(data)
            self.unsent_bytes += len(data)

    def flush(self) -> None:
        """Send as much as the socket accepts. Raises `OSError` if the gateway has closed."""
        unsent = self._unsent
        while unsent:
            try:
                sent = self.sock.sendmsg(islice(unsent, PIECES_MAX))
            except BlockingIOError:
                self.is_blocked = True
                return
            self.unsent_bytes -= sent
            while sent:
                first = unsent.popleft()
                if len(first) > sent:  # a view, so that the rest is not copied again
                    unsent.appendleft(memoryview(first)[sent:])
                    break
                sent -= len(first)
        self.is_blocked = False

    def close(self) -> None:
        self.sock.close()
        self.arena.close()
        if self._peer_arena is not None:
            self._peer_arena.close()
        if self._others is not None:
            self._others.close()

    def _read_arena(self) -> list[AnyMessage] | None:
        """Attach the gateway's shared memory, whose descriptor comes with its first byte, beside
        the channel on which the gateway sends the memory of other workers.
        """
        try:
            data, descriptors, _, _ = socket.recv_fds(self.sock, 1, 2)
        except BlockingIOError:
            return []
        if not data:
            return None
        if len(descriptors) != 2:
            for descriptor in descriptors:
                os.close(descriptor)
            raise ValueError("the gateway sent no shared memory")
        memory, channel = descriptors
        self._others = MappedMemories(socket.socket(fileno=channel))
        self._peer_arena = Arena.attach(memory, 0)
        return []
