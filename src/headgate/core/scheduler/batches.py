"""Handlers of the events that end a batch: finished, failed, refused or lost.

They decide whether the tasks of the batch are done, retried, quarantined or failed.
"""

from __future__ import annotations

from collections import deque
from typing import Final, final

from headgate.core.errors import DriverError
from headgate.core.events import (
    REFUSAL_NAMES,
    BatchFailed,
    BatchFinished,
    BatchLost,
    BatchRefused,
    Refusal,
)
from headgate.core.policy import Policy, overrides
from headgate.core.records import Batch, Task
from headgate.core.scheduler.policy_hooks import PolicyHooks
from headgate.core.scheduler.requests import RequestHandlers
from headgate.core.scheduler.state import StateWriter
from headgate.core.states import (
    BATCH_FINISHED,
    NODE_UP,
    TASK_RUNNING,
    BatchState,
    Failure,
    InstanceState,
    NodeState,
    RequestState,
    TaskState,
)
from headgate.core.view import View

# CPython reads a module global many times faster than a class attribute.
_NO_RETRY: Final = 1 << 30  # attempts and refusals of a task that is not to be retried


@final
class Quarantine:
    """Makes tasks that may have killed a worker run alone, one at a time per function.

    When a node dies, one of the tasks that it was running may have been the cause, and the next
    node that runs this task would die too. A task that was alone on the node fails, because nothing
    else can have been the cause. Of several tasks, each becomes a suspect. A suspect is retried
    under the rules for anything that may have run (its function is idempotent, attempts are left,
    its deadline has not passed), but in a batch of its own, and no more than one suspect of each
    function at a time. So a request kills at most two workers, and the other requests that ran
    beside it are answered. On a node that may hold batches of several gateways, no task counts as
    alone at first.
    """

    def __init__(
        self, view: View, state: StateWriter, requests: RequestHandlers, hooks: PolicyHooks
    ) -> None:
        self._view = view
        self._state = state
        self._requests = requests
        self._hooks = hooks
        self._held: dict[int, deque[Task]] = {}  # by function id
        # Batches in flight on a node when another of its batches was reported lost. Without this
        # set, the last batch to be reported would look as if it had been alone.
        self._had_neighbours: set[int] = set()

    @property
    def is_empty(self) -> bool:
        """Whether there is no suspect."""
        return not self._held

    def was_running(self, batch: Batch) -> bool:
        """Whether a batch can have been running on its node until now.

        It cannot if it waits for a start or a load of weights, or if its instance is gone.
        """
        instance, node = batch.instance, batch.node
        if instance is None or node is None or instance.is_preparing:
            return False
        return instance.state != InstanceState.GONE or node.state == NodeState.DOWN

    def was_alone(self, batch: Batch) -> bool:
        """Whether a lost batch was a single task, and the only batch that its node was running."""
        in_flight = self._view.batches
        others = [b.id for b in in_flight.values() if b.node is batch.node and self.was_running(b)]
        had_neighbours = bool(others) or batch.id in self._had_neighbours
        if self._view.gateways > 1 and (batch.pool.slots > 1 or batch.pool.queue_max > 0):
            had_neighbours = True  # a batch of another gateway may have run beside it or before it
        self._had_neighbours = {id for id in self._had_neighbours if id in in_flight}
        self._had_neighbours.update(others)
        return len(batch.tasks) == 1 and not had_neighbours

    def hold(self, task: Task) -> None:
        """Hold a suspect until its turn."""
        task.state = TaskState.HELD
        self._held.setdefault(task.function.id, deque()).append(task)
        self._state.needs_finish = True

    def release(self) -> None:
        """After an event: release the next suspect of each function whose last one has ended."""
        suspects = self._view.suspects
        for function_id in list(self._held):
            held = self._held[function_id]
            while not self._is_busy(function_id) and held:
                task = held.popleft()
                if task.state == TaskState.HELD:
                    self._release_task(task)
            if not held and function_id not in suspects:
                del self._held[function_id]

    def _is_busy(self, function_id: int) -> bool:
        """Whether a released suspect of the function is still queued or running."""
        task = self._view.suspects.get(function_id)
        if task is None:
            return False
        if task.state in (TaskState.READY, TaskState.RUNNING):
            return True
        if task.state == TaskState.DROPPED and any(
            task in batch.tasks for batch in self._view.batches.values()
        ):
            return True  # its request is settled, but it still runs
        del self._view.suspects[function_id]
        return False

    def _release_task(self, task: Task) -> None:
        if self._view.now_ns >= task.request.deadline_ns:
            self._requests.fail_task(task, f"{task.function.name}: {Failure.LOST}")
            return
        self._view.suspects[task.function.id] = task
        task.state = TaskState.READY
        self._hooks.task_returned(task, None)


@final
class BatchHandlers:
    """Handles the one event that ends each batch, and batches that time out."""

    def __init__(
        self,
        view: View,
        state: StateWriter,
        policy: Policy,
        requests: RequestHandlers,
        hooks: PolicyHooks,
        quarantine: Quarantine,
    ) -> None:
        self._view = view
        self._state = state
        self._policy = policy
        self._requests = requests
        self._hooks = hooks
        self._quarantine = quarantine
        self._limits = view.app.limits
        self._has_batch_hook = overrides(policy, "on_batch_ended")

    def finished(self, now_ns: int, event: BatchFinished) -> None:
        """Complete the tasks of a batch, except those that were dropped meanwhile."""
        view = self._view
        batch = view.batches.get(event.batch_id)
        if batch is None:
            self._find(now_ns, event.batch_id)
            self._state.timeouts.on_late_finish(event.batch_id, now_ns)
            return
        view.now_ns = now_ns
        self._state.end_batch(batch, BATCH_FINISHED)
        failed_tasks, too_large = event.failed_tasks, event.too_large
        if failed_tasks:
            # For the policy: an error ends a batch early, and what remains of it runs again, so its
            # time teaches nothing. Else requests that fail at once would make a function look fast.
            batch.state = BatchState.FAILED
        for task in batch.tasks:
            if task.state != TASK_RUNNING:
                continue
            if failed_tasks and task.id in failed_tasks:
                self._requests.task_failed(task)
            elif too_large and task.id in too_large:
                self._retry_elsewhere(task, batch, self._may_repeat(task))
            else:
                self._requests.task_done(task, batch, event.unsure)
        self._notify_policy(batch)

    def refused(self, now_ns: int, event: BatchRefused) -> None:
        """Retry the tasks of a batch that never ran, and back off from the node or pool."""
        if event.reason not in REFUSAL_NAMES:
            raise DriverError(f"batch {event.batch_id}: unknown refusal reason {event.reason}")
        batch = self._find(now_ns, event.batch_id)
        if batch is None:
            return
        self._state.end_batch(batch, BatchState.REFUSED)
        is_busy = event.reason == Refusal.BUSY and batch.node is not None
        backs_off = not is_busy or self._hooks.backs_off(batch)
        if backs_off:
            self._back_off(batch, event.reason)
        reason = f"{Failure.REFUSED}, last reason: {REFUSAL_NAMES[event.reason]}"
        for task in batch.tasks:
            task.attempts_made -= 1
            if backs_off:
                task.refusals += 1
            else:
                task.busy_refusals += 1
            may_retry = task.refusals < self._limits.refusals_max
            if event.reason == Refusal.TOO_LARGE:
                self._retry_elsewhere(task, batch, may_retry)
            else:
                self._retry_or_fail(task, may_retry, reason, event.reason)
        self._notify_policy(batch)

    def failed(self, now_ns: int, event: BatchFailed) -> None:
        """Retry the tasks of a batch that ran and failed, if that is safe."""
        batch = self._find(now_ns, event.batch_id)
        if batch is None:
            return
        self._state.end_batch(batch, BatchState.FAILED)
        self._repeat(batch, event.reason)

    def lost(self, now_ns: int, event: BatchLost) -> None:
        """Retry the tasks of a lost batch if that is safe; quarantine them if its node died."""
        batch = self._find(now_ns, event.batch_id)
        if batch is None:
            return
        quarantine = self._quarantine
        is_suspect = event.node_died and quarantine.was_running(batch)
        self._state.end_batch(batch, BatchState.LOST)
        self._back_off(batch, Refusal.BUSY)
        if not is_suspect:
            self._repeat(batch, Failure.LOST)
            return
        was_alone = quarantine.was_alone(batch)
        for task in batch.tasks:
            if was_alone or task.must_run_alone:
                # A competing copy that is still in flight is the last attempt.
                task.attempts_made = task.refusals = _NO_RETRY
                self._retry_or_fail(task, False, f"{task.function.name}: {Failure.KILLED_WORKER}")
            else:
                task.must_run_alone = True
                may_repeat = self._may_repeat(task)
                self._retry_or_fail(task, may_repeat, f"{task.function.name}: {Failure.LOST}")
        self._notify_policy(batch)

    def timed_out(self, batch_id: int) -> None:
        """Give up a batch that has timed out. A late result of it is ignored."""
        batch = self._view.batches[batch_id]
        self._state.end_batch(batch, BatchState.LOST)
        self._state.timeouts.on_timeout(batch)
        self._back_off(batch, Refusal.BUSY)
        self._repeat(batch, "timed out")

    def _repeat(self, batch: Batch, reason: str) -> None:
        """Retry, where that is safe, the tasks of a batch that may have run."""
        for task in batch.tasks:
            self._retry_or_fail(task, self._may_repeat(task), f"{task.function.name}: {reason}")
        self._notify_policy(batch)

    def _find(self, now_ns: int, batch_id: int) -> Batch | None:
        """The batch that an event ends. For a late or duplicate event None, and it is counted."""
        batch = self._view.batches.get(batch_id)
        if batch is None and not self._state.has_issued_batch(batch_id):
            raise DriverError(f"batch {batch_id} was never sent")
        self._view.now_ns = now_ns
        if batch is None:
            self._view.events_ignored += 1
        return batch

    def _notify_policy(self, batch: Batch) -> None:
        """Call the policy's hooks for a batch that has ended and for the capacity it freed."""
        if self._has_batch_hook:
            try:
                self._policy.on_batch_ended(batch, self._view.now_ns - batch.sent_ns)
            except Exception as error:
                self._requests.fault("on_batch_ended", error)
        node = batch.node
        if node is not None:
            if node.state == NODE_UP:
                try:
                    self._policy.on_capacity(node)
                except Exception as error:
                    self._requests.fault("on_capacity", error)
        elif self._view.is_pool_available(batch.pool.id):
            self._hooks.pool_available(batch.pool.id)

    def _back_off(self, batch: Batch, reason: int) -> None:
        """Back off from the node or pool that refused or lost a batch."""
        node = batch.node
        is_too_large = reason == Refusal.TOO_LARGE and node is None
        if is_too_large or reason == Refusal.CANCELLED:
            return  # the reason was the batch, not the node or pool
        now_ns, backoff_ns = self._view.now_ns, self._limits.backoff_ns
        if node is None:
            breaker = self._view.breakers[batch.pool.id]
            if breaker is not None:
                is_gone = reason == Refusal.GONE
                breaker.on_refused(now_ns, backoff_ns, batch.sent_ns, is_gone=is_gone)
                self._state.arm_pool_timer(breaker)
        elif node.state == NodeState.UP:
            self._state.block_node(node, now_ns + backoff_ns)

    def _retry_elsewhere(self, task: Task, batch: Batch, may_retry: bool) -> None:
        """Retry a task that exceeded a platform's payload limit on a pool where it fits.

        In a batch of several tasks it is unknown which one was too large, so each is taken to have
        its share of the limit: the same tasks are not batched again, and a task that was alone in
        its batch is not sent there again.
        """
        platform = batch.pool.faas
        if platform is not None:
            share = platform.payload_bytes_max // len(batch.tasks) + 1
            task.payload_bytes = max(task.payload_bytes, share)
        fits = self._view.fits_somewhere(task)
        self._retry_or_fail(task, may_retry and fits, Failure.TOO_LARGE, Refusal.TOO_LARGE)

    def _may_repeat(self, task: Task) -> bool:
        return (
            task.function.is_idempotent
            and task.attempts_made < self._limits.attempts_max
            and self._view.now_ns < task.request.deadline_ns
        )

    def _retry_or_fail(
        self, task: Task, may_retry: bool, reason: str, refusal: int | None = None
    ) -> None:
        """Retry or fail a running task after an attempt without a result.

        Nothing happens if a competing copy is still in flight, or if the task was dropped.
        """
        if task.state != TASK_RUNNING:
            return
        if task.copies_in_flight:
            task.copies_in_flight -= 1
            return
        if not may_retry:
            self._requests.fail_task(task, reason)
            return
        # Not READY while we check for expiry: the policy must not get `on_task_withdrawn` for it.
        task.state = TaskState.BLOCKED
        self._requests.expire_if_overdue(task.request)
        request = task.request
        if request.state != RequestState.OPEN:
            return
        if task.function.id in self._view.unloadable:
            self._requests.fail_unloadable(request)
            return
        if task.must_run_alone and self._view.suspects.get(task.function.id) is not task:
            self._quarantine.hold(task)
            return
        task.state = TaskState.READY
        self._hooks.task_returned(task, refusal)
