"""Every checker of requests reports a run with one violation and passes a correct run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headgate.core.actions import ReportWouldReject, Settle
from headgate.core.errors import InvariantError
from headgate.core.events import (
    BatchFailed,
    BatchLost,
    BatchRefused,
    Event,
    RequestArrived,
    RequestCancelled,
    TimerFired,
)
from headgate.core.model import OBSERVE, Limits, Pool, Slo
from headgate.core.states import Outcome, Settlement
from headgate.sim.checkers import (
    Checkers,
    Clock,
    Conservation,
    Deadlines,
    Exclusivity,
    HardDeadlines,
    ObservedAdmission,
    Stages,
    Starvation,
    all_checkers,
)

from .apps import GPU, at_ms, make_app, run
from .checker_runs import (
    APP,
    Entry,
    arrives,
    columns,
    does,
    finishes,
    sends,
    settles,
    violations,
)


def test_conservation() -> None:
    met = settles(Outcome.MET)
    assert violations(Conservation(), arrives(), met, run=columns(finished_ns=(50,))) == ""
    assert "arrived twice" in violations(Conservation(), arrives(), arrives())
    assert "never arrived" in violations(Conservation(), met)
    assert "settled twice" in violations(Conservation(), arrives(), met, met)
    assert "never settled" in violations(Conservation(), arrives(), run=columns(finished_ns=(50,)))
    assert "1 requests have 0 rows" in violations(Conservation(), arrives(), met, run=columns())


def test_conservation_compares_with_the_columns() -> None:
    entries = (arrives(), settles(Outcome.MET))
    for written in (columns(finished_ns=(51,)), columns(finished_ns=(50,), outcome=Outcome.LATE)):
        assert "another row in the columns" in violations(Conservation(), *entries, run=written)
    assert (
        violations(Conservation(has_decision_cost=True), *entries, run=columns(finished_ns=(51,)))
        == ""
    )


def test_a_request_is_settled_by_the_scheduler_it_arrived_at() -> None:
    checker = Conservation()
    checker.on_event(0, 0, RequestArrived(0, 0), [])
    checker.on_event(1, 1, TimerFired(("tick", 0)), [Settle(0, Settlement(Outcome.MET))])
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
    assert (violations(checker, arrives(), settles(outcome, now_ns=now_ns)) == "") == is_honest


def test_a_request_may_bring_its_own_deadline() -> None:
    own: Entry = (0, RequestArrived(0, 0, deadline_ns=10), [])
    assert "cannot be settled as met" in violations(
        Deadlines(APP), own, settles(Outcome.MET, now_ns=50)
    )


def test_cancelled_requires_a_cancellation_and_rejected_no_dispatch() -> None:
    withdrawn: Entry = (1, RequestCancelled(0), [Settle(0, Settlement(Outcome.CANCELLED))])
    assert violations(Deadlines(APP), arrives(), withdrawn) == ""
    rejected = (arrives(), sends(0, 0), settles(Outcome.REJECTED))
    assert "cannot be settled as rejected" in violations(Deadlines(APP), *rejected)


def test_deadlines_in_the_columns() -> None:
    late, met = columns(finished_ns=(101,), outcome=Outcome.MET), columns(finished_ns=(100,))
    assert "request 0 is not met" in violations(Deadlines(APP), run=late)
    assert violations(Deadlines(APP, has_decision_cost=True), run=late) == ""
    assert violations(Deadlines(APP), run=met) == ""
    early = columns(finished_ns=(100,), outcome=Outcome.LATE)
    assert "request 0 is not late" in violations(Deadlines(APP), run=early)


def test_a_request_is_not_dispatched_after_its_hard_deadline() -> None:
    """Deadlines are soft in `APP`; here all are hard, at 100."""
    pipelines = tuple(replace(p, slo=Slo(100, is_hard=True)) for p in APP.pipelines)
    hasty = replace(APP, pipelines=pipelines)
    in_time, late = sends(0, 0, now_ns=100), sends(1, 0, now_ns=101)
    assert violations(HardDeadlines(hasty), arrives(), in_time) == ""
    assert "dispatched after its deadline" in violations(HardDeadlines(hasty), arrives(), late)
    assert violations(HardDeadlines(APP), arrives(), late) == ""
    assert violations(HardDeadlines(hasty), arrives(), in_time, late) == ""  # it may yet be late
    for ending in (BatchRefused(0, 0), TimerFired(("lost", 0))):
        ended: Entry = (101, ending, [])
        text = violations(HardDeadlines(hasty), arrives(), in_time, ended, late)
        assert "dispatched after its deadline" in text


def test_stages_are_dispatched_in_order_and_once() -> None:
    first = (arrives(), sends(0, 0), finishes(0))
    rest = (sends(1, 1, variant=1), finishes(1), settles(Outcome.MET))
    assert violations(Stages(APP), *first, *rest) == ""
    assert "before its request has arrived" in violations(Stages(APP), sends(0, 0))
    assert "before stage 0 is done" in violations(Stages(APP), arrives(), sends(0, 1))
    assert "though it is done" in violations(Stages(APP), *first, sends(1, 0))
    settled = (arrives(), settles(Outcome.EXPIRED), sends(0, 0))
    assert "after it was settled" in violations(Stages(APP), *settled)
    assert "lacks stage 1" in violations(Stages(APP), *first, settles(Outcome.MET))
    assert violations(Stages(APP), *first, settles(Outcome.EXPIRED)) == ""


@pytest.mark.parametrize(
    "ending",
    [BatchFailed(0, ""), BatchRefused(0, 0), BatchLost(0), TimerFired(("lost", 0))],
    ids=lambda event: type(event).__name__,
)
def test_tasks_of_an_unfinished_batch_are_not_done(ending: Event) -> None:
    ended: Entry = (15, ending, [])
    entries = (arrives(), sends(0, 0), ended, finishes(0), settles(Outcome.MET))
    assert "lacks stage 0" in violations(Stages(APP), *entries)


def test_a_cascade_ends_at_the_first_sure_stage() -> None:
    sure = (arrives(pipeline=1), sends(0, 0), finishes(0))
    unsure = (arrives(pipeline=1), sends(0, 0), finishes(0, 0))
    assert violations(Stages(APP), *sure, settles(Outcome.MET)) == ""
    assert "was skipped" in violations(Stages(APP), *sure, sends(1, 1))
    assert "lacks stage 1" in violations(Stages(APP), *unsure, settles(Outcome.MET))
    assert violations(Stages(APP), *unsure, sends(1, 1)) == ""


def test_starvation() -> None:
    assert violations(Starvation(10), arrives(), sends(0, 0, now_ns=10)) == ""
    assert "waited for 11 ns" in violations(Starvation(10), arrives(), sends(0, 0, now_ns=11))
    expired = settles(Outcome.EXPIRED, now_ns=11)
    assert "waited for 11 ns" in violations(Starvation(10), arrives(), expired)
    assert "waited for 1000 ns" in violations(Starvation(10), arrives(), run=columns())


def test_clock_reports_time_going_back() -> None:
    assert violations(Clock(), arrives(), sends(0, 0)) == ""
    assert "time went back from 1 ns" in violations(Clock(), sends(0, 0), arrives())


def test_clock_stops_an_endless_run() -> None:
    with pytest.raises(InvariantError, match="too many events; the last was RequestArrived"):
        violations(Clock(events_max=2), arrives(0), arrives(1), arrives(2))


def test_checkers_collect_violations_and_raise() -> None:
    checkers = Checkers([Clock(), Conservation()])
    assert checkers.names == ("Clock", "Conservation")
    text = violations(checkers, sends(0, 0), arrives(), run=columns(finished_ns=(0,)))
    assert "Clock: at 0 ns" in text
    assert "Conservation: at 1000 ns" in text
    with pytest.raises(InvariantError, match="time went back"):
        checkers.raise_if_any()
    Checkers([]).raise_if_any()


def test_violations_per_checker_are_limited() -> None:
    checker = Conservation()
    violations(checker, *[settles(Outcome.MET, request_id) for request_id in range(100)])
    assert len(checker.violations) == 20


@pytest.mark.parametrize("bound_ms", [None, 10])
def test_a_correct_run_passes_all_checkers(bound_ms: int | None) -> None:
    run(make_app(), at_ms(0, 5, 30))
    names = all_checkers(make_app(), wait_max_ns=bound_ms).names
    assert ("Starvation" in names) == (bound_ms is not None)
    assert len(set(names)) == len(names) >= 10


def test_checkers_report_two_jobs_at_once_on_one_slot() -> None:
    """From a real run: two requests on two slots, checked as if there was one."""
    app = make_app(pools=(Pool(0, "gpu", slots=2),), concurrency=2)
    run_columns, _ = run(app, at_ms(0, 0))
    exclusive = Exclusivity(make_app(pools=(GPU,)))
    exclusive.finish(run_columns)
    assert "gpu1 runs 2 jobs at once, of 1" in exclusive.violations[0]


def test_observed_admission() -> None:
    """A report stands for a rejection exactly where admission is only observed."""
    observing = replace(APP, limits=Limits(admission=OBSERVE))
    report, rejected = does(ReportWouldReject(0, "overloaded")), settles(Outcome.REJECTED)
    assert violations(ObservedAdmission(APP), arrives(), rejected) == ""
    assert "is reported, but not" in violations(ObservedAdmission(APP), arrives(), report)
    assert "is rejected, not observed" in violations(
        ObservedAdmission(observing), arrives(), rejected
    )
    full = does(Settle(0, Settlement(Outcome.REJECTED, "too_many_open")))
    assert violations(ObservedAdmission(observing), arrives(), full) == ""
    assert violations(ObservedAdmission(observing), arrives(), report) == ""
    assert "reported again" in violations(ObservedAdmission(observing), arrives(), report, report)
    late = (arrives(), settles(Outcome.LATE), report)
    assert "is not open" in violations(ObservedAdmission(observing), *late)
    written = columns(finished_ns=(50,))
    entries = (arrives(), report)
    assert "another row" in violations(ObservedAdmission(observing), *entries, run=written)
