"""The gateway's end of the connection to one worker.

Orders go out, reports come in. Whatever goes wrong with a worker (it dies, hangs and is ended, runs
out of memory, says something that makes no sense) ends this connection, and that is one event: its
batches are lost and its node is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, cast, final

from headgate.core.errors import ConfigError
from headgate.core.events import BatchRefused, Event
from headgate.core.wire import Wire, from_wire
from headgate.functions.tensor import Block, Tensor
from headgate.live.arena import INLINE_BYTES_MAX, Arena
from headgate.live.assignment import Place
from headgate.live.framing import Frames, frame
from headgate.live.messages import Hello, Message, Order, Ran, Release, Report, Run, Work


class Listener(Protocol):
    """Who hears what a worker says."""

    def ran(self, link: Link, message: Ran) -> None:
        """A batch has ended. Tensors in it are the listener's own."""

    def reported(self, event: Event) -> None:
        """Something else has happened."""

    def lost(self, link: Link, batch_ids: list[int]) -> None:
        """The worker is gone, and these batches with it."""


@final
class Link(asyncio.Protocol):
    """One connection, from its handshake to its end."""

    def __init__(
        self,
        place: Place,
        hello: Hello,
        listener: Listener,
        own: Arena,
        theirs: Arena,
        complain: Callable[[str], None],
    ) -> None:
        self.place = place
        self.hello = hello
        self.closed = asyncio.get_running_loop().create_future()
        self._listener = listener
        self._own = own
        self._theirs = theirs
        self._complain = complain
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self._blocks: dict[int, list[int]] = {}  # by batch that is out: blocks of its inputs

    # --- orders --------------------------------------------------------------------------------

    def run(self, message: Run) -> None:
        """Send a batch. Its large tensors are put into shared memory first."""
        offsets: list[int] = []
        for work in message.works:
            self._share(work, offsets)
        self._blocks[message.batch_id] = offsets
        self._send(message)

    def order(self, wire: Wire) -> None:
        """Send any other order."""
        self._send(Order(wire))

    def close(self) -> None:
        """End the connection."""
        if self._transport is not None:
            self._transport.close()

    def _share(self, work: Work, offsets: list[int]) -> None:
        for place, tensor in enumerate(work.inputs):
            data = tensor.data
            if isinstance(data, Block) or data.nbytes < INLINE_BYTES_MAX:
                continue
            block = self._own.allocate(data)
            if block is not None:  # else it is full, and the tensor goes the slow way
                offsets.append(block.offset)
                # A copy: the call keeps its own, for another attempt.
                work.inputs[place] = Tensor(tensor.name, tensor.datatype, tensor.shape, block)

    def _send(self, message: Message) -> None:
        if self._transport is not None:
            self._transport.write(frame(message))

    # --- reports -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not derived from it

    def data_received(self, data: bytes) -> None:
        """Read whatever messages are complete."""
        try:
            for message in self._frames.feed(data):
                self._received(message)
        except (ValueError, ConfigError) as error:  # nothing a worker of ours would say
            self._complain(f"worker {self.place.name} makes no sense, and is left: {error}")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        """End, and say what was lost."""
        self._transport = None
        if not self.closed.done():
            self.closed.set_result(None)
        lost, self._blocks = list(self._blocks), {}
        self._listener.lost(self, lost)
        self._own.close()
        self._theirs.close()

    def _received(self, message: Message) -> None:
        if isinstance(message, Ran):
            self._free(message.batch_id)
            self._take_outputs(message)
            self._listener.ran(self, message)
        elif isinstance(message, Report):
            event = from_wire(message.wire)
            if not isinstance(event, Event):
                raise ValueError(f"{message.wire} is not an event")
            if isinstance(event, BatchRefused):
                self._free(event.batch_id)
            self._listener.reported(event)
        elif isinstance(message, Release):
            for offset in message.offsets:
                self._own.free(offset)
        else:
            raise ValueError(f"{type(message).__name__} is not for a gateway")

    def _take_outputs(self, message: Ran) -> None:
        """Copy what is in the worker's memory, so that it can have it back at once."""
        offsets: list[int] = []
        for result in message.results:
            for tensor in result.outputs:
                if isinstance(tensor.data, Block):
                    offsets.append(tensor.data.offset)
                    tensor.data = memoryview(bytes(self._theirs.view(tensor.data)))
        if offsets:
            self._send(Release(offsets))

    def _free(self, batch_id: int) -> None:
        for offset in self._blocks.pop(batch_id, ()):
            self._own.free(offset)
