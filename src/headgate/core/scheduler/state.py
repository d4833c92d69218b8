"""The only writers of a Scheduler's state, and the timeouts of batches.

`StateWriter` writes requests, tasks, batches and timers, and collects the actions of the event that
is being handled. `InstanceWriter` writes instances, weights and memory. The event handlers of the
Scheduler, and `Orders` for the policy, first check what is legal and then call a writer. Instances
that other Schedulers started are written like our own, as far as their node has told. Nothing in
this file decides and nothing in it can fail, which is why an illegal event or order leaves the
state as it was.

`BatchTimeouts` computes when a batch is given up as lost: after a multiple of the time that batches
of its variant take. Both the profile and recent observations count, because a profile can be far
too short: a function of microseconds takes less time than the round trip to its worker, and one
that was measured on an idle machine is slow on a busy one. Batches that finish after their timeout
are observed as well; otherwise every batch of such a function would time out for ever. There is a
floor below which no batch times out.
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
    ReportWouldReject,
    SetTimer,
    Settle,
    StartInstance,
    StopInstance,
)
from headgate.core.circuit_breaker import CircuitBreaker
from headgate.core.clock import HOUR_NS
from headgate.core.errors import PolicyError
from headgate.core.events import TimerKey
from headgate.core.ids import IDS_PER_SCHEDULER
from headgate.core.model import App, Pool, Variant
from headgate.core.records import Batch, Instance, Node, Request, Task
from headgate.core.states import (
    INSTANCE_BUSY,
    INSTANCE_GONE,
    INSTANCE_IDLE,
    REQUEST_SETTLED,
    TASK_RUNNING,
    BatchState,
    InstanceState,
    NodeState,
    Residency,
    Settlement,
    TaskState,
)
from headgate.core.view import View, has_free_room, is_evictable, is_free

_RATIO_DECAY: Final = 0.99  # per batch, of the largest recent ratio
_RATIO_HALVED_EVERY_NS: Final = 6 * HOUR_NS  # for functions that run rarely
_TIMED_OUT_MAX: Final = 256  # timed-out batches remembered, the newest of them


@final
class StateWriter:
    """Writes the `View` and collects the actions of the event being handled."""

    def __init__(self, view: View, first_id: int) -> None:
        self.view = view
        self.actions: list[Action] = []
        self.has_started = False  # the first event has arrived, so the time is known
        self.work = 0  # computation reported by the policy, in its own units
        self.needs_finish = False  # `Scheduler._finish_event` must run after each event
        self.fault: PolicyError | None = None  # the first one of the event being handled
        self.timeouts = BatchTimeouts(view.app)
        self._has_timeouts = self.timeouts.is_enabled
        self._first_id = first_id
        self._next_id = first_id

    def has_issued_batch(self, batch_id: int) -> bool:
        """Whether this Scheduler ever gave this id to a batch."""
        return self._first_id <= batch_id < self._next_id

    def send(
        self,
        tasks: list[Task],
        task_ids: list[int],
        items: int,
        variant: Variant,
        instance: Instance | None,
        node: Node | None,
        pool: Pool,
        shape_id: int = 0,
    ) -> Batch:
        """Dispatch a batch: it takes a slot and the compute of its shape."""
        view = self.view
        batch_id = self._next_id
        self._next_id = batch_id + 1
        batch = Batch(batch_id, variant, tasks, items, instance, node, pool, view.now_ns, shape_id)
        view.batches[batch_id] = batch
        instance_id = node_id = None
        if instance is not None and node is not None:
            instance_id = instance.id
            node_id = node.id
            instance.running += 1
            instance.last_used_ns = view.now_ns
            if instance.state == INSTANCE_IDLE:
                instance.state = INSTANCE_BUSY
            if node.counts_batches:
                shape = variant.shapes[shape_id].shape
                node.cpu_milli_used += shape.cpu_milli
                node.gpu_sevenths_used += shape.gpu_sevenths
            node.running += 1
            if node.running >= node.slots and node_id in view.free_nodes:
                del view.free_nodes[node_id]
                del view.free_by_pool[pool.id][node_id]
        elif pool.faas is not None:
            self._on_call_sent(batch)
        moved_bytes = 0
        for task in tasks:
            if task.state == TASK_RUNNING:
                task.copies_in_flight += 1
            task.state = TASK_RUNNING
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
                shape_id,
            )
        )
        return batch

    def end_batch(self, batch: Batch, state: int) -> None:
        """End a batch in the given state, and free its slot and its compute."""
        view = self.view
        del view.batches[batch.id]
        batch.state = state
        if self._has_timeouts:
            self.cancel_timer(("lost", batch.id))
            self.timeouts.on_ended(batch, view.now_ns)
        instance = batch.instance
        node = batch.node
        if node is None:
            self._on_call_ended(batch, state)
        if instance is None or node is None or instance.state == INSTANCE_GONE:
            return
        instance.running -= 1
        if instance.running == 0 and instance.state == INSTANCE_BUSY:
            instance.state = INSTANCE_IDLE
        if node.counts_batches:
            shape = batch.variant.shapes[batch.shape_id].shape
            node.cpu_milli_used -= shape.cpu_milli
            node.gpu_sevenths_used -= shape.gpu_sevenths
        node.running -= 1
        # The rule of `is_free` for a node that is up, inlined because it runs for every batch.
        if node.running < node.slots and node.blocked_until_ns <= view.now_ns:
            view.free_nodes.setdefault(node.id, node)
            view.free_by_pool[node.pool.id].setdefault(node.id, node)

    def _on_call_sent(self, batch: Batch) -> None:
        breaker = self.view.breakers[batch.pool.id]
        assert breaker is not None
        breaker.on_sent(self.view.now_ns, _duration_max_ns(batch))
        self.arm_pool_timer(breaker)

    def _on_call_ended(self, batch: Batch, state: int) -> None:
        breaker = self.view.breakers[batch.pool.id]
        if breaker is not None:
            breaker.on_ended(self.view.now_ns, state, batch.sent_ns, _duration_max_ns(batch))
            self.arm_pool_timer(breaker)

    def arm_pool_timer(self, breaker: CircuitBreaker) -> None:
        """Adapt the warm instances of a pool to its breaker, and set the timer of the next check.

        To be called whenever something about the breaker has changed.
        """
        if breaker.warm_targets and breaker.is_grant_due(self.view.now_ns):
            self._grant(breaker)
        self._set_pool_timer(breaker)

    def _set_pool_timer(self, breaker: CircuitBreaker) -> None:
        until_ns = breaker.next_check_ns(self.view.now_ns)
        key = ("unblock_pool", breaker.pool.id)
        if until_ns and self.view.timers.get(key) != until_ns:
            self.set_timer(key, until_ns)

    def keep_warm(self, pool: Pool, variant: Variant, count: int, is_provisioned: bool) -> None:
        """Set the target of warm instances; the breaker and the budgets decide how many there are.

        Targets that a policy sets in its constructor are granted with the first event.
        """
        breaker = self.view.breakers[pool.id]
        assert breaker is not None
        breaker.set_warm_target(variant, count, is_provisioned)
        if self.has_started:
            self._grant(breaker)
            self._set_pool_timer(breaker)

    def start(self) -> None:
        """Grant the targets that were set before the first event, now that the time is known."""
        self.has_started = True
        for breaker in self.view.breakers:
            if breaker is not None and breaker.warm_targets:
                self._grant(breaker)
                self._set_pool_timer(breaker)

    def _grant(self, breaker: CircuitBreaker) -> None:
        pool_id = breaker.pool.id
        for granted in breaker.grant(self.view.now_ns):
            variant_id, count = granted.variant.id, granted.count
            self.view.kept_warm[pool_id, variant_id] = (count, granted.is_provisioned)
            self.actions.append(KeepWarm(pool_id, variant_id, count, granted.is_provisioned))

    def cancel_batches_of(self, task: Task) -> None:
        """Cancel the batches of a task that have no running task left in them.

        O(batches in flight): cancellation is rare, and a list of batches per task would cost every
        request.
        """
        for batch in self.view.batches.values():
            if task in batch.tasks and all(t.state != TASK_RUNNING for t in batch.tasks):
                node_id = None if batch.node is None else batch.node.id
                self.actions.append(CancelBatch(batch.id, batch.pool.id, node_id))

    def block_node(self, node: Node, until_ns: int) -> None:
        """Send nothing to a node until `until_ns`: it has just refused or lost a batch."""
        node.blocked_until_ns = until_ns
        self.view.free_nodes.pop(node.id, None)
        self.view.free_by_pool[node.pool.id].pop(node.id, None)
        self.set_timer(("unblock", node.id), until_ns)

    def settle(self, request: Request, settlement: Settlement) -> None:
        """Settle a request with its one outcome, and drop its unfinished tasks."""
        request.state = REQUEST_SETTLED
        del self.view.requests[request.id]
        self.actions.append(Settle(request.id, settlement))
        if request.is_hard:
            self.cancel_timer(("deadline", request.id))
        if request.tasks_left:
            self._drop_tasks(request)
        request.tasks.clear()  # breaks the reference cycle, so memory is freed at once

    def report_would_reject(self, request: Request, reason: str) -> None:
        """Report, once per request, that it would have been rejected."""
        if not request.would_be_rejected:
            request.would_be_rejected = True
            self.actions.append(ReportWouldReject(request.id, reason))

    def _drop_tasks(self, request: Request) -> None:
        for task in request.tasks:
            was = task.state
            if was == TaskState.BLOCKED or was == TaskState.READY or was == TaskState.HELD:
                task.state = TaskState.DROPPED
            elif was == TaskState.RUNNING:
                task.state = TaskState.DROPPED
                self.cancel_batches_of(task)

    def record_fault(self, hook: str, error: Exception) -> None:
        """Record that a hook of the policy raised an exception.

        The report must be the same in every replay. So an exception other than `PolicyError` is
        named by its class alone: its text may contain memory addresses.
        """
        self.view.policy_faults += 1
        self.needs_finish = True
        is_policy_error = isinstance(error, PolicyError)
        text = str(error) if is_policy_error else type(error).__name__
        self.actions.append(ReportFault(hook, text))
        if self.fault is None:
            if isinstance(error, PolicyError):
                self.fault = error
            else:
                self.fault = PolicyError(f"{hook} raised {type(error).__name__}: {error}")
                self.fault.__cause__ = error

    def set_timer(self, key: TimerKey, at_ns: int) -> None:
        """Set a timer; it replaces a timer of the same key."""
        self.view.timers[key] = at_ns
        self.actions.append(SetTimer(key, at_ns))

    def cancel_timer(self, key: TimerKey) -> None:
        """Cancel a timer, if it is set."""
        if self.view.timers.pop(key, None) is not None:
            self.actions.append(CancelTimer(key))


@final
class InstanceWriter:
    """Writes the state of nodes, instances and weights, and emits the actions that go with it."""

    def __init__(self, view: View, state: StateWriter, first_id: int) -> None:
        self._view = view
        self._state = state
        self._first_id = first_id
        self._next_id = first_id
        # Others may have started instances. Whoever is the first and has always been alone knows
        # of every instance that there is.
        self.has_peers = first_id > 0

    def has_issued_instance(self, instance_id: int) -> bool:
        """Whether an instance can have had this id: one of ours, or any of another Scheduler."""
        if self.is_foreign_id(instance_id):
            return True
        return self._first_id <= instance_id < self._next_id

    def is_foreign_id(self, instance_id: int) -> bool:
        """Whether this id is in the range of another Scheduler, and there may be others."""
        if not self.has_peers or instance_id < 0:
            return False
        return not self._first_id <= instance_id < self._first_id + IDS_PER_SCHEDULER

    def list_if_free(self, node: Node) -> None:
        """Append the node to the free nodes if it is free and not listed yet."""
        view = self._view
        if is_free(view, node) and node.id not in view.free_nodes:
            view.free_nodes[node.id] = node
            view.free_by_pool[node.pool.id][node.id] = node

    def back_off_from(self, node: Node) -> None:
        """Send nothing to a node that has no room for what we took to fit."""
        if node.state == NodeState.UP:
            until_ns = self._view.now_ns + self._view.app.limits.start_backoff_ns
            self._state.block_node(node, until_ns)

    def lose_node(self, node: Node) -> list[Instance]:
        """Mark a node as down and all of its instances as gone; return the instances."""
        view = self._view
        node.state = NodeState.DOWN
        view.free_nodes.pop(node.id, None)
        view.free_by_pool[node.pool.id].pop(node.id, None)
        # Draining instances are detached from `node.instances`, but they are still on the node.
        gone = [instance for instance in view.instances.values() if instance.node is node]
        for instance in gone:
            instance.state = InstanceState.GONE
            instance.residency = Residency.NOWHERE
            instance.is_preparing = False
            instance.holds_compute = False
            del view.instances[instance.id]
            self._unlist(instance)
        node.instances.clear()
        node.by_variant.clear()
        node.replicas = 0
        node.running = 0
        node.cpu_milli_used = 0
        node.gpu_sevenths_used = 0
        node.memory_used_bytes = 0
        node.host_bytes_used = 0
        return gone

    def start_instance(
        self, variant: Variant, pool: Pool, node: Node | None, shape_id: int = 0, nth: int = 0
    ) -> Instance:
        """Start a variant; on a given node it takes a slot and memory at once."""
        view = self._view
        instance = Instance(self._next_id, variant, pool, node, view.now_ns, shape_id)
        self._next_id += 1
        self._list(instance)
        node_id: int | None = None
        if node is not None:
            node_id = node.id
            if self.has_peers:  # which may order the same: one is enough
                nth = 1 + len(node.by_variant.get(variant.id, ()))
            self.make_room(node, variant, shape_id)
            self._attach(instance, node)
            self._begin_preparing(instance, node)
        self._state.actions.append(
            StartInstance(instance.id, variant.id, pool.id, node_id, shape_id, nth)
        )
        return instance

    def instance_started(self, instance: Instance, node: Node) -> None:
        """Mark an instance as started."""
        if instance.node is None:  # the pool has picked the node
            self._attach(instance, node)
        self.end_preparing(instance)
        instance.residency = Residency.DEVICE
        instance.state = InstanceState.BUSY if instance.running else InstanceState.IDLE

    def adopt_instance(
        self, instance_id: int, variant: Variant, node: Node, shape_id: int
    ) -> Instance:
        """Add an instance that another Scheduler started."""
        instance = Instance(instance_id, variant, node.pool, node, self._view.now_ns, shape_id)
        instance.state = InstanceState.IDLE
        instance.residency = Residency.DEVICE
        self._list(instance)
        self._attach(instance, node)
        return instance

    def _list(self, instance: Instance) -> None:
        self._view.instances[instance.id] = instance
        self._view.instances_of[instance.variant.id][instance.id] = instance

    def _unlist(self, instance: Instance) -> None:
        """Stop listing an instance by its variant; one that was draining is not listed any more."""
        self._view.instances_of[instance.variant.id].pop(instance.id, None)
        self._view.on_host_of[instance.variant.id].pop(instance.id, None)

    def _attach(self, instance: Instance, node: Node) -> None:
        instance.node = node
        variant_id = instance.variant.id
        group = node.by_variant.get(variant_id)
        if group is None:
            node.instances[variant_id] = instance
            node.by_variant[variant_id] = [instance]
        else:
            group.append(instance)
            node.replicas += 1
        node.memory_used_bytes += instance.variant.profile.memory_bytes
        if node.has_resident_compute:
            self._hold_compute(instance, node)

    def _hold_compute(self, instance: Instance, node: Node) -> None:
        """Account the shape of an instance to its node, where compute is resident."""
        shape = instance.variant.shapes[instance.shape_id].shape
        node.cpu_milli_used += shape.cpu_milli
        node.gpu_sevenths_used += shape.gpu_sevenths
        instance.holds_compute = True

    def _release_compute(self, instance: Instance, node: Node) -> None:
        if instance.holds_compute:
            shape = instance.variant.shapes[instance.shape_id].shape
            node.cpu_milli_used -= shape.cpu_milli
            node.gpu_sevenths_used -= shape.gpu_sevenths
            instance.holds_compute = False

    def stop_instance(self, instance: Instance) -> None:
        """Stop an instance.

        Its memory is available to the next order on that node at once: a Backend carries out orders
        in the order they were given. A start or a load that has begun cannot be un-started: it
        holds its slot until it has ended. So is resident compute available at once, unless a batch,
        a start or a load still runs in it: another start that waited for that would hold back
        everything that is ordered after it.
        """
        node = instance.node
        instance.state = InstanceState.DRAINING
        self._unlist(instance)
        if node is not None:
            self._detach(instance, node)
            if not (instance.running or instance.is_preparing):
                self._release_compute(instance, node)
        node_id = None if node is None else node.id
        self._state.actions.append(StopInstance(instance.id, node_id))

    def instance_gone(self, instance: Instance) -> None:
        """Mark an instance as gone, whatever the reason."""
        node = instance.node
        was_active = instance.state != InstanceState.DRAINING
        instance.state = InstanceState.GONE
        del self._view.instances[instance.id]
        self._unlist(instance)
        if node is None:
            instance.residency = Residency.NOWHERE
            return
        if was_active:
            self._detach(instance, node)
        self._release_compute(instance, node)
        self.end_preparing(instance)
        if instance.running:
            self._free_slots(instance, node)

    def _free_slots(self, instance: Instance, node: Node) -> None:
        """Free what the batches of a gone instance held; the batches end in events of their own."""
        if node.counts_batches:
            for batch in self._view.batches.values():
                if batch.instance is instance:
                    shape = batch.variant.shapes[batch.shape_id].shape
                    node.cpu_milli_used -= shape.cpu_milli
                    node.gpu_sevenths_used -= shape.gpu_sevenths
        node.running -= instance.running
        instance.running = 0
        self.list_if_free(node)

    def _detach(self, instance: Instance, node: Node) -> None:
        variant_id = instance.variant.id
        group = node.by_variant[variant_id]
        group.remove(instance)
        if group:
            node.instances[variant_id] = group[0]
            node.replicas -= 1
        else:
            del node.instances[variant_id]
            del node.by_variant[variant_id]
        size = instance.variant.profile.memory_bytes
        if instance.residency == Residency.HOST:
            node.host_bytes_used -= size
        else:
            node.memory_used_bytes -= size
        instance.residency = Residency.NOWHERE

    def _begin_preparing(self, instance: Instance, node: Node) -> None:
        """Take a slot for a start or a load of weights."""
        instance.is_preparing = True
        node.running += 1
        if node.running >= node.slots:
            self._view.free_nodes.pop(node.id, None)
            self._view.free_by_pool[node.pool.id].pop(node.id, None)

    def end_preparing(self, instance: Instance) -> None:
        """Free the slot of a start or a load that has ended or was abandoned."""
        node = instance.node
        if instance.is_preparing and node is not None:
            instance.is_preparing = False
            node.running -= 1
            self.list_if_free(node)

    def make_room(self, node: Node, variant: Variant, shape_id: int) -> None:
        """Evict idle instances, least recently used first, until the variant fits."""
        if has_free_room(node, variant, shape_id):
            return
        held = [instance for group in node.by_variant.values() for instance in group]
        for victim in sorted(held, key=lambda i: (i.last_used_ns, i.id)):
            if victim.residency != Residency.HOST and is_evictable(victim):
                self._evict_or_stop(victim, node)
                if has_free_room(node, variant, shape_id):
                    return

    def _evict_or_stop(self, victim: Instance, node: Node) -> None:
        """Evict an instance to host memory if there is room, else stop it."""
        size = victim.variant.profile.memory_bytes
        if node.host_bytes_used + size <= node.pool.host_memory_bytes:
            self.evict_weights(victim, node)
        else:
            self.stop_instance(victim)

    def evict_weights(self, instance: Instance, node: Node) -> None:
        """Move an instance's weights from the device to host memory."""
        self.mark_on_host(instance, node)
        self._state.actions.append(EvictWeights(instance.id, node.id))

    def load_weights(self, instance: Instance, node: Node) -> None:
        """Load an instance's weights from host memory onto the device."""
        self.make_room(node, instance.variant, instance.shape_id)
        self.mark_on_device(instance, node)
        self._begin_preparing(instance, node)
        self._state.actions.append(LoadWeights(instance.id, node.id))

    def mark_on_host(self, instance: Instance, node: Node) -> None:
        """Account an instance's weights to host memory instead of to the device."""
        size = instance.variant.profile.memory_bytes
        node.memory_used_bytes -= size
        node.host_bytes_used += size
        self._release_compute(instance, node)
        instance.residency = Residency.HOST
        self._view.on_host_of[instance.variant.id][instance.id] = instance

    def mark_on_device(self, instance: Instance, node: Node) -> None:
        """Account an instance's weights to the device instead of to host memory."""
        size = instance.variant.profile.memory_bytes
        node.host_bytes_used -= size
        node.memory_used_bytes += size
        if node.has_resident_compute:
            self._hold_compute(instance, node)
        instance.residency = Residency.DEVICE
        del self._view.on_host_of[instance.variant.id][instance.id]


@final
class BatchTimeouts:
    """Tracks, per variant, the ratio of observed to expected time of the slowest recent batch.

    The largest ratio fades with the batches that follow and with time. It never fades below the
    latest one: what always takes longer than its profile may run so rarely that little else counts.
    """

    def __init__(self, app: App) -> None:
        limits = app.limits
        self.is_enabled = limits.timeout_factor > 0
        self._factor = limits.timeout_factor
        self._floor_ns = limits.timeout_floor_ns
        self._ratios = [1.0 for _ in app.variants]  # largest recent ratio, which decays
        self._latest = [1.0 for _ in app.variants]
        self._halved_ns = [0 for _ in app.variants]  # until when it has decayed by time
        self._timed_out: dict[int, Batch] = {}  # by batch id

    def limit_ns(self, batch: Batch) -> int:
        """The timeout of this batch, counted from its dispatch."""
        expected_ns = _expected_ns(batch) * self._ratio(batch.variant.id, batch.sent_ns)
        return max(self._floor_ns, int(expected_ns * self._factor))

    def on_ended(self, batch: Batch, now_ns: int) -> None:
        """Observe the time of a batch that has ended; only finished batches count."""
        if batch.state == BatchState.FINISHED:
            self._observe(batch, now_ns)

    def on_timeout(self, batch: Batch) -> None:
        """Remember a batch that timed out, to observe its time if it finishes after all."""
        self._timed_out[batch.id] = batch
        if len(self._timed_out) > _TIMED_OUT_MAX:
            del self._timed_out[next(iter(self._timed_out))]

    def on_late_finish(self, batch_id: int, now_ns: int) -> None:
        """Observe the time of a batch that finished after its timeout."""
        batch = self._timed_out.pop(batch_id, None)
        if batch is not None:
            self._observe(batch, now_ns)

    def _observe(self, batch: Batch, now_ns: int) -> None:
        ratio = max(1.0, (now_ns - batch.sent_ns) / max(1, _expected_ns(batch)))
        id = batch.variant.id
        self._ratios[id] = max(ratio, _RATIO_DECAY * self._ratio(id, now_ns))
        self._latest[id] = ratio

    def _ratio(self, id: int, now_ns: int) -> float:
        """The largest recent ratio of a variant, less what it has decayed by time."""
        halvings = (now_ns - self._halved_ns[id]) // _RATIO_HALVED_EVERY_NS
        if halvings > 0:
            self._halved_ns[id] += halvings * _RATIO_HALVED_EVERY_NS
            self._ratios[id] = max(self._latest[id], 0.5**halvings * self._ratios[id])
        return self._ratios[id]


def _expected_ns(batch: Batch) -> int:
    """Expected time by the profile, with a cold start, on a node whose slots are all taken."""
    profile = batch.variant.profile
    exec_ns = batch.variant.exec_ns(batch.items, batch.shape_id)
    slowest_ns = int(exec_ns * profile.slowdown_at(batch.pool.slots))
    return profile.cold_start_ns + profile.swap_in_ns + slowest_ns


def _duration_max_ns(batch: Batch) -> int:
    """Longest time to expect of a FaaS call, with a cold start, whether that is billed or not."""
    profile = batch.variant.profile
    exec_ns = profile.exec_ns[batch.items - 1]
    return profile.cold_start_ns + exec_ns + 2 * batch.pool.network_ns
