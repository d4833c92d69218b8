"""Every checker can fail: each is shown a run with one thing wrong, and one with nothing wrong."""

from __future__ import annotations

import pytest

from headgate.core.actions import (
    Action,
    CancelTimer,
    Dispatch,
    EvictWeights,
    LoadWeights,
    SetTimer,
    Settle,
    StartInstance,
    StopInstance,
)
from headgate.core.errors import InvariantError
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
    Refusal,
    RequestArrived,
    RequestCancelled,
    TimerFired,
    WeightsEvicted,
    WeightsLoaded,
)
from headgate.core.model import Pool
from headgate.core.outcome import Outcome
from headgate.sim.checkers import (
    BatchLimits,
    Causes,
    Checkers,
    Clock,
    Conservation,
    Deadlines,
    Exclusivity,
    Memory,
    Presence,
    Stages,
    Starvation,
    Windows,
    all_checkers,
)

from .apps import GPU, at_ms, make_app, run
from .planted import APP, Entry, arrives, columns, does, finishes, found, sends, settles

# --- requests ----------------------------------------------------------------------------------


def test_conservation() -> None:
    met = settles(Outcome.MET)
    assert found(Conservation(), arrives(), met, run=columns(finished_ns=(50,))) == ""
    assert "arrived twice" in found(Conservation(), arrives(), arrives())
    assert "never arrived" in found(Conservation(), met)
    assert "settled twice" in found(Conservation(), arrives(), met, met)
    assert "never settled" in found(Conservation(), arrives(), run=columns(finished_ns=(50,)))
    assert "1 requests have 0 rows" in found(Conservation(), arrives(), met, run=columns())


def test_conservation_compares_with_what_was_written_down() -> None:
    told = (arrives(), settles(Outcome.MET))
    for written in (columns(finished_ns=(51,)), columns(finished_ns=(50,), outcome=Outcome.LATE)):
        assert "written down otherwise" in found(Conservation(), *told, run=written)
    assert found(Conservation(thinks=True), *told, run=columns(finished_ns=(51,))) == ""


def test_a_request_is_settled_by_the_scheduler_it_came_to() -> None:
    checker = Conservation()
    checker.saw(0, 0, RequestArrived(0, 0), [])
    checker.saw(1, 1, TimerFired(("tick", 0)), [Settle(0, Outcome.MET)])
    assert "settled by Scheduler 1" in checker.violations[0]


@pytest.mark.parametrize(
    ("outcome", "now_ns", "is_honest"),
    [
        (Outcome.MET, 100, True),
        (Outcome.MET, 101, False),
        (Outcome.LATE, 101, True),
        (Outcome.LATE, 100, False),
        (Outcome.CANCELLED, 50, False),
        (Outcome.REJECTED, 50, True),
        (Outcome.FAILED, 500, True),
    ],
)
def test_deadlines(outcome: int, now_ns: int, is_honest: bool) -> None:
    checker = Deadlines(APP)
    assert (found(checker, arrives(), settles(outcome, now_ns=now_ns)) == "") == is_honest


def test_a_deadline_may_come_with_its_request() -> None:
    own: Entry = (0, RequestArrived(0, 0, deadline_ns=10), [])
    assert "cannot be called met" in found(Deadlines(APP), own, settles(Outcome.MET, now_ns=50))


def test_only_what_was_withdrawn_is_cancelled_and_what_went_out_is_not_rejected() -> None:
    withdrawn: Entry = (1, RequestCancelled(0), [Settle(0, Outcome.CANCELLED)])
    assert found(Deadlines(APP), arrives(), withdrawn) == ""
    rejected = (arrives(), sends(0, 0), settles(Outcome.REJECTED))
    assert "cannot be called rejected" in found(Deadlines(APP), *rejected)


def test_deadlines_in_the_columns() -> None:
    late, met = columns(finished_ns=(101,), outcome=Outcome.MET), columns(finished_ns=(100,))
    assert "request 0 is not met" in found(Deadlines(APP), run=late)
    assert found(Deadlines(APP, thinks=True), run=late) == ""
    assert found(Deadlines(APP), run=met) == ""
    early = columns(finished_ns=(100,), outcome=Outcome.LATE)
    assert "request 0 is not late" in found(Deadlines(APP), run=early)


def test_stages_go_out_in_order_and_once() -> None:
    first = (arrives(), sends(0, 0), finishes(0))
    rest = (sends(1, 1, variant=1), finishes(1), settles(Outcome.MET))
    assert found(Stages(APP), *first, *rest) == ""
    assert "before it has arrived" in found(Stages(APP), sends(0, 0))
    assert "before stage 0 is done" in found(Stages(APP), arrives(), sends(0, 1))
    assert "though it is done" in found(Stages(APP), *first, sends(1, 0))
    settled = (arrives(), settles(Outcome.EXPIRED), sends(0, 0))
    assert "after it was settled" in found(Stages(APP), *settled)
    assert "lacks stage 1" in found(Stages(APP), *first, settles(Outcome.MET))
    assert found(Stages(APP), *first, settles(Outcome.EXPIRED)) == ""


@pytest.mark.parametrize(
    "ending",
    [BatchFailed(0, ""), BatchRefused(0, 0), BatchLost(0), TimerFired(("lost", 0))],
    ids=lambda event: type(event).__name__,
)
def test_what_a_batch_did_not_finish_is_not_done(ending: Event) -> None:
    ended: Entry = (15, ending, [])
    told = (arrives(), sends(0, 0), ended, finishes(0), settles(Outcome.MET))
    assert "lacks stage 0" in found(Stages(APP), *told)


def test_a_cascade_ends_where_it_is_sure() -> None:
    sure = (arrives(pipeline=1), sends(0, 0), finishes(0))
    unsure = (arrives(pipeline=1), sends(0, 0), finishes(0, 0))
    assert found(Stages(APP), *sure, settles(Outcome.MET)) == ""
    assert "was skipped" in found(Stages(APP), *sure, sends(1, 1))
    assert "lacks stage 1" in found(Stages(APP), *unsure, settles(Outcome.MET))
    assert found(Stages(APP), *unsure, sends(1, 1)) == ""


def test_starvation() -> None:
    assert found(Starvation(10), arrives(), sends(0, 0, now_ns=10)) == ""
    assert "waited for 11 ns" in found(Starvation(10), arrives(), sends(0, 0, now_ns=11))
    expired = settles(Outcome.EXPIRED, now_ns=11)
    assert "waited for 11 ns" in found(Starvation(10), arrives(), expired)
    assert "waited for 1000 ns" in found(Starvation(10), arrives(), run=columns())


# --- batches -----------------------------------------------------------------------------------


def test_a_batch_ends_once() -> None:
    assert found(Causes(), arrives(), sends(0, 0), finishes(0)).count("timer") == 1  # the tick
    assert "was never sent" in found(Causes(), finishes(0))
    assert "ended twice" in found(Causes(), sends(0, 0), finishes(0), finishes(0))
    assert "ended twice" in found(Causes(), sends(0, 0), finishes(0), (21, BatchLost(0), []))
    assert "sent twice" in found(Causes(), sends(0, 0), sends(0, 0))


def test_a_completion_may_be_told_twice_where_faults_do_that() -> None:
    twice = (sends(0, 0), finishes(0), finishes(0))
    assert "ended twice" not in found(Causes(duplicates=True), *twice)
    refused: Entry = (21, BatchRefused(0, 0), [])
    assert "ended twice" in found(Causes(duplicates=True), sends(0, 0), finishes(0), refused)


def test_a_batch_that_was_given_up_may_still_end_once() -> None:
    sent = does(Dispatch(0, 0, [0], 1, 0, 0, 0), SetTimer(("lost", 0), 5))
    given_up: Entry = (5, TimerFired(("lost", 0)), [])
    assert "batch" not in found(Causes(), sent, given_up, finishes(0))
    assert "ended twice" in found(Causes(), sent, given_up, finishes(0), finishes(0))


def test_nothing_is_in_flight_when_a_run_has_drained() -> None:
    assert "not ended" not in found(Causes(), sends(0, 0), run=columns())
    assert "batch 0 has not ended" in found(Causes(drained=True), sends(0, 0), run=columns())
    lost = Causes(drained=True, losses=True)
    assert "not ended" not in found(lost, sends(0, 0), run=columns())


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
def test_an_order_about_an_instance_ends(order: Action, ends: tuple[Event, ...]) -> None:
    started: Entry = (2, InstanceStarted(0, 0), [])
    told = (does(StartInstance(0, 0, 0, 0)), started, does(order))
    text = found(Causes(drained=True), *told, run=columns())
    assert f"{type(order).__name__} of instance 0 has not ended" in text
    for event in ends:
        assert "not ended" not in found(Causes(drained=True), *told, (3, event, []), run=columns())


def test_events_about_instances_name_one_that_was_started() -> None:
    for event in (InstanceStarted(0, 0), InstanceStopped(0, ""), WeightsLoaded(0)):
        assert "was never started" in found(Causes(), (1, event, []))
    start = does(StartInstance(0, 0, 0, 0))
    assert "started twice" in found(Causes(), start, start)
    assert "where it was ordered" in found(Causes(), start, (2, InstanceAppeared(0, 0, 0), []))
    checker = Causes()
    found(checker, start)
    checker.saw(2, 1, InstanceStarted(0, 0), [])
    assert "not Scheduler 1's" in checker.violations[-1]


def test_timers_fire_in_their_time_and_only_if_set() -> None:
    sets: Entry = (0, NodeJoined(0, 0, ""), [SetTimer(("a", 1), 10)])
    cancels: Entry = (1, NodeLost(0), [CancelTimer(("a", 1))])
    in_time: Entry = (10, TimerFired(("a", 1)), [])
    early: Entry = (9, TimerFired(("a", 1)), [])
    assert found(Causes(), sets, in_time) == ""
    for wrong in ((in_time,), (sets, early), (sets, cancels, in_time), (sets, in_time, in_time)):
        assert "not set, or too early" in found(Causes(), *wrong)
    assert found(Causes(thinks=True), sets, cancels, in_time) == ""


def test_batch_limits() -> None:
    both = (arrives(0), arrives(1))
    third = arrives(2)
    assert found(BatchLimits(APP), *both, sends(0, 0, 256)) == ""
    assert "has 3 items" in found(BatchLimits(APP), *both, third, sends(0, 0, 256, 512))
    assert "runs f0 by mistake" in found(BatchLimits(APP), *both, sends(0, 0, variant=1))
    assert "has a task twice" in found(BatchLimits(APP), *both, sends(0, 0, 0))
    miscounted = does(Dispatch(0, 0, [0], 2, 0, 0, 0))
    assert "in truth 1" in found(BatchLimits(APP), *both, miscounted)
    elsewhere = does(Dispatch(0, 0, [0], 1, 5, 0, 0))
    assert "does not run on pool 5" in found(BatchLimits(APP), *both, elsewhere)


def test_windows() -> None:
    order = Dispatch(0, 0, [0], 1, 0, 0, 0, earliest_ns=10, latest_ns=20)
    good = (0, 10, 15, 0, 1)
    assert found(Windows(APP), does(order), run=columns(good)) == ""
    for begin_ns in (9, 21):
        text = found(Windows(APP), does(order), run=columns((0, begin_ns, 30, 0, 1)))
        assert "outside of its window" in text
    assert "never sent" in found(Windows(APP), run=columns(good))
    assert "ran twice" in found(Windows(APP), does(order), run=columns(good, (0, 15, 20, 0, 1)))
    for other in ((1, 10, 15, 0, 1), (0, 10, 15, 0, 2)):
        assert "otherwise than" in found(Windows(APP), does(order), run=columns(other))


def test_a_batch_is_refused_as_late_only_if_it_is() -> None:
    order = does(Dispatch(0, 0, [0], 1, 0, 0, 0, latest_ns=20))
    refusal = BatchRefused(0, Refusal.LATE)
    assert found(Windows(APP), order, (21, refusal, [])) == ""
    assert "is refused as late" in found(Windows(APP), order, (20, refusal, []))


# --- nodes -------------------------------------------------------------------------------------

JOINS: Entry = (0, NodeJoined(0, 0, "gpu1"), [])
STARTS = does(StartInstance(0, 0, 0, 0))


def test_nothing_is_ordered_of_what_is_not_there() -> None:
    assert found(Presence(), JOINS, STARTS, sends(0, 0)) == ""
    assert "node 0 is not there" in found(Presence(), STARTS)
    assert "no instance 0 on node 0" in found(Presence(), JOINS, sends(0, 0))
    lost: Entry = (2, NodeLost(0), [])
    assert "node 0 is not there" in found(Presence(), JOINS, STARTS, lost, sends(0, 0))
    assert "no instance 0" in found(Presence(), JOINS, STARTS, lost, JOINS, sends(0, 0))
    for gone in (does(StopInstance(0, 0)), (2, InstanceStopped(0, ""), [])):
        assert "no instance 0" in found(Presence(), JOINS, STARTS, gone, sends(0, 0))


def test_what_a_pool_has_placed_is_known_when_it_is_told() -> None:
    anywhere = does(StartInstance(0, 0, 0, None))
    started: Entry = (2, InstanceStarted(0, 0), [])
    assert found(Presence(), JOINS, anywhere, started, sends(0, 0)) == ""
    assert "no instance 0" in found(Presence(), JOINS, anywhere, sends(0, 0))
    appeared: Entry = (2, InstanceAppeared(0, 0, 0), [])
    assert found(Presence(), JOINS, appeared, sends(0, 0)) == ""


def test_exclusivity() -> None:
    """Two slots: what ends at 10 makes room for what begins at 10."""
    two = ((0, 0, 10, 0, 1), (0, 5, 15, 1, 1))
    assert found(Exclusivity(APP), run=columns(*two, (0, 10, 20, 2, 1))) == ""
    text = found(Exclusivity(APP), run=columns(*two, (0, 9, 20, 2, 1)))
    assert "at 9 ns: gpu1 does 3 things at once, of 2" in text
    assert found(Exclusivity(APP), run=columns(*two, (1, 9, 20, 2, 1))) == ""


def test_memory() -> None:
    """Two of 60 bytes do not fit the device's 100; one fits the host's 60."""
    second = does(StartInstance(1, 1, 0, 0))
    assert "holds 120 bytes of 100" in found(Memory(APP), JOINS, STARTS, second)
    for freed in (
        does(EvictWeights(0, 0)),
        does(StopInstance(0, 0)),
        (2, InstanceStopped(0, ""), []),
    ):
        assert found(Memory(APP), JOINS, STARTS, freed, second) == ""
    evicted = (JOINS, STARTS, does(EvictWeights(0, 0)), second)
    assert "holds 120 bytes of 60" in found(Memory(APP), *evicted, does(EvictWeights(1, 0)))
    assert "holds 120 bytes of 100" in found(Memory(APP), *evicted, does(LoadWeights(0, 0)))
    lost: Entry = (2, NodeLost(0), [])
    assert found(Memory(APP), JOINS, STARTS, lost, JOINS, second) == ""


def test_memory_of_what_a_pool_has_placed() -> None:
    anywhere = does(StartInstance(1, 1, 0, None))
    told = (JOINS, STARTS, anywhere)
    assert found(Memory(APP), *told) == ""
    assert "holds 120 bytes" in found(Memory(APP), *told, (2, InstanceStarted(1, 0), []))


# --- all of them -------------------------------------------------------------------------------


def test_time_never_goes_back() -> None:
    assert found(Clock(), arrives(), sends(0, 0)) == ""
    assert "time went back from 1 ns" in found(Clock(), sends(0, 0), arrives())


def test_a_run_that_stands_still_is_stopped() -> None:
    with pytest.raises(InvariantError, match="too many events; the last was RequestArrived"):
        found(Clock(events_max=2), arrives(0), arrives(1), arrives(2))


def test_checkers_gather_and_raise() -> None:
    checkers = Checkers([Clock(), Conservation()])
    assert checkers.names == ("Clock", "Conservation")
    text = found(checkers, sends(0, 0), arrives(), run=columns(finished_ns=(0,)))
    assert "Clock: at 0 ns" in text
    assert "Conservation: at 1000 ns" in text
    with pytest.raises(InvariantError, match="time went back"):
        checkers.raise_if_any()
    Checkers([]).raise_if_any()


def test_one_cause_does_not_fill_the_screen() -> None:
    checker = Conservation()
    found(checker, *[settles(Outcome.MET, request_id) for request_id in range(100)])
    assert len(checker.violations) == 20


@pytest.mark.parametrize("bound_ms", [None, 10])
def test_a_sound_run_passes_all(bound_ms: int | None) -> None:
    run(make_app(), at_ms(0, 5, 30))
    names = all_checkers(make_app(), wait_max_ns=bound_ms).names
    assert ("Starvation" in names) == (bound_ms is not None)
    assert len(set(names)) == len(names) >= 10


def test_checkers_see_a_run_whose_node_does_two_things_at_once() -> None:
    """From a real run: two requests on two slots, checked as if there was one."""
    app = make_app(pools=(Pool(0, "gpu", slots=2),), concurrency=2)
    run_columns, _ = run(app, at_ms(0, 0))
    exclusive = Exclusivity(make_app(pools=(GPU,)))
    exclusive.finish(run_columns)
    assert "gpu1 does 2 things at once, of 1" in exclusive.violations[0]
