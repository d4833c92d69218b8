"""Small handmade runs for the tests of this folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headgate.core.clock import MILLISECOND_NS, NEVER_NS
from headgate.core.states import Outcome
from headgate.metrics.columns import (
    NOWHERE,
    ResourceUse,
    RunColumns,
    SpanColumns,
    SpanKind,
    build_requests,
    build_spans,
)


@dataclass(frozen=True)
class Row:
    """A request; times in milliseconds, None where it never happened."""

    arrival: int
    started: int | None
    finished: int
    outcome: int = Outcome.MET
    pipeline: int = 0
    client: int = 0
    deadline: int | None = 100
    cold: int = 0


@dataclass(frozen=True)
class Span:
    """A span of work; times in milliseconds."""

    node: int
    start: int
    end: int
    kind: int = SpanKind.RUN
    function: int = 0


def node(name: str = "gpu-0", pool: str = "gpu", up: int = 1000, busy: int = 500) -> ResourceUse:
    return ResourceUse(
        name=name,
        pool=pool,
        tier="gpu",
        up_ns=up * MILLISECOND_NS,
        busy_ns=busy * MILLISECOND_NS,
        cold_starts=1,
        loads=2,
        usage_usd=0.5,
        allocation_usd=1.0,
    )


def make_run(
    rows: Sequence[Row],
    spans: Sequence[Span] = (),
    resources: Sequence[ResourceUse] = (),
    *,
    pipelines: Sequence[str] = ("classify", "detect"),
    functions: Sequence[str] = ("resnet", "yolo"),
    clients: Sequence[str] = ("web", "mobile"),
    window_ms: int = 1000,
    end_ms: int = 1000,
) -> RunColumns:
    """Build a run; `make_run([])` is an empty one."""
    requests = build_requests(
        _ns([row.arrival for row in rows]),
        started_ns=_ns([row.started for row in rows]),
        finished_ns=_ns([row.finished for row in rows]),
        deadline_ns=_ns(
            [None if row.deadline is None else row.arrival + row.deadline for row in rows]
        ),
        outcome=[row.outcome for row in rows],
        pipeline=[row.pipeline for row in rows],
        client=[row.client for row in rows],
        attempts=[row.started is not None for row in rows],
        cold=[row.cold for row in rows],
        pool=[NOWHERE if row.started is None else 0 for row in rows],
        node=[NOWHERE if row.started is None else 0 for row in rows],
    )
    return RunColumns(
        requests=requests,
        spans=_span_columns(sorted(spans, key=lambda span: span.end)),
        resources=tuple(resources),
        pipelines=tuple(pipelines),
        functions=tuple(functions),
        clients=tuple(clients),
        pools=tuple(dict.fromkeys(use.pool for use in resources)) or ("gpu",),
        window_ns=window_ms * MILLISECOND_NS,
        end_ns=end_ms * MILLISECOND_NS,
    )


def busy_run() -> RunColumns:
    """A run with every outcome, every kind of span, two pools and awkward names."""
    rows = [
        Row(10 * i, 10 * i + i % 7, 10 * i + 20 + i % 50, i % 2, i % 2, i % 3) for i in range(80)
    ]
    rows += [
        Row(100 + k, None, 120 + k, outcome, 0, k % 3)
        for k, outcome in enumerate((Outcome.REJECTED, Outcome.EXPIRED, Outcome.CANCELLED))
    ]
    rows.append(Row(200, 210, 230, Outcome.FAILED))
    spans = [Span(0, 0, 40, SpanKind.START), Span(0, 40, 45, SpanKind.LOAD, 1)]
    spans += [Span(0, 50 + 20 * i, 65 + 20 * i, SpanKind.RUN, i % 2) for i in range(30)]
    spans += [Span(1, 30 * i, 30 * i + 45) for i in range(20)]  # two at a time
    return make_run(
        rows,
        spans,
        [node("gpu-0 <b>", busy=495), node("cpu-0 $x$", "cpu", busy=450)],
        clients=("web & co", "_hidden", '"><script>alert(1)</script>'),
    )


def _ns(times_ms: Sequence[int | None]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    times = [NEVER_NS if time is None else time * MILLISECOND_NS for time in times_ms]
    return np.array(times, dtype=np.int64)


def _span_columns(spans: Sequence[Span]) -> SpanColumns:
    return build_spans(
        node=[span.node for span in spans],
        function=[span.function for span in spans],
        kind=[span.kind for span in spans],
        start_ns=_ns([span.start for span in spans]),
        end_ns=_ns([span.end for span in spans]),
        batch=range(len(spans)),
        items=[1] * len(spans),
    )
