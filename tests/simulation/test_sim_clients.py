"""Simulated clients: closed loops, hedging, and the drain watcher."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from headgate.core.actions import Dispatch
from headgate.core.errors import ConfigError
from headgate.core.events import BatchFinished, RequestArrived, RequestCancelled
from headgate.core.model import Pool
from headgate.core.policy import Policy, PolicyKind
from headgate.core.records import STAGES_MAX, Node, Request, Task
from headgate.core.states import Outcome, Settlement
from headgate.metrics.columns import NOWHERE
from headgate.policies import find_policy
from headgate.sim.clients import PAUSE_NS, DrainWatcher, HedgingClient, LoopClients
from headgate.sim.faults import Fault, FaultPlan
from headgate.sim.interfaces import SimClient, Simulation
from headgate.sim.run import Setup, simulate
from headgate.workload import ClosedLoop, ConcurrencyStep, RequestTerms
from headgate.workload.arrivals import no_terms

from .apps import MS, RecordingObserver, at_ms, make_app, run, waits_ms

FOUR = (Pool(0, "gpu", nodes=4),)


def loop(*steps: tuple[int, int], until_ms: int = 100, think_ms: int = 0) -> ClosedLoop:
    """Steps are (from ms, clients)."""
    concurrency = tuple(ConcurrencyStep(at * MS, clients) for at, clients in steps)
    return ClosedLoop(concurrency, until_ms * MS, think_ns=think_ms * MS)


def arrival_times_ms(observer: RecordingObserver) -> list[int]:
    return [now_ns // MS for now_ns, event in observer.events if isinstance(event, RequestArrived)]


def test_a_client_sends_when_its_request_is_answered() -> None:
    app = make_app(exec_ms=(30,))
    columns, observer = run(app, None, clients=[LoopClients(loop((0, 1)), app)])
    assert arrival_times_ms(observer) == [0, 30, 60, 90]
    assert waits_ms(columns) == [30.0] * 4


def test_a_client_thinks_between_response_and_next_request() -> None:
    app = make_app(exec_ms=(30,))
    _, observer = run(app, None, clients=[LoopClients(loop((0, 1), think_ms=20), app)])
    assert arrival_times_ms(observer) == [0, 50]  # the next would be at 100, which is the end


def test_concurrency_goes_up_and_down_in_steps() -> None:
    """Two from 20 on: the second sends at once. One from 60 on: the next answered client leaves."""
    app = make_app(exec_ms=(30,), pools=FOUR)
    clients = [LoopClients(loop((0, 1), (20, 2), (60, 1), until_ms=130), app)]
    _, observer = run(app, None, clients=clients)
    assert arrival_times_ms(observer) == [0, 20, 30, 50, 80, 110]


def test_no_clients_before_the_first_step_or_at_zero() -> None:
    app = make_app(exec_ms=(10,))
    clients = [LoopClients(loop((15, 1), (40, 0), (70, 1)), app)]
    _, observer = run(app, None, clients=clients)
    assert arrival_times_ms(observer) == [15, 25, 35, 70, 80, 90]


def test_requests_max_ends_the_loop() -> None:
    app = make_app(exec_ms=(1,))
    limited = ClosedLoop((ConcurrencyStep(0, 3),), 100 * MS, requests_max=7)
    clients = LoopClients(limited, app)
    columns, _ = run(app, None, clients=[clients])
    assert len(columns.requests) == clients.sent == 7


@pytest.mark.parametrize("concurrency", [1, 3, 7])
def test_open_requests_never_exceed_the_concurrency(concurrency: int) -> None:
    app = make_app(exec_ms=(7,), pools=FOUR)
    clients = [LoopClients(loop((0, concurrency), think_ms=2), app)]
    columns, observer = run(app, None, clients=clients)
    requests = columns.requests
    ends = sorted(requests.finished_ns.tolist())
    for count, begin_ns in enumerate(sorted(requests.arrival_ns.tolist()), 1):
        ended = sum(end_ns <= begin_ns for end_ns in ends)
        assert count - ended <= concurrency
    assert len(requests) > 3 * concurrency
    sent = [action for action in observer.actions if isinstance(action, Dispatch)]
    nodes = {
        task_id // STAGES_MAX: action.node_id for action in sent for task_id in action.task_ids
    }
    assert dict(enumerate(requests.node.tolist())) == nodes
    assert set(requests.pool.tolist()) == {0}


class RejectAll(Policy):
    """Rejects every request."""

    def on_arrival(self, request: Request) -> None:
        self.orders.reject(request, Settlement(Outcome.REJECTED, "closed"))

    def on_task_ready(self, task: Task) -> None:
        raise AssertionError("every request is rejected on arrival")

    def on_capacity(self, node: Node) -> None:
        pass


def test_a_rejected_client_pauses_before_its_next_request() -> None:
    """Without a pause it would send for ever at the same instant."""
    app = make_app()
    columns, observer = run(
        app, None, policy=PolicyKind(RejectAll), clients=[LoopClients(loop((0, 1)), app)]
    )
    times = [now_ns for now_ns, event in observer.events if isinstance(event, RequestArrived)]
    assert {later - earlier for earlier, later in pairwise(times)} == {PAUSE_NS}
    assert set(columns.requests.outcome.tolist()) == {Outcome.REJECTED}
    assert set(columns.requests.pool.tolist()) == set(columns.requests.node.tolist()) == {NOWHERE}


def test_a_loop_names_a_pipeline_and_a_client_of_the_application() -> None:
    app = make_app(exec_ms=(10, 20), clients=2)
    steps = (ConcurrencyStep(0, 1),)
    clients = LoopClients(ClosedLoop(steps, 50 * MS, pipeline="p1", client="c1"), app)
    columns, _ = run(app, None, clients=[clients])
    assert set(columns.requests.pipeline.tolist()) == {1}
    assert set(columns.requests.client.tolist()) == {1}
    with pytest.raises(ConfigError, match=r"pipeline: 'nope'.*allowed: p0, p1"):
        LoopClients(ClosedLoop(steps, MS, pipeline="nope", client="c1"), app)


def test_the_first_response_counts_and_other_copies_are_cancelled() -> None:
    """One node, three copies: the first runs, the others wait and are cancelled at 10."""
    app = make_app()
    client = HedgingClient([0, 20 * MS], copies=3)
    columns, observer = run(app, None, clients=[client])
    assert [one.wait_ns for one in client.ended] == [10 * MS, 10 * MS]
    assert [one.outcome for one in client.ended] == [Outcome.MET, Outcome.MET]
    outcomes = [Outcome.MET, Outcome.CANCELLED, Outcome.CANCELLED]
    assert columns.requests.outcome.tolist() == outcomes * 2
    assert observer.count(RequestCancelled) == 4


SLOW = Fault("slow", 0, until_ns=5 * MS, node=1, factor=2.0)


def test_running_copies_still_cost_service_time() -> None:
    """Both copies begin at 1, on two nodes; the slower one runs on in vain until 21."""
    app = make_app(pools=(Pool(0, "gpu", nodes=2),))
    columns, observer = run(app, at_ms(2, 2), SLOW, clients=[HedgingClient([MS], copies=2)])
    outcomes = [Outcome.MET, Outcome.CANCELLED, Outcome.MET, Outcome.MET]
    assert columns.requests.outcome.tolist() == outcomes
    assert waits_ms(columns)[2:] == [19.0, 29.0]  # begun at 11 and at 21
    assert observer.count(BatchFinished) == 4


def test_running_copies_delay_other_clients() -> None:
    def mean_ms(copies: int) -> float:
        app = make_app(pools=(Pool(0, "gpu", nodes=2),), clients=2)
        client = HedgingClient([ms * MS for ms in range(0, 400, 20)], copies, client=1)
        columns, _ = run(app, at_ms(*range(0, 400, 7)), clients=[client])
        assert len(client.ended) == 20
        clients = columns.requests.client.tolist()
        others = [ms for ms, client in zip(waits_ms(columns), clients, strict=True) if client == 0]
        return sum(others) / len(others)

    assert mean_ms(copies=4) > 1.1 * mean_ms(copies=1)


def test_without_a_response_the_last_copy_to_end_counts() -> None:
    client = HedgingClient([0], copies=2)
    run(make_app(), None, policy=PolicyKind(RejectAll), clients=[client])
    assert [(one.wait_ns, one.outcome) for one in client.ended] == [(0, Outcome.REJECTED)]


def test_a_hedging_client_sends_at_least_one_copy() -> None:
    with pytest.raises(ConfigError, match="copies: 0: must be positive"):
        HedgingClient([0], copies=0)


class UrgentSender(SimClient):
    """Sends three requests at once, the last of which claims to be urgent."""

    def on_start(self, simulation: Simulation) -> None:
        for priority in (0, 0, -3):
            simulation.submit(0, 0, 0, priority=priority)


def test_a_request_arrives_with_the_priority_that_its_client_claims() -> None:
    """The first request runs from 0 to 10; the last one arrives last and is served second."""
    columns, observer = run(
        make_app(), None, policy=find_policy("headgate"), clients=[UrgentSender()]
    )
    arrived = [event for _, event in observer.events if isinstance(event, RequestArrived)]
    assert [event.priority for event in arrived] == [0, 0, -3]
    assert waits_ms(columns) == [10.0, 30.0, 20.0]


@pytest.mark.parametrize("sent_ms", [1, 50])
@pytest.mark.parametrize("has_watcher", [False, True])
def test_a_drain_watcher_sees_the_end_of_abandoned_batches(has_watcher: bool, sent_ms: int) -> None:
    """A copy is answered after 10; the other runs for 20, which only the watcher waits for.

    It does so as well where nothing is in flight when it first looks: a client has yet to send.
    """
    slow = replace(SLOW, until_ns=sent_ms * MS + MS)
    app = make_app(pools=(Pool(0, "gpu", nodes=2),))
    setup = Setup(app, find_policy("balance"), faults=FaultPlan((slow,)).actions())
    clients: list[SimClient] = [HedgingClient([sent_ms * MS], copies=2)]
    if has_watcher:
        clients.append(DrainWatcher(2 * MS))
    observer = RecordingObserver()
    simulate(setup, None, clients=clients, observer=observer)
    assert observer.count(BatchFinished) == 1 + has_watcher


def test_requests_of_a_log_bring_terms_of_their_own() -> None:
    """One node, 30 ms each: the second client leaves at 20 ms, the third gives up at its deadline.

    Without terms the same arrivals would all be served: 30, 60 and 90 ms.
    """
    app = make_app(exec_ms=(30,))
    terms = RequestTerms(
        np.array([0, 0, 25 * MS]),
        np.array([0, 20 * MS, 0]),
        np.array([0.0, 0.5, 0.0]),
        np.zeros(3, int),
    )
    arrivals = replace(at_ms(0, 0, 0), terms=terms)
    columns, observer = run(app, arrivals)
    assert columns.requests.outcome.tolist() == [Outcome.MET, Outcome.CANCELLED, Outcome.EXPIRED]
    assert (columns.requests.finished_ns // MS).tolist() == [30, 20, 25]
    assert columns.requests.deadline_ns[2] == 25 * MS
    costs = [e.cost_usd for _, e in observer.events if isinstance(e, RequestArrived)]
    assert costs == [0.0, 0.5, 0.0]
    nothing = replace(at_ms(0, 0, 0), terms=no_terms(3))
    with_terms, without = run(app, nothing)[0], run(app, at_ms(0, 0, 0))[0]
    assert with_terms.requests.finished_ns.tolist() == without.requests.finished_ns.tolist()
    assert (without.requests.finished_ns // MS).tolist() == [30, 60, 90]
