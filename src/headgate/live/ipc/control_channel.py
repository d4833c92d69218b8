"""The connection between the supervisor and each of its gateways, over a pair of sockets.

To a gateway it carries events: how many gateways there are, and what became of starts that named no
node. From a gateway it carries those starts, and what the gateway sees of the nodes that the Broker
grants. The messages are those of workers (`ipc.messages`), with actions and events of the core.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Final, cast, final

from headgate.core.actions import Action
from headgate.core.errors import ConfigError
from headgate.core.event_log import from_wire, to_wire
from headgate.core.events import Event
from headgate.live.ipc.messages import (
    ActionMessage,
    AnyMessage,
    EventMessage,
    Frames,
    frame,
)

READ_BYTES: Final = 64 * 1024
UNSENT_BYTES_MAX: Final = 1 << 20  # a gateway that has not read this much is stuck
_LOG: Final = logging.getLogger(__name__)


@final
class ControlChannel:
    """The supervisor's end. Nothing blocks: what a gateway does not read now is kept for later."""

    def __init__(self) -> None:
        self._sock, self.gateway_sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.setblocking(False)
        self._frames = Frames()
        self._unsent = bytearray()
        self.is_broken = False  # the gateway has closed it, or sent nonsense
        self.is_stuck = False  # the gateway does not read

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: Event | Action) -> None:
        """Send an event or an action of the core, or keep it until `flush` can."""
        wire = to_wire(message)
        is_event = isinstance(message, Event)
        self._unsent += frame(EventMessage(wire) if is_event else ActionMessage(wire))
        self.flush()
        self.is_stuck = len(self._unsent) > UNSENT_BYTES_MAX

    def flush(self) -> None:
        """Send as much as the gateway reads."""
        while self._unsent and not self.is_broken:
            try:
                del self._unsent[: self._sock.send(self._unsent)]
            except BlockingIOError:
                return
            except OSError:
                self.is_broken = True

    def receive(self) -> list[Event | Action]:
        """Return what the gateway has sent, without waiting."""
        received: list[Event | Action] = []
        while not self.is_broken:
            try:
                data = self._sock.recv(READ_BYTES)
                self.is_broken = not data
                received += [_content(message) for message in self._frames.feed(data)]
            except BlockingIOError:
                break
            except (OSError, ValueError, ConfigError) as error:
                _LOG.error("a gateway sent an invalid message to its supervisor: %s", error)
                self.is_broken = True
        return received

    def close(self) -> None:
        self._sock.close()
        self.gateway_sock.close()


@final
class ControlLink(asyncio.Protocol):
    """The gateway's end. Its loss needs no handling: `watch_supervisor` notices a dead one."""

    def __init__(self, on_message: Callable[[Event | Action], None]) -> None:
        self._on_message = on_message
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None

    async def open(self, fd: int) -> None:
        """Take the descriptor that the supervisor has passed."""
        loop = asyncio.get_running_loop()
        sock = socket.socket(fileno=fd)
        sock.setblocking(False)
        await loop.create_unix_connection(lambda: self, sock=sock)

    def send(self, message: Event | Action) -> None:
        """Send an event or an action of the core."""
        wire = to_wire(message)
        is_event = isinstance(message, Event)
        if self._transport is not None:
            self._transport.write(frame(EventMessage(wire) if is_event else ActionMessage(wire)))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # The transport of uvloop is no subclass of it.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            self._on_message(_content(message))


def _content(message: AnyMessage) -> Event | Action:
    """Return the event or action in a message. Raises `ValueError` or `ConfigError`."""
    if not isinstance(message, EventMessage | ActionMessage):
        raise ValueError(f"{type(message).__name__} is not for a control channel")
    return from_wire(message.wire)
