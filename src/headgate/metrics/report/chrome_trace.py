"""The schedule as Chrome trace events: open the file in Perfetto or in chrome://tracing.

One process per pool, one thread per node (more when a node does several things at a time, because
complete events of one thread must not overlap), one complete event per start, load and run.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from headgate.metrics.columns import Int64, RunColumns, SpanColumns, SpanKind

# Which spans to draw, and beside which: spans that overlap on a node need lanes of their own.


@dataclass(frozen=True, slots=True)
class SpanTracks:
    """Some rows of a `SpanColumns`, in order of their start, each in a lane of its node."""

    rows: Int64
    lanes: tuple[int, ...]
    left_out: int  # spans that began later than those, beyond the limit


def assign_lanes(spans: SpanColumns, limit: int) -> SpanTracks:
    """Take the first `limit` spans by start; spans of one node and lane never overlap.

    Each span takes the lowest lane that is free, so a node that does one thing at a time has one.
    """
    rows = np.argsort(spans.start_ns, kind="stable")[:limit]
    free: dict[int, list[int]] = {}  # per node: lanes given back, lowest first
    taken: dict[int, list[tuple[int, int]]] = {}  # per node: (end, lane), earliest first
    lanes = []
    for row in rows.tolist():
        node, start_ns, end_ns = int(spans.node[row]), spans.start_ns[row], spans.end_ns[row]
        node_free, node_taken = free.setdefault(node, []), taken.setdefault(node, [])
        while node_taken and node_taken[0][0] <= start_ns:
            heapq.heappush(node_free, heapq.heappop(node_taken)[1])
        lane = heapq.heappop(node_free) if node_free else len(node_taken)
        heapq.heappush(node_taken, (int(end_ns), lane))
        lanes.append(lane)
    return SpanTracks(rows, tuple(lanes), len(spans) - len(rows))


Event = dict[str, object]

_KIND_NAMES: Final = {SpanKind.START: "start", SpanKind.LOAD: "load", SpanKind.RUN: "run"}


def write_chrome_trace(path: Path, run: RunColumns, *, spans_max: int = 200_000) -> Path:
    """Write the first `spans_max` spans; a longer schedule is cut off there, and says so."""
    path.write_text(json.dumps(chrome_trace(run, spans_max=spans_max)) + "\n", encoding="utf-8")
    return path


def chrome_trace(run: RunColumns, *, spans_max: int = 200_000) -> dict[str, object]:
    """Return the trace as a JSON object."""
    laned = assign_lanes(run.spans, spans_max)
    shown = len(laned.rows)
    note = f"the first {shown:,} of {len(run.spans):,} spans" if laned.left_out else "all spans"
    return {
        "displayTimeUnit": "ms",
        "otherData": {"spans": note},
        "traceEvents": [
            *_names(run, laned),
            *_complete_events(run, laned),
            *([_cut_off(run, laned, note)] if laned.left_out else []),
        ],
    }


def _process_ids(run: RunColumns) -> dict[str, int]:
    pools = dict.fromkeys(resource.pool for resource in run.resources)
    return {pool: number for number, pool in enumerate(pools, start=1)}


def _thread_id(node: int, lane: int) -> int:
    # Far apart, so that a viewer that sorts threads by id keeps the lanes of a node together.
    return (node + 1) * 1000 + lane


def _names(run: RunColumns, laned: SpanTracks) -> Iterator[Event]:
    process_ids = _process_ids(run)
    for pool, pid in process_ids.items():
        yield _metadata("process_name", pid, 0, name=pool)
    used = {
        (int(run.spans.node[row]), lane) for row, lane in zip(laned.rows, laned.lanes, strict=True)
    }
    for node, lane in sorted(used | {(node, 0) for node in range(len(run.resources))}):
        resource = run.resources[node]
        pid, tid = process_ids[resource.pool], _thread_id(node, lane)
        name = resource.name if lane == 0 else f"{resource.name} #{lane + 1}"
        yield _metadata("thread_name", pid, tid, name=name)
        yield _metadata("thread_sort_index", pid, tid, sort_index=tid)


def _metadata(kind: str, pid: int, tid: int, **args: object) -> Event:
    return {"name": kind, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": args}


def _complete_events(run: RunColumns, laned: SpanTracks) -> Iterator[Event]:
    process_ids = _process_ids(run)
    spans = run.spans
    for row, lane in zip(laned.rows.tolist(), laned.lanes, strict=True):
        node, kind = int(spans.node[row]), _KIND_NAMES[int(spans.kind[row])]
        function = run.functions[int(spans.function[row])]
        start_ns, end_ns = int(spans.start_ns[row]), int(spans.end_ns[row])
        subject = "batch" if kind == "run" else "instance"
        yield {
            "name": function if kind == "run" else f"{kind} {function}",
            "cat": kind,
            "ph": "X",
            "ts": start_ns / 1000,  # microseconds
            "dur": (end_ns - start_ns) / 1000,
            "pid": process_ids[run.resources[node].pool],
            "tid": _thread_id(node, lane),
            "args": {subject: int(spans.batch[row]), "items": int(spans.items[row])},
        }


def _cut_off(run: RunColumns, laned: SpanTracks, note: str) -> Event:
    """Return a global mark where the trace ends before the run does."""
    last_us = int(run.spans.start_ns[laned.rows[-1]]) / 1000 if len(laned.rows) else 0.0
    mark = {"name": f"cut off: {note}", "cat": "note", "ph": "i", "s": "g"}
    return {**mark, "ts": last_us, "pid": 0, "tid": 0, "args": {}}
