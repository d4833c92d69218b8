"""Instances: started on demand, evicted and loaded, drained, lost, or started by a peer."""

from __future__ import annotations

import pytest

from headgate.core.actions import (
    Dispatch,
    EvictWeights,
    LoadWeights,
    SetTimer,
    Settle,
    StartInstance,
    StopInstance,
)
from headgate.core.backend import NO_ROOM, STARTED_ALREADY
from headgate.core.errors import DriverError, InvariantError
from headgate.core.events import (
    BatchFinished,
    BatchLost,
    BatchRefused,
    InstanceAppeared,
    InstanceStarted,
    InstanceStopped,
    NodeJoined,
    NodeLost,
    Refusal,
    RequestArrived,
    TimerFired,
    WeightsEvicted,
    WeightsLoaded,
)
from headgate.core.ids import first_id
from headgate.core.model import Limits, Pool
from headgate.core.scheduler.validate import Validator
from headgate.core.states import InstanceState, Outcome, Residency, Settlement

from .rig import Rig, wires
from .sample_apps import Scripted, make_app, make_function

THEIRS = first_id(1)  # ids of another Scheduler
BIG = [make_function(i, memory_bytes=60) for i in range(3)]


def one_at_a_time(host_memory_bytes: int = 0) -> list[Pool]:
    """A node whose device holds one of the big functions."""
    return [Pool(0, "gpu", memory_bytes=100, host_memory_bytes=host_memory_bytes)]


def run_one(rig: Rig, now_ns: int, request_id: int, function_id: int) -> None:
    """Run a request to its end, whatever has to be prepared for it."""
    for wire in rig.at(now_ns, RequestArrived(request_id, function_id)):
        if wire[0] == "StopInstance":
            rig.at(now_ns, InstanceStopped(int(str(wire[1])), "ordered"))
        elif wire[0] == "StartInstance":
            rig.at(now_ns, InstanceStarted(int(str(wire[1])), 0))
        elif wire[0] == "LoadWeights":
            rig.at(now_ns, WeightsLoaded(int(str(wire[1]))))
    rig.at(now_ns + 1, BatchFinished(request_id))


def test_a_start_takes_a_slot_and_its_batch_waits_for_it(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(), nodes=1)
    rig.at(0, RequestArrived(0, 0))
    instance = rig.view.instances[0]
    assert (instance.state, instance.running) == (InstanceState.STARTING, 1)
    rig.at(5, InstanceStarted(0, 0))
    assert instance.state == InstanceState.BUSY
    rig.at(15, BatchFinished(0))
    assert instance.state == InstanceState.IDLE


def test_the_least_recently_used_leaves_for_host_memory(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(*BIG, pools=one_at_a_time(host_memory_bytes=60)), nodes=1)
    run_one(rig, 0, 0, 0)
    assert rig.at(10, RequestArrived(1, 1)) == wires(
        EvictWeights(0, 0), StartInstance(1, 1, 0, 0), Dispatch(1, 1, [256], 1, 0, 0, 1)
    )
    assert rig.at(11, WeightsEvicted(0)) == []
    assert not rig.view.is_resident(rig.view.nodes[0], 0)


def test_without_room_in_host_memory_it_leaves_altogether(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(*BIG, pools=one_at_a_time()), nodes=1)
    run_one(rig, 0, 0, 0)
    assert rig.at(10, RequestArrived(1, 1))[:2] == wires(
        StopInstance(0, 0), StartInstance(1, 1, 0, 0)
    )
    rig.at(11, InstanceStopped(0, "ordered"))
    assert list(rig.view.instances) == [1]


def test_evicted_weights_are_loaded_again_when_they_are_needed(make_rig: type[Rig]) -> None:
    """Two big functions take turns: each load evicts the other, no instance is started anew."""
    rig = make_rig(make_app(*BIG, pools=one_at_a_time(host_memory_bytes=120)), nodes=1)
    run_one(rig, 0, 0, 0)
    run_one(rig, 10, 1, 1)
    assert rig.at(20, RequestArrived(2, 0)) == wires(
        EvictWeights(1, 0), LoadWeights(0, 0), Dispatch(2, 0, [512], 1, 0, 0, 0)
    )
    assert rig.at(21, WeightsEvicted(1)) == []
    assert rig.at(22, WeightsLoaded(0)) == []
    assert rig.at(30, BatchFinished(2)) == wires(Settle(2, Settlement(Outcome.MET)))
    assert rig.view.nodes[0].host_bytes_used == 60


def test_of_several_idle_ones_the_least_recently_used_goes_first(make_rig: type[Rig]) -> None:
    pools = [Pool(0, "gpu", memory_bytes=130)]
    rig = make_rig(make_app(*BIG, pools=pools), nodes=1)
    run_one(rig, 0, 0, 0)
    run_one(rig, 10, 1, 1)
    run_one(rig, 20, 2, 0)
    assert rig.at(30, RequestArrived(3, 2))[0] == wires(StopInstance(1, 0))[0]


def test_what_is_busy_is_not_evicted(make_rig: type[Rig]) -> None:
    pools = [Pool(0, "gpu", memory_bytes=100, slots=4)]
    rig = make_rig(make_app(*BIG, pools=pools), nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.at(0, InstanceStarted(0, 0))
    assert rig.at(1, RequestArrived(1, 1)) == []
    assert rig.at(10, BatchFinished(0))[1:3] == wires(StopInstance(0, 0), StartInstance(1, 1, 0, 0))


def test_a_policy_may_evict_and_load_ahead_of_need(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(*BIG, pools=one_at_a_time(host_memory_bytes=60)), Scripted, nodes=1)
    rig.order(0, lambda p: p.orders.start(p.view.app.variants[0], p.view.nodes[0]))
    rig.at(1, InstanceStarted(0, 0))
    instance = rig.view.instances[0]
    assert rig.order(2, lambda p: p.orders.evict(instance)) == wires(EvictWeights(0, 0))
    rig.at(3, WeightsEvicted(0))
    assert rig.order(4, lambda p: p.orders.load(instance)) == wires(LoadWeights(0, 0))
    assert list(rig.view.free_nodes) == []  # loading is work
    rig.at(5, WeightsLoaded(0))
    assert (instance.residency, list(rig.view.free_nodes)) == (Residency.DEVICE, [0])


def test_stopped_while_busy_it_finishes_what_it_has_begun(make_rig: type[Rig]) -> None:
    """1. A busy instance is ordered to stop: it drains and holds no memory of the node any more.
    2. The next dispatch starts another one of its kind beside it.
    3. The batch comes back, then the instance is gone.
    """
    rig = make_rig(make_app(pools=[Pool(0, "gpu", slots=2)]), Scripted, nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.order(0, lambda p: p.send(0, 0))
    rig.at(1, InstanceStarted(0, 0))
    draining = rig.view.instances[0]
    assert rig.order(2, lambda p: p.orders.stop(draining)) == wires(StopInstance(0, 0))
    rig.at(3, RequestArrived(1, 0))
    assert rig.order(3, lambda p: p.send(0, 256)) == wires(
        StartInstance(1, 0, 0, 0), Dispatch(1, 0, [256], 1, 0, 0, 1)
    )
    assert rig.at(10, BatchFinished(0)) == wires(Settle(0, Settlement(Outcome.MET)))
    assert draining.state == InstanceState.DRAINING
    rig.at(11, InstanceStopped(0, "ordered"))
    assert draining.state == InstanceState.GONE
    assert list(rig.view.instances) == [1]


def test_a_start_that_is_called_off_holds_its_slot_until_it_has_ended(make_rig: type[Rig]) -> None:
    """A Backend cannot un-start it, and would refuse a batch meanwhile."""
    rig = make_rig(make_app(), Scripted, nodes=1)
    rig.order(0, lambda p: p.orders.start(p.view.app.variants[0], p.view.nodes[0]))
    rig.order(1, lambda p: p.orders.stop(p.view.instances[0]))
    assert not rig.view.free_nodes
    rig.at(2, InstanceStarted(0, 0))
    assert rig.view.instances[0].state == InstanceState.DRAINING
    assert list(rig.view.free_nodes) == [0]
    rig.at(3, InstanceStopped(0, "ordered"))
    assert rig.view.instances == {}


def test_a_batch_that_waited_for_a_start_runs_although_the_start_was_called_off(
    make_rig: type[Rig],
) -> None:
    """1. It waits. 2. The start ends, and the batch runs. 3. Its node dies: it was alone there."""
    rig = make_rig(make_app(), Scripted, nodes=2)
    rig.at(0, RequestArrived(0, 0))
    rig.order(0, lambda p: p.send(0, 0))
    rig.order(1, lambda p: p.orders.stop(p.view.instances[0]))
    assert rig.view.nodes[0].running == 2
    rig.at(2, InstanceStarted(0, 0))
    assert rig.view.nodes[0].running == 1
    (settled,) = rig.at(3, BatchLost(0))[-1:]
    assert settled[0] == "Settle"
    assert rig.view.requests == {}


def test_an_instance_that_vanishes_takes_its_batch_with_it(make_rig: type[Rig]) -> None:
    """The slot is free at once; the batch ends in an event of its own, and is repeated."""
    rig = make_rig(make_app(limits=Limits(backoff_ns=50)), Scripted, nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.order(0, lambda p: p.send(0, 0))
    rig.at(1, InstanceStarted(0, 0))
    rig.scripted.hooks_called.clear()
    rig.at(5, InstanceStopped(0, "crash"))
    assert rig.scripted.hooks_called == [("gone", 0), ("capacity", 0)]
    assert list(rig.view.free_nodes) == [0]
    assert rig.at(6, BatchRefused(0, Refusal.GONE)) == wires(SetTimer(("unblock", 0), 56))
    assert rig.order(7, lambda p: p.send(0, 0))[0] == wires(StartInstance(1, 0, 0, 0))[0]


def test_the_answer_of_an_instance_that_is_gone_still_counts(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(), nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.at(1, InstanceStarted(0, 0))
    rig.at(11, InstanceStopped(0, "retired"))
    assert rig.at(11, BatchFinished(0)) == wires(Settle(0, Settlement(Outcome.MET)))


def test_an_instance_that_fails_to_start_frees_its_slot_and_memory(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(*BIG, pools=one_at_a_time()), Scripted, nodes=1)
    rig.order(0, lambda p: p.orders.start(p.view.app.variants[0], p.view.nodes[0]))
    rig.at(1, InstanceStopped(0, "no image"))
    assert (rig.view.nodes[0].memory_used_bytes, list(rig.view.free_nodes)) == (0, [0])
    assert rig.at(2, InstanceStopped(0, "no image")) == []
    assert rig.view.events_ignored == 1


def test_a_pool_may_pick_the_node_of_a_start(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(), Scripted, nodes=2)
    pool = rig.view.app.pools[0]
    assert rig.order(0, lambda p: p.orders.start_anywhere(p.view.app.variants[0], pool)) == wires(
        StartInstance(0, 0, 0, None)
    )
    rig.at(5, InstanceStarted(0, 1))
    assert rig.view.nodes[1].instances == {0: rig.view.instances[0]}
    assert rig.scripted.hooks_called[-2:] == [("started", 0), ("capacity", 1)]


def test_a_start_that_no_node_was_granted_for_ends_as_well(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(), Scripted, nodes=1)
    pool = rig.view.app.pools[0]
    rig.order(0, lambda p: p.orders.start_anywhere(p.view.app.variants[0], pool))
    assert rig.order(1, lambda p: p.orders.stop(p.view.instances[0])) == wires(
        StopInstance(0, None)
    )
    rig.at(5, InstanceStopped(0, "denied"))
    assert rig.view.instances == {}


def test_an_instance_that_a_peer_started_can_be_used(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(), nodes=1, index=0, peers=2)
    rig.at(0, InstanceAppeared(THEIRS, 0, 0))
    assert rig.at(1, RequestArrived(0, 0)) == wires(Dispatch(0, 0, [0], 1, 0, 0, THEIRS))
    rig.at(11, BatchFinished(0))
    rig.at(12, InstanceStopped(THEIRS, "retired"))
    assert rig.view.nodes[0].instances == {}


def test_a_node_joins_with_the_instances_that_it_holds(make_rig: type[Rig]) -> None:
    """They can be used at once, so nothing is started; the third has no room beside the others."""
    rig = make_rig(make_app(*BIG, pools=[Pool(0, "gpu", memory_bytes=120)]), index=0, peers=2)
    rig.at(0, RequestArrived(0, 1))
    held = (THEIRS, 0, 0, THEIRS + 1, 1, 0, THEIRS + 2, 2, 0)
    dispatch = Dispatch(0, 1, [0], 1, 0, 0, THEIRS + 1)
    assert rig.at(1, NodeJoined(0, 0, "n0", held)) == wires(dispatch)
    assert list(rig.view.instances) == [THEIRS, THEIRS + 1]


def test_a_node_that_comes_back_may_hold_our_own_instances(make_rig: type[Rig]) -> None:
    """The connection broke, and the node has kept them: one that runs and one that starts."""
    rig = make_rig(make_app(make_function(0), make_function(1)), Scripted, nodes=1)
    rig.order(0, lambda p: p.orders.start(p.view.app.variants[0], p.view.nodes[0]))
    rig.order(0, lambda p: p.orders.start(p.view.app.variants[1], p.view.nodes[0]))
    rig.at(1, InstanceStarted(0, 0))
    rig.at(2, NodeLost(0))
    rig.at(3, NodeJoined(0, 0, "n0", (0, 0, 0)))
    rig.at(4, InstanceAppeared(1, 1, 0))
    assert sorted(rig.view.instances) == [0, 1]
    rig.at(5, InstanceStopped(0, "retired"))
    assert sorted(rig.view.instances) == [1]


def test_what_a_peer_started_is_there_once_our_own_start_is_refused(make_rig: type[Rig]) -> None:
    """The node has room for one. What was started there first had no room beside our start."""
    rig = make_rig(make_app(*BIG, pools=one_at_a_time()), Scripted, nodes=1, index=0, peers=2)
    rig.order(0, lambda p: p.orders.start(p.view.app.variants[0], p.view.nodes[0]))
    rig.at(1, InstanceAppeared(THEIRS, 0, 0))
    assert list(rig.view.instances) == [0]
    rig.at(2, InstanceStopped(0, STARTED_ALREADY))
    assert list(rig.view.instances) == [THEIRS]
    assert rig.view.nodes[0].instances == {0: rig.view.instances[THEIRS]}
    assert rig.scripted.hooks_called[-2:] == [("started", THEIRS), ("capacity", 0)]
    with pytest.raises(DriverError, match="appeared twice"):
        rig.at(3, InstanceAppeared(THEIRS, 0, 0))


@pytest.mark.parametrize("what", ["it", "its node"])
def test_what_a_peer_started_and_is_gone_is_not_there_later(make_rig: type[Rig], what: str) -> None:
    rig = make_rig(make_app(*BIG, pools=one_at_a_time()), Scripted, nodes=1, index=0, peers=2)
    rig.order(0, lambda p: p.orders.start(p.view.app.variants[0], p.view.nodes[0]))
    rig.at(1, InstanceAppeared(THEIRS, 0, 0))
    rig.at(2, InstanceStopped(THEIRS, "retired") if what == "it" else NodeLost(0))
    rig.at(3, InstanceStopped(0, STARTED_ALREADY))
    assert rig.view.instances == {}


def test_a_start_for_which_a_peer_left_no_memory_is_no_failed_load(make_rig: type[Rig]) -> None:
    """The node is left alone for a while, and the variant may be started elsewhere at once."""
    app = make_app(*BIG, pools=one_at_a_time(), limits=Limits(start_backoff_ns=100))
    rig = make_rig(app, Scripted, nodes=2, index=0, peers=2)
    rig.order(0, lambda p: p.orders.start(p.view.app.variants[0], p.view.nodes[0]))
    rig.at(1, InstanceStopped(0, NO_ROOM))
    assert not rig.view.load_failures
    assert list(rig.view.free_nodes) == [1]
    rig.at(2, InstanceAppeared(THEIRS, 1, 0))
    rig.order(3, lambda p: p.orders.start(p.view.app.variants[0], p.view.nodes[1]))
    rig.at(101, TimerFired(("unblock", 0)))
    assert sorted(rig.view.free_nodes) == [0]


def test_weights_that_a_peer_evicts_are_loaded_before_they_are_used(make_rig: type[Rig]) -> None:
    app = make_app(*BIG, pools=one_at_a_time(host_memory_bytes=60))
    rig = make_rig(app, nodes=1, index=0, peers=2)
    rig.at(0, InstanceAppeared(THEIRS, 0, 0))
    rig.at(1, WeightsEvicted(THEIRS))
    assert rig.view.instances[THEIRS].residency == Residency.HOST
    orders = [LoadWeights(THEIRS, 0), Dispatch(0, 0, [0], 1, 0, 0, THEIRS)]
    assert rig.at(2, RequestArrived(0, 0)) == wires(*orders)
    rig.at(3, WeightsEvicted(THEIRS))  # reported late: it is being loaded again
    assert rig.view.instances[THEIRS].residency == Residency.DEVICE
    rig.at(4, WeightsLoaded(THEIRS))
    rig.at(5, BatchFinished(0))


def test_a_start_that_is_reported_twice_counts_once(make_rig: type[Rig]) -> None:
    """The second message comes when the weights have left for host memory: they stay there."""
    rig = make_rig(make_app(*BIG, pools=one_at_a_time(host_memory_bytes=60)), Scripted, nodes=1)
    rig.order(0, lambda p: p.orders.start(p.view.app.variants[0], p.view.nodes[0]))
    rig.at(1, InstanceStarted(0, 0))
    rig.order(2, lambda p: p.orders.evict(p.view.instances[0]))
    rig.at(3, InstanceStarted(0, 0))
    assert rig.view.events_ignored == 1
    assert rig.view.instances[0].residency == Residency.HOST


def test_news_of_a_peers_instance_may_come_too_late_or_beside_a_start_of_ours(
    make_rig: type[Rig],
) -> None:
    """On a node that is lost by then, or that holds one of its kind: it is of no use to us."""
    rig = make_rig(make_app(*BIG, pools=one_at_a_time()), Scripted, nodes=2, index=0, peers=2)
    rig.at(0, NodeLost(1))
    rig.at(1, InstanceAppeared(THEIRS, 0, 1))
    rig.order(2, lambda p: p.orders.start(p.view.app.variants[0], p.view.nodes[0]))
    rig.at(3, InstanceAppeared(THEIRS + 1, 0, 0))
    rig.at(4, InstanceStarted(0, 0))
    assert list(rig.view.instances) == [0]
    rig.at(5, InstanceStopped(THEIRS + 1, "retired"))
    assert rig.view.events_ignored == 2


def test_a_granted_node_that_is_lost_before_the_news_of_the_start(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(), Scripted, nodes=1)
    pool = rig.view.app.pools[0]
    rig.order(0, lambda p: p.orders.start_anywhere(p.view.app.variants[0], pool))
    rig.at(1, NodeLost(0))
    rig.at(2, InstanceStarted(0, 0))
    assert rig.view.events_ignored == 1
    rig.at(3, InstanceStopped(0, "node lost"))
    assert rig.view.instances == {}


def test_ids_of_several_schedulers_are_in_ranges_of_their_own(make_rig: type[Rig]) -> None:
    """Backends serve several Schedulers: no two may use the same batch or instance id."""
    sent: list[object] = []
    for index in range(3):
        rig = make_rig(make_app(), nodes=2, index=index, peers=3)
        for request_id in range(2):
            start, dispatch = rig.at(0, RequestArrived(request_id, 0))
            sent.append((start[1], dispatch[1]))
    firsts = [first_id(index) for index in range(3)]
    assert sent == [(first + i, first + i) for first in firsts for i in range(2)]


def test_the_instances_of_a_variant_are_those_that_start_or_run(make_rig: type[Rig]) -> None:
    """A start is listed at once, in order; a stopped one is not, long before it is gone.

    1. Three starts: on nodes 2 and 0, and where the pool picks a node.
    2. The first is stopped: its node still has it, and no policy may count on it.
    3. The second dies with its node; the third is granted node 1.
    """
    rig = make_rig(make_app(), Scripted, nodes=3)
    view, variant, pool = rig.view, rig.view.app.variants[0], rig.view.app.pools[0]
    assert not view.has_instance(0)
    rig.order(0, lambda p: p.orders.start(variant, view.nodes[2]))
    rig.order(0, lambda p: p.orders.start(variant, view.nodes[0]))
    rig.order(0, lambda p: p.orders.start_anywhere(variant, pool))
    assert [i.id for i in view.instances_in(0, 0)] == [0, 1, 2]
    assert view.instances_in(0, 1) == []
    rig.order(1, lambda p: p.orders.stop(view.instances[0]))
    assert (list(view.instances), list(view.instances_of[0])) == ([0, 1, 2], [1, 2])
    rig.at(2, NodeLost(0))
    rig.at(3, InstanceStarted(2, 1))
    assert list(view.instances_of[0]) == [2]
    rig.at(4, NodeLost(2))  # with it goes the instance that was draining
    rig.at(5, InstanceStopped(2, "crash"))
    assert (view.instances, view.instances_of[0], view.has_instance(0)) == ({}, {}, False)


def test_an_instance_that_is_not_listed_is_found_by_validate(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(), Scripted, nodes=1)
    rig.order(0, lambda p: p.orders.start(p.view.app.variants[0], p.view.nodes[0]))
    instance = rig.view.instances_of[0].pop(0)
    with pytest.raises(InvariantError, match="the instances of v0 are not those that are active"):
        Validator(rig.view).check()
    rig.view.instances_of[0][0] = instance
    Validator(rig.view).check()
