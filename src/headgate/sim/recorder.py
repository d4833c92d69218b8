"""Writes down what happens in a run, and makes the columns of it.

While the run goes on, facts are appended to short lists (that is as fast as Python gets); whenever
these are full, numpy puts them in their places. A store per fact into an array costs several times
as much, most of all in a compiled build.
"""

from __future__ import annotations

from array import array
from typing import Final, final

import numpy as np

from headgate.core.clock import NEVER_NS
from headgate.core.model import App
from headgate.core.records import STAGES_MAX
from headgate.metrics.columns import Int8, Int32, Int64, RequestColumns, SpanColumns

_JOURNAL_MAX: Final = 4_096


@final
class Recorder:
    """One row per request (by request id) and, if wanted, one per span of work.

    In a purely open-loop run the arrivals are known beforehand, row by row, and need not be
    written down again: then `records_arrivals` is off.
    """

    def __init__(self, *, records_arrivals: bool, records_spans: bool, size: int) -> None:
        self.count = 0
        self.records_arrivals = records_arrivals
        self.records_spans = records_spans
        self.arrival_ns = array("q")
        self.pipeline = array("i")
        self.client = array("i")
        self._began_tasks: list[int] = []
        self._began_ns: list[int] = []
        self._cold_tasks: list[int] = []
        self._cold_ns: list[int] = []
        self._settled_rows: list[int] = []
        self._settled_ns: list[int] = []
        self._settled_as: list[int] = []
        self._started_ns: Int64 = np.full(size, NEVER_NS, dtype=np.int64)
        self._finished_ns: Int64 = np.full(size, NEVER_NS, dtype=np.int64)
        self._outcome: Int8 = np.zeros(size, dtype=np.int8)
        self._attempts: Int32 = np.zeros(size, dtype=np.int32)
        self._cold: Int8 = np.zeros(size, dtype=np.int8)
        self._spans = [array(code) for code in "iibqqqi"]

    def arrived(self, now_ns: int, pipeline: int, client: int) -> None:
        """Write down an arrival that was not known beforehand; its row is `count`."""
        self.arrival_ns.append(now_ns)
        self.pipeline.append(pipeline)
        self.client.append(client)

    def began(self, now_ns: int, task_ids: list[int]) -> None:
        """A worker begins to run these tasks."""
        for task_id in task_ids:
            self._began_tasks.append(task_id)
            self._began_ns.append(now_ns)
        if len(self._began_ns) >= _JOURNAL_MAX:
            self._flush()

    def waits_for_start(self, now_ns: int, task_ids: list[int]) -> None:
        """A worker begins to start an instance, or to load one, that these tasks wait for."""
        for task_id in task_ids:
            self._cold_tasks.append(task_id)
            self._cold_ns.append(now_ns)

    def settled(self, now_ns: int, request_id: int, outcome: int) -> None:
        """A request has ended."""
        self._settled_rows.append(request_id)
        self._settled_ns.append(now_ns)
        self._settled_as.append(outcome)
        if len(self._settled_ns) >= _JOURNAL_MAX:
            self._flush()

    def span(
        self, node: int, function: int, kind: int, start_ns: int, end_ns: int, id: int, items: int
    ) -> None:
        """Something was done on a node."""
        if self.records_spans:
            for column, value in zip(
                self._spans, (node, function, kind, start_ns, end_ns, id, items), strict=True
            ):
                column.append(value)

    def open_rows(self) -> list[int]:
        """The requests that have arrived and not ended."""
        self._flush()
        rows: list[int] = np.flatnonzero(self._finished_ns[: self.count] == NEVER_NS).tolist()
        return rows

    def requests(
        self, app: App, arrival_ns: Int64, pipeline: Int32, client: Int32
    ) -> RequestColumns:
        """The rows so far; the arguments are the arrivals that were known beforehand."""
        self._flush()
        n = self.count
        if self.records_arrivals:
            arrival_ns = np.array(self.arrival_ns, dtype=np.int64)
            pipeline = np.array(self.pipeline, dtype=np.int32)
            client = np.array(self.client, dtype=np.int32)
        return RequestColumns(
            arrival_ns=arrival_ns[:n],
            started_ns=self._started_ns[:n],
            finished_ns=self._finished_ns[:n],
            deadline_ns=_deadlines(app, arrival_ns[:n], pipeline[:n]),
            outcome=self._outcome[:n],
            pipeline=pipeline[:n],
            client=client[:n],
            attempts=self._attempts[:n],
            cold=self._cold[:n],
        )

    def spans(self) -> SpanColumns:
        """The spans so far."""
        node, function, kind, start_ns, end_ns, batch, items = self._spans
        return SpanColumns(
            node=np.array(node, dtype=np.int32),
            function=np.array(function, dtype=np.int32),
            kind=np.array(kind, dtype=np.int8),
            start_ns=np.array(start_ns, dtype=np.int64),
            end_ns=np.array(end_ns, dtype=np.int64),
            batch=np.array(batch, dtype=np.int64),
            items=np.array(items, dtype=np.int32),
        )

    def _flush(self) -> None:
        """Put what the journals say into its rows."""
        if self.count > len(self._outcome):
            self._grow(max(self.count, 2 * len(self._outcome)))
        cold = np.array(self._cold_tasks, dtype=np.int64) // STAGES_MAX
        self._cold[cold] = 1
        self._keep_first(cold, self._cold_ns)
        began = np.array(self._began_tasks, dtype=np.int64) // STAGES_MAX
        np.add.at(self._attempts, began, 1)
        self._keep_first(began, self._began_ns)
        settled = np.array(self._settled_rows, dtype=np.int64)
        self._finished_ns[settled] = self._settled_ns
        self._outcome[settled] = self._settled_as
        for journal in (
            self._cold_tasks,
            self._cold_ns,
            self._began_tasks,
            self._began_ns,
            self._settled_rows,
            self._settled_ns,
            self._settled_as,
        ):
            journal.clear()

    def _keep_first(self, rows: Int64, at_ns: list[int]) -> None:
        """A request has started when work for it first began."""
        np.minimum.at(self._started_ns, rows, np.array(at_ns, dtype=np.int64))

    def _grow(self, size: int) -> None:
        more = size - len(self._outcome)
        never = np.full(more, NEVER_NS, dtype=np.int64)
        self._started_ns = np.concatenate((self._started_ns, never))
        self._finished_ns = np.concatenate((self._finished_ns, never))
        self._outcome = np.concatenate((self._outcome, np.zeros(more, dtype=np.int8)))
        self._attempts = np.concatenate((self._attempts, np.zeros(more, dtype=np.int32)))
        self._cold = np.concatenate((self._cold, np.zeros(more, dtype=np.int8)))


def _deadlines(app: App, arrival_ns: Int64, pipeline: Int32) -> Int64:
    latency_ns = np.array([p.slo.latency_ns for p in app.pipelines], dtype=np.int64)
    if np.all(latency_ns == NEVER_NS):
        return np.broadcast_to(np.int64(NEVER_NS), arrival_ns.shape)
    allowed_ns = latency_ns[pipeline]
    deadline_ns = arrival_ns + np.where(allowed_ns == NEVER_NS, 0, allowed_ns)
    deadline_ns[allowed_ns == NEVER_NS] = NEVER_NS
    return deadline_ns
