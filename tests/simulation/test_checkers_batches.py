"""Every checker of batches and of nodes reports violations and passes correct runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headgate.core.actions import (
    Action,
    CancelTimer,
    Dispatch,
    EvictWeights,
    LoadWeights,
    SetTimer,
    StartInstance,
    StopInstance,
)
from headgate.core.events import (
    BatchFailed,
    BatchLost,
    BatchRefused,
    Event,
    InstanceAppeared,
    InstanceStarted,
    InstanceStopped,
    NodeJoined,
    NodeLost,
    TimerFired,
    WeightsEvicted,
    WeightsLoaded,
)
from headgate.core.model import Compute, Shape, ShapeTimes
from headgate.metrics.columns import SpanKind
from headgate.sim.checkers import (
    AttemptLimits,
    BatchLimits,
    Completions,
    ComputeLimits,
    Exclusivity,
    Executions,
    LiveTargets,
    Memory,
)

from .checker_runs import APP, F0, F1, Entry, arrives, columns, does, finishes, sends, violations


def test_a_batch_ends_once() -> None:
    assert (
        violations(Completions(), arrives(), sends(0, 0), finishes(0)).count("timer") == 1
    )  # the tick
    assert "was never sent" in violations(Completions(), finishes(0))
    assert "ended twice" in violations(Completions(), sends(0, 0), finishes(0), finishes(0))
    assert "ended twice" in violations(
        Completions(), sends(0, 0), finishes(0), (21, BatchLost(0), [])
    )
    assert "sent twice" in violations(Completions(), sends(0, 0), sends(0, 0))


def test_duplicate_completions_are_allowed_under_that_fault() -> None:
    twice = (sends(0, 0), finishes(0), finishes(0))
    assert "ended twice" not in violations(Completions(allows_duplicates=True), *twice)
    refused: Entry = (21, BatchRefused(0, 0), [])
    assert "ended twice" in violations(
        Completions(allows_duplicates=True), sends(0, 0), finishes(0), refused
    )


def test_a_batch_given_up_as_lost_may_still_end_once() -> None:
    sent = does(Dispatch(0, 0, [0], 1, 0, 0, 0), SetTimer(("lost", 0), 5))
    given_up: Entry = (5, TimerFired(("lost", 0)), [])
    assert "batch" not in violations(Completions(), sent, given_up, finishes(0))
    assert "ended twice" in violations(Completions(), sent, given_up, finishes(0), finishes(0))


def test_nothing_is_in_flight_after_a_drained_run() -> None:
    assert "not ended" not in violations(Completions(), sends(0, 0), run=columns())
    assert "batch 0 has not ended" in violations(
        Completions(is_drained=True), sends(0, 0), run=columns()
    )
    lost = Completions(is_drained=True, allows_losses=True)
    assert "not ended" not in violations(lost, sends(0, 0), run=columns())


@pytest.mark.parametrize(
    ("order", "ends"),
    [
        (StartInstance(0, 0, 0, 0), (InstanceStarted(0, 0), InstanceStopped(0, ""), NodeLost(0))),
        (StopInstance(0, 0), (InstanceStopped(0, ""), NodeLost(0))),
        (LoadWeights(0, 0), (WeightsLoaded(0), InstanceStopped(0, ""), NodeLost(0))),
        (EvictWeights(0, 0), (WeightsEvicted(0), WeightsLoaded(0), NodeLost(0))),
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_every_action_on_an_instance_ends(order: Action, ends: tuple[Event, ...]) -> None:
    started: Entry = (2, InstanceStarted(0, 0), [])
    entries = (does(StartInstance(0, 0, 0, 0)), started, does(order))
    text = violations(Completions(is_drained=True), *entries, run=columns())
    assert f"{type(order).__name__} of instance 0 has not ended" in text
    for event in ends:
        assert "not ended" not in violations(
            Completions(is_drained=True), *entries, (3, event, []), run=columns()
        )


def test_instance_events_require_a_start() -> None:
    for event in (InstanceStarted(0, 0), InstanceStopped(0, ""), WeightsLoaded(0)):
        assert "was never started" in violations(Completions(), (1, event, []))
    start = does(StartInstance(0, 0, 0, 0))
    assert "started twice" in violations(Completions(), start, start)
    assert "at its own Scheduler" in violations(
        Completions(), start, (2, InstanceAppeared(0, 0, 0), [])
    )
    checker = Completions()
    violations(checker, start)
    checker.on_event(2, 1, InstanceStarted(0, 0), [])
    assert "not Scheduler 1's" in checker.violations[-1]


def test_timers_fire_on_time_and_only_if_set() -> None:
    sets: Entry = (0, NodeJoined(0, 0, ""), [SetTimer(("a", 1), 10)])
    cancels: Entry = (1, NodeLost(0), [CancelTimer(("a", 1))])
    in_time: Entry = (10, TimerFired(("a", 1)), [])
    early: Entry = (9, TimerFired(("a", 1)), [])
    assert violations(Completions(), sets, in_time) == ""
    for wrong in ((in_time,), (sets, early), (sets, cancels, in_time), (sets, in_time, in_time)):
        assert "not set, or too early" in violations(Completions(), *wrong)
    assert violations(Completions(has_decision_cost=True), sets, cancels, in_time) == ""


SHARED = replace(
    APP,
    functions=(
        replace(
            F0,
            variants=(
                replace(
                    F0.variants[0],
                    shape=Shape(500, 3),
                    more_shapes=(ShapeTimes(Shape(500, 5), (10,)),),
                ),
            ),
        ),
        F1,
    ),
    pools=(replace(APP.pools[0], cpu_milli=1_000, gpu_sevenths=7),),
)


def in_shape(batch_id: int, shape_id: int, instance_id: int = 0) -> Entry:
    return does(Dispatch(batch_id, 0, [batch_id], 1, 0, 0, instance_id, shape_id=shape_id))


def test_running_batches_hold_the_compute_of_their_shapes() -> None:
    """3/7 and 3/7 fit, 3/7 and 5/7 do not, unless one ends when the other begins."""
    small, large = in_shape(0, 0), in_shape(1, 1)
    beside, after = ((0, 0, 10, 0, 1), (0, 5, 15, 1, 1)), ((0, 0, 10, 0, 1), (0, 10, 15, 1, 1))
    assert violations(ComputeLimits(SHARED), small, in_shape(1, 0), run=columns(*beside)) == ""
    assert violations(ComputeLimits(SHARED), small, large, run=columns(*after)) == ""
    text = violations(ComputeLimits(SHARED), small, large, run=columns(*beside))
    assert "gpu1 holds 1 CPUs and 8/7 of a GPU: too much" in text
    assert "has another shape than its instance" in violations(
        ComputeLimits(SHARED), does(StartInstance(0, 0, 0, 0, 1)), small
    )
    assert "v0 has no shape 2" in violations(BatchLimits(SHARED), in_shape(0, 2))


def test_loaded_instances_hold_resident_compute() -> None:
    """Both idle after their starts: too much only if one was used after the other had begun."""
    app = replace(SHARED, pools=(replace(SHARED.pools[0], compute=Compute.RESIDENT),))
    starts = does(StartInstance(0, 0, 0, 0), StartInstance(1, 0, 0, 0, 1))
    used = in_shape(0, 0)
    begins, kinds = ((0, 0, 5, 0, 0), (0, 6, 9, 1, 0)), (SpanKind.START, SpanKind.START)
    run = columns(*begins, kinds=kinds)
    assert violations(ComputeLimits(app), starts, run=run) == ""
    run = columns(*begins, (0, 7, 9, 0, 1), kinds=(*kinds, SpanKind.RUN))
    assert "too much" in violations(ComputeLimits(app), starts, used, run=run)


def test_attempts_per_task_are_limited() -> None:
    """`APP` allows three runs."""
    three = [entry for i in range(3) for entry in (sends(i, 0), (2, BatchFailed(i, ""), []))]
    assert violations(AttemptLimits(APP), *three) == ""
    assert "beyond 3 runs" in violations(AttemptLimits(APP), *three, sends(3, 0))


def test_refused_batches_do_not_count_as_attempts_and_lost_ones_do() -> None:
    refused: Entry = (2, BatchRefused(0, 0), [])
    given_up: Entry = (2, TimerFired(("lost", 0)), [])
    again = [sends(i, 0) for i in (1, 2, 3)]
    assert violations(AttemptLimits(APP), sends(0, 0), refused, *again) == ""
    for ending in ((given_up,), (given_up, refused)):  # a refusal that comes too late
        assert "beyond 3 runs" in violations(AttemptLimits(APP), sends(0, 0), *ending, *again)


def test_tasks_that_are_not_idempotent_run_once() -> None:
    functions = tuple(replace(function, is_idempotent=False) for function in APP.functions)
    careful = AttemptLimits(replace(APP, functions=functions))
    assert "beyond 1 runs" in violations(careful, sends(0, 0), (2, BatchLost(0), []), sends(1, 0))


def test_batch_limits() -> None:
    both = (arrives(0), arrives(1))
    third = arrives(2)
    assert violations(BatchLimits(APP), *both, sends(0, 0, 256)) == ""
    assert "declares 3 items" in violations(BatchLimits(APP), *both, third, sends(0, 0, 256, 512))
    assert "has a task of f0" in violations(BatchLimits(APP), *both, sends(0, 0, variant=1))
    assert "has a task twice" in violations(BatchLimits(APP), *both, sends(0, 0, 0))
    miscounted = does(Dispatch(0, 0, [0], 2, 0, 0, 0))
    assert "has 1 and may" in violations(BatchLimits(APP), *both, miscounted)
    elsewhere = does(Dispatch(0, 0, [0], 1, 5, 0, 0))
    assert "does not run on pool 5" in violations(BatchLimits(APP), *both, elsewhere)


def test_executions() -> None:
    order = Dispatch(0, 0, [0], 1, 0, 0, 0)
    good = (0, 10, 15, 0, 1)
    assert violations(Executions(APP), does(order), run=columns(good)) == ""
    assert "never sent" in violations(Executions(APP), run=columns(good))
    assert "ran twice" in violations(
        Executions(APP), does(order), run=columns(good, (0, 15, 20, 0, 1))
    )
    for other in ((1, 10, 15, 0, 1), (0, 10, 15, 0, 2)):
        assert "otherwise than" in violations(Executions(APP), does(order), run=columns(other))


JOINS: Entry = (0, NodeJoined(0, 0, "gpu1"), [])
STARTS = does(StartInstance(0, 0, 0, 0))


def test_actions_go_to_live_nodes_and_instances() -> None:
    assert violations(LiveTargets(), JOINS, STARTS, sends(0, 0)) == ""
    assert "node 0 is not up" in violations(LiveTargets(), STARTS)
    assert "no instance 0 on node 0" in violations(LiveTargets(), JOINS, sends(0, 0))
    lost: Entry = (2, NodeLost(0), [])
    assert "node 0 is not up" in violations(LiveTargets(), JOINS, STARTS, lost, sends(0, 0))
    assert "no instance 0" in violations(LiveTargets(), JOINS, STARTS, lost, JOINS, sends(0, 0))
    for gone in (does(StopInstance(0, 0)), (2, InstanceStopped(0, ""), [])):
        assert "no instance 0" in violations(LiveTargets(), JOINS, STARTS, gone, sends(0, 0))


def test_the_node_a_pool_picked_is_known_from_the_start_event() -> None:
    anywhere = does(StartInstance(0, 0, 0, None))
    started: Entry = (2, InstanceStarted(0, 0), [])
    assert violations(LiveTargets(), JOINS, anywhere, started, sends(0, 0)) == ""
    assert "no instance 0" in violations(LiveTargets(), JOINS, anywhere, sends(0, 0))
    appeared: Entry = (2, InstanceAppeared(0, 0, 0), [])
    assert violations(LiveTargets(), JOINS, appeared, sends(0, 0)) == ""


def test_exclusivity() -> None:
    """Two slots: what ends at 10 makes room for what begins at 10."""
    two = ((0, 0, 10, 0, 1), (0, 5, 15, 1, 1))
    assert violations(Exclusivity(APP), run=columns(*two, (0, 10, 20, 2, 1))) == ""
    text = violations(Exclusivity(APP), run=columns(*two, (0, 9, 20, 2, 1)))
    assert "at 9 ns: gpu1 runs 3 jobs at once, of 2" in text
    assert violations(Exclusivity(APP), run=columns(*two, (1, 9, 20, 2, 1))) == ""


def test_memory() -> None:
    """Two of 60 bytes do not fit the device's 100; one fits the host's 60."""
    second = does(StartInstance(1, 1, 0, 0))
    assert "holds 120 bytes of 100" in violations(Memory(APP), JOINS, STARTS, second)
    for freed in (
        does(EvictWeights(0, 0)),
        does(StopInstance(0, 0)),
        (2, InstanceStopped(0, ""), []),
    ):
        assert violations(Memory(APP), JOINS, STARTS, freed, second) == ""
    evicted = (JOINS, STARTS, does(EvictWeights(0, 0)), second)
    assert "holds 120 bytes of 60" in violations(Memory(APP), *evicted, does(EvictWeights(1, 0)))
    assert "holds 120 bytes of 100" in violations(Memory(APP), *evicted, does(LoadWeights(0, 0)))
    lost: Entry = (2, NodeLost(0), [])
    assert violations(Memory(APP), JOINS, STARTS, lost, JOINS, second) == ""


def test_memory_of_instances_that_a_pool_has_placed() -> None:
    anywhere = does(StartInstance(1, 1, 0, None))
    entries = (JOINS, STARTS, anywhere)
    assert violations(Memory(APP), *entries) == ""
    assert "holds 120 bytes" in violations(Memory(APP), *entries, (2, InstanceStarted(1, 0), []))
