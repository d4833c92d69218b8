"""Events that cannot have happened: a `DriverError`, and the state is untouched."""

from __future__ import annotations

import pytest

from headgate.core.events import (
    BatchFailed,
    BatchFinished,
    BatchLost,
    BatchRefused,
    Event,
    GatewaysChanged,
    InstanceAppeared,
    InstanceStarted,
    InstanceStopped,
    InstanceUseChanged,
    NodeJoined,
    NodeLost,
    Refusal,
    RequestAnnounced,
    RequestArrived,
    RequestCancelled,
    WeightsEvicted,
    WeightsLoaded,
)
from headgate.core.ids import first_id
from headgate.core.model import Pool

from .rig import Rig
from .sample_apps import Scripted, make_app, make_function
from .snapshot import snapshot

OURS = first_id(1)

ILLEGAL = [
    (RequestArrived(1, 0), "does not follow"),
    (RequestArrived(0, 0), "does not follow"),
    (RequestArrived(2, 2), "unknown pipeline 2"),
    (RequestArrived(2, -1), "unknown pipeline -1"),
    (RequestArrived(2, 0, items=0), "no items"),
    (RequestAnnounced(1, 0, 0, 99), "after it has arrived"),
    (RequestAnnounced(2, 0, 0, 19), "after it has arrived"),
    (RequestAnnounced(2, 2, 0, 99), "unknown pipeline 2"),
    (RequestCancelled(2), "never arrived"),
    (BatchFinished(OURS + 2), "never sent"),
    (BatchFinished(1), "never sent"),
    (BatchFinished(-2), "never sent"),
    (BatchFailed(OURS + 2, "crash"), "never sent"),
    (BatchRefused(OURS + 2, Refusal.BUSY), "never sent"),
    (BatchRefused(OURS + 1, 9), "unknown refusal reason"),
    (BatchRefused(OURS + 1, -1), "unknown refusal reason"),
    (BatchRefused(OURS + 1, 1), "unknown refusal reason"),
    (BatchLost(OURS + 2), "never sent"),
    (InstanceStarted(OURS + 3, 0), "never started"),
    (InstanceStarted(OURS + 2, 9), "unknown node 9"),
    (InstanceStarted(OURS + 2, 0), "not ordered on n0"),
    (InstanceStopped(OURS + 3, "crash"), "never started"),
    (InstanceAppeared(OURS + 2, 0, 0), "appeared twice"),
    (InstanceAppeared(OURS + 4, 0, 0), "never started"),
    (InstanceAppeared(-1, 0, 0), "never started"),
    (InstanceAppeared(1, 0, 0), "appeared twice"),
    (InstanceAppeared(9, 0, 9), "unknown node 9"),
    (InstanceAppeared(9, 9, 0), "unknown variant 9"),
    (InstanceAppeared(9, -1, 0), "unknown variant -1"),
    (InstanceAppeared(9, 0, 0, 9), "unknown shape 9"),
    (InstanceUseChanged(OURS + 3, False), "never started"),
    (WeightsLoaded(OURS + 3), "never started"),
    (WeightsEvicted(OURS + 3), "never started"),
    (NodeJoined(0, 0, "n0"), "joined already"),
    (NodeJoined(9, 7, "n9"), "unknown pool 7"),
    (NodeJoined(2, 1, "n2"), "another pool"),
    (NodeJoined(9, 0, "n9", (8, 0)), "incomplete instances"),
    (NodeJoined(9, 0, "n9", (OURS + 4, 0, 0)), "never started"),
    (NodeJoined(9, 0, "n9", (1, 0, 0)), "cannot be on node 9"),
    (NodeJoined(9, 0, "n9", (8, 9, 0)), "cannot be on node 9"),
    (NodeJoined(9, 0, "n9", (8, 0, 9)), "unknown shape 9"),
    (NodeLost(9), "unknown node 9"),
    (GatewaysChanged(0), "0 gateways"),
    (Event(), "unknown event"),
]


@pytest.fixture
def rig(make_rig: type[Rig]) -> Rig:
    """A bit of everything, at 20 ns, to the second of two Schedulers, whose ids begin at `OURS`.

    Request 0 is answered and 1 is out in batch 1; instance 0 is idle on node 0 beside a peer's
    instance, 1 is busy and 2 is starting on node 1; node 2 is down.
    """
    functions = [make_function(i, memory_bytes=50) for i in range(2)]
    app = make_app(*functions, pools=[Pool(0, "gpu", memory_bytes=100), Pool(1, "cpu")])
    rig = make_rig(app, Scripted, nodes=3, index=1, peers=2)
    rig.at(0, NodeLost(2))
    rig.at(0, RequestArrived(0, 0))
    rig.at(0, RequestArrived(1, 0))
    rig.order(0, lambda p: p.send(0, 0))
    rig.at(2, InstanceStarted(OURS, 0))
    rig.at(12, BatchFinished(OURS))
    rig.at(13, InstanceAppeared(1, 1, 0))
    rig.order(14, lambda p: p.send(1, 256))
    rig.at(15, InstanceStarted(OURS + 1, 1))
    rig.order(20, lambda p: p.orders.start(app.variants[1], p.view.nodes[1]))
    return rig


@pytest.mark.parametrize(
    ("event", "match"), ILLEGAL, ids=lambda x: x if isinstance(x, str) else type(x).__name__
)
def test_it_is_refused_and_leaves_no_trace(rig: Rig, event: Event, match: str) -> None:
    rig.rejects(20, event, match)


def test_time_does_not_go_back(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(), nodes=1)
    rig.at(10, RequestArrived(0, 0))
    rig.rejects(9, RequestArrived(1, 0), "time went back from 10 to 9")
    rig.at(10, RequestArrived(1, 0))


def test_without_peers_nobody_else_starts_instances(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(), nodes=1)
    rig.rejects(1, InstanceAppeared(0, 0, 0), "never started")
    rig.rejects(1, InstanceAppeared(OURS, 0, 0), "never started")


def test_the_picture_that_is_compared_shows_a_change(rig: Rig) -> None:
    before = snapshot(rig.scheduler)
    assert snapshot(rig.scheduler) == before
    rig.scripted.task(256).refusals += 1
    assert snapshot(rig.scheduler) != before
