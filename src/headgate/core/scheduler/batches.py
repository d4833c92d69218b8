"""Batches that come back: finished, failed, refused or lost, and what becomes of their tasks."""

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
    BatchState,
    Failure,
    InstanceState,
    NodeState,
    Outcome,
    Rejection,
    RequestState,
    TaskState,
)
from headgate.core.view import View

# Quarantine: who may have killed a worker runs again alone, one at a time.
#
# When a node dies, one of the requests that it was running may have been the cause, and the next
# node that runs it dies too. A task that was alone there is final: there is nobody else to
# suspect. Of several, each is a suspect. A suspect is repeated under the rules for whatever may
# have run (its function is idempotent, attempts are left, its deadline has not passed), but in a
# batch of its own, and of each function no more than one at a time. So a request kills two
# workers at most, and its mates are answered.


@final
class Quarantine:
    """Holds suspects back and hands them to the policy one after the other."""

    def __init__(
        self, view: View, ledger: StateWriter, requests: RequestHandlers, hooks: PolicyHooks
    ) -> None:
        self._view = view
        self._ledger = ledger
        self._requests = requests
        self._hooks = hooks
        self._held: dict[int, deque[Task]] = {}  # by function id
        # Batches that were out beside one that is lost, so that the last to be told of does not
        # look as if it had been alone.
        self._in_company: set[int] = set()

    @property
    def is_empty(self) -> bool:
        """Whether nobody is suspected."""
        return not self._held

    # --- who is suspected ----------------------------------------------------------------------

    def was_running(self, batch: Batch) -> bool:
        """Whether a batch can have been running on its node until now.

        Not if it waits for a start or a load, or for the news that its instance is gone.
        """
        instance, node = batch.instance, batch.node
        if instance is None or node is None or instance.is_preparing:
            return False
        return instance.state != InstanceState.GONE or node.state == NodeState.DOWN

    def was_alone(self, batch: Batch) -> bool:
        """Whether a lost batch was one task, and all that its node was running of ours."""
        out = self._view.batches
        mates = [b.id for b in out.values() if b.node is batch.node and self.was_running(b)]
        had_company = bool(mates) or batch.id in self._in_company
        self._in_company = {id for id in self._in_company if id in out}
        self._in_company.update(mates)
        return len(batch.tasks) == 1 and not had_company

    def hold(self, task: Task) -> None:
        """Keep a suspect until it is its turn."""
        task.state = TaskState.HELD
        self._held.setdefault(task.function.id, deque()).append(task)
        self._ledger.has_afterthoughts = True

    # --- whose turn it is ----------------------------------------------------------------------

    def release(self) -> None:
        """After an event: where the last suspect of a function is done with, the next may run."""
        suspects = self._view.suspects
        for function_id in list(self._held):
            held = self._held[function_id]
            while not self._is_busy(function_id) and held:
                task = held.popleft()
                if task.state == TaskState.HELD:
                    self._hand_over(task)
            if not held and function_id not in suspects:
                del self._held[function_id]

    def _is_busy(self, function_id: int) -> bool:
        """Whether a suspect of the function is with the policy, or out."""
        task = self._view.suspects.get(function_id)
        if task is None:
            return False
        if task.state in (TaskState.READY, TaskState.RUNNING):
            return True
        if task.state == TaskState.DROPPED and any(
            task in batch.tasks for batch in self._view.batches.values()
        ):
            return True  # nobody wants it any more, but it runs
        del self._view.suspects[function_id]
        return False

    def _hand_over(self, task: Task) -> None:
        if self._view.now_ns >= task.request.deadline_ns:
            self._requests.give_up_failed(task, f"{task.function.name}: {Failure.LOST}")
            return
        self._view.suspects[task.function.id] = task
        task.state = TaskState.READY
        self._hooks.task_returned(task)


# Interpreted, a name of the module is read many times faster than one of a class.
_FINISHED: Final = BatchState.FINISHED
_RUNNING: Final = TaskState.RUNNING
_UP: Final = NodeState.UP
_NO_MORE: Final = 1 << 30  # attempts and refusals of a task that is not to be tried again


@final
class BatchHandlers:
    """Handles the one event that ends each batch."""

    def __init__(
        self,
        view: View,
        ledger: StateWriter,
        policy: Policy,
        requests: RequestHandlers,
        hooks: PolicyHooks,
        quarantine: Quarantine,
    ) -> None:
        self._view = view
        self._ledger = ledger
        self._policy = policy
        self._requests = requests
        self._hooks = hooks
        self._quarantine = quarantine
        self._limits = view.app.limits
        self._learns = overrides(policy, "on_batch_ended")

    def finished(self, now_ns: int, event: BatchFinished) -> None:
        """Its tasks are done, unless they were wanted no longer."""
        view = self._view
        batch = view.batches.get(event.batch_id)
        if batch is None:
            self._ignore(now_ns, event.batch_id)
            self._ledger.watchdog.finished_late(event.batch_id, now_ns)
            return
        view.now_ns = now_ns
        self._ledger.end_batch(batch, _FINISHED)
        broken, too_large = event.failed_tasks, event.too_large
        for task in batch.tasks:
            if task.state != _RUNNING:
                continue
            if broken and task.id in broken:
                self._requests.task_broke(task)
            elif too_large and task.id in too_large:
                self._retry_elsewhere(task, batch, self._may_repeat(task))
            else:
                self._requests.task_done(task, batch, event.unsure)
        self._tell_policy(batch)

    def refused(self, now_ns: int, event: BatchRefused) -> None:
        """It never ran, so its tasks may be tried again; the place is left alone for a moment."""
        if event.reason not in REFUSAL_NAMES:
            raise DriverError(f"batch {event.batch_id}: no such refusal as {event.reason}")
        batch = self._view.batches.get(event.batch_id)
        if batch is None:
            self._ignore(now_ns, event.batch_id)
            return
        self._view.now_ns = now_ns
        self._ledger.end_batch(batch, BatchState.REFUSED)
        self._back_off(batch, event.reason)
        reason = f"{Failure.REFUSED}, at last: {REFUSAL_NAMES[event.reason]}"
        for task in batch.tasks:
            task.attempts_made -= 1
            task.refusals += 1
            may_retry = task.refusals < self._limits.refusals_max
            if event.reason == Refusal.TOO_LARGE:
                self._retry_elsewhere(task, batch, may_retry)
            else:
                self._retry_or_fail(task, may_retry, reason)
        self._tell_policy(batch)

    def failed(self, now_ns: int, event: BatchFailed) -> None:
        """It ran and failed: its tasks are repeated only if that is safe."""
        batch = self._view.batches.get(event.batch_id)
        if batch is None:
            self._ignore(now_ns, event.batch_id)
            return
        self._view.now_ns = now_ns
        self._ledger.end_batch(batch, BatchState.FAILED)
        self._repeat(batch, event.reason)

    def lost(self, now_ns: int, event: BatchLost) -> None:
        """Nobody knows whether it ran. Where its node died, its tasks are suspected of that."""
        batch = self._view.batches.get(event.batch_id)
        if batch is None:
            self._ignore(now_ns, event.batch_id)
            return
        self._view.now_ns = now_ns
        quarantine = self._quarantine
        is_suspect = event.node_died and quarantine.was_running(batch)
        self._ledger.end_batch(batch, BatchState.LOST)
        self._back_off(batch, Refusal.BUSY)
        if not is_suspect:
            self._repeat(batch, Failure.LOST)
            return
        was_alone = quarantine.was_alone(batch)
        for task in batch.tasks:
            if was_alone or task.must_run_alone:
                task.attempts_made = task.refusals = _NO_MORE  # a copy that is out is the last
                self._retry_or_fail(task, False, f"{task.function.name}: {Failure.KILLED_WORKER}")
            else:
                task.must_run_alone = True
                may_repeat = self._may_repeat(task)
                self._retry_or_fail(task, may_repeat, f"{task.function.name}: {Failure.LOST}")
        self._tell_policy(batch)

    def given_up(self, batch_id: int) -> None:
        """No answer came in time. It may come yet, but nobody waits for it any more."""
        batch = self._view.batches[batch_id]
        self._ledger.end_batch(batch, BatchState.LOST)
        self._ledger.watchdog.gave_up(batch)
        self._back_off(batch, Refusal.BUSY)
        self._repeat(batch, "no answer in time")

    def _repeat(self, batch: Batch, reason: str) -> None:
        """What may have run is tried again where that is safe."""
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
        """The batch has ended, and its place can take another."""
        if self._learns:
            try:
                self._policy.on_batch_ended(batch, self._view.now_ns - batch.sent_ns)
            except Exception as error:
                self._requests.fault("on_batch_ended", error)
        node = batch.node
        if node is not None:
            if node.state == _UP:
                try:
                    self._policy.on_capacity(node)
                except Exception as error:
                    self._requests.fault("on_capacity", error)
        elif self._view.is_pool_available(batch.pool.id):
            self._hooks.pool_open(batch.pool.id)

    def _back_off(self, batch: Batch, reason: int) -> None:
        """Leave alone, for a moment, the place that refused."""
        node = batch.node
        is_too_large = reason == Refusal.TOO_LARGE and node is None
        if is_too_large or reason == Refusal.CANCELLED:
            return  # that was about the batch, not about the place
        now_ns, backoff_ns = self._view.now_ns, self._limits.backoff_ns
        if node is None:
            spillway = self._view.breakers[batch.pool.id]
            if spillway is not None:
                is_gone = reason == Refusal.GONE
                spillway.refused(now_ns, backoff_ns, batch.sent_ns, is_gone=is_gone)
                self._ledger.arm_pool_timer(spillway)
        elif node.state == NodeState.UP:
            self._ledger.block_node(node, now_ns + backoff_ns)

    def _retry_elsewhere(self, task: Task, batch: Batch, may_retry: bool) -> None:
        """A platform cannot carry this task: it is not sent there again, but where it fits.

        Of several in a batch nobody knows which was too large, so each counts for its share: the
        same ones do not go together again, and one that went alone does not go again.
        """
        platform = batch.pool.faas
        if platform is not None:
            share = platform.payload_bytes_max // len(batch.tasks) + 1
            task.payload_bytes = max(task.payload_bytes, share)
        fits = self._view.fits_somewhere(task)
        self._retry_or_fail(task, may_retry and fits, Failure.TOO_LARGE)

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
        self._requests.expire_if_overdue(task.request)
        request = task.request
        if request.state != RequestState.OPEN:
            return
        if task.function.id in self._view.unloadable:
            retry_ns = self._view.load_retry_ns(request.pipeline)
            self._requests.settle_early(request, Outcome.FAILED, Rejection.LOAD_FAILED, retry_ns)
            return
        if task.must_run_alone and self._view.suspects.get(task.function.id) is not task:
            self._quarantine.hold(task)
            return
        task.state = TaskState.READY
        self._hooks.task_returned(task)
