"""The books of requests and batches: every change of their state, and the actions that go with it.

The Scheduler's parts (for events) and `Orders` (for a policy's wishes) check what is legal and then
come here. Nothing in this file decides and nothing in it can fail, which is why an illegal event or
order leaves the state as it was.
"""

from __future__ import annotations

from typing import Final, final

from headgate.core.actions import (
    Action,
    CancelBatch,
    CancelTimer,
    Dispatch,
    KeepWarm,
    ReportFault,
    SetTimer,
    Settle,
)
from headgate.core.errors import PolicyError
from headgate.core.events import TimerKey
from headgate.core.lifecycle import InstanceState, RequestState, TaskState
from headgate.core.model import Pool, Variant
from headgate.core.records import Batch, Instance, Node, Request, Task
from headgate.core.spillway import Spillway
from headgate.core.view import View
from headgate.core.watchdog import Watchdog

# Interpreted, a name of the module is read many times faster than one of a class.
_BUSY: Final = InstanceState.BUSY
_GONE: Final = InstanceState.GONE
_IDLE: Final = InstanceState.IDLE
_RUNNING: Final = TaskState.RUNNING
_SETTLED: Final = RequestState.SETTLED


@final
class Ledger:
    """Writes the `View` and collects the actions of the event being handled."""

    def __init__(self, view: View, ids_start: int, ids_step: int) -> None:
        self.view = view
        self.actions: list[Action] = []
        self.has_begun = False  # an event has told the time
        self.work = 0  # what the policy reports to have computed, in its own units
        self.has_afterthoughts = False  # something is to be looked after at the end of each event
        self.fault: PolicyError | None = None  # the first of the event being handled
        # Schedulers that share a pool draw from interleaved ids, so that a Backend can tell
        # whose batch is whose.
        self._ids_step = ids_step
        self.watchdog = Watchdog(view.app)
        self._watches = self.watchdog.is_needed
        self._next_id = ids_start

    # --- batches -------------------------------------------------------------------------------

    def was_batch(self, batch_id: int) -> bool:
        """Whether this id was ever given to a batch."""
        is_ours = (batch_id - self._next_id) % self._ids_step == 0
        return 0 <= batch_id < self._next_id and is_ours

    def send(
        self,
        tasks: list[Task],
        task_ids: list[int],
        items: int,
        variant: Variant,
        instance: Instance | None,
        node: Node | None,
        pool: Pool,
    ) -> Batch:
        """A batch goes out: it takes its slot and its compute."""
        view = self.view
        batch_id = self._next_id
        self._next_id = batch_id + self._ids_step
        batch = Batch(batch_id, variant, tasks, items, instance, node, pool, view.now_ns)
        view.batches[batch_id] = batch
        instance_id = node_id = None
        if instance is not None and node is not None:
            instance_id = instance.id
            node_id = node.id
            instance.running += 1
            instance.last_used_ns = view.now_ns
            if instance.state == _IDLE:
                instance.state = _BUSY
            if node.limits_compute:
                shape = variant.shape
                node.cpu_milli_used += shape.cpu_milli
                node.gpu_sevenths_used += shape.gpu_sevenths
            node.running += 1
            if node.running >= node.slots and node_id in view.free_nodes:
                del view.free_nodes[node_id]
        elif pool.serverless is not None:
            self._spill(batch)
        moved_bytes = 0
        for task in tasks:
            if task.state == _RUNNING:
                task.copies_out += 1
            task.state = _RUNNING
            task.attempts_made += 1
            if task.stage.after:
                moved_bytes += view.moved_bytes(task, pool.id, node_id)
        self.actions.append(
            Dispatch(
                batch_id,
                variant.id,
                task_ids,
                items,
                pool.id,
                node_id,
                instance_id,
                moved_bytes,
            )
        )
        return batch

    def take_back(self, batch: Batch, state: int) -> None:
        """A batch has ended, this way or that: its slot and its compute are free again."""
        view = self.view
        del view.batches[batch.id]
        batch.state = state
        if self._watches:
            self.cancel_timer(("lost", batch.id))
            self.watchdog.ended(batch, view.now_ns)
        instance = batch.instance
        node = batch.node
        if node is None:
            self._unspill(batch, state)
        if instance is None or node is None or instance.state == _GONE:
            return
        instance.running -= 1
        if instance.running == 0 and instance.state == _BUSY:
            instance.state = _IDLE
        if node.limits_compute:
            shape = batch.variant.shape
            node.cpu_milli_used -= shape.cpu_milli
            node.gpu_sevenths_used -= shape.gpu_sevenths
        node.running -= 1
        # The rule of `is_free` for a node that is up, spelled out: this is run for every batch.
        if node.running < node.slots and node.blocked_until_ns <= view.now_ns:
            view.free_nodes.setdefault(node.id, node)

    def _spill(self, batch: Batch) -> None:
        """A call goes out to a pool that is paid by the call."""
        spillway = self.view.spillways[batch.pool.id]
        assert spillway is not None
        spillway.sent(self.view.now_ns, _may_take_ns(batch))
        self.await_pool(spillway)

    def _unspill(self, batch: Batch, state: int) -> None:
        spillway = self.view.spillways[batch.pool.id]
        if spillway is not None:
            spillway.ended(self.view.now_ns, state, batch.sent_ns, _may_take_ns(batch))
            self.await_pool(spillway)

    def await_pool(self, spillway: Spillway) -> None:
        """Something has changed about a way out: adapt what is kept warm behind it to that.

        Be woken when it may be tried again.
        """
        if spillway.wishes and spillway.is_grant_due(self.view.now_ns):
            self._grant(spillway)
        self._wake(spillway)

    def _wake(self, spillway: Spillway) -> None:
        until_ns = spillway.wakes_ns(self.view.now_ns)
        key = ("unblock_pool", spillway.pool.id)
        if until_ns and self.view.timers.get(key) != until_ns:
            self.set_timer(key, until_ns)

    def keep_warm(self, pool: Pool, variant: Variant, count: int, is_provisioned: bool) -> None:
        """Wish for warm instances, as many as can be."""
        spillway = self.view.spillways[pool.id]
        assert spillway is not None
        spillway.wish(variant, count, is_provisioned)
        if self.has_begun:
            self._grant(spillway)
            self._wake(spillway)

    def begin(self) -> None:
        """The first event is there, and with it the time: grant what was wished for before it."""
        self.has_begun = True
        for spillway in self.view.spillways:
            if spillway is not None and spillway.wishes:
                self._grant(spillway)
                self._wake(spillway)

    def _grant(self, spillway: Spillway) -> None:
        pool_id = spillway.pool.id
        for granted in spillway.grant(self.view.now_ns):
            variant_id, count = granted.variant.id, granted.count
            self.view.kept_warm[pool_id, variant_id] = (count, granted.is_provisioned)
            self.actions.append(KeepWarm(pool_id, variant_id, count, granted.is_provisioned))

    def call_back(self, task: Task) -> None:
        """A task is not to run any more: cancel the batches that carry nothing else.

        O(batches that are out): it is rare, and a list per task would cost every request.
        """
        for batch in self.view.batches.values():
            if task in batch.tasks and all(t.state != _RUNNING for t in batch.tasks):
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
        request.state = _SETTLED
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
            if was == TaskState.BLOCKED or was == TaskState.READY or was == TaskState.HELD:
                task.state = TaskState.DROPPED
            elif was == TaskState.RUNNING:
                task.state = TaskState.DROPPED
                self.call_back(task)

    # --- faults --------------------------------------------------------------------------------

    def note_fault(self, hook: str, error: Exception) -> None:
        """A hook of the policy has raised an exception.

        The report is the same in every replay, so it names an error that is not ours by its class
        alone: the text may hold addresses.
        """
        self.view.policy_faults += 1
        self.has_afterthoughts = True
        is_ours = isinstance(error, PolicyError)
        self.actions.append(ReportFault(hook, str(error) if is_ours else type(error).__name__))
        if self.fault is None:
            if isinstance(error, PolicyError):
                self.fault = error
            else:
                self.fault = PolicyError(f"{hook} raised {type(error).__name__}: {error}")
                self.fault.__cause__ = error

    # --- timers --------------------------------------------------------------------------------

    def set_timer(self, key: TimerKey, at_ns: int) -> None:
        """Ask to be woken; a timer of the same key is replaced."""
        self.view.timers[key] = at_ns
        self.actions.append(SetTimer(key, at_ns))

    def cancel_timer(self, key: TimerKey) -> None:
        """Forget a timer, if it is set."""
        if self.view.timers.pop(key, None) is not None:
            self.actions.append(CancelTimer(key))


def _may_take_ns(batch: Batch) -> int:
    """How long a call may take: it may have to start an instance first, billed or not."""
    profile = batch.variant.profile
    exec_ns = profile.exec_ns[batch.items - 1]
    return profile.start_ns + exec_ns + 2 * batch.pool.network_ns
