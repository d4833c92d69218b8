"""Figures of the Swayam experiment. They need matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np

from headgate.core.clock import HOUR_NS
from headgate.lab.experiments.autoscaling.environment import SERVICE_LEVEL
from headgate.lab.experiments.autoscaling.results import CLAIRVOYANT, ServiceTable, ServiceTables
from headgate.lab.experiments.autoscaling.runs import SAMPLE_NS
from headgate.metrics.report.style import INK, MUTED, SERIES, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BAR: Final = 0.8  # of the distance between services, all bars together


def usage_figure(tables: ServiceTables) -> Figure:
    """Plot compliance over time and backend-time of every policy, by service and set-up time."""
    setups = sorted({table.scenario.setup_s for table in tables.tables})
    figure = new_figure(0.6 + 2.2 * 2 * len(setups))
    axes = figure.subplots(2 * len(setups), 1, squeeze=False)[:, 0]
    for number, setup_s in enumerate(setups):
        chosen = [table for table in tables.tables if table.scenario.setup_s == setup_s]
        met, used = axes[2 * number : 2 * number + 2]
        _draw_bars(met, chosen, tables.policies, _compliance)
        met.axhline(96, color=MUTED, linewidth=1.0, linestyle=(0, (4, 3)))
        met.set_ylim(min(80.0, _lowest(chosen)), 100.5)
        style_axes(met, title=f"set-up {setup_s:g} s: SLA met, % of minutes", y_label="%")
        _draw_bars(used, chosen, tables.policies, ServiceTable.normalised)
        for position, table in enumerate(chosen):
            label = CLAIRVOYANT if position == 0 else None
            used.plot(
                [position - 0.45, position + 0.45],
                [table.lazy] * 2,
                color=INK,
                linewidth=1.4,
                label=label,
            )
        used.set_yscale("log")
        used.set_yticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
        used.minorticks_off()
        style_axes(
            used, title=f"set-up {setup_s:g} s: backend-time", y_label="times that of ClairA1"
        )
    handles, labels = axes[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def timeline_figure(table: ServiceTable, policies: list[str]) -> Figure:
    """Plot the backends of every policy over time, with the load and ClairA2's backends."""
    figure = new_figure(0.8 + 1.7 * len(policies))
    axes = figure.subplots(len(policies), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
    hours = (np.arange(len(table.oracle.demand)) + 0.5) * SAMPLE_NS / HOUR_NS
    for number, (each, policy) in enumerate(zip(axes, policies, strict=True)):
        run = table.runs[policy]
        each.fill_between(hours, table.oracle.demand, color="#c3cbd5", linewidth=0, label="load")
        each.plot(hours, table.oracle.backends, color=INK, linewidth=0.9, label=CLAIRVOYANT)
        each.plot(hours, run.backends, color=SERIES[number], linewidth=1.3, label="backends")
        missed = np.flatnonzero(run.windows < SERVICE_LEVEL)
        if len(missed):
            x, y = (missed + 0.5) / 60, np.zeros(len(missed))
            each.plot(x, y, "x", color=INK, markersize=5, label="minute below 99 %")
        title = f"{policy}: {100 * run.compliance:.1f} %"
        style_axes(each, title=f"{title}, {table.normalised(policy):.2f} x ClairA1")
    axes[-1].set_xlabel("hours", fontsize=9, color=MUTED)
    known: dict[str, Artist] = {}
    for each in axes:
        for handle, label in zip(*each.get_legend_handles_labels(), strict=True):
            known.setdefault(label, handle)
    handles, labels = list(known.values()), list(known)
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _compliance(table: ServiceTable, policy: str) -> float:
    return 100 * table.runs[policy].compliance


def _lowest(tables: list[ServiceTable]) -> float:
    return min(100 * run.compliance for table in tables for run in table.runs.values())


def _draw_bars(
    axes: Axes,
    tables: list[ServiceTable],
    policies: list[str],
    value: Callable[[ServiceTable, str], float],
) -> None:
    """Draw a bar for each policy on each service."""
    width = _BAR / len(policies)
    places = np.arange(len(tables))
    for number, policy in enumerate(policies):
        heights = [value(table, policy) for table in tables]
        offset = (number - (len(policies) - 1) / 2) * width
        axes.bar(places + offset, heights, width, color=SERIES[number], label=policy)
    names = [table.scenario.service.name for table in tables]
    axes.set_xticks(places, names, rotation=30, ha="right", fontsize=8)
