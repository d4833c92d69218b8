"""Fills the columns of a run while it runs: preallocated arrays, one store per fact."""

from __future__ import annotations

from array import array
from typing import final

import numpy as np

from headgate.core.clock import NEVER_NS
from headgate.core.records import STAGES_MAX
from headgate.metrics.columns import RequestColumns, SpanColumns


@final
class Recorder:
    """One row per request (by request id) and, if wanted, one per span of work."""

    def __init__(self, records_spans: bool, size: int = 1024) -> None:
        self.count = 0
        self.records_spans = records_spans
        self._size = 0
        self.arrival_ns = array("q")
        self.started_ns = array("q")
        self.finished_ns = array("q")
        self.deadline_ns = array("q")
        self.outcome = array("b")
        self.pipeline = array("i")
        self.client = array("i")
        self.attempts = array("i")
        self.cold = array("b")
        self._grow(size)
        self._spans = [array(code) for code in "iibqqqi"]

    def arrived(self, now_ns: int, pipeline: int, client: int, deadline_ns: int) -> int:
        """Open a row and return its number: the request's id."""
        row = self.count
        if row == self._size:
            self._grow(self._size)
        self.count = row + 1
        self.arrival_ns[row] = now_ns
        self.deadline_ns[row] = deadline_ns
        self.pipeline[row] = pipeline
        self.client[row] = client
        return row

    def began(self, now_ns: int, task_ids: list[int]) -> None:
        """A worker begins to run these tasks."""
        started_ns = self.started_ns
        for task_id in task_ids:
            row = task_id // STAGES_MAX
            self.attempts[row] += 1
            started_ns[row] = min(started_ns[row], now_ns)

    def waits_for_start(self, now_ns: int, task_ids: list[int]) -> None:
        """A worker begins to start an instance, or to load one, that these tasks wait for."""
        for task_id in task_ids:
            row = task_id // STAGES_MAX
            self.cold[row] = 1
            self.started_ns[row] = min(self.started_ns[row], now_ns)

    def settled(self, now_ns: int, request_id: int, outcome: int) -> None:
        """A request has ended."""
        self.finished_ns[request_id] = now_ns
        self.outcome[request_id] = outcome

    def span(
        self, node: int, function: int, kind: int, start_ns: int, end_ns: int, id: int, items: int
    ) -> None:
        """Something was done on a node."""
        if self.records_spans:
            for column, value in zip(
                self._spans, (node, function, kind, start_ns, end_ns, id, items), strict=True
            ):
                column.append(value)

    def requests(self) -> RequestColumns:
        """The rows so far, without copying."""
        n = self.count
        return RequestColumns(
            arrival_ns=np.frombuffer(self.arrival_ns, dtype=np.int64)[:n],
            started_ns=np.frombuffer(self.started_ns, dtype=np.int64)[:n],
            finished_ns=np.frombuffer(self.finished_ns, dtype=np.int64)[:n],
            deadline_ns=np.frombuffer(self.deadline_ns, dtype=np.int64)[:n],
            outcome=np.frombuffer(self.outcome, dtype=np.int8)[:n],
            pipeline=np.frombuffer(self.pipeline, dtype=np.int32)[:n],
            client=np.frombuffer(self.client, dtype=np.int32)[:n],
            attempts=np.frombuffer(self.attempts, dtype=np.int32)[:n],
            cold=np.frombuffer(self.cold, dtype=np.int8)[:n],
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

    def _grow(self, by: int) -> None:
        self._size += by
        zeros = bytes(8 * by)
        never = array("q", [NEVER_NS]) * by
        self.arrival_ns.frombytes(zeros)
        self.deadline_ns.frombytes(zeros)
        self.started_ns.extend(never)
        self.finished_ns.extend(never)
        for column in (self.pipeline, self.client, self.attempts):
            column.frombytes(bytes(4 * by))
        for column in (self.outcome, self.cold):
            column.frombytes(bytes(by))
