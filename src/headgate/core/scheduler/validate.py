"""`validate` mode: after every event, check the invariants of the whole state.

It is far too slow for serving, and on in every test: a wrong write to the state is found at the
event that made it, not a thousand events later.
"""

from __future__ import annotations

from collections import Counter
from typing import final

from headgate.core.errors import InvariantError
from headgate.core.records import Batch, Node, Request
from headgate.core.states import (
    INSTANCE_TABLE,
    TASK_TABLE,
    BatchState,
    InstanceState,
    NodeState,
    RequestState,
    Residency,
    Table,
    TaskState,
)
from headgate.core.view import View, is_free


@final
class Validator:
    """Checks the state, and its changes since the last check."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._task_states: dict[int, int] = {}
        self._instance_states: dict[int, int] = {}
        self._attempts_in_flight: Counter[int] = Counter()  # by task id

    def check(self) -> None:
        """Raise `InvariantError` if the state violates an invariant."""
        batches = self._view.batches.values()
        self._attempts_in_flight = Counter(task.id for batch in batches for task in batch.tasks)
        for request in self._view.requests.values():
            self._check_request(request)
        for node in self._view.nodes.values():
            self._check_node(node)
        self._check_batches()
        self._check_instances_of()
        self._check_failures()
        self._check_changes()

    def _check_request(self, request: Request) -> None:
        _require(request.state == RequestState.OPEN, f"request {request.id} is open but settled")
        left = [t for t in request.tasks if t.state not in (TaskState.DONE, TaskState.SKIPPED)]
        _require(len(left) == request.tasks_left, f"request {request.id} miscounts its tasks")
        _require(bool(left), f"request {request.id} is open with nothing left to do")
        for task in left:
            in_flight = self._attempts_in_flight.get(task.id, 0)
            expected = 1 + task.copies_in_flight if task.state == TaskState.RUNNING else 0
            _require(
                in_flight == expected,
                f"task {task.id} in state {task.state} has {in_flight} attempts in flight",
            )
            if task.state != TaskState.RUNNING:
                is_unloadable = task.function.id in self._view.unloadable
                _require(not is_unloadable, f"task {task.id} waits for an unloadable function")
            if task.state == TaskState.HELD:
                has_turn = task.function.id in self._view.suspects
                _require(has_turn, f"task {task.id} is held, but no suspect of its function runs")

    def _check_node(self, node: Node) -> None:
        view = self._view
        is_listed = node.id in view.free_nodes
        _require(not is_listed or is_free(view, node), f"{node.name} is listed free but is not")
        is_in_pool = node.id in view.free_by_pool[node.pool.id]
        _require(is_listed == is_in_pool, f"{node.name} is listed free in one list only")
        if node.state != NodeState.UP:
            _require(not node.instances, f"{node.name} is down and holds instances")
            return
        if is_free(view, node):
            _require(
                is_listed or ("unblock", node.id) in view.timers, f"{node.name} is free, not listed"
            )
        preparing = sum(1 for i in view.instances.values() if i.node is node and i.is_preparing)
        in_flight = [
            b
            for b in view.batches.values()
            if b.node is node and b.instance is not None and b.instance.state != InstanceState.GONE
        ]
        _require(node.running == len(in_flight) + preparing, f"{node.name} miscounts its work")
        self._check_compute(node, in_flight)
        on_device = sum(
            i.variant.profile.memory_bytes
            for group in node.by_variant.values()
            for i in group
            if i.residency != Residency.HOST
        )
        _require(node.memory_used_bytes == on_device, f"{node.name} miscounts its memory")
        _require(on_device <= node.pool.memory_bytes, f"{node.name} holds more than it can")
        first = {variant_id: group[0] for variant_id, group in node.by_variant.items()}
        _require(node.instances == first, f"{node.name} lists others than its oldest instances")
        held = sum(len(group) for group in node.by_variant.values())
        _require(node.replicas == held - len(first), f"{node.name} miscounts its instances")

    def _check_compute(self, node: Node, in_flight: list[Batch]) -> None:
        """Compute is held by batches or, where it is resident, by instances, and within limits."""
        holders = [i for i in self._view.instances.values() if i.node is node and i.holds_compute]
        _require(
            node.has_resident_compute or not holders, f"{node.name} holds compute for its instances"
        )
        shapes = [i.variant.shapes[i.shape_id].shape for i in holders]
        for group in node.by_variant.values():
            for i in group:
                is_right = i.holds_compute == (i.residency != Residency.HOST)
                _require(
                    is_right or not node.has_resident_compute, f"instance {i.id} holds no compute"
                )
                _require(node.binds_at_start or i.shape_id == 0, f"instance {i.id} has a shape")
        for batch in in_flight:
            if node.binds_at_start and batch.instance is not None:
                is_right = batch.shape_id == batch.instance.shape_id
                _require(is_right, f"batch {batch.id} runs in another shape than its instance")
        if node.counts_batches:
            shapes = [b.variant.shapes[b.shape_id].shape for b in in_flight]
        gpu, cpu = sum(s.gpu_sevenths for s in shapes), sum(s.cpu_milli for s in shapes)
        _require(node.gpu_sevenths_used == gpu, f"{node.name} miscounts its GPU share")
        _require(node.cpu_milli_used == cpu, f"{node.name} miscounts its CPUs")
        if node.has_resident_compute:
            is_within = gpu <= node.pool.gpu_sevenths and cpu <= node.pool.cpu_milli
            _require(is_within, f"{node.name} holds more compute than it has")

    def _check_batches(self) -> None:
        running: dict[int, int] = {}
        for batch in self._view.batches.values():
            _require(batch.state == BatchState.IN_FLIGHT, f"batch {batch.id} is listed but ended")
            if batch.instance is not None:
                running[batch.instance.id] = running.get(batch.instance.id, 0) + 1
        for instance in self._view.instances.values():
            expected = running.get(instance.id, 0)
            _require(instance.running == expected, f"instance {instance.id} miscounts its batches")
            if instance.state == InstanceState.IDLE:
                _require(instance.running == 0, f"instance {instance.id} is idle but runs")

    def _check_instances_of(self) -> None:
        """`View.instances_of` lists what runs or starts, in the order of `View.instances`."""
        view = self._view
        active: list[list[int]] = [[] for _ in view.app.variants]
        for instance in view.instances.values():
            if instance.state != InstanceState.DRAINING:
                active[instance.variant.id].append(instance.id)
                is_on_node = instance.node is None or (
                    instance in instance.node.by_variant.get(instance.variant.id, [])
                )
                _require(is_on_node, f"instance {instance.id} is active, and not on its node")
        for variant, instances in zip(view.app.variants, view.instances_of, strict=True):
            is_right = list(instances) == active[variant.id]
            _require(is_right, f"the instances of {variant.name} are not those that are active")
            on_host = {id for id, i in instances.items() if i.residency == Residency.HOST}
            is_right = on_host == view.on_host_of[variant.id].keys()
            _require(is_right, f"the instances of {variant.name} on hosts are others")

    def _check_failures(self) -> None:
        """A variant that cannot be loaded is retried: a timer is set, or a probe is under way."""
        view = self._view
        for variant_id, failure in view.load_failures.items():
            is_timed = ("probe", variant_id) in view.timers
            probe = None if failure.probe_id is None else view.instances.get(failure.probe_id)
            is_tried = probe is not None and probe.state == InstanceState.STARTING
            _require(is_timed != is_tried, f"variant {variant_id} is never retried, or twice")

    def _check_changes(self) -> None:
        tasks = {t.id: t.state for r in self._view.requests.values() for t in r.tasks}
        for task_id, state in tasks.items():
            before = self._task_states.get(task_id, TaskState.BLOCKED)
            _require(_reaches(TASK_TABLE, before, state), f"task {task_id}: {before} to {state}")
        self._task_states = tasks
        instances = {i.id: i.state for i in self._view.instances.values()}
        for instance_id, state in instances.items():
            before = self._instance_states.get(instance_id, state)
            _require(
                _reaches(INSTANCE_TABLE, before, state),
                f"instance {instance_id}: {before} to {state}",
            )
        self._instance_states = instances


def _reaches(table: Table, before: int, after: int) -> bool:
    """Whether a sequence of legal changes leads from one state to the other."""
    visited = {before}
    frontier = [before]
    while frontier:
        state = frontier.pop()
        if state == after:
            return True
        for following in table[state]:
            if following not in visited:
                visited.add(following)
                frontier.append(following)
    return False


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantError(message)
