"""Closed-loop load: each client sends its next request when its previous one is answered.

This measures the capacity of a server, to compare it with others. It hides queueing: a server that
stops responding also receives no more requests, so the latencies say little about what users see.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from dataclasses import replace
from time import monotonic_ns
from typing import Final

from headgate.core.errors import ConfigError
from headgate.loadgen.connections import ConnectionPool, OnProgress, run_in_loop, sweep_until_done
from headgate.loadgen.requests import EncodedRequests, LoadOptions, parse_address
from headgate.loadgen.results import FailureReason, LoadResult, ProgressCounter, Rows, make_result
from headgate.workload.arrivals import DEFAULT_NAME, constant_column

_PAUSE_S: Final = 0.02  # after a failure: a dead server must not cause a tight loop


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

    async def main() -> LoadResult:
        rows = Rows()
        start_ns = monotonic_ns() + warm_up_ns
        clients = _Clients(rows, request, start_ns, duration_ns)
        pool = ConnectionPool(
            address,
            rows,
            start_ns=start_ns,
            connections_max=concurrency,
            timeout_ns=options.timeout_ns,
            on_end=clients.on_end,
        )
        try:
            clients.begin(pool, concurrency)
            await sweep_until_done(
                clients.done, pool, ProgressCounter(rows, options.slo_ns), on_progress
            )
        finally:
            await pool.close()
        return _result(rows, options, duration_ns, pool.opened_count)

    return run_in_loop(main())


class _Clients:
    """The clients of a run: one request is sent for each that ends, until the time is up."""

    def __init__(self, rows: Rows, request: bytes, start_ns: int, duration_ns: int) -> None:
        self._rows = rows
        self._request = request
        self._start_ns = start_ns
        self._duration_ns = duration_ns
        self._pool: ConnectionPool | None = None
        self._loop = asyncio.get_running_loop()
        self.running = 0
        self.done = asyncio.Event()

    def begin(self, pool: ConnectionPool, concurrency: int) -> None:
        self._pool = pool
        self.running = concurrency
        for _ in range(concurrency):
            self._next()

    def on_end(self) -> None:
        """Called when a request has ended."""
        rows = self._rows
        if rows.failure[rows.ended[-1]] == FailureReason.NONE:
            self._next()
        else:
            self._loop.call_later(_PAUSE_S, self._next)

    def _next(self) -> None:
        now_ns = monotonic_ns() - self._start_ns
        if now_ns >= self._duration_ns:
            self.running -= 1
            if not self.running:
                self.done.set()
            return
        assert self._pool is not None
        self._pool.submit(self._rows.add(now_ns, now_ns), self._request)


def _result(rows: Rows, options: LoadOptions, duration_ns: int, connections: int) -> LoadResult:
    name = options.model or DEFAULT_NAME
    zeros = constant_column(len(rows))
    return make_result(
        rows,
        zeros,
        zeros,
        ((name,), (DEFAULT_NAME,)),
        window_ns=duration_ns,
        slo_ns=options.slo_ns,
        connections=connections,
        first=bisect_left(rows.intended_ns, 0),  # times of the warm-up are negative
        is_closed_loop=True,
    )
