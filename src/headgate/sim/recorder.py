"""Records the requests and the spans of a run, and builds the columns of the run.

What nearly every request does (begin once, end once, in time) is stored directly in its row,
through memory views: a store into a numpy array costs more than twice as much. The rare rest is
appended to lists, which are merged into the rows when the columns are built.
"""

from __future__ import annotations

from array import array
from typing import Final, final

import numpy as np

from headgate.core.clock import HOUR_NS, NEVER_NS
from headgate.core.model import App
from headgate.core.records import STAGES_MAX
from headgate.core.states import OUTCOME_MET, Settlement
from headgate.metrics.columns import (
    NOWHERE,
    SPAN_CODES,
    Int32,
    Int64,
    RequestColumns,
    SpanColumns,
    build_requests,
    build_spans,
)
from headgate.sim.event_queue import EventQueue

PATIENCE_NS: Final = 25 * HOUR_NS  # longer than until a spent budget of a day is there again


@final
class Recorder:
    """One row per request (by request id) and, if `records_spans`, one per span of work.

    In a purely open-loop run the arrivals are known beforehand, row by row, and need not be
    recorded: then `records_arrivals` is off.
    """

    def __init__(self, *, records_arrivals: bool, records_spans: bool, size: int) -> None:
        self.count = 0  # requests that have arrived
        self.ended = 0  # requests that have been settled
        self.records_arrivals = records_arrivals
        self.records_spans = records_spans
        self.arrival_ns = array("q")
        self.pipeline = array("i")
        self.client = array("i")
        self._own_deadline_rows = array("q")  # requests whose client set the deadline
        self._own_deadline_ns = array("q")
        self._started = np.full(size, NEVER_NS, dtype=np.int64)
        self._finished = np.full(size, NEVER_NS, dtype=np.int64)
        self._started_ns = self._started.data
        self._finished_ns = self._finished.data
        # The node or the platform on which a request began to run last, as a row of the resources.
        self._places = np.full(size, NOWHERE, dtype=np.int32)
        self._place_of = self._places.data
        self._retry_rows = array("q")  # one entry for every attempt after the first of a request
        self._cold_rows = array("q")
        self._cold_ns = array("q")
        self._other_rows = array("q")  # requests whose outcome is not MET
        self._other_outcomes = array("b")
        self._would_reject_rows = array("q")
        self._spans = [array(code) for code in SPAN_CODES.values()]

    def arrived(self, now_ns: int, pipeline: int, client: int, timeout_ns: int = 0) -> None:
        """Record an arrival that was not known beforehand, in the last row."""
        if timeout_ns:
            self._own_deadline_rows.append(len(self.arrival_ns))
            self._own_deadline_ns.append(now_ns + timeout_ns)
        self.arrival_ns.append(now_ns)
        self.pipeline.append(pipeline)
        self.client.append(client)
        if self.count > len(self._started):
            self._grow()

    def began(self, now_ns: int, place: int, task_ids: list[int]) -> None:
        """Record that a node or a platform, a row of the resources, begins to run these tasks."""
        started_ns = self._started_ns
        place_of = self._place_of
        for task_id in task_ids:
            row = task_id // STAGES_MAX
            place_of[row] = place
            if started_ns[row] == NEVER_NS:
                started_ns[row] = now_ns
            else:
                self._retry_rows.append(row)

    def waiting_for_start(self, now_ns: int, task_ids: list[int]) -> None:
        """Record that these tasks wait for the start of an instance or a load of weights."""
        for task_id in task_ids:
            self._cold_rows.append(task_id // STAGES_MAX)
            self._cold_ns.append(now_ns)

    def settled(self, now_ns: int, request_id: int, settlement: Settlement) -> None:
        """Record how a request ended."""
        self.ended += 1
        self._finished_ns[request_id] = now_ns
        if settlement.outcome != OUTCOME_MET:
            self._other_rows.append(request_id)
            self._other_outcomes.append(settlement.outcome)

    def would_reject(self, request_id: int) -> None:
        """Record that the policy rejected a request while admission was only observed."""
        self._would_reject_rows.append(request_id)

    def span(
        self, node: int, function: int, kind: int, start_ns: int, end_ns: int, id: int, items: int
    ) -> None:
        """Record a span of work on a node or a platform, unless spans are not recorded."""
        if self.records_spans:
            for column, value in zip(
                self._spans, (node, function, kind, start_ns, end_ns, id, items), strict=True
            ):
                column.append(value)

    def progress(self) -> int:
        """Return a number that grows when a request ends, or an attempt begins. O(requests)."""
        begun = int(np.count_nonzero(self._started != NEVER_NS))
        return self.ended + begun + len(self._retry_rows)

    def open_rows(self) -> list[int]:
        """Return the requests that have arrived and not ended. O(requests)."""
        rows: list[int] = np.flatnonzero(self._finished[: self.count] == NEVER_NS).tolist()
        return rows

    def requests(
        self, app: App, arrival_ns: Int64, pipeline: Int32, client: Int32
    ) -> RequestColumns:
        """Return the rows so far; the arguments are the arrivals that were known beforehand."""
        n = self.count
        if self.records_arrivals:
            arrival_ns = np.array(self.arrival_ns, dtype=np.int64)
            pipeline = np.array(self.pipeline, dtype=np.int32)
            client = np.array(self.client, dtype=np.int32)
        attempts = (self._started[:n] != NEVER_NS).astype(np.int32)
        np.add.at(
            attempts, np.array(self._retry_rows), np.ones(len(self._retry_rows), dtype=np.int32)
        )
        # A request has started when the first work for it began, and a cold start is work.
        started_ns = self._started[:n].copy()
        cold_rows = np.array(self._cold_rows)
        np.minimum.at(started_ns, cold_rows, np.array(self._cold_ns))
        cold = np.zeros(n, dtype=np.int8)
        cold[cold_rows] = 1
        outcome = np.full(n, OUTCOME_MET, dtype=np.int8)
        outcome[np.array(self._other_rows)] = np.array(self._other_outcomes)
        would_reject = np.zeros(n, dtype=np.int8)
        would_reject[np.array(self._would_reject_rows)] = 1
        deadline_ns = _deadlines(app, arrival_ns[:n], pipeline[:n])
        if self._own_deadline_rows:
            deadline_ns = deadline_ns.copy()
            deadline_ns[np.array(self._own_deadline_rows)] = np.array(self._own_deadline_ns)
        pool, node = _places(app, self._places[:n])
        return build_requests(
            arrival_ns[:n],
            started_ns=started_ns,
            finished_ns=self._finished[:n],
            deadline_ns=deadline_ns,
            outcome=outcome,
            pipeline=pipeline[:n],
            client=client[:n],
            attempts=attempts,
            cold=cold,
            pool=pool,
            node=node,
            would_reject=would_reject,
        )

    def spans(self) -> SpanColumns:
        return build_spans(**dict(zip(SPAN_CODES, self._spans, strict=True)))

    def _grow(self) -> None:
        """Double the capacity: appending a row costs amortized O(1)."""
        more = np.full(max(self.count, 1_024), NEVER_NS, dtype=np.int64)
        self._started = np.concatenate((self._started, more))
        self._finished = np.concatenate((self._finished, more))
        nowhere = np.full(len(more), NOWHERE, dtype=np.int32)
        self._places = np.concatenate((self._places, nowhere))
        self._started_ns = self._started.data
        self._finished_ns = self._finished.data
        self._place_of = self._places.data


@final
class StarvationWatch:
    """Tells when requests wait and nothing happens for them any more.

    A policy that starves a request, and wakes up now and then, would be simulated for ever: a
    request without a hard deadline never expires. A look costs O(requests), once in `PATIENCE_NS`.
    """

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


def _places(app: App, places: Int32) -> tuple[Int32, Int32]:
    """Return pool and node of each request. The resources are the nodes, then the platforms."""
    pools = [pool.id for pool in app.pools if pool.faas is None for _ in range(pool.nodes)]
    nodes = list(range(len(pools)))
    platforms = [pool.id for pool in app.pools if pool.faas is not None]
    # NOWHERE, which is -1, is the last entry.
    pool_of = np.array([*pools, *platforms, NOWHERE], dtype=np.int32)
    node_of = np.array([*nodes, *(NOWHERE for _ in platforms), NOWHERE], dtype=np.int32)
    return pool_of[places], node_of[places]


def _deadlines(app: App, arrival_ns: Int64, pipeline: Int32) -> Int64:
    latency_ns = np.array([p.slo.latency_ns for p in app.pipelines], dtype=np.int64)
    if np.all(latency_ns == NEVER_NS):
        return np.broadcast_to(np.int64(NEVER_NS), arrival_ns.shape)
    allowed_ns = latency_ns[pipeline]
    deadline_ns = arrival_ns + np.where(allowed_ns == NEVER_NS, 0, allowed_ns)
    deadline_ns[allowed_ns == NEVER_NS] = NEVER_NS
    return deadline_ns
