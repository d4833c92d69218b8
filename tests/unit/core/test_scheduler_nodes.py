"""Nodes join, are lost with their instances, and rejoin empty."""

from __future__ import annotations

from headgate.core.actions import Dispatch, Settle, StartInstance
from headgate.core.events import (
    BatchFinished,
    BatchLost,
    InstanceStarted,
    InstanceStopped,
    NodeJoined,
    NodeLost,
    RequestArrived,
)
from headgate.core.model import Pool
from headgate.core.states import InstanceState, Outcome, Settlement

from .rig import Rig, wires
from .sample_apps import Scripted, make_app, make_function


def test_a_node_that_joins_is_offered(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(), Scripted, nodes=1)
    assert rig.scripted.hooks_called == [("joined", 0), ("capacity", 0)]
    assert list(rig.view.free_nodes) == [0]


def test_a_lost_node_loses_its_instances_and_rejoins_empty(make_rig: type[Rig]) -> None:
    """1. A batch is in flight on the node when it is lost; nothing can be sent there.
    2. The batch is lost in an event of its own; its task waits for a node.
    3. The node returns, empty: an instance has to be started on it anew.
    """
    app = make_app(make_function(memory_bytes=60), pools=[Pool(0, "gpu", memory_bytes=100)])
    rig = make_rig(app, nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.at(1, InstanceStarted(0, 0))
    assert rig.at(5, NodeLost(0)) == []
    assert (rig.view.instances, rig.view.free_nodes) == ({}, {})
    assert rig.at(6, BatchLost(0, node_died=False)) == []
    assert rig.at(9, NodeJoined(0, 0, "n0")) == wires(
        StartInstance(1, 0, 0, 0), Dispatch(1, 0, [0], 1, 0, 0, 1)
    )


def test_the_answer_of_a_node_that_is_lost_still_counts(make_rig: type[Rig]) -> None:
    """The event is counted, but `on_capacity` is not called: there is no capacity."""
    rig = make_rig(make_app(), Scripted, nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.order(0, lambda p: p.send(0, 0))
    rig.at(1, InstanceStarted(0, 0))
    rig.at(11, NodeLost(0))
    assert rig.at(11, BatchFinished(0)) == wires(Settle(0, Settlement(Outcome.MET)))
    assert rig.scripted.hooks_called[-2:] == [("node lost", 0), ("ended", 0)]
    rig.at(12, NodeJoined(0, 0, "n0"))
    assert rig.view.nodes[0].running == 0


def test_a_node_lost_while_an_instance_starts(make_rig: type[Rig]) -> None:
    """The start ends in an event all the same; it speaks of something that is gone."""
    rig = make_rig(make_app(), Scripted, nodes=1)
    rig.order(0, lambda p: p.orders.start(p.view.app.variants[0], p.view.nodes[0]))
    instance = rig.view.instances[0]
    rig.at(1, NodeLost(0))
    assert instance.state == InstanceState.GONE
    rig.at(2, InstanceStopped(0, "node lost"))
    assert rig.view.events_ignored == 1
    rig.at(3, NodeJoined(0, 0, "n0"))
    assert list(rig.view.free_nodes) == [0]


def test_a_node_lost_while_an_instance_on_it_drains(make_rig: type[Rig]) -> None:
    """1. A busy instance is ordered to stop, then its node is lost.
    2. The batch and the instance end in events of their own, before and after the node is back.
    3. The node that came back owes nothing to either.
    """
    rig = make_rig(make_app(), Scripted, nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.order(0, lambda p: p.send(0, 0))
    rig.at(1, InstanceStarted(0, 0))
    rig.order(2, lambda p: p.orders.stop(p.view.instances[0]))
    rig.at(3, NodeLost(0))
    rig.at(4, BatchLost(0))
    rig.at(5, NodeJoined(0, 0, "n0"))
    rig.at(6, InstanceStopped(0, "node lost"))
    assert rig.view.nodes[0].running == 0


def test_nodes_are_used_in_the_order_they_became_free(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(), nodes=3)
    for request_id in range(3):
        rig.at(request_id, RequestArrived(request_id, 0))
        rig.at(request_id, InstanceStarted(request_id, request_id))
    for batch_id in (1, 2, 0):
        rig.at(20, BatchFinished(batch_id))
    assert list(rig.view.free_nodes) == [1, 2, 0]
