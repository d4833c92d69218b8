"""The two loops of load: open and closed.

Open loop: every request is sent at its own time, whether or not earlier ones have ended. A client
that waits for a response before it sends the next request slows down together with the server, and
so leaves out the requests that would have waited longest ("coordinated omission"). Here the times
are fixed beforehand, and latency counts from them.

Closed loop: each client sends its next request when its previous one is answered. This measures the
capacity of a server, to compare it with others. It hides queueing: a server that stops responding
also receives no more requests, so the latencies say little about what users see.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from time import CLOCK_MONOTONIC, monotonic_ns
from typing import Final, final

import numpy as np

from headgate.core.clock import MILLISECOND_NS, SECOND_NS
from headgate.core.errors import ConfigError
from headgate.loadgen.connections import ConnectionPool, OnProgress, run_in_loop, sweep_until_done
from headgate.loadgen.requests import Address, EncodedRequests, LoadOptions, parse_address
from headgate.loadgen.results import FailureReason, LoadResult, ProgressCounter, Rows, make_result
from headgate.workload.arrivals import DEFAULT_NAME, Arrivals, arrivals_at

_ABSOLUTE: Final = 1  # TFD_TIMER_ABSTIME
_LEAD_NS: Final = 20 * MILLISECOND_NS  # between the set-up and time 0: the first request is in time
_PAUSE_S: Final = 0.02  # after a failure: a dead server must not cause a tight loop


class PreciseTimer:
    """Calls `callback` once for each `set`; a later `set` replaces an earlier one. Linux only.

    Precise to some microseconds: the timers of event loops count whole milliseconds, which is
    longer than many responses take, while those of the kernel (timerfd) count nanoseconds.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._settime = libc.timerfd_settime
        self._spec = _Spec()
        self._callback = callback
        self._loop = loop
        self._fd: int = libc.timerfd_create(CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        loop.add_reader(self._fd, self._on_readable)

    def set(self, at_ns: int) -> None:
        """Call back at this time of the monotonic clock, or at once if it has passed."""
        spec = self._spec
        # Zero would disarm the timer.
        spec.at_s, spec.at_ns = divmod(max(at_ns, 1), SECOND_NS)
        self._settime(self._fd, _ABSOLUTE, ctypes.byref(spec), None)

    def close(self) -> None:
        """Release the descriptor; the callback is never called again."""
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _on_readable(self) -> None:
        with suppress(BlockingIOError):  # the timer has been set anew since it expired
            os.read(self._fd, 8)
            self._callback()


def run_open_loop(
    url: str,
    arrivals: Arrivals,
    options: LoadOptions | None = None,
    *,
    on_progress: OnProgress | None = None,
) -> LoadResult:
    """Send the arrivals to a server and return the result of each request.

    Failures of the server are part of the result; raises ConfigError if a request cannot be made.
    """
    options = options or LoadOptions()
    address = parse_address(url)
    requests = EncodedRequests(address, options)
    kinds = list(zip(arrivals.pipeline.tolist(), arrivals.sizes.tolist(), strict=True))
    bytes_of = {kind: requests.of(arrivals.pipelines[kind[0]], kind[1]) for kind in set(kinds)}
    to_send = [bytes_of[kind] for kind in kinds]
    times_ns = arrivals.times_ns.tolist()
    rows, connections = _run(
        address, options, lambda: _ScheduledSender(times_ns, to_send), on_progress
    )
    return make_result(rows, arrivals, options, connections)


def run_closed_loop(
    url: str,
    concurrency: int,
    duration_ns: int,
    options: LoadOptions | None = None,
    *,
    warm_up_ns: int = 0,
    on_progress: OnProgress | None = None,
) -> LoadResult:
    """Keep `concurrency` requests in flight and return those sent after the warm-up.

    Times count from the end of the warm-up, and the window is `duration_ns`.
    """
    if concurrency < 1:
        raise ConfigError("must be positive", key="concurrency", value=concurrency)
    options = replace(options or LoadOptions(), connections_max=concurrency)
    address = parse_address(url)
    request = EncodedRequests(address, options).of(DEFAULT_NAME, 1)
    rows, connections = _run(
        address,
        options,
        lambda: _Clients(request, concurrency, duration_ns, warm_up_ns),
        on_progress,
    )
    first = bisect_left(rows.intended_ns, 0)  # times of the warm-up are negative
    sent_ns = np.array(rows.intended_ns[first:])
    sent = replace(arrivals_at(sent_ns, duration_ns), pipelines=(options.model or DEFAULT_NAME,))
    return make_result(rows, sent, options, connections, first=first, is_closed_loop=True)


def _run(
    address: Address,
    options: LoadOptions,
    make_sender: Callable[[], _Sender],  # called when the event loop runs
    on_progress: OnProgress | None,
) -> tuple[Rows, int]:
    """Run until every request has ended; return the rows and the number of connections opened."""

    async def main() -> tuple[Rows, int]:
        sender = make_sender()
        rows = sender.rows
        pool = ConnectionPool(address, rows, options, sender.start_ns, sender.on_end)
        try:
            sender.begin(pool)
            await sweep_until_done(
                sender.done, pool, ProgressCounter(rows, options.slo_ns), on_progress
            )
        finally:
            sender.close()
            await pool.close()
        return rows, pool.opened_count

    return run_in_loop(main())


class _Sender:
    """Passes requests to the connection pool. Created inside the running loop."""

    def __init__(self, lead_ns: int) -> None:
        self.rows = Rows()
        self.start_ns = monotonic_ns() + lead_ns
        self.done = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._pool: ConnectionPool | None = None

    def begin(self, pool: ConnectionPool) -> None:
        self._pool = pool

    def on_end(self) -> None:
        """Called when a request has ended."""

    def close(self) -> None:
        """Release what the sender holds."""


@final
class _ScheduledSender(_Sender):
    """Passes each request on when it is due."""

    def __init__(self, times_ns: list[int], to_send: list[bytes]) -> None:
        super().__init__(_LEAD_NS)
        self._times_ns = times_ns
        self._to_send = to_send
        self._timer = PreciseTimer(self._loop, self._send_due)

    def begin(self, pool: ConnectionPool) -> None:
        super().begin(pool)
        self.on_end()
        self._send_due()

    def on_end(self) -> None:
        if len(self.rows.ended) == len(self._times_ns):
            self.done.set()

    def close(self) -> None:
        self._timer.close()

    def _send_due(self) -> None:
        assert self._pool is not None
        rows, times_ns, to_send = self.rows, self._times_ns, self._to_send
        submit = self._pool.submit
        total, row = len(times_ns), len(rows)
        now_ns = monotonic_ns() - self.start_ns
        while row < total and times_ns[row] <= now_ns:
            rows.add(times_ns[row], now_ns)
            submit(row, to_send[row])
            row += 1
            now_ns = monotonic_ns() - self.start_ns
        if row < total:
            self._timer.set(self.start_ns + times_ns[row])


@final
class _Clients(_Sender):
    """The clients of a run: one request is sent for each that ends, until the time is up."""

    def __init__(self, request: bytes, concurrency: int, duration_ns: int, lead_ns: int) -> None:
        super().__init__(lead_ns)
        self._request = request
        self._running = concurrency
        self._duration_ns = duration_ns

    def begin(self, pool: ConnectionPool) -> None:
        super().begin(pool)
        for _ in range(self._running):
            self._next()

    def on_end(self) -> None:
        rows = self.rows
        if rows.failure[rows.ended[-1]] == FailureReason.NONE:
            self._next()
        else:
            self._loop.call_later(_PAUSE_S, self._next)

    def _next(self) -> None:
        now_ns = monotonic_ns() - self.start_ns
        if now_ns >= self._duration_ns:
            self._running -= 1
            if not self._running:
                self.done.set()
            return
        assert self._pool is not None
        self._pool.submit(self.rows.add(now_ns, now_ns), self._request)


class _Spec(ctypes.Structure):
    """`struct itimerspec`: the interval, then the first expiry."""

    _fields_ = (
        ("every_s", ctypes.c_long),
        ("every_ns", ctypes.c_long),
        ("at_s", ctypes.c_long),
        ("at_ns", ctypes.c_long),
    )
