"""A gateway crashes: its requests fail once each, its instances live on, and F is wrong a while."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headgate.core.actions import ReportWouldReject
from headgate.core.clock import NEVER_NS
from headgate.core.events import (
    BatchFinished,
    Event,
    GatewaysChanged,
    InstanceAppeared,
    NodeJoined,
    RequestArrived,
)
from headgate.core.ids import owner
from headgate.core.model import OBSERVE, App, Limits, Pool
from headgate.core.states import Outcome
from headgate.policies import find_policy
from headgate.sim.clients import LoopClients
from headgate.sim.faults import Fault
from headgate.workload import ClosedLoop, ConcurrencyStep

from .apps import MS, RecordingObserver, at_ms, make_app, run
from .policies import SHARE

TWO = (Pool(0, "gpu", nodes=2),)


def retiring(app: App, unused_ms: int = 20, retire_ms: int = 20) -> App:
    """The same with timeouts: an instance that nobody knows what to do with must stop."""
    functions = tuple(
        replace(
            function,
            variants=tuple(
                replace(v, unused_after_ns=unused_ms * MS, retire_after_ns=retire_ms * MS)
                for v in function.variants
            ),
        )
        for function in app.functions
    )
    stages = [replace(p.stages[0], function=f) for p, f in zip(app.pipelines, functions)]  # noqa: B905
    pipelines = tuple(replace(p, stages=(s,)) for p, s in zip(app.pipelines, stages))  # noqa: B905
    return replace(app, functions=functions, pipelines=pipelines)


def crash(gateway: int, at_ms: int, until_ms: int) -> Fault:
    return Fault("crash_gateway", at_ms * MS, until_ns=until_ms * MS, gateway=gateway)


def counts(observer: RecordingObserver) -> list[tuple[float, int, int]]:
    """When each Scheduler was told how many gateways there are."""
    return [
        (now_ns / MS, scheduler, event.count)
        for now_ns, scheduler, event in observer.handled
        if isinstance(event, GatewaysChanged)
    ]


def handled_by(observer: RecordingObserver, scheduler: int, kind: type[Event]) -> list[float]:
    return [
        now_ns / MS
        for now_ns, handler, event in observer.handled
        if handler == scheduler and isinstance(event, kind)
    ]


def test_the_open_requests_of_a_crashed_gateway_fail_and_no_others() -> None:
    """Two gateways, many requests of 10 ms on two nodes; one dies at 47 and stays away."""
    app = retiring(make_app(pools=TWO, limits=Limits(refusals_max=1_000)))
    columns, observer = run(
        app, at_ms(*range(0, 100, 2)), crash(0, 47, 900), policy=SHARE, schedulers=2
    )
    receivers = {
        event.request_id: scheduler
        for _, scheduler, event in observer.handled
        if isinstance(event, RequestArrived)
    }
    outcomes = columns.requests.outcome.tolist()
    finished_ms = (columns.requests.finished_ns / MS).tolist()
    failed = [i for i, outcome in enumerate(outcomes) if outcome == Outcome.FAILED]
    assert failed
    assert all(receivers[i] == 0 and finished_ms[i] == 47 for i in failed)
    assert all(outcomes[i] == Outcome.MET for i in range(50) if i not in failed)
    # The load balancer notices at once: what arrives later goes to the other one.
    assert {receivers[i] for i in range(50) if i * 2 > 47} == {1}


def test_the_others_learn_after_a_while_how_many_are_left() -> None:
    app = retiring(make_app(pools=TWO))
    columns, observer = run(
        app,
        at_ms(0, 150, 250),
        crash(1, 40, 100),
        policy=SHARE,
        schedulers=3,
        membership_delay_ns=25 * MS,
        drain_ns=10**3 * MS,
    )
    assert sorted(counts(observer)) == [
        (65, 0, 2),
        (65, 2, 2),
        (100, 3, 3),  # the new one is told at once
        (125, 0, 3),
        (125, 2, 3),
        (125, 3, 3),
    ]
    assert Outcome.FAILED not in columns.requests.outcome[1:].tolist()


def test_news_of_a_crash_that_has_been_repaired_comes_in_order() -> None:
    """The gateway is back before anybody has noticed: two, then three."""
    _, observer = run(
        retiring(make_app(pools=TWO)),
        at_ms(0, 100),
        crash(1, 40, 50),
        policy=SHARE,
        schedulers=3,
        membership_delay_ns=25 * MS,
        drain_ns=10**3 * MS,
    )
    told = [entry for entry in counts(observer) if entry[1] == 0]
    assert told == [(65, 0, 2), (75, 0, 3)]


def test_the_instance_of_a_crashed_gateway_is_used_by_the_others() -> None:
    """It started at 5 by the gateway that dies at 7. The other one sends its requests there."""
    app = retiring(make_app(start_ms=5, exec_ms=(1,)), unused_ms=500)
    for gateway in range(2):  # whichever of them starts it
        columns, observer = run(
            app,
            at_ms(*range(0, 60, 3)),
            crash(gateway, 7, 10**4),
            policy=SHARE,
            schedulers=2,
        )
        late = columns.requests.outcome[4:].tolist()
        assert set(late) == {Outcome.MET}
        other = 1 - gateway
        assert handled_by(observer, other, BatchFinished)
        assert not [at for at in handled_by(observer, gateway, BatchFinished) if at > 7]


def test_a_start_that_is_under_way_when_its_gateway_crashes_is_seen_by_the_others() -> None:
    app = retiring(make_app(start_ms=20, exec_ms=(1,), pools=TWO), unused_ms=500)
    columns, observer = run(
        app, at_ms(0), crash(0, 5, 10**4), crash(1, 5, 10), policy=SHARE, schedulers=2
    )
    # One of the two has received the request and ordered a start; both die. The third one, which
    # replaces the second, comes while it starts.
    assert columns.requests.outcome.tolist() == [Outcome.FAILED]
    appeared = handled_by(observer, 2, InstanceAppeared)
    assert appeared == [20]


def test_a_gateway_that_replaces_another_is_told_what_there_is() -> None:
    """Nodes, and instances that have started: also those of the one that it replaces."""
    app = retiring(make_app(start_ms=5, pools=TWO), unused_ms=500)
    columns, observer = run(app, at_ms(0, 40, 50), crash(0, 8, 30), policy=SHARE, drain_ns=99 * MS)
    assert columns.requests.outcome.tolist() == [Outcome.FAILED, Outcome.MET, Outcome.MET]
    assert handled_by(observer, 1, NodeJoined) == [30, 30]
    joined = [e for _, index, e in observer.handled if isinstance(e, NodeJoined) and index == 1]
    assert [[owner(id) for id in e.instances[::3]] for e in joined] == [[0], []]
    assert len(columns.requests) == 3


def test_while_all_gateways_are_down_requests_fail_at_once() -> None:
    app = retiring(make_app(pools=TWO))
    columns, _ = run(
        app,
        at_ms(0, 30, 35, 60),
        crash(0, 20, 50),
        crash(1, 20, 40),
        policy=SHARE,
        schedulers=2,
        drain_ns=10**3 * MS,
    )
    assert columns.requests.outcome.tolist() == [
        Outcome.MET,
        Outcome.FAILED,
        Outcome.FAILED,
        Outcome.MET,
    ]
    assert (columns.requests.finished_ns / MS).tolist()[1:3] == [30, 35]


@pytest.mark.parametrize("decision_ns", [0, MS])
def test_clients_are_told_of_requests_that_crashed_with_their_gateway(decision_ns: int) -> None:
    """A closed loop: whoever is not told of an outcome never sends its next request."""
    app = retiring(make_app(pools=TWO, limits=Limits(refusals_max=1_000)))
    loop = ClosedLoop((ConcurrencyStep(0, 6),), 300 * MS, pipeline="p0", client="c0")
    columns, observer = run(
        app,
        None,
        crash(0, 50, 120),
        crash(1, 80, 200),
        clients=[LoopClients(loop, app)],
        policy=SHARE,
        schedulers=2,
        decision_ns=decision_ns,
    )
    outcomes = columns.requests.outcome.tolist()
    assert outcomes.count(Outcome.FAILED) >= 2
    assert NEVER_NS not in columns.requests.finished_ns.tolist()
    assert {scheduler for _, scheduler, _ in observer.handled} == {0, 1, 2, 3}


def test_what_a_gateway_was_about_to_report_is_lost_with_it() -> None:
    """A rejection that is only observed is decided at 10, and would be reported at 12."""
    app = make_app(latency_ms=5, limits=Limits(admission=OBSERVE))
    columns, observer = run(
        app, at_ms(10, 40), crash(0, 11, 30), policy=find_policy("headgate"), decision_ns=2 * MS
    )
    reported = [a.request_id for a in observer.actions if isinstance(a, ReportWouldReject)]
    assert reported == [0, 1]
    assert columns.requests.would_reject.tolist() == [False, True]


@pytest.mark.parametrize("gateways", [1, 2, 3])
def test_the_default_policy_goes_on_when_a_gateway_crashes(gateways: int) -> None:
    """It picks nodes by itself, also those that another gateway uses; nodes queue one batch."""
    pools = (Pool(0, "gpu", nodes=4, queue_max=1),)
    app = make_app(start_ms=50, pools=pools, latency_ms=200)
    columns, observer = run(
        app,
        at_ms(*range(0, 3_000, 5)),
        crash(0, 1_000, 1_500),
        policy=find_policy("headgate"),
        schedulers=gateways,
        membership_delay_ns=100 * MS,
    )
    outcomes = columns.requests.outcome.tolist()
    down = 100 if gateways == 1 else 0  # then nobody takes the requests of half a second
    assert down <= outcomes.count(Outcome.FAILED) <= down + 8
    assert outcomes.count(Outcome.MET) >= 600 - down - 20
    assert handled_by(observer, gateways, RequestArrived)  # by the one that replaces it
