"""The schedule of a short run, or the beginning of a long one, as bars."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headgate.metrics.columns import RunColumns, SpanKind
from headgate.metrics.lanes import LanedSpans, assign_lanes
from headgate.metrics.report.style import (
    OTHER,
    SERIES,
    add_legend,
    dress,
    new_figure,
    plain,
    time_scale,
)

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

_LANES_MAX: Final = 32


def schedule_figure(run: RunColumns, *, spans_max: int = 250) -> Figure:
    """Draw the first `spans_max` spans, one row per node and lane, one colour per function."""
    laned = assign_lanes(run.spans, spans_max)
    places = _places(run, laned)
    figure = new_figure(1.5 + 0.3 * len(places))
    axes = figure.add_subplot()
    last_ns = int(run.spans.end_ns[laned.rows].max())
    scale = time_scale(last_ns)
    bars: dict[int, Artist] = {}
    for row, lane in zip(laned.rows.tolist(), laned.lanes, strict=True):
        place = places.get((int(run.spans.node[row]), lane))
        if place is None:
            continue
        function, kind = int(run.spans.function[row]), int(run.spans.kind[row])
        start = int(run.spans.start_ns[row]) / scale.unit_ns
        width = int(run.spans.end_ns[row]) / scale.unit_ns - start
        (bar,) = axes.barh(place, width, left=start, height=0.74)
        _paint(bar, function, kind)
        if kind == SpanKind.RUN:
            bars.setdefault(min(function, len(SERIES)), bar)
    axes.set_xlim(0, last_ns / scale.unit_ns)
    axes.set_ylim(len(places) - 0.4, -0.6)
    axes.set_yticks(list(places.values()), [_lane_label(run, *key) for key in places])
    dress(axes, title=_title(run, laned), x_label=f"time ({scale.unit})", grid="x")
    axes.tick_params(axis="y", length=0)
    labels = [run.functions[key] if key < len(SERIES) else "others" for key in sorted(bars)]
    add_legend(axes, [bars[key] for key in sorted(bars)], labels)
    return figure


def _places(run: RunColumns, laned: LanedSpans) -> dict[tuple[int, int], int]:
    """Return the row of each node and lane that has work, as many as can be read."""
    nodes = run.spans.node[laned.rows].tolist()
    used = sorted(set(zip(nodes, laned.lanes, strict=True)))[:_LANES_MAX]
    return {key: place for place, key in enumerate(used)}


def _paint(bar: Rectangle, function: int, kind: int) -> None:
    colour = SERIES[function] if function < len(SERIES) else OTHER
    is_start = kind == SpanKind.START
    bar.set(
        facecolor="white" if is_start else colour,
        edgecolor=colour if is_start else "white",
        hatch="//////" if is_start else None,
        linewidth=0.8 if is_start else 0.3,
        alpha=0.4 if kind == SpanKind.LOAD else 1.0,
    )


def _lane_label(run: RunColumns, node: int, lane: int) -> str:
    name = plain(run.resources[node].name, 28)
    return name if lane == 0 else f"#{lane + 1}"


def _title(run: RunColumns, laned: LanedSpans) -> str:
    if not laned.left_out:
        return "Schedule"
    return f"Schedule: the first {len(laned.rows):,} of {len(run.spans):,} spans"
