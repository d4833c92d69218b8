"""The trace of one request from a log that is full of others."""

from __future__ import annotations

from headgate.core.events import (
    BatchFinished,
    BatchLost,
    BatchRefused,
    InstanceStarted,
    InstanceStopped,
    NodeLost,
    Refusal,
    RequestArrived,
    RequestCancelled,
    TimerFired,
    WeightsLoaded,
)
from headgate.core.model import Limits, Pool, Slo, Stage
from headgate.core.request_trace import request_trace

from .rig import Rig
from .sample_apps import Scripted, make_app, make_function


def actions(rig: Rig, request_id: int) -> list[tuple[str, ...]]:
    """The names of each event and of its actions."""
    return [
        (type(entry.event).__name__, *(type(action).__name__ for action in entry.actions))
        for entry in request_trace(rig.entries, request_id)
    ]


def test_from_arrival_to_answer_and_nothing_of_the_others(make_rig: type[Rig]) -> None:
    """Request 1 waits for 0 to finish: that event is the cause of its dispatch."""
    rig = make_rig(make_app(), nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.at(0, RequestArrived(1, 0))
    rig.at(1, InstanceStarted(0, 0))
    rig.at(11, BatchFinished(0))
    rig.at(21, BatchFinished(1))
    assert actions(rig, 0) == [
        ("RequestArrived", "StartInstance", "Dispatch"),
        ("InstanceStarted",),
        ("BatchFinished", "Settle"),
    ]
    assert actions(rig, 1) == [
        ("RequestArrived",),
        ("BatchFinished", "Dispatch"),
        ("BatchFinished", "Settle"),
    ]
    assert actions(rig, 2) == []


def test_the_start_of_an_instance_counts_if_the_request_waited_for_it(make_rig: type[Rig]) -> None:
    """Started ahead of need: request 0 came before it was ready, request 1 after."""
    rig = make_rig(make_app(), Scripted, nodes=1)
    rig.order(0, lambda p: p.orders.start(p.view.app.variants[0], p.view.nodes[0]))
    rig.at(1, RequestArrived(0, 0))
    rig.order(1, lambda p: p.send(0, 0))
    rig.at(2, InstanceStarted(0, 0))
    rig.at(12, BatchFinished(0))
    rig.at(13, RequestArrived(1, 0))
    rig.order(13, lambda p: p.send(0, 256))
    rig.at(23, BatchFinished(1))
    assert actions(rig, 0) == [
        ("RequestAnnounced", "StartInstance"),
        ("RequestArrived",),
        ("RequestAnnounced", "Dispatch"),
        ("InstanceStarted",),
        ("BatchFinished", "Settle"),
    ]
    assert actions(rig, 1)[0] == ("RequestArrived",)
    assert ("InstanceStarted",) not in actions(rig, 1)


def test_a_load_that_it_waited_for(make_rig: type[Rig]) -> None:
    pools = [Pool(0, "gpu", memory_bytes=100, host_memory_bytes=100)]
    rig = make_rig(make_app(make_function(memory_bytes=60), pools=pools), Scripted, nodes=1)
    rig.order(0, lambda p: p.orders.start(p.view.app.variants[0], p.view.nodes[0]))
    rig.at(1, InstanceStarted(0, 0))
    rig.order(2, lambda p: p.orders.evict(p.view.instances[0]))
    rig.at(3, RequestArrived(0, 0))
    rig.order(3, lambda p: p.send(0, 0))
    rig.at(4, WeightsLoaded(0))
    assert actions(rig, 0) == [
        ("RequestArrived",),
        ("RequestAnnounced", "LoadWeights", "Dispatch"),
        ("WeightsLoaded",),
    ]


def test_retries_timers_and_the_end(make_rig: type[Rig]) -> None:
    limits = Limits(timeout_factor=2.0, timeout_floor_ns=0)
    app = make_app(slo=Slo(latency_ns=100, is_hard=True), limits=limits)
    rig = make_rig(app, Scripted, nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.order(0, lambda p: p.send(0, 0))
    rig.at(1, InstanceStarted(0, 0))
    rig.at(1, BatchRefused(0, Refusal.CANCELLED))
    rig.order(2, lambda p: p.send(0, 0))
    rig.at(22, TimerFired(("lost", 1)))
    rig.at(100, TimerFired(("deadline", 0)))
    assert actions(rig, 0) == [
        ("RequestArrived", "SetTimer"),
        ("RequestAnnounced", "StartInstance", "Dispatch", "SetTimer"),
        ("InstanceStarted",),
        ("BatchRefused", "CancelTimer"),
        ("RequestAnnounced", "Dispatch", "SetTimer"),
        ("TimerFired",),
        ("TimerFired", "Settle"),
    ]


def test_what_its_batch_was_out_with_is_lost(make_rig: type[Rig]) -> None:
    """The second instance vanishes when the request has nothing to do with it any more."""
    rig = make_rig(make_app(), Scripted, nodes=2)
    rig.at(0, RequestArrived(0, 0))
    rig.order(0, lambda p: (p.send(0, 0), p.send(1, 0)))
    rig.at(1, NodeLost(0))
    rig.at(2, BatchLost(0))
    rig.at(3, BatchFinished(1))
    rig.at(4, InstanceStopped(1, "retired"))
    assert actions(rig, 0)[2:] == [("NodeLost",), ("BatchLost",), ("BatchFinished", "Settle")]


def test_an_instance_that_vanishes_under_it(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(), Scripted, nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.order(0, lambda p: p.send(0, 0))
    rig.at(1, InstanceStopped(0, "crash"))
    rig.at(2, RequestCancelled(0))
    assert actions(rig, 0)[2:] == [
        ("InstanceStopped",),
        ("RequestCancelled", "Settle", "CancelBatch"),
    ]


def test_every_stage_is_part_of_the_trace_even_in_shared_batches(make_rig: type[Rig]) -> None:
    first, second = make_function(0), make_function(1)
    app = make_app(first, second, stages=[Stage(first), Stage(second, (0,))])
    rig = make_rig(app, Scripted, nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.at(0, RequestArrived(1, 0))
    rig.order(0, lambda p: p.send(0, 0, 256))
    rig.at(9, BatchFinished(0))
    rig.order(9, lambda p: p.send(0, 1, 257))
    rig.at(19, BatchFinished(1))
    for request_id in range(2):
        assert actions(rig, request_id) == [
            ("RequestArrived",),
            ("RequestAnnounced", "StartInstance", "Dispatch"),
            ("BatchFinished",),
            ("RequestAnnounced", "StartInstance", "Dispatch"),
            ("BatchFinished", "Settle"),
        ]
