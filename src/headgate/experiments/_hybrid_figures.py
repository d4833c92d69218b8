"""Figures of the hybrid experiments. They need matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from headgate.core.clock import MINUTE_NS
from headgate.experiments._hybrid_clairvoyant import Clairvoyant
from headgate.experiments._hybrid_timeline import STEP_NS, Timeline
from headgate.metrics.report.style import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    OTHER,
    VERMILION,
    dress,
    new_figure,
    plain,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS: Final = 2


@dataclass(frozen=True, slots=True)
class Bar:
    """What one policy came to on one trace."""

    policy: str
    dedicated_usd: float
    functions_usd: float
    attainment: float


def cost_figure(
    bars: Mapping[str, Sequence[Bar]], limits_usd: Mapping[str, float], attained: float
) -> Figure:
    """Plot, trace by trace, the cost of each policy, its attainment, and the clairvoyant's cost."""
    rows = -(-len(bars) // _COLUMNS)
    policies = len(next(iter(bars.values())))
    figure = new_figure(0.6 + rows * (0.75 + 0.2 * policies))
    axes = figure.subplots(rows, _COLUMNS, squeeze=False, sharey=True).ravel()
    percent = f"{100 * attained:g} %"
    figure.suptitle(
        f"Cost, and beside it the share in time (pale: below {percent})", fontsize=10, color=MUTED
    )
    for place, (trace, of_trace) in enumerate(bars.items()):
        _draw_costs(axes[place], trace, of_trace, limits_usd[trace], attained)
    for unused in axes[len(bars) :]:
        unused.set_visible(False)
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
    )
    return figure


def timeline_figure(timeline: Timeline, known: Clairvoyant, title: str) -> Figure:
    """Plot demand and instances over time, and below them the calls in flight."""
    figure = new_figure(4.6)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.4))
    minutes = np.arange(len(timeline.demand)) * (STEP_NS / MINUTE_NS)
    upper.fill_between(minutes, timeline.demand, step="post", color=OTHER, alpha=0.35, linewidth=0)
    upper.step(minutes, timeline.paid, where="post", color=ORANGE, linewidth=1.2, linestyle="--")
    upper.step(minutes, timeline.ready, where="post", color=BLUE, linewidth=1.8)
    known_minutes = np.arange(len(known.instances)) * (known.step_ns / MINUTE_NS)
    upper.step(known_minutes, known.instances, where="post", color=GREEN, linewidth=1.2)
    dress(upper, title=title, y_label="instances")
    upper.legend(
        ["demand", "paid for, booting included", "ready", "ready if all were known"],
        loc="upper right",
        ncols=2,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
    )
    upper.set_ylim(0, 1.35 * max(timeline.demand.max(), timeline.paid.max(), *known.instances))
    lower.fill_between(minutes, timeline.in_flight, step="post", color=VERMILION, linewidth=0)
    dress(lower, title="", x_label="time (min)", y_label="calls in flight")
    lower.set_xlim(0, minutes[-1])
    lower.set_ylim(bottom=0)
    return figure


def _draw_costs(
    axes: Axes, trace: str, bars: Sequence[Bar], limit_usd: float, attained: float
) -> None:
    places = range(len(bars))
    dedicated = [bar.dedicated_usd for bar in bars]
    totals = [bar.dedicated_usd + bar.functions_usd for bar in bars]
    functions = [bar.functions_usd for bar in bars]
    axes.barh(places, dedicated, 0.68, color=BLUE, label="instances")
    axes.barh(places, functions, 0.68, left=dedicated, color=ORANGE, label="functions")
    for place, (bar, total_usd) in enumerate(zip(bars, totals, strict=True)):
        is_good = bar.attainment >= attained
        if not is_good:  # cheap, but not what was asked for
            axes.barh(place, total_usd, 0.72, color="white", alpha=0.7)
        axes.annotate(
            f"{100 * bar.attainment:.1f} %",
            (total_usd, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=INK if is_good else MUTED,
        )
    axes.axvline(limit_usd, color=GREEN, linewidth=1.4, label="clairvoyant")
    axes.set_yticks(places, [plain(bar.policy, 24) for bar in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, 1.22 * max(totals))
    dress(axes, title=trace, x_label="cost (USD)", grid="x")
    axes.tick_params(axis="y", length=0)
