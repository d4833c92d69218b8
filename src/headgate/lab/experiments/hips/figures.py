"""Figures 2 to 9 of the HiPS'21 paper, from the results here. They need matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from headgate.lab.experiments.hips.run import RequestTimes
from headgate.metrics.report.style import (
    BLUE,
    GREEN,
    INK,
    MARKERS,
    MUTED,
    ORANGE,
    SERIES,
    VERMILION,
    add_legend,
    new_figure,
    number_log_axis,
    save_png,
    style_axes,
)
from headgate.planning.latency_model import Characterisation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DASHES: Final = (0, (4, 3))


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
        handles = []
        for number, cores in enumerate(surface.cores):
            points = sorted(
                (p.concurrency, p.p50_ms)
                for p in surface.points
                if p.cores == cores and p.batch == 1
            )
            # Different marker sizes distinguish lines that coincide.
            handles += axes.plot(
                *zip(*points, strict=True),
                color=SERIES[number],
                marker=MARKERS[number],
                markersize=7.5 - number,
                linewidth=1.4,
            )
        axes.set_xticks([1, 5, 10, 15, 20])
        for limit_ms in sla_ms:
            _mark_sla(axes, limit_ms, is_below=limit_ms < max(sla_ms))
        if not sla_ms:
            axes.set_yscale("log")
            number_log_axis(axes.yaxis)
        style_axes(
            axes,
            title=name,
            x_label="concurrent requests",
            y_label="response time (ms)" if index == 1 else "",
            grid="both",
        )
        if index == len(surfaces):
            add_legend(axes, handles, [f"{n:g} core{'s' if n > 1 else ''}" for n in surface.cores])
    return figure


def sizes_figure(
    times_ms: Mapping[str, Mapping[float, float]], selected: Mapping[str, float]
) -> Figure:
    """Plot the time of a single request over cores, relative; a ring marks the selected size."""
    figure = new_figure()
    axes = figure.add_subplot()
    handles = []
    for number, (name, by_cores) in enumerate(times_ms.items()):
        longest = max(by_cores.values())
        cores = list(by_cores)
        parts = [value / longest for value in by_cores.values()]
        colour = SERIES[number]
        handles += axes.plot(cores, parts, color=colour, marker=MARKERS[number], linewidth=1.6)
        at = selected[name]
        axes.plot([at], [by_cores[at] / longest], "o", markersize=14, mfc="none", mec=colour, mew=2)
    axes.set_ylim(0, 1.05)
    axes.set_xscale("log", base=2)
    ticks = sorted({cores for by_cores in times_ms.values() for cores in by_cores})
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
        tried = list(trial.instance_attainment)
        handles = axes.plot(
            tried, list(trial.instance_attainment.values()), color=BLUE, marker="o", markersize=3.5
        )
        handles += axes.plot(
            tried, list(trial.attainment.values()), color=GREEN, marker="^", markersize=3.5
        )
        handles.append(axes.axvline(trial.planned, color=ORANGE, linewidth=5, alpha=0.45))
        handles.append(axes.axvline(trial.best, color=INK, linewidth=1.2, linestyle=_DASHES))
        axes.set_ylim(-0.04, 1.06)
        is_last_row = index > len(trials) - columns
        style_axes(axes, title=trial.title, x_label="threshold" if is_last_row else "", grid="both")
        if index == columns:
            labels = ["on the instance", "of all", "planned", "best by search"]
            add_legend(axes, handles, labels)
    figure.supylabel("SLA attainment", fontsize=9, color=MUTED)
    return figure


def load_figure(sizes: Sequence[int], period_s: float) -> Figure:
    """Plot figure 3: concurrent requests, wave by wave."""
    figure = new_figure(2.6)
    axes = figure.add_subplot()
    times_s = [index * period_s for index in range(len(sizes))]
    axes.plot(times_s, sizes, color=BLUE, linewidth=1.2, drawstyle="steps-post")
    axes.set_xlim(0, len(sizes) * period_s)
    axes.set_ylim(0, 21.5)
    axes.set_yticks([0, 5, 10, 15, 20])
    style_axes(
        axes, title="Figure 3: bursty load", x_label="time (s)", y_label="concurrent requests"
    )
    return figure


def responses_figure(
    requests: RequestTimes, *, title: str, sla_ms: float, until_s: float
) -> Figure:
    """Plot figures 4 to 9: the response time of every request over its arrival time."""
    figure = new_figure(3.0)
    axes = figure.add_subplot()
    kinds = {
        "in time": (requests.is_met, GREEN, "."),
        "late": (~requests.is_met & ~requests.is_cold, VERMILION, "."),
        "late, cold start": (~requests.is_met & requests.is_cold, INK, "x"),
    }
    handles, labels = [], []
    for label, (rows, colour, marker) in kinds.items():
        if not rows.any():
            continue
        handles += axes.plot(
            requests.arrival_s[rows],
            requests.response_ms[rows],
            marker,
            color=colour,
            markersize=5 if marker == "x" else 3,
        )
        labels.append(f"{label}: {int(np.count_nonzero(rows)):,}")
    _mark_sla(axes, sla_ms)
    axes.set_xlim(0, until_s)
    axes.set_yscale("log")
    axes.set_ylim(sla_ms / 20, 5_000)
    style_axes(axes, title=title, x_label="time (s)", y_label="response time (ms)", grid="both")
    number_log_axis(axes.yaxis)
    add_legend(axes, handles, labels)
    return figure


def violations_figure(late: Mapping[str, Mapping[str, tuple[float, float]]]) -> Figure:
    """Plot the share of late requests by policy, all and by cold starts; a panel per source."""
    figure = new_figure(3.0)
    first: Axes | None = None
    for index, (source, by_policy) in enumerate(late.items(), start=1):
        axes = figure.add_subplot(1, len(late), index, sharex=first, sharey=first)
        rows = range(len(by_policy))
        handles = [
            axes.plot([part[1] for part in by_policy.values()], rows, "x", color=INK)[0],
            axes.plot(
                [part[0] for part in by_policy.values()], rows, "o", color=VERMILION, mfc="none"
            )[0],
        ]
        style_axes(axes, title=source, x_label="late", grid="both")
        if first is None:
            first = axes
            axes.set_xscale("symlog", linthresh=1e-3)
            axes.set_xlim(-1e-4, 1.3)
            axes.set_xticks([0, 1e-3, 1e-2, 0.1, 1], ["0", "", "1 %", "", "100 %"])
            axes.set_yticks(rows, list(by_policy))
            axes.set_ylim(len(by_policy) - 0.4, -0.6)
        else:
            axes.tick_params(axis="y", labelleft=False)
        if index == len(late):
            add_legend(axes, handles, ["by cold starts", "all"])
    return figure


def write_figure(figure: Figure, out: Path, name: str) -> Path:
    """Write a figure into a directory."""
    return save_png(figure, out / f"{name}.png")


def _mark_sla(axes: Axes, sla_ms: float, *, is_below: bool = False) -> None:
    axes.axhline(sla_ms, color=MUTED, linewidth=1.1, linestyle=_DASHES)
    axes.annotate(
        f"SLA {sla_ms:.3g} ms",
        (1.0, sla_ms),
        xycoords=("axes fraction", "data"),
        xytext=(-2, -3 if is_below else 3),
        textcoords="offset points",
        ha="right",
        va="top" if is_below else "bottom",
        fontsize=8,
        color=MUTED,
    )
