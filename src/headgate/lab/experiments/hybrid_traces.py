"""Cost and attainment of every hybrid policy on real arrivals, compared with the offline optimum.

Arrivals are five one-hour windows of the Twitter trace and the Azure code trace, read from the
directory that `HEADGATE_TRACES` names; without it, generated bursts of the same mean, dispersion
and length. Each trace is scaled so that its busiest ten seconds would keep eight instances busy.
Every policy has one configuration for all traces. The settings of baselines are the best of a
sweep, which the long form repeats; it also compares headgate with the best settings on each trace.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Final

from headgate.lab.experiments import Check, Progress, Result, Row, none_check
from headgate.lab.experiments.hybrid_renting.environment import TRACES, TraceScenario
from headgate.lab.experiments.hybrid_renting.figures import (
    cost_figure,
    record_timeline,
    timeline_figure,
)
from headgate.lab.experiments.hybrid_renting.offline_optimum import Clairvoyant, clairvoyant
from headgate.lab.experiments.hybrid_renting.results import (
    OURS,
    Limits,
    ResultTable,
    Runs,
    tuned_check,
    tuned_rows,
)
from headgate.lab.experiments.hybrid_renting.sweep import (
    ATTAINED,
    BEST,
    best_variants,
    sweep_cases,
    tuned_per_trace,
)
from headgate.lab.figures import write_figures
from headgate.lab.harness import Case, PolicyCase, over_seeds, run_case

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "hybrid-traces"
TITLE = "Attainment and cost of every hybrid policy on real bursts, and the clairvoyant's cost"

_DRAWN: Final = "bursty2"  # the trace whose timeline is drawn


def run(*, quick: bool, out: Path | None, progress: Progress) -> Result:
    """Run every policy on every trace; the long form sweeps the baselines' settings first."""
    directory = traces_directory(os.environ)
    progress(
        f"Arrivals: {'generated (HEADGATE_TRACES is not set)' if directory is None else 'real'}"
    )
    seeds = 1 if quick else 3
    limits = _find_limits(directory, seeds)
    baselines, swept = BEST, None
    if not quick:
        swept = _sweep(directory, progress)
        baselines = best_variants(swept, _first_limits_usd(limits))
    policies = (*baselines, OURS)
    progress(f"{len(policies)} policies on {len(TRACES)} traces, seeds: {seeds}")
    scenarios = [TraceScenario(trace, directory) for trace in TRACES]
    cases = [Case(policy, scenario) for scenario in scenarios for policy in policies]
    runs = over_seeds(run_case, cases, seeds, is_parallel=True)
    table = ResultTable(runs, limits, baselines, is_generated=directory is None)
    rows, checks = table.rows(), table.checks()
    if swept is not None:
        first_usd = {
            case.scenario.trace.name: results[0].cost_usd
            for case, results in runs.items()
            if case.policy == OURS
        }
        rows += _sweep_rows(swept, baselines, first_usd, _first_limits_usd(limits))
        checks += _sweep_checks(swept, baselines, first_usd)
    return Result(
        NAME,
        rows,
        checks,
        write_figures(out, NAME, lambda: _figures(table, directory)),
    )


def traces_directory(environment: Mapping[str, str]) -> Path | None:
    """Return the directory of traces, if the environment variable is set.

    >>> traces_directory({}) is None
    True
    """
    named = environment.get("HEADGATE_TRACES")
    return Path(named) if named else None


def limit(scenario: TraceScenario, seed: int) -> Clairvoyant:
    """Return the offline optimum for the arrivals of a scenario."""
    arrivals = scenario.arrivals(seed)
    return clairvoyant(scenario.setting, arrivals.times_ns, arrivals.duration_ns)


def _find_limits(directory: Path | None, seeds: int) -> Limits:
    scenarios = [TraceScenario(trace, directory) for trace in TRACES]
    results = over_seeds(limit, scenarios, seeds, is_parallel=True)
    return {scenario.trace.name: optima for scenario, optima in results.items()}


def _first_limits_usd(limits: Limits) -> dict[str, float]:
    """Return the clairvoyant's cost by trace, on the first seed, which is that of the sweep."""
    return {trace: optima[0].cost_usd for trace, optima in limits.items()}


def _sweep(directory: Path | None, progress: Progress) -> Runs:
    """Run the baselines with all settings of their grids, on the first seed."""
    cases = sweep_cases(directory)
    progress(f"Sweep: {len(cases)} runs")
    return over_seeds(run_case, cases, 1, is_parallel=True)


def _sweep_rows(
    runs: Runs,
    best: Sequence[PolicyCase],
    ours_usd: Mapping[str, float],
    limits_usd: Mapping[str, float],
) -> list[Row]:
    policies = dict.fromkeys(case.policy for case in runs)
    rows = [_sweep_row(policy, runs, limits_usd, is_best=policy in best) for policy in policies]
    return [*tuned_rows(tuned_per_trace(runs), ours_usd, limits_usd), *rows]


def _sweep_checks(
    runs: Runs, best: Sequence[PolicyCase], ours_usd: Mapping[str, float]
) -> list[Check]:
    others = [f"{policy.name} {policy.settings_text}" for policy in best if policy not in BEST]
    claim = "settings of baselines that are better than those of the quick form"
    return [
        tuned_check(tuned_per_trace(runs), ours_usd),
        none_check(claim, "the sweep", others),
    ]


def _sweep_row(
    policy: PolicyCase, runs: Runs, limits_usd: Mapping[str, float], *, is_best: bool
) -> Row:
    of_policy = {
        case.scenario.trace.name: results[0]
        for case, results in runs.items()
        if case.policy == policy
    }
    return {
        "sweep": policy.name,
        "settings": policy.settings_text,
        "traces at 99 %": sum(one.attainment >= ATTAINED for one in of_policy.values()),
        "cost / clairvoyant": fmean(
            one.cost_usd / limits_usd[trace] for trace, one in of_policy.items()
        ),
        "best": is_best,
    }


def _figures(table: ResultTable, directory: Path | None) -> dict[str, Figure]:
    costs = {
        trace: {policy.name: means for policy, means in of_trace.items()}
        for trace, of_trace in table.of.items()
    }
    drawn = next(trace for trace in TRACES if trace.name == _DRAWN)
    timeline = record_timeline(Case(OURS, TraceScenario(drawn, directory)), seed=0)
    known = table.limits[_DRAWN][0]
    return {
        "costs": cost_figure(costs, table.limits_usd, ATTAINED),
        "timeline": timeline_figure(timeline, known, f"{_DRAWN}: headgate"),
    }
