"""Outputs of stages that stay on the node: in the shared memory of the worker that wrote them.

The gateway keeps a reference and not a copy. When the next stage runs on a worker of this host, the
gateway lends it the block: the worker maps the memory of the other one, once, for reading. Nothing
is copied between the two, and the gateway touches no element.

Who may reuse a block, and when, whatever dies:

- The worker that wrote a block frees it when its gateway says so. The gateway does with the next
  batch after the last reference was dropped: those of its requests, and those of the workers it
  was lent to.
- A worker returns what it was lent like any input, when its last array is freed. If it dies, the
  gateway takes back all that it had.
- If the worker that wrote a block dies, the memory stays mapped by those who read it, and what it
  holds can still be used. It is never lent to further workers: those get a copy.
- If the gateway dies, its workers close the connection and unmap the memory.

The memory is anonymous (a memfd): it has no name that could outlive its processes, and the kernel
frees it with the last of them. Its size is that of the arenas, `serve.shared_memory` for each
worker; an output for which there is no room goes through the gateway.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, final

from headgate.functions.tensor import RECEIVERS, SENDERS, Block
from headgate.live.ipc.shared_memory import Arena, BorrowedBlocks

ID_BYTES: Final = 8
Channel = socket.socket  # carries descriptors of memory, each with its id


def channel_pair() -> tuple[Channel, Channel]:
    """Return the two ends of a channel, neither of which blocks."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setblocking(False)
    return ends


@final
@dataclass(eq=False)
class _Memory:
    """The memory of one connected worker."""

    arena: Arena
    fd: int
    release: Callable[[int], None]
    readers: set[Loans]  # of the workers that have mapped it


@final
class NodeMemories:
    """The memory of all workers of a gateway, and the stage outputs that stay in it."""

    def __init__(self) -> None:
        self._next_id = max(SENDERS, RECEIVERS) + 1
        self._memories: dict[int, _Memory] = {}  # by id
        self._kept = BorrowedBlocks(self._on_dropped)

    def add(self, arena: Arena, fd: int, release: Callable[[int], None]) -> int:
        """Add the memory of a worker, and return its id. Takes ownership of the descriptor.

        `release` gets the offset of each block that nobody here reads any more, in any thread.
        """
        id = self._next_id
        self._next_id += 1
        self._memories[id] = _Memory(arena, fd, release, set())
        return id

    def remove(self, id: int) -> None:
        """Remove the memory of a worker that has disconnected. Its blocks stay readable."""
        memory = self._memories.pop(id)
        os.close(memory.fd)
        for loans in memory.readers:
            loans.on_memory_removed(id)

    def keep(self, id: int, block: Block) -> memoryview:
        """Return the content of a block that stays where it is until the result is dropped.

        Raises `ValueError` if the block is not in the memory of the worker.
        """
        if block.memory != SENDERS:
            raise ValueError(f"{block} is not in the memory of its sender")
        return self._kept.borrow(self._memories[id].arena, Block(block.offset, block.size, id))

    def find(self, data: memoryview) -> Block | None:
        """Return the block of a view that `keep` returned; None for any other memory."""
        return self._kept.find(data)

    def kept_bytes(self) -> int:
        return self._kept.size_bytes()

    def send_descriptor(self, id: int, loans: Loans, channel: Channel) -> bool:
        """Let a worker map the memory of another one; return whether it can."""
        memory = self._memories.get(id)
        if memory is None:
            return False
        try:
            socket.send_fds(channel, [id.to_bytes(ID_BYTES, "little")], [memory.fd])
        except OSError:  # no room now, or the worker has closed
            return False
        memory.readers.add(loans)
        return True

    def remove_reader(self, loans: Loans) -> None:
        """Remove a worker that has disconnected from the readers of all memories."""
        for memory in self._memories.values():
            memory.readers.discard(loans)

    def _on_dropped(self, block: Block) -> None:
        """Release a block. Runs in any thread."""
        memory = self._memories.get(block.memory)
        if memory is not None:  # else its worker is gone
            memory.release(block.offset)


@final
class Loans:
    """Blocks of other workers' memory, and of its own, that one worker is reading."""

    def __init__(
        self, memories: NodeMemories, own_id: int, channel: Channel, forget: Callable[[int], None]
    ) -> None:
        """`forget` tells the worker to unmap a memory, by its id."""
        self._memories = memories
        self._own_id = own_id
        self._channel = channel
        self._forget = forget
        self._mapped: set[int] = set()  # ids of memories that the worker has been sent
        # A view per loan, which keeps the block in use; by memory, as on the wire, and offset.
        self._lent: dict[tuple[int, int], list[memoryview]] = {}

    def lend(self, data: memoryview) -> Block | None:
        """Lend a block to the worker; None if the data is not in the memory of a worker, or if this
        worker cannot map it.
        """
        kept = self._memories.find(data)
        if kept is None or kept.size != data.nbytes or not self._can_map(kept.memory):
            return None
        memory = RECEIVERS if kept.memory == self._own_id else kept.memory
        self._lent.setdefault((memory, kept.offset), []).append(data)
        return Block(kept.offset, kept.size, memory)

    def take_back(self, block: Block) -> None:
        """End one loan of a block. Raises `ValueError` if there is none."""
        key = (block.memory, block.offset)
        views = self._lent.get(key)
        if not views:
            raise ValueError(f"{block} was not lent")
        views.pop()
        if not views:
            del self._lent[key]

    def close(self) -> None:
        """End all loans: the worker has disconnected."""
        self._memories.remove_reader(self)
        self._lent.clear()
        self._channel.close()

    def on_memory_removed(self, memory_id: int) -> None:
        """Tell the worker that the owner of a memory is gone."""
        self._mapped.discard(memory_id)
        self._forget(memory_id)

    def _can_map(self, memory_id: int) -> bool:
        if memory_id == self._own_id or memory_id in self._mapped:
            return True
        if not self._memories.send_descriptor(memory_id, self, self._channel):
            return False
        self._mapped.add(memory_id)
        return True


@final
class MappedMemories:
    """The memory of other workers that a worker has mapped, at its end of the channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        channel.setblocking(False)
        self._arenas: dict[int, Arena] = {}  # by id

    def arena(self, id: int) -> Arena:
        """Return the memory with this id. Raises `ValueError` if the gateway has not sent it."""
        while id not in self._arenas:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._channel, ID_BYTES, 1)
            except OSError:
                data, descriptors = b"", []
            if len(data) != ID_BYTES or len(descriptors) != 1:
                raise ValueError(f"the memory {id} was not sent")
            self._arenas[int.from_bytes(data, "little")] = Arena.attach(descriptors[0], 0)
        return self._arenas[id]

    def forget(self, id: int) -> None:
        """Unmap a memory as soon as no array references it."""
        with suppress(ValueError):
            self.arena(id).close()  # it may have been sent and never used
            del self._arenas[id]

    def close(self) -> None:
        for arena in self._arenas.values():
            arena.close()
        self._channel.close()
