"""The Scheduler: events in, actions out.

    Scheduler.handle(now_ns, event) -> list[Action]

This is the seam that everything hangs on. It is synchronous, total and deterministic: the same
seed, configuration and sequence of (now_ns, event) give the same actions, to the bit. It reads no
clock, awaits nothing and opens nothing. The simulator and the live runtime are two small drivers
of it, so a decision is written once and a live incident replays as a unit test.

What every policy needs is here: lifecycles, conservation (every request ends in exactly one
outcome), retries, timers, cancellation, legality. What policies differ in is behind the hooks of
`Policy`. A few rules that are easy to miss:

- Work that is out cannot be un-started. So cancelling is a state, not an exception: the request is
  settled at once, its tasks become DROPPED, and when the batch comes back its result is thrown
  away. The slot is free only then.
- *Refused* means it never ran, so the task may always be tried again. *Failed* and *lost* mean it
  ran or may have run, so it is repeated only if the function is idempotent, attempts are left and
  the deadline has not passed.
- Messages may be duplicated, and may cross ours. An event about something that has already ended
  is ignored and counted (`View.events_ignored`). An event about something that never was is the
  driver's error.
- A place that has just refused is left alone for a moment (`Limits.backoff_ns`), or a policy that
  knows no better would offer it the same batch for ever at the same instant.
"""

from __future__ import annotations

from random import Random
from typing import final

from headgate.core.actions import Action
from headgate.core.errors import DriverError
from headgate.core.events import (
    REFUSAL_NAMES,
    BatchFailed,
    BatchFinished,
    BatchLost,
    BatchRefused,
    Event,
    InstanceAppeared,
    InstanceStarted,
    InstanceStopped,
    NodeJoined,
    NodeLost,
    Refusal,
    RequestAnnounced,
    RequestArrived,
    RequestCancelled,
    TimerFired,
    TimerKey,
    WeightsEvicted,
    WeightsLoaded,
)
from headgate.core.ledger import Ledger
from headgate.core.lifecycle import BatchState, InstanceState, NodeState, RequestState, TaskState
from headgate.core.model import App
from headgate.core.orders import Orders
from headgate.core.outcome import Outcome
from headgate.core.policy import Context, Policy, PolicyConfig, PolicyKind
from headgate.core.reconcile import reconcile
from headgate.core.records import STAGES_MAX, Batch, Instance, Node, Request, Task
from headgate.core.validate import Validator
from headgate.core.view import View


@final
class Scheduler:
    """One per gateway. `index` of `peers` tells it apart from others that share its pools."""

    def __init__(
        self,
        app: App,
        kind: PolicyKind,
        config: PolicyConfig | None = None,
        *,
        rng: Random | None = None,
        index: int = 0,
        peers: int = 1,
        validate: bool = False,
    ) -> None:
        self.app = app
        self.view = View(app)
        self._ledger = Ledger(self.view, ids_start=index, ids_step=peers)
        self._orders = Orders(self.view, self._ledger)
        context = Context(self.view, self._orders, rng if rng is not None else Random(0))
        self.policy: Policy = kind.build(context, config if config is not None else kind.config())
        self._validator = Validator(self.view) if validate else None
        self._lost_after = app.limits.lost_after
        self._open_max = app.limits.open_requests_max
        self._last_request_id = -1
        self._plan_every_ns = self.policy.plan_every_ns
        self._has_afterthoughts = validate or self._plan_every_ns > 0

    @property
    def work(self) -> int:
        """What the policy has reported to have computed so far, in its own units."""
        return self._ledger.work

    def handle(self, now_ns: int, event: Event) -> list[Action]:
        """Take one event into account and return what is to be done about it.

        `now_ns` never decreases. Raises `DriverError` for an event that cannot have happened and
        lets a policy's `PolicyError` through; what was illegal has changed nothing.
        """
        view = self.view
        if now_ns < view.now_ns:
            raise DriverError(f"time went back from {view.now_ns} to {now_ns}")
        ledger = self._ledger
        actions: list[Action] = []
        ledger.actions = actions
        # Most frequent first: a compiled build makes this a chain of pointer comparisons.
        if isinstance(event, BatchFinished):
            self._batch_finished(now_ns, event)
        elif isinstance(event, RequestArrived):
            self._request_arrived(now_ns, event)
        elif isinstance(event, TimerFired):
            self._timer_fired(now_ns, event.key)
        else:
            self._handle_rare(now_ns, event)
        if self._has_afterthoughts:
            self._think_after(now_ns)
        return actions

    def _think_after(self, now_ns: int) -> None:
        """What most Schedulers never have: a plan to ask for, or a state to check."""
        if self._plan_every_ns and ("plan", 0) not in self.view.timers:
            self._ledger.set_timer(("plan", 0), now_ns + self._plan_every_ns)
        if self._validator is not None:
            self._validator.check()

    def _handle_rare(self, now_ns: int, event: Event) -> None:
        if isinstance(event, BatchRefused):
            self._batch_refused(now_ns, event)
        elif isinstance(event, BatchFailed):
            self._batch_broke(now_ns, event.batch_id, BatchState.FAILED, event.reason)
        elif isinstance(event, BatchLost):
            self._batch_broke(now_ns, event.batch_id, BatchState.LOST, "lost")
        elif isinstance(event, RequestCancelled):
            self._request_cancelled(now_ns, event)
        elif isinstance(event, RequestAnnounced):
            self._request_announced(now_ns, event)
        elif isinstance(event, InstanceStarted):
            self._instance_started(now_ns, event)
        elif isinstance(event, InstanceStopped):
            self._instance_stopped(now_ns, event)
        elif isinstance(event, InstanceAppeared):
            self._instance_appeared(now_ns, event)
        elif isinstance(event, WeightsLoaded):
            self._weights_loaded(now_ns, event)
        elif isinstance(event, WeightsEvicted):
            self._known_instance(event.instance_id)
            self.view.now_ns = now_ns
        elif isinstance(event, NodeJoined):
            self._node_joined(now_ns, event)
        elif isinstance(event, NodeLost):
            self._node_lost(now_ns, event)
        else:
            raise DriverError(f"unknown event {type(event).__name__}")

    # --- requests ------------------------------------------------------------------------------

    def _request_arrived(self, now_ns: int, event: RequestArrived) -> None:
        request_id = event.request_id
        if request_id <= self._last_request_id:
            raise DriverError(f"request id {request_id} does not follow {self._last_request_id}")
        if not 0 <= event.pipeline < len(self.app.pipelines) or event.items < 1:
            raise DriverError(f"request {request_id}: no pipeline {event.pipeline}, or no items")
        view = self.view
        view.now_ns = now_ns
        view.arrivals_seen[event.pipeline] += 1
        self._last_request_id = request_id
        pipeline = self.app.pipelines[event.pipeline]
        slo = pipeline.slo
        deadline_ns = event.deadline_ns
        if deadline_ns == 0:
            deadline_ns = slo.deadline_ns(now_ns)
        request = Request(
            request_id, pipeline, event.client, event.items, event.priority, now_ns, deadline_ns
        )
        task_id = request_id * STAGES_MAX
        for stage in pipeline.stages:
            request.tasks.append(Task(task_id, request, stage))
            task_id += 1
        request.tasks_left = len(request.tasks)
        view.requests[request_id] = request
        if len(view.requests) > self._open_max:
            self._ledger.settle(request, Outcome.REJECTED, "too many open requests")
            return
        policy = self.policy
        policy.on_arrival(request)
        if request.state != RequestState.OPEN:
            return
        if slo.gives_up:
            self._ledger.set_timer(("deadline", request_id), deadline_ns)
        for task in request.tasks:
            if task.waits_for == 0 and task.state == TaskState.BLOCKED:
                task.state = TaskState.READY
                policy.on_task_ready(task)

    def _request_announced(self, now_ns: int, event: RequestAnnounced) -> None:
        if not 0 <= event.pipeline < len(self.app.pipelines):
            raise DriverError(f"request {event.request_id}: no pipeline {event.pipeline}")
        if event.request_id <= self._last_request_id or event.arrival_ns < now_ns:
            raise DriverError(f"request {event.request_id} is announced after it has arrived")
        self.view.now_ns = now_ns
        self.policy.on_announced(event.request_id, event.pipeline, event.arrival_ns)

    def _request_cancelled(self, now_ns: int, event: RequestCancelled) -> None:
        if event.request_id > self._last_request_id:
            raise DriverError(f"request {event.request_id} is cancelled but never arrived")
        self.view.now_ns = now_ns
        request = self.view.requests.get(event.request_id)
        if request is None:  # the answer and the cancellation crossed
            self.view.events_ignored += 1
            return
        self._settle_early(request, Outcome.CANCELLED, "cancelled by the client")

    def _settle_early(self, request: Request, outcome: int, reason: str) -> None:
        """Settle a request that still has tasks to go, and tell the policy which it may forget."""
        waiting = [task for task in request.tasks if task.state == TaskState.READY]
        self._ledger.settle(request, outcome, reason)
        for task in waiting:
            self.policy.on_task_withdrawn(task)

    # --- batches -------------------------------------------------------------------------------

    def _out_batch(self, batch_id: int) -> Batch | None:
        """The batch an event speaks of; None if it has ended already."""
        batch = self.view.batches.get(batch_id)
        if batch is None and not self._ledger.was_batch(batch_id):
            raise DriverError(f"batch {batch_id} was never sent")
        return batch

    def _batch_finished(self, now_ns: int, event: BatchFinished) -> None:
        view = self.view
        batch = view.batches.get(event.batch_id)
        if batch is None:
            self._out_batch(event.batch_id)
            view.now_ns = now_ns
            view.events_ignored += 1
            return
        view.now_ns = now_ns
        self._ledger.take_back(batch, BatchState.FINISHED)
        if self._lost_after:
            self._ledger.cancel_timer(("lost", batch.id))
        for task in batch.tasks:
            if task.state == TaskState.RUNNING:
                self._task_done(task, batch, event.unsure)
        policy = self.policy
        policy.on_batch_ended(batch, now_ns - batch.sent_ns)
        node = batch.node
        if node is not None and node.state == NodeState.UP:
            policy.on_capacity(node)

    def _end_attempts(self, batch: Batch, state: int) -> None:
        self._ledger.take_back(batch, state)
        if self._lost_after:
            self._ledger.cancel_timer(("lost", batch.id))

    def _task_done(self, task: Task, batch: Batch, unsure: tuple[int, ...]) -> None:
        task.state = TaskState.DONE
        if task.attempts_out:  # competing copies lose
            for other in self._ledger.batches_of(task):
                self._ledger.cancel_if_unwanted(other)
        request = task.request
        request.tasks_left -= 1
        if request.tasks_left == 0:
            is_late = self.view.now_ns > request.deadline_ns
            self._ledger.settle(request, Outcome.LATE if is_late else Outcome.MET)
            return
        task.node_id = None if batch.node is None else batch.node.id
        self._wake_successors(task, task.id in unsure)

    def _wake_successors(self, task: Task, is_unsure: bool) -> None:
        request = task.request
        for index in request.pipeline.successors[task.id % STAGES_MAX]:
            successor = request.tasks[index]
            if successor.state != TaskState.BLOCKED:
                continue
            successor.waits_for -= 1
            if successor.stage.only_if_unsure and not is_unsure:
                self._skip(successor)
            elif successor.waits_for == 0:
                self._make_ready(successor)
            if request.state != RequestState.OPEN:
                return

    def _skip(self, task: Task) -> None:
        """A cascade ends before this task: it and all that only it leads to count as done."""
        task.state = TaskState.SKIPPED
        self._ledger.release_reservation(task)
        request = task.request
        request.tasks_left -= 1
        if request.tasks_left == 0:
            is_late = self.view.now_ns > request.deadline_ns
            self._ledger.settle(request, Outcome.LATE if is_late else Outcome.MET)
        else:
            self._wake_successors(task, is_unsure=False)

    def _make_ready(self, task: Task) -> None:
        request = task.request
        if request.pipeline.slo.gives_up and self.view.now_ns >= request.deadline_ns:
            self._settle_early(request, Outcome.EXPIRED, "deadline passed between stages")
            return
        task.state = TaskState.READY
        self.policy.on_task_ready(task)

    def _batch_refused(self, now_ns: int, event: BatchRefused) -> None:
        if not 0 <= event.reason < len(REFUSAL_NAMES):
            raise DriverError(f"batch {event.batch_id}: no such refusal as {event.reason}")
        batch = self._out_batch(event.batch_id)
        view = self.view
        view.now_ns = now_ns
        if batch is None:
            view.events_ignored += 1
            return
        self._end_attempts(batch, BatchState.REFUSED)
        self._back_off(batch, event.reason)
        reason = f"refused too often, at last: {REFUSAL_NAMES[event.reason]}"
        for task in batch.tasks:
            task.attempts_made -= 1  # it never ran
            task.refusals += 1
            self._retry_or_fail(task, task.refusals < self.app.limits.refusals_max, reason)
        self._after_attempts(batch)

    def _back_off(self, batch: Batch, reason: int) -> None:
        """Leave alone, for a moment, the place that refused."""
        if reason in (Refusal.LATE, Refusal.CANCELLED):
            return  # that was about the batch, not about the place
        until_ns = self.view.now_ns + self.app.limits.backoff_ns
        node = batch.node
        if node is None:
            self.view.pool_blocked_until_ns[batch.pool.id] = until_ns
            self._ledger.set_timer(("unblock_pool", batch.pool.id), until_ns)
        elif node.state == NodeState.UP:
            self._ledger.block_node(node, until_ns)

    def _batch_broke(self, now_ns: int, batch_id: int, state: int, reason: str) -> None:
        batch = self._out_batch(batch_id)
        view = self.view
        view.now_ns = now_ns
        if batch is None:
            view.events_ignored += 1
            return
        self._end_attempts(batch, state)
        if state == BatchState.LOST:
            self._back_off(batch, Refusal.BUSY)
        for task in batch.tasks:
            self._retry_or_fail(task, self._may_repeat(task), f"{task.function.name}: {reason}")
        self._after_attempts(batch)

    def _may_repeat(self, task: Task) -> bool:
        return (
            task.function.is_idempotent
            and task.attempts_made < self.app.limits.attempts_max
            and self.view.now_ns < task.request.deadline_ns
        )

    def _retry_or_fail(self, task: Task, may_retry: bool, reason: str) -> None:
        """An attempt at this task came to nothing. Others may still be out, or want it no more."""
        if task.state != TaskState.RUNNING or task.attempts_out:
            return
        task.state = TaskState.READY
        if may_retry:
            self.policy.on_task_returned(task)
            return
        task.state = TaskState.DROPPED  # it is in no policy's queue: nobody need be told of it
        self._settle_early(task.request, Outcome.FAILED, reason)

    def _after_attempts(self, batch: Batch) -> None:
        self.policy.on_batch_ended(batch, self.view.now_ns - batch.sent_ns)
        if batch.node is not None and batch.node.state == NodeState.UP:
            self.policy.on_capacity(batch.node)

    # --- instances and nodes -------------------------------------------------------------------

    def _known_instance(self, instance_id: int) -> Instance | None:
        """The instance an event speaks of; None if it is gone already."""
        instance = self.view.instances.get(instance_id)
        if instance is None:
            if not self._ledger.was_instance(instance_id):
                raise DriverError(f"instance {instance_id} was never started")
            self.view.events_ignored += 1
        return instance

    def _instance_started(self, now_ns: int, event: InstanceStarted) -> None:
        node = self._known_node(event.node_id)
        instance = self._known_instance(event.instance_id)
        if instance is not None and instance.node not in (None, node):
            raise DriverError(f"instance {event.instance_id} was not to start on {node.name}")
        self.view.now_ns = now_ns
        if instance is None or instance.state == InstanceState.DRAINING:
            return
        if instance.state != InstanceState.STARTING or node.state != NodeState.UP:
            self.view.events_ignored += 1
            return
        self._ledger.instance_started(instance, node)
        self.policy.on_instance_started(instance)
        self.policy.on_capacity(node)

    def _instance_appeared(self, now_ns: int, event: InstanceAppeared) -> None:
        node = self._known_node(event.node_id)
        if event.instance_id < 0 or self._ledger.is_ours(event.instance_id):
            raise DriverError(f"instance {event.instance_id} is not a peer's but ours to start")
        if event.instance_id in self.view.instances:
            raise DriverError(f"instance {event.instance_id} appeared twice")
        if not 0 <= event.variant_id < len(self.app.variants):
            raise DriverError(f"instance {event.instance_id}: no variant {event.variant_id}")
        self.view.now_ns = now_ns
        if node.state != NodeState.UP or event.variant_id in node.instances:
            self.view.events_ignored += 1  # it crossed the loss of its node, or a start of ours
            return
        variant = self.app.variants[event.variant_id]
        instance = self._ledger.adopt_instance(event.instance_id, variant, node)
        self.policy.on_instance_started(instance)
        self.policy.on_capacity(node)

    def _instance_stopped(self, now_ns: int, event: InstanceStopped) -> None:
        instance = self._known_instance(event.instance_id)
        self.view.now_ns = now_ns
        if instance is None:
            return
        self._ledger.instance_gone(instance)
        self.policy.on_instance_gone(instance)
        if instance.node is not None:
            self.policy.on_capacity(instance.node)

    def _weights_loaded(self, now_ns: int, event: WeightsLoaded) -> None:
        instance = self._known_instance(event.instance_id)
        self.view.now_ns = now_ns
        if instance is None or instance.node is None:
            return
        self._ledger.end_preparing(instance)
        self.policy.on_capacity(instance.node)

    def _known_node(self, node_id: int) -> Node:
        node = self.view.nodes.get(node_id)
        if node is None:
            raise DriverError(f"there is no node {node_id}")
        return node

    def _node_joined(self, now_ns: int, event: NodeJoined) -> None:
        view = self.view
        node = view.nodes.get(event.node_id)
        if node is not None and node.state == NodeState.UP:
            raise DriverError(f"node {event.node_id} has joined already")
        if not 0 <= event.pool_id < len(self.app.pools):
            raise DriverError(f"node {event.node_id}: there is no pool {event.pool_id}")
        if node is not None and node.pool.id != event.pool_id:
            raise DriverError(f"node {event.node_id} has come back to another pool")
        view.now_ns = now_ns
        if node is None:
            pool = self.app.pools[event.pool_id]
            node = Node(event.node_id, event.name, pool, view.variants_by_pool[pool.id])
            view.nodes[node.id] = node
        node.state = NodeState.UP
        self._ledger.offer_node(node)
        self.policy.on_node_joined(node)
        self.policy.on_capacity(node)

    def _node_lost(self, now_ns: int, event: NodeLost) -> None:
        node = self._known_node(event.node_id)
        if node.state != NodeState.UP:
            raise DriverError(f"node {event.node_id} is down already")
        self.view.now_ns = now_ns
        self._ledger.lose_node(node)
        self.policy.on_node_lost(node)

    # --- timers --------------------------------------------------------------------------------

    def _timer_fired(self, now_ns: int, key: TimerKey) -> None:
        view = self.view
        at_ns = view.timers.get(key)
        view.now_ns = now_ns
        if at_ns is None or at_ns > now_ns:  # cancelled or set anew while this was on its way
            view.events_ignored += 1
            return
        del view.timers[key]
        name, number = key
        if name == "deadline":
            self._deadline_passed(number)
        elif name == "unblock":
            node = view.nodes[number]
            self._ledger.offer_node(node)
            if node.state == NodeState.UP:
                self.policy.on_capacity(node)
        elif name == "unblock_pool":
            self.policy.on_pool_open(number)
        elif name == "lost":
            self._batch_broke(now_ns, number, BatchState.LOST, "no answer in time")
        elif name == "plan":
            reconcile(view, self._orders, self.policy.plan())
        else:
            self.policy.on_timer(name, number)

    def _deadline_passed(self, request_id: int) -> None:
        """Give up a request that still waits; one that is running may yet be late."""
        request = self.view.requests.get(request_id)
        if request is None:
            return
        for task in request.tasks:
            if task.state == TaskState.RUNNING:
                return
        self._settle_early(request, Outcome.EXPIRED, "deadline passed while waiting")
