"""A driver under test control: feeds one Scheduler and checks it against its own records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from headgate.core.actions import Action, CancelBatch, CancelTimer, Dispatch, SetTimer, Settle
from headgate.core.clock import NEVER_NS
from headgate.core.errors import DriverError, PolicyError
from headgate.core.event_log import LogEntry, Wire, to_wire
from headgate.core.events import Event, NodeJoined, RequestAnnounced, RequestArrived, TimerFired
from headgate.core.model import App, Compute, Shape
from headgate.core.policy import Policy, PolicyKind
from headgate.core.rng import stream
from headgate.core.scheduler.scheduler import Scheduler
from headgate.core.states import InstanceState, NodeState, Residency
from headgate.core.view import View

from .sample_apps import Fifo, Scripted
from .snapshot import snapshot

FAR_ID = 10**9  # announced to make a scripted policy act; this request never arrives


def wires(*actions: Action) -> list[Wire]:
    """What `Rig.at` returns if these were the actions."""
    return [to_wire(action) for action in actions]


class Rig:
    """Drives a Scheduler in `validate` mode; `check` compares its state with the books."""

    def __init__(
        self,
        app: App,
        make: type[Policy] = Fifo,
        *,
        nodes: int = 0,
        index: int = 0,
        peers: int = 1,
    ) -> None:
        self.scheduler = Scheduler(
            app, PolicyKind(make), rng=stream(7, "p"), index=index, peers=peers, validate=True
        )
        self.entries: list[LogEntry] = []
        self._arrived: set[int] = set()
        self._settled: Counter[int] = Counter()
        self._cancelled: Counter[int] = Counter()
        self._sent: set[int] = set()
        self._ended: set[int] = set()
        self._timers: dict[tuple[str, int], int] = {}
        for node_id in range(nodes):
            self.at(0, NodeJoined(node_id, 0, f"n{node_id}"))

    @property
    def view(self) -> View:
        return self.scheduler.view

    @property
    def scripted(self) -> Scripted:
        assert isinstance(self.scheduler.policy, Scripted)
        return self.scheduler.policy

    def at(self, now_ns: int, event: Event) -> list[Wire]:
        """Deliver one event and return the actions, as `wires` would write them."""
        actions = self.scheduler.handle(now_ns, event)
        self.entries.append(LogEntry(len(self.entries), now_ns, event, actions))
        self._note_event(event)
        for action in actions:
            self._note_action(action)
        return wires(*actions)

    def order(self, now_ns: int, act: Callable[[Scripted], object]) -> list[Wire]:
        """Make the scripted policy act by announcing a request, which changes nothing else."""
        self.scripted.act = act
        return self.at(now_ns, RequestAnnounced(FAR_ID, 0, 0, NEVER_NS))

    def rejects(self, now_ns: int, event: Event, match: str) -> None:
        """The event is illegal, and leaves no trace."""
        before = snapshot(self.scheduler)
        with pytest.raises(DriverError, match=match):
            self.at(now_ns, event)
        assert snapshot(self.scheduler) == before

    def forbids(self, act: Callable[[Scripted], object], match: str) -> None:
        """The order is illegal, and leaves no trace."""

        def attempt(scripted: Scripted) -> None:
            before = snapshot(self.scheduler)
            with pytest.raises(PolicyError, match=match):
                act(scripted)
            assert snapshot(self.scheduler) == before

        assert self.order(self.view.now_ns, attempt) == []

    def check(self) -> None:
        """Check the whole state against the events and actions so far."""
        view = self.view
        assert all(count == 1 for count in self._settled.values()), "settled twice"
        assert self._arrived == set(self._settled) | set(view.requests), "a request was dropped"
        assert not set(self._settled) & set(view.requests), "settled but open"
        assert set(view.batches) == self._sent - self._ended, "a batch was forgotten"
        assert all(count == 1 for count in self._cancelled.values()), "called back twice"
        assert view.timers == self._timers, "the driver's timers are others"
        for node in view.nodes.values():
            if node.state == NodeState.DOWN:
                assert (node.running, node.memory_used_bytes, node.host_bytes_used) == (0, 0, 0)
                continue
            held = [i for group in node.by_variant.values() for i in group]
            in_host = [i for i in held if i.residency == Residency.HOST]
            host_bytes = sum(i.variant.profile.memory_bytes for i in in_host)
            assert node.host_bytes_used == host_bytes, "host memory is miscounted"
            assert node.host_bytes_used <= node.pool.host_memory_bytes
            shapes: list[Shape] = []
            if node.pool.compute == Compute.RESIDENT:
                here = [i for i in view.instances.values() if i.node is node and i.holds_compute]
                shapes = [i.variant.shapes[i.shape_id].shape for i in here]
            else:
                out = [b for b in view.batches.values() if b.node is node and b.instance]
                running = [b for b in out if b.instance and b.instance.state != InstanceState.GONE]
                shapes = [b.variant.shapes[b.shape_id].shape for b in running]
            assert node.cpu_milli_used == sum(shape.cpu_milli for shape in shapes)

    def _note_event(self, event: Event) -> None:
        if isinstance(event, RequestArrived):
            self._arrived.add(event.request_id)
        elif isinstance(event, TimerFired):
            at_ns = self._timers.get(event.key)
            if at_ns is not None and at_ns <= self.view.now_ns:
                del self._timers[event.key]
                if event.key[0] == "lost":
                    self._ended.add(event.key[1])
        elif (batch_id := getattr(event, "batch_id", None)) is not None:
            self._ended.add(batch_id)

    def _note_action(self, action: Action) -> None:
        if isinstance(action, Settle):
            self._settled[action.request_id] += 1
        elif isinstance(action, Dispatch):
            self._sent.add(action.batch_id)
        elif isinstance(action, CancelBatch):
            self._cancelled[action.batch_id] += 1
        elif isinstance(action, SetTimer):
            self._timers[action.key] = action.at_ns
        elif isinstance(action, CancelTimer):
            del self._timers[action.key]
