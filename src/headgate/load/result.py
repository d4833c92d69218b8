"""What a load run measured, as columns, and how that becomes the columns of any other run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headgate.core.clock import MILLISECOND_NS, NEVER_NS
from headgate.core.outcome import Outcome
from headgate.load.rows import UNSAID, Rows, Trouble
from headgate.metrics.columns import (
    Int8,
    Int32,
    Int64,
    RequestColumns,
    RunColumns,
    SpanColumns,
)

Int16 = NDArray[np.int16]
_TIMINGS_MAX: Final = 8  # names of Server-Timing; a server that sends more is not ours
_EXPIRED: Final = (408, 504)
_REJECTED: Final = 429


@dataclass(frozen=True, eq=False)
class LoadResult:
    """One row per request, in order of its intended time.

    Times are nanoseconds since the start; NEVER_NS: it did not happen. Latency counts from the
    intended time, so whatever made a request wait is in it, the sender included.
    """

    intended_ns: Int64
    reached_ns: Int64  # when the sender got to it: later than intended, the sender was too slow
    sent_ns: Int64  # when a connection took it
    ended_ns: Int64  # when its answer was complete, or it was given up
    status: Int16  # 0: there is no answer
    trouble: Int8  # why there is none: one of `Trouble`
    said: Int8  # the outcome that the server named, or UNSAID
    timings_ns: dict[str, Int64]  # the parts of Server-Timing
    pipeline: Int32
    client: Int32
    pipelines: tuple[str, ...]
    clients: tuple[str, ...]
    window_ns: int
    slo_ns: int | None
    connections: int  # how many were opened
    is_closed_loop: bool = False

    def __len__(self) -> int:
        return len(self.intended_ns)

    @cached_property
    def latency_ns(self) -> Int64:
        """From the intended time to the end, whatever the end."""
        return self.ended_ns - self.intended_ns

    @cached_property
    def lag_ns(self) -> Int64:
        """How far the sender was behind its own schedule."""
        return self.reached_ns - self.intended_ns

    @cached_property
    def connection_wait_ns(self) -> Int64:
        """How long each request that was sent had waited for a free connection."""
        was_sent = self.sent_ns != NEVER_NS
        waits_ns: Int64 = self.sent_ns[was_sent] - self.reached_ns[was_sent]
        return waits_ns

    @cached_property
    def outcome(self) -> Int8:
        """One of `Outcome` per request."""
        return classify(self.status, self.trouble, self.said, self.latency_ns, self.slo_ns)

    def to_run(self) -> RunColumns:
        """Return what summaries and reports read. A load run knows nothing of resources."""
        never = np.full(len(self), NEVER_NS, np.int64)
        deadline_ns = never if self.slo_ns is None else self.intended_ns + self.slo_ns
        requests = RequestColumns(
            arrival_ns=self.intended_ns,
            started_ns=self._started_ns(),
            finished_ns=self.ended_ns,
            deadline_ns=deadline_ns,
            outcome=self.outcome,
            pipeline=self.pipeline,
            client=self.client,
            attempts=np.ones(len(self), np.int32),
            cold=np.zeros(len(self), np.int8),
        )
        return RunColumns(
            requests,
            _no_spans(),
            resources=(),
            pipelines=self.pipelines,
            functions=self.pipelines,
            clients=self.clients,
            window_ns=self.window_ns,
            end_ns=int(self.ended_ns.max(initial=self.window_ns)),
        )

    def _started_ns(self) -> Int64:
        """When work began, as far as the server tells: it ran last, just before it answered."""
        exec_ns = self.timings_ns.get("exec")
        if exec_ns is None:
            return np.full(len(self), NEVER_NS, np.int64)
        started_ns = np.maximum(self.ended_ns - exec_ns, self.intended_ns)
        return np.where(exec_ns == NEVER_NS, NEVER_NS, started_ns)


def classify(
    status: Int16, trouble: Int8, said: Int8, latency_ns: Int64, slo_ns: int | None
) -> Int8:
    """Return the outcome of each request.

    An answer is late by the client's own objective, else by what the server says. Anything else is
    what the server says it is; where it says nothing, what its status means.
    """
    outcome = np.full(len(status), Outcome.FAILED, np.int8)
    outcome[status == _REJECTED] = Outcome.REJECTED
    outcome[np.isin(status, _EXPIRED) | (trouble == Trouble.TIMED_OUT)] = Outcome.EXPIRED
    outcome = np.where(said != UNSAID, said, outcome)
    answered = (status >= 200) & (status < 300)
    if slo_ns is not None:
        in_time = latency_ns <= slo_ns
    else:
        in_time = said != Outcome.LATE
    outcome[answered] = np.where(in_time[answered], Outcome.MET, Outcome.LATE)
    return outcome.astype(np.int8)


def make_result(
    rows: Rows,
    pipeline: Int32,
    client: Int32,
    names: tuple[tuple[str, ...], tuple[str, ...]],
    *,
    window_ns: int,
    slo_ns: int | None,
    connections: int,
    first: int = 0,
    is_closed_loop: bool = False,
) -> LoadResult:
    """Return the columns of a run that is over, without the rows before `first`."""
    return LoadResult(
        intended_ns=np.array(rows.intended_ns[first:], np.int64),
        reached_ns=np.array(rows.reached_ns[first:], np.int64),
        sent_ns=np.array(rows.sent_ns[first:], np.int64),
        ended_ns=np.array(rows.ended_ns[first:], np.int64),
        status=np.array(rows.status[first:], np.int16),
        trouble=np.array(rows.trouble[first:], np.int8),
        said=np.array(rows.said[first:], np.int8),
        timings_ns=parse_timings(rows.timing[first:]),
        pipeline=pipeline[first:],
        client=client[first:],
        pipelines=names[0],
        clients=names[1],
        window_ns=window_ns,
        slo_ns=slo_ns,
        connections=connections,
        is_closed_loop=is_closed_loop,
    )


def parse_timings(texts: list[bytes]) -> dict[str, Int64]:
    """Return a column per name of Server-Timing, in nanoseconds; what is no number is left out.

    >>> parse_timings([b"queue;dur=1.5, exec;dur=2", b"exec;dur=1"])["exec"].tolist()
    [2000000, 1000000]
    """
    columns: dict[str, Int64] = {}
    for row, text in enumerate(texts):
        for part in text.split(b",") if text else ():
            name, found, rest = part.partition(b";dur=")
            key = name.strip().decode("latin-1")
            if not found or (key not in columns and len(columns) == _TIMINGS_MAX):
                continue
            try:
                took_ns = round(float(rest.partition(b";")[0]) * MILLISECOND_NS)
            except (ValueError, OverflowError):
                continue
            if key not in columns:
                columns[key] = np.full(len(texts), NEVER_NS, np.int64)
            columns[key][row] = min(max(took_ns, 0), NEVER_NS)
    return columns


def _no_spans() -> SpanColumns:
    empty = np.zeros(0, np.int64)
    narrow = empty.astype(np.int32)
    return SpanColumns(narrow, narrow, empty.astype(np.int8), empty, empty, empty, narrow)
