"""A connection: exchanges in their order, answers out, and how long all that may take.

Requests that come before the answer to the one before them wait, and are begun one after the
other, so that answers cannot change places. After a request that could not be understood the
connection is closed, but only once the client has had time to read why: closing on a sender at
once would take the answer away from it.

Time is kept by one sweep of the server over all connections, with marks as coarse as the sweep.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, cast, final

from headgate.live.gateway.answers import CONTINUE
from headgate.live.gateway.budget import Hold
from headgate.live.gateway.exchange import Exchange
from headgate.live.gateway.incoming import Incoming, Reading
from headgate.live.gateway.refusal import Refused

if TYPE_CHECKING:
    from headgate.live.gateway.server import HttpServer

REFUSED_MAX: Final = 64  # connections beyond the limit that are told so, at a time
_PIECE_BYTES: Final = 1 << 20  # of an answer that are written at a time
_CLOSED: Final = 7  # TCP_CLOSE of Linux: the state of a connection that was reset


@final
class Connection(asyncio.Protocol):
    """One client's connection, from its first byte to its last."""

    __slots__ = (
        "_current",
        "_incoming",
        "_is_cut",
        "_is_deaf",
        "_is_encrypted",
        "_is_ending",
        "_is_half_closed",
        "_is_paused",
        "_is_pumping",
        "_limits",
        "_server",
        "_since_s",
        "_transport",
        "_unread",
        "_unwritable_since_s",
        "_unwritten",
        "_waiting",
        "owes_continue",
    )

    def __init__(self, server: HttpServer, *, is_encrypted: bool = False) -> None:
        self.owes_continue = False  # the client waits to be told to send its body
        self._server = server
        self._limits = server.config
        self._transport: asyncio.Transport
        self._incoming = Incoming(self, server)
        self._current: Exchange | None = None  # whose answer is next
        self._waiting: deque[Exchange] = deque()
        self._is_pumping = False
        self._is_cut = False  # the client was refused in the middle of something
        self._is_deaf = False  # nothing is read for now
        self._since_s = server.clock_s  # when the last answer went out
        self._unwritable_since_s: float | None = None  # when the client stopped reading
        self._is_paused = False  # the transport has enough for now
        self._unwritten: deque[bytes | memoryview] = deque()  # what is left of large answers
        self._unread: list[Hold] = []  # of answers since the client stopped reading
        self._is_ending = False  # it is closed when everything is written
        self._is_encrypted = is_encrypted
        self._is_half_closed = False  # the client sends no more, and may listen

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way in either direction."""
        return self._current is None and self._incoming.reading == Reading.NOTHING

    @property
    def is_answering(self) -> bool:
        """Whether an answer is being made, or was written and has not left yet."""
        if self._current is not None or self._unwritten:
            return True
        return self._transport.get_write_buffer_size() > 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin, unless there are too many already: then it is told so, or just closed."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=self._limits.write_high_water)
        if self._is_encrypted:  # it was counted when it was accepted
            self._server.connections.add(self)
        elif self._server.excess() >= REFUSED_MAX:
            self._transport.abort()
        elif not self._server.enter(self):
            self._fail(Refused(503, "too many connections", reason="connections", closes=True))

    def connection_lost(self, exc: Exception | None) -> None:
        """Withdraw whatever nobody waits for any more."""
        self._incoming.reading = Reading.NO_MORE
        self._incoming.let_go()
        self._forget_waiting()
        self._unwritten.clear()
        self._release_unread()
        current, self._current = self._current, None
        if current is not None:
            current.abandon()
        self._server.leave(self)

    def eof_received(self) -> bool:
        """The client has closed its side: it may still listen, so what it has asked is answered.

        What it has begun to ask is not: that will never be whole. Over TLS there is no such thing
        as closing one side. The transport closes itself unless this returns True.
        """
        self._incoming.reading = Reading.NO_MORE
        self._incoming.let_go()
        last = self._waiting[-1] if self._waiting else self._current
        if last is None or self._is_encrypted:
            return False
        last.closes = True
        self._is_half_closed = True
        return True

    def data_received(self, data: bytes) -> None:
        """Read on."""
        if self._incoming.reading == Reading.NO_MORE:
            return
        try:
            self._incoming.feed(data)
        except Refused as refused:
            self._fail(refused)
        else:
            if self.owes_continue and self._current is None:
                self._tell_to_go_on()

    def pause_writing(self) -> None:
        """The client reads too slowly: it is not listened to, and the sweep watches it."""
        self._is_paused = True
        if self._unwritable_since_s is None:
            self._unwritable_since_s = self._server.clock_s
        self._listen()

    def resume_writing(self) -> None:
        """It has caught up with what was written; perhaps there is more."""
        self._is_paused = False
        self._write_on()
        if self._is_paused:
            return
        self._unwritable_since_s = None
        self._release_unread()
        if self._is_ending:
            self._end()
            return
        self._pump()
        self._listen()

    def arrived(self, exchange: Exchange) -> None:
        """Put a request in line; it is begun at once if there is nobody before it."""
        waiting = self._waiting
        if len(waiting) >= self._limits.pipelined_max:
            # More than was agreed came in one piece. HTTP lets a server close after any answer.
            waiting[-1].closes = True
            self._incoming.reading = Reading.NO_MORE
            exchange.abandon()
            return
        waiting.append(exchange)
        self._pump()
        if waiting:
            self._listen()

    def send(
        self,
        head: bytes,
        body: Sequence[bytes | memoryview],
        exchange: Exchange,
        hold: Hold | None,
    ) -> None:
        """Send the answer of the exchange whose turn it is, and go on to the next.

        `hold` is what a large answer takes of the budget, until it has been read.
        """
        if exchange is not self._current or self._transport.is_closing():
            if hold is not None:
                hold.release()  # its client has gone
            if exchange is self._current:
                self._current = None
            return
        self._current = None
        self._since_s = self._server.clock_s
        self._transport.write(head)
        if body:
            self._unwritten.extend(body)
            self._write_on()
        if hold is not None:
            if self._unwritable_since_s is None:
                hold.release()
            else:
                self._unread.append(hold)
        if exchange.closes:
            self._end()
        elif self._waiting:
            self._pump()
            self._listen()
        elif self.owes_continue:
            self._tell_to_go_on()

    def close(self) -> None:
        """Close it once its answers have been sent."""
        if self._unwritten:
            self._is_ending = True
        else:
            self._transport.close()

    def give_up(self, refused: Refused) -> None:
        """Answer whatever is under way with a refusal, and close.

        Where nothing is, a request may be on its way all the same. The client gets the end of the
        stream, and not a reset, which could also take the answer before from it.
        """
        if self.is_idle:
            self._is_cut = True
            self._since_s = self._server.clock_s
            self._end()
        elif self._current is None:
            self._fail(refused)
        else:
            self._current.give_up(refused)

    def sweep(self, now_s: float) -> None:
        """See whether the client takes too long over something."""
        limits, reading = self._limits, self._incoming.reading
        if self._is_half_closed and self._is_reset():
            self._transport.abort()
        elif self._unwritable_since_s is not None:
            if now_s - self._unwritable_since_s > limits.write_timeout_s:
                self._transport.abort()
        elif reading == Reading.NO_MORE:
            if self._current is None and now_s - self._since_s > limits.linger_s:
                self._transport.abort()
        elif reading == Reading.NOTHING:
            if self._current is None and now_s - self._since_s > limits.idle_timeout_s:
                self._transport.close()
        elif not self._is_deaf and not self.owes_continue:
            is_head = reading == Reading.HEAD
            timeout_s = limits.header_timeout_s if is_head else self._incoming.body_seconds_max()
            if now_s - self._incoming.since_s > timeout_s:
                part = "headers" if is_head else "body"
                self._fail(Refused(408, f"the {part} took too long to come", closes=True))

    def _is_reset(self) -> bool:
        """Whether the client has gone altogether. Nothing is read any more that would say so."""
        try:
            connection = self._transport.get_extra_info("socket")
            return bool(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CLOSED)
        except OSError:
            return True

    def _pump(self) -> None:
        """Begin whatever is next, as long as answers come at once."""
        if self._is_pumping:
            return
        self._is_pumping = True
        waiting = self._waiting
        try:
            while waiting and self._current is None and self._unwritable_since_s is None:
                self._current = exchange = waiting.popleft()
                exchange.handle()
        finally:
            self._is_pumping = False

    def _fail(self, refused: Refused) -> None:
        """Refuse what is coming in, when its turn comes; nothing is read after it."""
        if self._incoming.reading != Reading.NO_MORE:
            self._is_cut = True
            self.owes_continue = False
            self._waiting.append(self._incoming.last(refused))
            self._pump()

    def _write_on(self) -> None:
        """Write more of large answers, a piece at a time: to encrypt all at once takes long."""
        unwritten = self._unwritten
        if self._transport.is_closing():
            unwritten.clear()
        while unwritten and not self._is_paused:
            part = unwritten[0]
            if len(part) > _PIECE_BYTES:
                part = memoryview(part)
                unwritten[0] = part[_PIECE_BYTES:]
                part = part[:_PIECE_BYTES]
            else:
                unwritten.popleft()
            self._transport.write(part)

    def _end(self) -> None:
        """Close after the answer that was the last."""
        self._forget_waiting()
        self._incoming.reading = Reading.NO_MORE
        self._is_ending = bool(self._unwritten)
        if self._is_ending:
            return
        if self._is_cut and self._transport.can_write_eof():
            self._transport.write_eof()  # the sweep closes it later
        else:
            self._transport.close()

    def _forget_waiting(self) -> None:
        while self._waiting:
            self._waiting.pop().abandon()

    def _release_unread(self) -> None:
        while self._unread:
            self._unread.pop().release()

    def _listen(self) -> None:
        """Read from the client, or not: not while it does not read, nor while a crowd waits."""
        # A crowd is let pass before more are heard, who may be as many again.
        crowd = 1 if self._is_deaf else self._limits.pipelined_max
        is_deaf = self._unwritable_since_s is not None or len(self._waiting) >= crowd
        if is_deaf == self._is_deaf or self._transport.is_closing():
            return
        self._is_deaf = is_deaf
        if is_deaf:
            self._transport.pause_reading()
        else:
            self._incoming.since_s = self._server.clock_s  # the wait was ours
            self._transport.resume_reading()

    def _tell_to_go_on(self) -> None:
        self.owes_continue = False
        if self._incoming.reading == Reading.BODY:
            self._incoming.since_s = self._server.clock_s  # the wait was ours
            self._transport.write(CONTINUE)
