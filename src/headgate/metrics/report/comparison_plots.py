"""Figures that set several runs side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headgate.metrics.confidence import Interval
from headgate.metrics.report.style import (
    BLUE,
    GRID,
    INK,
    MARKERS,
    MUTED,
    SERIES,
    add_legend,
    dress,
    new_figure,
    plain,
)
from headgate.metrics.sheet import Quantity, format_column
from headgate.metrics.summary import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class _Panel:
    title: str
    quantity: Quantity
    value: Callable[[Summary], float]


_PANELS = (
    _Panel("SLO attainment", "share", lambda summary: summary.slo_attainment),
    _Panel("Mean wait", "time_ms", lambda summary: summary.mean_wait_ms),
    _Panel("Cost", "usd", lambda summary: summary.cost_usd),
)


def comparison_figure(rows: Sequence[tuple[str, Summary]]) -> Figure:
    """Plot attainment, wait and cost of labelled runs: one dot per run, values beside them."""
    figure = new_figure(1.4 + 0.34 * len(rows))
    first: Axes | None = None
    for number, panel in enumerate(_PANELS, start=1):
        axes = figure.add_subplot(1, len(_PANELS), number, sharey=first)
        _draw_panel(axes, panel, [panel.value(summary) for _, summary in rows])
        if first is None:
            first = axes
            axes.set_yticks(range(len(rows)), [plain(label, 24) for label, _ in rows])
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
    figure = new_figure()
    axes = figure.add_subplot()
    handles = []
    for place, intervals in enumerate(series.values()):
        colour, marker = SERIES[place % len(SERIES)], MARKERS[place % len(MARKERS)]
        means = [interval.mean for interval in intervals]
        low = np.array([interval.low for interval in intervals])
        high = np.array([interval.high for interval in intervals])
        axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
        handles += axes.plot(x, means, color=colour, marker=marker, markersize=5, linewidth=1.8)
    dress(axes, title=title, x_label=x_label, y_label=y_label, grid="both")
    add_legend(axes, handles, list(series))
    return figure


def _draw_panel(axes: Axes, panel: _Panel, values: Sequence[float]) -> None:
    column = format_column(panel.title, panel.quantity, values)
    rows = np.arange(len(values))
    shown = np.array(values, dtype=np.float64)
    unit = column.unit
    if _spans_decades(panel, shown):  # or the largest would leave nothing to see of the others
        unit += ", log"
        shown = np.log10(shown / (0.5 * np.nanmin(shown)))
    axes.hlines(rows, 0, shown, color=GRID, linewidth=2.5, zorder=1)
    axes.plot(shown, rows, "o", color=BLUE, markersize=8, zorder=2, clip_on=False)
    for row, (value, cell) in enumerate(zip(shown, column.cells, strict=True)):
        axes.annotate(
            plain(cell),
            (value if np.isfinite(value) else 0.0, row),
            xytext=(9, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=INK if np.isfinite(value) else MUTED,
        )
    largest = float(np.nanmax(shown, initial=0.0))
    axes.set_xlim(0, (largest or 1.0) * 1.45)  # room for the values
    dress(axes, title=f"{panel.title} ({unit})", grid="")
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _spans_decades(panel: _Panel, values: NDArray[np.float64]) -> bool:
    finite = values[np.isfinite(values)]
    return (
        panel.quantity == "time_ms"
        and len(finite) > 0
        and bool(finite.min() > 0)
        and bool(finite.max() > 100 * finite.min())
    )
