"""Every hybrid policy on real arrivals, beside what it would cost if they were known.

Five one-hour windows of the Twitter trace and the Azure code trace, found in the directory that
`HEADGATE_TRACES` names; without it, generated bursts of the same mean, dispersion and length. Each
is scaled so that its busiest ten seconds would keep eight instances busy. Every policy has one
configuration for all of them. The rivals' are the best of a sweep, which the long form repeats.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Final

from headgate.lab.experiments.experiment import Check, Progress, Result, Row, over_seeds
from headgate.lab.experiments.hybrid.environment import TRACES, TraceSource
from headgate.lab.experiments.hybrid.figures import Bar, cost_figure, timeline_figure, watch
from headgate.lab.experiments.hybrid.offline_optimum import Clairvoyant, clairvoyant
from headgate.lab.experiments.hybrid.results import CLAIRVOYANT, OURS, Limits, ResultTable, Runs
from headgate.lab.experiments.hybrid.run import HybridCase, HybridPolicyCase, arrivals_of, measure
from headgate.lab.experiments.hybrid.sweep import ATTAINED, BEST, best_forms, sweep_cases
from headgate.metrics.report.style import save_png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "hybrid-traces"
TITLE = "Attainment and cost of every hybrid policy on real bursts, and the clairvoyant's cost"

_SHOWN: Final = "bursty2"  # the trace whose time-line is drawn


def run(*, quick: bool, out: Path | None, progress: Progress) -> Result:
    """Run every policy on every trace; the long form finds the rivals' settings first."""
    directory = traces_directory(os.environ)
    progress(
        f"Arrivals: {'generated (HEADGATE_TRACES is not set)' if directory is None else 'real'}"
    )
    seeds = 1 if quick else 3
    limits = _find_limits(directory, seeds)
    rivals, sweep_rows, sweep_checks = BEST, list[Row](), list[Check]()
    if not quick:
        rivals, sweep_rows, sweep_checks = _sweep(directory, limits, progress)
    forms = (*rivals, OURS)
    progress(f"{len(forms)} policies on {len(TRACES)} traces, seeds: {seeds}")
    cases = [HybridCase(form, trace, directory) for trace in TRACES for form in forms]
    runs = over_seeds(measure, cases, seeds, quick=False)
    table = ResultTable(runs, limits, rivals)
    return Result(
        NAME,
        [*table.rows(), *sweep_rows],
        [*table.checks(), *sweep_checks],
        () if out is None else _draw(out, table, directory),
    )


def traces_directory(environment: Mapping[str, str]) -> Path | None:
    """Return where the real arrivals lie, if the environment says so.

    >>> traces_directory({}) is None
    True
    """
    named = environment.get("HEADGATE_TRACES")
    return Path(named) if named else None


def limit(case: HybridCase, seed: int) -> Clairvoyant:
    """Return the clairvoyant's way through the arrivals of a case."""
    arrivals = arrivals_of(case, seed)
    return clairvoyant(case.world, arrivals.times_ns, arrivals.duration_ns)


def _find_limits(directory: Path | None, seeds: int) -> Limits:
    cases = [HybridCase(CLAIRVOYANT, trace, directory) for trace in TRACES]
    found = over_seeds(limit, cases, seeds, quick=False)
    return {case.trace.name: ways for case, ways in found.items()}


def _sweep(
    directory: Path | None, limits: Limits, progress: Progress
) -> tuple[tuple[HybridPolicyCase, ...], list[Row], list[Check]]:
    """Try the rivals with all their settings, on the first seed."""
    cases = sweep_cases(directory)
    progress(f"Sweep: {len(cases)} runs")
    runs = over_seeds(measure, cases, 1, quick=False)
    limits_usd = {trace: ways[0].cost_usd for trace, ways in limits.items()}
    best = best_forms(runs, limits_usd)
    forms = dict.fromkeys(case.form for case in cases)
    rows = [_sweep_row(form, runs, limits_usd, is_best=form in best) for form in forms]
    others = [f"{form.policy} {form.settings}" for form in best if form not in BEST]
    check = Check(
        "rivals' settings that are better than those of the quick form",
        "the sweep",
        "none",
        "; ".join(others) or "none",
        not others,
    )
    return best, rows, [check]


def _sweep_row(
    form: HybridPolicyCase, runs: Runs, limits_usd: Mapping[str, float], *, is_best: bool
) -> Row:
    of_form = {case.trace.name: found[0] for case, found in runs.items() if case.form == form}
    return {
        "tried": form.policy,
        "settings": form.settings,
        "traces at 99 %": sum(one.attainment >= ATTAINED for one in of_form.values()),
        "cost / clairvoyant": fmean(
            one.cost_usd / limits_usd[trace] for trace, one in of_form.items()
        ),
        "best": is_best,
    }


def _draw(out: Path, table: ResultTable, directory: Path | None) -> tuple[Path, ...]:
    bars = {
        trace: [
            Bar(form.policy, one.dedicated_usd, one.functions_usd, one.attainment)
            for form, one in of_trace.items()
        ]
        for trace, of_trace in table.of.items()
    }
    costs = cost_figure(bars, table.limits_usd, ATTAINED)
    shown = next(trace for trace in TRACES if trace.name == _SHOWN)
    return (
        save_png(costs, out / "hybrid-traces-costs.png"),
        save_png(_timeline(shown, table, directory), out / "hybrid-traces-timeline.png"),
    )


def _timeline(trace: TraceSource, table: ResultTable, directory: Path | None) -> Figure:
    timeline = watch(HybridCase(OURS, trace, directory), seed=0)
    return timeline_figure(timeline, table.limits[trace.name][0], f"{trace.name}: headgate")
