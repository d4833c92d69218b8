"""A worker's end of the connection to one gateway."""

from __future__ import annotations

import socket
from collections import deque
from itertools import islice
from typing import Any, Final, final
from weakref import ref

import numpy as np

from headgate.core.event_log import to_wire
from headgate.core.events import Event
from headgate.functions.arrays import Array
from headgate.functions.tensor import Block
from headgate.live.ipc.messages import (
    AnyMessage,
    EventMessage,
    Frames,
    Hello,
    Release,
    RunBatch,
    frame,
)
from headgate.live.ipc.shared_memory import Arena

READ_BYTES: Final = 128 * 1024
PIECES_MAX: Final = 64  # written at once
# A gateway that does not read what it is told is not listened to either.
UNSENT_BYTES_MAX: Final = 64 << 20


@final
class GatewayConnection:
    """Messages in and out, and the shared memory of both sides.

    Gateways number what is theirs as they like, so two of them may use the same number. Within
    the worker the ids of each lie in a range of its own, from `first_id` on.

    Large inputs are looked at where the gateway has put them, and a function may keep such an array
    for as long as it likes. So a block is given back when the last array that looks at it is gone,
    and not when its batch has ended.
    """

    IDS: Final = 1 << 40

    def __init__(self, sock: socket.socket, serial: int, arena_bytes: int) -> None:
        self.sock = sock
        self.first_id = serial * self.IDS
        self.arena = Arena.create(arena_bytes)
        self.unsent_bytes = 0
        self.is_blocked = False  # the socket takes no more just now
        self._peer_arena: Arena | None = None
        self._frames = Frames()
        self._unsent: deque[bytes | memoryview] = deque()
        # Blocks that arrays look at, by the id of the reference that tells when none does.
        self._borrowed: dict[int, tuple[ref[Array], int]] = {}
        self._released: deque[int] = deque()  # offsets of blocks that the gateway is not told of

    def send_hello(self, hello: Hello) -> None:
        """Say hello, and hand over our shared memory."""
        data = frame(hello)
        sent = socket.send_fds(self.sock, [data], [self.arena.fd])
        self.send(data[sent:])

    def local_id(self, id: int) -> int:
        """Return how the worker calls what the gateway calls `id`."""
        if not 0 <= id < self.IDS:
            raise ValueError(f"{id} is no id")
        return self.first_id + id

    def read(self) -> list[AnyMessage] | None:
        """Return what has come; None if the gateway has gone. Raises `ValueError` for nonsense."""
        if self._peer_arena is None:
            return self._read_arena()
        try:
            data = self.sock.recv(READ_BYTES)
        except BlockingIOError:
            return []
        return self._frames.feed(data) if data else None

    def resolve_blocks(self, run: RunBatch) -> None:
        """Replace blocks by what is in them. Raises `ValueError` if one is not there."""
        for task in run.tasks:
            for tensor in task.inputs:
                data = tensor.data
                if type(data) is Block:
                    tensor.data = self._borrow(data)

    def take_released(self) -> list[int]:
        """Return the offsets of blocks that nobody looks at any more, each of them once."""
        released: list[int] = []
        while True:
            try:
                released.append(self._released.popleft())
            except IndexError:
                return released

    def send_released(self) -> None:
        """Tell the gateway of blocks that nobody looks at any more."""
        if self._released:
            self.send(frame(Release(self.take_released())))

    def _borrow(self, block: Block) -> memoryview:
        """Return what is in a block, as memory that an array of ours owns.

        Arrays that are made of it keep that one alive, and so does whatever is made of them.
        """
        assert self._peer_arena is not None
        owner: Array = np.frombuffer(self._peer_arena.view(block), np.uint8)
        freed = ref(owner, self._on_array_freed)
        self._borrowed[id(freed)] = (freed, block.offset)
        return owner.data

    def _on_array_freed(self, freed: ref[Any]) -> None:
        """Note that nobody looks at a block any more. Runs in any thread, and waits for nothing."""
        _, offset = self._borrowed.pop(id(freed))
        self._released.append(offset)

    def report(self, event: Event) -> None:
        """Tell the gateway what has happened; in its own ids."""
        self.send(frame(EventMessage(to_wire(event))))

    def send(self, data: bytes) -> None:
        """Have it sent with the next `flush`."""
        if data:
            self._unsent.append(data)
            self.unsent_bytes += len(data)

    def flush(self) -> None:
        """Send as much as the socket takes. Raises `OSError` if the gateway has gone."""
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
                if len(first) > sent:  # a view: the rest is not copied again and again
                    unsent.appendleft(memoryview(first)[sent:])
                    break
                sent -= len(first)
        self.is_blocked = False

    def close(self) -> None:
        """End it."""
        self.sock.close()
        self.arena.close()
        if self._peer_arena is not None:
            self._peer_arena.close()

    def _read_arena(self) -> list[AnyMessage] | None:
        """Take the gateway's shared memory, which comes with its first byte."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self.sock, 1, 1)
        except BlockingIOError:
            return []
        if not data:
            return None
        if len(descriptors) != 1:
            raise ValueError("a gateway without shared memory")
        self._peer_arena = Arena.attach(descriptors[0], 0)
        return []
