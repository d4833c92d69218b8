"""Figures 2 to 9 of the HiPS'21 paper, from the results here. They need matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headgate.lab.figures import DASHES, draw_lines, draw_responses, label_rows, mark_slo
from headgate.lab.harness import RequestTimes
from headgate.metrics.report.style import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    SERIES,
    VERMILION,
    add_legend,
    new_axes,
    new_figure,
    number_log_axis,
    style_axes,
)
from headgate.planning.capacity.latency_model import Characterisation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Trial:
    """Attainment of every threshold in one setting, by threshold."""

    title: str
    planned: int
    best: int
    instance_attainment: Mapping[int, float]
    attainment: Mapping[int, float]


def surface_figure(surfaces: Mapping[str, Characterisation], sla_ms: Sequence[float]) -> Figure:
    """Plot figure 2: response time over concurrency, a line for every number of cores."""
    figure = new_figure(3.4 if len(surfaces) == 1 else 3.0)
    for index, (name, surface) in enumerate(surfaces.items(), start=1):
        axes = figure.add_subplot(1, len(surfaces), index)
        lines = {}
        for cores in surface.cores:
            points = [p for p in surface.points if p.cores == cores and p.batch == 1]
            points.sort(key=lambda point: point.concurrency)
            label = f"{cores:g} core{'s' if cores > 1 else ''}"
            lines[label] = [p.concurrency for p in points], [p.p50_ms for p in points]
        handles = draw_lines(axes, lines)
        axes.set_xticks([1, 5, 10, 15, 20])
        for limit_ms in sla_ms:
            mark_slo(axes, limit_ms, is_below=limit_ms < max(sla_ms))
        if not sla_ms:
            axes.set_yscale("log")
            number_log_axis(axes.yaxis)
        y_label = "response time (ms)" if index == 1 else ""
        style_axes(axes, title=name, x_label="concurrent requests", y_label=y_label, grid="both")
        if index == len(surfaces):
            add_legend(axes, handles, list(lines))
    return figure


def sizes_figure(
    times_ms: Mapping[str, Mapping[float, float]], selected: Mapping[str, float]
) -> Figure:
    """Plot the time of a single request over cores, relative; a ring marks the selected size."""
    figure, axes = new_axes()
    parts = {
        name: {cores: time_ms / max(by_cores.values()) for cores, time_ms in by_cores.items()}
        for name, by_cores in times_ms.items()
    }
    lines = {name: (list(part), list(part.values())) for name, part in parts.items()}
    handles = draw_lines(axes, lines)
    for name, colour in zip(parts, SERIES, strict=False):
        at = selected[name]
        axes.plot([at], [parts[name][at]], "o", markersize=14, mfc="none", mec=colour, mew=2)
    axes.set_ylim(0, 1.05)
    axes.set_xscale("log", base=2)
    ticks = sorted({cores for part in parts.values() for cores in part})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    style_axes(
        axes,
        title="A single request; rings: the fewest cores about as fast as any",
        x_label="cores",
        y_label="response time over that on the fewest cores",
        grid="both",
    )
    add_legend(axes, handles, list(times_ms))
    return figure


def trials_figure(trials: Sequence[Trial]) -> Figure:
    """Plot attainment over the threshold, with the planned and the best threshold."""
    columns = 2
    rows = -(-len(trials) // columns)
    figure = new_figure(0.6 + 2.0 * rows)
    for index, trial in enumerate(trials, start=1):
        axes = figure.add_subplot(rows, columns, index)
        handles = []
        for values, colour, marker in (
            (trial.instance_attainment, BLUE, "o"),
            (trial.attainment, GREEN, "^"),
        ):
            y = list(values.values())
            handles += axes.plot(list(values), y, color=colour, marker=marker, markersize=3.5)
        handles.append(axes.axvline(trial.planned, color=ORANGE, linewidth=5, alpha=0.45))
        handles.append(axes.axvline(trial.best, color=INK, linewidth=1.2, linestyle=DASHES))
        axes.set_ylim(-0.04, 1.06)
        is_last_row = index > len(trials) - columns
        style_axes(axes, title=trial.title, x_label="threshold" if is_last_row else "", grid="both")
        if index == columns:
            add_legend(axes, handles, ["on the instance", "of all", "planned", "best by search"])
    figure.supylabel("SLA attainment", fontsize=9, color=MUTED)
    return figure


def load_figure(sizes: Sequence[int], period_s: float) -> Figure:
    """Plot figure 3: concurrent requests, wave by wave."""
    figure, axes = new_axes(2.6)
    times_s = [index * period_s for index in range(len(sizes))]
    axes.plot(times_s, sizes, color=BLUE, linewidth=1.2, drawstyle="steps-post")
    axes.set_xlim(0, len(sizes) * period_s)
    axes.set_ylim(0, 21.5)
    axes.set_yticks([0, 5, 10, 15, 20])
    title = "Figure 3: bursty load"
    style_axes(axes, title=title, x_label="time (s)", y_label="concurrent requests")
    return figure


def responses_figure(times: RequestTimes, *, title: str, sla_ms: float, until_s: float) -> Figure:
    """Plot figures 4 to 9: the response time of every request over its arrival time."""
    figure, axes = new_axes(3.0)
    axes.set_xlim(0, until_s)
    axes.set_ylim(sla_ms / 20, 5_000)
    draw_responses(axes, times, sla_ms)
    style_axes(axes, title=title, x_label="time (s)", y_label="response time (ms)", grid="both")
    return figure


def violations_figure(late: Mapping[str, Mapping[str, tuple[float, float]]]) -> Figure:
    """Plot the share of late requests by policy, all and by cold starts; a panel per source."""
    figure = new_figure(3.0)
    first: Axes | None = None
    for index, (source, by_policy) in enumerate(late.items(), start=1):
        axes = figure.add_subplot(1, len(late), index, sharex=first, sharey=first)
        rows = range(len(by_policy))
        all_late, cold = zip(*by_policy.values(), strict=True)
        handles = axes.plot(cold, rows, "x", color=INK)
        handles += axes.plot(all_late, rows, "o", color=VERMILION, mfc="none")
        style_axes(axes, title=source, x_label="late", grid="both")
        if first is None:
            first = axes
            axes.set_xscale("symlog", linthresh=1e-3)
            axes.set_xlim(-1e-4, 1.3)
            axes.set_xticks([0, 1e-3, 1e-2, 0.1, 1], ["0", "", "1 %", "", "100 %"])
            label_rows(axes, list(by_policy))
        else:
            axes.tick_params(axis="y", labelleft=False)
        if index == len(late):
            add_legend(axes, handles, ["by cold starts", "all"])
    return figure
