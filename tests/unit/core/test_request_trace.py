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
from headgate.core.request_trace import TRACED_MAX, request_trace

from .rig import Rig
from .sample_apps import Scripted, make_app, make_function


def actions(rig: Rig, request: int | str) -> list[tuple[str, ...]]:
    """The names of each event and of its actions."""
    return [
        (type(entry.event).__name__, *(type(action).__name__ for action in entry.actions))
        for entry in request_trace(rig.entries, str(request)).entries
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


def arrivals(rig: Rig, request: str) -> list[int]:
    """The numbers of the requests that are traced."""
    return [
        entry.event.request_id
        for entry in request_trace(rig.entries, request).entries
        if isinstance(entry.event, RequestArrived)
    ]


def test_the_id_of_the_answer_finds_what_the_number_finds(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(), nodes=1)
    rig.at(0, RequestArrived(0, 0, client_request_id="c0ffee-1"))
    rig.at(0, RequestArrived(1, 0, client_request_id="c0ffee-2"))
    rig.at(1, InstanceStarted(0, 0))
    rig.at(11, BatchFinished(0))
    rig.at(21, BatchFinished(1))
    assert arrivals(rig, "c0ffee-2") == [1]
    assert actions(rig, "c0ffee-2") == actions(rig, 1)
    assert actions(rig, "c0ffee-1") == actions(rig, 0)
    for unknown in ("c0ffee", "C0FFEE-1", "", "01", "-1", "9" * 5_000):
        assert actions(rig, unknown) == []


def test_every_request_that_an_id_may_mean_is_traced(make_rig: type[Rig]) -> None:
    """Requests 1 and 3 are one that was sent again, under an id that is a number, too: 2."""
    rig = make_rig(make_app(), nodes=1)
    for number, id in enumerate(("a", "2", "b", "2")):
        rig.at(0, RequestArrived(number, 0, client_request_id=id))
    assert arrivals(rig, "2") == [1, 2, 3]
    assert arrivals(rig, "b") == [2]


def test_one_id_for_everything_is_traced_up_to_a_limit(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(), nodes=1)
    for number in range(TRACED_MAX + 3):
        rig.at(0, RequestArrived(number, 0, client_request_id="same"))
    assert arrivals(rig, "same") == list(range(TRACED_MAX))
    assert request_trace(rig.entries, "same").left_out == 3
    assert request_trace(rig.entries, "3").left_out == 0
