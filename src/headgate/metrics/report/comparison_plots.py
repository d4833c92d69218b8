"""Figures that compare several runs, or several measurements of one workload."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from headgate.metrics.confidence import Interval
from headgate.metrics.format import Quantity
from headgate.metrics.report.style import (
    BLUE,
    GRID,
    INK,
    MARKERS,
    MUTED,
    SERIES,
    Plot,
    add_legend,
    escape_label,
    new_axes,
    new_figure,
    number_log_axis,
    style_axes,
)
from headgate.metrics.summary import Summary
from headgate.metrics.table import Fields, format_column

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D


PANELS: Final[Fields] = (
    ("SLO attainment", "share", "slo_attainment"),
    ("Mean wait", "time_ms", "mean_wait_ms"),
    ("Cost", "usd", "cost_usd"),
)


def comparison_plots(rows: Sequence[tuple[str, Summary]]) -> Iterator[Plot]:
    """Yield the figure that compares labelled runs of one workload. Needs matplotlib."""
    caption = "The same requests under each policy"
    yield Plot("comparison", caption, comparison_figure(rows))


def comparison_figure(rows: Sequence[tuple[str, Summary]]) -> Figure:
    """Plot attainment, wait and cost of labelled runs: one dot per run, with its value."""
    figure = new_figure(1.4 + 0.34 * len(rows))
    first: Axes | None = None
    for number, (title, quantity, name) in enumerate(PANELS, start=1):
        axes = figure.add_subplot(1, len(PANELS), number, sharey=first)
        _draw_panel(axes, title, quantity, [getattr(summary, name) for _, summary in rows])
        if first is None:
            first = axes
            axes.set_yticks(range(len(rows)), [escape_label(label, 24) for label, _ in rows])
            axes.set_ylim(len(rows) - 0.4, -0.6)
        else:
            axes.tick_params(axis="y", labelleft=False)
    return figure


def sweep_figure(
    x: Sequence[float],
    series: Mapping[str, Sequence[Interval]],
    *,
    title: str,
    x_label: str,
    y_label: str,
) -> Figure:
    """Plot means over `x`, one line per series, with their confidence bands."""
    figure, axes = new_axes()
    handles = []
    for index, intervals in enumerate(series.values()):
        means, lows, highs = zip(
            *((each.mean, each.low, each.high) for each in intervals), strict=True
        )
        handles += _draw_line(axes, index, x, means, lows, highs)
    style_axes(axes, title=title, x_label=x_label, y_label=y_label, grid="both")
    add_legend(axes, handles, list(series))
    return figure


def _draw_panel(axes: Axes, title: str, quantity: Quantity, values: Sequence[float]) -> None:
    column = format_column(title, quantity, values)
    rows = np.arange(len(values))
    shown = np.array(values, dtype=np.float64)
    unit = column.unit
    # On a linear axis the longest time would make the others invisible.
    if quantity == "time_ms" and _spans_decades(shown):
        unit += ", log"
        shown = np.log10(shown / (0.5 * np.nanmin(shown)))
    axes.hlines(rows, 0, shown, color=GRID, linewidth=2.5, zorder=1)
    axes.plot(shown, rows, "o", color=BLUE, markersize=8, zorder=2, clip_on=False)
    for row, (value, cell) in enumerate(zip(shown, column.cells, strict=True)):
        axes.annotate(
            escape_label(cell),
            (value if np.isfinite(value) else 0.0, row),
            xytext=(9, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=INK if np.isfinite(value) else MUTED,
        )
    largest = float(np.nanmax(shown, initial=0.0))
    axes.set_xlim(0, (largest or 1.0) * 1.45)  # room for the values
    style_axes(axes, title=f"{title} ({unit})", grid="")
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _draw_line(
    axes: Axes,
    index: int,
    x: Sequence[float],
    y: Sequence[float],
    lows: Sequence[float],
    highs: Sequence[float],
) -> list[Line2D]:
    """Draw a line in the style of series `index`, with its confidence band if that is known."""
    colour, marker = SERIES[index % len(SERIES)], MARKERS[index % len(MARKERS)]
    if lows:
        axes.fill_between(x, lows, highs, color=colour, alpha=0.18, linewidth=0)
    return axes.plot(x, y, color=colour, marker=marker, markersize=5, linewidth=1.8)


def _spans_decades(values: NDArray[np.float64]) -> bool:
    finite = values[np.isfinite(values)]
    return bool(len(finite) and finite.min() > 0 and finite.max() > 100 * finite.min())


@dataclass(frozen=True, slots=True)
class Curve:
    """Response times on one number of cores, by rising concurrency of requests."""

    cores: float
    concurrency: tuple[int, ...]
    times_ms: tuple[float, ...]
    # The bounds of the 95 % confidence intervals; empty if they are not known.
    lows_ms: tuple[float, ...] = ()
    highs_ms: tuple[float, ...] = ()

    @property
    def label(self) -> str:
        """The label in the legend.

        >>> Curve(0.5, (1,), (8.0,)).label, Curve(1, (1,), (4.0,)).label
        ('0.5 cores', '1 core')
        """
        return f"{self.cores:.3g} core{'' if self.cores == 1 else 's'}"


def characterisation_figure(title: str, curves: Sequence[Curve], *, slo_ms: float | None) -> Figure:
    """Plot response time against concurrency, one line per number of cores, and the SLO.

    Both axes are logarithmic if times span more than a decade: on linear axes the times at low
    concurrency, by which numbers of cores differ most, could not be read.
    """
    figure, axes = new_axes()
    handles, labels = [], []
    for index, curve in enumerate(curves):
        handles += _draw_line(
            axes, index, curve.concurrency, curve.times_ms, curve.lows_ms, curve.highs_ms
        )
        labels.append(curve.label)
    if slo_ms is not None:
        handles.append(axes.axhline(slo_ms, color=INK, linestyle="--", linewidth=1.4))
        labels.append(f"SLO {slo_ms:g} ms")
    times_ms = [time_ms for curve in curves for time_ms in curve.times_ms]
    if max(times_ms) > 10 * min(times_ms):
        axes.set_xscale("log")
        axes.set_yscale("log")
        number_log_axis(axes.xaxis)
        number_log_axis(axes.yaxis)
    else:
        axes.set_ylim(bottom=0.0)
    style_axes(
        axes,
        title=title,
        x_label="concurrent requests",
        y_label="response time, median (ms)",
        grid="both",
    )
    add_legend(axes, handles, labels)
    return figure
