"""Figures of the hybrid experiments: cost per policy, and the timeline of one run.

The figures need matplotlib.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

import numpy as np
from numpy.typing import NDArray

from headgate.core.actions import Action, Dispatch, StartInstance
from headgate.core.clock import MINUTE_NS, SECOND_NS
from headgate.core.events import (
    BatchFinished,
    BatchRefused,
    Event,
    InstanceStarted,
    InstanceStopped,
)
from headgate.lab.experiments.hybrid_renting.environment import TraceScenario
from headgate.lab.experiments.hybrid_renting.offline_optimum import Clairvoyant
from headgate.lab.experiments.hybrid_renting.results import TraceMeans
from headgate.lab.figures import label_rows
from headgate.lab.harness import Case
from headgate.metrics.report.style import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    OTHER,
    VERMILION,
    add_legend_below,
    new_figure,
    style_axes,
)
from headgate.sim.interfaces import Observer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


STEP_NS: Final = 10 * SECOND_NS
_COLUMNS: Final = 2
Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Timeline:
    """A run in time steps: means of demand and instances, maximum of concurrent calls."""

    demand: Float64  # number of instances that the arrivals would keep busy
    ready: Float64
    paid: Float64  # booting instances included
    in_flight: Float64


@final
class TimelineObserver(Observer):
    """Records every change of the number of instances and of calls in flight."""

    def __init__(self) -> None:
        self.paid: list[tuple[int, int]] = [(0, 0)]  # (time of change, number since then)
        self.ready: list[tuple[int, int]] = [(0, 0)]
        self.in_flight: list[tuple[int, int]] = [(0, 0)]
        self._calls: set[int] = set()
        self._ready: set[int] = set()

    def on_event(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        if isinstance(event, InstanceStarted):
            self._ready.add(event.instance_id)
            _record_change(self.ready, now_ns, 1)
        elif isinstance(event, InstanceStopped):
            _record_change(self.paid, now_ns, -1)
            if event.instance_id in self._ready:
                _record_change(self.ready, now_ns, -1)
        elif isinstance(event, BatchFinished | BatchRefused) and event.batch_id in self._calls:
            self._calls.remove(event.batch_id)
            _record_change(self.in_flight, now_ns, -1)
        for action in actions:
            if isinstance(action, StartInstance):
                _record_change(self.paid, now_ns, 1)
            elif isinstance(action, Dispatch) and action.node_id is None:
                self._calls.add(action.batch_id)
                _record_change(self.in_flight, now_ns, 1)


def record_timeline(case: Case[TraceScenario], seed: int) -> Timeline:
    watcher = TimelineObserver()
    arrivals = case.scenario.arrivals(seed)
    case.scenario.environment(seed).simulate(case.policy, seed, observer=watcher)
    steps = -(-arrivals.duration_ns // STEP_NS)
    counts = np.bincount(arrivals.times_ns // STEP_NS, minlength=steps)
    return Timeline(
        counts / (case.scenario.setting.capacity_per_s * STEP_NS / SECOND_NS),
        mean_per_step(watcher.ready, steps),
        mean_per_step(watcher.paid, steps),
        max_per_step(watcher.in_flight, steps),
    )


def mean_per_step(changes: list[tuple[int, int]], steps: int) -> Float64:
    """Return the mean per step of a piecewise constant number, given by its changes.

    >>> mean_per_step([(0, 2), (STEP_NS // 2, 4)], 2).tolist()
    [3.0, 4.0]
    """
    edges_ns = np.arange(steps + 1) * STEP_NS
    times_ns, numbers = np.array(changes).T
    sums = np.concatenate(([0], np.cumsum(numbers[:-1] * np.diff(times_ns))))  # up to each change
    last = np.searchsorted(times_ns, edges_ns, side="right") - 1
    until = sums[last] + numbers[last] * (edges_ns - times_ns[last])
    means: Float64 = np.diff(until) / STEP_NS
    return means


def max_per_step(changes: list[tuple[int, int]], steps: int) -> Float64:
    """Return the maximum per step of a piecewise constant number, given by its changes.

    >>> max_per_step([(0, 2), (1, 7), (2, 1)], 2).tolist()
    [7.0, 1.0]
    """
    times_ns, numbers = np.array(changes).T
    edges_ns = np.arange(steps) * STEP_NS
    most: Float64 = numbers[np.searchsorted(times_ns, edges_ns, side="right") - 1].astype(
        np.float64
    )
    within = times_ns // STEP_NS
    is_within = within < steps
    np.maximum.at(most, within[is_within], numbers[is_within])
    return most


def _record_change(changes: list[tuple[int, int]], now_ns: int, change: int) -> None:
    changes.append((now_ns, changes[-1][1] + change))


def cost_figure(
    costs: Mapping[str, Mapping[str, TraceMeans]], limits_usd: Mapping[str, float], attained: float
) -> Figure:
    """Plot, per trace, cost and attainment of each policy, and the clairvoyant's cost."""
    rows = -(-len(costs) // _COLUMNS)
    policies = len(next(iter(costs.values())))
    figure = new_figure(0.6 + rows * (0.75 + 0.2 * policies))
    axes = figure.subplots(rows, _COLUMNS, squeeze=False, sharey=True).ravel()
    percent = f"{100 * attained:g} %"
    figure.suptitle(f"Cost, and SLO attainment (pale: below {percent})", fontsize=10, color=MUTED)
    for index, (trace, of_trace) in enumerate(costs.items()):
        _draw_costs(axes[index], trace, of_trace, limits_usd[trace], attained)
    for unused in axes[len(costs) :]:
        unused.set_visible(False)
    add_legend_below(figure, *axes[0].get_legend_handles_labels(), columns=3)
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
    style_axes(upper, title=title, y_label="instances")
    upper.legend(
        ["demand", "paid for, booting included", "ready", "ready, clairvoyant"],
        loc="upper right",
        ncols=2,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
    )
    upper.set_ylim(0, 1.35 * max(timeline.demand.max(), timeline.paid.max(), *known.instances))
    lower.fill_between(minutes, timeline.in_flight, step="post", color=VERMILION, linewidth=0)
    style_axes(lower, title="", x_label="time (min)", y_label="calls in flight")
    lower.set_xlim(0, minutes[-1])
    lower.set_ylim(bottom=0)
    return figure


def _draw_costs(
    axes: Axes, trace: str, by_policy: Mapping[str, TraceMeans], limit_usd: float, attained: float
) -> None:
    bars = list(by_policy.values())
    positions = range(len(bars))
    dedicated = [bar.dedicated_usd for bar in bars]
    totals = [bar.cost_usd for bar in bars]
    functions = [bar.functions_usd for bar in bars]
    axes.barh(positions, dedicated, 0.68, color=BLUE, label="instances")
    axes.barh(positions, functions, 0.68, left=dedicated, color=ORANGE, label="functions")
    for index, (bar, total_usd) in enumerate(zip(bars, totals, strict=True)):
        is_good = bar.attainment >= attained
        if not is_good:  # misses the attainment goal
            axes.barh(index, total_usd, 0.72, color="white", alpha=0.7)
        axes.annotate(
            f"{100 * bar.attainment:.1f} %",
            (total_usd, index),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=INK if is_good else MUTED,
        )
    axes.axvline(limit_usd, color=GREEN, linewidth=1.4, label="clairvoyant")
    label_rows(axes, list(by_policy))
    axes.set_xlim(0, 1.22 * max(totals))
    style_axes(axes, title=trace, x_label="cost (USD)", grid="x")
    axes.tick_params(axis="y", length=0)
