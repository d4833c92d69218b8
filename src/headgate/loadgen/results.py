"""Results of a load run: rows while it runs, progress, the columns of the result, the summary."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from math import nan
from types import MappingProxyType
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from headgate.core.clock import MICROSECOND_NS, MILLISECOND_NS, NEVER_NS, SECOND_NS
from headgate.core.states import OUTCOME_NAMES, Outcome
from headgate.loadgen.requests import LoadOptions
from headgate.metrics.columns import Int8, Int32, Int64, RunColumns, build_requests, build_spans
from headgate.metrics.summary import Summary, nearest_rank, summarise
from headgate.workload.arrivals import Arrivals

Int16 = NDArray[np.int16]

NOT_REPORTED: Final = -1
_EXPIRED: Final = (408, 504)  # statuses
# Where no outcome is reported. Of a 503, Headgate reports one if the request had been admitted.
_REJECTED: Final = (429, 503)
_TIMINGS_MAX: Final = 8  # metric names of Server-Timing that are kept; Headgate sends fewer

_PER_OCTAVE: Final = 16  # histogram buckets per doubling: percentiles are right within 4 %
_BUCKETS: Final = 64 * _PER_OCTAVE

# The lag of the sender is part of every latency. Below the larger of these it is negligible.
_LAG_SHARE_MAX: Final = 0.25
_LAG_MS_MAX: Final = 1.0
_IMMEDIATE_NS: Final = 100 * MICROSECOND_NS  # a shorter wait for a connection does not count
_OUTCOMES: Final[Mapping[bytes, int]] = MappingProxyType(
    {name.encode(): outcome for outcome, name in enumerate(OUTCOME_NAMES)}
)


class FailureReason:
    """Why a request has no response. Its status is then 0."""

    NONE: Final = 0
    REFUSED: Final = 1  # no connection could be opened
    LOST: Final = 2  # the connection closed, or broke HTTP, before the response was complete
    TIMED_OUT: Final = 3  # the client's timeout has passed


FAILURE_NAMES: Final = ("", "no connection", "connection lost", "timed out")


# The columns that `Rows` and `LoadResult` share.
_COLUMNS: Final = (
    *("intended_ns", "reached_ns", "sent_ns", "ended_ns"),
    *("status", "failure", "reported"),
)


@final
class Rows:
    """Growing columns, one row per request. Times are ns since the start; NEVER_NS is never."""

    __slots__ = (*_COLUMNS, "ended", "timing")

    def __init__(self) -> None:
        self.intended_ns = array("q")  # when it was scheduled to be sent
        self.reached_ns = array("q")  # when the sender passed it to the connection pool
        self.sent_ns = array("q")  # when it was written to a connection
        self.ended_ns = array("q")  # when its response was complete, or it failed
        self.status = array("h")
        self.failure = array("b")  # one of `FailureReason`
        self.reported = array("b")  # the outcome that the server reports, or NOT_REPORTED
        self.timing: list[bytes] = []  # the Server-Timing header, unparsed
        self.ended: list[int] = []  # rows in the order in which they ended

    def __len__(self) -> int:
        return len(self.intended_ns)

    def add(self, intended_ns: int, reached_ns: int) -> int:
        """Begin a row and return its number."""
        row = len(self.intended_ns)
        self.intended_ns.append(intended_ns)
        self.reached_ns.append(reached_ns)
        self.sent_ns.append(NEVER_NS)
        self.ended_ns.append(NEVER_NS)
        self.status.append(0)
        self.failure.append(FailureReason.NONE)
        self.reported.append(NOT_REPORTED)
        self.timing.append(b"")
        return row

    def complete(self, row: int, now_ns: int, status: int, outcome: bytes, timing: bytes) -> None:
        """Record a complete response."""
        self.ended_ns[row] = now_ns
        self.status[row] = status
        if outcome:
            self.reported[row] = _OUTCOMES.get(outcome, NOT_REPORTED)
        if timing:
            self.timing[row] = timing
        self.ended.append(row)

    def fail(self, row: int, now_ns: int, failure: int) -> None:
        """Record that there will be no response."""
        self.ended_ns[row] = now_ns
        self.failure[row] = failure
        self.ended.append(row)


@dataclass(frozen=True, eq=False)
class LoadResult:
    """The columns of a load run: one row per request, in order of the intended times.

    Times are nanoseconds since the start; `NEVER_NS` means "never". Latency counts from the
    intended time, so that it includes every delay, also that of the sender.
    """

    intended_ns: Int64
    reached_ns: Int64  # when the sender passed it on; later than intended if the sender was slow
    sent_ns: Int64  # when it was written to a connection
    ended_ns: Int64  # when its response was complete, or it failed
    status: Int16  # 0: there is no response
    failure: Int8  # one of `FailureReason`
    reported: Int8  # the outcome that the server reports, or NOT_REPORTED
    timings_ns: dict[str, Int64]  # by metric name of the Server-Timing header
    pipeline: Int32
    client: Int32
    pipelines: tuple[str, ...]
    clients: tuple[str, ...]
    window_ns: int
    slo_ns: int | None
    connections: int  # number of connections opened
    is_closed_loop: bool = False

    def __len__(self) -> int:
        return len(self.intended_ns)

    @cached_property
    def latency_ns(self) -> Int64:
        """The time from the intended time to the response or the failure."""
        return self.ended_ns - self.intended_ns

    @cached_property
    def lag_ns(self) -> Int64:
        """The delay of the sender behind its schedule."""
        return self.reached_ns - self.intended_ns

    @cached_property
    def connection_wait_ns(self) -> Int64:
        """The time that each request that was sent waited for a free connection."""
        was_sent = self.sent_ns != NEVER_NS
        waits_ns: Int64 = self.sent_ns[was_sent] - self.reached_ns[was_sent]
        return waits_ns

    @cached_property
    def outcome(self) -> Int8:
        return classify(self.status, self.failure, self.reported, self.latency_ns, self.slo_ns)

    def to_run(self) -> RunColumns:
        """Return the columns that summaries and reports read, without spans and resources."""
        known: dict[str, Int64] = {}
        if self.slo_ns is not None:
            known["deadline_ns"] = self.intended_ns + self.slo_ns
        if (exec_ns := self.timings_ns.get("exec")) is not None:
            # When execution began: it ends with the response.
            started_ns = np.maximum(self.ended_ns - exec_ns, self.intended_ns)
            known["started_ns"] = np.where(exec_ns == NEVER_NS, NEVER_NS, started_ns)
        requests = build_requests(
            self.intended_ns,
            **known,
            finished_ns=self.ended_ns,
            outcome=self.outcome,
            pipeline=self.pipeline,
            client=self.client,
            attempts=np.ones(len(self), np.int32),
        )
        return RunColumns(
            requests,
            build_spans(),
            resources=(),
            pipelines=self.pipelines,
            functions=self.pipelines,
            clients=self.clients,
            pools=(),  # the server does not tell where a request ran
            window_ns=self.window_ns,
            end_ns=int(self.ended_ns.max(initial=self.window_ns)),
        )


def classify(
    status: Int16, failure: Int8, reported: Int8, latency_ns: Int64, slo_ns: int | None
) -> Int8:
    """Return the outcome of each request.

    A response is late by the client's own SLO, or else if the server reports it as late. Otherwise
    the outcome is the one that the server reports, or else the one that the status implies.
    """
    outcome = np.full(len(status), Outcome.FAILED, np.int8)
    outcome[np.isin(status, _REJECTED) | (failure == FailureReason.REFUSED)] = Outcome.REJECTED
    outcome[np.isin(status, _EXPIRED) | (failure == FailureReason.TIMED_OUT)] = Outcome.EXPIRED
    outcome = np.where(reported != NOT_REPORTED, reported, outcome)
    answered = (status >= 200) & (status < 300)
    if slo_ns is not None:
        in_time = latency_ns <= slo_ns
    else:
        in_time = reported != Outcome.LATE
    outcome[answered] = np.where(in_time[answered], Outcome.MET, Outcome.LATE)
    return outcome.astype(np.int8)


def make_result(
    rows: Rows,
    arrivals: Arrivals,
    options: LoadOptions,
    connections: int,
    *,
    first: int = 0,
    is_closed_loop: bool = False,
) -> LoadResult:
    """Return the columns of a finished run, without the rows before `first`.

    `arrivals` are the requests from `first` on.
    """
    columns: dict[str, Any] = {name: np.array(getattr(rows, name)[first:]) for name in _COLUMNS}
    return LoadResult(
        **columns,
        timings_ns=parse_timings(rows.timing[first:]),
        pipeline=arrivals.pipeline,
        client=arrivals.client,
        pipelines=arrivals.pipelines,
        clients=arrivals.clients,
        window_ns=arrivals.duration_ns,
        slo_ns=options.slo_ns,
        connections=connections,
        is_closed_loop=is_closed_loop,
    )


def parse_timings(texts: list[bytes]) -> dict[str, Int64]:
    """Return a column per metric name of Server-Timing, in ns; invalid numbers are left out.

    >>> parse_timings([b"queue;dur=1.5, exec;dur=2", b"exec;dur=1"])["exec"].tolist()
    [2000000, 1000000]
    """
    columns: dict[str, Int64] = {}
    for row, text in enumerate(texts):
        for part in text.split(b",") if text else ():
            name, separator, rest = part.partition(b";dur=")
            key = name.strip().decode("latin-1")
            if not separator or (key not in columns and len(columns) == _TIMINGS_MAX):
                continue
            try:
                took_ns = round(float(rest.partition(b";")[0]) * MILLISECOND_NS)
            except (ValueError, OverflowError):
                continue
            if key not in columns:
                columns[key] = np.full(len(texts), NEVER_NS, np.int64)
            columns[key][row] = min(max(took_ns, 0), NEVER_NS)
    return columns


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """The progress of a run, for display."""

    elapsed_ns: int
    sent: int
    ended: int
    rate_per_s: float  # requests ended per second, since the previous update
    outcomes: tuple[int, ...]  # in the order of `OUTCOME_NAMES`
    p50_ms: float  # of the answered requests
    p99_ms: float


class ProgressCounter:
    """Counts outcomes and estimates percentiles of a run, incrementally and cheaply."""

    def __init__(self, rows: Rows, slo_ns: int | None) -> None:
        self._rows = rows
        self._slo_ns = slo_ns
        self._counted = 0
        self._at_ns = 0
        self._outcomes = np.zeros(len(OUTCOME_NAMES), np.int64)
        self._histogram = np.zeros(_BUCKETS, np.int64)

    def update(self, now_ns: int) -> LoadProgress:
        """Count the rows that have ended since the previous update."""
        rows = self._rows
        new = rows.ended[self._counted :]
        self._counted += len(new)
        if new:
            self._count(new)
        since_ns = max(now_ns - self._at_ns, 1)
        self._at_ns = now_ns
        return LoadProgress(
            elapsed_ns=now_ns,
            sent=len(rows),
            ended=self._counted,
            rate_per_s=len(new) * SECOND_NS / since_ns,
            outcomes=tuple(self._outcomes.tolist()),
            p50_ms=self._percentile_ms(500),
            p99_ms=self._percentile_ms(990),
        )

    def _count(self, new: list[int]) -> None:
        rows = self._rows
        latency_ns = np.array([rows.ended_ns[row] - rows.intended_ns[row] for row in new], np.int64)
        outcome = classify(
            np.array([rows.status[row] for row in new], np.int16),
            np.array([rows.failure[row] for row in new], np.int8),
            np.array([rows.reported[row] for row in new], np.int8),
            latency_ns,
            self._slo_ns,
        )
        self._outcomes += np.bincount(outcome, minlength=len(OUTCOME_NAMES))
        answered_ns = latency_ns[outcome <= Outcome.LATE]
        self._histogram += np.bincount(_bucket(answered_ns), minlength=_BUCKETS)

    def _percentile_ms(self, per_mille: int) -> float:
        total = int(self._histogram.sum())
        if not total:
            return nan
        rank = (total * per_mille + 999) // 1000
        bucket = int(np.searchsorted(np.cumsum(self._histogram), rank))
        return float(2 ** ((bucket + 0.5) / _PER_OCTAVE)) / MILLISECOND_NS


def _bucket(latency_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    return (np.log2(np.maximum(latency_ns, 1)) * _PER_OCTAVE).astype(np.int64)


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """The summary of a load run: that of any run, and what only a client can measure.

    NaN where there was nothing to count.
    """

    run: Summary
    offered_rps: float
    answers: dict[str, int]  # responses by status, and requests without one by reason
    rejected_p50_ms: float  # latency of rejections
    rejected_p99_ms: float
    connections: int
    waited_for_connection: int  # requests that found no free connection
    connection_wait_p99_ms: float  # of all requests that were sent
    lag_p50_ms: float  # delay of the sender behind its schedule
    lag_p99_ms: float
    lag_max_ms: float
    is_doubtful: bool  # the lag of the sender is a large part of the latencies
    # Of requests with a result, by metric name of the Server-Timing header: a rejection has a
    # total time, too, and would make the median of the total less than that of its parts.
    timings_p50_ms: dict[str, float]

    def to_json(self) -> dict[str, object]:
        """Return dicts, lists and numbers: the keys of `Summary`, and the others under `load`."""
        rest = asdict(self)
        del rest["run"]
        return {**self.run.to_json(), "load": rest}


def summarise_load(result: LoadResult) -> LoadSummary:
    run = summarise(result.to_run())
    rejected_ns = result.latency_ns[result.outcome == Outcome.REJECTED]
    rejected_p50_ms, rejected_p99_ms, _ = _percentiles_ms(rejected_ns)
    lag_p50_ms, lag_p99_ms, lag_max_ms = _percentiles_ms(result.lag_ns)
    waits_ns = result.connection_wait_ns
    return LoadSummary(
        run=run,
        offered_rps=len(result) * 1e9 / result.window_ns if result.window_ns else 0.0,
        answers=_response_counts(result),
        rejected_p50_ms=rejected_p50_ms,
        rejected_p99_ms=rejected_p99_ms,
        connections=result.connections,
        waited_for_connection=int(np.count_nonzero(waits_ns > _IMMEDIATE_NS)),
        connection_wait_p99_ms=_percentiles_ms(waits_ns)[1],
        lag_p50_ms=lag_p50_ms,
        lag_p99_ms=lag_p99_ms,
        lag_max_ms=lag_max_ms,
        is_doubtful=lag_p99_ms > max(_LAG_MS_MAX, _LAG_SHARE_MAX * run.p99_ms),
        timings_p50_ms={
            name: _percentiles_ms(column[is_known])[0]
            for name, column in result.timings_ns.items()
            if (is_known := (column != NEVER_NS) & (result.outcome <= Outcome.LATE)).any()
        },
    )


def _response_counts(result: LoadResult) -> dict[str, int]:
    """Count responses by status and failures by reason, the most frequent first."""
    counts = Counter(result.status[result.failure == FailureReason.NONE].tolist())
    answers = {str(status): count for status, count in counts.most_common()}
    for failure, count in Counter(result.failure.tolist()).most_common():
        if failure != FailureReason.NONE:
            answers[FAILURE_NAMES[failure]] = count
    return answers


def _percentiles_ms(values_ns: Int64) -> tuple[float, float, float]:
    """Return median, 99th percentile and maximum."""
    if not len(values_ns):
        return nan, nan, nan
    p50_ns, p99_ns, most_ns = nearest_rank(values_ns, (500, 990, 1000))
    return p50_ns / MILLISECOND_NS, p99_ns / MILLISECOND_NS, most_ns / MILLISECOND_NS
