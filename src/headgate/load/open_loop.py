"""Open-loop load: every request is sent at its own time, whatever became of those before it.

A client that waits for an answer before it sends the next request slows down together with the
server, and then measures how fast it is asked rather than how long people wait ("coordinated
omission"). Here the times are fixed beforehand, and latency counts from them.
"""

from __future__ import annotations

import asyncio
from time import monotonic_ns
from typing import Final

from headgate.core.clock import MILLISECOND_NS
from headgate.load.address import parse_address
from headgate.load.alarm import Alarm
from headgate.load.options import LoadOptions, Requests
from headgate.load.pool import Pool
from headgate.load.result import LoadResult, make_result
from headgate.load.rows import Rows
from headgate.load.tally import Tally
from headgate.load.watch import OnStanding, run_in_loop, watch
from headgate.workload.arrivals import Arrivals

_HEADWAY_NS: Final = 20 * MILLISECOND_NS  # so that the first request is not late already


def run_open_loop(
    url: str,
    arrivals: Arrivals,
    options: LoadOptions | None = None,
    *,
    on_standing: OnStanding | None = None,
) -> LoadResult:
    """Send the arrivals to a server and return what became of each.

    What the server does is in the result; raises ConfigError for what cannot be sent at all.
    """
    options = options or LoadOptions()
    address = parse_address(url)
    requests = Requests(address, options)
    kinds = list(zip(arrivals.pipeline.tolist(), arrivals.sizes.tolist(), strict=True))
    bytes_of = {kind: requests.of(arrivals.pipelines[kind[0]], kind[1]) for kind in set(kinds)}
    to_send = [bytes_of[kind] for kind in kinds]

    async def main() -> LoadResult:
        rows = Rows()
        start_ns = monotonic_ns() + _HEADWAY_NS
        sender = _Sender(arrivals.times_ns.tolist(), to_send, rows, start_ns)
        pool = Pool(
            address,
            rows,
            start_ns=start_ns,
            connections_max=options.connections_max,
            timeout_ns=options.timeout_ns,
            on_end=sender.on_end,
        )
        try:
            sender.begin(pool)
            await watch(sender.done, pool, Tally(rows, options.slo_ns), on_standing)
        finally:
            sender.close()
            await pool.close()
        return make_result(
            rows,
            arrivals.pipeline,
            arrivals.client,
            (arrivals.pipelines, arrivals.clients),
            window_ns=arrivals.duration_ns,
            slo_ns=options.slo_ns,
            connections=pool.opened_count,
        )

    return run_in_loop(main())


class _Sender:
    """Hands requests to the pool as they fall due."""

    def __init__(
        self, times_ns: list[int], to_send: list[bytes], rows: Rows, start_ns: int
    ) -> None:
        self._times_ns = times_ns
        self._to_send = to_send
        self._rows = rows
        self._start_ns = start_ns
        self._pool: Pool | None = None
        self._alarm = Alarm(asyncio.get_running_loop(), self._send_due)
        self.done = asyncio.Event()

    def begin(self, pool: Pool) -> None:
        """Send from now on."""
        self._pool = pool
        self.on_end()
        self._send_due()

    def on_end(self) -> None:
        """Called when a request has ended."""
        if len(self._rows.ended) == len(self._times_ns):
            self.done.set()

    def close(self) -> None:
        self._alarm.close()

    def _send_due(self) -> None:
        assert self._pool is not None
        rows, times_ns, to_send = self._rows, self._times_ns, self._to_send
        submit = self._pool.submit
        total, row = len(times_ns), len(rows)
        now_ns = monotonic_ns() - self._start_ns
        while row < total and times_ns[row] <= now_ns:
            rows.add(times_ns[row], now_ns)
            submit(row, to_send[row])
            row += 1
            now_ns = monotonic_ns() - self._start_ns
        if row < total:
            self._alarm.set(self._start_ns + times_ns[row])
