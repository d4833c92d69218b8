"""The figure of a workload characterisation: response time against requests at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headgate.metrics.report.style import (
    INK,
    MARKERS,
    SERIES,
    add_legend,
    dress,
    new_figure,
    number_log_axis,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Curve:
    """Response times on one number of cores, by rising numbers of requests at once."""

    cores: float
    concurrency: tuple[int, ...]
    times_ms: tuple[float, ...]
    # Where the true value lies with 95 % confidence; empty if nobody knows.
    lows_ms: tuple[float, ...] = ()
    highs_ms: tuple[float, ...] = ()

    @property
    def label(self) -> str:
        """What the legend says.

        >>> Curve(0.5, (1,), (8.0,)).label, Curve(1, (1,), (4.0,)).label
        ('0.5 cores', '1 core')
        """
        return f"{self.cores:.3g} core{'' if self.cores == 1 else 's'}"


def characterisation_figure(
    title: str, curves: Sequence[Curve], *, quantity: str = "median", slo_ms: float | None = None
) -> Figure:
    """Plot one line per number of cores, and the objective as a line across.

    Both axes are logarithmic where times span more than a decade: or the lone requests, by which
    cores are told apart, would all lie on the floor.
    """
    figure = new_figure()
    axes = figure.add_subplot()
    handles, labels = [], []
    for place, curve in enumerate(curves):
        colour, marker = SERIES[place % len(SERIES)], MARKERS[place % len(MARKERS)]
        if curve.lows_ms:
            axes.fill_between(
                curve.concurrency, curve.lows_ms, curve.highs_ms, color=colour, alpha=0.18, lw=0
            )
        handles += axes.plot(
            curve.concurrency, curve.times_ms, color=colour, marker=marker, ms=5, linewidth=1.8
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
    dress(
        axes,
        title=title,
        x_label="requests at once",
        y_label=f"response time, {quantity} (ms)",
        grid="both",
    )
    add_legend(axes, handles, labels)
    return figure
