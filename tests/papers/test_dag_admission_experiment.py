"""DAG admission: the quick form, and that the failing claims are those that the page documents."""

from __future__ import annotations

import pytest
from paper_page import missed_goals, quick_result

from headgate.core.states import Outcome
from headgate.lab.experiments.dag_cluster.environment import (
    LATENCIES_MS,
    RIGHT,
    LoadScenario,
    TableScenario,
    capacity_per_s,
    run_table,
)
from headgate.lab.experiments.dag_cluster.optimum import SmallCase, optimum, served_by, small_case
from headgate.lab.harness import Case, PolicyCase

PAGE = "docs/papers/dag-admission.md"


@pytest.mark.slow
def test_the_quick_form() -> None:
    """Rows are complete, JSON is valid, and failing claims are documented."""
    result = quick_result("dag-admission", None)
    table = [row for row in result.rows if "printed cost" in row]
    assert len(table) == 9 * len(LATENCIES_MS)
    assert {check.claim for check in result.failing} == missed_goals(PAGE, "quick")
    assert not result.outdated


@pytest.mark.parametrize(
    ("policy", "hits", "per_request_ms"),
    [
        (PolicyCase.of("balance"), (3, 7, 12, 17), 5),
        (PolicyCase.of("clockwork", form="naive"), (1, 3, 5, 6), 12),
    ],
    ids=["fifo", "clockwork"],
)
def test_the_system_comes_close_to_the_printed_table(
    policy: PolicyCase, hits: tuple[int, ...], per_request_ms: int
) -> None:
    """Printed: 3, 7, 12 and 16 for FIFO; 1, 3, 5 and 6 for Clockwork."""
    runs = [run_table(Case(policy, TableScenario(ms)), 0) for ms in LATENCIES_MS]
    assert tuple(run.hits for run in runs) == hits
    assert all(run.cheap == run.requests == 1200 for run in runs)  # nobody misses the cost
    for run in runs:
        assert run.drain_s * 1000 / 1200 == pytest.approx(per_request_ms, rel=0.01)


def test_load_is_relative_to_the_capacity_without_batches() -> None:
    app = LoadScenario(40, 1.0, RIGHT).app(batch_max=1)
    environment = LoadScenario(40, 2.0, RIGHT, seconds=5.0).environment(0)
    assert environment.arrivals is not None
    assert len(environment.arrivals) / 5 == pytest.approx(2 * capacity_per_s(app), rel=0.1)


def test_the_optimum_of_cases_that_can_be_checked_by_hand() -> None:
    """On the GPU each stage takes 2 ms, and on the CPU 9."""
    times = ((9, 2), (9, 2))
    assert optimum(SmallCase(times, True, (0, 0, 0), 3, 100)) == 0  # a request takes 4 ms
    assert optimum(SmallCase(times, True, (0, 0, 0), 4, 100)) == 1
    assert optimum(SmallCase(times, True, (0, 0, 0), 12, 100)) == 3
    assert optimum(SmallCase(times, True, (0, 0, 0), 12, 19)) == 1  # one stage on the CPU: 19
    assert optimum(SmallCase(times, False, (0, 0, 0), 9, 100)) == 2  # side by side


def test_no_policy_is_above_the_optimum() -> None:
    for seed in range(8):
        case = small_case(seed)
        best = optimum(case)
        for name in ("dag_admission", "headgate", "balance", "clockwork"):
            assert served_by(PolicyCase.of(name), case) <= best


def test_a_hit_is_within_the_cost_as_well() -> None:
    """A fast objective with a cost that only the slow node meets: nothing can be a hit."""
    case = SmallCase(((9, 2), (9, 2)), True, (0,), 4, 18)
    environment = case.environment()
    outcomes = environment.simulate(PolicyCase.of("balance"), 0).requests.outcome
    assert outcomes.tolist() in ([Outcome.MET], [Outcome.LATE])
    assert served_by(PolicyCase.of("balance"), case) == 0
