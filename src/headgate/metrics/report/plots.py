"""Figures of one run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from headgate.core.clock import MICROSECOND_NS, MILLISECOND_NS, NEVER_NS
from headgate.core.outcome import OUTCOME_NAMES, Outcome
from headgate.metrics.columns import Int64, RunColumns
from headgate.metrics.groups import latencies_ns, split_by_group, waits_ns
from headgate.metrics.percentile import nearest_rank
from headgate.metrics.report.gantt import schedule_figure
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
    add_legend,
    dress,
    new_figure,
    number_log_axis,
    plain,
    time_scale,
)
from headgate.metrics.series import (
    Floats,
    arrival_rps,
    busy_share,
    goodput_rps,
    outcomes_by_arrival,
    time_bins,
)

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CURVE_POINTS: Final = 400  # per decade of the tail there are far fewer pixels than that
_ROWS_MAX: Final = 24  # rows of text that fit a figure


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure with its file name and what it shows."""

    name: str
    caption: str
    figure: Figure


def run_plots(run: RunColumns) -> Iterator[Plot]:
    """Yield the figures that this run has data for, one at a time. Needs matplotlib."""
    if not len(run.requests):
        return
    yield Plot("outcomes", "How the requests ended, by time of arrival.", outcomes_figure(run))
    yield Plot("goodput", "Requests that came, and answers given in time.", goodput_figure(run))
    if (run.requests.outcome <= Outcome.LATE).any():
        yield Plot(
            "latency",
            "Share of the answered requests that took longer than a given time.",
            latency_figure(run),
        )
    if (run.requests.started_ns != NEVER_NS).any():
        yield Plot("waits", "Time from arrival to first work, per client.", waits_figure(run))
    if len(run.spans):
        yield Plot("utilisation", "Share of each resource at work.", utilisation_figure(run))
        yield Plot(
            "schedule",
            "What each node did; starts are hatched, loads are pale.",
            schedule_figure(run),
        )


def latency_figure(run: RunColumns) -> Figure:
    """Plot, per pipeline, the share of answers slower than a latency; SLOs are marked."""
    figure = new_figure()
    axes = figure.add_subplot()
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
    dress(
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
    figure = new_figure()
    axes = figure.add_subplot()
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
    axes.set_xlim(0, float(edges[-1]))
    axes.set_ylim(bottom=0)
    dress(
        axes,
        title="Outcomes",
        x_label=f"time of arrival ({scale.unit})",
        y_label="requests per second",
    )
    add_legend(axes, handles[::-1], labels[::-1])  # in the order of the stack
    return figure


def goodput_figure(run: RunColumns) -> Figure:
    """Plot what came in, and what was answered in time."""
    figure = new_figure()
    axes = figure.add_subplot()
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
    axes.set_xlim(0, float(edges[-1]))
    axes.set_ylim(bottom=0)
    dress(
        axes,
        title="Arrivals and goodput",
        x_label=f"time ({scale.unit})",
        y_label="requests per second",
    )
    add_legend(axes, handles, labels)
    return figure


def waits_figure(run: RunColumns) -> Figure:
    """Plot the spread of the waits per client, the clients with most requests first."""
    requests = run.requests
    started = requests.started_ns != NEVER_NS
    parts = split_by_group(waits_ns(requests), requests.client[started], len(run.clients))
    shown, hidden = _busiest(parts, _ROWS_MAX)
    figure = new_figure(1.5 + 0.32 * len(shown))
    axes = figure.add_subplot()
    spreads = np.array([nearest_rank(parts[index], (100, 500, 900, 990)) for index in shown])
    scale = time_scale(int(spreads.max()))
    p10, p50, p90, p99 = spreads.T / scale.unit_ns
    rows = np.arange(len(shown))
    thin = axes.hlines(rows, p90, p99, color=OTHER, linewidth=1.2)
    thick = axes.hlines(rows, p10, p90, color=SKY, linewidth=6)
    (middle,) = axes.plot(p50, rows, "o", color=BLUE, markersize=6, clip_on=False)
    (last,) = axes.plot(p99, rows, "|", color=VERMILION, markersize=11, markeredgewidth=2)
    axes.set_yticks(rows, [plain(run.clients[index], 28) for index in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0, 1.05 * float(p99.max()) or 1.0)
    title = "Waits per client" + _note(shown, hidden)
    dress(axes, title=title, x_label=f"wait ({scale.unit})", grid="x")
    axes.tick_params(axis="y", length=0, pad=8)
    add_legend(axes, [middle, thick, thin, last], ["median", "p10 to p90", "p90 to p99", "p99"])
    return figure


def utilisation_figure(run: RunColumns) -> Figure:
    """Plot a heat map: one row per resource, darker is busier."""
    bins, scale = time_bins(run), time_scale(run.end_ns)
    share = busy_share(run, bins)
    count = len(run.resources)
    figure = new_figure(1.5 + min(4.5, 0.28 * count))
    axes = figure.add_subplot()
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
    dress(axes, title="Utilisation", x_label=f"time ({scale.unit})", grid="")
    every = -(-count // _ROWS_MAX)
    rows = range(0, count, every)
    axes.set_yticks(rows, [plain(run.resources[row].name, 28) for row in rows])
    axes.tick_params(axis="y", length=0)
    for edge in range(1, count):
        axes.axhline(edge - 0.5, color="white", linewidth=1.5 if count <= _ROWS_MAX else 0)
    bar = figure.colorbar(image, ax=axes, format=lambda value, _: f"{100 * value:.0f} %")
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=9, labelcolor=INK, length=0)
    return figure


def _busiest(parts: list[Int64], count_max: int) -> tuple[list[int], int]:
    """Return the groups with most values, and how many others have any."""
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
    # The slowest one is drawn at 1 / n, and no time at all as 1 us: logarithms have no zero.
    slower = np.maximum(count - 1 - ranks, 1) / count
    latency_ms = np.maximum(latency_ns[ranks], MICROSECOND_NS) / MILLISECOND_NS
    return np.insert(latency_ms, 0, latency_ms[0]), np.insert(slower, 0, 1.0)


def _mark_slos(axes: Axes, run: RunColumns, colours: dict[int, str]) -> None:
    """Mark the latency targets: a line each, or the band between the least and the greatest."""
    requests = run.requests
    marks: dict[tuple[int, int], str] = {}
    for index, colour in colours.items():
        chosen = (requests.pipeline == index) & (requests.deadline_ns != NEVER_NS)
        if chosen.any():
            target_ns = requests.deadline_ns[chosen] - requests.arrival_ns[chosen]
            key = (int(target_ns.min()), int(target_ns.max()))
            marks[key] = MUTED if key in marks else colour  # one that is shared has no colour
    for (low_ns, high_ns), colour in marks.items():
        low_ms, high_ms = low_ns / MILLISECOND_NS, high_ns / MILLISECOND_NS
        axes.axvline(low_ms, color=colour, linewidth=1.1, linestyle=(0, (4, 3)))
        if high_ms > 1.01 * low_ms:
            axes.axvline(high_ms, color=colour, linewidth=1.1, linestyle=(0, (4, 3)))
            axes.axvspan(low_ms, high_ms, color=colour, alpha=0.08, linewidth=0)
