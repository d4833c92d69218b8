"""Figures of the experiments on chapter 6 of the thesis. They need matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headgate.metrics.confidence import Interval
from headgate.metrics.report.comparison_plots import sweep_figure
from headgate.metrics.report.style import (
    MARKERS,
    MUTED,
    SERIES,
    add_legend,
    dress,
    new_figure,
    number_log_axis,
    save_png,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def waits_figure(series: Mapping[str, Mapping[str, Interval]], *, title: str) -> Figure:
    """Plot a mean with its interval per model (series) and policy (row), on a log scale."""
    policies = list(next(iter(series.values())))
    figure = new_figure(1.5 + 0.34 * len(policies))
    axes = figure.add_subplot()
    handles = []
    for place, (colour, marker, intervals) in enumerate(
        zip(SERIES, MARKERS, series.values(), strict=False)
    ):
        rows = [row + 0.24 * (place - (len(series) - 1) / 2) for row in range(len(policies))]
        means = [intervals[policy].mean for policy in policies]
        low = [intervals[policy].low for policy in policies]
        high = [intervals[policy].high for policy in policies]
        axes.hlines(rows, low, high, color=colour, linewidth=2)
        handles += axes.plot(means, rows, marker, color=colour, markersize=6)
    axes.set_xscale("log")
    axes.set_yticks(range(len(policies)), policies)
    axes.set_ylim(len(policies) - 0.4, -0.6)
    dress(axes, title=title, x_label="mean time on the queue (timesteps)", grid="x")
    number_log_axis(axes.xaxis)
    axes.tick_params(axis="y", length=0)
    add_legend(axes, handles, list(series))
    return figure


def load_figure(
    loads: Sequence[float], lines: Mapping[str, Sequence[Interval]], wait: float
) -> Figure:
    """Plot BERT's wait under SRTF against load, and mark the wait that the thesis prints."""
    figure = sweep_figure(
        loads,
        lines,
        title=f"BERT under SRTF as load rises; dashed: {wait} (thesis)",
        x_label="load (evaluation time asked for per GPU time)",
        y_label="mean time on the queue (timesteps)",
    )
    figure.axes[0].axhline(wait, color=MUTED, linewidth=1.1, linestyle=(0, (4, 3)))
    return figure


def log_sweep_figure(
    x: Sequence[float],
    lines: Mapping[str, Sequence[Interval]],
    *,
    title: str,
    x_label: str,
) -> Figure:
    """Plot a sweep with waits on a log scale, because round robin dwarfs the others."""
    figure = sweep_figure(
        x, lines, title=title, x_label=x_label, y_label="mean time on the queue (timesteps)"
    )
    axes = figure.axes[0]
    axes.set_yscale("log")
    least = min(interval.mean for line in lines.values() for interval in line)
    axes.set_ylim(bottom=max(least, 0.005) / 2)  # a band that reaches zero has no lower end here
    number_log_axis(axes.yaxis)
    return figure


def write_figure(figure: Figure, out: Path, name: str) -> Path:
    """Write a figure into a directory."""
    return save_png(figure, out / f"{name}.png")
