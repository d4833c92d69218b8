"""Checkers of batches and of the nodes that run them.

Each action ends once, keeps within the limits and runs as dispatched; actions go only to live nodes
and instances, within slots and memory.
"""

from __future__ import annotations

from collections import Counter
from typing import Final, final

import numpy as np

from headgate.core.actions import (
    Action,
    CancelTimer,
    Dispatch,
    EvictWeights,
    LoadWeights,
    SetTimer,
    StartInstance,
    StopInstance,
)
from headgate.core.clock import NEVER_NS, SECOND_NS
from headgate.core.events import (
    BatchFailed,
    BatchFinished,
    BatchLost,
    BatchRefused,
    Event,
    InstanceAppeared,
    InstanceStarted,
    InstanceStopped,
    NodeJoined,
    NodeLost,
    RequestArrived,
    TimerFired,
    TimerKey,
    WeightsEvicted,
    WeightsLoaded,
)
from headgate.core.model import App, Compute, Pool, Shape
from headgate.core.records import STAGES_MAX
from headgate.metrics.columns import RunColumns, SpanKind
from headgate.sim.checkers.checker import Checker, ended_batch

_IN_PROGRESS_NS: Final = 60 * SECOND_NS  # longer than any start of a random case


@final
class Completions(Checker):
    """Every completion belongs to an action, and every action completes exactly once.

    A batch that its Scheduler has given up as lost may still end, once. The loss of a node ends
    all actions that were pending on it.
    """

    def __init__(
        self,
        *,
        allows_duplicates: bool = False,
        allows_losses: bool = False,
        has_decision_cost: bool = False,
        is_drained: bool = False,
        limit_ns: int = NEVER_NS,
    ) -> None:
        super().__init__()
        self._limit_ns = limit_ns
        self._allows_duplicates = allows_duplicates
        self._allows_losses = allows_losses
        self._has_decision_cost = has_decision_cost
        self._is_drained = is_drained
        self._senders: dict[int, int] = {}  # batch id -> Scheduler
        self._in_flight: dict[int, None] = {}  # ids of the batches that have not ended
        self._given_up: dict[int, None] = {}
        self._started: dict[int, int] = {}  # instance id -> Scheduler
        self._appeared: set[tuple[int, int]] = set()  # (Scheduler, instance id)
        # Actions on instances that have not ended: (kind, instance id) -> node id, Scheduler, time.
        self._pending: dict[tuple[type[Action], int], tuple[int | None, int, int]] = {}
        self._timers: dict[tuple[int, TimerKey], int] = {}

    def check_action(self, now_ns: int, scheduler: int, action: Action) -> None:
        if isinstance(action, Dispatch):
            if action.batch_id in self._senders:
                self.report(now_ns, f"batch {action.batch_id} is sent twice")
            self._senders[action.batch_id] = scheduler
            self._in_flight[action.batch_id] = None
        elif isinstance(action, StartInstance | StopInstance | LoadWeights | EvictWeights):
            if isinstance(action, StartInstance):
                if action.instance_id in self._started:
                    self.report(now_ns, f"instance {action.instance_id} is started twice")
                self._started[action.instance_id] = scheduler
            self._pending[type(action), action.instance_id] = (
                action.node_id,
                scheduler,
                now_ns,
            )
        elif isinstance(action, SetTimer):
            self._timers[scheduler, action.key] = action.at_ns
        elif isinstance(action, CancelTimer):
            self._timers.pop((scheduler, action.key), None)

    def check_event(self, now_ns: int, scheduler: int, event: Event) -> None:
        if isinstance(event, BatchFinished | BatchFailed | BatchRefused | BatchLost):
            self._end_batch(now_ns, scheduler, event.batch_id, isinstance(event, BatchFinished))
        elif isinstance(event, TimerFired):
            self._fire(now_ns, scheduler, event.key)
        elif isinstance(event, NodeLost):
            self._pending = {k: n for k, n in self._pending.items() if n[0] != event.node_id}
        elif isinstance(
            event,
            InstanceStarted | InstanceAppeared | InstanceStopped | WeightsLoaded | WeightsEvicted,
        ):
            if event.instance_id not in self._started:
                self.report(now_ns, f"instance {event.instance_id} was never started")
            self._end_action(now_ns, scheduler, event.instance_id, event)

    def on_gateway_crashed(self, now_ns: int, scheduler: int) -> None:
        """Nobody hears any more how the actions of this Scheduler end."""
        for batch_id, sender in self._senders.items():
            if sender == scheduler:
                self._in_flight.pop(batch_id, None)
                self._given_up.pop(batch_id, None)
        self._pending = {k: n for k, n in self._pending.items() if n[1] != scheduler}

    def finish(self, run: RunColumns) -> None:
        """After a drained run, report everything that has not ended.

        A policy that plans gives orders for ever: what it ordered right before the limit of the run
        is in progress when the run is cut off.
        """
        if not self._is_drained:
            return
        for batch_id in () if self._allows_losses else (*self._in_flight, *self._given_up):
            self.report(run.end_ns, f"batch {batch_id} has not ended")
        cut_ns = self._limit_ns - _IN_PROGRESS_NS if run.end_ns >= self._limit_ns else NEVER_NS
        for (kind, instance_id), (_, _, ordered_ns) in self._pending.items():
            if ordered_ns >= cut_ns:
                continue
            self.report(run.end_ns, f"{kind.__name__} of instance {instance_id} has not ended")

    def _end_batch(self, now_ns: int, scheduler: int, batch_id: int, is_finished: bool) -> None:
        if self._senders.get(batch_id) != scheduler:
            self.report(now_ns, f"batch {batch_id} was never sent by Scheduler {scheduler}")
        elif batch_id in self._in_flight:
            del self._in_flight[batch_id]
        elif batch_id in self._given_up:
            del self._given_up[batch_id]
        elif not (is_finished and self._allows_duplicates):
            self.report(now_ns, f"batch {batch_id} has ended twice")

    def _fire(self, now_ns: int, scheduler: int, key: TimerKey) -> None:
        at_ns = self._timers.pop((scheduler, key), None)
        if (at_ns is None or at_ns > now_ns) and not self._has_decision_cost:
            self.report(now_ns, f"timer {key} has fired that was not set, or too early")
        if key[0] == "lost" and key[1] in self._in_flight:
            del self._in_flight[key[1]]
            self._given_up[key[1]] = None

    def _end_action(self, now_ns: int, scheduler: int, instance_id: int, event: Event) -> None:
        pending = self._pending
        if isinstance(event, InstanceStarted):
            # A lost node sends no more events, but those already in transit still arrive.
            if self._started.get(instance_id) != scheduler:
                self.report(now_ns, f"instance {instance_id} is not Scheduler {scheduler}'s")
            pending.pop((StartInstance, instance_id), None)
        elif isinstance(event, InstanceAppeared):
            if self._started.get(instance_id) == scheduler:
                self.report(now_ns, f"instance {instance_id} appeared at its own Scheduler")
            if (scheduler, instance_id) in self._appeared:
                self.report(now_ns, f"instance {instance_id} appeared twice")
            self._appeared.add((scheduler, instance_id))
        elif isinstance(event, InstanceStopped):
            for kind in (StartInstance, StopInstance, LoadWeights, EvictWeights):
                pending.pop((kind, instance_id), None)
        elif isinstance(event, WeightsLoaded):  # the end of a load, or of a declined eviction
            pending.pop((LoadWeights, instance_id), None)
            pending.pop((EvictWeights, instance_id), None)
        else:
            pending.pop((EvictWeights, instance_id), None)


@final
class AttemptLimits(Checker):
    """A task runs at most `attempts_max` times, and at most once if it is not idempotent.

    A refused batch did not run. A batch that was given up as lost may have run, so it counts.
    """

    def __init__(self, app: App) -> None:
        super().__init__()
        self._app = app
        self._runs: Counter[int] = Counter()  # by task id
        self._in_flight: dict[int, list[int]] = {}  # batch id -> task ids

    def check_event(self, now_ns: int, scheduler: int, event: Event) -> None:
        """Count the attempts; a refused batch does not count."""
        batch_id = ended_batch(event)
        if batch_id is not None:
            task_ids = self._in_flight.pop(batch_id, [])
            if isinstance(event, BatchRefused):
                self._runs.subtract(task_ids)

    def check_action(self, now_ns: int, scheduler: int, action: Action) -> None:
        if not isinstance(action, Dispatch):
            return
        self._in_flight[action.batch_id] = action.task_ids
        function = self._app.functions[self._app.variants[action.variant_id].function_id]
        runs_max = self._app.limits.attempts_max if function.is_idempotent else 1
        for task_id in action.task_ids:
            self._runs[task_id] += 1
            if self._runs[task_id] > runs_max:
                self.report(now_ns, f"task {task_id} is dispatched again, beyond {runs_max} runs")


@final
class BatchLimits(Checker):
    """A batch is of one function, fits its variant and its pool, and has no duplicate task."""

    def __init__(self, app: App) -> None:
        super().__init__()
        self._app = app
        self._requests: dict[int, RequestArrived] = {}

    def check_event(self, now_ns: int, scheduler: int, event: Event) -> None:
        if isinstance(event, RequestArrived):
            self._requests[event.request_id] = event

    def check_action(self, now_ns: int, scheduler: int, action: Action) -> None:
        if not isinstance(action, Dispatch):
            return
        variant = self._app.variants[action.variant_id]
        items = 0
        for task_id in action.task_ids:
            request_id, index = divmod(task_id, STAGES_MAX)
            request = self._requests.get(request_id)
            if request is None:
                continue  # `Stages` reports this
            items += request.items
            function = self._app.pipelines[request.pipeline].stages[index].function
            if function.id != variant.function_id:
                self.report(now_ns, f"batch {action.batch_id} has a task of {function.name}")
        if not 0 <= action.shape_id < len(variant.shapes):
            self.report(now_ns, f"{variant.name} has no shape {action.shape_id}")
            return
        items_max = len(variant.shapes[action.shape_id].exec_ns)
        if items != action.items or not 1 <= items <= items_max:
            sizes = f"{action.items} items, has {items} and may have {items_max}"
            self.report(now_ns, f"batch {action.batch_id} declares {sizes}")
        if len(set(action.task_ids)) != len(action.task_ids):
            self.report(now_ns, f"batch {action.batch_id} has a task twice")
        if action.pool_id not in variant.pool_ids:
            self.report(now_ns, f"{variant.name} does not run on pool {action.pool_id}")


@final
class Executions(Checker):
    """A batch runs once, on the node and with the items it was dispatched with.

    Reads the spans of the run, so it checks only runs that record them.
    """

    def __init__(self, app: App) -> None:
        super().__init__()
        self._nodes = sum(pool.nodes for pool in app.pools if pool.faas is None)
        self._dispatched: dict[int, Dispatch] = {}  # by batch id

    def check_action(self, now_ns: int, scheduler: int, action: Action) -> None:
        if isinstance(action, Dispatch):
            self._dispatched[action.batch_id] = action

    def finish(self, run: RunColumns) -> None:
        spans = run.spans
        executed: set[int] = set()
        for row in (spans.kind == SpanKind.RUN).nonzero()[0].tolist():
            batch_id, begin_ns = int(spans.batch[row]), int(spans.start_ns[row])
            node = int(spans.node[row])
            dispatch = self._dispatched.get(batch_id)
            if dispatch is None or batch_id in executed:
                self.report(begin_ns, f"batch {batch_id} ran twice, or was never sent")
                continue
            executed.add(batch_id)
            if spans.items[row] != dispatch.items or dispatch.node_id != (
                node if node < self._nodes else None
            ):
                self.report(begin_ns, f"batch {batch_id} ran otherwise than it was sent")


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
class ComputeLimits(Checker):
    """What runs on a node at once, in the shapes chosen, does not exceed the node's compute.

    Where compute is resident, an instance holds its shape at least from the begin of its start, or
    of a load of its weights, to the end of its last batch after that. Reads the spans of the run,
    so it checks only runs that record them.
    """

    def __init__(self, app: App) -> None:
        super().__init__()
        self._variants = app.variants
        self._pools = [pool for pool in app.pools if pool.faas is None for _ in range(pool.nodes)]
        self._dispatched: dict[int, Dispatch] = {}  # by batch id
        self._started: dict[int, StartInstance] = {}  # by instance id

    def check_action(self, now_ns: int, scheduler: int, action: Action) -> None:
        if isinstance(action, StartInstance):
            self._started[action.instance_id] = action
        elif isinstance(action, Dispatch):
            self._dispatched[action.batch_id] = action
            start = self._started.get(-1 if action.instance_id is None else action.instance_id)
            if start is not None and start.shape_id not in (0, action.shape_id):
                self.report(now_ns, f"batch {action.batch_id} has another shape than its instance")

    def finish(self, run: RunColumns) -> None:
        for node_id, pool in enumerate(self._pools):
            find = self._resident_holds if pool.compute == Compute.RESIDENT else self._batch_holds
            changes: list[tuple[int, int, int, int]] = []  # time, order, CPU and GPU that it adds
            for begin_ns, end_ns, shape in find(run, node_id):
                changes.append((end_ns, 0, -shape.cpu_milli, -shape.gpu_sevenths))
                changes.append((begin_ns, 1, shape.cpu_milli, shape.gpu_sevenths))
            cpu_milli = gpu_sevenths = 0
            for now_ns, _, cpu, gpu in sorted(changes):  # at one instant ends come first
                cpu_milli += cpu
                gpu_sevenths += gpu
                if cpu_milli > pool.cpu_milli or gpu_sevenths > pool.gpu_sevenths:
                    held = Shape(cpu_milli, gpu_sevenths)
                    self.report(now_ns, f"{run.resources[node_id].name} holds {held}: too much")

    def _batch_holds(self, run: RunColumns, node_id: int) -> list[tuple[int, int, Shape]]:
        """When batches held compute: begin, end and shape of each."""
        holds: list[tuple[int, int, Shape]] = []
        for begin_ns, is_batch, end_ns, id in _spans_of(run, node_id):
            dispatch = self._dispatched.get(id) if is_batch else None
            if dispatch is not None:
                shapes = self._variants[dispatch.variant_id].shapes
                holds.append((begin_ns, end_ns, shapes[dispatch.shape_id].shape))
        return holds

    def _resident_holds(self, run: RunColumns, node_id: int) -> list[tuple[int, int, Shape]]:
        """When instances held compute: begin, end and shape of each stay on the device."""
        holds: list[tuple[int, int, Shape]] = []
        stays: dict[int, int] = {}  # by instance id: the index of its present stay in `holds`
        for begin_ns, is_batch, end_ns, id in _spans_of(run, node_id):
            dispatch = self._dispatched.get(id) if is_batch else None
            if not is_batch:
                start = self._started[id]
                stays[id] = len(holds)
                shapes = self._variants[start.variant_id].shapes
                holds.append((begin_ns, end_ns, shapes[start.shape_id].shape))
            elif dispatch is not None and dispatch.instance_id is not None:
                since_ns, until_ns, shape = holds[stays[dispatch.instance_id]]
                stay = (since_ns, max(until_ns, end_ns), shape)
                holds[stays[dispatch.instance_id]] = stay
        return holds


def _spans_of(run: RunColumns, node_id: int) -> list[tuple[int, bool, int, int]]:
    """The spans of a node by their begin: begin, whether it is a batch, end, batch or instance."""
    spans = run.spans
    rows = (spans.node == node_id).nonzero()[0]
    is_batch = spans.kind[rows] == SpanKind.RUN
    columns = (spans.start_ns[rows], is_batch, spans.end_ns[rows], spans.batch[rows])
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


@final
class Memory(Checker):
    """The weights on a node fit into its device memory and its host memory.

    Weights count as moved in the order in which the actions that move them are returned. When a
    gateway has crashed, the instances that it was starting count again when the others see them;
    and when it was the last one, whatever the next one is told of.
    """

    def __init__(self, app: App) -> None:
        super().__init__()
        self._app = app
        self._alive: set[int] = set()  # Schedulers
        self._starting: dict[int, int] = {}  # instance id -> Scheduler
        self._stopping: set[int] = set()  # instance ids
        self._pools: dict[int, Pool] = {}  # by node id
        self._bytes: dict[int, int] = {}  # by instance id
        self._device: dict[int, dict[int, None]] = {}  # node id -> instance ids
        self._host: dict[int, dict[int, None]] = {}
        self._unplaced: set[int] = set()  # instances whose pool has yet to pick a node

    def check_event(self, now_ns: int, scheduler: int, event: Event) -> None:
        if isinstance(event, InstanceStarted | InstanceStopped):
            self._starting.pop(event.instance_id, None)
        if isinstance(event, NodeJoined):
            self._alive.add(scheduler)
            self._pools[event.node_id] = self._app.pools[event.pool_id]
        elif isinstance(event, InstanceAppeared):
            is_new = event.instance_id not in self._device.get(event.node_id, {})
            if is_new and event.instance_id not in self._stopping:
                self._put(now_ns, self._device, event.node_id, event.instance_id)
        elif isinstance(event, NodeLost):
            self._device.pop(event.node_id, None)
            self._host.pop(event.node_id, None)
        elif isinstance(event, InstanceStopped):
            self._forget(event.instance_id)
        elif isinstance(event, InstanceStarted) and event.instance_id in self._unplaced:
            self._unplaced.discard(event.instance_id)
            self._put(now_ns, self._device, event.node_id, event.instance_id)

    def on_gateway_crashed(self, now_ns: int, scheduler: int) -> None:
        self._alive.discard(scheduler)
        for instance_id, starter in list(self._starting.items()):
            if starter == scheduler:
                del self._starting[instance_id]
                self._forget(instance_id)
        if not self._alive:
            self._device.clear()
            self._host.clear()

    def check_action(self, now_ns: int, scheduler: int, action: Action) -> None:
        if isinstance(action, StartInstance):
            self._starting[action.instance_id] = scheduler
            profile = self._app.variants[action.variant_id].profile
            self._bytes[action.instance_id] = profile.memory_bytes
            if action.node_id is None:
                self._unplaced.add(action.instance_id)
            else:
                self._put(now_ns, self._device, action.node_id, action.instance_id)
        elif isinstance(action, StopInstance):
            self._stopping.add(action.instance_id)
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
