"""ESG and its rivals on a cluster of shareable GPUs: the evaluation of the ESG paper.

Sixteen nodes of 16 vCPUs and a GPU in sevenths, four applications of three to five stages, three
cells of objective and load (`esg_cluster.environment`), on up to three profile sets
(`esg_cluster.profiles`). What a policy plans is charged as simulated time. Then the cluster
changes: load up to three times heavy, nodes that fail, profiles that are wrong.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headgate.lab.aquatope import Trained
from headgate.lab.experiments import Known, Progress, Result
from headgate.lab.experiments.esg_cluster.environment import CELLS, ClusterScenario
from headgate.lab.experiments.esg_cluster.figures import (
    cells_figure,
    dynamics_figure,
    latency_figure,
)
from headgate.lab.experiments.esg_cluster.profiles import (
    INFLESS,
    MEASURED,
    RECALLED,
    infless_table,
)
from headgate.lab.experiments.esg_cluster.results import (
    AQUATOPE,
    ESG,
    ORION,
    OURS,
    RIVALS,
    CellTables,
    DynamicsTable,
    limit_rows,
)
from headgate.lab.experiments.esg_cluster.runs import (
    ClusterCase,
    TrainingCase,
    run_cell,
    run_changed,
    train_aquatope,
)
from headgate.lab.figures import write_figures
from headgate.lab.harness import PolicyCase, over_seeds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "esg"
TITLE = "ESG and its rivals: pipelines on shareable GPUs"
_PAGE: Final = "docs/papers/esg.md"
_NOT_SO: Final = (  # with any set of profiles
    "rivals that hit as often as ESG, by cell",
    "cells in which ESG's 95th percentile is not within 0.9 to 1.0 of the SLO",
    "policies that cost as much as INFless, by cell",
    "cells by plan misses of orion (%)",
    "cells by plan misses of aquatope (%)",
)
_AS_OFTEN: Final = "cells in which Orion's plans miss as often as Aquatope's"
KNOWN: Final = (
    *(Known(f"{name}: {it}", _PAGE) for name in (MEASURED, RECALLED, INFLESS) for it in _NOT_SO),
    *(
        Known(f"{it}: rivals that cost less than ESG, by cell", _PAGE)
        for it in (MEASURED, RECALLED)
    ),
    *(Known(f"{it}: {_AS_OFTEN}", _PAGE) for it in (MEASURED, INFLESS)),
)

# What changes, in the dynamics.
_LOAD: Final = "load"
_FAILURES: Final = "failing nodes"
_PROFILES: Final = "wrong profiles"
_ARRIVALS: Final = "arrivals"
_NOISE: Final = "noise of times"
_LOADS: Final = (0.2, 0.5, 0.85, 1.7, 2.55)  # from light to three times heavy
_ERRORS: Final = ((1.3,), (0.7,), (0.7, 1.3))  # true over profiled times
_SEEDS: Final = 3
_TRIALS: Final = 70  # of Aquatope's training, for each application; as in its paper
_QUICK_TRIALS: Final = 12
_SAMPLERS: Final = 2  # seeds of the training, of which the better result counts
_ORION_LIMITS: Final = (10, 100, 1_000, 10_000, 100_000)


def run(*, quick: bool, out: Path | None, progress: Progress) -> Result:
    """Run every policy in every cell, Orion with several limits, and the dynamics."""
    directory = _traces(os.environ.get("HEADGATE_TRACES"))
    sets = [RECALLED] if quick else [MEASURED, RECALLED]
    if infless_table(directory) is None:
        progress("without INFless's tables (HEADGATE_TRACES)")
    elif not quick:
        sets.append(INFLESS)
    scenarios = list(_cells(sets, directory, is_quick=quick))
    trained = _train(scenarios, is_quick=quick, progress=progress)
    progress(f"{2 + len(RIVALS)} policies in {len(CELLS)} cells of {', '.join(sets)}")
    cases = [
        ClusterCase(policy, scenario)
        for scenario in scenarios
        for policy in _policies(trained[scenario])
    ]
    table = CellTables(over_seeds(run_cell, cases, _SEEDS, is_parallel=not quick))
    progress("Orion by its limit")
    limited = over_seeds(run_cell, _limited(is_quick=quick), _SEEDS, is_parallel=not quick)
    progress("load, failures and wrong profiles")
    conditions = _conditions(is_quick=quick)
    normal = next(s for s in scenarios if (s.profiles, s.cell) == (RECALLED, CELLS[1]))
    changed = [
        ClusterCase(policy, scenario)
        for each in conditions.values()
        for scenario in each
        for policy in _policies(trained[normal])
        if not quick or policy.label in (ESG, OURS)
    ]
    runs = over_seeds(run_changed, changed, _SEEDS, is_parallel=not quick)
    dynamics = DynamicsTable(runs, conditions)
    return Result(
        NAME,
        [*table.rows(), *limit_rows(limited), *dynamics.rows()],
        [*table.checks(), *dynamics.checks()],
        write_figures(out, NAME, lambda: _figures(table, dynamics)),
    )


def _policies(aquatope: Trained | None) -> list[PolicyCase]:
    """Return all policies; `aquatope` has the configurations that it was trained to."""
    policies = [PolicyCase(name) for name in (ESG, *RIVALS, OURS)]
    if aquatope is None:
        return policies
    trained = PolicyCase.of(AQUATOPE, configs=aquatope.configs)
    return [trained if policy.name == AQUATOPE else policy for policy in policies]


def _train(
    scenarios: Sequence[ClusterScenario], *, is_quick: bool, progress: Progress
) -> dict[ClusterScenario, Trained | None]:
    """Return what `aquatope` is trained to, by scenario; nothing without optuna."""
    if find_spec("optuna") is None:
        progress("aquatope is not trained: pip install 'headgate[aquatope]'")
        return dict.fromkeys(scenarios)
    progress("training of aquatope")
    cases = {
        TrainingCase(
            replace(scenario, duration_s=scenario.duration_s / 5, warm_up_s=1.0),
            _QUICK_TRIALS if is_quick else _TRIALS,
        ): scenario
        for scenario in scenarios
    }
    found = over_seeds(train_aquatope, list(cases), _SAMPLERS, is_parallel=not is_quick)
    return {
        scenario: min(found[case], key=lambda each: (sum(each.violations), each.usd_per_request))
        for case, scenario in cases.items()
    }


def _traces(named: str | None) -> Path | None:
    return Path(named) if named else None


def _cells(
    sets: Sequence[str], directory: Path | None, *, is_quick: bool
) -> Iterator[ClusterScenario]:
    for name in sets:
        # A request of the recalled set takes ten times as long as one of the measured set.
        seconds = 30.0 if name == RECALLED else 5.0
        for cell in CELLS:
            scenario = ClusterScenario(name, cell, seconds, directory=directory)
            yield _quick(scenario) if is_quick else scenario


def _quick(scenario: ClusterScenario) -> ClusterScenario:
    return replace(scenario, duration_s=5.0, warm_up_s=5.0)


def _limited(*, is_quick: bool) -> list[ClusterCase]:
    """Return Orion with several limits, in the strict cell of the recalled set.

    At the limit it stops, as in the paper, or goes on as it does in the cells.
    """
    scenario = next(_cells([RECALLED], None, is_quick=is_quick))
    limits = _ORION_LIMITS[::2] if is_quick else _ORION_LIMITS
    return [
        ClusterCase(PolicyCase.of(ORION, expansions_max=limit, goes_on=goes_on), scenario)
        for goes_on in (False, True)
        for limit in limits
    ]


def _conditions(*, is_quick: bool) -> dict[str, list[ClusterScenario]]:
    """Return, by what changes, scenarios with the moderate objective of the recalled set."""
    normal = ClusterScenario(RECALLED, CELLS[1], duration_s=15.0, warm_up_s=5.0)
    if is_quick:
        normal = _quick(normal)
    loads = [replace(normal, load_factor=load / normal.cell.utilisation) for load in _LOADS]
    conditions = {
        _LOAD: loads,
        _FAILURES: [replace(normal, failed_nodes=count) for count in (2, 4, 8)],
        _PROFILES: [replace(normal, profile_errors=errors) for errors in _ERRORS],
        _ARRIVALS: [replace(normal, process="poisson"), replace(normal, process="bursty")],
        _NOISE: [replace(normal, cv=cv) for cv in (0.0, 0.02, 0.05)],
    }
    if is_quick:
        return {change: [each[len(each) // 2]] for change, each in conditions.items()}
    return conditions


def _figures(table: CellTables, dynamics: DynamicsTable) -> dict[str, Figure]:
    return {
        "cells": cells_figure(table),
        "latency": latency_figure(table),
        "dynamics": dynamics_figure(dynamics, _LOAD, (_FAILURES, _PROFILES)),
    }
