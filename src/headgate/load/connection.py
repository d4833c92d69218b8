"""One keep-alive connection: sends a request, and tells when its answer is complete.

Written for speed: a request is one `write` of bytes made beforehand, an answer is parsed by
httptools, and neither costs a task, a future or an object.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol, cast

from httptools import HttpParserError, HttpResponseParser

IDLE: Final = -1


class Owner(Protocol):
    """Who is told what happens on a connection."""

    def opened(self, connection: Connection) -> None:
        """It can be used."""

    def answered(self, connection: Connection, row: int) -> None:
        """The answer to request `row` is complete: see `status`, `outcome` and `timing`."""

    def lost(self, connection: Connection, row: int) -> None:
        """It is gone. `row` is the request that was never answered, or IDLE."""


class Connection(asyncio.Protocol):
    """One request at a time. `row` is the one under way."""

    __slots__ = ("_owner", "_parser", "_transport", "outcome", "row", "status", "timing")

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._parser = HttpResponseParser(self)
        self.row = IDLE
        self.status = 0
        self.outcome = b""  # X-Headgate-Outcome of the answer
        self.timing = b""  # Server-Timing of the answer

    @property
    def is_usable(self) -> bool:
        """Whether another request may be sent."""
        return self._transport is not None and self.row == IDLE

    def send(self, row: int, request: bytes) -> None:
        """Send a request."""
        assert self._transport is not None and self.row == IDLE
        self.row = row
        self.outcome = self.timing = b""
        self._transport.write(request)

    def abort(self) -> None:
        """Close it without a word to the owner."""
        self.row = IDLE
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = cast("asyncio.Transport", transport)
        self._owner.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop, also after `abort`."""
        if self._transport is not None:
            self._transport = None
            row, self.row = self.row, IDLE
            self._owner.lost(self, row)

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        if self.row == IDLE:  # nobody asked
            self._drop()
            return
        try:
            self._parser.feed_data(data)
        except HttpParserError:
            self._drop()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        length = len(name)  # most headers are told apart by it alone
        if length == 18 and name.lower() == b"x-headgate-outcome":
            self.outcome = value
        elif length == 13 and name.lower() == b"server-timing":
            self.timing = value

    def on_message_complete(self) -> None:
        """Called by the parser."""
        status = self._parser.get_status_code()
        if status < 200:  # 100 Continue and its like: the answer is still to come
            return
        self.status = status
        row, self.row = self.row, IDLE
        if row == IDLE:  # more than one answer to one request
            return
        if not self._parser.should_keep_alive():
            transport, self._transport = self._transport, None
            if transport is not None:
                transport.close()
        self._owner.answered(self, row)

    def _drop(self) -> None:
        """Close it; `connection_lost` follows."""
        if self._transport is not None:
            self._transport.abort()
