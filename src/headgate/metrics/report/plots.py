"""Figures of one run, and the binned time series that they plot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from headgate.core.clock import MICROSECOND_NS, MILLISECOND_NS, NEVER_NS, SECOND_NS
from headgate.core.states import OUTCOME_NAMES, Outcome
from headgate.metrics.columns import Int64, RunColumns, SpanKind
from headgate.metrics.report.chrome_trace import SpanTracks, assign_tracks
from headgate.metrics.report.style import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    OTHER,
    OUTCOME_COLOURS,
    SERIES,
    SKY,
    VERMILION,
    Plot,
    add_legend,
    escape_label,
    new_axes,
    number_log_axis,
    style_axes,
    time_scale,
)
from headgate.metrics.summary import latencies_ns, nearest_rank, split_by_group, waits_ns

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

Floats = NDArray[np.float64]

_CURVE_POINTS: Final = 400  # far more than a decade of the tail has pixels
_ROWS_MAX: Final = 24  # rows of text that fit into a figure
_TRACKS_MAX: Final = 32
_SPANS_MAX: Final = 250  # of a schedule; more cannot be told apart
_BINS_MAX: Final = 120


def run_plots(run: RunColumns) -> Iterator[Plot]:
    """Yield the figures that this run has data for, one at a time. Needs matplotlib."""
    if not len(run.requests):
        return
    yield Plot("outcomes", "Outcomes of the requests, by time of arrival.", outcomes_figure(run))
    yield Plot("goodput", "Arrivals, and responses in time.", goodput_figure(run))
    if (run.requests.outcome <= Outcome.LATE).any():
        yield Plot(
            "latency",
            "Share of the answered requests that took longer than a given time.",
            latency_figure(run),
        )
    if (run.requests.started_ns != NEVER_NS).any():
        yield Plot("waits", "Time from arrival to first work, per client.", waits_figure(run))
    if len(run.spans):
        yield Plot("utilisation", "Utilisation of each resource.", utilisation_figure(run))
        yield Plot(
            "schedule",
            "Work of each node; starts are hatched, loads are pale.",
            schedule_figure(run),
        )


def latency_figure(run: RunColumns) -> Figure:
    """Plot, per pipeline, the share of responses slower than a latency; mark the SLOs."""
    figure, axes = new_axes()
    requests = run.requests
    answered = requests.outcome <= Outcome.LATE
    parts = split_by_group(latencies_ns(requests), requests.pipeline[answered], len(run.pipelines))
    shown, hidden = _busiest(parts, len(SERIES))
    colours = dict(zip(shown, SERIES, strict=False))
    handles = []
    for index, colour in colours.items():
        x_ms, share = _tail_curve(parts[index])
        handles += axes.plot(x_ms, share, color=colour, linewidth=1.8, drawstyle="steps-post")
    _mark_slos(axes, run, colours)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(min(0.09, 0.7 / max(len(parts[index]) for index in shown)), 1.1)
    style_axes(
        axes,
        title="Latency: the tail" + _note(shown, hidden),
        x_label="latency (ms); dashed: the SLO",
        y_label="share slower",
        grid="both",
    )
    number_log_axis(axes.xaxis)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    add_legend(axes, handles, [run.pipelines[index] for index in shown])
    return figure


def outcomes_figure(run: RunColumns) -> Figure:
    """Stack the outcomes over time of arrival."""
    figure, axes = new_axes()
    bins, scale = time_bins(run), time_scale(run.end_ns)
    edges = bins.edges_ns / scale.unit_ns
    rates = outcomes_by_arrival(run, bins) * (1e9 / bins.step_ns)
    tops = np.cumsum(rates, axis=0)
    handles, labels = [], []
    for outcome, name in enumerate(OUTCOME_NAMES):
        if not rates[outcome].any():
            continue
        handles.append(
            axes.stairs(
                tops[outcome],
                edges,
                baseline=tops[outcome] - rates[outcome],
                fill=True,
                color=OUTCOME_COLOURS[outcome],
                linewidth=0,
            )
        )
        labels.append(name)
    _style_rates(axes, edges, title="Outcomes", x_label=f"time of arrival ({scale.unit})")
    add_legend(axes, handles[::-1], labels[::-1])  # in the order of the stack
    return figure


def goodput_figure(run: RunColumns) -> Figure:
    """Plot arrivals and MET responses over time."""
    figure, axes = new_axes()
    bins, scale = time_bins(run), time_scale(run.end_ns)
    edges = bins.edges_ns / scale.unit_ns
    good_rps = goodput_rps(run, bins)
    handles: list[Artist] = [
        axes.stairs(arrival_rps(run, bins), edges, baseline=None, color=MUTED, linewidth=1.4),
        axes.stairs(good_rps, edges, baseline=None, color=GREEN, linewidth=1.8),
    ]
    labels = ["arrivals", "goodput"]
    axes.stairs(good_rps, edges, fill=True, color=GREEN, alpha=0.15)
    if run.window_ns < run.end_ns * 0.99:
        window = run.window_ns / scale.unit_ns
        handles.append(axes.axvline(window, color=MUTED, linewidth=1, linestyle=":"))
        labels.append("end of window")
    _style_rates(axes, edges, title="Arrivals and goodput", x_label=f"time ({scale.unit})")
    add_legend(axes, handles, labels)
    return figure


def _style_rates(axes: Axes, edges: Floats, *, title: str, x_label: str) -> None:
    axes.set_xlim(0, float(edges[-1]))
    axes.set_ylim(bottom=0)
    style_axes(axes, title=title, x_label=x_label, y_label="requests per second")


def waits_figure(run: RunColumns) -> Figure:
    """Plot the distribution of the waits per client, clients with most requests first."""
    requests = run.requests
    started = requests.started_ns != NEVER_NS
    parts = split_by_group(waits_ns(requests), requests.client[started], len(run.clients))
    shown, hidden = _busiest(parts, _ROWS_MAX)
    figure, axes = new_axes(1.5 + 0.32 * len(shown))
    percentiles = np.array([nearest_rank(parts[index], (100, 500, 900, 990)) for index in shown])
    scale = time_scale(int(percentiles.max()))
    p10, p50, p90, p99 = percentiles.T / scale.unit_ns
    rows = np.arange(len(shown))
    thin = axes.hlines(rows, p90, p99, color=OTHER, linewidth=1.2)
    thick = axes.hlines(rows, p10, p90, color=SKY, linewidth=6)
    (middle,) = axes.plot(p50, rows, "o", color=BLUE, markersize=6, clip_on=False)
    (last,) = axes.plot(p99, rows, "|", color=VERMILION, markersize=11, markeredgewidth=2)
    axes.set_yticks(rows, [escape_label(run.clients[index], 28) for index in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0, 1.05 * float(p99.max()) or 1.0)
    title = "Waits per client" + _note(shown, hidden)
    style_axes(axes, title=title, x_label=f"wait ({scale.unit})", grid="x")
    axes.tick_params(axis="y", length=0, pad=8)
    add_legend(axes, [middle, thick, thin, last], ["median", "p10 to p90", "p90 to p99", "p99"])
    return figure


def utilisation_figure(run: RunColumns) -> Figure:
    """Plot a heat map: one row per resource, darker is busier."""
    bins, scale = time_bins(run), time_scale(run.end_ns)
    share = busy_share(run, bins)
    count = len(run.resources)
    figure, axes = new_axes(1.5 + min(4.5, 0.28 * count))
    end = bins.edges_ns[-1] / scale.unit_ns
    image = axes.imshow(
        share,
        aspect="auto",
        interpolation="nearest",
        cmap="Blues",
        vmin=0,
        vmax=1,
        extent=(0, float(end), count - 0.5, -0.5),
    )
    style_axes(axes, title="Utilisation", x_label=f"time ({scale.unit})", grid="")
    every = -(-count // _ROWS_MAX)
    rows = range(0, count, every)
    axes.set_yticks(rows, [escape_label(run.resources[row].name, 28) for row in rows])
    axes.tick_params(axis="y", length=0)
    for edge in range(1, count):
        axes.axhline(edge - 0.5, color="white", linewidth=1.5 if count <= _ROWS_MAX else 0)
    bar = figure.colorbar(image, ax=axes, format=lambda value, _: f"{100 * value:.0f} %")
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=9, labelcolor=INK, length=0)
    return figure


def schedule_figure(run: RunColumns) -> Figure:
    """Plot the first spans: one row per node and track, one colour per function."""
    tracks = assign_tracks(run.spans, _SPANS_MAX)
    positions = _track_rows(run, tracks)
    figure, axes = new_axes(1.5 + 0.3 * len(positions))
    last_ns = _schedule_end_ns(run, tracks)
    scale = time_scale(last_ns)
    bars: dict[int, Artist] = {}
    has_run: set[int] = set()
    for row, track in zip(tracks.rows.tolist(), tracks.tracks, strict=True):
        position = positions.get((int(run.spans.node[row]), track))
        if position is None:
            continue
        function, kind = int(run.spans.function[row]), int(run.spans.kind[row])
        start = int(run.spans.start_ns[row]) / scale.unit_ns
        width = int(run.spans.end_ns[row]) / scale.unit_ns - start
        (bar,) = axes.barh(position, width, left=start, height=0.74)
        _paint(bar, function, kind)
        key = min(function, len(SERIES))
        if key not in bars or (kind == SpanKind.RUN and key not in has_run):
            bars[key] = bar  # a batch shows the colour best, but a function may only have started
        if kind == SpanKind.RUN:
            has_run.add(key)
    axes.set_xlim(0, last_ns / scale.unit_ns)
    axes.set_ylim(len(positions) - 0.4, -0.6)
    axes.set_yticks(list(positions.values()), [_track_label(run, *key) for key in positions])
    style_axes(axes, title=_title(run, tracks), x_label=f"time ({scale.unit})", grid="x")
    axes.tick_params(axis="y", length=0)
    labels = [run.functions[key] if key < len(SERIES) else "others" for key in sorted(bars)]
    add_legend(axes, [bars[key] for key in sorted(bars)], labels)
    return figure


def _schedule_end_ns(run: RunColumns, tracks: SpanTracks) -> int:
    """Return until when every span is shown.

    From the first span that is left out on, a node without a bar may as well be busy.
    """
    spans = run.spans
    if tracks.left_out:
        shown = len(tracks.rows)
        left_out_ns = int(np.partition(spans.start_ns, shown)[shown])
        if left_out_ns > spans.start_ns.min():  # otherwise nothing would be left to show
            return left_out_ns
    return int(spans.end_ns[tracks.rows].max())


def _track_rows(run: RunColumns, tracks: SpanTracks) -> dict[tuple[int, int], int]:
    """Return the row of each used (node, track), at most as many as are readable."""
    nodes = run.spans.node[tracks.rows].tolist()
    used = sorted(set(zip(nodes, tracks.tracks, strict=True)))[:_TRACKS_MAX]
    return {key: position for position, key in enumerate(used)}


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


def _track_label(run: RunColumns, node: int, track: int) -> str:
    name = escape_label(run.resources[node].name, 28)
    return name if track == 0 else f"#{track + 1}"


def _title(run: RunColumns, tracks: SpanTracks) -> str:
    if not tracks.left_out:
        return "Schedule"
    return f"Schedule: the first {len(tracks.rows):,} of {len(run.spans):,} spans"


@dataclass(frozen=True, slots=True)
class TimeBins:
    """The bins [0, step), [step, 2 step), ... that cover a run."""

    step_ns: int
    count: int

    @property
    def edges_ns(self) -> Int64:
        """The edges of the bins: one more than there are bins."""
        return np.arange(self.count + 1, dtype=np.int64) * self.step_ns

    def index(self, times_ns: Int64) -> Int64:
        """Return the bin of each time; times outside belong to the first or the last bin."""
        return np.clip(times_ns // self.step_ns, 0, self.count - 1)


def time_bins(run: RunColumns) -> TimeBins:
    """Return bins fine enough to see a burst, with about ten requests each if there are few."""
    count = min(_BINS_MAX, max(20, len(run.requests) // 10))
    # Rounding up makes the last bin as wide as the others: a shorter one would show a false drop.
    return TimeBins(max(1, -(-max(run.end_ns, run.window_ns) // count)), count)


def outcomes_by_arrival(run: RunColumns, bins: TimeBins) -> Int64:
    """Return counts [outcome, bin]: how the requests that arrived in a bin ended."""
    kinds = len(OUTCOME_NAMES)
    cell = bins.index(run.requests.arrival_ns)
    cell *= kinds
    cell += run.requests.outcome
    counts = np.bincount(cell, minlength=bins.count * kinds)
    return counts.reshape(bins.count, kinds).T.astype(np.int64)


def arrival_rps(run: RunColumns, bins: TimeBins) -> Floats:
    return _rate_rps(run.requests.arrival_ns, bins)


def goodput_rps(run: RunColumns, bins: TimeBins) -> Floats:
    met = run.requests.outcome == Outcome.MET
    return _rate_rps(run.requests.finished_ns[met], bins)


def busy_share(run: RunColumns, bins: TimeBins) -> Floats:
    """Return shares [resource, bin]: the utilisation of each resource, 0 to 1.

    A node with several slots is fully busy when all of them work, and a serverless pool when as
    many instances work as it had on average.
    """
    cumulative = _cumulative_work_ns(run, bins)
    units = np.array(_parallel_units(run, cumulative[:, -1]))
    share = np.diff(cumulative, axis=1) / (bins.step_ns * units[:, None])
    busy: Floats = np.clip(share, 0.0, 1.0)
    return busy


def _rate_rps(times_ns: Int64, bins: TimeBins) -> Floats:
    counts = np.bincount(bins.index(times_ns), minlength=bins.count)
    return counts.astype(np.float64) * (SECOND_NS / bins.step_ns)


def _cumulative_work_ns(run: RunColumns, bins: TimeBins) -> Floats:
    """Return [resource, edge]: the work done on a resource before each edge.

    By the edge e a span that began at s contributes e - s, and one that ended at t subtracts e - t
    again. So the work at an edge is e times (begun - ended before it), less the sum of the begins,
    plus the sum of the ends: two counts and two sums per bin instead of a loop over spans.
    """
    shape = (len(run.resources), bins.count)
    open_spans, offset_ns = np.zeros(shape), np.zeros(shape)
    for times_ns, sign in ((run.spans.start_ns, 1), (run.spans.end_ns, -1)):
        cell = bins.index(times_ns) + run.spans.node * np.int64(bins.count)
        size = shape[0] * shape[1]
        open_spans += sign * np.bincount(cell, minlength=size).reshape(shape)
        offset_ns += sign * np.bincount(cell, times_ns, size).reshape(shape)
    edges_ns = bins.edges_ns[1:]
    work_ns = np.cumsum(open_spans, axis=1) * edges_ns - np.cumsum(offset_ns, axis=1)
    return np.hstack((np.zeros((shape[0], 1)), work_ns))


def _parallel_units(run: RunColumns, work_ns: Floats) -> list[float]:
    """Return, per resource, how many spans can run on it concurrently."""
    units = []
    for resource, total_ns in zip(run.resources, work_ns, strict=True):
        slots = max(1, round(total_ns / resource.busy_ns)) if resource.busy_ns else 1
        instances = max(1.0, resource.up_ns / run.end_ns) if run.end_ns else 1.0
        units.append(slots * instances)
    return units


def _busiest(parts: list[Int64], count_max: int) -> tuple[list[int], int]:
    """Return the groups with the most values, and the number of other groups that have any."""
    order = sorted(range(len(parts)), key=lambda index: -len(parts[index]))
    shown = [index for index in order if len(parts[index])]
    return shown[:count_max], max(0, len(shown) - count_max)


def _note(shown: list[int], hidden: int) -> str:
    return f" (the {len(shown)} busiest; {hidden} more)" if hidden else ""


def _tail_curve(latency_ns: Int64) -> tuple[Floats, Floats]:
    """Return latencies in ms and the share of requests that took longer, denser in the tail."""
    latency_ns.sort()
    count = len(latency_ns)
    shares = np.geomspace(1.0, 1.0 / count, min(_CURVE_POINTS, count))
    ranks = np.unique(np.clip(count - np.round(shares * count), 0, count - 1)).astype(np.int64)
    # The slowest request is drawn at 1 / n and a latency of 0 as 1 us: logarithms have no zero.
    slower = np.maximum(count - 1 - ranks, 1) / count
    latency_ms = np.maximum(latency_ns[ranks], MICROSECOND_NS) / MILLISECOND_NS
    return np.insert(latency_ms, 0, latency_ms[0]), np.insert(slower, 0, 1.0)


def _mark_slos(axes: Axes, run: RunColumns, colours: dict[int, str]) -> None:
    """Mark the latency targets: one line each, or the band between the least and the greatest."""
    requests = run.requests
    marks: dict[tuple[int, int], str] = {}
    for index, colour in colours.items():
        rows = (requests.pipeline == index) & (requests.deadline_ns != NEVER_NS)
        if rows.any():
            target_ns = requests.deadline_ns[rows] - requests.arrival_ns[rows]
            key = (int(target_ns.min()), int(target_ns.max()))
            marks[key] = MUTED if key in marks else colour  # a target that pipelines share is grey
    for (low_ns, high_ns), colour in marks.items():
        low_ms, high_ms = low_ns / MILLISECOND_NS, high_ns / MILLISECOND_NS
        axes.axvline(low_ms, color=colour, linewidth=1.1, linestyle=(0, (4, 3)))
        if high_ms > 1.01 * low_ms:
            axes.axvline(high_ms, color=colour, linewidth=1.1, linestyle=(0, (4, 3)))
            axes.axvspan(low_ms, high_ms, color=colour, alpha=0.08, linewidth=0)
