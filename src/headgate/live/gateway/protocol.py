"""A connection: exchanges in their order, answers out, and how long all that may take.

Requests that come before the answer to the one before them wait, and are begun one after the
other, so that answers cannot change places. After a request that could not be understood the
connection is closed, but only once the client has had time to read why: closing on a sender at
once would take the answer away from it.

Time is kept by one sweep of the server over all connections, with marks as coarse as the sweep.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, cast, final

from headgate.live.gateway.answers import CONTINUE
from headgate.live.gateway.exchange import Exchange
from headgate.live.gateway.incoming import Incoming, Reading
from headgate.live.gateway.refusal import Refused

if TYPE_CHECKING:
    from headgate.live.gateway.server import HttpServer


@final
class Connection(asyncio.Protocol):
    """One client's connection, from its first byte to its last."""

    __slots__ = (
        "_current",
        "_incoming",
        "_is_cut",
        "_is_deaf",
        "_is_pumping",
        "_limits",
        "_server",
        "_since_s",
        "_transport",
        "_unsent_bytes",
        "_unwritable_since_s",
        "_waiting",
        "owes_continue",
    )

    def __init__(self, server: HttpServer) -> None:
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
        self._unsent_bytes = 0  # of answers since then, as the server counts them

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way in either direction."""
        return self._current is None and self._incoming.reading == Reading.NOTHING

    @property
    def is_sending(self) -> bool:
        """Whether something was written that has not left yet."""
        return self._transport.get_write_buffer_size() > 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin, unless there are too many already."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=self._limits.write_high_water)
        if not self._server.enter(self):
            self._fail(Refused(503, "too many connections", reason="connections", closes=True))

    def connection_lost(self, exc: Exception | None) -> None:
        """Withdraw whatever nobody waits for any more."""
        self._incoming.reading = Reading.NO_MORE
        self._incoming.let_go()
        self._forget_waiting()
        self._release_unsent()
        current, self._current = self._current, None
        if current is not None:
            current.abandon()
        self._server.leave(self)

    def eof_received(self) -> None:
        """The client has closed its side. It is taken to be gone; the transport closes itself."""

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
        self._unwritable_since_s = self._server.clock_s
        self._listen()

    def resume_writing(self) -> None:
        """It has caught up."""
        self._unwritable_since_s = None
        self._release_unsent()
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

    def send(self, answer: bytes, exchange: Exchange) -> None:
        """Send the answer of the exchange whose turn it is, and go on to the next."""
        if exchange is not self._current:
            return  # its client has gone
        self._current = None
        self._since_s = self._server.clock_s
        if self._transport.is_closing():
            return
        self._transport.write(answer)
        if self._unwritable_since_s is not None:
            self._unsent_bytes += len(answer)
            self._server.bodies_bytes += len(answer)
        if exchange.closes:
            self._end()
        elif self._waiting:
            self._pump()
            self._listen()
        elif self.owes_continue:
            self._tell_to_go_on()

    def close(self) -> None:
        """Close it once what was written has been sent."""
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
        if self._unwritable_since_s is not None:
            if now_s - self._unwritable_since_s > limits.write_timeout_s:
                self._transport.abort()
        elif reading == Reading.NO_MORE:
            if self._current is None and now_s - self._since_s > limits.linger_s:
                self._transport.abort()
        elif reading == Reading.NOTHING:
            if self._current is None and now_s - self._since_s > limits.idle_timeout_s:
                self._transport.close()
        elif not self._is_deaf:
            is_head = reading == Reading.HEAD
            timeout_s = limits.header_timeout_s if is_head else limits.body_timeout_s
            if now_s - self._incoming.since_s > timeout_s:
                part = "headers" if is_head else "body"
                self._fail(Refused(408, f"the {part} took too long to come", closes=True))

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

    def _end(self) -> None:
        """Close after the answer that was the last."""
        self._forget_waiting()
        self._incoming.reading = Reading.NO_MORE
        if self._is_cut and self._transport.can_write_eof():
            self._transport.write_eof()  # the sweep closes it later
        else:
            self._transport.close()

    def _forget_waiting(self) -> None:
        while self._waiting:
            self._waiting.pop().abandon()

    def _release_unsent(self) -> None:
        self._server.bodies_bytes -= self._unsent_bytes
        self._unsent_bytes = 0

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
            self._transport.write(CONTINUE)
