"""What a policy may order. Each order is checked first, then carried out at once.

So within one hook a policy sees the effect of its own orders in the `View`. An order that is not
legal raises `PolicyError` and changes nothing: it is a defect of the policy, never a condition to
handle.
"""

from __future__ import annotations

from typing import Final, final

from headgate.core.errors import PolicyError
from headgate.core.model import Pool, Variant
from headgate.core.records import Batch, Instance, Node, Request, Task
from headgate.core.scheduler.state import InstanceWriter, StateWriter
from headgate.core.states import (
    InstanceState,
    NodeState,
    Outcome,
    RequestState,
    Residency,
    TaskState,
)
from headgate.core.view import View, is_evictable

# Interpreted, a name of the module is read many times faster than one of a class.
_HOST: Final = Residency.HOST
_READY: Final = TaskState.READY
_UP: Final = NodeState.UP

# Names of the Scheduler's own timers; a policy's timers must be called something else.
RESERVED_TIMERS = frozenset(
    (
        "deadline",
        "forgotten",
        "lost",
        "offer_again",
        "plan",
        "probe",
        "unblock",
        "unblock_pool",
    )
)


@final
class Orders:
    """The only way for a policy to change anything."""

    def __init__(self, view: View, ledger: StateWriter, residents: InstanceWriter) -> None:
        self._view = view
        self._ledger = ledger
        self._residents = residents
        self._watches = ledger.watchdog.is_needed

    # --- running work --------------------------------------------------------------------------

    def dispatch(
        self,
        tasks: list[Task],
        node: Node,
        variant: Variant | None = None,
    ) -> Batch:
        """Send tasks of one function out together to a node.

        An instance is started there if there is none, or its weights loaded, evicting idle ones
        as needed. `variant` defaults to the node's own for this function. A task that is already
        running may be sent again: a competing copy. The list becomes the batch's own.
        """
        if not tasks:
            raise PolicyError("a batch of no tasks")
        first = tasks[0]
        if variant is None:
            variant = node.variants[first.function.id]
            if variant is None:
                raise _illegal(tasks, f"{node.name} cannot run {first.function.name}")
        elif node.pool.id not in variant.pool_ids:
            raise _illegal(tasks, f"{variant.name} does not run on pool {node.pool.name}")
        if node.state != _UP:
            raise _illegal(tasks, f"{node.name} is down")
        return self._send(tasks, variant, node, node.pool)

    def dispatch_to_pool(
        self,
        tasks: list[Task],
        pool: Pool,
        variant: Variant | None = None,
    ) -> Batch:
        """Send tasks of one function to a pool that picks or starts the instance itself."""
        if not tasks:
            raise PolicyError("a batch of no tasks")
        first = tasks[0]
        if pool.faas is None:
            raise _illegal(tasks, f"pool {pool.name} does not pick its own instances")
        if variant is None:
            variant = self._view.variants_by_pool[pool.id][first.function.id]
            if variant is None:
                raise _illegal(tasks, f"pool {pool.name} cannot run {first.function.name}")
        elif pool.id not in variant.pool_ids:
            raise _illegal(tasks, f"{variant.name} does not run on pool {pool.name}")
        if not self._view.is_pool_available(pool.id):
            raise _illegal(tasks, f"pool {pool.name} is closed: its breaker or its budget")
        size = 0
        for task in tasks:
            size += task.payload_bytes
        if size > pool.faas.payload_bytes_max:
            raise _illegal(tasks, f"a call of pool {pool.name} cannot carry {size} bytes")
        return self._send(tasks, variant, None, pool)

    def _send(
        self,
        tasks: list[Task],
        variant: Variant,
        node: Node | None,
        pool: Pool,
    ) -> Batch:
        """Send a batch out if its tasks may go together as this variant, else raise."""
        function_id = variant.function_id
        task_ids: list[int] = []
        items = 0
        for task in tasks:
            if task.state != _READY:
                self._check_copy(tasks, task)
            if task.function.id != function_id:
                raise _illegal(tasks, f"task {task.id} is not of the function of {variant.name}")
            task_ids.append(task.id)
            items += task.request.items
        if items > len(variant.profile.exec_ns):
            raise _illegal(tasks, f"{items} items exceed the largest batch of {variant.name}")
        if len(task_ids) > 1:
            self._check_company(tasks, task_ids)
        instance = None
        if node is not None:
            instance = node.instances.get(variant.id)
            if instance is None or instance.residency == _HOST:
                instance = self._make_resident(tasks, variant, node, instance)
        batch = self._ledger.send(tasks, task_ids, items, variant, instance, node, pool)
        if self._watches:
            self._watch(batch)
        return batch

    def _check_company(self, tasks: list[Task], task_ids: list[int]) -> None:
        """Raise unless these tasks may go together."""
        if len(set(task_ids)) < len(task_ids):
            raise _illegal(tasks, "a task is in a batch twice")
        if self._view.suspects:
            for task in tasks:
                if task.must_run_alone:
                    raise _illegal(tasks, f"task {task.id} must run alone")

    def _check_copy(self, tasks: list[Task], task: Task) -> None:
        """Raise unless one more attempt may run beside those that are out."""
        if task.state != TaskState.RUNNING:
            raise _illegal(tasks, f"task {task.id} is not ready")
        if not task.function.is_idempotent:
            raise _illegal(tasks, f"task {task.id} is running and may not be run twice")
        if task.attempts_made >= self._view.app.limits.attempts_max:
            raise _illegal(tasks, f"task {task.id} has no attempts left")
        if task.must_run_alone:
            raise _illegal(tasks, f"task {task.id} is a suspect and out already")

    def _make_resident(
        self, tasks: list[Task], variant: Variant, node: Node, instance: Instance | None
    ) -> Instance:
        if not self._view.can_make_room(node, variant):
            raise _illegal(tasks, f"{node.name} has no memory for {variant.name}")
        if instance is None:
            if variant.id in self._view.load_failures:
                raise _illegal(tasks, f"{variant.name} cannot be loaded: it is being backed off")
            return self._residents.start_instance(variant, node.pool, node)
        self._residents.load_weights(instance, node)
        return instance

    def _watch(self, batch: Batch) -> None:
        """Give the batch up when it has not been heard of for far longer than expected."""
        at_ns = batch.sent_ns + self._ledger.watchdog.limit_ns(batch)
        self._ledger.set_timer(("lost", batch.id), at_ns)

    # --- requests ------------------------------------------------------------------------------

    def reject(
        self, request: Request, reason: str, predicted_ns: int = 0, retry_ns: int = 0
    ) -> None:
        """Turn a request away at admission: before any task of it was dispatched.

        Say, if known, what latency it would have had and after how long it had better come back.
        """
        self._check_open(request)
        for task in request.tasks:
            if task.attempts_made or task.refusals:
                raise PolicyError(f"request {request.id} has been admitted: expire it instead")
        self._ledger.settle(request, Outcome.REJECTED, reason, predicted_ns, retry_ns)

    def expire(self, request: Request, reason: str) -> None:
        """Give up a request that was admitted and still waits."""
        self._check_open(request)
        for task in request.tasks:
            if task.state == TaskState.RUNNING:
                raise PolicyError(f"request {request.id} is running")
        self._ledger.settle(request, Outcome.EXPIRED, reason)

    def _check_open(self, request: Request) -> None:
        if request.state != RequestState.OPEN:
            raise PolicyError(f"request {request.id} is settled already")

    # --- instances -----------------------------------------------------------------------------

    def start(self, variant: Variant, node: Node) -> Instance:
        """Start an instance on a node, evicting idle ones as needed."""
        if node.state != NodeState.UP:
            raise PolicyError(f"{node.name} is down")
        if variant.id in node.instances:
            raise PolicyError(f"{node.name} holds {variant.name} already")
        if node.pool.id not in variant.pool_ids:
            raise PolicyError(f"{variant.name} does not run on pool {node.pool.name}")
        self._check_may_start(variant)
        if not self._view.can_make_room(node, variant):
            raise PolicyError(f"{node.name} has no memory for {variant.name}")
        return self._residents.start_instance(variant, node.pool, node)

    def _check_may_start(self, variant: Variant) -> None:
        if variant.id in self._view.load_failures:
            raise PolicyError(f"{variant.name} cannot be loaded: it is being backed off")

    def start_anywhere(self, variant: Variant, pool: Pool) -> Instance:
        """Start an instance on whichever node the pool's Broker grants."""
        if pool.id not in variant.pool_ids:
            raise PolicyError(f"{variant.name} does not run on pool {pool.name}")
        self._check_may_start(variant)
        return self._residents.start_instance(variant, pool, None)

    def stop(self, instance: Instance) -> None:
        """Let an instance finish what it has begun, then be gone."""
        if instance.state in (InstanceState.DRAINING, InstanceState.GONE):
            raise PolicyError(f"instance {instance.id} is leaving already")
        self._residents.stop_instance(instance)

    def evict(self, instance: Instance) -> None:
        """Move an idle instance's weights into host memory."""
        node = instance.node
        if node is None or not is_evictable(instance) or instance.residency != Residency.DEVICE:
            raise PolicyError(f"instance {instance.id} is not idle on a device")
        size = instance.variant.profile.memory_bytes
        if node.host_bytes_used + size > node.pool.host_memory_bytes:
            raise PolicyError(f"{node.name} has no host memory for {instance.variant.name}")
        self._residents.evict_weights(instance, node)

    def load(self, instance: Instance) -> None:
        """Bring an instance's weights back onto the device before they are needed."""
        node = instance.node
        if node is None or instance.residency != Residency.HOST:
            raise PolicyError(f"instance {instance.id} is not in host memory")
        if not self._view.can_make_room(node, instance.variant):
            raise PolicyError(f"{node.name} has no memory for {instance.variant.name}")
        self._residents.load_weights(instance, node)

    def keep_warm(
        self, variant: Variant, pool: Pool, count: int, *, is_provisioned: bool = False
    ) -> None:
        """Have a serverless pool keep so many instances ready: by calling them, or provisioned.

        The wish stands until the next one. While the breaker is open, or as far as the budgets do
        not pay for them, there are fewer: `View.kept_warm` says how many.
        """
        if pool.faas is None or pool.id not in variant.pool_ids:
            raise PolicyError(f"pool {pool.name} keeps nothing warm of {variant.name}")
        if not 0 <= count <= pool.faas.concurrency_max:
            raise PolicyError(f"pool {pool.name} cannot keep {count} instances")
        self._ledger.keep_warm(pool, variant, count, is_provisioned)

    # --- time and thought ----------------------------------------------------------------------

    def set_timer(self, name: str, at_ns: int, number: int = 0) -> None:
        """Have `on_timer(name, number)` called at `at_ns`; replaces the timer of that name."""
        if name in RESERVED_TIMERS:
            raise PolicyError(f"the timer name {name!r} is the Scheduler's own")
        if at_ns < self._view.now_ns:
            raise PolicyError(f"timer {name!r} is set for the past")
        self._ledger.set_timer((name, number), at_ns)

    def cancel_timer(self, name: str, number: int = 0) -> None:
        """Forget a timer, if it is set."""
        if name in RESERVED_TIMERS:
            raise PolicyError(f"the timer name {name!r} is the Scheduler's own")
        self._ledger.cancel_timer((name, number))

    def report_work(self, units: int) -> None:
        """Say how much was computed (states expanded, points scanned): drivers charge time for it.

        Policies read no clock, so a search with a time limit is one with a limit on this.
        """
        self._ledger.work += units


def _illegal(tasks: list[Task], problem: str) -> PolicyError:
    """An order to send tasks out that is not legal; they may be in no queue of the policy's now."""
    error = PolicyError(problem)
    error.tasks = tasks
    return error
