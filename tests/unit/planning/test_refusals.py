"""Refusals: what they say is so, and those who are told to come back come one after the other."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest
from planning_rig import CLOUD, MS, NODES, PlanningRig, make_app

from headgate.core.clock import SECOND_NS
from headgate.core.events import NodeLost
from headgate.core.model import Pool, Profile
from headgate.core.records import Request
from headgate.core.states import Outcome, Rejection, Settlement
from headgate.planning.admission.control import AdmissionControl
from headgate.planning.admission.refusals import RetryTimes
from headgate.planning.constants import RETRIES_AWAITED

TEN = Profile((10 * MS,))
BATCHES = Profile((10 * MS, 12 * MS, 14 * MS, 16 * MS))
CHAIN = [(0, ()), (1, (0,))]


def fill(rig: PlanningRig, *, due_ms: float, pipeline: int = 0) -> Request:
    """Admit requests until one is refused, and return that one."""
    for _ in range(500):
        request = rig.ask(pipeline, due_ms=due_ms)
        if not rig.admission.admit(request):
            return request
    raise AssertionError("nothing was refused")


def books(rig: PlanningRig) -> list[tuple[int, int, float]]:
    """Everything that is booked."""
    calendars = [(build.pending_items, build.calendar) for build in rig.builds.all]
    return [(items, each.work_ns, round(each.batches, 9)) for items, each in calendars]


@pytest.mark.parametrize(
    ("profile", "nodes", "shape"),
    [(TEN, 1, None), (TEN, 3, None), (BATCHES, 2, None), (TEN, 2, [CHAIN]), (BATCHES, 1, [CHAIN])],
)
def test_the_deadline_that_a_refusal_names_is_accepted(
    profile: Profile, nodes: int, shape: list[list[tuple[int, tuple[int, ...]]]] | None
) -> None:
    """It is longer than the one that was refused, and what was booked before is still booked."""
    profiles = [profile] * (2 if shape else 1)
    rig = PlanningRig(make_app(profiles, Pool(0, "gpu", nodes=nodes), pipelines=shape))
    refused = fill(rig, due_ms=100)
    before = books(rig)
    settlement = rig.refusals.explain(refused)
    assert books(rig) == before
    assert settlement.reason in (Rejection.OVERLOADED, Rejection.UNFAIR)
    assert settlement.objective_ns == 100 * MS < settlement.accepted_ns
    assert settlement.predicted_ns + settlement.margin_ns == settlement.accepted_ns
    assert 0 <= settlement.margin_ns < settlement.accepted_ns / 2
    assert (settlement.short_of, settlement.stage != "") == ("gpu", shape is not None)
    assert settlement.short_ns > 0
    again = rig.ask(due_ms=settlement.accepted_ns / MS)
    assert rig.admission.admit(again)


def test_a_latency_within_the_deadline_is_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no deadline would be accepted, what the wait predicts is told if it is too long."""
    rig = PlanningRig(make_app([TEN], Pool(0, "gpu")))
    fill(rig, due_ms=100)
    monkeypatch.setattr(type(rig.admission), "try_out", lambda *_: None)
    told = [rig.refusals.explain(rig.ask(due_ms=due_ms)) for due_ms in (50, 300)]
    assert [(each.accepted_ns, each.short_ns > 0) for each in told] == [(0, True)] * 2
    assert told[0].predicted_ns > 50 * MS
    assert told[1].predicted_ns == 0


def test_what_was_found_a_moment_ago_is_told_again() -> None:
    """The same due time, to requests of the same kind; soon it is looked for again."""
    rig = PlanningRig(make_app([TEN], Pool(0, "gpu")))
    first = rig.refusals.explain(fill(rig, due_ms=100))
    rig.view.now_ns = rig.now_ns = 2 * MS
    request = rig.ask(due_ms=102)
    assert not rig.admission.admit(request)
    assert rig.refusals.explain(request).accepted_ns == first.accepted_ns - 2 * MS
    rig.view.now_ns = rig.now_ns = 20 * MS
    request = rig.ask(due_ms=120)
    assert not rig.admission.admit(request)
    later = rig.refusals.explain(request)
    assert later.accepted_ns > later.objective_ns == 100 * MS


@pytest.mark.parametrize(("due_ms", "cost_usd"), [(0, inf), (9, inf), (100, 1e-12)])
def test_what_cannot_be_served_is_tried_out_now_and_then_only(
    due_ms: float, cost_usd: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deadlines of no time cost their client nothing: they may come at any rate."""
    rig = PlanningRig(make_app([TEN], Pool(0, "gpu", usd_per_hour=1.0)))
    fill(rig, due_ms=100)
    tried: list[int] = []
    try_out = AdmissionControl.try_out

    def count(
        self: AdmissionControl, request: Request, latency_ns: int, usd: float
    ) -> float | None:
        tried.append(latency_ns)
        return try_out(self, request, latency_ns, usd)

    monkeypatch.setattr(AdmissionControl, "try_out", count)
    told: list[Settlement] = []
    for _ in range(100):
        rig.view.now_ns = rig.now_ns = rig.now_ns + MS // 50
        request = rig.ask(due_ms=rig.now_ns / MS + due_ms)
        request.cost_usd = cost_usd
        assert not rig.admission.admit(request)
        told.append(rig.refusals.explain(request))
    assert len({each.reason for each in told}) == 1
    assert told[0].reason in (Rejection.INFEASIBLE, Rejection.OVER_COST)
    assert len(tried) <= 5
    assert told[99].accepted_usd == told[0].accepted_usd


def test_each_who_is_refused_is_told_a_later_time() -> None:
    rig = PlanningRig(make_app([TEN], Pool(0, "gpu", nodes=2)))
    waits_ns = [rig.refusals.explain(fill(rig, due_ms=100)).retry_ns for _ in range(20)]
    assert waits_ns[0] > 0
    steps_ns = [after - before for before, after in pairwise(waits_ns)]
    assert min(steps_ns) >= 10 * MS / 2 - 1  # two nodes, ten milliseconds each
    assert max(steps_ns) <= 10 * MS / 2 / 0.1 + 1


def test_trials_are_no_demand_for_warm_instances() -> None:
    rig = PlanningRig(make_app([Profile((10 * MS,), cold_start_ns=900 * MS)], NODES, CLOUD))
    refused = fill(rig, due_ms=100)
    warm_pool = rig.faas().warm_pool
    assert warm_pool is not None
    desired = warm_pool.desired(rig.now_ns)
    for _ in range(50):
        rig.admission.try_out(refused, 150 * MS, inf)
    assert warm_pool.desired(rig.now_ns) == desired
    assert rig.admission.try_out(refused, 5_000 * MS, inf) is not None


def test_trials_do_not_enlarge_the_calendar_for_good() -> None:
    rig = PlanningRig(make_app([TEN], Pool(0, "gpu")))
    calendar = rig.build().calendar
    size = calendar._size
    rig.admission.try_out(rig.ask(due_ms=9), 60_000 * MS, inf)
    assert calendar._size > 100 * size
    for now_ms in range(0, 120_000, 50):
        calendar.bucket(now_ms * MS, (now_ms + 100) * MS)
    assert calendar._size == size


def test_the_infeasible_is_told_what_is_feasible_and_not_to_retry() -> None:
    rig = PlanningRig(make_app([TEN], Pool(0, "gpu")))
    request = rig.ask(due_ms=9)
    assert not rig.admission.admit(request)
    settlement = rig.refusals.explain(request)
    assert (settlement.reason, settlement.retry_ns) == (Rejection.INFEASIBLE, 0)
    assert settlement.predicted_ns == 10 * MS <= settlement.accepted_ns
    assert rig.admission.admit(rig.ask(due_ms=settlement.accepted_ns / MS))


@pytest.mark.parametrize("before", [0, 1])
def test_what_would_be_accepted_does_not_depend_on_who_came_before(before: int) -> None:
    """Nothing is observed of a request whose deadline has passed, and its class is a third one.

    The first class has used its share and must leave room to others, the second need not.
    """
    rig = PlanningRig(make_app([TEN], Pool(0, "gpu"), pipelines=[[(0, ())]] * 3))

    def ask(pipeline: int, due_ms: float, *, stays: bool = False) -> None:
        request = rig.ask(pipeline, due_ms=rig.now_ns / MS + due_ms)
        if rig.admission.admit(request) and not stays:
            rig.admission.on_settled(request, Outcome.CANCELLED)

    for _ in range(200):
        rig.view.now_ns = rig.now_ns = rig.now_ns + MS
        ask(0, 100)
    for due_ms in (40, 30, 20, 11):
        ask(1, due_ms, stays=True)
    ask(before, 100)
    request = rig.ask(2, due_ms=rig.now_ns / MS)
    assert not rig.admission.admit(request)
    assert 50 * MS < rig.refusals.explain(request).accepted_ns < 60 * MS


def test_what_only_observed_times_forbid_is_told_when_the_next_one_is_tried() -> None:
    """Batches take three times their profile: no node that becomes free would help."""
    rig = PlanningRig(make_app([TEN], Pool(0, "gpu")))
    rig.start(0, next(iter(rig.view.nodes.values())))
    for _ in range(20):
        rig.build().observe(1, 30 * MS)
    tried = rig.ask(due_ms=20)
    assert rig.admission.admit(tried)
    for task in tried.tasks:
        promise = rig.admission.booked(task)
        assert promise is not None
        promise.release()
    refused = rig.ask(due_ms=20)
    assert not rig.admission.admit(refused)
    retry_ns = rig.refusals.explain(refused).retry_ns
    for wait_ns, is_tried in ((retry_ns // 2, False), (retry_ns, True)):
        rig.view.now_ns = rig.now_ns = wait_ns
        assert rig.admission.admit(rig.ask(due_ms=wait_ns / MS + 20)) is is_tried


def test_without_a_node_the_pool_that_is_missing_is_named() -> None:
    rig = PlanningRig(make_app([TEN], Pool(0, "gpu")))
    node = next(iter(rig.view.nodes.values()))
    rig.tell(NodeLost(node.id))
    rig.builds.nodes.on_node_lost(node)
    request = rig.ask(due_ms=100)
    assert not rig.admission.admit(request)
    assert rig.refusals.explain(request) == Settlement(
        Outcome.REJECTED, Rejection.UNAVAILABLE, short_of="gpu", objective_ns=100 * MS
    )


def test_a_client_is_told_times_in_a_row_and_others_share_what_is_left() -> None:
    times = RetryTimes()
    assert [times.tell(0, 0, 7, 50, 10.0) for _ in range(3)] == [50, 60, 70]
    assert times.tell(0, 0, 8, 50, 10.0) == 50  # another client
    assert times.tell(0, 0, 8, 50, 10.0) == 70  # two of them share the pool
    assert times.tell(0, 1, 8, 5, 10.0) == 5  # another pool
    assert times.tell(200, 0, 7, 210, 10.0) == 10  # all that was booked has passed


def test_nobody_is_told_to_wait_for_hours() -> None:
    times = RetryTimes()
    waits_ns = [times.tell(0, 0, 0, 0, 100.0 * SECOND_NS) for _ in range(20)]
    assert max(waits_ns) == waits_ns[-1] == 600 * SECOND_NS


def test_those_who_stay_away_are_not_waited_for() -> None:
    """Nobody is refused while many are due, and less is offered than half of them would bring."""
    for quiet, offered_ns, is_forgotten in (
        (RETRIES_AWAITED, 0.4, True),
        (RETRIES_AWAITED, 0.6, False),  # they come, and there is room for them
        (RETRIES_AWAITED - 1, 0.0, False),  # too soon to tell
    ):
        times = RetryTimes()
        for _ in range(1_000):
            times.review(0, 0, 0.0, 0.5, 10.0)
            times.tell(0, 0, 7, 50, 10.0)
        now_ns = 10 * quiet
        times.review(now_ns, 0, offered_ns * now_ns, 0.5, 10.0)
        told_ns = times.tell(now_ns, 0, 7, now_ns + 50, 10.0)
        assert told_ns == (50 if is_forgotten else 50 + 10_000 - now_ns)
