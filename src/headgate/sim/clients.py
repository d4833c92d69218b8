"""Clients that wait for their answers: closed loops, and one that plays the queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from headgate.core.clock import MILLISECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.events import Rank
from headgate.core.model import App, Pipeline
from headgate.core.model import Client as DeclaredClient
from headgate.core.states import Outcome
from headgate.sim.engine import Engine
from headgate.sim.interfaces import SimClient
from headgate.workload import ClosedLoop

# A client that got no answer asks again only after this pause: one that is turned away at once,
# and does not think, would else ask for ever at one instant.
PAUSE_NS: Final = MILLISECOND_NS


@final
class LoopClients(SimClient):
    """All clients of one `ClosedLoop`: each sends its next request when its last has ended.

    Where concurrency falls, those that have just had an answer leave; where it rises, new ones
    send at once. Good for one run.
    """

    def __init__(self, loop: ClosedLoop, app: App) -> None:
        self._loop = loop
        self._pipeline = _id_of(loop.pipeline, app.pipelines, "pipeline")
        self._client = _id_of(loop.client, app.clients, "client")
        self._present = 0  # clients that wait for an answer or think
        self._thinking: deque[int] = deque()  # when each that thinks has done so; ascending
        self._pausing: deque[int] = deque()  # and each that got no answer
        self.sent = 0

    def on_start(self, engine: Engine) -> None:
        """Look at the clock whenever the concurrency changes."""
        for step in self._loop.steps:
            if step.at_ns < self._loop.duration_ns:
                engine.wake_client(step.at_ns, self)

    def on_wake(self, engine: Engine, now_ns: int) -> None:
        """Let those go on who have thought enough, and new ones come."""
        for waiting in (self._thinking, self._pausing):
            while waiting and waiting[0] <= now_ns:
                waiting.popleft()
                self._present -= 1
        while self._present < self._loop.clients_at(now_ns) and self._may_send():
            self._present += 1
            self.sent += 1
            engine.submit(now_ns, self._pipeline, self._client, sender=self)

    def on_settled(self, engine: Engine, now_ns: int, request_id: int, outcome: int) -> None:
        """Think, then send the next one."""
        if outcome in (Outcome.MET, Outcome.LATE) or self._loop.think_ns >= PAUSE_NS:
            at_ns = now_ns + self._loop.think_ns
            self._thinking.append(at_ns)
        else:
            at_ns = now_ns + PAUSE_NS
            self._pausing.append(at_ns)
        engine.wake_client(at_ns, self)

    def _may_send(self) -> bool:
        return self._loop.requests_max is None or self.sent < self._loop.requests_max


@dataclass(frozen=True, slots=True)
class LogicalRequest:
    """What the client wanted once, however many copies it sent."""

    sent_ns: int
    ended_ns: int
    outcome: int  # of the copy that was answered first, else of the last one to end

    @property
    def wait_ns(self) -> int:
        """From sending to the end."""
        return self.ended_ns - self.sent_ns


@final
class HedgingClient(SimClient):
    """Sends `copies` of each request and, when the first is answered, withdraws the others.

    A single queue serves such a client sooner than its neighbours, who pay for it. Good for one
    run; `ended` then has one entry per logical request, in the order they ended.
    """

    def __init__(
        self, times_ns: Sequence[int], copies: int, *, pipeline: int = 0, client: int = 0
    ) -> None:
        if copies < 1:
            raise ConfigError("must be positive", key="copies", value=copies)
        self._times_ns = list(times_ns)
        self._copies = copies
        self._pipeline = pipeline
        self._client = client
        self._sending: deque[_Group] = deque()  # one entry per copy that has not arrived yet
        self._groups: dict[int, _Group] = {}  # by request id
        self.ended: list[LogicalRequest] = []

    def on_start(self, engine: Engine) -> None:
        """Send everything in its time."""
        for at_ns in sorted(self._times_ns):
            group = _Group(at_ns)
            for _ in range(self._copies):
                self._sending.append(group)
                engine.submit(at_ns, self._pipeline, self._client, sender=self)

    def on_arrived(self, engine: Engine, now_ns: int, request_id: int) -> None:
        """Note the id of a copy. They arrive in the order they were sent."""
        group = self._sending.popleft()
        group.open.append(request_id)
        group.copies += 1
        self._groups[request_id] = group
        if group.is_answered:  # while the others were still on their way
            engine.cancel(now_ns, request_id)

    def on_settled(self, engine: Engine, now_ns: int, request_id: int, outcome: int) -> None:
        """Take the first answer; the other copies are wanted no longer."""
        group = self._groups.pop(request_id)
        group.open.remove(request_id)
        if group.is_answered:
            return
        group.is_answered = outcome in (Outcome.MET, Outcome.LATE)
        if group.is_answered or (group.copies == self._copies and not group.open):
            self.ended.append(LogicalRequest(group.sent_ns, now_ns, outcome))
        if group.is_answered:
            for other_id in group.open:
                engine.cancel(now_ns, other_id)


@final
class DrainWatcher(SimClient):
    """Sends nothing, but keeps the run going until nothing is in flight any more.

    A run is over when every request has ended, though batches may be out that nobody waits for.
    Who wants to see how those end stays on, at least until `until_ns`.
    """

    def __init__(self, until_ns: int) -> None:
        self._until_ns = until_ns

    def on_start(self, engine: Engine) -> None:
        """Look when the others have left."""
        engine.wake_client(self._until_ns, self)

    def on_wake(self, engine: Engine, now_ns: int) -> None:
        """Stay as long as there is anything but timers to come; look ever more seldom."""
        is_busy = any(entry[1] == Rank.COMPLETION for entry in engine.agenda.heap)
        if is_busy or engine.recorder.open_rows():
            engine.wake_client(now_ns + max(PAUSE_NS, now_ns // 4), self)


@final
class _Group:
    """The copies of one logical request."""

    __slots__ = ("copies", "is_answered", "open", "sent_ns")

    def __init__(self, sent_ns: int) -> None:
        self.sent_ns = sent_ns
        self.copies = 0  # that have arrived
        self.open: list[int] = []  # request ids
        self.is_answered = False


def _id_of(name: str, declared: Sequence[Pipeline | DeclaredClient], kind: str) -> int:
    """Return the id of what has this name; where there is only one, any name will do."""
    if len(declared) == 1:
        return declared[0].id
    for one in declared:
        if one.name == name:
            return one.id
    allowed = ", ".join(one.name for one in declared)
    problem = f"the workload names a {kind} that the application does not have"
    raise ConfigError(problem, key=kind, value=name, allowed=allowed)
