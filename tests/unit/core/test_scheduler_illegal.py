"""Events that cannot have happened: a `DriverError`, and the state is untouched."""

from __future__ import annotations

import pytest

from headgate.core.events import (
    BatchFailed,
    BatchFinished,
    BatchLost,
    BatchRefused,
    Event,
    InstanceAppeared,
    InstanceStarted,
    InstanceStopped,
    NodeJoined,
    NodeLost,
    Refusal,
    RequestAnnounced,
    RequestArrived,
    RequestCancelled,
    WeightsEvicted,
    WeightsLoaded,
)
from headgate.core.model import Pool

from .rig import Rig
from .toys import Puppet, make_app, make_function

ILLEGAL = [
    (RequestArrived(1, 0), "does not follow"),
    (RequestArrived(0, 0), "does not follow"),
    (RequestArrived(2, 2), "no pipeline 2"),
    (RequestArrived(2, -1), "no pipeline -1"),
    (RequestArrived(2, 0, items=0), "no items"),
    (RequestArrived(2, 0, client=1), "no client"),
    (RequestAnnounced(1, 0, 0, 99), "after it has arrived"),
    (RequestAnnounced(2, 0, 0, 19), "after it has arrived"),
    (RequestAnnounced(2, 2, 0, 99), "no pipeline 2"),
    (RequestCancelled(2), "never arrived"),
    (BatchFinished(2), "never sent"),
    (BatchFinished(-1), "never sent"),
    (BatchFailed(2, "crash"), "never sent"),
    (BatchRefused(2, Refusal.BUSY), "never sent"),
    (BatchRefused(1, 9), "no such refusal"),
    (BatchRefused(1, -1), "no such refusal"),
    (BatchLost(2), "never sent"),
    (InstanceStarted(9, 0), "never started"),
    (InstanceStarted(2, 9), "no node 9"),
    (InstanceStarted(2, 0), "on node 1"),
    (InstanceStopped(9, "crash"), "never started"),
    (InstanceAppeared(0, 0, 0), "appeared twice"),
    (InstanceAppeared(9, 0, 9), "no node 9"),
    (InstanceAppeared(9, 0, 2), "is down"),
    (InstanceAppeared(9, 9, 0), "no variant 9"),
    (InstanceAppeared(9, -1, 0), "no variant -1"),
    (WeightsLoaded(9), "never started"),
    (WeightsEvicted(9), "never started"),
    (NodeJoined(0, 0, "n0"), "joined already"),
    (NodeJoined(9, 7, "n9"), "no pool 7"),
    (NodeJoined(2, 1, "n2"), "pool"),
    (NodeLost(9), "no node 9"),
    (NodeLost(2), "down already"),
    (Event(), "unknown event"),
]


@pytest.mark.parametrize(("event", "match"), ILLEGAL)
def test_it_is_refused_and_leaves_no_trace(
    make_rig: type[Rig], event: Event, match: str
) -> None:
    """A state with a bit of everything: one request answered, one out, a start, a node down."""
    pools = [Pool(0, "gpu", memory_bytes=100), Pool(1, "cpu")]
    app = make_app(make_function(0, memory_bytes=50), make_function(1, memory_bytes=50), pools=pools)
    rig = make_rig(app, Puppet, nodes=3)
    rig.at(1, NodeLost(2))
    rig.at(1, RequestArrived(0, 0))
    rig.at(1, RequestArrived(1, 0))
    rig.order(1, lambda p: p.send(0, 0))
    rig.at(2, InstanceStarted(0, 0))
    rig.at(12, BatchFinished(0))
    rig.order(13, lambda p: p.send(1, 256))
    rig.order(14, lambda p: p.orders.start(app.variants[1], p.view.nodes[1]))
    rig.rejects(20, event, match)


def test_time_does_not_go_back(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(), nodes=1)
    rig.at(10, RequestArrived(0, 0))
    rig.rejects(9, RequestArrived(1, 0), "time went back from 10 to 9")
    rig.at(10, RequestArrived(1, 0))


def test_with_peers_an_id_is_ours_or_theirs(make_rig: type[Rig]) -> None:
    """Of two Schedulers the second draws odd ids: batch 0 is the other's, and 3 not yet drawn."""
    rig = make_rig(make_app(), nodes=1, index=1, peers=2)
    rig.at(0, RequestArrived(0, 0))
    rig.rejects(1, BatchFinished(0), "never sent")
    rig.rejects(1, BatchFinished(3), "never sent")
    rig.rejects(1, InstanceStarted(3, 0), "never started")
    rig.rejects(1, InstanceAppeared(3, 0, 0), "ours")


def test_without_peers_nobody_else_starts_instances(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(), nodes=1)
    rig.rejects(1, InstanceAppeared(0, 0, 0), "ours")
