"""Gateways that share pools: their number, their ids, refusals of the busy, and shared plans."""

from __future__ import annotations

import pytest

from headgate.core.actions import Dispatch, SetTimer, Settle, StartInstance, StopInstance
from headgate.core.backend import EXHAUSTED, STARTED_ALREADY
from headgate.core.clock import NEVER_NS
from headgate.core.errors import PolicyError
from headgate.core.events import (
    BatchFinished,
    BatchLost,
    BatchRefused,
    GatewaysChanged,
    InstanceAppeared,
    InstanceStarted,
    InstanceStopped,
    InstanceUseChanged,
    NodeJoined,
    Refusal,
    RequestAnnounced,
    RequestArrived,
    TimerFired,
)
from headgate.core.ids import IDS_PER_SCHEDULER, SCHEDULERS_MAX, first_id, owner
from headgate.core.model import UNLIMITED, Limits
from headgate.core.policy import Capabilities, Context, Plan, PolicyConfig, PolicyKind, Target
from headgate.core.records import STAGES_MAX, Batch, Task
from headgate.core.scheduler.scheduler import Scheduler, reconcile
from headgate.core.states import Outcome, Settlement

from .rig import Rig, wires
from .sample_apps import Fifo, Scripted, make_app

THEIRS = first_id(1)


class Patient(Scripted):
    """Deals with refusals of the busy itself; writes down why tasks were returned."""

    def __init__(self, context: Context, config: PolicyConfig) -> None:
        super().__init__(context, config)
        self.reasons: list[int | None] = []
        self.counts: list[int] = []

    def backs_off(self, batch: Batch) -> bool:
        return False

    def on_task_returned(self, task: Task, reason: int | None) -> None:
        self.reasons.append(reason)

    def on_gateways_changed(self) -> None:
        self.counts.append(self.view.gateways)


def patient(rig: Rig) -> Patient:
    assert isinstance(rig.scheduler.policy, Patient)
    return rig.scheduler.policy


def test_ids_tell_their_owner_and_fit_into_a_register() -> None:
    for index in (0, 1, 7, SCHEDULERS_MAX - 1):
        last = first_id(index) + IDS_PER_SCHEDULER - 1
        assert (owner(first_id(index)), owner(last)) == (index, index)
        assert last * STAGES_MAX + STAGES_MAX - 1 <= UNLIMITED
    for index in (-1, SCHEDULERS_MAX):
        with pytest.raises(ValueError, match="cannot have the index"):
            first_id(index)


def test_the_number_of_gateways_is_known_and_news_of_it_is_told_once() -> None:
    rig = Rig(make_app(), Patient, nodes=1, index=3, peers=4)
    assert rig.view.gateways == 4
    for count in (3, 3, 5):
        assert rig.at(1, GatewaysChanged(count)) == []
    assert (rig.view.gateways, patient(rig).counts) == (5, [3, 5])


def test_who_was_alone_learns_of_others_before_their_instances(make_rig: type[Rig]) -> None:
    """The first of all Schedulers, alone: then nobody else can have started an instance."""
    rig = make_rig(make_app(), nodes=1)
    rig.rejects(1, InstanceAppeared(THEIRS, 0, 0), "never started")
    rig.at(2, GatewaysChanged(2))
    rig.at(3, InstanceAppeared(THEIRS, 0, 0))
    rig.at(4, GatewaysChanged(1))  # the other one has left, and what it started has not
    assert list(rig.view.instances) == [THEIRS]
    rig.at(5, InstanceStopped(THEIRS, "not in use for too long"))


def test_the_second_gateway_may_be_the_only_one_left(make_rig: type[Rig]) -> None:
    """It has replaced the first, and finds an instance of that one."""
    rig = make_rig(make_app(), nodes=1, index=1, peers=1)
    rig.at(1, InstanceAppeared(0, 0, 0))
    assert rig.at(2, RequestArrived(0, 0)) == wires(Dispatch(THEIRS, 0, [0], 1, 0, 0, 0))
    rig.at(12, BatchFinished(THEIRS))


def test_whether_an_instance_is_in_use_is_seen(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(), nodes=1, peers=2)
    rig.at(0, InstanceAppeared(THEIRS, 0, 0))
    instance = rig.view.instances[THEIRS]
    assert instance.is_in_use
    for is_in_use in (False, True):
        assert rig.at(1, InstanceUseChanged(THEIRS, is_in_use)) == []
        assert instance.is_in_use == is_in_use
    rig.at(2, InstanceUseChanged(THEIRS + 1, False))  # it is gone already, or was of no use to us
    assert rig.view.events_ignored == 1


def test_a_busy_node_is_blocked_for_a_while_by_default(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(limits=Limits(backoff_ns=5)), nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.at(1, InstanceStarted(0, 0))
    actions = rig.at(2, BatchRefused(0, Refusal.BUSY))
    assert actions == wires(SetTimer(("unblock", 0), 7))
    assert rig.view.free_nodes == {}


def test_a_policy_may_deal_with_a_busy_node_itself(make_rig: type[Rig]) -> None:
    """1. More refusals than are allowed do not fail the task, and the node stays free.

    2. A refusal for another reason does count. 3. The reason is told each time.
    """
    rig = make_rig(make_app(limits=Limits(refusals_max=2)), Patient, nodes=1)
    policy = patient(rig)
    rig.at(0, RequestArrived(0, 0))
    rig.order(0, lambda p: p.send(0, 0))
    rig.at(0, InstanceStarted(0, 0))
    for batch_id in range(5):
        assert rig.at(1, BatchRefused(batch_id, Refusal.BUSY)) == []
        assert list(rig.view.free_nodes) == [0]
        rig.order(1, lambda p: p.send(0, 0))
    task = rig.scripted.task(0)
    assert (task.busy_refusals, task.refusals, task.attempts_made) == (5, 0, 1)
    rig.at(2, BatchRefused(5, Refusal.GONE))
    assert (task.refusals, rig.view.free_nodes) == (1, {})
    rig.order(2, lambda p: p.send(0, 0))
    assert rig.at(3, BatchRefused(6, Refusal.GONE))[-1:] == wires(
        Settle(0, Settlement(Outcome.FAILED, "refused too often, last reason: gone"))
    )
    assert policy.reasons == [Refusal.BUSY] * 5 + [Refusal.GONE]


def test_an_attempt_that_may_have_run_has_no_refusal_for_a_reason(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(), Patient, nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.order(0, lambda p: p.send(0, 0))
    rig.at(0, InstanceStarted(0, 0))
    rig.at(1, BatchLost(0, node_died=False))
    assert patient(rig).reasons == [None]


def test_a_request_that_was_refused_was_admitted(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(), Patient, nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.order(0, lambda p: p.send(0, 0))
    rig.at(0, InstanceStarted(0, 0))
    rig.at(1, BatchRefused(0, Refusal.BUSY))
    settlement = Settlement(Outcome.REJECTED, "")
    rig.forbids(lambda p: p.orders.reject(p.view.requests[0], settlement), "has been admitted")


def test_a_policy_that_raises_when_a_node_is_busy_backs_off() -> None:
    class Faulty(Fifo):
        def backs_off(self, batch: Batch) -> bool:
            raise RuntimeError

    rig = Rig(make_app(limits=Limits(backoff_ns=5)), Faulty, nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.at(1, InstanceStarted(0, 0))
    with pytest.raises(PolicyError, match="backs_off raised RuntimeError"):
        rig.at(2, BatchRefused(0, Refusal.BUSY))
    assert rig.view.nodes[0].blocked_until_ns == 7


def test_a_plan_for_a_shared_pool_orders_by_number(make_rig: type[Rig]) -> None:
    """1. Instances of all Schedulers count. 2. The Broker denies one. 3. Fewer: all stop the same.

    Those without a node stop first, then those on the last nodes.
    """
    rig = make_rig(make_app(), Scripted, nodes=3, peers=2)

    def planned(count: int) -> list[list[object]]:
        plan = Plan((Target(0, 0, count, is_shared=True),))
        return rig.order(rig.view.now_ns, lambda p: reconcile(p.view, p.orders, plan))

    rig.at(1, InstanceAppeared(THEIRS, 0, 1))
    assert planned(3) == wires(*(StartInstance(i, 0, 0, None, 0, i + 2) for i in range(2)))
    rig.at(2, InstanceStopped(0, "another gateway has ordered it"))
    assert planned(3) == wires(StartInstance(2, 0, 0, None, 0, 3))
    rig.at(3, InstanceStarted(2, 2))
    assert planned(3) == []
    assert planned(2) == wires(StopInstance(1, None))
    assert planned(1) == wires(StopInstance(2, 2))


def test_a_start_that_fails_on_a_granted_node_is_tried_again_after_a_back_off() -> None:
    """1. One that was denied says nothing. 2. One that failed bars the variant.

    3. The probe is the first instance of the function, whoever orders it. 4. If another Scheduler
    has ordered it, ours waits again; and its success is one for all.
    """
    kind = PolicyKind(Scripted, capabilities=Capabilities(multi_gateway=True))
    scheduler = Scheduler(make_app(limits=Limits(start_backoff_ns=10)), kind, peers=2)
    policy = scheduler.policy
    assert isinstance(policy, Scripted)
    variant, pool = scheduler.app.variants[0], scheduler.app.pools[0]
    policy.act = lambda p: p.orders.start_anywhere(variant, pool)
    scheduler.handle(0, NodeJoined(0, 0, "n0"))
    for at_ns, reason in ((0, EXHAUSTED), (1, STARTED_ALREADY), (2, "no such file")):
        (start,) = scheduler.handle(at_ns, RequestAnnounced(10**9, 0, 0, NEVER_NS))
        assert isinstance(start, StartInstance)
        assert not scheduler.view.load_failures
        scheduler.handle(at_ns, InstanceStopped(start.instance_id, reason))
    assert scheduler.view.timers == {("probe", 0): 12}
    (probe, *_) = scheduler.handle(12, TimerFired(("probe", 0)))
    assert isinstance(probe, StartInstance)
    assert (probe.node_id, probe.nth) == (None, 1)
    scheduler.handle(13, InstanceStopped(probe.instance_id, STARTED_ALREADY))
    assert scheduler.view.timers == {("probe", 0): 23}
    scheduler.handle(14, InstanceAppeared(THEIRS, 0, 0))
    assert not scheduler.view.load_failures
    assert not scheduler.view.timers
