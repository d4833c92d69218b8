"""Reconciling a plan into starts and stops."""

from __future__ import annotations

from headgate.core.actions import StartInstance, StopInstance
from headgate.core.events import InstanceStarted, RequestArrived, TimerFired
from headgate.core.model import Pool
from headgate.core.policy import Plan, Target
from headgate.core.records import Instance
from headgate.core.scheduler.scheduler import reconcile

from .rig import Rig, wires
from .sample_apps import Scripted, make_app, make_function


class Planner(Scripted):
    """Wants as many instances of variant 0 as the test says."""

    plan_every_ns = 100
    count = 0
    planned: list[Instance]

    def on_planned_start(self, instance: Instance) -> None:
        self.planned = [*getattr(self, "planned", []), instance]

    def plan(self) -> Plan:
        return Plan((Target(variant_id=0, pool_id=0, count=self.count),))


def plan(rig: Rig, now_ns: int, count: int) -> list[list[object]]:
    """Have the plan made and reconciled; the timer that is set for the next is left out."""
    assert isinstance(rig.scripted, Planner)
    rig.scripted.count = count
    return rig.at(now_ns, TimerFired(("plan", 0)))[:-1]


def test_what_is_wanted_and_not_there_is_started_on_free_nodes(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(), Planner, nodes=2)
    assert plan(rig, 100, 5) == wires(StartInstance(0, 0, 0, 0), StartInstance(1, 0, 0, 1))
    assert plan(rig, 200, 5) == []


def test_starting_ones_are_called_off_before_warm_ones_are_stopped(make_rig: type[Rig]) -> None:
    """Instance 0 is warm, 1 and 2 are starting; of those the older goes first."""
    rig = make_rig(make_app(), Planner, nodes=3)
    plan(rig, 100, 3)
    rig.at(110, InstanceStarted(0, 0))
    assert plan(rig, 200, 2) == wires(StopInstance(1, 1))
    assert plan(rig, 300, 0) == wires(StopInstance(2, 2), StopInstance(0, 0))


def test_of_warm_ones_the_idlest_is_stopped_and_none_that_is_busy(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(), Planner, nodes=3)
    plan(rig, 100, 3)
    for id in range(3):
        rig.at(110, InstanceStarted(id, id))
        rig.at(110, RequestArrived(id, 0))
    rig.order(120, lambda p: p.send(0, 0))
    assert plan(rig, 200, 2) == wires(StopInstance(1, 1))
    assert plan(rig, 300, 0) == wires(StopInstance(2, 2))


def test_a_target_that_drains_stops_busy_ones_after_idle_ones(make_rig: type[Rig]) -> None:
    """A busy one ends what it runs; until then it is there, and takes nothing more."""
    rig = make_rig(make_app(), Planner, nodes=2)
    plan(rig, 100, 2)
    for id in range(2):
        rig.at(110, InstanceStarted(id, id))
        rig.at(110, RequestArrived(id, 0))
    rig.order(120, lambda p: p.send(0, 0))
    one = Plan((Target(variant_id=0, pool_id=0, count=1, drains=True),))
    none = Plan((Target(variant_id=0, pool_id=0, count=0, drains=True),))
    assert rig.order(200, lambda p: reconcile(p.view, p.orders, one)) == wires(StopInstance(1, 1))
    assert rig.order(300, lambda p: reconcile(p.view, p.orders, none)) == wires(StopInstance(0, 0))


def test_a_plan_for_one_pool_leaves_the_others_alone(make_rig: type[Rig]) -> None:
    pools = [Pool(0, "gpu"), Pool(1, "cpu")]
    app = make_app(make_function(pool_ids=(0, 1)), make_function(1), pools=pools)
    rig = make_rig(app, Scripted, nodes=2)
    rig.order(0, lambda p: p.orders.start(app.variants[0], p.view.nodes[0]))
    rig.order(0, lambda p: p.orders.start(app.variants[1], p.view.nodes[1]))
    empty = Plan((Target(variant_id=0, pool_id=1, count=0),))
    assert rig.order(1, lambda p: reconcile(p.view, p.orders, empty)) == []


def rented_plan(counts: tuple[int, int], rented_max: int) -> Plan:
    return Plan(
        tuple(
            Target(variant_id=id, pool_id=0, count=count, rented_max=rented_max)
            for id, count in enumerate(counts)
        )
    )


def test_functions_are_started_on_nodes_that_are_rented_already(make_rig: type[Rig]) -> None:
    """Node 2 is the one that is rented; one more may be, and a third instance has no place."""
    app = make_app(
        make_function(), make_function(1), pools=[Pool(0, "cloud", slots=2, is_elastic=True)]
    )
    rig = make_rig(app, Scripted, nodes=4)
    rig.order(0, lambda p: p.orders.start(app.variants[0], p.view.nodes[2]))
    plan = rented_plan((2, 3), rented_max=2)
    assert rig.order(1, lambda p: reconcile(p.view, p.orders, plan)) == wires(
        StartInstance(1, 0, 0, 0), StartInstance(2, 1, 0, 2), StartInstance(3, 1, 0, 0)
    )
    assert rig.order(2, lambda p: reconcile(p.view, p.orders, plan)) == []


def test_nodes_that_are_rented_become_empty_one_after_the_other(make_rig: type[Rig]) -> None:
    app = make_app(
        make_function(), make_function(1), pools=[Pool(0, "cloud", slots=2, is_elastic=True)]
    )
    rig = make_rig(app, Scripted, nodes=2)
    both, one = rented_plan((2, 2), 2), rented_plan((1, 1), 1)
    started = rig.order(1, lambda p: reconcile(p.view, p.orders, both))
    assert len(started) == 4
    for id, node in enumerate((0, 1, 0, 1)):
        rig.at(2, InstanceStarted(id, node))
    stopped = rig.order(3, lambda p: reconcile(p.view, p.orders, one))
    assert stopped == wires(StopInstance(1, 1), StopInstance(3, 1))


def test_a_policy_is_told_what_its_plan_has_started(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(), Planner, nodes=2)
    plan(rig, 100, 2)
    assert isinstance(rig.scripted, Planner)
    assert [instance.id for instance in rig.scripted.planned] == [0, 1]


def test_no_node_is_given_more_than_its_memory(make_rig: type[Rig]) -> None:
    pools = [Pool(0, "gpu", memory_bytes=100, slots=4)]
    app = make_app(
        make_function(0, memory_bytes=60), make_function(1, memory_bytes=60), pools=pools
    )
    rig = make_rig(app, Scripted, nodes=1)
    rig.order(0, lambda p: p.orders.start(app.variants[1], p.view.nodes[0]))
    one = Plan((Target(variant_id=0, pool_id=0, count=1),))
    assert rig.order(1, lambda p: reconcile(p.view, p.orders, one)) == []


def test_a_target_that_no_node_has_the_memory_for_is_left_alone(make_rig: type[Rig]) -> None:
    """1. It needs more than is left beside what starts. 2. The smaller one after it still starts.

    3. Once the instance that was starting is stopped by an earlier target, there is room again.
    """
    pools = [Pool(0, "gpu", memory_bytes=100, slots=4)]
    sizes = (60, 50, 30)
    app = make_app(*(make_function(i, memory_bytes=m) for i, m in enumerate(sizes)), pools=pools)
    rig = make_rig(app, Scripted, nodes=1)
    rig.order(0, lambda p: p.orders.start(app.variants[0], p.view.nodes[0]))
    both = Plan((Target(1, 0, 1), Target(2, 0, 1)))
    assert rig.order(1, lambda p: reconcile(p.view, p.orders, both)) == wires(
        StartInstance(1, 2, 0, 0)
    )
    exchange = Plan((Target(1, 0, 1), Target(0, 0, 0), Target(1, 0, 1)))
    assert rig.order(2, lambda p: reconcile(p.view, p.orders, exchange)) == wires(
        StopInstance(0, 0), StartInstance(2, 1, 0, 0)
    )


def test_what_an_earlier_target_has_stopped_to_make_room_is_started_elsewhere(
    make_rig: type[Rig],
) -> None:
    """Of v1 there is one, idle on node 0. The start of v0 there stops it: one is missing."""
    pools = [Pool(0, "gpu", memory_bytes=100)]
    app = make_app(*(make_function(i, memory_bytes=60) for i in range(2)), pools=pools)
    rig = make_rig(app, Scripted, nodes=2)
    rig.order(0, lambda p: p.orders.start(app.variants[1], p.view.nodes[0]))
    rig.at(1, InstanceStarted(0, 0))
    rig.at(2, RequestArrived(0, 0))
    rig.order(2, lambda p: p.send(1, 0))  # node 1 is not free
    plan = Plan((Target(0, 0, 2), Target(1, 0, 1)))
    assert rig.order(3, lambda p: reconcile(p.view, p.orders, plan)) == wires(
        StopInstance(0, 0), StartInstance(2, 0, 0, 0)
    )
    assert rig.view.instances_in(1, 0) == []
