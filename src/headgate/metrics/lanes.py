"""Which spans to draw, and beside which: spans that overlap on a node need lanes of their own."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from headgate.metrics.columns import Int64, SpanColumns


@dataclass(frozen=True, slots=True)
class LanedSpans:
    """Some rows of a `SpanColumns`, in order of their start, each in a lane of its node."""

    rows: Int64
    lanes: tuple[int, ...]
    left_out: int  # spans that began later than those, beyond the limit


def assign_lanes(spans: SpanColumns, limit: int) -> LanedSpans:
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
    return LanedSpans(rows, tuple(lanes), len(spans) - len(rows))
