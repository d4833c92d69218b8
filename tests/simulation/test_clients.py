"""Closed-loop clients, the client that plays the queue, and the one that stays to the end."""

from __future__ import annotations

from itertools import pairwise

import pytest

from headgate.core.errors import ConfigError
from headgate.core.events import BatchFinished, RequestArrived, RequestCancelled
from headgate.core.model import Pool
from headgate.core.policy import Policy, PolicyKind
from headgate.core.records import Node, Request, Task
from headgate.core.states import Outcome
from headgate.policies import find_policy
from headgate.sim.clients import PAUSE_NS, DrainWatcher, HedgingClient, LoopClients
from headgate.sim.faults import Fault, FaultPlan
from headgate.sim.interfaces import SimClient
from headgate.sim.run import Setup, simulate
from headgate.workload import ClosedLoop, ConcurrencyStep

from .apps import MS, Seen, at_ms, make_app, run, waits_ms

FOUR = (Pool(0, "gpu", nodes=4),)


def loop(*steps: tuple[int, int], until_ms: int = 100, think_ms: int = 0) -> ClosedLoop:
    """Steps are (from ms, clients)."""
    found = tuple(ConcurrencyStep(at * MS, clients) for at, clients in steps)
    return ClosedLoop(found, until_ms * MS, think_ns=think_ms * MS)


def arrival_times_ms(seen: Seen) -> list[int]:
    return [now_ns // MS for now_ns, event in seen.events if isinstance(event, RequestArrived)]


# --- closed loops ------------------------------------------------------------------------------


def test_one_client_sends_when_it_was_answered() -> None:
    app = make_app(exec_ms=(30,))
    columns, seen = run(app, None, clients=[LoopClients(loop((0, 1)), app)])
    assert arrival_times_ms(seen) == [0, 30, 60, 90]
    assert waits_ms(columns) == [30.0] * 4


def test_a_client_thinks_between_an_answer_and_its_next_request() -> None:
    app = make_app(exec_ms=(30,))
    _, seen = run(app, None, clients=[LoopClients(loop((0, 1), think_ms=20), app)])
    assert arrival_times_ms(seen) == [0, 50]  # the next would be at 100, which is the end


def test_concurrency_goes_up_and_down_in_steps() -> None:
    """Two from 20 on: the second sends at once. One from 60 on: who is answered next leaves."""
    app = make_app(exec_ms=(30,), pools=FOUR)
    clients = [LoopClients(loop((0, 1), (20, 2), (60, 1), until_ms=130), app)]
    _, seen = run(app, None, clients=clients)
    assert arrival_times_ms(seen) == [0, 20, 30, 50, 80, 110]


def test_nobody_is_there_before_the_first_step_or_at_none() -> None:
    app = make_app(exec_ms=(10,))
    clients = [LoopClients(loop((15, 1), (40, 0), (70, 1)), app)]
    _, seen = run(app, None, clients=clients)
    assert arrival_times_ms(seen) == [15, 25, 35, 70, 80, 90]


def test_no_more_are_sent_than_asked_for() -> None:
    app = make_app(exec_ms=(1,))
    limited = ClosedLoop((ConcurrencyStep(0, 3),), 100 * MS, requests_max=7)
    clients = LoopClients(limited, app)
    columns, _ = run(app, None, clients=[clients])
    assert len(columns.requests) == clients.sent == 7


@pytest.mark.parametrize("concurrency", [1, 3, 7])
def test_the_open_requests_are_never_more_than_the_clients(concurrency: int) -> None:
    app = make_app(exec_ms=(7,), pools=FOUR)
    columns, _ = run(app, None, clients=[LoopClients(loop((0, concurrency), think_ms=2), app)])
    requests = columns.requests
    ends = sorted(requests.finished_ns.tolist())
    for count, begin_ns in enumerate(sorted(requests.arrival_ns.tolist()), 1):
        ended = sum(end_ns <= begin_ns for end_ns in ends)
        assert count - ended <= concurrency
    assert len(requests) > 3 * concurrency


class Bouncer(Policy):
    """Turns everybody away."""

    def on_arrival(self, request: Request) -> None:
        self.orders.reject(request, "closed")

    def on_task_ready(self, task: Task) -> None:
        raise AssertionError("everybody was turned away")

    def on_capacity(self, node: Node) -> None:
        pass


def test_a_client_that_is_turned_away_at_once_comes_back_after_a_pause() -> None:
    """Without one it would ask for ever at the same instant."""
    app = make_app()
    columns, seen = run(
        app, None, policy=PolicyKind(Bouncer), clients=[LoopClients(loop((0, 1)), app)]
    )
    times = [now_ns for now_ns, event in seen.events if isinstance(event, RequestArrived)]
    assert {later - earlier for earlier, later in pairwise(times)} == {PAUSE_NS}
    assert set(columns.requests.outcome.tolist()) == {Outcome.REJECTED}


def test_a_loop_names_a_pipeline_and_a_client_of_the_application() -> None:
    app = make_app(exec_ms=(10, 20), clients=2)
    steps = (ConcurrencyStep(0, 1),)
    clients = LoopClients(ClosedLoop(steps, 50 * MS, pipeline="p1", client="c1"), app)
    columns, _ = run(app, None, clients=[clients])
    assert set(columns.requests.pipeline.tolist()) == {1}
    assert set(columns.requests.client.tolist()) == {1}
    with pytest.raises(ConfigError, match=r"pipeline: 'nope'.*allowed: p0, p1"):
        LoopClients(ClosedLoop(steps, MS, pipeline="nope", client="c1"), app)


# --- copies ------------------------------------------------------------------------------------


def test_the_first_answer_counts_and_the_other_copies_are_withdrawn() -> None:
    """One node, three copies: the first runs, the others wait and are withdrawn at 10."""
    app = make_app()
    client = HedgingClient([0, 20 * MS], copies=3)
    columns, seen = run(app, None, clients=[client])
    assert [one.wait_ns for one in client.ended] == [10 * MS, 10 * MS]
    assert [one.outcome for one in client.ended] == [Outcome.MET, Outcome.MET]
    outcomes = [Outcome.MET, Outcome.CANCELLED, Outcome.CANCELLED]
    assert columns.requests.outcome.tolist() == outcomes * 2
    assert seen.count(RequestCancelled) == 4


SLOW = Fault("slow", 0, until_ns=5 * MS, node=1, factor=2.0)


def test_copies_that_run_are_paid_for() -> None:
    """Both copies begin at 1, on two nodes; the slower one runs on for nothing until 21."""
    app = make_app(pools=(Pool(0, "gpu", nodes=2),))
    columns, seen = run(app, at_ms(2, 2), SLOW, clients=[HedgingClient([MS], copies=2)])
    outcomes = [Outcome.MET, Outcome.CANCELLED, Outcome.MET, Outcome.MET]
    assert columns.requests.outcome.tolist() == outcomes
    assert waits_ms(columns)[2:] == [19.0, 29.0]  # begun at 11 and at 21
    assert seen.count(BatchFinished) == 4


def test_the_neighbours_pay_for_copies_that_run() -> None:
    def mean_ms(copies: int) -> float:
        app = make_app(pools=(Pool(0, "gpu", nodes=2),), clients=2)
        client = HedgingClient([ms * MS for ms in range(0, 400, 20)], copies, client=1)
        columns, _ = run(app, at_ms(*range(0, 400, 7)), clients=[client])
        assert len(client.ended) == 20
        clients = columns.requests.client.tolist()
        theirs = [ms for ms, who in zip(waits_ms(columns), clients, strict=True) if who == 0]
        return sum(theirs) / len(theirs)

    assert mean_ms(copies=4) > 1.1 * mean_ms(copies=1)


def test_when_no_copy_is_answered_the_last_one_to_end_counts() -> None:
    client = HedgingClient([0], copies=2)
    run(make_app(), None, policy=PolicyKind(Bouncer), clients=[client])
    assert [(one.wait_ns, one.outcome) for one in client.ended] == [(0, Outcome.REJECTED)]


def test_a_copying_client_sends_something() -> None:
    with pytest.raises(ConfigError, match="copies: 0: must be positive"):
        HedgingClient([0], copies=0)


# --- the straggler -----------------------------------------------------------------------------


@pytest.mark.parametrize("stays", [False, True])
def test_a_straggler_sees_the_end_of_what_nobody_waits_for(stays: bool) -> None:
    """A copy is answered at 11; the other runs on until 21, and only the straggler cares."""
    app = make_app(pools=(Pool(0, "gpu", nodes=2),))
    setup = Setup(app, find_policy("balance"), faults=FaultPlan((SLOW,)).actions())
    clients: list[SimClient] = [HedgingClient([MS], copies=2)]
    if stays:
        clients.append(DrainWatcher(2 * MS))
    seen = Seen()
    simulate(setup, None, clients=clients, observer=seen)
    assert seen.count(BatchFinished) == 1 + stays
