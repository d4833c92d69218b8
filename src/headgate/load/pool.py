"""The connections of one run: as many as are needed at once, up to a bound."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic_ns
from typing import final

from headgate.load.address import Address
from headgate.load.connection import IDLE, Connection
from headgate.load.rows import Rows, Trouble


@final
class Pool:
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
        self._open: set[Connection] = set()
        self._idle: list[Connection] = []  # the last one used is taken first
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

    def opened(self, connection: Connection) -> None:
        """Called by a connection."""
        self.opened_count += 1
        self._open.add(connection)
        self._use(connection)

    def answered(self, connection: Connection, row: int) -> None:
        """Called by a connection."""
        now_ns = monotonic_ns() - self._start_ns
        self._rows.answer(row, now_ns, connection.status, connection.outcome, connection.timing)
        if connection.is_usable:
            self._use(connection)
        else:
            self._open.discard(connection)
            self._grow()
        self._on_end()

    def lost(self, connection: Connection, row: int) -> None:
        """Called by a connection."""
        self._open.discard(connection)
        if row != IDLE:
            self._rows.give_up(row, monotonic_ns() - self._start_ns, Trouble.LOST)
            self._on_end()
        elif connection in self._idle:
            self._idle.remove(connection)
        self._grow()

    def _use(self, connection: Connection) -> None:
        if self._waiting:
            self._send(connection, *self._waiting.popleft())
        else:
            self._idle.append(connection)

    def _send(self, connection: Connection, row: int, request: bytes) -> None:
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
                lambda: Connection(self), address.host, address.port, ssl=secure
            )
        except OSError:
            # It was opened for some request, and none can be told from another: the oldest pays.
            if self._waiting:
                row, _ = self._waiting.popleft()
                self._rows.give_up(row, monotonic_ns() - self._start_ns, Trouble.REFUSED)
                self._on_end()

    def _give_up(self, row: int) -> None:
        ended_ns = self._rows.intended_ns[row] + self._timeout_ns
        self._rows.give_up(row, ended_ns, Trouble.TIMED_OUT)
        self._on_end()
