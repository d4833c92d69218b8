"""The gateway's end of the connection to one worker.

Orders go out, reports come in. Whatever goes wrong with a worker (it dies, hangs and is ended, runs
out of memory, says something that makes no sense) ends this connection, and that is one event: its
batches are lost and its node is gone.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, Protocol, cast, final

from headgate.core.errors import ConfigError
from headgate.core.events import BatchLost, BatchRefused, Event
from headgate.core.wire import Wire, from_wire
from headgate.functions.tensor import Block, Tensor
from headgate.live.arena import INLINE_BYTES_MAX, Arena
from headgate.live.assignment import Place
from headgate.live.driver import Fault, no_fault
from headgate.live.framing import Frames, frame
from headgate.live.messages import (
    MESSAGE_BYTES_MAX,
    FunctionFacts,
    Hello,
    Learned,
    Message,
    Order,
    Ran,
    Release,
    Report,
    Run,
    Work,
)

_LOG: Final = logging.getLogger(__name__)


class Listener(Protocol):
    """Who hears what a worker says."""

    def ran(self, link: Link, message: Ran) -> None:
        """A batch has ended. Tensors in it are the listener's own."""

    def reported(self, event: Event) -> None:
        """Something else has happened."""

    def learned(self, facts: FunctionFacts) -> None:
        """A function that could not be loaded can be by now."""

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
        fault: Fault = no_fault,
    ) -> None:
        self.place = place
        self.hello = hello
        self.closed = asyncio.get_running_loop().create_future()
        self._listener = listener
        self._own = own
        self._theirs = theirs
        self._fault = fault
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self._batch_ids: set[int] = set()  # that are out

    # --- orders --------------------------------------------------------------------------------

    def run(self, message: Run) -> None:
        """Send a batch. Its large tensors are put into shared memory first.

        Their blocks are taken again when the worker releases them: a function may keep an array.
        Raises only if nothing of it has been sent: `ValueError` if it is too large.
        """
        offsets: list[int] = []
        try:
            inline_bytes = 0
            for work in message.works:
                inline_bytes += self._share(work, offsets)
                if inline_bytes > MESSAGE_BYTES_MAX:  # do not even begin to copy it
                    raise ValueError(
                        f"a batch of {inline_bytes} bytes; at most {MESSAGE_BYTES_MAX}"
                    )
            data = frame(message)
        except BaseException:
            self._free(offsets)
            raise
        self._batch_ids.add(message.batch_id)
        self._write(data)

    def order(self, wire: Wire) -> None:
        """Send any other order."""
        self._send(Order(wire))

    def close(self) -> None:
        """End the connection."""
        if self._transport is not None:
            self._transport.close()

    def _share(self, work: Work, offsets: list[int]) -> int:
        """Put what is large into shared memory; return how many large bytes did not fit."""
        left_bytes = 0
        for place, tensor in enumerate(work.inputs):
            data = tensor.data
            if isinstance(data, Block) or data.nbytes < INLINE_BYTES_MAX:
                continue
            block = self._own.allocate(data)
            if block is None:  # it is full, and the tensor goes the slow way
                left_bytes += data.nbytes
                continue
            offsets.append(block.offset)
            # A copy: the call keeps its own, for another attempt.
            work.inputs[place] = Tensor(tensor.name, tensor.datatype, tensor.shape, block)
        return left_bytes

    def _send(self, message: Message) -> None:
        self._write(frame(message))

    def _write(self, data: bytes) -> None:
        """Send bytes. Nobody knows how many went out if that fails: then the connection ends."""
        if self._transport is None:
            return
        try:
            self._transport.write(data)
        except Exception:
            _LOG.exception("worker %s cannot be written to, and is left", self.place.name)
            self._fault("worker_connection")
            self._transport.abort()

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
            _LOG.error("worker %s makes no sense, and is left: %s", self.place.name, error)
            self._fault("worker_message")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        """End, and say what was lost."""
        self._transport = None
        if not self.closed.done():
            self.closed.set_result(None)
        lost, self._batch_ids = sorted(self._batch_ids), set()
        try:
            self._listener.lost(self, lost)
        except Exception:
            self._listener_broke(None)
        finally:
            self._own.close()
            self._theirs.close()

    def _received(self, message: Message) -> None:
        if isinstance(message, Ran):
            self._batch_ids.discard(message.batch_id)
            self._free(message.released)
            self._take_outputs(message)
            try:
                self._listener.ran(self, message)
            except Exception:
                self._listener_broke(message.batch_id)
        elif isinstance(message, Report):
            event = from_wire(message.wire)
            if not isinstance(event, Event):
                raise ValueError(f"{message.wire} is not an event")
            if isinstance(event, BatchRefused):
                self._batch_ids.discard(event.batch_id)
            try:
                self._listener.reported(event)
            except Exception:
                self._listener_broke(None)
        elif isinstance(message, Release):
            self._free(message.offsets)
        elif isinstance(message, Learned):
            try:
                self._listener.learned(message.facts)
            except Exception:
                self._listener_broke(None)
        else:
            raise ValueError(f"{type(message).__name__} is not for a gateway")

    def _listener_broke(self, batch_id: int | None) -> None:
        """A mistake of ours, not of the worker: have the batch end, and read on."""
        _LOG.exception("what worker %s said could not be dealt with", self.place.name)
        self._fault("report")
        if batch_id is not None:
            try:
                self._listener.reported(BatchLost(batch_id))
            except Exception:
                _LOG.exception("batch %d of worker %s is not reported", batch_id, self.place.name)

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

    def _free(self, offsets: list[int]) -> None:
        for offset in offsets:
            self._own.free(offset)
