"""Clients that retry when told to: after a burst they are served, and cost nobody goodput."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from random import Random
from typing import final

import pytest

from headgate.core.clock import SECOND_NS
from headgate.core.model import App, Client, Function, Pipeline, Pool, Profile, Slo, Stage, Variant
from headgate.core.states import Outcome, Settlement
from headgate.metrics.columns import RunColumns
from headgate.planning.admission.refusals import RetryTimes
from headgate.policies import find_policy
from headgate.sim.clients import LogicalRequest
from headgate.sim.interfaces import SimClient, Simulation
from headgate.sim.run import Setup, simulate

MS = 1_000_000
ALONE = (80.0,)
BATCHES = (80.0, 100.0, 120.0, 140.0)
Phases = tuple[tuple[float, float], ...]  # (until, load): load relative to the capacity
BURST: Phases = ((10.0, 0.6), (20.0, 3.0), (90.0, 0.6))


@final
class RetryingClient(SimClient):
    """Sends each request again when it is told to, after a rejection that says when.

    Use an object for one run only; `ended` then has one entry per logical request, in order of
    ending, and `tries` says how often it was sent. A request that is not told when to retry has
    ended, and so has one that was sent `tries_max` times.
    """

    def __init__(self, times_ns: Sequence[int], tries_max: int, *, client: int = 0) -> None:
        assert tries_max >= 1, tries_max
        self._times_ns = sorted(times_ns)
        self._tries_max = tries_max
        self._client = client
        # What will arrive, the first first: arrival, number of submission, first sent, tries.
        self._sending: list[tuple[int, int, int, int]] = []
        self._submitted = 0
        self._open: dict[int, tuple[int, int]] = {}  # by request id: first sent, tries
        self.ended: list[LogicalRequest] = []
        self.tries: list[int] = []

    def on_start(self, simulation: Simulation) -> None:
        for at_ns in self._times_ns:
            self._send(simulation, at_ns, at_ns, 1)

    def _send(self, simulation: Simulation, at_ns: int, sent_ns: int, tries: int) -> None:
        heappush(self._sending, (at_ns, self._submitted, sent_ns, tries))
        self._submitted += 1
        simulation.submit(at_ns, 0, self._client, sender=self)

    def on_arrived(self, simulation: Simulation, now_ns: int, request_id: int) -> None:
        """Note the id of a request: they arrive in the order of their times."""
        _, _, sent_ns, tries = heappop(self._sending)
        self._open[request_id] = (sent_ns, tries)

    def on_settled(
        self, simulation: Simulation, now_ns: int, request_id: int, settlement: Settlement
    ) -> None:
        """Send a rejected request again at the time that the rejection names."""
        sent_ns, tries = self._open.pop(request_id)
        is_rejected = settlement.outcome == Outcome.REJECTED
        if is_rejected and settlement.retry_ns > 0 and tries < self._tries_max:
            self._send(simulation, now_ns + settlement.retry_ns, sent_ns, tries + 1)
        else:
            self.ended.append(LogicalRequest(sent_ns, now_ns, settlement.outcome))
            self.tries.append(tries)


@final
class HammeringClients(SimClient):
    """So many clients that send the next request 10 ms after each answer, until some time."""

    def __init__(self, count: int, until_ns: int, first_ns: int = 0) -> None:
        self._count = count
        self._until_ns = until_ns
        self._first_ns = first_ns
        self.told_ns: list[int] = []  # when to retry, by refusal

    def on_start(self, simulation: Simulation) -> None:
        for number in range(self._count):
            simulation.submit(self._first_ns + number * MS, 0, 0, sender=self)

    def on_settled(
        self, simulation: Simulation, now_ns: int, request_id: int, settlement: Settlement
    ) -> None:
        if settlement.outcome == Outcome.REJECTED:
            self.told_ns.append(settlement.retry_ns)
        if now_ns < self._until_ns:
            simulation.submit(now_ns + 10 * MS, 0, 0, sender=self)


def make_app(times_ms: tuple[float, ...], *, stages: int = 1, clients: int = 1) -> App:
    """A chain of functions of which each has a node of its own."""
    profile = Profile(tuple(int(ms * MS) for ms in times_ms))
    functions = tuple(
        Function(i, f"f{i}", (Variant(i, f"f{i}", i, (i,), profile),)) for i in range(stages)
    )
    chain = tuple(Stage(f, (f.id - 1,) if f.id else ()) for f in functions)
    return App(
        functions,
        (Pipeline(0, "p", chain, Slo(stages * 500 * MS)),),
        tuple(Pool(i, f"n{i}") for i in range(stages)),
        clients=tuple(Client(i, f"c{i}") for i in range(clients)),
    )


def arrivals_ns(seed: int, capacity_per_s: float, phases: Phases) -> list[int]:
    """Poisson arrivals at a load that changes."""
    rng, now_s, times_ns = Random(seed), 0.0, list[int]()
    for until_s, load in phases:
        while (now_s := now_s + rng.expovariate(load * capacity_per_s)) < until_s:
            times_ns.append(int(now_s * SECOND_NS))
        now_s = until_s
    return times_ns


def run(
    times_ms: tuple[float, ...], phases: Phases, tries_max: int, *, stages: int = 1, seed: int = 0
) -> tuple[RetryingClient, RunColumns]:
    capacity_per_s = 1000 * len(times_ms) / times_ms[-1]
    client = RetryingClient(arrivals_ns(seed, capacity_per_s, phases), tries_max)
    setup = Setup(make_app(times_ms, stages=stages), find_policy("headgate"), seed=seed)
    return client, simulate(setup, clients=[client])


def served_share(client: RetryingClient, *, retried_only: bool) -> float:
    """The share of the clients, or of those that had to come back, that were served in time."""
    outcomes = [
        ended.outcome == Outcome.MET
        for ended, tries in zip(client.ended, client.tries, strict=True)
        if tries > 1 or not retried_only
    ]
    assert len(outcomes) > 100
    return sum(outcomes) / len(outcomes)


@pytest.mark.parametrize(
    ("times_ms", "stages"), [(ALONE, 1), (BATCHES, 1), (ALONE, 2)], ids=["one", "batch", "chain"]
)
def test_after_a_burst_those_who_retry_when_told_to_are_served(
    times_ms: tuple[float, ...], stages: int
) -> None:
    """10 s at three times the capacity over 60 %: with two retries 95 % of them are served."""
    client, _ = run(times_ms, BURST, 3, stages=stages)
    assert served_share(client, retried_only=True) >= 0.95
    assert served_share(client, retried_only=False) >= 0.98


def test_most_are_served_when_they_come_back_for_the_first_time() -> None:
    client, _ = run(ALONE, BURST, 2)
    assert served_share(client, retried_only=True) >= 0.8


def test_that_each_answer_is_booked_is_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    """If all are told when the calendar has room for one more, they come back together."""

    def unbooked(
        times: RetryTimes, now_ns: int, pool: int, client: int, earliest_ns: int, spacing: float
    ) -> int:
        return earliest_ns - now_ns

    monkeypatch.setattr(RetryTimes, "tell", unbooked)
    client, _ = run(ALONE, BURST, 3)
    assert served_share(client, retried_only=True) < 0.5


def test_with_retries_for_ever_everybody_is_served_and_soon() -> None:
    """What is left of the node drains the 20 s of work that were refused in some 50 s."""
    client, _ = run(ALONE, BURST, 100)
    assert served_share(client, retried_only=False) == 1.0
    assert max(ended.ended_ns for ended in client.ended) < 100 * SECOND_NS
    assert sum(client.tries) / len(client.tries) < 1.5


@pytest.mark.parametrize("load", [1.2, 2.0, 3.0])
def test_under_lasting_overload_retries_cost_no_goodput(load: float) -> None:
    """At most 5 % of what is served without them."""
    goodput = []
    for tries_max in (1, 50):
        _, columns = run(ALONE, ((30.0, load),), tries_max)
        requests = columns.requests
        is_hit = (requests.outcome == Outcome.MET) & (requests.finished_ns <= 30 * SECOND_NS)
        goodput.append(int(is_hit.sum()))
    assert goodput[1] >= 0.95 * goodput[0]


def test_a_client_that_floods_does_not_send_the_others_away_for_long() -> None:
    """One of two clients is refused a hundred times; the other is told a time of its own."""
    app = make_app(ALONE, clients=2)
    times_ns = [10 * MS * i for i in range(400)]
    flood = RetryingClient(times_ns, 2, client=0)
    polite = RetryingClient([3_000 * MS + 200 * MS * i for i in range(5)], 5, client=1)
    simulate(Setup(app, find_policy("headgate")), clients=[flood, polite])
    longest_ns = max(ended.wait_ns for ended in polite.ended)
    assert all(ended.outcome == Outcome.MET for ended in polite.ended)
    assert longest_ns < 0.5 * max(ended.wait_ns for ended in flood.ended)


def test_what_cannot_be_served_is_not_sent_again() -> None:
    """An infeasible request is told no time, so its client gives up."""
    app = make_app((600.0,))
    client = RetryingClient([0, 5], 9)
    simulate(Setup(app, find_policy("headgate")), clients=[client])
    assert client.tries == [1, 1]
    assert [ended.outcome for ended in client.ended] == [Outcome.REJECTED] * 2


@pytest.mark.parametrize("base", [0.0, 0.5])
def test_who_comes_after_clients_that_ignored_the_time_is_told_a_short_one(base: float) -> None:
    """16 of them for 5 s leave bookings for minutes; the next ones to be refused, 20 s later,
    are told what a burst of their size needs.
    """
    hammering = HammeringClients(16, 5 * SECOND_NS)
    usual = RetryingClient(arrivals_ns(0, 12.5, ((30.0, base),)) if base else [], 1)
    later = HammeringClients(32, 0, first_ns=25 * SECOND_NS)
    setup = Setup(make_app(ALONE), find_policy("headgate"))
    simulate(setup, clients=[hammering, usual, later])
    assert max(hammering.told_ns) > 500 * SECOND_NS
    assert len(later.told_ns) > 20
    assert max(later.told_ns) < 60 * SECOND_NS
