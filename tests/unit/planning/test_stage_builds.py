"""Which stage of a pipeline goes to a fast pool where not all of them need it."""

from __future__ import annotations

import pytest
from planning_rig import MS, PlanningRig, cpu_and_gpu_functions

from headgate.core.model import App, Pipeline, Pool, Slo, Stage
from headgate.planning.admission.feasibility import StageBuilds

SLOW_MS, FAST_MS = 60, 20
Shape = list[tuple[int, ...]]  # by stage: those that it waits for
CHAIN: Shape = [(), (0,)]
FORK: Shape = [(), (0,), (0,), (0,)]


def lengths_ms(shape: Shape, latency_ms: int, backlog_ms: int = 0) -> list[float] | None:
    """Lengths of the stages of one function, with so much booked on each fast node."""
    functions = cpu_and_gpu_functions([(SLOW_MS, FAST_MS)])
    stages = tuple(Stage(functions[0], after) for after in shape)
    pools = (Pool(0, "slow", nodes=20), Pool(1, "fast", nodes=2))
    rig = PlanningRig(App(functions, (Pipeline(0, "p", stages, Slo(latency_ms * MS)),), pools))
    calendar = rig.build(0, 1).calendar
    bucket = calendar.bucket(0, latency_ms * MS)
    calendar.add(bucket, 2 * backlog_ms * MS, 2 * backlog_ms / FAST_MS)
    chooser = StageBuilds(rig.builds, rig.admission.feasibility)
    request = rig.ask(due_ms=latency_ms)
    found = chooser.lengths_ns(request, float(latency_ms * MS), 0.0)
    return None if found is None else [length_ns / MS for length_ns in found]


def test_the_later_of_two_stages_is_hastened() -> None:
    """The fast pool is booked for 40 ms: by the end of the first stage, and not of the second."""
    assert lengths_ms(CHAIN, 100, backlog_ms=40) == pytest.approx([70, 30], abs=0.1)


def test_no_stage_is_hastened_where_all_can_be_slow() -> None:
    assert lengths_ms(CHAIN, 130, backlog_ms=40) == pytest.approx([65, 65], abs=0.1)


def test_the_stage_is_hastened_that_all_late_ends_wait_for() -> None:
    assert lengths_ms(FORK, 100, backlog_ms=40) == pytest.approx([30, 70, 70, 70], abs=0.1)


def test_all_are_hastened_if_that_is_in_time_and_nothing_else() -> None:
    assert lengths_ms(CHAIN, 50) == pytest.approx([25, 25], abs=0.1)
    assert lengths_ms(CHAIN, 39) is None
