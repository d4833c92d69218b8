"""What is sent where, and in which batches: the decisions of `Dispatcher` and `Batching`.

A batch of one takes 10 ms, one of four 16 ms.
"""

from __future__ import annotations

from typing import final

import pytest
from planning_rig import CLOUD, MS, PlanningRig, make_app

from headgate.core.events import BatchFinished, GatewaysChanged
from headgate.core.model import Pool, Profile
from headgate.core.records import Batch, Node, Task
from headgate.core.states import Outcome
from headgate.planning.constants import BEST_EFFORT_SHARE
from headgate.planning.dispatch.batching import Batching, Send
from headgate.planning.dispatch.busy_nodes import TRY_AGAIN
from headgate.planning.dispatch.next_batch import MORE, Dispatcher
from headgate.planning.dispatch.shapes import ShapeChooser

PROFILE = Profile((10 * MS, 12 * MS, 14 * MS, 16 * MS))
ONE = Pool(0, "one", nodes=1)
OTHER = Pool(1, "other", nodes=1)


@final
class DispatchRig:
    """A Dispatcher over the components of a `PlanningRig`, which says what was promised."""

    def __init__(self, *pools: Pool, profile: Profile = PROFILE, functions: int = 1) -> None:
        rig = self.rig = PlanningRig(make_app([profile] * functions, *pools))
        self.sent: Batch | None = None  # to a node, last
        self.queues = rig.queues
        shapes = ShapeChooser(rig.view, rig.builds, rig.admission.budgets)
        self.batching = Batching(rig.view, rig.builds, rig.admission, rig.queues, shapes)
        self.dispatch = Dispatcher(
            rig.view, rig.builds, rig.admission, rig.queues, rig.placement, rig.spillover
        )

    def node(self, pool_id: int = 0) -> Node:
        return next(n for n in self.rig.view.nodes.values() if n.pool.id == pool_id)

    def admit(self, due_ms: float, pipeline: int = 0) -> Task:
        """Admit a request, and queue its task."""
        request = self.rig.ask(pipeline, due_ms=due_ms)
        assert self.rig.admission.admit(request)
        task = request.tasks[0]
        self.queues.push(task, self.rig.admission.booked(task))
        return task

    def add_best_effort(self) -> Task:
        task = self.rig.ask().tasks[0]
        self.queues.push(task, None)
        return task

    def send(self, send: Send | None) -> list[Task]:
        """Form the batch of a decision, and order it."""
        assert send is not None
        tasks, _ = self.dispatch.take(send)
        if send.node is not None:
            self.sent = self.rig.orders.dispatch(tasks, send.node, send.build.variant)
            self.dispatch.on_sent(send, self.sent)
        return tasks

    def end_batch(self, at_ms: float) -> None:
        """The batch that was sent last ends."""
        assert self.sent is not None
        self.rig.tell(BatchFinished(self.sent.id), at_ms)
        self.rig.builds.on_batch_ended(self.sent, 10 * MS)


def test_a_node_gets_what_must_start_first_and_what_fits_beside_it() -> None:
    rig = DispatchRig(ONE)
    others = [rig.admit(90), rig.admit(95)]
    soon = rig.admit(50)
    sent = rig.send(rig.dispatch.to_node(rig.node()))
    assert sent[0] is soon
    assert sorted(sent[1:], key=lambda task: task.id) == others
    assert rig.dispatch.to_node(rig.node()) is None  # its one slot is taken


def test_a_batch_is_no_larger_than_its_most_urgent_member_allows() -> None:
    rig = DispatchRig(ONE)
    urgent = rig.admit(13)
    for _ in range(3):
        rig.admit(100)
    assert rig.send(rig.dispatch.to_node(rig.node())) == [urgent]


def test_best_effort_runs_when_nothing_promised_waits() -> None:
    rig = DispatchRig(ONE)
    rig.add_best_effort()
    promised = rig.admit(50)
    assert rig.send(rig.dispatch.to_node(rig.node())) == [promised]
    rig = DispatchRig(ONE)
    best_effort = rig.add_best_effort()
    assert rig.send(rig.dispatch.to_node(rig.node())) == [best_effort]


def test_a_task_goes_to_another_pool_only_if_nothing_promised_waits_there() -> None:
    rig = DispatchRig(ONE, OTHER)
    for pool_id in (0, 1):
        rig.rig.start(0, rig.node(pool_id))
    first = rig.admit(50)
    promise = rig.rig.admission.booked(first)
    assert promise is not None
    elsewhere = rig.dispatch.to_other_pool(promise.build)
    assert elsewhere is not None
    assert elsewhere.build.pool is not promise.build.pool
    elsewhere.build.calendar.add(elsewhere.build.calendar.bucket(0, 50 * MS), 10 * MS, 1.0)
    assert rig.dispatch.to_other_pool(promise.build) is None


def test_what_no_node_can_run_is_called_for() -> None:
    rig = DispatchRig(Pool(0, "node", nodes=0), CLOUD)
    best_effort = rig.add_best_effort()
    send = rig.dispatch.calls.of_function(0)
    assert send is not None
    assert send.node is None
    assert send.build is rig.rig.faas()
    assert rig.send(send) == [best_effort]
    assert rig.dispatch.calls.to_pool(1) is None
    assert rig.dispatch.calls.retry_at_ns(0) is None  # nothing waits


def test_what_cannot_be_in_time_any_more_is_best_effort() -> None:
    rig = DispatchRig(ONE)
    task = rig.admit(30)
    rig.rig.view.now_ns = 25 * MS
    queue = rig.queues.promised[rig.rig.build().id]
    assert rig.batching.prune(queue) is None
    assert rig.rig.admission.booked(task) is None
    assert rig.queues.given_up == [0]
    assert rig.send(rig.dispatch.to_node(rig.node())) == [task]


def test_a_queue_whose_head_is_given_up_does_not_go_before_a_more_urgent_one() -> None:
    """The head of the first function was due first; what is behind it is due last of all."""
    rig = DispatchRig(ONE, functions=2)
    lost, last = rig.admit(30), rig.admit(95)
    urgent = rig.admit(60, pipeline=1)
    rig.rig.view.now_ns = 25 * MS
    assert rig.send(rig.dispatch.to_node(rig.node())) == [urgent]
    assert rig.rig.admission.booked(lost) is None
    assert rig.rig.admission.booked(last) is not None


def test_what_is_given_up_teaches_the_calendar_as_a_late_start_does() -> None:
    """The margin learns when it is answered, as from everything that was promised."""
    rig = DispatchRig(ONE)
    task, admission, calendar = rig.admit(30), rig.rig.admission, rig.rig.build().calendar
    (z,) = admission.margins.z
    rig.rig.view.now_ns = 25 * MS
    assert rig.batching.prune(rig.queues.promised[rig.rig.build().id]) is None
    assert calendar.inflation > 1.0
    assert admission.margins.z == [z]
    admission.on_settled(task.request, Outcome.LATE)
    (late_z,) = admission.margins.z
    assert late_z > z


def test_best_effort_that_others_cannot_wait_for_gets_its_small_share() -> None:
    """A request that can wait for 5 ms arrives now and then; a task of best effort takes 10 ms."""
    rig = DispatchRig(ONE)
    rig.rig.start(0, rig.node())
    rig.admit(15)
    rig.send(rig.dispatch.to_node(rig.node()))
    best_effort = rig.add_best_effort()
    rig.end_batch(at_ms=10)
    assert rig.dispatch.to_node(rig.node()) is None  # though the node is free
    assert rig.dispatch.has_timers
    ((name, at_ns, number),) = rig.dispatch.take_timers(rig.node())
    assert (name, number) == (MORE, rig.rig.build().id)
    assert at_ns == 10 * MS + int(10 * MS / 0.06)
    rig.rig.view.now_ns = at_ns - 1
    assert rig.dispatch.to_node(rig.node()) is None
    rig.rig.view.now_ns = at_ns
    assert rig.send(rig.dispatch.to_node(rig.node())) == [best_effort]


@pytest.mark.parametrize(
    ("at_ms", "left_ms", "goes_first"),
    [
        pytest.param(40, 15, False, id="the promised one would be late"),
        pytest.param(40, 90, True, id="the promised one can wait"),
        pytest.param(31 * 30, 15, True, id="it has waited for thirty objectives"),
    ],
)
def test_what_is_late_makes_nobody_late_for_its_share(
    at_ms: int, left_ms: int, *, goes_first: bool
) -> None:
    rig = DispatchRig(ONE)
    rig.rig.start(0, rig.node())
    late, build = rig.admit(30), rig.rig.build()
    rig.queues.on_sent(build, 10.0 * MS, was_promised=True)
    rig.rig.view.now_ns = 25 * MS
    assert rig.batching.prune(rig.queues.promised[build.id]) is None
    rig.rig.now_ns = at_ms * MS
    promised = rig.admit(at_ms + left_ms)
    assert rig.send(rig.dispatch.to_node(rig.node())) == [late if goes_first else promised]


def test_best_effort_earns_its_share_of_the_time_of_a_node_while_it_waits() -> None:
    """Not of the time that promised tasks use of it: some of it is idle for their sake."""
    rig = DispatchRig(ONE)
    queues, build = rig.queues, rig.rig.build()
    queues.on_sent(build, 10.0 * MS, was_promised=True)
    queues.on_sent(build, 10.0 * MS, was_promised=False)
    earned_ns = int(10 * MS / BEST_EFFORT_SHARE)
    assert not queues.is_best_effort_due(earned_ns, 0)  # nothing waits
    rig.add_best_effort()
    assert not queues.is_best_effort_due(2 * earned_ns - MS, 0)
    assert queues.is_best_effort_due(2 * earned_ns + MS, 0)


def test_what_was_left_over_counts_for_the_best_effort_that_got_it() -> None:
    """Six batches on four lanes: four of them are remembered, 40 ms of their function alone."""
    rig = PlanningRig(make_app([PROFILE, PROFILE], Pool(0, "four", nodes=4)))
    queues, first, second = rig.queues, rig.build(0), rig.build(1)
    for _ in range(6):
        queues.on_sent(first, 10.0 * MS, was_promised=False)
    assert not queues.may_go_first(first)
    assert queues.may_go_first(second)
    queues.push(rig.ask().tasks[0], None)
    earned_ns = int(40 * MS / (4 * BEST_EFFORT_SHARE))
    queues.is_best_effort_due(earned_ns - MS, 0)
    assert not queues.may_go_first(first)
    queues.is_best_effort_due(earned_ns + MS, 0)
    assert queues.may_go_first(first)


def test_a_small_batch_of_best_effort_counts_as_the_work_of_full_ones() -> None:
    """A batch of four takes 16 ms, so two items are worth 8 of the 12 ms that they take."""
    rig = DispatchRig(ONE)
    queues, build = rig.queues, rig.rig.build()
    queues.on_sent(build, 100.0 * MS, was_promised=True)
    for _ in range(2):
        rig.add_best_effort()
    rig.send(rig.dispatch.to_node(rig.node()))
    rig.add_best_effort()
    earned_ns = int(8 * MS / BEST_EFFORT_SHARE)
    assert not queues.is_best_effort_due(earned_ns - MS, 0)
    assert queues.is_best_effort_due(earned_ns + MS, 0)
    assert build.efficiency(1) == 0.4
    assert build.efficiency(4) == 1.0


def test_best_effort_has_its_share_of_the_calls_of_a_platform() -> None:
    """A node can run it, too, and is busy. An instance that must start would take far more."""
    rig = DispatchRig(ONE, CLOUD)
    best_effort = rig.add_best_effort()
    assert rig.dispatch.calls.to_pool(1) is None  # it waits for the node
    rig.queues.on_sent(rig.rig.faas(), 10.0 * MS, was_promised=True)
    assert rig.dispatch.calls.to_pool(1) is None
    warm_pool = rig.rig.faas().warm_pool
    assert warm_pool is not None
    warm_pool.instances.on_call(0)
    warm_pool.instances.on_return(0, ran=True)
    send = rig.dispatch.calls.to_pool(1)
    assert send is not None
    assert send.build is rig.rig.faas()
    assert rig.send(send) == [best_effort]
    rig.add_best_effort()
    assert rig.dispatch.calls.to_pool(1) is None  # it has had its share


def test_best_effort_leaves_a_node_within_reach_of_others_where_there_are_two() -> None:
    rig = DispatchRig(Pool(0, "two", nodes=2))
    first, second = rig.rig.view.nodes.values()
    for node in (first, second):
        rig.rig.start(0, node)
    rig.admit(15)
    rig.send(rig.dispatch.to_node(first))
    rig.end_batch(at_ms=10)
    best_effort = rig.add_best_effort()
    assert rig.send(rig.dispatch.to_node(first)) == [best_effort]
    rig.add_best_effort()
    assert rig.dispatch.to_node(second) is None


def test_tasks_are_looked_at_once_in_the_order_in_which_they_were_queued() -> None:
    """One that was sent in the meantime, as part of another's batch, is passed over."""
    rig = DispatchRig(ONE)
    first, second = (rig.rig.ask(due_ms=90).tasks[0] for _ in range(2))
    for task in (first, second):
        assert rig.rig.admission.admit(task.request)
        rig.dispatch.enqueue_with_others(task)
    assert rig.dispatch.take_ready() is first
    assert set(rig.send(rig.dispatch.to_node(rig.node()))) == {first, second}
    assert rig.dispatch.take_ready() is None


def test_a_node_that_has_to_start_a_build_needs_that_time_first() -> None:
    rig = DispatchRig(ONE, profile=Profile((10 * MS,), cold_start_ns=5 * MS))
    rig.add_best_effort()
    send = rig.dispatch.to_node(rig.node())
    assert send is not None
    assert send.start_ns == 5 * MS
    rig.rig.start(0, rig.node())
    send = rig.dispatch.to_node(rig.node())
    assert send is not None
    assert send.start_ns == 0


def test_best_effort_looks_again_at_a_slot_that_it_left_to_other_gateways() -> None:
    rig = DispatchRig(ONE)
    rig.add_best_effort()
    assert rig.dispatch.take_timers(rig.node()) == []
    rig.rig.tell(GatewaysChanged(4))
    rig.rig.offer_too_much()
    assert rig.dispatch.to_node(rig.node()) is None
    assert rig.dispatch.has_timers
    assert rig.dispatch.take_timers(rig.node()) == [(TRY_AGAIN, rig.rig.now_ns + 100 * MS, 0)]
    assert not rig.dispatch.has_timers
