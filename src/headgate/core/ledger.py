"""The bookkeeping behind the Scheduler: every change of state, and the actions that go with it.

The Scheduler (for events) and `Orders` (for a policy's wishes) check what is legal and then come
here. Nothing in this file decides and nothing in it can fail, which is why an illegal event or
order leaves the state as it was.
"""

from __future__ import annotations

from typing import final

from headgate.core.actions import (
    Action,
    CancelBatch,
    CancelTimer,
    EvictWeights,
    LoadWeights,
    SetTimer,
    Settle,
    StartInstance,
    StopInstance,
)
from headgate.core.events import TimerKey
from headgate.core.lifecycle import InstanceState, NodeState, RequestState, Residency, TaskState
from headgate.core.model import Pool, Variant
from headgate.core.records import Batch, Instance, Node, Request, Task
from headgate.core.view import View, is_evictable, is_free


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
        self._batch_id = ids_start
        self._instance_id = ids_start

    # --- ids -----------------------------------------------------------------------------------

    def next_batch_id(self) -> int:
        """Draw a fresh batch id."""
        batch_id = self._batch_id
        self._batch_id = batch_id + self._ids_step
        return batch_id

    def was_batch(self, batch_id: int) -> bool:
        """Whether this id was ever given to a batch."""
        return 0 <= batch_id < self._batch_id and self.is_ours(batch_id)

    def was_instance(self, instance_id: int) -> bool:
        """Whether this id can have been an instance. Peers' ids run ahead of or behind ours."""
        is_drawn = instance_id < self._instance_id or not self.is_ours(instance_id)
        return instance_id >= 0 and is_drawn

    def is_ours(self, id: int) -> bool:
        """Whether this Scheduler is the one that gives this id to a batch or an instance."""
        return (id - self._batch_id) % self._ids_step == 0

    # --- nodes ---------------------------------------------------------------------------------

    def free_slot(self, node: Node) -> None:
        """One job less is on the node."""
        node.running -= 1
        self.offer_node(node)

    def offer_node(self, node: Node) -> None:
        """Put the node at the end of the free ones if it is free and not among them."""
        view = self.view
        if is_free(view, node) and node.id not in view.free_nodes:
            view.free_nodes[node.id] = node

    def block_node(self, node: Node, until_ns: int) -> None:
        """Leave a node alone for a while: it has just refused or lost something."""
        node.blocked_until_ns = until_ns
        self.view.free_nodes.pop(node.id, None)
        self.set_timer(("unblock", node.id), until_ns)

    def lose_node(self, node: Node) -> None:
        """A node and all that was on it is gone."""
        node.state = NodeState.DOWN
        self.view.free_nodes.pop(node.id, None)
        # Those that drain are attached no longer, but they are on the node all the same.
        for instance in [i for i in self.view.instances.values() if i.node is node]:
            instance.state = InstanceState.GONE
            instance.residency = Residency.NOWHERE
            del self.view.instances[instance.id]
        node.instances.clear()
        for task_id in node.reservations:
            del self.view.reservations[task_id]
        node.reservations.clear()
        node.running = 0
        node.cpu_milli_used = 0
        node.gpu_sevenths_used = 0
        node.memory_used_bytes = 0
        node.host_bytes_used = 0

    # --- batches -------------------------------------------------------------------------------

    def send(self, batch: Batch) -> None:
        """A batch goes out: it takes its slot and its compute."""
        self.view.batches[batch.id] = batch
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
        if node.running >= node.slots:
            self.view.free_nodes.pop(node.id, None)

    def take_back(self, batch: Batch, state: int) -> None:
        """A batch has ended, this way or that: its slot and its compute are free again."""
        view = self.view
        del view.batches[batch.id]
        batch.state = state
        for task in batch.tasks:
            task.attempts_out -= 1
            task.batch = None  # no reference cycles: what has ended is freed at once
        instance = batch.instance
        node = batch.node
        if instance is None or node is None or instance.state == InstanceState.GONE:
            return
        instance.running -= 1
        if instance.running == 0 and instance.state == InstanceState.BUSY:
            instance.state = InstanceState.IDLE
        if node.limits_compute:
            self._return_compute(node, batch.variant)
        node.running -= 1
        # The rule of `is_free`, spelled out: this is the hottest line of the bookkeeping.
        if (
            node.running < node.slots
            and node.blocked_until_ns <= view.now_ns
            and node.id not in view.free_nodes
        ):
            view.free_nodes[node.id] = node

    def _return_compute(self, node: Node, variant: Variant) -> None:
        shape = variant.shape
        node.cpu_milli_used -= shape.cpu_milli
        node.gpu_sevenths_used -= shape.gpu_sevenths

    def cancel_if_unwanted(self, batch: Batch) -> None:
        """Call a batch back when no task in it is wanted any more."""
        for task in batch.tasks:
            if task.state == TaskState.RUNNING:
                return
        node = batch.node
        self.actions.append(CancelBatch(batch.id, batch.pool.id, None if node is None else node.id))

    def batches_of(self, task: Task) -> list[Batch]:
        """The batches this task is out in: usually the last one it was sent in."""
        if task.attempts_out == 1 and task.batch is not None and task.batch.id in self.view.batches:
            return [task.batch]
        return [b for b in self.view.batches.values() if task in b.tasks]

    # --- requests ------------------------------------------------------------------------------

    def settle(self, request: Request, outcome: int, reason: str = "") -> None:
        """The request ends, once. Tasks that are left of it are dropped."""
        request.state = RequestState.SETTLED
        request.outcome = outcome
        del self.view.requests[request.id]
        self.actions.append(Settle(request.id, outcome, reason))
        if request.pipeline.slo.gives_up:
            self.cancel_timer(("deadline", request.id))
        if request.tasks_left:
            self._drop_tasks(request)
        request.tasks = []  # no reference cycles: what has ended is freed at once

    def _drop_tasks(self, request: Request) -> None:
        for task in request.tasks:
            was = task.state
            if was == TaskState.BLOCKED or was == TaskState.READY:
                task.state = TaskState.DROPPED
                self.release_reservation(task)
            elif was == TaskState.RUNNING:
                task.state = TaskState.DROPPED
                for batch in self.batches_of(task):
                    self.cancel_if_unwanted(batch)

    def release_reservation(self, task: Task) -> None:
        """The task needs its reservation no longer, if it has one."""
        reservation = self.view.reservations.pop(task.id, None)
        if reservation is not None:
            del self.view.nodes[reservation.node_id].reservations[task.id]

    # --- instances -----------------------------------------------------------------------------

    def start_instance(self, variant: Variant, pool: Pool, node: Node | None) -> Instance:
        """Order a variant to be started; on a known node it takes a slot and memory at once."""
        view = self.view
        instance = Instance(self._instance_id, variant, node, view.now_ns)
        self._instance_id += self._ids_step
        view.instances[instance.id] = instance
        if node is not None:
            self.make_room(node, variant)
            self._attach(instance, node)
            self._begin_preparing(instance, node)
        self.actions.append(
            StartInstance(instance.id, variant.id, pool.id, None if node is None else node.id)
        )
        return instance

    def instance_started(self, instance: Instance, node: Node) -> None:
        """A start has ended well."""
        if instance.node is None:  # the pool has picked the node
            self._attach(instance, node)
        self.end_preparing(instance)
        instance.residency = Residency.DEVICE
        if instance.state == InstanceState.STARTING:
            instance.state = InstanceState.BUSY if instance.running else InstanceState.IDLE

    def adopt_instance(self, instance_id: int, variant: Variant, node: Node) -> Instance:
        """Take note of an instance that a peer started."""
        instance = Instance(instance_id, variant, node, self.view.now_ns)
        instance.state = InstanceState.IDLE
        instance.residency = Residency.DEVICE
        self.view.instances[instance_id] = instance
        self._attach(instance, node)
        return instance

    def _attach(self, instance: Instance, node: Node) -> None:
        instance.node = node
        node.instances[instance.variant.id] = instance
        node.memory_used_bytes += instance.variant.profile.memory_bytes

    def stop_instance(self, instance: Instance) -> None:
        """Order an instance to stop.

        What it held is free for the next order on that node: a Backend carries its orders out in
        the order they were given.
        """
        node = instance.node
        instance.state = InstanceState.DRAINING
        if node is not None:
            self._detach(instance, node)
            self.end_preparing(instance)
        self.actions.append(StopInstance(instance.id, None if node is None else node.id))

    def instance_gone(self, instance: Instance) -> None:
        """An instance is not there any more, whatever the reason."""
        node = instance.node
        was_attached = instance.state != InstanceState.DRAINING
        instance.state = InstanceState.GONE
        del self.view.instances[instance.id]
        if node is None:
            instance.residency = Residency.NOWHERE
            return
        if was_attached:
            self._detach(instance, node)
        self.end_preparing(instance)
        # Its batches end in events of their own, but they hold nothing on the node any more.
        for _ in range(instance.running):
            if node.limits_compute:
                self._return_compute(node, instance.variant)
            self.free_slot(node)
        instance.running = 0

    def _begin_preparing(self, instance: Instance, node: Node) -> None:
        """Starting and loading are work: they take a slot while they last."""
        if instance.is_preparing:  # loaded, evicted and loaded again: it holds its slot already
            return
        instance.is_preparing = True
        node.running += 1
        if node.running >= node.slots:
            self.view.free_nodes.pop(node.id, None)

    def end_preparing(self, instance: Instance) -> None:
        """The start or the load has ended, or nobody waits for it any more."""
        if instance.is_preparing and instance.node is not None:
            instance.is_preparing = False
            self.free_slot(instance.node)

    def _detach(self, instance: Instance, node: Node) -> None:
        if node.instances.get(instance.variant.id) is instance:
            del node.instances[instance.variant.id]
        size = instance.variant.profile.memory_bytes
        if instance.residency == Residency.HOST:
            node.host_bytes_used -= size
        else:
            node.memory_used_bytes -= size
        instance.residency = Residency.NOWHERE

    # --- residency -----------------------------------------------------------------------------

    def make_room(self, node: Node, variant: Variant) -> None:
        """Evict idle instances, least recently used first, until the variant fits."""
        need = variant.profile.memory_bytes
        limit = node.pool.memory_bytes
        if node.memory_used_bytes + need <= limit:
            return
        for victim in sorted(node.instances.values(), key=lambda i: (i.last_used_ns, i.id)):
            if victim.residency != Residency.HOST and is_evictable(victim):
                self._put_away(victim, node)
                if node.memory_used_bytes + need <= limit:
                    return

    def _put_away(self, victim: Instance, node: Node) -> None:
        """To host memory if it has room there, else out altogether."""
        size = victim.variant.profile.memory_bytes
        if node.host_bytes_used + size <= node.pool.host_memory_bytes:
            self.evict_weights(victim, node)
        else:
            self.stop_instance(victim)

    def evict_weights(self, instance: Instance, node: Node) -> None:
        """Order the weights from the device into host memory."""
        size = instance.variant.profile.memory_bytes
        node.memory_used_bytes -= size
        node.host_bytes_used += size
        instance.residency = Residency.HOST
        self.actions.append(EvictWeights(instance.id, node.id))

    def load_weights(self, instance: Instance, node: Node) -> None:
        """Order the weights from host memory onto the device."""
        self.make_room(node, instance.variant)
        size = instance.variant.profile.memory_bytes
        node.host_bytes_used -= size
        node.memory_used_bytes += size
        instance.residency = Residency.DEVICE
        self._begin_preparing(instance, node)
        self.actions.append(LoadWeights(instance.id, node.id))

    # --- timers --------------------------------------------------------------------------------

    def set_timer(self, key: TimerKey, at_ns: int) -> None:
        """Ask to be woken; a timer of the same key is replaced."""
        self.view.timers[key] = at_ns
        self.actions.append(SetTimer(key, at_ns))

    def cancel_timer(self, key: TimerKey) -> None:
        """Forget a timer, if it is set."""
        if self.view.timers.pop(key, None) is not None:
            self.actions.append(CancelTimer(key))
