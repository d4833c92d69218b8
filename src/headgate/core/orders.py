"""The orders that a policy may give. Each order is checked, then applied at once.

Because orders are applied at once, a policy sees their effect in the `View` within the same hook.
An illegal order raises `PolicyError` and changes nothing: it is a defect of the policy, not a
condition to handle.
"""

from __future__ import annotations

from typing import final

from headgate.core.errors import PolicyError
from headgate.core.model import OBSERVE, Compute, Pool, Variant
from headgate.core.records import Batch, Instance, Node, Request, Task
from headgate.core.scheduler.state import InstanceWriter, StateWriter
from headgate.core.states import (
    NODE_UP,
    ON_HOST,
    TASK_READY,
    InstanceState,
    NodeState,
    Outcome,
    RequestState,
    Residency,
    Settlement,
    TaskState,
)
from headgate.core.view import View, is_evictable, room_bytes

# Names of the Scheduler's own timers. A policy must choose other names for its timers.
RESERVED_TIMERS = frozenset(
    ("deadline", "forgotten", "lost", "offer_again", "plan", "probe", "unblock", "unblock_pool")
)


@final
class Orders:
    """The only means by which a policy changes state."""

    def __init__(self, view: View, state: StateWriter, instances: InstanceWriter) -> None:
        self._view = view
        self._state = state
        self._instances = instances
        self._has_timeouts = state.timeouts.is_enabled
        self._is_observing = view.app.limits.admission == OBSERVE

    def dispatch(
        self,
        tasks: list[Task],
        node: Node,
        variant: Variant | None = None,
        instance: Instance | None = None,
        shape_id: int | None = None,
    ) -> Batch:
        """Dispatch tasks of one function as a batch to a node.

        If the node has no instance of the variant, one is started there; if its weights are in host
        memory, they are loaded. Idle instances are evicted as needed. `variant` defaults to the
        node's fastest variant of this function, `instance` to what `View.instance_for` returns, and
        `shape_id` to the shape of that instance or, where instances have none, to the variant's
        own. A task that is already running may be dispatched again: a competing copy (hedging). The
        batch takes ownership of the list.
        """
        if not tasks:
            raise PolicyError("a batch of no tasks")
        first = tasks[0]
        if instance is not None:
            self._check_target(tasks, node, variant, instance)
            variant = instance.variant
        elif variant is None:
            variant = node.variants[first.function.id]
            if variant is None:
                raise _illegal(tasks, f"{node.name} cannot run {first.function.name}")
        elif node.pool.id not in variant.pool_ids:
            raise _illegal(tasks, f"{variant.name} does not run on pool {node.pool.name}")
        if node.state != NODE_UP:
            raise _illegal(tasks, f"{node.name} is down")
        if shape_id is not None:
            self._check_shape(tasks, variant, node, instance, shape_id)
        return self._send(tasks, variant, node, node.pool, instance, shape_id)

    def _check_target(
        self, tasks: list[Task], node: Node, variant: Variant | None, instance: Instance
    ) -> None:
        """Raise unless a batch may be dispatched to this very instance."""
        if instance.state == InstanceState.DRAINING or instance.state == InstanceState.GONE:
            raise _illegal(tasks, f"instance {instance.id} is draining or gone")
        if instance.node is not node:
            raise _illegal(tasks, f"instance {instance.id} is not on {node.name}")
        if variant is not None and instance.variant is not variant:
            raise _illegal(tasks, f"instance {instance.id} is not of {variant.name}")

    def _check_shape(
        self,
        tasks: list[Task],
        variant: Variant,
        node: Node,
        instance: Instance | None,
        shape_id: int,
    ) -> None:
        """Raise unless a batch may be dispatched in this shape."""
        if node.limits_compute or not 0 <= shape_id < len(variant.shapes):
            problem = _shape_problem(variant, node.pool, shape_id)
            if problem:
                raise _illegal(tasks, problem)
        if instance is not None and node.binds_at_start and instance.shape_id != shape_id:
            raise _illegal(tasks, f"instance {instance.id} has another shape, for good")

    def dispatch_to_pool(
        self, tasks: list[Task], pool: Pool, variant: Variant | None = None
    ) -> Batch:
        """Dispatch tasks of one function to a FaaS pool, which picks or starts the instance."""
        if not tasks:
            raise PolicyError("a batch of no tasks")
        first = tasks[0]
        if pool.faas is None:
            raise _illegal(tasks, f"pool {pool.name} is not a FaaS pool")
        if variant is None:
            variant = self._view.variants_by_pool[pool.id][first.function.id]
            if variant is None:
                raise _illegal(tasks, f"pool {pool.name} cannot run {first.function.name}")
        elif pool.id not in variant.pool_ids:
            raise _illegal(tasks, f"{variant.name} does not run on pool {pool.name}")
        if not self._view.is_pool_available(pool.id):
            raise _illegal(tasks, f"pool {pool.name} takes no calls: circuit breaker or budget")
        size = 0
        for task in tasks:
            size += task.payload_bytes
        if size > pool.faas.payload_bytes_max:
            raise _illegal(tasks, f"a call of pool {pool.name} cannot carry {size} bytes")
        return self._send(tasks, variant, None, pool, None, None)

    def _send(
        self,
        tasks: list[Task],
        variant: Variant,
        node: Node | None,
        pool: Pool,
        instance: Instance | None,
        shape_id: int | None,
    ) -> Batch:
        """Dispatch a batch if its tasks may run together as this variant; raise otherwise."""
        function_id = variant.function_id
        task_ids: list[int] = []
        items = 0
        for task in tasks:
            if task.state != TASK_READY:
                self._check_copy(tasks, task)
            if task.function.id != function_id:
                raise _illegal(tasks, f"task {task.id} is not of the function of {variant.name}")
            task_ids.append(task.id)
            items += task.request.items
        if node is not None and instance is None:
            if node.replicas or shape_id is not None:
                instance = self._view.instance_for(node, variant, shape_id)
            else:  # `instance_for` in the usual case, inlined because it runs for every batch
                instance = node.instances.get(variant.id)
        shape = 0 if shape_id is None else shape_id
        if instance is not None and instance.shape_id:
            shape = instance.shape_id
        if items > len(variant.shapes[shape].exec_ns):
            raise _illegal(tasks, f"{items} items exceed the largest batch of {variant.name}")
        if len(task_ids) > 1:
            self._check_batchable(tasks, task_ids)
        if node is not None and (instance is None or instance.residency == ON_HOST):
            instance = self._make_resident(tasks, variant, node, instance, shape)
        batch = self._state.send(tasks, task_ids, items, variant, instance, node, pool, shape)
        if self._has_timeouts:
            at_ns = batch.sent_ns + self._state.timeouts.limit_ns(batch)
            self._state.set_timer(("lost", batch.id), at_ns)  # then it is given up
        return batch

    def _check_batchable(self, tasks: list[Task], task_ids: list[int]) -> None:
        """Raise unless these tasks may share a batch."""
        if len(set(task_ids)) < len(task_ids):
            raise _illegal(tasks, "a task is in a batch twice")
        if self._view.suspects:
            for task in tasks:
                if task.must_run_alone:
                    raise _illegal(tasks, f"task {task.id} must run alone")

    def _check_copy(self, tasks: list[Task], task: Task) -> None:
        """Raise unless the task may have one more attempt beside those in flight."""
        if task.state != TaskState.RUNNING:
            raise _illegal(tasks, f"task {task.id} is not ready")
        if not task.function.is_idempotent:
            raise _illegal(tasks, f"task {task.id} is running and its function is not idempotent")
        if task.attempts_made >= self._view.app.limits.attempts_max:
            raise _illegal(tasks, f"task {task.id} has no attempts left")
        if task.must_run_alone:
            raise _illegal(tasks, f"task {task.id} is in quarantine and in flight already")

    def _make_resident(
        self,
        tasks: list[Task],
        variant: Variant,
        node: Node,
        instance: Instance | None,
        shape_id: int,
    ) -> Instance:
        if not node.binds_at_start:
            shape_id = 0
        if not self._view.can_make_room(node, variant, shape_id):
            raise _illegal(tasks, _room_problem(node, variant))
        if instance is None:
            if variant.id in self._view.load_failures:
                raise _illegal(tasks, f"{variant.name} failed to load and is in back-off")
            return self._instances.start_instance(variant, node.pool, node, shape_id)
        self._instances.load_weights(instance, node)
        return instance

    def reject(self, request: Request, settlement: Settlement) -> bool:
        """Reject a request at admission, before any of its tasks was dispatched.

        Returns whether the request was rejected. It was not if admission is only observed
        (`Limits.admission`): then the rejection is reported, and the request goes on as if the
        policy had admitted it, so the policy must account for it like for any other.
        """
        self._check_open(request)
        if settlement.outcome != Outcome.REJECTED:
            raise PolicyError(f"request {request.id} is rejected with another outcome")
        for task in request.tasks:
            if task.attempts_made or task.refusals or task.busy_refusals:
                raise PolicyError(f"request {request.id} has been admitted: expire it instead")
        if self._is_observing:
            self._state.report_would_reject(request, settlement.reason)
            return False
        self._state.settle(request, settlement)
        return True

    def expire(self, request: Request, reason: str) -> None:
        """Expire a request that was admitted and has no running task."""
        self._check_open(request)
        for task in request.tasks:
            if task.state == TaskState.RUNNING:
                raise PolicyError(f"request {request.id} is running")
        self._state.settle(request, Settlement(Outcome.EXPIRED, reason))

    def _check_open(self, request: Request) -> None:
        if request.state != RequestState.OPEN:
            raise PolicyError(f"request {request.id} is settled already")

    def start(self, variant: Variant, node: Node, shape_id: int = 0) -> Instance:
        """Start an instance on a node, evicting idle ones as needed.

        If the node holds instances of the variant already, this is one more, with its own memory.
        A shape can be given where it is chosen at the start of an instance (`Pool.compute`).
        """
        if node.state != NodeState.UP:
            raise PolicyError(f"{node.name} is down")
        if node.pool.id not in variant.pool_ids:
            raise PolicyError(f"{variant.name} does not run on pool {node.pool.name}")
        self._check_may_start(variant, node.pool, shape_id)
        if not self._view.can_make_room(node, variant, shape_id):
            raise PolicyError(_room_problem(node, variant))
        return self._instances.start_instance(variant, node.pool, node, shape_id)

    def _check_may_start(self, variant: Variant, pool: Pool, shape_id: int) -> None:
        if variant.id in self._view.load_failures:
            raise PolicyError(f"{variant.name} failed to load and is in back-off")
        problem = _shape_problem(variant, pool, shape_id) if shape_id else ""
        if problem:
            raise PolicyError(problem)
        if shape_id and pool.compute == Compute.PER_BATCH:
            raise PolicyError(f"pool {pool.name} chooses shapes at dispatch")

    def start_anywhere(
        self, variant: Variant, pool: Pool, shape_id: int = 0, nth: int = 0
    ) -> Instance:
        """Start an instance on whichever node the pool's Broker grants.

        With `nth`, only if the function has fewer in the pool, started by whomever, or waiting for
        a node: if several Schedulers order the third instance, one is started, and the others see
        theirs stop and that one appear.
        """
        if pool.id not in variant.pool_ids:
            raise PolicyError(f"{variant.name} does not run on pool {pool.name}")
        self._check_may_start(variant, pool, shape_id)
        return self._instances.start_instance(variant, pool, None, shape_id, nth)

    def stop(self, instance: Instance) -> None:
        """Drain an instance: it finishes the batches it has begun, then stops."""
        if instance.state in (InstanceState.DRAINING, InstanceState.GONE):
            raise PolicyError(f"instance {instance.id} is draining or gone already")
        self._instances.stop_instance(instance)

    def evict(self, instance: Instance) -> None:
        """Move an idle instance's weights into host memory."""
        node = instance.node
        if node is None or not is_evictable(instance) or instance.residency != Residency.DEVICE:
            raise PolicyError(f"instance {instance.id} is not idle on a device")
        size = instance.variant.profile.memory_bytes
        if node.host_bytes_used + size > node.pool.host_memory_bytes:
            raise PolicyError(f"{node.name} has no host memory for {instance.variant.name}")
        self._instances.evict_weights(instance, node)

    def load(self, instance: Instance) -> None:
        """Load an instance's weights onto the device before they are needed."""
        node = instance.node
        if node is None or instance.residency != Residency.HOST:
            raise PolicyError(f"instance {instance.id} is not in host memory")
        if not self._view.can_make_room(node, instance.variant, instance.shape_id):
            raise PolicyError(_room_problem(node, instance.variant))
        self._instances.load_weights(instance, node)

    def keep_warm(
        self, variant: Variant, pool: Pool, count: int, *, is_provisioned: bool = False
    ) -> None:
        """Have a serverless pool keep `count` instances warm, by ping calls or provisioned.

        The order stands until the next one for the variant. While the circuit breaker is open, or
        if the budgets cannot pay for all, fewer are kept: `View.kept_warm` says how many.
        """
        if pool.faas is None or pool.id not in variant.pool_ids:
            raise PolicyError(f"pool {pool.name} cannot keep {variant.name} warm")
        if not 0 <= count <= pool.faas.concurrency_max:
            raise PolicyError(f"pool {pool.name} cannot keep {count} instances")
        self._state.keep_warm(pool, variant, count, is_provisioned)

    def set_timer(self, name: str, at_ns: int, number: int = 0) -> None:
        """Have `on_timer(name, number)` called at `at_ns`; replaces the timer of that name."""
        if name in RESERVED_TIMERS:
            raise PolicyError(f"the timer name {name!r} is the Scheduler's own")
        if at_ns < self._view.now_ns:
            raise PolicyError(f"timer {name!r} is set for the past")
        self._state.set_timer((name, number), at_ns)

    def cancel_timer(self, name: str, number: int = 0) -> None:
        """Cancel a timer, if it is set."""
        if name in RESERVED_TIMERS:
            raise PolicyError(f"the timer name {name!r} is the Scheduler's own")
        self._state.cancel_timer((name, number))

    def report_work(self, units: int) -> None:
        """Report how much was computed (states expanded, points scanned): drivers charge time.

        A policy reads no clock, so it must express a time limit on a search as a limit on units.
        """
        self._state.work += units


def _shape_problem(variant: Variant, pool: Pool, shape_id: int) -> str:
    """Why a variant cannot run in a shape on the nodes of a pool; empty if it can."""
    if not 0 <= shape_id < len(variant.shapes):
        return f"{variant.name} has no shape {shape_id}"
    shape = variant.shapes[shape_id].shape
    if shape.cpu_milli > pool.cpu_milli or shape.gpu_sevenths > pool.gpu_sevenths:
        return f"{variant.name} takes {shape}: more than a node of pool {pool.name} has"
    return ""


def _room_problem(node: Node, variant: Variant) -> str:
    lacks_memory = variant.profile.memory_bytes > room_bytes(node)
    return f"{node.name} has no {'memory' if lacks_memory else 'compute'} for {variant.name}"


def _illegal(tasks: list[Task], problem: str) -> PolicyError:
    """An illegal dispatch. Its tasks are attached: they may be in no queue of the policy now."""
    error = PolicyError(problem)
    error.tasks = tasks
    return error
