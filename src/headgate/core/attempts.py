"""Batches that come back: finished, failed, refused or lost, and what becomes of their tasks."""

from __future__ import annotations

from typing import Final, final

from headgate.core.errors import DriverError
from headgate.core.events import REFUSAL_NAMES, BatchFinished, BatchRefused, Refusal
from headgate.core.ledger import Ledger
from headgate.core.lifecycle import BatchState, NodeState, RequestState, TaskState
from headgate.core.outcome import Failure
from headgate.core.policy import Policy, overrides
from headgate.core.records import Batch, Task
from headgate.core.requests import Requests
from headgate.core.view import View

# Interpreted, a name of the module is read many times faster than one of a class.
_FINISHED: Final = BatchState.FINISHED
_RUNNING: Final = TaskState.RUNNING
_UP: Final = NodeState.UP


@final
class Attempts:
    """Handles the one event that ends each batch."""

    def __init__(self, view: View, ledger: Ledger, policy: Policy, requests: Requests) -> None:
        self._view = view
        self._ledger = ledger
        self._policy = policy
        self._requests = requests
        self._limits = view.app.limits
        self._learns = overrides(policy, "on_batch_ended")

    def finished(self, now_ns: int, event: BatchFinished) -> None:
        """Its tasks are done, unless they were wanted no longer."""
        view = self._view
        batch = view.batches.get(event.batch_id)
        if batch is None:
            self._ignore(now_ns, event.batch_id)
            return
        view.now_ns = now_ns
        self._ledger.take_back(batch, _FINISHED)
        broken = event.broken
        for task in batch.tasks:
            if task.state != _RUNNING:
                continue
            if broken and task.id in broken:
                self._requests.task_broke(task)
            else:
                self._requests.task_done(task, batch, event.unsure)
        if self._learns:
            self._policy.on_batch_ended(batch, now_ns - batch.sent_ns)
        self._offer(batch)

    def refused(self, now_ns: int, event: BatchRefused) -> None:
        """It never ran, so its tasks may be tried again; the place is left alone for a moment."""
        if not 0 <= event.reason < len(REFUSAL_NAMES):
            raise DriverError(f"batch {event.batch_id}: no such refusal as {event.reason}")
        batch = self._view.batches.get(event.batch_id)
        if batch is None:
            self._ignore(now_ns, event.batch_id)
            return
        self._view.now_ns = now_ns
        self._ledger.take_back(batch, BatchState.REFUSED)
        self._back_off(batch, event.reason)
        reason = f"{Failure.REFUSED}, at last: {REFUSAL_NAMES[event.reason]}"
        for task in batch.tasks:
            task.attempts_made -= 1
            task.refusals += 1
            self._retry_or_fail(task, task.refusals < self._limits.refusals_max, reason)
        self._tell_policy(batch)

    def broke(self, now_ns: int, batch_id: int, state: int, reason: str) -> None:
        """It ran and failed, or nobody knows: its tasks are repeated only if that is safe."""
        batch = self._view.batches.get(batch_id)
        if batch is None:
            self._ignore(now_ns, batch_id)
            return
        self._view.now_ns = now_ns
        self._ledger.take_back(batch, state)
        if state == BatchState.LOST:
            self._back_off(batch, Refusal.BUSY)
        for task in batch.tasks:
            self._retry_or_fail(task, self._may_repeat(task), f"{task.function.name}: {reason}")
        self._tell_policy(batch)

    def _ignore(self, now_ns: int, batch_id: int) -> None:
        """Take note of a late duplicate; raise if there never was such a batch."""
        if not self._ledger.was_batch(batch_id):
            raise DriverError(f"batch {batch_id} was never sent")
        self._view.now_ns = now_ns
        self._view.events_ignored += 1

    def _tell_policy(self, batch: Batch) -> None:
        if self._learns:
            self._policy.on_batch_ended(batch, self._view.now_ns - batch.sent_ns)
        self._offer(batch)

    def _offer(self, batch: Batch) -> None:
        """Its place can take another."""
        node = batch.node
        if node is not None:
            if node.state == _UP:
                self._policy.on_capacity(node)
        elif self._view.is_pool_open(batch.pool.id):
            self._policy.on_pool_open(batch.pool.id)

    def _back_off(self, batch: Batch, reason: int) -> None:
        """Leave alone, for a moment, the place that refused."""
        if reason in (Refusal.LATE, Refusal.CANCELLED):
            return  # that was about the batch, not about the place
        now_ns, backoff_ns = self._view.now_ns, self._limits.backoff_ns
        node = batch.node
        if node is None:
            spillway = self._view.spillways[batch.pool.id]
            if spillway is not None:
                spillway.refused(now_ns, backoff_ns, is_gone=reason == Refusal.GONE)
                self._ledger.await_pool(spillway)
        elif node.state == NodeState.UP:
            self._ledger.block_node(node, now_ns + backoff_ns)

    def _may_repeat(self, task: Task) -> bool:
        return (
            task.function.is_idempotent
            and task.attempts_made < self._limits.attempts_max
            and self._view.now_ns < task.request.deadline_ns
        )

    def _retry_or_fail(self, task: Task, may_retry: bool, reason: str) -> None:
        """An attempt at this task came to nothing. Others may still be out, or want it no more."""
        if task.state != _RUNNING:
            return
        if task.copies_out:
            task.copies_out -= 1
            return
        if not may_retry:
            self._requests.give_up_failed(task, reason)
            return
        task.state = TaskState.BLOCKED  # nobody's, while it is seen whether it is wanted
        self._requests.give_up_if_overdue(task.request)
        if task.request.state == RequestState.OPEN:
            task.state = TaskState.READY
            self._policy.on_task_returned(task)
