"""Checks of the hybrid policies on synthetic results, and selection of the best settings."""

from __future__ import annotations

import pytest

from headgate.lab.experiments.hybrid_renting.environment import TRACES, TraceScenario
from headgate.lab.experiments.hybrid_renting.offline_optimum import Clairvoyant
from headgate.lab.experiments.hybrid_renting.results import (
    OURS,
    ResultTable,
    tuned_check,
    tuned_rows,
)
from headgate.lab.experiments.hybrid_renting.sweep import (
    BEST,
    best_variants,
    sweep_cases,
    variants_of,
)
from headgate.lab.harness import Case, PolicyCase, RunResult, TierUse

CHEAP, GOOD, DEAR = PolicyCase("cheap"), PolicyCase("good"), PolicyCase("dear")
LIMITS = {
    "calm": [Clairvoyant(0.75, 0.25, (1,), 1)],
    "median": [Clairvoyant(1.5, 0.5, (2,), 1)],
}


def result_of(cost_usd: float, attainment: float = 1.0) -> list[RunResult]:
    """Return one result: a tenth of the cost is for functions."""
    machines, functions = TierUse(usd=0.9 * cost_usd), TierUse(usd=0.1 * cost_usd)
    return [RunResult(100, round(100 * attainment), machines=machines, functions=functions)]


def runs_of(
    *ours_usd: float, attainment: float = 1.0
) -> dict[Case[TraceScenario], list[RunResult]]:
    """Return results of two traces; on each, one baseline is cheap and misses the goal."""
    runs: dict[Case[TraceScenario], list[RunResult]] = {}
    for trace, cost_usd in zip(TRACES, ours_usd, strict=False):
        limit_usd = LIMITS[trace.name][0].cost_usd
        runs[Case(CHEAP, TraceScenario(trace))] = result_of(1.1 * limit_usd, 0.98)
        runs[Case(GOOD, TraceScenario(trace))] = result_of(2 * limit_usd, 0.99)
        runs[Case(DEAR, TraceScenario(trace))] = result_of(3 * limit_usd)
        runs[Case(OURS, TraceScenario(trace))] = result_of(cost_usd, attainment)
    return runs


def table_of(*ours_usd: float, attainment: float = 1.0, is_generated: bool = True) -> ResultTable:
    runs = runs_of(*ours_usd, attainment=attainment)
    return ResultTable(runs, LIMITS, (CHEAP, GOOD, DEAR), is_generated=is_generated)


def test_all_goals_are_met() -> None:
    table = table_of(1.5, 4.0)
    assert [check.holds for check in table.checks()] == [True] * 4
    assert table.closed() == {"calm": pytest.approx(0.5), "median": pytest.approx(0.0)}


@pytest.mark.parametrize(
    ("table", "failing", "measured"),
    [
        (table_of(1.1, 2.2, attainment=0.98), 0, "calm (98.00 %); median (98.00 %)"),
        (table_of(1.1, 4.2), 1, "median (+5.0 % of good)"),
        (table_of(1.8, 3.8), 2, "0.15 (calm 0.20, median 0.10)"),
        (table_of(1.5, 4.0, is_generated=False), 2, "0.25 (calm 0.50, median 0.00)"),
        (table_of(0.9, 2.2), 3, "headgate on calm"),
    ],
    ids=["late", "dear", "no better", "not enough for real arrivals", "too good"],
)
def test_each_goal_can_fail(table: ResultTable, failing: int, measured: str) -> None:
    checks = table.checks()
    assert [check.holds for check in checks] == [number != failing for number in range(4)]
    assert checks[failing].measured == measured


def test_rows_per_trace_and_policy() -> None:
    rows = table_of(1.5, 4.0).rows()
    assert [row["policy"] for row in rows[:5]] == [
        "cheap",
        "good",
        "dear",
        "headgate",
        "clairvoyant",
    ]
    assert len(rows) == 10 + 4
    assert rows[-1] == {"policy": "headgate", "settings": "the defaults"}
    assert rows[3]["cost / clairvoyant"] == pytest.approx(1.5)
    assert rows[4]["functions $"] == 0.25


def test_best_variant_has_best_attainment_then_lowest_cost() -> None:
    limits_usd = {name: optima[0].cost_usd for name, optima in LIMITS.items()}
    runs = {
        Case(PolicyCase("baseline", ((case.policy.name, 1),)), case.scenario): results
        for case, results in runs_of(1.9, 4.0).items()
    }
    assert [policy.settings_text for policy in best_variants(runs, limits_usd)] == ["headgate=1"]


def test_quick_settings_are_part_of_the_sweep() -> None:
    """One variant per baseline, part of its grid, and valid for its policy."""
    tried = {case.policy.name for case in sweep_cases(None)}
    assert [policy.name for policy in BEST] == list(dict.fromkeys(f.name for f in BEST))
    assert {policy.name for policy in BEST} == tried
    for policy in BEST:
        assert policy in variants_of(policy.name)
        policy.build()


def test_baselines_tuned_on_a_trace() -> None:
    tuned = {"calm": (GOOD, 2.0), "median": (DEAR, 4.0)}
    ours_usd = {"calm": 1.5, "median": 4.2}
    rows = tuned_rows(tuned, ours_usd, {"calm": 1.0, "median": 2.0})
    assert [row["gap closed"] for row in rows] == [pytest.approx(0.5), pytest.approx(-0.1)]
    check = tuned_check(tuned, ours_usd)
    assert (check.holds, check.measured) == (False, f"median (+5.0 % of {DEAR.name})")
    assert tuned_check(tuned, {"calm": 2.0, "median": 4.05}).holds
