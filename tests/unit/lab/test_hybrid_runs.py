"""One run of the hybrid experiments: environment, cost and timeline."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.clock import HOUR_NS, MILLISECOND_NS
from headgate.lab.experiments.hybrid_renting.environment import (
    LARGE,
    SMALL,
    TIME_SCALE,
    InstanceSetting,
    TraceScenario,
    TraceSource,
)
from headgate.lab.experiments.hybrid_renting.figures import (
    STEP_NS,
    max_per_step,
    mean_per_step,
    record_timeline,
)
from headgate.lab.harness import Case, PolicyCase, RunResult, run_case

TOY = TraceSource("toy", "", 0, 600, 40, 100, 300, 120)


@pytest.mark.parametrize("setting", [SMALL, LARGE], ids=lambda setting: setting.name)
def test_concurrency_limit_is_that_of_the_paper(setting: InstanceSetting) -> None:
    """The limit of concurrent requests meets the SLO, and one more would not."""
    assert (
        setting.concurrency * setting.exec_ns
        <= setting.slo_ns
        < (setting.concurrency + 1) * setting.exec_ns
    )
    assert setting.slo_ns == setting.slo_ms * TIME_SCALE * MILLISECOND_NS


def test_cost_ratio_of_instances_and_functions() -> None:
    """A small instance is cheaper above a third of its capacity, a large one never is."""
    assert 0.3 < SMALL.usd_per_request / SMALL.usd_per_call < 0.4
    assert LARGE.usd_per_request > LARGE.usd_per_call


def test_initial_instances_suit_the_first_minute() -> None:
    scenario = TraceScenario(TOY)
    in_minute = np.count_nonzero(scenario.arrivals(0).times_ns < 60 * 10**9)
    (function,) = scenario.environment(0).app.functions
    assert function.prewarm_nodes == -(-in_minute * 0.36 // 60)


def run_of(policy: PolicyCase) -> RunResult:
    return run_case(Case(policy, TraceScenario(TOY)), 0)


def test_serverless_only_is_billed_per_call() -> None:
    result = run_of(PolicyCase("serverless_only"))
    warm_usd = result.requests * SMALL.usd_per_call
    assert result.machines.usd == 0.0
    assert result.machines.busy_ns == 0 < result.functions.busy_ns
    # A cold start takes longer than the SLO.
    assert 0 < result.cold_violations == result.functions.cold_starts
    assert warm_usd < result.functions.usd < 1.2 * warm_usd
    assert result.violations == result.cold_violations


def test_fixed_instances_are_billed_per_hour() -> None:
    result = run_of(PolicyCase.of("threshold", nodes=2))
    assert result.machines.usd == pytest.approx(2 * SMALL.usd_per_hour / 6, rel=0.02)
    assert result.machines.busy_ns > 0 < result.functions.busy_ns


def test_timeline_agrees_with_the_run() -> None:
    case = Case(PolicyCase.of("threshold", nodes=2), TraceScenario(TOY))
    timeline, result = record_timeline(case, 0), run_case(case, 0)
    paid_usd = timeline.paid.sum() * STEP_NS / HOUR_NS * SMALL.usd_per_hour
    assert paid_usd == pytest.approx(result.machines.usd, rel=0.02)
    assert (timeline.ready <= timeline.paid).all()
    assert timeline.demand.sum() * STEP_NS == pytest.approx(result.requests * SMALL.exec_ns)
    assert timeline.in_flight.max() >= 1


@given(st.lists(st.tuples(st.integers(1, 5 * STEP_NS), st.integers(-3, 9)), max_size=9))
def test_mean_and_max_per_step(later: list[tuple[int, int]]) -> None:
    """Compared with an explicit integration: a change takes effect at its time."""
    changes = [(0, 1), *((at_ns, number) for at_ns, number in sorted(later))]
    means, most = mean_per_step(changes, 4), max_per_step(changes, 4)
    for step in range(4):
        begin_ns, end_ns = step * STEP_NS, (step + 1) * STEP_NS
        ends = [at_ns for at_ns, _ in changes[1:]] + [10 * STEP_NS]
        spans = [
            (max(begin_ns, at_ns), min(end_ns, until_ns), number)
            for (at_ns, number), until_ns in zip(changes, ends, strict=True)
        ]
        area = sum(max(0, until_ns - at_ns) * number for at_ns, until_ns, number in spans)
        assert means[step] == pytest.approx(area / STEP_NS)
        held = [number for at_ns, until_ns, number in spans if at_ns < until_ns]
        assert most[step] >= max(held)
        assert most[step] in [number for _, number in changes]
