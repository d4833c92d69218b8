"""Promises from a capacity calendar, kept in the order of their latest starts.

The general-purpose policy, with one configuration. Its parts in `headgate.planning` return values:
- *Admission* (`control`, `calendar`, `cost_budgets`, `shares`). A request is admitted if every
  stage can start in time, within the cost objective, and so can everything promised before. The
  promise has a build (a variant on a pool) and a time per stage. Tenants have max-min fair shares.
- *Order* (`task_queues`). Promised tasks go by latest start. What has no objective, or can no
  longer be in time, is best effort: it gets what is left, and 5 % of a pool while it waits.
- *Batching* (`batching`, `shapes`). As large as the promises of the members allow. Where batches
  have shapes: the cheapest shape and size with which the rest of the pipeline is in time.
- *Placement* (`placement`, `builds`, `node_room`). A free node that holds the weights, and inputs
  if moving them takes time. Load divides scarce memory and compute, by starts and evictions.
- *Dispatch* (`next_batch`, `calls`, `spillover`). Which queue goes next to a free node. What none
  can do in time is promised a call of a FaaS platform, which keeps as many warm as calls need.
- *Provisioning* (`provisioning`, `rent_or_call`, `fleet_size`). What was refused starts what it
  lacked. Nodes are rented for the calls that they save, or for the objective at the forecast rate.
- *Several gateways* (`node_lanes`, `busy_nodes`). Each has a part of a pool; busy nodes refuse.

A promise binds: another pool takes a task only if it is in time there and nothing waits there.
Cost per decision: O(log of what waits + builds of the function), O(nodes) where memory is scarce.

>>> POLICY.capabilities.batches
True
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, final

from headgate.core.events import Refusal
from headgate.core.policy import (
    POSITIVE,
    Capabilities,
    Context,
    Plan,
    Policy,
    PolicyConfig,
    PolicyKind,
)
from headgate.core.records import Batch, Instance, Node, Request, Task
from headgate.core.states import TASK_READY, Settlement
from headgate.planning.admission.control import AdmissionControl
from headgate.planning.admission.refusals import Refusals
from headgate.planning.admission.spillover import Spillover
from headgate.planning.constants import BEST_EFFORT_DUE
from headgate.planning.dispatch.batching import Send
from headgate.planning.dispatch.busy_nodes import TRY_AGAIN, BusyNodes
from headgate.planning.dispatch.next_batch import MORE, Dispatcher
from headgate.planning.dispatch.placement import Placement
from headgate.planning.dispatch.provisioning import Provisioner
from headgate.planning.dispatch.task_queues import TaskQueues
from headgate.planning.pools.build import Build, Promise
from headgate.planning.pools.builds import Builds
from headgate.planning.pools.node_room import fits_host

_RESIZE_WARM_POOL: Final = "resize_warm_pool"  # names of timers, with the number of a function
_CALL: Final = "call"


def _default_deadline_factor() -> float:
    return BEST_EFFORT_DUE


@dataclass(frozen=True)
class Config(PolicyConfig):
    """Settings of `headgate`. The default is meant to stay."""

    # Best effort goes by arrival plus so many execution times: short ones first, and none starves.
    default_deadline_factor: float = field(
        default_factory=_default_deadline_factor, metadata=POSITIVE
    )


@final
class Headgate(Policy):
    """Turns the decisions of its components into orders."""

    def __init__(self, context: Context, config: Config) -> None:
        super().__init__(context, config)
        view = self.view
        self._builds = Builds(view)
        self._spillover = Spillover(view, self._builds)
        self._admission = AdmissionControl(view, self._builds, self._spillover)
        self.admission_margins = self._admission.margins.z
        self._refusals = Refusals(view, self._builds, self._admission)
        budgets, factor = self._admission.budgets, config.default_deadline_factor
        self._queues = TaskQueues(view, self._builds, budgets, factor)
        self._busy = BusyNodes(view, self._builds, self._queues, self.rng)
        self._placement = Placement(view, self._builds, self._busy, self.rng)
        parts = (view, self._builds, self._admission, self._queues, self._placement)
        self._dispatch = Dispatcher(*parts, self._spillover)
        self._provisioner = Provisioner(*parts)
        self.plan_every_ns = self._provisioner.plan_every_ns
        for nth, target in self._provisioner.standing_orders():
            variant, pool = view.app.variants[target.variant_id], view.app.pools[target.pool_id]
            self.orders.start_anywhere(variant, pool, target.shape_id, nth)

    def on_arrival(self, request: Request) -> None:
        while self._provisioner.rents and (start := self._provisioner.to_wake(request)) is not None:
            self._start(*start)
        is_admitted = self._admission.admit(request)
        for build in self._provisioner.on_arrival(request, was_admitted=is_admitted):
            if build.warm_pool is None:
                self._start(build, self._placement.missing_node(build))
            elif (at_ns := self._spillover.resize_at_ns(build)) is not None:
                self.orders.set_timer(_RESIZE_WARM_POOL, at_ns, build.function_id)
        if not is_admitted:
            self.orders.reject(request, self._refusals.explain(request))

    def on_settled(self, request: Request, settlement: Settlement) -> None:
        self._admission.on_settled(request, settlement.outcome)

    def uses_faas(self, function_id: int) -> bool:
        return self._builds.faas[function_id] is not None

    def on_task_ready(self, task: Task) -> None:
        if task.stage.after:  # `on_batch_ended` follows, so that tasks can share a batch
            self._dispatch.enqueue_with_others(task)
        else:  # its request has just been admitted
            promise = self._admission.booked(task)
            self._dispatch.enqueue(task, promise)
            self._offer_task(task, promise)

    def on_task_returned(self, task: Task, reason: int | None) -> None:
        self._admission.promise_again(task)
        is_retried = reason == Refusal.BUSY and self._busy.has_had_peers
        self._dispatch.enqueue_with_others(task, was_refused=is_retried)
        if not is_retried:  # else `on_batch_ended` follows, so that the tasks stay together
            self._offer_ready()

    def on_task_withdrawn(self, task: Task) -> None:
        self._queues.withdraw(task, self._admission.booked(task))

    def on_batch_ended(self, batch: Batch, took_ns: int) -> None:
        self._dispatch.on_batch_ended(batch, took_ns)
        at_ns = self._busy.on_ended(batch) if self._busy.has_had_peers else None
        if at_ns is not None and batch.node is not None:
            self.orders.set_timer(TRY_AGAIN, at_ns, batch.node.id)
        self._offer_ready()

    def on_capacity(self, node: Node) -> None:
        self._serve(node, self._busy.on_freed(node) if self._busy.has_had_peers else None)
        self._offer_given_up()

    def on_pool_available(self, pool_id: int) -> None:
        while (send := self._dispatch.calls.to_pool(pool_id)) is not None:
            self._send(send)
        self._offer_given_up()

    def on_timer(self, name: str, number: int) -> None:
        if name == MORE:
            self._offer(self._builds.all[number])
        elif name == TRY_AGAIN:
            node = self.view.nodes[number]
            self._serve(node, self._busy.on_asked_again(node))
        else:
            if name == _RESIZE_WARM_POOL:
                self._resize_warm_pool(number)
            self._call(number)
        self._offer_given_up()

    def _offer_ready(self) -> None:
        """Offer nodes and calls to the tasks that have become ready."""
        while self._dispatch.ready and (task := self._dispatch.take_ready()) is not None:
            self._offer_task(task, self._admission.booked(task))

    def _offer_task(self, task: Task, promise: Promise | None) -> None:
        if promise is None:
            self._offer_best_effort(task.function.id)
        elif promise.build.warm_pool is not None or not self._offer(promise.build, task):
            if (send := self._dispatch.to_other_pool(promise.build)) is not None:
                self._send(send)
            else:
                self._call(task.function.id)
        self._offer_given_up()
        for build in self._placement.prestarted[task.function.id] if self.view.free_nodes else ():
            is_awaited = task.state == TASK_READY  # only now: a start must not take its node
            self._start(build, self._placement.prestart_node(build, is_awaited=is_awaited))

    def _offer_best_effort(self, function_id: int) -> None:
        """Offer free nodes to the best effort of a function, and calls to what cannot use them."""
        for build in self._builds.of_function[function_id] if self.view.free_nodes else ():
            is_limited = self._queues.has_limited(function_id)  # each build may have its own queue
            if build.warm_pool is None and self._offer(build) and not is_limited:
                break
        self._call(function_id)

    def _offer_given_up(self) -> None:
        """Offer what was given up to the free nodes of its other pools: no event follows."""
        while self._queues.given_up:
            self._offer_best_effort(self._queues.take_given_up())

    def _offer(self, build: Build, task: Task | None = None) -> bool:
        """Offer free nodes to the most urgent tasks of a pool, until the task at hand is sent."""
        node = first = self._placement.node_for(build, task)
        while node and self._serve(node) and (task is None or task.state == TASK_READY):
            node = self._placement.node_for(build, task)
        return first is not None

    def _serve(self, node: Node, retry_at_ns: int | None = None) -> bool:
        """Send a node what should run on its free slots; if it is held back, ask it again later."""
        has_sent = False
        if retry_at_ns is not None:
            self.orders.set_timer(TRY_AGAIN, retry_at_ns, node.id)
        while node.running < node.slots and (send := self._dispatch.to_node(node)) is not None:
            self._send(send)
            has_sent = True
        for timer in self._dispatch.take_timers(node) if self._dispatch.has_timers else ():
            self.orders.set_timer(*timer)
        return has_sent

    def _call(self, function_id: int) -> None:
        """Call for what was promised a call, or runs nowhere else: the most urgent of the pool."""
        build = self._builds.faas[function_id]
        if build is None:
            return
        while (send := self._dispatch.calls.to_pool(build.pool.id)) is not None:
            self._send(send)
        if (at_ns := self._dispatch.calls.retry_at_ns(function_id)) is not None:
            self.orders.set_timer(_CALL, at_ns, function_id)

    def _send(self, send: Send) -> None:
        build, node = send.build, send.node
        if send.is_start:
            self._start(build, node)
            return
        self._make_room(build, node)
        tasks, shape_id = self._dispatch.take(send)
        if node is not None:
            batch = self.orders.dispatch(tasks, node, build.variant, None, shape_id)
            while build.replicas > 1 and self._placement.wants_replica(node, build):
                self._start(build, node)
        else:
            batch = self.orders.dispatch_to_pool(tasks, build.pool, build.variant)
        self._dispatch.on_sent(send, batch)

    def _start(self, build: Build, node: Node | None) -> None:
        if node is not None:
            self._make_room(build, node)
            instance = self.orders.start(build.variant, node, build.start_shape_id)
            self._builds.nodes.on_start(instance)

    def _make_room(self, build: Build, node: Node | None) -> None:
        for instance in () if node is None else self._placement.to_evict(node, build):
            (self.orders.evict if fits_host(instance) else self.orders.stop)(instance)

    def _resize_warm_pool(self, function_id: int) -> None:
        build = self._builds.faas[function_id]
        assert build is not None
        if (resize := self._spillover.resize(build)) is not None:
            self.orders.keep_warm(
                build.variant, build.pool, resize.count, is_provisioned=resize.is_provisioned
            )
        if (at_ns := self._spillover.review_at_ns(build)) is not None:
            self.orders.set_timer(_RESIZE_WARM_POOL, at_ns, function_id)

    def backs_off(self, batch: Batch) -> bool:
        """A node is busy with batches of other gateways: ask another one, and this one later."""
        return not self._busy.on_refused(batch)

    def on_gateways_changed(self) -> None:
        self._busy.on_gateways_changed()
        self._builds.on_gateways_changed()

    def plan(self) -> Plan:
        return Plan(self._provisioner.targets())

    def on_planned_start(self, instance: Instance) -> None:
        self._builds.nodes.on_start(instance)

    def on_instance_started(self, instance: Instance) -> None:
        self._builds.nodes.on_instance_started(instance)

    def on_instance_gone(self, instance: Instance) -> None:
        self._builds.nodes.on_instance_gone(instance)
        self._leave(self._builds.on_pool[instance.pool.id][instance.variant.function_id])

    def on_node_joined(self, node: Node) -> None:
        self._builds.nodes.on_node_joined(node)
        while (build := self._placement.to_prewarm(node)) is not None:
            self._start(build, node)

    def on_node_lost(self, node: Node) -> None:
        self._builds.nodes.on_node_lost(node)
        self._busy.forget(node)
        self._dispatch.forget(node)
        for build in self._builds.on_pool[node.pool.id]:
            self._leave(build)

    def _leave(self, build: Build | None) -> None:
        """Move what waits for a build without nodes; what left nodes to it may have them now."""
        if build is not None:
            if not self._builds.is_usable(build):
                for task in self._queues.drain(build):
                    self._dispatch.enqueue_with_others(task)
                self._offer_ready()
            self._offer_best_effort(build.function_id)
            self._offer_given_up()


POLICY = PolicyKind(
    Headgate,
    Config,
    Capabilities(
        batches=True, mixed_pools=True, serverless=True, shares_nodes=True, retries_busy=True
    ),
)
