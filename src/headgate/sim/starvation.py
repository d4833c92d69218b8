"""Ends a run in which requests wait and nothing happens for them any more.

A policy that starves a request, and wakes up now and then, would be simulated for ever: a request
without a hard deadline never expires. The engine looks once in `PATIENCE_NS`, which costs nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import Final, final

from headgate.core.clock import HOUR_NS, SECOND_NS
from headgate.core.errors import ConfigError
from headgate.metrics.columns import RunColumns
from headgate.sim.event_queue import EventQueue
from headgate.sim.recorder import Recorder

PATIENCE_NS: Final = 25 * HOUR_NS  # longer than until a spent budget of a day is there again
_NAMED_MAX: Final = 5  # pipelines


@final
class Watch:
    """Tells whether anything happened since it looked last."""

    def __init__(self, now_ns: int, queue: EventQueue, recorder: Recorder) -> None:
        self._queue = queue
        self._recorder = recorder
        self._next_ns = now_ns + PATIENCE_NS
        self._progress = recorder.progress()
        self._under_way = queue.under_way()

    def has_stalled(self, now_ns: int) -> bool:
        """Return whether no request began or ended for long, and nothing else is under way.

        A boot, a batch or a client that takes longer is still on the queue. A policy may start and
        stop instances for ever: those are on the queue, too, but never the same ones.
        """
        if now_ns < self._next_ns:
            return False
        progress, under_way = self._recorder.progress(), self._queue.under_way()
        is_stalled = progress == self._progress and not under_way & self._under_way
        self._next_ns = now_ns + PATIENCE_NS
        self._progress, self._under_way = progress, under_way
        return is_stalled


def starvation_error(columns: RunColumns, open_rows: list[int]) -> ConfigError:
    """Return the error that names the requests which are still waiting."""
    requests = columns.requests
    names = Counter(columns.pipelines[requests.pipeline[row]] for row in open_rows)
    waiting = [f"{count:,} of {name}" for name, count in names.most_common(_NAMED_MAX)]
    if len(names) > _NAMED_MAX:
        waiting.append("...")
    arrived_s, end_s = requests.arrival_ns[open_rows[0]] / SECOND_NS, columns.end_ns / SECOND_NS
    return ConfigError(
        f"requests wait for ever: {', '.join(waiting)}; the first is request {open_rows[0]}, which "
        f"arrived at {arrived_s:.6g} s; the simulation was ended at {end_s:.6g} s"
    )
