"""Several instances of a variant on a node, and several variants of a function in a pool."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headgate.core.actions import Dispatch, StartInstance, StopInstance
from headgate.core.errors import InvariantError
from headgate.core.events import (
    BatchFinished,
    InstanceAppeared,
    InstanceStarted,
    InstanceStopped,
    NodeLost,
    RequestArrived,
)
from headgate.core.ids import first_id
from headgate.core.model import App, Limits, Pool, Profile, Variant
from headgate.core.policy import Plan, Target
from headgate.core.scheduler.scheduler import reconcile
from headgate.core.scheduler.validate import Validator

from .rig import Rig, wires
from .sample_apps import Scripted, make_app, make_function

POOL = Pool(0, "gpu", slots=4, memory_bytes=100, host_memory_bytes=50)
APP = make_app(make_function(memory_bytes=30), make_function(1, memory_bytes=50), pools=[POOL])
(FIRST, SECOND) = APP.variants


def start(rig: Rig, variant: Variant = FIRST, *, node_id: int = 0) -> None:
    rig.order(rig.view.now_ns, lambda p: p.orders.start(variant, p.view.nodes[node_id]))


@pytest.fixture
def rig(make_rig: type[Rig]) -> Rig:
    """Node 0 holds instances 0 and 1 of v0, both idle; three requests wait."""
    rig = make_rig(APP, Scripted, nodes=2)
    start(rig)
    start(rig)
    rig.at(1, InstanceStarted(0, 0))
    rig.at(1, InstanceStarted(1, 0))
    for id in range(3):
        rig.at(1, RequestArrived(id, 0))
    return rig


def test_each_has_its_own_memory_and_runs_its_own_batches(rig: Rig) -> None:
    """1. Batches go to an idle one. 2. With both full the node fits no more, although slots are."""
    node = rig.view.nodes[0]
    assert (node.memory_used_bytes, node.replicas) == (60, 1)
    assert [i.id for i in node.by_variant[0]] == [0, 1]
    assert rig.order(2, lambda p: p.send(0, 0)) == wires(Dispatch(0, 0, [0], 1, 0, 0, 0))
    assert rig.view.fits(node, FIRST)
    assert rig.order(2, lambda p: p.send(0, 256)) == wires(Dispatch(1, 0, [256], 1, 0, 0, 1))
    assert not rig.view.fits(node, FIRST)
    assert not rig.view.can_take(node, 0)
    rig.at(3, BatchFinished(0))
    assert rig.order(4, lambda p: p.send(0, 512))[0] == wires(Dispatch(2, 0, [512], 1, 0, 0, 0))[0]


def test_a_batch_goes_to_the_instance_that_is_named(rig: Rig) -> None:
    second = rig.view.instances[1]
    node = rig.view.nodes[0]
    assert rig.order(2, lambda p: p.orders.dispatch([p.task(0)], node, instance=second)) == wires(
        Dispatch(0, 0, [0], 1, 0, 0, 1)
    )
    rig.order(3, lambda p: p.orders.stop(second))
    rig.forbids(
        lambda p: p.orders.dispatch([p.task(256)], node, instance=second), "draining or gone"
    )


def test_they_are_drained_apart(rig: Rig) -> None:
    """1. The oldest drains while it runs; the next one takes its place. 2. Both go."""
    view, node = rig.view, rig.view.nodes[0]
    rig.order(2, lambda p: p.send(0, 0))
    assert rig.order(3, lambda p: p.orders.stop(view.instances[0])) == wires(StopInstance(0, 0))
    assert (node.instances[0].id, node.replicas, node.memory_used_bytes) == (1, 0, 30)
    rig.at(4, BatchFinished(0))
    rig.at(4, InstanceStopped(0, "stopped"))
    rig.at(5, InstanceStopped(1, "crashed"))
    assert (node.instances, node.by_variant, node.memory_used_bytes) == ({}, {}, 0)


def test_the_least_recently_used_one_makes_room(rig: Rig) -> None:
    """Instance 0 has run and 1 has not: 1 goes to host memory, and is loaded for the next batch."""
    rig.order(2, lambda p: p.send(0, 0))
    rig.at(3, BatchFinished(0))
    rig.at(3, RequestArrived(3, 1))
    made = rig.order(4, lambda p: p.send(0, 768))
    assert [action[0] for action in made] == ["EvictWeights", "StartInstance", "Dispatch"]
    assert made[0][1] == 1
    # The warm one is chosen before the one in host memory, also if it is the younger of the two.
    chosen = rig.view.instance_for(rig.view.nodes[0], FIRST)
    assert chosen is rig.view.instances[0]


def test_they_are_lost_together_with_their_node(rig: Rig) -> None:
    node = rig.view.nodes[0]
    rig.order(2, lambda p: p.send(0, 0))
    rig.at(3, NodeLost(0))
    assert (node.instances, node.by_variant, node.replicas) == ({}, {}, 0)
    assert rig.view.instances == {}


def test_a_starting_one_is_chosen_after_a_ready_one(rig: Rig) -> None:
    start(rig)
    view, node = rig.view, rig.view.nodes[0]
    rig.order(2, lambda p: p.send(0, 0))
    rig.order(2, lambda p: p.send(0, 256))
    assert rig.order(2, lambda p: p.send(0, 512)) == wires(Dispatch(2, 0, [512], 1, 0, 0, 2))
    rig.at(3, BatchFinished(1))
    assert view.instance_for(node, FIRST) is view.instances[1]


def test_a_plan_starts_as_many_per_node_as_it_says(make_rig: type[Rig]) -> None:
    """1. One to every node, then a second one. 2. No third one, whatever is wanted. 3. Fewer."""
    rig = make_rig(APP, Scripted, nodes=2)

    def planned(count: int) -> list[list[object]]:
        plan = Plan((Target(0, 0, count, per_node_max=2),))
        return rig.order(1, lambda p: reconcile(p.view, p.orders, plan))

    assert planned(3) == wires(
        *(StartInstance(id, 0, 0, node) for id, node in ((0, 0), (1, 1), (2, 0)))
    )
    assert planned(9) == wires(StartInstance(3, 0, 0, 1))
    assert planned(2) == wires(StopInstance(0, 0), StopInstance(1, 1))


def test_a_peers_instance_beside_ours_is_one_more(make_rig: type[Rig]) -> None:
    rig = make_rig(APP, Scripted, nodes=1, index=0, peers=2)
    start(rig)
    theirs = first_id(1)
    rig.at(1, InstanceAppeared(theirs, 0, 0))
    assert [i.id for i in rig.view.nodes[0].by_variant[0]] == [0, theirs]
    # There is no memory for the next one any more: the news crossed the end of another.
    rig.at(2, InstanceAppeared(theirs + 1, 1, 0))
    assert list(rig.view.instances) == [0, theirs]


def test_validate_finds_what_is_listed_wrongly(rig: Rig) -> None:
    node = rig.view.nodes[0]
    node.by_variant[0].reverse()
    with pytest.raises(InvariantError, match="others than its oldest instances"):
        Validator(rig.view).check()
    node.by_variant[0].reverse()
    node.replicas = 0
    with pytest.raises(InvariantError, match="miscounts its instances"):
        Validator(rig.view).check()
    node.replicas = 1


def two_builds(limits: Limits = Limits()) -> App:  # noqa: B008 - frozen
    """A function with a large fast build and a small slow one, both for the same pool."""
    function = make_function(exec_ns=(5,), memory_bytes=80)
    slow = Variant(1, "v1", 0, (0,), Profile((20,), memory_bytes=10))
    return make_app(
        replace(function, variants=(*function.variants, slow)), pools=[POOL], limits=limits
    )


def test_every_variant_of_a_pool_can_be_asked_about(make_rig: type[Rig]) -> None:
    """1. The first is the default. 2. With little memory left, only the second fits, and runs."""
    app = two_builds()
    fast, slow = app.variants
    assert (app.variants_in(0), app.variants_on(0)) == (((fast, slow),), (fast,))
    rig = make_rig(app, Scripted, nodes=1)
    view, node = rig.view, rig.view.nodes[0]
    rig.at(0, RequestArrived(0, 0))
    rig.at(0, RequestArrived(1, 0))
    assert view.fits(node, fast) and view.fits(node, slow)
    rig.order(1, lambda p: p.orders.start(slow, node))
    rig.order(1, lambda p: p.orders.start(slow, node))
    rig.order(1, lambda p: p.orders.start(slow, node))
    assert not view.fits(node, fast)
    assert not view.can_take(node, 0)
    assert view.fits(node, slow)
    assert rig.order(2, lambda p: p.orders.dispatch([p.task(0)], node, slow)) == wires(
        Dispatch(0, 1, [0], 1, 0, 0, 0)
    )


def test_a_function_is_loadable_while_any_build_of_it_is(make_rig: type[Rig]) -> None:
    """The first build fails to start: the second one may still be started, so requests wait."""
    rig = make_rig(two_builds(), Scripted, nodes=1)
    fast, slow = rig.view.app.variants
    rig.at(0, RequestArrived(0, 0))
    start(rig, fast)
    rig.at(1, InstanceStopped(0, "no such file"))
    assert (set(rig.view.load_failures), rig.view.unloadable) == ({0}, set())
    start(rig, slow)
    settled = rig.at(2, InstanceStopped(1, "no such file"))
    assert rig.view.unloadable == {0}
    assert "Settle" in [action[0] for action in settled]
