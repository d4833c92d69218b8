"""Parts of figures that experiments and demonstrations share. They need matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import ArrayLike

from headgate.lab.harness import RequestTimes
from headgate.metrics.report.style import (
    GREEN,
    INK,
    MARKERS,
    MUTED,
    SERIES,
    VERMILION,
    add_legend,
    escape_label,
    number_log_axis,
    save_png,
)

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DASHES: Final = (0, (4, 3))


def write_figures(
    out: Path | None, name: str, figures: Callable[[], Mapping[str, Figure]]
) -> tuple[Path, ...]:
    """Write figures as `out/name-key.png`; without a directory none is drawn."""
    if out is None:
        return ()
    return tuple(save_png(figure, out / f"{name}-{key}.png") for key, figure in figures().items())


def draw_lines(axes: Axes, lines: Mapping[str, tuple[ArrayLike, ArrayLike]]) -> list[Artist]:
    """Draw a line with markers for each label; return the lines, for a legend.

    Markers get smaller, so that lines that coincide can be told apart.
    """
    handles: list[Artist] = []
    for number, (x, y) in enumerate(lines.values()):
        colour, marker, size = SERIES[number], MARKERS[number], 7.5 - number
        handles += axes.plot(x, y, color=colour, marker=marker, markersize=size, linewidth=1.5)
    return handles


def label_rows(axes: Axes, labels: Sequence[str]) -> None:
    """Label one row per policy, the first on top."""
    axes.set_yticks(range(len(labels)), [escape_label(label, 24) for label in labels])
    axes.set_ylim(len(labels) - 0.4, -0.6)


def mark_slo(axes: Axes, slo_ms: float, *, is_below: bool = False) -> None:
    """Draw the objective as a dashed line, with its value above or below the line."""
    axes.axhline(slo_ms, color=MUTED, linewidth=1.1, linestyle=DASHES)
    axes.annotate(
        f"SLA {slo_ms:.3g} ms",
        (1.0, slo_ms),
        xycoords=("axes fraction", "data"),
        xytext=(-2, -3 if is_below else 3),
        textcoords="offset points",
        ha="right",
        va="top" if is_below else "bottom",
        fontsize=8,
        color=MUTED,
    )


def draw_responses(axes: Axes, times: RequestTimes, slo_ms: float) -> None:
    """Draw the response time of every request over its arrival time, and count kinds."""
    kinds = {
        "in time": (times.is_met, GREEN, "."),
        "late": (~times.is_met & ~times.is_cold, VERMILION, "."),
        "late, cold start": (~times.is_met & times.is_cold, INK, "x"),
    }
    handles, labels = [], []
    for label, (rows, colour, marker) in kinds.items():
        if rows.any():
            x, y = times.arrival_s[rows], times.response_ms[rows]
            size = 5 if marker == "x" else 3
            handles += axes.plot(x, y, marker, color=colour, markersize=size)
            labels.append(f"{label}: {int(np.count_nonzero(rows)):,}")
    mark_slo(axes, slo_ms)
    axes.set_yscale("log")
    number_log_axis(axes.yaxis)
    add_legend(axes, handles, labels)
