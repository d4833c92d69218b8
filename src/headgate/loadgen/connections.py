"""The connections of one run: as many as are needed at once, up to a bound."""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from time import monotonic_ns
from typing import Any, Final, Protocol, TypeVar, cast, final

import uvloop
from httptools import HttpParserError, HttpResponseParser

from headgate.loadgen.requests import Address
from headgate.loadgen.results import FailureReason, LoadProgress, ProgressCounter, Rows

# One keep-alive connection: sends a request, and tells when its answer is complete.
#
# Written for speed: a request is one `write` of bytes made beforehand, an answer is parsed by
# httptools, and neither costs a task, a future or an object.


IDLE: Final = -1


class Owner(Protocol):
    """Who is told what happens on a connection."""

    def opened(self, connection: LoadConnection) -> None:
        """It can be used."""

    def answered(self, connection: LoadConnection, row: int) -> None:
        """The answer to request `row` is complete: see `status`, `outcome` and `timing`."""

    def lost(self, connection: LoadConnection, row: int) -> None:
        """It is gone. `row` is the request that was never answered, or IDLE."""


class LoadConnection(asyncio.Protocol):
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


@final
class ConnectionPool:
    """Sends each request on a connection of its own; where none is free, it waits its turn.

    Never raises for what a server does: that ends up in the rows. `on_end` is called after a
    row has ended. Must be made inside the running loop, and closed.
    """

    def __init__(
        self,
        address: Address,
        rows: Rows,
        *,
        start_ns: int,
        connections_max: int,
        timeout_ns: int,
        on_end: Callable[[], None],
    ) -> None:
        self._address = address
        self._rows = rows
        self._start_ns = start_ns
        self._connections_max = connections_max
        self._timeout_ns = timeout_ns
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._open: set[LoadConnection] = set()
        self._idle: list[LoadConnection] = []  # the last one used is taken first
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._opening: set[asyncio.Task[None]] = set()
        self.opened_count = 0

    def submit(self, row: int, request: bytes) -> None:
        """Send it now, or as soon as a connection is free."""
        if self._idle:
            self._send(self._idle.pop(), row, request)
        else:
            self._waiting.append((row, request))
            self._grow()

    def sweep(self) -> None:
        """Give up what has taken too long. Call it often."""
        due_ns = monotonic_ns() - self._start_ns - self._timeout_ns
        rows = self._rows
        late = [c for c in self._open if c.row != IDLE and rows.intended_ns[c.row] <= due_ns]
        for connection in late:
            row = connection.row
            self._open.discard(connection)
            connection.abort()
            self._give_up(row)
        while self._waiting and rows.intended_ns[self._waiting[0][0]] <= due_ns:
            self._give_up(self._waiting.popleft()[0])
        self._grow()

    async def close(self) -> None:
        """Close everything, whatever is under way."""
        for task in self._opening:
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        for connection in self._open:
            connection.abort()
        self._open.clear()
        await asyncio.sleep(0)  # transports end in the next turn of the loop

    def opened(self, connection: LoadConnection) -> None:
        """Called by a connection."""
        self.opened_count += 1
        self._open.add(connection)
        self._use(connection)

    def answered(self, connection: LoadConnection, row: int) -> None:
        """Called by a connection."""
        now_ns = monotonic_ns() - self._start_ns
        self._rows.answer(row, now_ns, connection.status, connection.outcome, connection.timing)
        if connection.is_usable:
            self._use(connection)
        else:
            self._open.discard(connection)
            self._grow()
        self._on_end()

    def lost(self, connection: LoadConnection, row: int) -> None:
        """Called by a connection."""
        self._open.discard(connection)
        if row != IDLE:
            self._rows.give_up(row, monotonic_ns() - self._start_ns, FailureReason.LOST)
            self._on_end()
        elif connection in self._idle:
            self._idle.remove(connection)
        self._grow()

    def _use(self, connection: LoadConnection) -> None:
        if self._waiting:
            self._send(connection, *self._waiting.popleft())
        else:
            self._idle.append(connection)

    def _send(self, connection: LoadConnection, row: int, request: bytes) -> None:
        self._rows.sent_ns[row] = monotonic_ns() - self._start_ns
        connection.send(row, request)

    def _grow(self) -> None:
        """Open one more connection if a request waits that none of those under way is for."""
        opening = len(self._opening)
        if opening < len(self._waiting) and opening + len(self._open) < self._connections_max:
            task = self._loop.create_task(self._connect())
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _connect(self) -> None:
        address = self._address
        secure = True if address.is_secure else None
        try:
            await self._loop.create_connection(
                lambda: LoadConnection(self), address.host, address.port, ssl=secure
            )
        except OSError:
            # It was opened for some request, and none can be told from another: the oldest pays.
            if self._waiting:
                row, _ = self._waiting.popleft()
                self._rows.give_up(row, monotonic_ns() - self._start_ns, FailureReason.REFUSED)
                self._on_end()

    def _give_up(self, row: int) -> None:
        ended_ns = self._rows.intended_ns[row] + self._timeout_ns
        self._rows.give_up(row, ended_ns, FailureReason.TIMED_OUT)
        self._on_end()


# The run as a whole: its event loop, its timeouts, and the word on how it goes.


R = TypeVar("R")
OnStanding = Callable[[LoadProgress], None]
_SWEEP_S: Final = 0.02  # how exactly timeouts are kept
_STANDING_TURNS: Final = 12  # of sweeps, between two words on how it goes


async def sweep_until_done(
    done: asyncio.Event,
    pool: ConnectionPool,
    tally: ProgressCounter,
    on_standing: OnStanding | None,
) -> None:
    """Give up what takes too long, and tell how it goes, until all is done."""
    start_ns = monotonic_ns()
    turn = 0
    while not done.is_set():
        turn += 1
        try:
            await asyncio.wait_for(done.wait(), _SWEEP_S)
        except TimeoutError:
            pool.sweep()
        if on_standing is not None and turn % _STANDING_TURNS == 0:
            on_standing(tally.update(monotonic_ns() - start_ns))


def run_in_loop(main: Coroutine[Any, Any, R]) -> R:
    """Run it to its end in a fast event loop, undisturbed by the garbage collector."""
    with _no_collections(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


@contextmanager
def _no_collections() -> Iterator[None]:
    """A collection may stop the sender for longer than an answer takes."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
