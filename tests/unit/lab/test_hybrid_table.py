"""What is claimed of the hybrid policies, on made-up results; and which settings are the best."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headgate.lab.experiments.hybrid.environment import TRACES
from headgate.lab.experiments.hybrid.offline_optimum import Clairvoyant
from headgate.lab.experiments.hybrid.results import OURS, ResultTable
from headgate.lab.experiments.hybrid.run import HybridCase, HybridPolicyCase, HybridResult
from headgate.lab.experiments.hybrid.sweep import BEST, best_forms, forms_of, sweep_cases

CHEAP, GOOD, DEAR = HybridPolicyCase("cheap"), HybridPolicyCase("good"), HybridPolicyCase("dear")
LIMITS = {
    "calm": [Clairvoyant(0.75, 0.25, (1,), 1)],
    "median": [Clairvoyant(1.5, 0.5, (2,), 1)],
}


def bill(cost_usd: float, attainment: float = 1.0) -> list[HybridResult]:
    """One result: a tenth of the bill is for functions."""
    return [HybridResult(100, attainment, 0.9 * cost_usd, 0.1 * cost_usd, 3, 2, 0.1)]


def runs_of(*ours_usd: float, attainment: float = 1.0) -> dict[HybridCase, list[HybridResult]]:
    """Two traces; on each, one rival is cheap and misses the mark."""
    runs: dict[HybridCase, list[HybridResult]] = {}
    for trace, cost_usd in zip(TRACES, ours_usd, strict=False):
        limit_usd = LIMITS[trace.name][0].cost_usd
        runs[HybridCase(CHEAP, trace)] = bill(1.1 * limit_usd, 0.98)
        runs[HybridCase(GOOD, trace)] = bill(2 * limit_usd, 0.99)
        runs[HybridCase(DEAR, trace)] = bill(3 * limit_usd)
        runs[HybridCase(OURS, trace)] = bill(cost_usd, attainment)
    return runs


def table_of(*ours_usd: float, attainment: float = 1.0) -> ResultTable:
    return ResultTable(runs_of(*ours_usd, attainment=attainment), LIMITS, (CHEAP, GOOD, DEAR))


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
        (table_of(0.9, 2.2), 3, "headgate on calm"),
    ],
    ids=["late", "dear", "no better", "too good"],
)
def test_each_goal_can_be_missed(table: ResultTable, failing: int, measured: str) -> None:
    checks = table.checks()
    assert [check.holds for check in checks] == [number != failing for number in range(4)]
    assert checks[failing].measured == measured


def test_a_row_per_trace_and_policy_and_one_for_the_clairvoyant() -> None:
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


def test_the_best_settings_attain_the_most_and_cost_the_least() -> None:
    limits_usd = {name: ways[0].cost_usd for name, ways in LIMITS.items()}
    runs = {
        HybridCase(
            replace(case.form, policy="rival", config=((case.form.policy, 1),)), case.trace
        ): found
        for case, found in runs_of(1.9, 4.0).items()
    }
    assert [form.settings for form in best_forms(runs, limits_usd)] == ["headgate=1"]


def test_the_quick_form_uses_settings_that_are_tried_and_there() -> None:
    """One per rival, each from its grid, each of a policy that takes it."""
    tried = {case.form.policy for case in sweep_cases(None)}
    assert [form.policy for form in BEST] == list(dict.fromkeys(f.policy for f in BEST))
    assert {form.policy for form in BEST} == tried
    for form in BEST:
        assert form in forms_of(form.policy)
        form.build()
