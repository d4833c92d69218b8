"""The books of requests and batches: every change of their state, and the actions that go with it.

The Scheduler's parts (for events) and `Orders` (for a policy's wishes) check what is legal and then
come here. Nothing in this file decides and nothing in it can fail, which is why an illegal event or
order leaves the state as it was.
"""

from __future__ import annotations

from typing import final

from headgate.core.actions import Action, CancelBatch, CancelTimer, SetTimer, Settle
from headgate.core.events import TimerKey
from headgate.core.lifecycle import InstanceState, RequestState, TaskState
from headgate.core.model import Variant
from headgate.core.records import Batch, Node, Request, Task
from headgate.core.view import View


@final
class Ledger:
    """Writes the `View` and collects the actions of the event being handled."""

    def __init__(self, view: View, ids_start: int, ids_step: int) -> None:
        self.view = view
        self.actions: list[Action] = []
        self.work = 0  # what the policy reports to have computed, in its own units
        # Schedulers that share a pool draw from interleaved ids, so that a Backend can tell
        # whose batch is whose.
        self._ids_step = ids_step
        self._next_id = ids_start

    # --- batches -------------------------------------------------------------------------------

    def next_batch_id(self) -> int:
        """Draw a fresh batch id."""
        batch_id = self._next_id
        self._next_id = batch_id + self._ids_step
        return batch_id

    def was_batch(self, batch_id: int) -> bool:
        """Whether this id was ever given to a batch."""
        is_ours = (batch_id - self._next_id) % self._ids_step == 0
        return 0 <= batch_id < self._next_id and is_ours

    def send(self, batch: Batch) -> None:
        """A batch goes out: it takes its slot and its compute."""
        view = self.view
        view.batches[batch.id] = batch
        instance = batch.instance
        node = batch.node
        if instance is None or node is None:
            return
        instance.running += 1
        instance.last_used_ns = batch.sent_ns
        if instance.state == InstanceState.IDLE:
            instance.state = InstanceState.BUSY
        if node.limits_compute:
            shape = batch.variant.shape
            node.cpu_milli_used += shape.cpu_milli
            node.gpu_sevenths_used += shape.gpu_sevenths
        node.running += 1
        if node.running >= node.slots and node.id in view.free_nodes:
            del view.free_nodes[node.id]

    def take_back(self, batch: Batch, state: int) -> None:
        """A batch has ended, this way or that: its slot and its compute are free again."""
        del self.view.batches[batch.id]
        batch.state = state
        for task in batch.tasks:
            task.attempts_out -= 1
        instance = batch.instance
        node = batch.node
        if instance is None or node is None or instance.state == InstanceState.GONE:
            return
        instance.running -= 1
        if instance.running == 0 and instance.state == InstanceState.BUSY:
            instance.state = InstanceState.IDLE
        self.return_slot(node, batch.variant)

    def return_slot(self, node: Node, variant: Variant) -> None:
        """One batch less is on a node that is up."""
        if node.limits_compute:
            node.cpu_milli_used -= variant.shape.cpu_milli
            node.gpu_sevenths_used -= variant.shape.gpu_sevenths
        node.running -= 1
        view = self.view
        # The rule of `is_free`, spelled out: this is the hottest line of the books.
        if node.running < node.slots and node.blocked_until_ns <= view.now_ns:
            free_nodes = view.free_nodes
            if node.id not in free_nodes:
                free_nodes[node.id] = node

    def call_back(self, task: Task) -> None:
        """A task is not to run any more: cancel the batches that carry nothing else.

        O(batches that are out): it is rare, and a list per task would cost every request.
        """
        for batch in self.view.batches.values():
            if task in batch.tasks and all(t.state != TaskState.RUNNING for t in batch.tasks):
                node_id = None if batch.node is None else batch.node.id
                self.actions.append(CancelBatch(batch.id, batch.pool.id, node_id))

    def block_node(self, node: Node, until_ns: int) -> None:
        """Leave a node alone for a while: it has just refused or lost something."""
        node.blocked_until_ns = until_ns
        self.view.free_nodes.pop(node.id, None)
        self.set_timer(("unblock", node.id), until_ns)

    # --- requests ------------------------------------------------------------------------------

    def settle(
        self,
        request: Request,
        outcome: int,
        reason: str = "",
        predicted_ns: int = 0,
        retry_ns: int = 0,
    ) -> None:
        """The request ends, once. Tasks that are left of it are dropped."""
        request.state = RequestState.SETTLED
        request.outcome = outcome
        del self.view.requests[request.id]
        self.actions.append(Settle(request.id, outcome, reason, predicted_ns, retry_ns))
        if request.gives_up:
            self.cancel_timer(("deadline", request.id))
        if request.tasks_left:
            self._drop_tasks(request)
        request.tasks.clear()  # no reference cycles: what has ended is freed at once

    def _drop_tasks(self, request: Request) -> None:
        for task in request.tasks:
            was = task.state
            if was == TaskState.BLOCKED or was == TaskState.READY:
                task.state = TaskState.DROPPED
                self.release_reservation(task)
            elif was == TaskState.RUNNING:
                task.state = TaskState.DROPPED
                self.call_back(task)

    def release_reservation(self, task: Task) -> None:
        """The task needs its reservation no longer, if it has one."""
        reservation = self.view.reservations.pop(task.id, None)
        if reservation is not None:
            del self.view.nodes[reservation.node_id].reservations[task.id]

    # --- timers --------------------------------------------------------------------------------

    def set_timer(self, key: TimerKey, at_ns: int) -> None:
        """Ask to be woken; a timer of the same key is replaced."""
        self.view.timers[key] = at_ns
        self.actions.append(SetTimer(key, at_ns))

    def cancel_timer(self, key: TimerKey) -> None:
        """Forget a timer, if it is set."""
        if self.view.timers.pop(key, None) is not None:
            self.actions.append(CancelTimer(key))
