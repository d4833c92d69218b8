"""Figures of the ESG experiment. They need matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Final

import numpy as np

from headgate.lab.experiments.esg_cluster.environment import ClusterScenario
from headgate.lab.experiments.esg_cluster.results import (
    CellTable,
    CellTables,
    DynamicsTable,
    condition_label,
)
from headgate.lab.figures import DASHES
from headgate.lab.harness import margin
from headgate.metrics.report.style import (
    INK,
    MARKERS,
    MUTED,
    SERIES,
    add_legend_below,
    new_figure,
    style_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_RATIO_MAX: Final = 1.5  # of the response time over the objective, drawn


def cells_figure(table: CellTables) -> Figure:
    """Plot hit rate and cost of every policy, by profile set and cell."""
    sets = list(dict.fromkeys(each.profiles for each in table.cells))
    figure = new_figure(0.6 + 2.3 * len(sets))
    axes = figure.subplots(len(sets), 2, squeeze=False)
    for (left, right), name in zip(axes, sets, strict=True):
        cells = [each for each in table.cells if each.profiles == name]
        _draw_bars(left, cells, _hit_percentages, 100.0)
        style_axes(left, title=f"{name}: hit rate", y_label="%")
        left.set_ylim(0, 105)
        _draw_bars(right, cells, CellTable.costs, 1.0)
        for position, each in enumerate(cells):
            bound = fmean(each.bound())
            right.plot([position - 0.45, position + 0.45], [bound] * 2, color=INK, linewidth=1.4,
                       label="lower bound" if position == 0 else None)  # fmt: skip
        style_axes(right, title=f"{name}: cost per request", y_label="times that of ESG")
    add_legend_below(figure, *axes[0][1].get_legend_handles_labels(), columns=4)
    return figure


def latency_figure(table: CellTables) -> Figure:
    """Plot the distribution of response times over the objective, by profile set and cell."""
    sets = list(dict.fromkeys(each.profiles for each in table.cells))
    columns = max(sum(each.profiles == name for each in table.cells) for name in sets)
    figure = new_figure(0.8 + 2.1 * len(sets))
    axes = figure.subplots(len(sets), columns, squeeze=False, sharex=True, sharey=True)
    for row, name in zip(axes, sets, strict=True):
        cells = [each for each in table.cells if each.profiles == name]
        for each_axes, each in zip(row, cells, strict=False):
            _draw_distributions(each_axes, each)
            style_axes(each_axes, title=each.label, grid="both")
        row[0].set_ylabel(f"{name}: share of all requests", fontsize=9, color=MUTED)
    for each_axes in axes[-1]:
        each_axes.set_xlabel("response time / SLO", fontsize=9, color=MUTED)
    add_legend_below(figure, *axes[0][0].get_legend_handles_labels(), columns=4)
    return figure


def dynamics_figure(table: DynamicsTable, load: str, others: Sequence[str]) -> Figure:
    """Plot hit rate and cost over load, and the hit rate under failures and wrong profiles."""
    figure = new_figure(6.2)
    (hits, costs), (left, right) = figure.subplots(2, 2)
    scenarios = table.conditions[load]
    x = [100 * each.cell.utilisation * each.load_factor for each in scenarios]
    for number, policy in enumerate(table.policies):
        style = {"color": _colour(number), "marker": MARKERS[number % len(MARKERS)]}
        rates = [100 * fmean(table.hits(policy, each)) for each in scenarios]
        hits.plot(x, rates, label=policy, markersize=5, linewidth=1.6, **style)
        usd = [fmean(table.usd_per_million(policy, each)) for each in scenarios]
        costs.plot(x, usd, markersize=5, linewidth=1.6, **style)
    style_axes(hits, title="hit rate over load", x_label="load (%)", y_label="%", grid="both")
    style_axes(
        costs, title="cost over load", x_label="load (%)", y_label="$ per million requests",
        grid="both",
    )  # fmt: skip
    hits.set_ylim(0, 105)
    costs.set_ylim(bottom=0)
    for axes, change in zip((left, right), others, strict=True):
        _draw_conditions(axes, table, table.conditions[change])
        style_axes(axes, title=f"hit rate: {change}", y_label="%")
    add_legend_below(figure, *hits.get_legend_handles_labels(), columns=4)
    return figure


def _hit_percentages(cell: CellTable, policy: str) -> list[float]:
    return [100 * hit for hit in cell.hits(policy)]


def _draw_bars(
    axes: Axes,
    cells: Sequence[CellTable],
    values: Callable[[CellTable, str], list[float]],
    level: float,
) -> None:
    """Draw a bar with its 95 % interval for every cell and policy."""
    policies = list(cells[0].runs)
    width = 0.86 / len(policies)
    for number, policy in enumerate(policies):
        x = np.arange(len(cells)) - 0.43 + (number + 0.5) * width
        of_seeds = [values(each, policy) for each in cells]
        axes.bar(
            x,
            [fmean(each) for each in of_seeds],
            0.92 * width,
            yerr=[margin(each) for each in of_seeds],
            error_kw={"linewidth": 0.9, "ecolor": INK},
            color=_colour(number),
            label=policy,
        )
    axes.axhline(level, color=MUTED, linewidth=0.9, linestyle=DASHES)
    axes.set_xticks(range(len(cells)), [each.label for each in cells])


def _draw_distributions(axes: Axes, cell: CellTable) -> None:
    """Draw the share of all requests that are served within a multiple of the objective."""
    for number, (policy, runs) in enumerate(cell.runs.items()):
        quantiles = np.linspace(0.0, 1.0, len(runs[0].slo_ratios))
        ratios = np.mean([run.slo_ratios for run in runs], axis=0)
        served = 1 - fmean(run.unserved for run in runs)
        if served > 0:
            axes.plot(ratios, served * quantiles, color=_colour(number), linewidth=1.6,
                      label=policy)  # fmt: skip
    axes.axvline(1.0, color=MUTED, linewidth=1.0, linestyle=DASHES)
    axes.set_xlim(0, _RATIO_MAX)
    axes.set_ylim(0, 1.02)


def _draw_conditions(
    axes: Axes, table: DynamicsTable, scenarios: Sequence[ClusterScenario]
) -> None:
    width = 0.86 / len(table.policies)
    for number, policy in enumerate(table.policies):
        x = np.arange(len(scenarios)) - 0.43 + (number + 0.5) * width
        hits = [[100 * hit for hit in table.hits(policy, each)] for each in scenarios]
        axes.bar(x, [fmean(each) for each in hits], 0.92 * width, color=_colour(number),
                 yerr=[margin(each) for each in hits], error_kw={"linewidth": 0.9})  # fmt: skip
    axes.set_xticks(range(len(scenarios)), [condition_label(each) for each in scenarios])
    axes.set_ylim(0, 105)


def _colour(number: int) -> str:
    return SERIES[number % len(SERIES)]
