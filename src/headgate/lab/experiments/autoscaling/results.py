"""Results of the Swayam experiment: rows, checks of its claims and of our goals, figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Final, final

import numpy as np

from headgate.core.clock import HOUR_NS
from headgate.lab.experiments import Check, Row, none_check
from headgate.lab.experiments.autoscaling.environment import (
    SERVICE_LEVEL,
    STEP,
    ServiceScenario,
)
from headgate.lab.experiments.autoscaling.runs import (
    SAMPLE_NS,
    SWAYAM,
    WINDOW_NS,
    OracleRun,
    ServiceCase,
    ServiceRun,
)
from headgate.metrics.report.style import INK, MUTED, SERIES, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Labels of policies.
STATIC: Final = "static_partition"
REACTIVE: Final = "autoscale_concurrency"
OURS: Final = "headgate"
CLAIRVOYANT: Final = "ClairA2"

_PAPER: Final = "Swayam, evaluation"
_GOAL: Final = "a goal of this project"
_COUNTING: Final = "counting"
_COMPLIANCE: Final = 0.96
_SAVING: Final = 0.27
_GAP_SHARE: Final = 0.25
_BAR: Final = 0.8  # of the distance between services, all bars together
_AFTER_STEP: Final = 5  # minutes in which a step of the rate is looked at

Runs = Mapping[ServiceCase, Sequence[ServiceRun]]
Oracles = Mapping[ServiceScenario, Sequence[OracleRun]]


@dataclass(frozen=True, slots=True)
class ServiceTable:
    """All policies on one service with one set-up time, and the oracles; one run of each."""

    scenario: ServiceScenario
    oracle: OracleRun
    runs: Mapping[str, ServiceRun]  # by policy

    @property
    def label(self) -> str:
        return f"{self.scenario.service.name} {self.scenario.setup_s:g} s"

    def normalised(self, policy: str) -> float:
        """Backend-time over that of ClairA1."""
        return self.runs[policy].used_ns / self.oracle.work_ns

    @property
    def lazy(self) -> float:
        """Backend-time of ClairA2 over that of ClairA1."""
        return self.oracle.lazy_ns / self.oracle.work_ns

    def saving(self, policy: str) -> float:
        """Share of ClairA2's backend-time that a policy does not use."""
        return 1.0 - self.runs[policy].used_ns / self.oracle.lazy_ns

    def gap_closed(self, policy: str) -> float:
        """Share of the backend-time between Swayam and ClairA1 that a policy does not use."""
        swayam_ns, work_ns = self.runs[SWAYAM].used_ns, self.oracle.work_ns
        return (swayam_ns - self.runs[policy].used_ns) / (swayam_ns - work_ns)


@final
class ServiceTables:
    """Every policy on every service."""

    def __init__(self, runs: Runs, oracles: Oracles) -> None:
        by_scenario: dict[ServiceScenario, dict[str, ServiceRun]] = {}
        for case, results in runs.items():
            by_scenario.setdefault(case.scenario, {})[case.policy.label] = results[0]
        self.tables = [
            ServiceTable(scenario, oracles[scenario][0], each)
            for scenario, each in by_scenario.items()
        ]
        self.policies = list(dict.fromkeys(case.policy.label for case in runs))

    def rows(self) -> list[Row]:
        """Return the services, all policies side by side and one by one, and their means."""
        rows = [_service_row(table) for table in self.tables]
        rows += [_compliance_row(table) for table in self.tables]
        rows += [_usage_row(table) for table in self.tables]
        for table in self.tables:
            rows += [_row(table, policy) for policy in table.runs]
            rows.append(_oracle_row(table))
        for setup_s in dict.fromkeys(table.scenario.setup_s for table in self.tables):
            tables = [table for table in self.tables if table.scenario.setup_s == setup_s]
            rows += [_summary_row(policy, setup_s, tables) for policy in tables[0].runs]
        return rows

    def checks(self) -> list[Check]:
        """Return the claims of the paper, then our goals, then the bounds below the oracles."""
        return [*self._paper_checks(), *self._goal_checks(), *self._oracle_checks()]

    def _paper_checks(self) -> list[Check]:
        compliance = {t.label: t.runs[SWAYAM].compliance for t in self.tables}
        mean = fmean(compliance.values())
        saving, best = max((table.saving(SWAYAM), table.label) for table in self.tables)
        return [
            Check(
                "swayam meets the SLA over 96 % of the time, mean over services",
                _PAPER,
                "above 96 %",
                f"{100 * mean:.1f} %",
                mean > _COMPLIANCE,
            ),
            none_check(
                "services on which swayam meets the SLA 96 % of the time or less",
                _PAPER,
                [f"{k}: {100 * v:.1f} %" for k, v in compliance.items() if v <= _COMPLIANCE],
            ),
            Check(
                "swayam uses up to 27 % less backend-time than ClairA2",
                _PAPER,
                "27 % on some service",
                f"{100 * saving:.1f} % ({best})",
                saving >= _SAVING,
            ),
        ]

    def _goal_checks(self) -> list[Check]:
        tables = self.tables
        closed = fmean(table.gap_closed(OURS) for table in tables)
        return [
            Check(
                "headgate meets the SLA at least as often as swayam, mean over services",
                _GOAL,
                f"{100 * fmean(t.runs[SWAYAM].compliance for t in tables):.2f} %",
                f"{100 * fmean(t.runs[OURS].compliance for t in tables):.2f} %",
                fmean(t.runs[OURS].compliance - t.runs[SWAYAM].compliance for t in tables) >= 0,
            ),
            none_check(
                "services on which headgate meets the SLA for less of the time than swayam",
                _GOAL,
                [
                    f"{t.label}: {100 * t.runs[OURS].compliance:.1f} "
                    f"< {100 * t.runs[SWAYAM].compliance:.1f} %"
                    for t in tables
                    if t.runs[OURS].compliance < t.runs[SWAYAM].compliance
                ],
            ),
            none_check(
                "services on which headgate uses more backend-time than swayam",
                _GOAL,
                [
                    f"{t.label}: {t.normalised(OURS):.2f} > {t.normalised(SWAYAM):.2f}"
                    for t in tables
                    if t.runs[OURS].used_ns > t.runs[SWAYAM].used_ns
                ],
            ),
            Check(
                "share that headgate closes of the gap from swayam to ClairA1, mean",
                _GOAL,
                f"at least {_GAP_SHARE:g}",
                round(closed, 3),
                closed >= _GAP_SHARE,
            ),
            none_check(
                f"minutes below 99 % in the {_AFTER_STEP} after a step to twice the rate: headgate",
                _GOAL,
                [text for table in tables for text in _step_misses(table)],
            ),
        ]

    def _oracle_checks(self) -> list[Check]:
        exceptions = [
            table.label
            for table in self.tables
            if table.oracle.peak < table.oracle.peak_bound
            or table.oracle.lazy_ns < table.oracle.lazy_bound_ns
        ]
        return [none_check("oracles below their lower bounds", _COUNTING, exceptions)]


def _step_misses(table: ServiceTable) -> list[str]:
    """Return the minutes after the step in which the policy misses the SLA."""
    if table.scenario.service.name != "step":
        return []
    begin = int(STEP[0] * table.scenario.duration_ns) // WINDOW_NS
    windows = table.runs[OURS].windows[begin : begin + _AFTER_STEP]
    missed = np.flatnonzero(windows < SERVICE_LEVEL)
    return [f"{table.label}, minute {i}: {100 * windows[i]:.1f} %" for i in missed]


def _service_row(table: ServiceTable) -> Row:
    scenario, oracle = table.scenario, table.oracle
    return {
        "service": scenario.service.name,
        "mean ms": scenario.service.exec_ms,
        "cv": scenario.service.cv,
        "set-up s": scenario.setup_s,
        "requests": oracle.requests,
        "Erlangs": oracle.erlangs,
        "peak, bound": oracle.peak_bound,
        "peak, ClairA1": oracle.peak,
        "peak, ClairA2": oracle.lazy_peak,
        "ClairA2 / ClairA1": table.lazy,
        "its bound": oracle.lazy_bound_ns / oracle.work_ns,
        "with 10 min": oracle.lazier_ns / oracle.work_ns,
    }


def _summary_row(policy: str, setup_s: float, tables: Sequence[ServiceTable]) -> Row:
    compliance = [table.runs[policy].compliance for table in tables]
    return {
        "over all services": policy,
        "set-up s": setup_s,
        "SLA met % of minutes, mean": 100 * fmean(compliance),
        "least": 100 * min(compliance),
        "within RT_max %": 100 * fmean(table.runs[policy].met for table in tables),
        "backend-time / ClairA1": fmean(table.normalised(policy) for table in tables),
        "less than ClairA2 by %, most": 100 * max(table.saving(policy) for table in tables),
        "gap closed": fmean(table.gap_closed(policy) for table in tables),
    }


def _compliance_row(table: ServiceTable) -> Row:
    row: Row = {"SLA met, % of minutes": table.label}
    return row | {policy: 100 * run.compliance for policy, run in table.runs.items()}


def _usage_row(table: ServiceTable) -> Row:
    row: Row = {"backend-time / ClairA1": table.label, CLAIRVOYANT: table.lazy}
    return row | {policy: table.normalised(policy) for policy in table.runs}


def _row(table: ServiceTable, policy: str) -> Row:
    run = table.runs[policy]
    return {
        "service": table.scenario.service.name,
        "set-up s": table.scenario.setup_s,
        "policy": policy,
        "within RT_max %": 100 * run.met,
        "late %": 100 * run.late,
        "SLA met % of minutes": 100 * run.compliance,
        "backend-time / ClairA1": table.normalised(policy),
        "/ ClairA2": run.used_ns / table.oracle.lazy_ns,
        "peak": run.peak,
        "set-ups": run.setups,
    }


def _oracle_row(table: ServiceTable) -> Row:
    return {
        "service": table.scenario.service.name,
        "set-up s": table.scenario.setup_s,
        "policy": CLAIRVOYANT,
        "within RT_max %": 100.0,
        "late %": 0.0,
        "SLA met % of minutes": 100.0,
        "backend-time / ClairA1": table.lazy,
        "/ ClairA2": 1.0,
        "peak": table.oracle.lazy_peak,
        "set-ups": table.oracle.lazy_setups,
    }


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
