"""Simulated clients that react to responses: closed loops, hedging, those of a log."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, final

from headgate.core.clock import MILLISECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.model import App, Pipeline
from headgate.core.model import Client as DeclaredClient
from headgate.core.states import Outcome, Settlement
from headgate.sim.interfaces import SimClient, Simulation
from headgate.workload import Arrivals, ClosedLoop

# Pause of a closed-loop client after a request that was not answered. Without it a client that has
# no think time and is rejected at once would retry for ever within one instant.
PAUSE_NS: Final = MILLISECOND_NS


@final
class LoopClients(SimClient):
    """All clients of one `ClosedLoop`: each sends its next request when its previous one ended.

    Where the concurrency falls, clients leave after their next response; where it rises, new
    clients send at once. Use an object for one run only.
    """

    def __init__(self, loop: ClosedLoop, app: App) -> None:
        self._loop = loop
        self._pipeline = id_of(loop.pipeline, app.pipelines, "pipeline")
        self._client = id_of(loop.client, app.clients, "client")
        self._active = 0  # clients that wait for a response, think or pause
        self._thinking: deque[int] = deque()  # when the think times end, ascending
        self._pausing: deque[int] = deque()  # when the pauses after unanswered requests end
        self.sent = 0

    def on_start(self, simulation: Simulation) -> None:
        for step in self._loop.steps:
            if step.at_ns < self._loop.duration_ns:
                simulation.wake_client(step.at_ns, self)

    def on_wake(self, simulation: Simulation, now_ns: int) -> None:
        """Send the next requests of clients whose think time is over, and those of new clients."""
        for waiting in (self._thinking, self._pausing):
            while waiting and waiting[0] <= now_ns:
                waiting.popleft()
                self._active -= 1
        most = inf if self._loop.requests_max is None else self._loop.requests_max
        while self._active < self._loop.clients_at(now_ns) and self.sent < most:
            self._active += 1
            self.sent += 1
            simulation.submit(now_ns, self._pipeline, self._client, sender=self)

    def on_settled(
        self, simulation: Simulation, now_ns: int, request_id: int, settlement: Settlement
    ) -> None:
        """Begin the think time, or a pause if the request was not answered."""
        if settlement.outcome in (Outcome.MET, Outcome.LATE) or self._loop.think_ns >= PAUSE_NS:
            at_ns = now_ns + self._loop.think_ns
            self._thinking.append(at_ns)
        else:
            at_ns = now_ns + PAUSE_NS
            self._pausing.append(at_ns)
        simulation.wake_client(at_ns, self)


@dataclass(frozen=True, slots=True)
class LogicalRequest:
    """One request from the client's point of view, however many copies of it were sent."""

    sent_ns: int
    ended_ns: int
    outcome: int  # of the copy that was answered first, else of the last copy to end

    @property
    def wait_ns(self) -> int:
        """The time from sending to the first response, or to the end of the last copy."""
        return self.ended_ns - self.sent_ns


@final
class HedgingClient(SimClient):
    """Sends `copies` of each request and cancels the others when the first is answered.

    In a single queue such a client is served sooner, at the expense of the other clients. Use an
    object for one run only; `ended` then has one entry per logical request, in order of ending.
    """

    def __init__(self, times_ns: Sequence[int], copies: int, *, client: int = 0) -> None:
        if copies < 1:
            raise ConfigError("must be positive", key="copies", value=copies)
        self._times_ns = list(times_ns)
        self._copies = copies
        self._client = client
        self._sending: deque[_Group] = deque()  # one entry per copy that has not arrived yet
        self._groups: dict[int, _Group] = {}  # by request id
        self.ended: list[LogicalRequest] = []

    def on_start(self, simulation: Simulation) -> None:
        for at_ns in sorted(self._times_ns):
            group = _Group(at_ns)
            for _ in range(self._copies):
                self._sending.append(group)
                simulation.submit(at_ns, 0, self._client, sender=self)

    def on_arrived(self, simulation: Simulation, now_ns: int, request_id: int) -> None:
        """Note the id of a copy: copies arrive in the order in which they were sent."""
        group = self._sending.popleft()
        group.open.append(request_id)
        group.copies += 1
        self._groups[request_id] = group
        if group.is_answered:  # before this copy arrived
            simulation.cancel(now_ns, request_id)

    def on_settled(
        self, simulation: Simulation, now_ns: int, request_id: int, settlement: Settlement
    ) -> None:
        """Take the first response and cancel the other copies."""
        outcome = settlement.outcome
        group = self._groups.pop(request_id)
        group.open.remove(request_id)
        if group.is_answered:
            return
        group.is_answered = outcome in (Outcome.MET, Outcome.LATE)
        if group.is_answered or (group.copies == self._copies and not group.open):
            self.ended.append(LogicalRequest(group.sent_ns, now_ns, outcome))
        if group.is_answered:
            for other_id in group.open:
                simulation.cancel(now_ns, other_id)


@final
class LoggedClients(SimClient):
    """Sends arrivals whose requests bring terms of their own: deadlines, costs, cancellations.

    Arrivals without terms are read by the engine itself, which is faster. Each request submits the
    next one, so that the event queue holds one of them at a time. Use an object for one run only.
    """

    def __init__(self, arrivals: Arrivals, app: App) -> None:
        terms = arrivals.terms
        assert terms is not None, "the engine reads arrivals without terms"
        pipelines = [id_of(name, app.pipelines, "pipeline") for name in arrivals.pipelines]
        clients = [id_of(name, app.clients, "client") for name in arrivals.clients]
        self._rows = zip(
            arrivals.times_ns.tolist(),
            [pipelines[index] for index in arrivals.pipeline.tolist()],
            [clients[index] for index in arrivals.client.tolist()],
            arrivals.sizes.tolist(),
            arrivals.priorities.tolist(),
            terms.timeout_ns.tolist(),
            terms.cost_usd.tolist(),
            terms.payload_bytes.tolist(),
            strict=True,
        )
        self._cancel_ns: list[int] = terms.cancel_ns.tolist()
        self._arrived = 0

    def on_start(self, simulation: Simulation) -> None:
        self._send_next(simulation)

    def on_arrived(self, simulation: Simulation, now_ns: int, request_id: int) -> None:
        """Send the next request; cancel this one when its client did."""
        cancel_ns = self._cancel_ns[self._arrived]
        self._arrived += 1
        if cancel_ns:
            simulation.cancel(now_ns + cancel_ns, request_id)
        self._send_next(simulation)

    def _send_next(self, simulation: Simulation) -> None:
        row = next(self._rows, None)
        if row is None:
            return
        at_ns, pipeline, client, items, priority, timeout_ns, cost_usd, payload_bytes = row
        simulation.submit(
            at_ns, pipeline, client, items, self, priority, timeout_ns, cost_usd, payload_bytes
        )


@final
class DrainWatcher(SimClient):
    """Keeps a run going at least until `until_ns`, nothing is in flight and no other client waits.

    Without it a run ends with its last open request, although batches of cancelled or timed-out
    requests may still be running. Checkers that want to see those end need this client.
    """

    def __init__(self, until_ns: int) -> None:
        self._until_ns = until_ns

    def on_start(self, simulation: Simulation) -> None:
        simulation.wake_client(self._until_ns, self)

    def on_wake(self, simulation: Simulation, now_ns: int) -> None:
        """Check again later while the run is not over; the interval grows with the time."""
        if simulation.has_pending_work() or simulation.open_requests():
            simulation.wake_client(now_ns + max(PAUSE_NS, now_ns // 4), self)


@final
class _Group:
    """The copies of one logical request."""

    __slots__ = ("copies", "is_answered", "open", "sent_ns")

    def __init__(self, sent_ns: int) -> None:
        self.sent_ns = sent_ns
        self.copies = 0  # copies that have arrived
        self.open: list[int] = []  # ids of the copies that have arrived and not ended
        self.is_answered = False


def id_of(name: str, declared: Sequence[Pipeline | DeclaredClient], kind: str) -> int:
    """Return the id of the pipeline or client of this name; if only one exists, any name fits."""
    if len(declared) == 1:
        return declared[0].id
    for candidate in declared:
        if candidate.name == name:
            return candidate.id
    allowed = ", ".join(candidate.name for candidate in declared)
    problem = f"the workload names a {kind} that the application does not have"
    raise ConfigError(problem, key=kind, value=name, allowed=allowed)
