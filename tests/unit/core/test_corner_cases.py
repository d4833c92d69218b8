"""Corners of the core where two rules meet, each as the smallest example that shows it."""

from __future__ import annotations

import pytest

from headgate.core.actions import Dispatch, SetTimer
from headgate.core.errors import PolicyError
from headgate.core.events import (
    BatchFinished,
    BatchRefused,
    InstanceStarted,
    NodeLost,
    Refusal,
    RequestArrived,
    TimerFired,
    WeightsLoaded,
)
from headgate.core.model import Pool, Shape, Slo, Stage
from headgate.core.policy import Context, Plan, PolicyConfig, Target
from headgate.core.scheduler.scheduler import reconcile
from headgate.core.states import Outcome

from .rig import Rig, wires
from .sample_apps import CLOUD, Scripted, make_app, make_function

F0, F1, F2 = (make_function(i, output_bytes=10 ** (i + 1)) for i in range(3))
HARD_SLO = Slo(latency_ns=100, is_hard=True)


def test_compute_that_is_no_limit_is_not_missed() -> None:
    rig = Rig(make_app(make_function(shape=Shape(500, 4))), nodes=1)
    rig.at(0, RequestArrived(0, 0))


def test_weights_that_are_being_loaded_are_not_evicted() -> None:
    pools = [Pool(0, "gpu", host_memory_bytes=100)]
    rig = Rig(make_app(make_function(memory_bytes=60), pools=pools), Scripted, nodes=1)
    rig.order(0, lambda p: p.orders.start(p.view.app.variants[0], p.view.nodes[0]))
    rig.at(1, InstanceStarted(0, 0))
    instance = rig.view.instances[0]
    rig.order(2, lambda p: p.orders.evict(instance))
    rig.order(2, lambda p: p.orders.load(instance))
    rig.forbids(lambda p: p.orders.evict(instance), "not idle on a device")


def test_nothing_is_moved_from_a_stage_that_was_skipped() -> None:
    stages = [Stage(F0), Stage(F1, (0,), only_if_unsure=True), Stage(F2, (1,))]
    rig = Rig(make_app(F0, F1, F2, stages=stages), Scripted, nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.order(0, lambda p: p.send(0, 0))
    rig.at(10, BatchFinished(0))
    assert rig.view.moved_bytes(rig.scripted.task(2), 0, 0) == 0


def test_a_result_of_one_platform_must_be_moved_to_another() -> None:
    far = Pool(2, "far", faas=CLOUD.faas)
    first, second = (make_function(i, output_bytes=10, pool_ids=(i + 1,)) for i in range(2))
    stages = [Stage(first), Stage(second, (0,))]
    rig = Rig(make_app(first, second, stages=stages, pools=[Pool(0, "gpu"), CLOUD, far]), Scripted)
    rig.at(0, RequestArrived(0, 0))
    rig.order(0, lambda p: p.orders.dispatch_to_pool([p.task(0)], CLOUD))
    rig.at(10, BatchFinished(0))
    assert rig.order(11, lambda p: p.orders.dispatch_to_pool([p.task(1)], far))[0][8] == 10


def test_a_client_that_does_not_exist_sends_nothing() -> None:
    Rig(make_app()).rejects(0, RequestArrived(0, 0, client=1), "unknown client 1")


@pytest.mark.parametrize("usd", [-1.0, float("nan")])
def test_a_cost_objective_is_no_less_than_nothing(usd: float) -> None:
    Rig(make_app()).rejects(0, RequestArrived(0, 0, cost_usd=usd), "its cost objective is")


def test_a_request_with_a_hard_deadline_is_not_queued_again_after_it() -> None:
    rig = Rig(make_app(slo=HARD_SLO), Scripted, nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.order(0, lambda p: p.send(0, 0))
    rig.at(100, TimerFired(("deadline", 0)))
    assert rig.at(101, BatchRefused(0, Refusal.CANCELLED))[0][:3] == ["Settle", 0, Outcome.EXPIRED]


def test_a_request_with_a_hard_deadline_expires_when_its_last_running_branch_ends() -> None:
    """At the deadline one branch runs, so the request may yet be late; but the other waits on."""
    rig = Rig(make_app(F0, F1, stages=[Stage(F0), Stage(F1)], slo=HARD_SLO), Scripted, nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.order(0, lambda p: p.send(0, 0))
    rig.at(100, TimerFired(("deadline", 0)))
    assert rig.at(101, BatchFinished(0))[0][:3] == ["Settle", 0, Outcome.EXPIRED]


class EarlyBird(Scripted):
    """Sets a timer before anything has happened."""

    def __init__(self, context: Context, config: PolicyConfig) -> None:
        super().__init__(context, config)
        self.orders.set_timer("tick", 10)


def test_a_timer_set_when_the_policy_is_made_reaches_the_driver() -> None:
    assert Rig(make_app(), EarlyBird).at(0, RequestArrived(0, 0)) == wires(
        SetTimer(("tick", 0), 10)
    )


def test_actions_before_an_illegal_order_are_attached_to_the_error() -> None:
    """Otherwise a batch would be in flight that no driver knows of."""
    rig = Rig(make_app(), Scripted, nodes=1)
    rig.at(0, RequestArrived(0, 0))
    with pytest.raises(PolicyError) as caught:
        rig.order(1, lambda p: (p.send(0, 0), p.send(0, 0, 0)))
    dispatched = [a for a in caught.value.actions if isinstance(a, Dispatch)]
    assert [a.batch_id for a in dispatched] == list(rig.view.batches) == [0]


def test_an_instance_asked_of_one_pool_is_not_one_of_another() -> None:
    pools = [Pool(0, "gpu"), Pool(1, "cpu")]
    rig = Rig(make_app(make_function(pool_ids=(0, 1)), pools=pools), Scripted, nodes=1)
    rig.order(0, lambda p: p.orders.start_anywhere(p.view.app.variants[0], pools[1]))
    one = Plan((Target(variant_id=0, pool_id=0, count=1),))
    assert rig.order(1, lambda p: reconcile(p.view, p.orders, one))[0][0] == "StartInstance"


def test_a_start_that_work_waits_for_is_not_called_off() -> None:
    """Instance 0 is warm and idle, 1 is starting for a request: 0 is the one to spare."""
    rig = Rig(make_app(), Scripted, nodes=2)
    rig.order(0, lambda p: p.orders.start(p.view.app.variants[0], p.view.nodes[0]))
    rig.at(1, InstanceStarted(0, 0))
    rig.at(2, RequestArrived(0, 0))
    rig.order(2, lambda p: p.send(1, 0))
    one = Plan((Target(variant_id=0, pool_id=0, count=1),))
    assert rig.order(3, lambda p: reconcile(p.view, p.orders, one)) == [["StopInstance", 0, 0]]


def test_weights_are_not_loaded_by_an_instance_that_is_starting() -> None:
    rig = Rig(make_app(), Scripted, nodes=1)
    rig.order(0, lambda p: p.orders.start(p.view.app.variants[0], p.view.nodes[0]))
    rig.rejects(1, WeightsLoaded(0), "starting, not loading")


def test_an_eviction_that_was_refused_leaves_the_weights_on_the_device() -> None:
    """A peer's batch is on it, so its node answers the order with `WeightsLoaded`."""
    pools = [Pool(0, "gpu", host_memory_bytes=100)]
    rig = Rig(make_app(make_function(memory_bytes=60), pools=pools), Scripted, nodes=1)
    rig.order(0, lambda p: p.orders.start(p.view.app.variants[0], p.view.nodes[0]))
    rig.at(1, InstanceStarted(0, 0))
    rig.order(2, lambda p: p.orders.evict(p.view.instances[0]))
    rig.at(3, WeightsLoaded(0))
    assert rig.view.is_resident(rig.view.nodes[0], 0)


def test_a_node_granted_twice_for_one_function() -> None:
    """Two instances of a variant on one node: the second takes the first one's place."""
    pools = [Pool(0, "gpu", memory_bytes=100)]
    rig = Rig(make_app(make_function(memory_bytes=60), pools=pools), Scripted, nodes=1)
    for _ in range(2):
        rig.order(0, lambda p: p.orders.start_anywhere(p.view.app.variants[0], pools[0]))
    rig.at(1, InstanceStarted(0, 0))
    rig.rejects(2, InstanceStarted(1, 0), "holds")


def test_what_is_reported_twice_is_ignored_and_counted() -> None:
    """Messages may be duplicated, and an event about what has already ended is ignored."""
    rig = Rig(make_app(), nodes=1)
    rig.at(1, NodeLost(0))
    assert rig.at(2, NodeLost(0)) == []


def test_a_policy_hears_of_every_instance_that_is_gone() -> None:
    rig = Rig(make_app(), Scripted, nodes=1)
    rig.order(0, lambda p: p.orders.start(p.view.app.variants[0], p.view.nodes[0]))
    rig.at(1, NodeLost(0))
    assert ("gone", 0) in rig.scripted.hooks_called
