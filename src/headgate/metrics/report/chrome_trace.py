"""The schedule of a run as Chrome trace events, for Perfetto or chrome://tracing.

One process per pool, one thread per node, one complete event per start, load and run. A node that
runs several jobs at a time has several threads (tracks), because complete events of one thread
must not overlap.
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

Event = dict[str, object]

_KIND_NAMES: Final = {SpanKind.START: "start", SpanKind.LOAD: "load", SpanKind.RUN: "run"}


@dataclass(frozen=True, slots=True)
class SpanTracks:
    """The first rows of a `SpanColumns` by start, each on a track of its node.

    Spans of one node that overlap are on different tracks, so that they can be drawn.
    """

    rows: Int64
    tracks: tuple[int, ...]  # by row
    left_out: int  # later spans, beyond the limit


def assign_tracks(spans: SpanColumns, limit: int) -> SpanTracks:
    """Assign tracks to the first `limit` spans by start; spans of one track never overlap.

    Each span gets the lowest free track, so a node that runs one job at a time has one track.
    """
    rows = np.argsort(spans.start_ns, kind="stable")[:limit]
    free: dict[int, list[int]] = {}  # per node: tracks that are free again, lowest first
    taken: dict[int, list[tuple[int, int]]] = {}  # per node: (end, track), earliest first
    tracks = []
    for row in rows.tolist():
        node, start_ns, end_ns = int(spans.node[row]), spans.start_ns[row], spans.end_ns[row]
        node_free, node_taken = free.setdefault(node, []), taken.setdefault(node, [])
        while node_taken and node_taken[0][0] <= start_ns:
            heapq.heappush(node_free, heapq.heappop(node_taken)[1])
        track = heapq.heappop(node_free) if node_free else len(node_taken)
        heapq.heappush(node_taken, (int(end_ns), track))
        tracks.append(track)
    return SpanTracks(rows, tuple(tracks), len(spans) - len(rows))


def write_chrome_trace(path: Path, run: RunColumns) -> Path:
    path.write_text(json.dumps(chrome_trace(run)) + "\n", encoding="utf-8")
    return path


def chrome_trace(run: RunColumns, *, spans_max: int = 200_000) -> dict[str, object]:
    """Return the first `spans_max` spans as JSON; a mark says where the trace is truncated."""
    tracks = assign_tracks(run.spans, spans_max)
    shown = len(tracks.rows)
    note = f"the first {shown:,} of {len(run.spans):,} spans" if tracks.left_out else "all spans"
    return {
        "displayTimeUnit": "ms",
        "otherData": {"spans": note},
        "traceEvents": [
            *_names(run, tracks),
            *_complete_events(run, tracks),
            *([_truncation_mark(run, tracks, note)] if tracks.left_out else []),
        ],
    }


def _process_ids(run: RunColumns) -> dict[str, int]:
    pools = dict.fromkeys(resource.pool for resource in run.resources)
    return {pool: number for number, pool in enumerate(pools, start=1)}


def _thread_id(node: int, track: int) -> int:
    # Far apart, so that a viewer which sorts threads by id keeps the tracks of a node together.
    return (node + 1) * 1000 + track


def _names(run: RunColumns, tracks: SpanTracks) -> Iterator[Event]:
    process_ids = _process_ids(run)
    for pool, pid in process_ids.items():
        yield _metadata("process_name", pid, 0, name=pool)
    used = {
        (int(run.spans.node[row]), track)
        for row, track in zip(tracks.rows, tracks.tracks, strict=True)
    }
    for node, track in sorted(used | {(node, 0) for node in range(len(run.resources))}):
        resource = run.resources[node]
        pid, tid = process_ids[resource.pool], _thread_id(node, track)
        name = resource.name if track == 0 else f"{resource.name} #{track + 1}"
        yield _metadata("thread_name", pid, tid, name=name)
        yield _metadata("thread_sort_index", pid, tid, sort_index=tid)


def _metadata(kind: str, pid: int, tid: int, **args: object) -> Event:
    return {"name": kind, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": args}


def _complete_events(run: RunColumns, tracks: SpanTracks) -> Iterator[Event]:
    process_ids = _process_ids(run)
    spans = run.spans
    for row, track in zip(tracks.rows.tolist(), tracks.tracks, strict=True):
        node, kind = int(spans.node[row]), _KIND_NAMES[int(spans.kind[row])]
        function = run.functions[int(spans.function[row])]
        start_ns, end_ns = int(spans.start_ns[row]), int(spans.end_ns[row])
        id_name = "batch" if kind == "run" else "instance"
        yield {
            "name": function if kind == "run" else f"{kind} {function}",
            "cat": kind,
            "ph": "X",
            "ts": start_ns / 1000,  # microseconds
            "dur": (end_ns - start_ns) / 1000,
            "pid": process_ids[run.resources[node].pool],
            "tid": _thread_id(node, track),
            "args": {id_name: int(spans.batch[row]), "items": int(spans.items[row])},
        }


def _truncation_mark(run: RunColumns, tracks: SpanTracks, note: str) -> Event:
    """Return a global mark at the end of a trace that ends before its run."""
    last_us = int(run.spans.start_ns[tracks.rows[-1]]) / 1000 if len(tracks.rows) else 0.0
    mark = {"name": f"truncated: {note}", "cat": "note", "ph": "i", "s": "g"}
    return {**mark, "ts": last_us, "pid": 0, "tid": 0, "args": {}}
