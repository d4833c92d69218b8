"""Connections of a load run: one keep-alive connection, the pool of them, and the run loop."""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from time import monotonic_ns
from typing import Any, Final, TypeVar, cast, final

import uvloop
from httptools import HttpParserError, HttpResponseParser

from headgate.loadgen.requests import Address, LoadOptions
from headgate.loadgen.results import FailureReason, LoadProgress, ProgressCounter, Rows

R = TypeVar("R")
OnProgress = Callable[[LoadProgress], None]

IDLE: Final = -1
_SWEEP_S: Final = 0.02  # precision of timeouts
_PROGRESS_TURNS: Final = 12  # sweeps between two progress reports


class LoadConnection(asyncio.Protocol):
    """One keep-alive connection, with one request at a time: `row` is the one in flight.

    Written for speed: a request is one `write` of bytes encoded beforehand, a response is parsed
    by httptools, and neither costs a task, a future or an object.
    """

    __slots__ = ("_parser", "_pool", "_transport", "outcome", "row", "status", "timing")

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._parser = HttpResponseParser(self)
        self.row = IDLE
        self.status = 0
        self.outcome = b""  # X-Headgate-Outcome of the response
        self.timing = b""  # Server-Timing of the response

    @property
    def is_usable(self) -> bool:
        """Whether another request may be sent."""
        return self._transport is not None and self.row == IDLE

    def send(self, row: int, request: bytes) -> None:
        assert self._transport is not None and self.row == IDLE
        self.row = row
        self.outcome = self.timing = b""
        self._transport.write(request)

    def abort(self) -> None:
        """Close the connection without notifying the pool."""
        self.row = IDLE
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._pool.on_open(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop, also after `abort`."""
        if self._transport is not None:
            self._transport = None
            row, self.row = self.row, IDLE
            self._pool.on_lost(self, row)

    def data_received(self, data: bytes) -> None:
        if self.row == IDLE:  # data that no request has asked for
            self._drop()
            return
        try:
            self._parser.feed_data(data)
        except HttpParserError:
            self._drop()

    def on_header(self, name: bytes, value: bytes) -> None:
        length = len(name)  # rules out most headers at once
        if length == 18 and name.lower() == b"x-headgate-outcome":
            self.outcome = value
        elif length == 13 and name.lower() == b"server-timing":
            self.timing = value

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # 100 Continue and the like: the response is still to come
            return
        self.status = status
        row, self.row = self.row, IDLE
        if row == IDLE:  # a second response to one request
            return
        if not self._parser.should_keep_alive():
            transport, self._transport = self._transport, None
            if transport is not None:
                transport.close()
        self._pool.on_response(self, row)

    def _drop(self) -> None:
        """Close the connection; `connection_lost` follows."""
        if self._transport is not None:
            self._transport.abort()


@final
class ConnectionPool:
    """The connections of one run: as many as are needed at once, up to `connections_max`.

    Every request in flight has a connection of its own; a request that finds none free waits, first
    come, first served. Failures of the server never raise: they are recorded in the rows. `on_end`
    is called after a row has ended. Must be created inside the running loop, and closed.
    """

    def __init__(
        self,
        address: Address,
        rows: Rows,
        options: LoadOptions,
        start_ns: int,
        on_end: Callable[[], None],
    ) -> None:
        self._address = address
        self._rows = rows
        self._start_ns = start_ns
        self._connections_max = options.connections_max
        self._timeout_ns = options.timeout_ns
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._open: set[LoadConnection] = set()
        self._idle: list[LoadConnection] = []  # a stack: the one used last is reused first
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._opening: set[asyncio.Task[None]] = set()
        self.opened_count = 0

    def submit(self, row: int, request: bytes) -> None:
        """Send a request now, or as soon as a connection is free."""
        if self._idle:
            self._send(self._idle.pop(), row, request)
        else:
            self._waiting.append((row, request))
            self._grow()

    def sweep(self) -> None:
        """Time out requests that are overdue. Call it often: it sets the precision of timeouts."""
        due_ns = monotonic_ns() - self._start_ns - self._timeout_ns
        rows = self._rows
        late = [c for c in self._open if c.row != IDLE and rows.intended_ns[c.row] <= due_ns]
        for connection in late:
            row = connection.row
            self._open.discard(connection)
            connection.abort()
            self._time_out(row)
        while self._waiting and rows.intended_ns[self._waiting[0][0]] <= due_ns:
            self._time_out(self._waiting.popleft()[0])
        self._grow()

    async def close(self) -> None:
        """Close all connections, also those with a request in flight."""
        for task in self._opening:
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        for connection in self._open:
            connection.abort()
        self._open.clear()
        await asyncio.sleep(0)  # transports close in the next iteration of the event loop

    def on_open(self, connection: LoadConnection) -> None:
        """Use a connection that has been established."""
        self.opened_count += 1
        self._open.add(connection)
        self._use(connection)

    def on_response(self, connection: LoadConnection, row: int) -> None:
        """Record the complete response to request `row`, and reuse the connection."""
        now_ns = monotonic_ns() - self._start_ns
        self._rows.complete(row, now_ns, connection.status, connection.outcome, connection.timing)
        if connection.is_usable:
            self._use(connection)
        else:
            self._open.discard(connection)
            self._grow()
        self._on_end()

    def on_lost(self, connection: LoadConnection, row: int) -> None:
        """Forget a closed connection. `row` is the request that was not answered, or IDLE."""
        self._open.discard(connection)
        if row != IDLE:
            self._rows.fail(row, monotonic_ns() - self._start_ns, FailureReason.LOST)
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
        """Open one more connection if more requests wait than connections are being opened."""
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
            # The connection was not opened for a particular request: the oldest one fails.
            if self._waiting:
                row, _ = self._waiting.popleft()
                self._rows.fail(row, monotonic_ns() - self._start_ns, FailureReason.REFUSED)
                self._on_end()

    def _time_out(self, row: int) -> None:
        ended_ns = self._rows.intended_ns[row] + self._timeout_ns
        self._rows.fail(row, ended_ns, FailureReason.TIMED_OUT)
        self._on_end()


async def sweep_until_done(
    done: asyncio.Event,
    pool: ConnectionPool,
    progress: ProgressCounter,
    on_progress: OnProgress | None,
) -> None:
    """Time out overdue requests and report the progress until `done` is set."""
    start_ns = monotonic_ns()
    turn = 0
    while not done.is_set():
        turn += 1
        try:
            await asyncio.wait_for(done.wait(), _SWEEP_S)
        except TimeoutError:
            pool.sweep()
        if on_progress is not None and turn % _PROGRESS_TURNS == 0:
            on_progress(progress.update(monotonic_ns() - start_ns))


def run_in_loop(main: Coroutine[Any, Any, R]) -> R:
    """Run a coroutine in a uvloop event loop, with the garbage collector switched off."""
    with _garbage_collector_paused(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


@contextmanager
def _garbage_collector_paused() -> Iterator[None]:
    """Switch the garbage collector off: a collection may take longer than a response does."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
