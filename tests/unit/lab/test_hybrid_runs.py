"""One run of the hybrid experiments: its world, its bill, and how it went."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.clock import HOUR_NS, MILLISECOND_NS
from headgate.lab.experiments.hybrid.environment import (
    LARGE,
    SMALL,
    TIME_SCALE,
    HybridEnvironment,
    TraceSource,
)
from headgate.lab.experiments.hybrid.figures import STEP_NS, means_of, most_of, watch
from headgate.lab.experiments.hybrid.run import (
    HybridCase,
    HybridPolicyCase,
    app_of,
    arrivals_of,
    measure,
)

TOY = TraceSource("toy", "", 0, 600, 40, 100, 300, 120)


@pytest.mark.parametrize("world", [SMALL, LARGE], ids=lambda world: world.name)
def test_the_most_at_once_is_that_of_the_paper(world: HybridEnvironment) -> None:
    """So many take no longer than the objective, and one more would."""
    assert world.at_once * world.exec_ns <= world.slo_ns < (world.at_once + 1) * world.exec_ns
    assert world.slo_ns == world.slo_ms * TIME_SCALE * MILLISECOND_NS


def test_where_there_is_something_to_decide() -> None:
    """A small instance pays from a third of its capacity on, a large one never does."""
    assert 0.3 < SMALL.usd_per_request / SMALL.usd_per_call < 0.4
    assert LARGE.usd_per_request > LARGE.usd_per_call


def test_what_is_there_at_the_beginning_is_what_the_first_minute_needs() -> None:
    arrivals = arrivals_of(HybridCase(HybridPolicyCase("threshold"), TOY), 0)
    in_minute = np.count_nonzero(arrivals.times_ns < 60 * 10**9)
    (function,) = app_of(SMALL, arrivals).functions
    assert function.prewarm_nodes == -(-in_minute * 0.36 // 60)


def test_functions_alone_are_paid_by_the_call() -> None:
    found = measure(HybridCase(HybridPolicyCase("serverless_only"), TOY), 0)
    warm_usd = found.requests * SMALL.usd_per_call
    assert found.dedicated_usd == 0.0
    assert found.function_share == 1.0
    assert 0 < found.cold_misses == found.cold_starts  # a cold start takes longer than is allowed
    assert warm_usd < found.functions_usd < 1.2 * warm_usd
    assert found.attainment == 1 - found.cold_misses / found.requests


def test_a_fixed_fleet_is_paid_by_the_hour() -> None:
    found = measure(HybridCase(HybridPolicyCase("threshold", (("nodes", 2),)), TOY), 0)
    assert found.dedicated_usd == pytest.approx(2 * SMALL.usd_per_hour / 6, rel=0.02)
    assert 0 < found.function_share < 1


def test_the_time_line_is_that_of_the_run() -> None:
    case = HybridCase(HybridPolicyCase("threshold", (("nodes", 2),)), TOY)
    timeline, found = watch(case, 0), measure(case, 0)
    paid_usd = timeline.paid.sum() * STEP_NS / HOUR_NS * SMALL.usd_per_hour
    assert paid_usd == pytest.approx(found.dedicated_usd, rel=0.02)
    assert (timeline.ready <= timeline.paid).all()
    assert timeline.demand.sum() * STEP_NS == pytest.approx(found.requests * SMALL.exec_ns)
    assert timeline.in_flight.max() >= 1


@given(st.lists(st.tuples(st.integers(1, 5 * STEP_NS), st.integers(-3, 9)), max_size=9))
def test_steps_of_a_number_that_changes(later: list[tuple[int, int]]) -> None:
    """Against the same in a finer grid: a change takes effect when it happens."""
    changes = [(0, 1), *((at_ns, number) for at_ns, number in sorted(later))]
    means, most = means_of(changes, 4), most_of(changes, 4)
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
