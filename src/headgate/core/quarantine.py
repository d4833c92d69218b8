"""Quarantine: who may have killed a worker runs again alone, one at a time.

When a node dies, one of the requests that it was running may have been the cause, and the next node
that runs it dies too. A task that was alone there is final: there is nobody else to suspect. Of
several, each is a suspect. A suspect is repeated under the rules for whatever may have run (its
function is idempotent, attempts are left, its deadline has not passed), but in a batch of its own,
and of each function no more than one at a time. So a request kills two workers at most, and its
mates are answered.
"""

from __future__ import annotations

from collections import deque
from typing import final

from headgate.core.hooks import Hooks
from headgate.core.ledger import Ledger
from headgate.core.lifecycle import InstanceState, NodeState, TaskState
from headgate.core.outcome import Failure
from headgate.core.records import Batch, Task
from headgate.core.requests import Requests
from headgate.core.view import View


@final
class Quarantine:
    """Holds suspects back and hands them to the policy one after the other."""

    def __init__(self, view: View, ledger: Ledger, requests: Requests, hooks: Hooks) -> None:
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
