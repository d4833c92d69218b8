"""Checkers of nodes: actions go only to live nodes and instances, within slots and memory."""

from __future__ import annotations

from typing import final

import numpy as np

from headgate.core.actions import (
    Action,
    Dispatch,
    EvictWeights,
    LoadWeights,
    StartInstance,
    StopInstance,
)
from headgate.core.events import (
    Event,
    InstanceAppeared,
    InstanceStarted,
    InstanceStopped,
    NodeJoined,
    NodeLost,
)
from headgate.core.model import App, Pool
from headgate.metrics.columns import RunColumns
from headgate.sim.checkers.checker import Checker


@final
class LiveTargets(Checker):
    """Actions go only to nodes and instances that the Scheduler knows to be alive."""

    def __init__(self) -> None:
        super().__init__()
        self._up: set[tuple[int, int]] = set()  # (Scheduler, node id)
        # (Scheduler, instance id) -> its node; None while a pool has yet to pick one
        self._instances: dict[tuple[int, int], int | None] = {}

    def check_event(self, now_ns: int, scheduler: int, event: Event) -> None:
        if isinstance(event, NodeJoined):
            self._up.add((scheduler, event.node_id))
        elif isinstance(event, NodeLost):
            self._up.discard((scheduler, event.node_id))
            for key, node_id in list(self._instances.items()):
                if key[0] == scheduler and node_id == event.node_id:
                    del self._instances[key]
        elif isinstance(event, InstanceStarted):
            if (scheduler, event.instance_id) in self._instances:
                self._instances[scheduler, event.instance_id] = event.node_id
        elif isinstance(event, InstanceAppeared):
            self._instances[scheduler, event.instance_id] = event.node_id
        elif isinstance(event, InstanceStopped):
            self._instances.pop((scheduler, event.instance_id), None)

    def check_action(self, now_ns: int, scheduler: int, action: Action) -> None:
        if isinstance(action, StartInstance):
            self._check_node(now_ns, scheduler, action.node_id)
            self._instances[scheduler, action.instance_id] = action.node_id
        elif isinstance(action, Dispatch | LoadWeights | EvictWeights | StopInstance):
            self._check_node(now_ns, scheduler, action.node_id)
            if action.instance_id is not None:
                self._check_instance(now_ns, (scheduler, action.instance_id), action)

    def _check_instance(
        self,
        now_ns: int,
        key: tuple[int, int],
        action: Dispatch | LoadWeights | EvictWeights | StopInstance,
    ) -> None:
        if key not in self._instances or self._instances[key] != action.node_id:
            name = type(action).__name__
            self.report(now_ns, f"{name}: no instance {key[1]} on node {action.node_id}")
        if isinstance(action, StopInstance):
            self._instances.pop(key, None)

    def _check_node(self, now_ns: int, scheduler: int, node_id: int | None) -> None:
        if node_id is not None and (scheduler, node_id) not in self._up:
            self.report(now_ns, f"node {node_id} is not up for Scheduler {scheduler}")


@final
class Exclusivity(Checker):
    """A node never runs more jobs at once than it has slots, nor a platform beyond its limit.

    Reads the spans of the run, so it checks only runs that record them.
    """

    def __init__(self, app: App) -> None:
        super().__init__()
        self._limits: list[int] = []  # by resource: nodes first, then platforms
        for pool in app.pools:
            if pool.faas is None:
                self._limits += [pool.slots] * pool.nodes
        self._limits += [p.faas.concurrency_max for p in app.pools if p.faas]

    def finish(self, run: RunColumns) -> None:
        spans = run.spans
        for resource, limit in enumerate(self._limits):
            own = spans.node == resource
            times_ns = np.concatenate((spans.end_ns[own], spans.start_ns[own]))
            changes = np.repeat((-1, 1), own.sum())
            # A stable sort: at one instant ends come before begins.
            order = np.argsort(times_ns, kind="stable")
            running = np.cumsum(changes[order])
            if len(running) and running.max() > limit:
                worst_ns = int(times_ns[order][running.argmax()])
                name = run.resources[resource].name
                self.report(worst_ns, f"{name} runs {running.max()} jobs at once, of {limit}")


@final
class Memory(Checker):
    """The weights on a node fit into its device memory and its host memory.

    Weights count as moved in the order in which the actions that move them are returned.
    """

    def __init__(self, app: App) -> None:
        super().__init__()
        self._app = app
        self._pools: dict[int, Pool] = {}  # by node id
        self._bytes: dict[int, int] = {}  # by instance id
        self._device: dict[int, dict[int, None]] = {}  # node id -> instance ids
        self._host: dict[int, dict[int, None]] = {}
        self._unplaced: set[int] = set()  # instances whose pool has yet to pick a node

    def check_event(self, now_ns: int, scheduler: int, event: Event) -> None:
        if isinstance(event, NodeJoined):
            self._pools[event.node_id] = self._app.pools[event.pool_id]
        elif isinstance(event, NodeLost):
            self._device.pop(event.node_id, None)
            self._host.pop(event.node_id, None)
        elif isinstance(event, InstanceStopped):
            self._forget(event.instance_id)
        elif isinstance(event, InstanceStarted) and event.instance_id in self._unplaced:
            self._unplaced.discard(event.instance_id)
            self._put(now_ns, self._device, event.node_id, event.instance_id)

    def check_action(self, now_ns: int, scheduler: int, action: Action) -> None:
        if isinstance(action, StartInstance):
            profile = self._app.variants[action.variant_id].profile
            self._bytes[action.instance_id] = profile.memory_bytes
            if action.node_id is None:
                self._unplaced.add(action.instance_id)
            else:
                self._put(now_ns, self._device, action.node_id, action.instance_id)
        elif isinstance(action, StopInstance):
            self._forget(action.instance_id)
        elif isinstance(action, LoadWeights):
            self._put(now_ns, self._device, action.node_id, action.instance_id)
        elif isinstance(action, EvictWeights):
            self._put(now_ns, self._host, action.node_id, action.instance_id)

    def _put(
        self, now_ns: int, place: dict[int, dict[int, None]], node_id: int, instance_id: int
    ) -> None:
        for where in (self._device, self._host):
            where.get(node_id, {}).pop(instance_id, None)
        place.setdefault(node_id, {})[instance_id] = None
        pool = self._pools.get(node_id)
        if pool is None:
            return  # `LiveTargets` reports this
        limit = pool.memory_bytes if place is self._device else pool.host_memory_bytes
        used = sum(self._bytes[i] for i in place[node_id])
        if used > limit:
            self.report(now_ns, f"node {node_id} holds {used} bytes of {limit}")

    def _forget(self, instance_id: int) -> None:
        self._unplaced.discard(instance_id)
        for places in (self._device, self._host):
            for held in places.values():
                held.pop(instance_id, None)
