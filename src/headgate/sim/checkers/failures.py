"""Checkers of what is not to be tried again at once: failed starts, and who may kill a node."""

from __future__ import annotations

from collections import Counter
from typing import final

from headgate.core.actions import Action, Dispatch, LoadWeights, StartInstance, StopInstance
from headgate.core.events import (
    BatchFailed,
    BatchFinished,
    BatchLost,
    BatchRefused,
    Event,
    InstanceAppeared,
    InstanceStarted,
    InstanceStopped,
    LoadFailed,
    NodeJoined,
    NodeLost,
    TimerFired,
    WeightsLoaded,
)
from headgate.core.model import App
from headgate.sim.checkers.checker import Checker


@final
class Starts(Checker):
    """A variant that failed to start on a node is left alone for the back-off, then tried once.

    Starts "anywhere" are not looked at: a pool may have had no node for them.
    """

    def __init__(self, app: App) -> None:
        super().__init__()
        self._backoff_ns = app.limits.start_backoff_ns
        self._up: set[int] = set()  # node ids
        self._starting: dict[int, StartInstance] = {}  # by instance id
        self._ready: dict[int, tuple[int, int]] = {}  # by instance id: node and variant
        self._barred: dict[int, tuple[int, int | None]] = {}  # by variant: until when, its probe

    def saw(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        """A back-off that ends in nothing has found the variant wherever it can be."""
        if isinstance(event, TimerFired) and event.key[0] == "probe" and not actions:
            self._barred.pop(event.key[1], None)
        super().saw(now_ns, scheduler, event, actions)

    def note_event(self, now_ns: int, scheduler: int, event: Event) -> None:
        """Starts end well or not."""
        if isinstance(event, NodeJoined):
            self._up.add(event.node_id)
        elif isinstance(event, NodeLost):
            self._lose(now_ns, event.node_id)
        elif isinstance(event, InstanceStarted):
            order = self._starting.pop(event.instance_id, None)
            if order is not None:
                self._ready[event.instance_id] = (event.node_id, order.variant_id)
                self._barred.pop(order.variant_id, None)
        elif isinstance(event, InstanceStopped):
            self._ready.pop(event.instance_id, None)
            order = self._starting.pop(event.instance_id, None)
            if order is not None:
                self._failed(now_ns, order.variant_id, event.instance_id)
        elif isinstance(event, LoadFailed):
            is_there = (event.node_id, event.variant_id) in self._ready.values()
            if not is_there and event.node_id in self._up:
                self._failed(now_ns, event.variant_id, None)

    def note_action(self, now_ns: int, scheduler: int, action: Action) -> None:
        """A start that is too early is blamed; else it is the probe."""
        if isinstance(action, StopInstance):
            self._ready.pop(action.instance_id, None)
            self._starting.pop(action.instance_id, None)
        elif isinstance(action, StartInstance) and action.node_id is not None:
            self._starting[action.instance_id] = action
            until_ns, probe = self._barred.get(action.variant_id, (now_ns, None))
            if now_ns < until_ns or probe in self._starting:
                self.blame(now_ns, f"variant {action.variant_id} is started while it is barred")
            if action.variant_id in self._barred:
                self._barred[action.variant_id] = (until_ns, action.instance_id)

    def _failed(self, now_ns: int, variant_id: int, instance_id: int | None) -> None:
        barred = self._barred.get(variant_id)
        if barred is None or (instance_id is not None and barred[1] == instance_id):
            self._barred[variant_id] = (now_ns + self._backoff_ns, None)

    def _lose(self, now_ns: int, node_id: int) -> None:
        self._up.discard(node_id)
        for instance_id, order in list(self._starting.items()):
            if order.node_id == node_id:
                del self._starting[instance_id]
                if self._barred.get(order.variant_id, (0, None))[1] == instance_id:
                    self._failed(now_ns, order.variant_id, instance_id)
        self._ready = {i: there for i, there in self._ready.items() if there[0] != node_id}


@final
class Suspects(Checker):
    """Who was alone on a node that died never runs again; its mates run alone, one at a time."""

    def __init__(self, app: App) -> None:
        super().__init__()
        self._app = app
        self._ready: set[tuple[int, int]] = set()  # (Scheduler, instance id)
        self._out: dict[int, tuple[int, Dispatch]] = {}  # by batch id: Scheduler
        self._in_company: set[int] = set()  # batch ids
        self._guilty: set[int] = set()  # task ids
        self._suspects: set[int] = set()  # task ids
        self._suspects_out: Counter[int] = Counter()  # by function id

    def note_event(self, now_ns: int, scheduler: int, event: Event) -> None:
        """Batches end; nodes die under them."""
        if isinstance(event, InstanceStarted | InstanceAppeared | WeightsLoaded):
            self._ready.add((scheduler, event.instance_id))
        elif isinstance(event, BatchLost):
            self._lost(event)
        elif isinstance(event, BatchFinished | BatchFailed | BatchRefused):
            self._end(event.batch_id)
        elif isinstance(event, TimerFired) and event.key[0] == "lost":
            self._end(event.key[1])

    def note_action(self, now_ns: int, scheduler: int, action: Action) -> None:
        """Compare what goes out with what is known about it."""
        if isinstance(action, LoadWeights):
            self._ready.discard((scheduler, action.instance_id))
        if not isinstance(action, Dispatch):
            return
        self._out[action.batch_id] = (scheduler, action)
        for task_id in action.task_ids:
            if task_id in self._guilty:
                self.blame(now_ns, f"task {task_id} was alone when a node died, and runs again")
            if task_id in self._suspects:
                function_id = self._app.variants[action.variant_id].function_id
                self._suspects_out[function_id] += 1
                if len(action.task_ids) > 1 or self._suspects_out[function_id] > 1:
                    self.blame(now_ns, f"task {task_id} is a suspect, and not alone")

    def _end(self, batch_id: int) -> Dispatch | None:
        _, order = self._out.pop(batch_id, (0, None))
        if order is not None:
            function_id = self._app.variants[order.variant_id].function_id
            self._suspects_out[function_id] -= len(self._suspects.intersection(order.task_ids))
        return order

    def _lost(self, event: BatchLost) -> None:
        scheduler, order = self._out.get(event.batch_id, (0, None))
        self._end(event.batch_id)
        if order is None or not event.node_died or not self._had_begun(scheduler, order):
            return
        mates = [
            batch_id
            for batch_id, (sender, other) in self._out.items()
            if other.node_id == order.node_id and self._had_begun(sender, other)
        ]
        was_alone = not mates and event.batch_id not in self._in_company
        self._in_company.update(mates)
        if len(order.task_ids) == 1 and (was_alone or order.task_ids[0] in self._suspects):
            self._guilty.update(order.task_ids)
        else:
            self._suspects.update(order.task_ids)

    def _had_begun(self, scheduler: int, order: Dispatch) -> bool:
        return order.instance_id is not None and (scheduler, order.instance_id) in self._ready
