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
    EvictWeights,
    KeepWarm,
    LoadWeights,
    ReportFault,
    SetTimer,
    Settle,
    StartInstance,
    StopInstance,
)
from headgate.core.circuit_breaker import CircuitBreaker
from headgate.core.errors import PolicyError
from headgate.core.events import TimerKey
from headgate.core.model import App, Pool, Variant
from headgate.core.records import Batch, Instance, Node, Request, Task
from headgate.core.states import (
    BatchState,
    InstanceState,
    NodeState,
    RequestState,
    Residency,
    TaskState,
)
from headgate.core.view import View, is_evictable, is_free

# When a batch is given up: long after such batches were answered lately, or should have been.
#
# A profile can be far too short: a function of microseconds takes less time than the way to its
# worker and back, and one that was measured on an idle machine is slow on a busy one. So what was
# really observed counts as well, including batches that came back after they had been given up:
# else all of a function would be given up for ever. And no batch is given up within a floor.


_FADING: Final = 0.99  # of the slowest batch, with each that follows
_GIVEN_UP_MAX: Final = 256  # batches that may yet come back, the latest of them


@final
class BatchTimeouts:
    """Knows, by variant, how much longer than its profile says a batch takes of late."""

    def __init__(self, app: App) -> None:
        limits = app.limits
        self.is_needed = limits.timeout_factor > 0
        self._factor = limits.timeout_factor
        self._floor_ns = limits.timeout_floor_ns
        self._ratios = [1.0 for _ in app.variants]  # of the slowest lately; it fades
        self._given_up: dict[int, Batch] = {}  # by batch id

    def limit_ns(self, batch: Batch) -> int:
        """How long to wait for this batch at most, from when it may begin."""
        expected_ns = _expected_ns(batch) * self._ratios[batch.variant.id]
        return max(self._floor_ns, int(expected_ns * self._factor))

    def ended(self, batch: Batch, now_ns: int) -> None:
        """A batch has ended, or is given up."""
        if batch.state == BatchState.FINISHED:
            self._see(batch, now_ns)

    def gave_up(self, batch: Batch) -> None:
        """No answer came in time; if it comes after all, that is worth knowing."""
        self._given_up[batch.id] = batch
        if len(self._given_up) > _GIVEN_UP_MAX:
            del self._given_up[next(iter(self._given_up))]

    def finished_late(self, batch_id: int, now_ns: int) -> None:
        """A batch has finished that had been given up, or had ended before."""
        batch = self._given_up.pop(batch_id, None)
        if batch is not None:
            self._see(batch, now_ns)

    def _see(self, batch: Batch, now_ns: int) -> None:
        ratio = (now_ns - batch.sent_ns) / max(1, _expected_ns(batch))
        id = batch.variant.id
        self._ratios[id] = max(1.0, ratio, _FADING * self._ratios[id])


def _expected_ns(batch: Batch) -> int:
    """As the profile has it, on a node whose slots are all taken, after a start."""
    profile = batch.variant.profile
    exec_ns = profile.time_ns(batch.items, batch.pool.slots)
    return profile.cold_start_ns + profile.swap_in_ns + exec_ns


# Interpreted, a name of the module is read many times faster than one of a class.
_BUSY: Final = InstanceState.BUSY
_GONE: Final = InstanceState.GONE
_IDLE: Final = InstanceState.IDLE
_RUNNING: Final = TaskState.RUNNING
_SETTLED: Final = RequestState.SETTLED


@final
class StateWriter:
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
        self.watchdog = BatchTimeouts(view.app)
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
        elif pool.faas is not None:
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

    def end_batch(self, batch: Batch, state: int) -> None:
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
        spillway = self.view.breakers[batch.pool.id]
        assert spillway is not None
        spillway.sent(self.view.now_ns, _may_take_ns(batch))
        self.arm_pool_timer(spillway)

    def _unspill(self, batch: Batch, state: int) -> None:
        spillway = self.view.breakers[batch.pool.id]
        if spillway is not None:
            spillway.ended(self.view.now_ns, state, batch.sent_ns, _may_take_ns(batch))
            self.arm_pool_timer(spillway)

    def arm_pool_timer(self, spillway: CircuitBreaker) -> None:
        """Something has changed about a way out: adapt what is kept warm behind it to that.

        Be woken when it may be tried again.
        """
        if spillway.wishes and spillway.is_grant_due(self.view.now_ns):
            self._grant(spillway)
        self._wake(spillway)

    def _wake(self, spillway: CircuitBreaker) -> None:
        until_ns = spillway.wakes_ns(self.view.now_ns)
        key = ("unblock_pool", spillway.pool.id)
        if until_ns and self.view.timers.get(key) != until_ns:
            self.set_timer(key, until_ns)

    def keep_warm(self, pool: Pool, variant: Variant, count: int, is_provisioned: bool) -> None:
        """Wish for warm instances, as many as can be."""
        spillway = self.view.breakers[pool.id]
        assert spillway is not None
        spillway.wish(variant, count, is_provisioned)
        if self.has_begun:
            self._grant(spillway)
            self._wake(spillway)

    def begin(self) -> None:
        """The first event is there, and with it the time: grant what was wished for before it."""
        self.has_begun = True
        for spillway in self.view.breakers:
            if spillway is not None and spillway.wishes:
                self._grant(spillway)
                self._wake(spillway)

    def _grant(self, spillway: CircuitBreaker) -> None:
        pool_id = spillway.pool.id
        for granted in spillway.grant(self.view.now_ns):
            variant_id, count = granted.variant.id, granted.count
            self.view.kept_warm[pool_id, variant_id] = (count, granted.is_provisioned)
            self.actions.append(KeepWarm(pool_id, variant_id, count, granted.is_provisioned))

    def cancel_batches_of(self, task: Task) -> None:
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
        if request.is_hard:
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
                self.cancel_batches_of(task)

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
    return profile.cold_start_ns + exec_ns + 2 * batch.pool.network_ns


# The books of the fleet: which instance is where, what memory it holds, who must make room.
#
# Like the `StateWriter` it only writes: what is legal has been checked before.


@final
class InstanceWriter:
    """Starts, stops, loads and evicts, in the books and as actions."""

    def __init__(self, view: View, ledger: StateWriter, ids_start: int, ids_step: int) -> None:
        self._view = view
        self._ledger = ledger
        self._ids_step = ids_step
        self._next_id = ids_start

    # --- ids -----------------------------------------------------------------------------------

    def was_instance(self, instance_id: int) -> bool:
        """Whether this id can have been an instance. Peers' ids run ahead of or behind ours."""
        is_drawn = instance_id < self._next_id or not self.is_ours(instance_id)
        return instance_id >= 0 and is_drawn

    def is_ours(self, instance_id: int) -> bool:
        """Whether this Scheduler is the one that gives this id."""
        return (instance_id - self._next_id) % self._ids_step == 0

    # --- nodes ---------------------------------------------------------------------------------

    def offer_node(self, node: Node) -> None:
        """Put the node at the end of the free ones if it is free and not among them."""
        view = self._view
        if is_free(view, node) and node.id not in view.free_nodes:
            view.free_nodes[node.id] = node

    def lose_node(self, node: Node) -> list[Instance]:
        """A node and all that was on it is gone; returns the instances."""
        view = self._view
        node.state = NodeState.DOWN
        view.free_nodes.pop(node.id, None)
        # Those that drain are attached no longer, but they are on the node all the same.
        gone = [instance for instance in view.instances.values() if instance.node is node]
        for instance in gone:
            instance.state = InstanceState.GONE
            instance.residency = Residency.NOWHERE
            instance.is_preparing = False
            del view.instances[instance.id]
        node.instances.clear()
        node.running = 0
        node.cpu_milli_used = 0
        node.gpu_sevenths_used = 0
        node.memory_used_bytes = 0
        node.host_bytes_used = 0
        return gone

    # --- instances -----------------------------------------------------------------------------

    def start_instance(self, variant: Variant, pool: Pool, node: Node | None) -> Instance:
        """Order a variant to be started; on a known node it takes a slot and memory at once."""
        view = self._view
        instance = Instance(self._next_id, variant, pool, node, view.now_ns)
        self._next_id += self._ids_step
        view.instances[instance.id] = instance
        if node is not None:
            self.make_room(node, variant)
            self._attach(instance, node)
            self._begin_preparing(instance, node)
        self._ledger.actions.append(
            StartInstance(instance.id, variant.id, pool.id, None if node is None else node.id)
        )
        return instance

    def instance_started(self, instance: Instance, node: Node) -> None:
        """A start has ended well."""
        if instance.node is None:  # the pool has picked the node
            self._attach(instance, node)
        self.end_preparing(instance)
        instance.residency = Residency.DEVICE
        instance.state = InstanceState.BUSY if instance.running else InstanceState.IDLE

    def adopt_instance(self, instance_id: int, variant: Variant, node: Node) -> Instance:
        """Take note of an instance that a peer started."""
        instance = Instance(instance_id, variant, node.pool, node, self._view.now_ns)
        instance.state = InstanceState.IDLE
        instance.residency = Residency.DEVICE
        self._view.instances[instance_id] = instance
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
        node_id = None if node is None else node.id
        self._ledger.actions.append(StopInstance(instance.id, node_id))

    def instance_gone(self, instance: Instance) -> None:
        """An instance is not there any more, whatever the reason."""
        node = instance.node
        was_attached = instance.state != InstanceState.DRAINING
        instance.state = InstanceState.GONE
        del self._view.instances[instance.id]
        if node is None:
            instance.residency = Residency.NOWHERE
            return
        if was_attached:
            self._detach(instance, node)
        self.end_preparing(instance)
        if instance.running:
            self._free_slots(instance, node)

    def _free_slots(self, instance: Instance, node: Node) -> None:
        """Its batches end in events of their own, but they hold nothing on the node any more."""
        if node.limits_compute:
            shape = instance.variant.shape
            node.cpu_milli_used -= shape.cpu_milli * instance.running
            node.gpu_sevenths_used -= shape.gpu_sevenths * instance.running
        node.running -= instance.running
        instance.running = 0
        self.offer_node(node)

    def _detach(self, instance: Instance, node: Node) -> None:
        if node.instances.get(instance.variant.id) is instance:
            del node.instances[instance.variant.id]
        size = instance.variant.profile.memory_bytes
        if instance.residency == Residency.HOST:
            node.host_bytes_used -= size
        else:
            node.memory_used_bytes -= size
        instance.residency = Residency.NOWHERE

    def _begin_preparing(self, instance: Instance, node: Node) -> None:
        """Starting and loading are work: they take a slot while they last."""
        instance.is_preparing = True
        node.running += 1
        if node.running >= node.slots:
            self._view.free_nodes.pop(node.id, None)

    def end_preparing(self, instance: Instance) -> None:
        """The start or the load has ended, or nobody waits for it any more."""
        node = instance.node
        if instance.is_preparing and node is not None:
            instance.is_preparing = False
            node.running -= 1
            self.offer_node(node)

    # --- weights -------------------------------------------------------------------------------

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
        self._ledger.actions.append(EvictWeights(instance.id, node.id))

    def load_weights(self, instance: Instance, node: Node) -> None:
        """Order the weights from host memory onto the device."""
        self.make_room(node, instance.variant)
        self.keep_weights(instance, node)
        self._begin_preparing(instance, node)
        self._ledger.actions.append(LoadWeights(instance.id, node.id))

    def keep_weights(self, instance: Instance, node: Node) -> None:
        """The weights are on the device and not in host memory."""
        size = instance.variant.profile.memory_bytes
        node.host_bytes_used -= size
        node.memory_used_bytes += size
        instance.residency = Residency.DEVICE
