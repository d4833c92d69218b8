"""Promises: what is booked for a request, and that nothing is left of one that is taken back."""

from __future__ import annotations

from random import Random

import pytest
from planning_rig import CLOUD, MS, NODES, PlanningRig, make_app

from headgate.core.clock import NEVER_NS
from headgate.core.model import Pool, Profile
from headgate.core.records import STAGES_MAX, Request
from headgate.core.states import Outcome
from headgate.planning.pools.build import Promise

TEN = Profile((10 * MS,))
BATCHES = Profile((10 * MS, 12 * MS, 14 * MS, 16 * MS))
Shape = list[tuple[int, tuple[int, ...]]]
CHAIN: Shape = [(0, ()), (1, (0,)), (0, (1,))]
DIAMOND: Shape = [(0, ()), (1, (0,)), (0, (0,)), (1, (1, 2))]
FOREST: Shape = [(0, ()), (1, ()), (0, (0,)), (1, ())]


def books(rig: PlanningRig) -> list[tuple[object, ...]]:
    """Everything that bookings change, over all calendars."""
    return [
        (
            build.pending_items,
            build.pending_ns,
            build.calendar.work_ns,
            round(build.calendar.batches, 9),
            [build.calendar.slack(rig.now_ns, bucket)[:2] for bucket in range(0, 64, 4)],
        )
        for build in rig.builds.all
    ]


def promises_of(rig: PlanningRig, request: Request) -> list[Promise]:
    promises = [rig.admission.booked(task) for task in request.tasks]
    return [promise for promise in promises if promise is not None]


def random_shape(rng: Random, functions: int) -> Shape:
    return [
        (rng.randrange(functions), tuple(i for i in range(index) if rng.random() < 0.5))
        for index in range(rng.randint(1, 6))
    ]


def test_an_idle_node_admits_what_it_can_do_in_time_and_nothing_else() -> None:
    rig = PlanningRig(make_app([TEN], Pool(0, "node"), latency_ms=25))
    assert not rig.admission.admit(rig.ask(due_ms=9))
    assert books(rig)[0][2] == 0
    assert rig.admission.admit(rig.ask(due_ms=10))
    assert books(rig)[0][2] == 10 * MS


def test_a_deadline_that_has_passed_is_refused_and_is_no_load() -> None:
    rig = PlanningRig(make_app([TEN], NODES))
    request = rig.ask()
    rig.view.now_ns = request.deadline_ns
    assert not rig.admission.admit(request)


@pytest.mark.parametrize("lanes", [1, 3])
def test_no_more_is_admitted_than_starts_in_time(lanes: int) -> None:
    """Each takes 10 ms and has 35: of those that come at once, three start on each node by 25."""
    rig = PlanningRig(make_app([TEN], Pool(0, "node", nodes=lanes), latency_ms=35))
    admitted = sum(rig.admission.admit(rig.ask()) for _ in range(20))
    assert 2 * lanes <= admitted <= 3 * lanes


@pytest.mark.parametrize("shape", [CHAIN, DIAMOND, FOREST])
def test_stages_are_promised_in_order_and_the_last_before_the_deadline(shape: Shape) -> None:
    rig = PlanningRig(make_app([TEN, BATCHES], NODES, latency_ms=200, pipelines=[shape]))
    request = rig.ask()
    assert rig.admission.admit(request)
    promises = promises_of(rig, request)
    assert len(promises) == len(shape)
    for promise, (function_id, after) in zip(promises, shape, strict=True):
        assert promise.build.function_id == function_id
        assert promise.start_ns + 10 * MS <= promise.due_ns <= request.deadline_ns
        for index in after:
            assert promises[index].due_ns <= promise.start_ns


@pytest.mark.parametrize("seed", range(40))
def test_what_is_released_leaves_the_calendars_as_they_were(seed: int) -> None:
    """Random pipelines on nodes and in calls: admitted, sent, sent again, given up and settled."""
    rng = Random(seed)
    shapes = [random_shape(rng, 3) for _ in range(3)]
    profiles = [TEN, BATCHES, Profile((5 * MS, 9 * MS))]
    pools = (NODES, CLOUD) if rng.random() < 0.5 else (NODES,)
    rig = PlanningRig(make_app(profiles, *pools, latency_ms=300, pipelines=shapes))
    empty, admitted = books(rig), list[Request]()
    for _ in range(60):
        before = books(rig)
        request = rig.ask(rng.randrange(3), items=rng.randint(1, 2))
        if request.items > 1 and any(task.function.id == 0 for task in request.tasks):
            assert not rig.admission.admit(request)  # its node takes one item at a time
            assert books(rig) == before
        elif rig.admission.admit(request):
            admitted.append(request)
        else:
            assert books(rig) == before
        for task in rng.choice(admitted).tasks if admitted else ():
            choice, promise = rng.random(), rig.admission.booked(task)
            if choice < 0.3:
                if promise is not None:
                    promise.release()
                if choice >= 0.2:
                    rig.admission.promise_again(task)
            elif choice < 0.4 and promise is not None:
                rig.admission.give_up(task)
                rig.admission.promise_again(task)
                assert rig.admission.booked(task) is None
    assert admitted
    for request in admitted:
        rig.admission.on_settled(request, Outcome.MET)
    assert books(rig) == empty


def test_a_promise_of_nodes_that_are_gone_is_made_anew() -> None:
    """Both pools can run the task. Those of the pool that was promised leave before it is ready."""
    pools = (Pool(0, "fast", nodes=1), Pool(1, "other", nodes=1))
    rig = PlanningRig(make_app([TEN], *pools))
    request = rig.ask()
    assert rig.admission.admit(request)
    (promise,) = promises_of(rig, request)
    for node in rig.view.nodes.values():
        if node.pool is promise.build.pool:
            rig.builds.nodes.on_node_lost(node)
    anew = rig.admission.confirm(request.tasks[0])
    assert anew is not None
    assert anew.build.pool is not promise.build.pool
    assert anew.due_ns == promise.due_ns
    assert (promise.build.pending_ns, anew.build.pending_ns) == (0, 10 * MS)
    assert rig.admission.confirm(request.tasks[0]) is anew


def test_a_promise_that_no_build_can_keep_is_given_up() -> None:
    rig = PlanningRig(make_app([TEN], Pool(0, "node")))
    request = rig.ask()
    assert rig.admission.admit(request)
    rig.builds.nodes.on_node_lost(rig.view.nodes[0])
    assert rig.admission.confirm(request.tasks[0]) is None
    assert books(rig)[0][:3] == (0, 0, 0)
    rig.admission.promise_again(request.tasks[0])
    assert rig.admission.booked(request.tasks[0]) is None


def test_what_comes_without_an_objective_is_not_promised() -> None:
    rig = PlanningRig(make_app([TEN], NODES, latency_ms=None))
    request = rig.ask()
    assert request.deadline_ns == NEVER_NS
    assert rig.admission.admit(request)
    assert promises_of(rig, request) == []
    assert books(rig)[0][2] == 0
    assert rig.build().load.erlangs(rig.now_ns) > 0.0


def test_the_last_moment_of_a_stage_leaves_time_for_the_stages_after_it() -> None:
    rig = PlanningRig(make_app([TEN, BATCHES], NODES, latency_ms=200, pipelines=[DIAMOND]))
    request = rig.ask()
    latest_ms = [rig.builds.latest_ns(request, stage) / MS for stage in range(4)]
    assert latest_ms == [180.0, 190.0, 190.0, 200.0]
    assert rig.builds.isolated_ns(request) == 30 * MS


def test_the_work_of_who_joins_a_batch_is_due_when_the_batch_starts() -> None:
    """Three requests for one function: the second is due last of all, the third first of all.

    The second runs with the first, however late it is due, and delays all that must start after the
    first. Those who come later join the third.
    """
    rig = PlanningRig(make_app([BATCHES], Pool(0, "node")))
    calendar = rig.build().calendar
    calendar.occupy(20 * MS)
    promises: list[Promise] = []
    for due_ms in (70, 95, 50, 90):
        request = rig.ask(due_ms=due_ms)
        assert rig.admission.admit(request)
        promises += promises_of(rig, request)
    first, second, third, fourth = promises
    assert third.start_ns < first.start_ns < second.start_ns
    assert second.begin_ns == first.start_ns == first.begin_ns
    assert fourth.begin_ns == third.start_ns == third.begin_ns
    due_ns = calendar.slack(0, calendar.bucket(0, first.start_ns))[0]
    assert due_ns == calendar.work_ns, "nothing is due later"


def test_what_is_left_by_its_batch_is_due_at_its_own_time() -> None:
    """The batch of the first request is gone: nobody joins it any more, and who did is on its own.

    What is overdue in the calendar goes before all that is urgent, for as long as it waits.
    """
    rig = PlanningRig(make_app([BATCHES], Pool(0, "node")))
    calendar = rig.build().calendar
    calendar.occupy(20 * MS)
    requests = [rig.ask(due_ms=due_ms) for due_ms in (70, 500, 600)]
    assert rig.admission.admit(requests[0]) and rig.admission.admit(requests[1])
    (first,), (second,) = promises_of(rig, requests[0]), promises_of(rig, requests[1])
    assert second.begin_ns == first.start_ns
    first.release()
    first.rebook_joined(0)
    assert second.begin_ns == second.start_ns > first.start_ns
    assert calendar.slack(0, calendar.bucket(0, first.start_ns))[0] == 0
    assert calendar.work_ns == second.work_ns
    assert rig.admission.admit(requests[2])
    (third,) = promises_of(rig, requests[2])
    assert third.begin_ns == third.start_ns, "the batch that it would join has no first task"


def test_a_stage_joins_no_batch_that_starts_before_it_is_ready() -> None:
    """The batch of the second function must start at once; a stage of it comes after 10 ms."""
    shapes: list[Shape] = [[(1, ())], [(0, ()), (1, (0,))]]
    rig = PlanningRig(make_app([TEN, BATCHES], NODES, pipelines=shapes))
    rig.build().calendar.occupy(MS)
    soon, later = rig.ask(0, due_ms=20), rig.ask(1, due_ms=90)
    assert rig.admission.admit(soon) and rig.admission.admit(later)
    (head,), (_, stage) = promises_of(rig, soon), promises_of(rig, later)
    assert head.start_ns < 10 * MS
    assert stage.work_ns < 10 * MS, "it is reckoned to be one of a batch"
    assert stage.begin_ns == stage.start_ns


def test_margins_grow_with_misses_and_shrink_slowly_for_their_pipeline_alone() -> None:
    app = make_app([TEN], NODES, pipelines=[[(0, ())], [(0, ())]])
    rig = PlanningRig(app)
    first, other = rig.admission.margins.z
    rig.admission.margins.observe(0, was_kept=False)
    missed = rig.admission.margins.z[0]
    assert missed > first
    rig.admission.margins.observe(0, was_kept=True)
    assert first < rig.admission.margins.z[0] < missed
    assert rig.admission.margins.z[1] == other
    for _ in range(10_000):
        rig.admission.margins.observe(0, was_kept=True)
    assert rig.admission.margins.z[0] == 0.0


def test_stages_that_are_ready_together_on_one_node_are_promised_one_after_the_other() -> None:
    """Three of 10 ms follow one of 10 ms: 40 ms on one node, though the critical path is 20 ms."""
    fork: Shape = [(0, ()), (1, (0,)), (1, (0,)), (1, (0,))]
    rig = PlanningRig(make_app([TEN, TEN], Pool(0, "node"), latency_ms=100, pipelines=[fork]))
    assert not rig.admission.admit(rig.ask(due_ms=39))
    request = rig.ask(due_ms=45)
    assert rig.admission.admit(request)
    first, *forked = promises_of(rig, request)
    starts_ns = sorted(promise.start_ns for promise in forked)
    assert first.due_ns <= starts_ns[0]
    assert starts_ns[1] - starts_ns[0] >= 10 * MS
    assert starts_ns[2] - starts_ns[1] >= 10 * MS


def test_a_probe_is_due_in_time_for_its_deadline_and_not_at_once() -> None:
    """Three stages that follow one fit no calendar of one node; its profiles say that all may.

    Each has until the deadline, less what follows it. Due at once, all but the first would count as
    late starts, for which the calendar would be made stricter, and would admit probes alone.
    """
    fork: Shape = [(0, ()), (1, (0,)), (1, (0,)), (1, (0,))]
    rig = PlanningRig(make_app([TEN, TEN], Pool(0, "node"), latency_ms=100, pipelines=[fork]))
    for function_id in (0, 1):
        rig.start(function_id, rig.view.nodes[0])
    request = rig.ask(due_ms=39)
    assert rig.admission.admit(request)
    promises = promises_of(rig, request)
    assert [promise.due_ns for promise in promises] == [29 * MS, 39 * MS, 39 * MS, 39 * MS]
    assert [promise.start_ns for promise in promises] == [19 * MS, 29 * MS, 29 * MS, 29 * MS]


@pytest.mark.parametrize(
    ("outcome", "is_tried"), [(int(Outcome.MET), True), (int(Outcome.LATE), False)]
)
def test_the_next_probe_waits_unless_the_last_one_was_kept(outcome: int, is_tried: bool) -> None:
    """An idle node is asked for what only its calendar refuses, again and again."""
    fork: Shape = [(0, ()), (1, (0,)), (1, (0,)), (1, (0,))]
    rig = PlanningRig(make_app([TEN, TEN], Pool(0, "node"), latency_ms=100, pipelines=[fork]))
    for function_id in (0, 1):
        rig.start(function_id, rig.view.nodes[0])
    first, second = rig.ask(due_ms=39), rig.ask(due_ms=39)
    assert rig.admission.admit(first)
    rig.admission.on_settled(first, outcome)
    assert rig.admission.admit(second) == is_tried


def test_stages_that_are_ready_together_on_as_many_nodes_do_not_wait() -> None:
    fork: Shape = [(0, ()), (1, (0,)), (1, (0,)), (1, (0,))]
    pool = Pool(0, "node", nodes=100)
    rig = PlanningRig(make_app([TEN, TEN], pool, latency_ms=100, pipelines=[fork]))
    assert rig.admission.admit(rig.ask(due_ms=22))


def test_a_call_is_promised_where_the_nodes_are_full() -> None:
    """One node, promised to others until the deadline, and a platform that starts in time."""
    profile = Profile((10 * MS,), cold_start_ns=20 * MS)
    rig = PlanningRig(make_app([profile], Pool(0, "node", nodes=1), CLOUD, latency_ms=60))
    rig.start(0, rig.view.nodes[0])
    places = []
    for _ in range(12):
        request = rig.ask()
        if rig.admission.admit(request):
            (promise,) = promises_of(rig, request)
            places.append(promise.build.pool.name)
    assert places[0] == "node"
    assert "cloud" in places
    assert places.count("cloud") <= 5 * 4  # concurrency, in starts of 10 ms within 60 less 20 ms


def test_task_ids_name_their_stage() -> None:
    """`booked` and `on_settled` meet in the id of a task, also once the request has no tasks."""
    rig = PlanningRig(make_app([TEN, BATCHES], NODES, latency_ms=200, pipelines=[CHAIN]))
    request = rig.ask()
    assert rig.admission.admit(request)
    assert [task.id % STAGES_MAX for task in request.tasks] == [0, 1, 2]
    request.tasks = []
    rig.admission.on_settled(request, Outcome.CANCELLED)
    assert [build.pending_ns for build in rig.builds.all] == [0, 0]


def test_a_lane_of_a_node_that_lacks_the_function_is_not_promised() -> None:
    """One of two nodes holds the first function, and is busy with the second for 100 ms."""
    quick = Profile((10 * MS,), cold_start_ns=500 * MS)
    slow = Profile((100 * MS,))
    rig = PlanningRig(make_app([quick, slow], Pool(0, "node", nodes=2), latency_ms=1_000))
    node = rig.view.nodes[0]
    rig.start(0, node)
    rig.start(1, node)
    task = rig.ask(pipeline=1).tasks[0]
    build = rig.build(1)
    rig.builds.on_sent(build, rig.orders.dispatch([task], node, build.variant), 0)
    assert not rig.admission.admit(rig.ask(due_ms=60))
    assert rig.admission.admit(rig.ask(due_ms=200))
