"""Promises from a capacity calendar, kept in the order of their latest starts.

The general-purpose policy, meant to work with one configuration. Its parts, each a component in
`headgate.planning` that returns decisions as values:

- *Admission* (`admission`, `calendar`, `shares`). A request is admitted if the calendars of the
  pools still balance with it: every stage can start in time, and so can everything promised before.
  The promise names a build (a variant on a pool) and a time for every stage. Tenants and pipelines
  have max-min fair shares of a contended pool. Margins follow what became of promises.
- *Order* (`task_queues`). Promised tasks go by latest start. What has no objective, or can no
  longer be in time, is best effort: it gets what is left, and 5 % of a pool while it waits.
- *Batching* (`batching`, `shapes`). As large as the promises of the members allow. Where batches
  have shapes: the cheapest shape and size with which the rest of the pipeline is in time.
- *Placement* (`placement`, `builds`, `node_room`). A free node that holds the weights. Functions
  share scarce memory and resident compute by their load: so are starts and evictions chosen.
- *Dispatch* (`dispatch`). Which queue goes next to a free node, or to a FaaS platform.
- *Spillover* (`spillover`). What no node can do in time is promised a call of a FaaS platform; the
  concurrency that such calls need sets how many instances are kept warm.
- *Renting* (`rent_or_call`). A node is rented when the calls that it saves are worth it.

A promise binds: another pool takes a task only if it is in time there and nothing waits there.
Cost per decision: O(log of what waits + builds of the function), O(nodes) where memory is scarce.

>>> from headgate.policies import find_policy
>>> find_policy("headgate").capabilities.batches
True
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final, final

from headgate.core.clock import NEVER_NS, SECOND_NS
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
from headgate.planning.admission import AdmissionControl
from headgate.planning.batching import Batching
from headgate.planning.build import Build
from headgate.planning.builds import Builds
from headgate.planning.dispatch import Dispatcher, Send
from headgate.planning.placement import Placement, fits_host
from headgate.planning.rent_or_call import NodeAutoscaler
from headgate.planning.shapes import ShapeChooser
from headgate.planning.spillover import Spillover
from headgate.planning.task_queues import TaskQueues

# Names of the timers, whose number is a function id.
_RESIZE_WARM_POOL: Final = "resize_warm_pool"
_CALL: Final = "call"
_MORE: Final = "more"  # its number is a build id: what waits for more tasks is looked at again


@dataclass(frozen=True)
class Config(PolicyConfig):
    """Settings of `headgate`. The default is meant to stay."""

    # Best effort is ordered by arrival plus this multiple of its own execution time: short requests
    # go first, and none starves.
    default_deadline_factor: float = field(default=30.0, metadata=POSITIVE)


@final
class Headgate(Policy):
    """Turns the decisions of its components into orders."""

    def __init__(self, context: Context, config: Config) -> None:
        super().__init__(context, config)
        app = self.view.app
        self._builds = Builds(self.view)
        self._spillover = Spillover(self.view)
        self._admission = AdmissionControl(self.view, self._builds, self._spillover)
        self._queues = TaskQueues(app, self._builds, config.default_deadline_factor)
        self._shapes = ShapeChooser(self.view, self._builds)
        parts = (self.view, self._builds, self._admission, self._queues)
        self._batching = Batching(*parts, self._shapes)
        self._placement = Placement(self.view, self._builds)
        self._dispatch = Dispatcher(
            *parts, self._batching, self._placement, self._spillover, self._shapes
        )
        self._autoscaler = NodeAutoscaler(app, self._builds.faas_targets())
        if self._autoscaler.is_needed:
            self.plan_every_ns = SECOND_NS
        self._ready: deque[Task] = deque()  # queued, and not offered to nodes yet
        self.admission_margins = self._admission.margins.z

    def on_arrival(self, request: Request) -> None:
        self._autoscaler.on_arrival(self.view.now_ns, request.pipeline, request.items)
        if request.deadline_ns == NEVER_NS:
            self._admission.observe_best_effort(request)
            return
        is_admitted = self._admission.admit(request)
        self._grow(request, was_admitted=is_admitted)
        if not is_admitted:
            self.orders.reject(request, self._admission.refusal(request))

    def on_settled(self, request: Request, settlement: Settlement) -> None:
        self._admission.on_settled(request, settlement.outcome)

    def _grow(self, request: Request, *, was_admitted: bool) -> None:
        """Start what the request would have needed, for those that follow."""
        for task in request.tasks:
            for build in self._builds.of_function[task.function.id]:
                if build.warm_pool is not None:
                    if (at_ns := self._spillover.resize_at_ns(build)) is not None:
                        self.orders.set_timer(_RESIZE_WARM_POOL, at_ns, build.function_id)
                elif not was_admitted and build.cold_start_ns:
                    self._start(build, self._placement.missing_node(build))

    def _start(self, build: Build, node: Node | None) -> None:
        if node is not None:
            self._make_room(build, node)
            instance = self.orders.start(build.variant, node, build.start_shape_id)
            self._builds.on_start(instance)

    def _make_room(self, build: Build, node: Node) -> None:
        for instance in self._placement.to_evict(node, build):
            (self.orders.evict if fits_host(instance) else self.orders.stop)(instance)

    def uses_faas(self, function_id: int) -> bool:
        return self._builds.faas[function_id] is not None

    def on_task_ready(self, task: Task) -> None:
        promise = self._admission.confirm(task)
        self._queues.push(task, promise)
        if promise is not None:
            self._shapes.observe(promise.build, task.request.items)
        self._ready.append(task)
        if not task.stage.after:
            self._offer_ready()
        # Else a batch has ended whose other tasks have successors too: `on_batch_ended` follows,
        # and all of them can share a batch.

    def on_task_returned(self, task: Task) -> None:
        self._admission.promise_again(task)
        self.on_task_ready(task)
        self._offer_ready()

    def _offer_ready(self) -> None:
        """Offer nodes and calls to the tasks that have become ready."""
        while self._ready:
            task = self._ready.popleft()
            if task.state == TASK_READY:
                self._offer_task(task)

    def _offer_task(self, task: Task) -> None:
        promise = self._admission.booked(task)
        if promise is None:
            self._offer_best_effort(task.function.id)
        elif promise.build.warm_pool is not None or not self._offer(promise.build):
            send = self._dispatch.to_other_pool(self._queues.promised[promise.build.id])
            if send is not None:
                self._send(send)
            else:
                self._call(task.function.id)
        self._offer_given_up()
        for build in self._builds.of_function[task.function.id]:
            # Only now: a start must not take the node that the task itself can have.
            is_awaited = task.state == TASK_READY
            self._start(build, self._placement.prestart_node(build, is_awaited=is_awaited))

    def on_task_withdrawn(self, task: Task) -> None:
        self._queues.withdraw(task, self._admission.booked(task))

    def on_capacity(self, node: Node) -> None:
        self._serve(node)
        self._offer_given_up()

    def _offer_best_effort(self, function_id: int) -> None:
        """Offer free nodes to the best effort of a function, and calls to what cannot use them."""
        for build in self._builds.of_function[function_id]:
            if build.warm_pool is None and self._offer(build):
                break
        self._call(function_id)

    def _offer_given_up(self) -> None:
        """Offer what was given up to the free nodes of its other pools, for no event follows."""
        while (function_id := self._queues.take_given_up()) is not None:
            self._offer_best_effort(function_id)

    def _offer(self, build: Build) -> bool:
        """Offer a free node that can take a build to the most urgent tasks of its pool."""
        node = self._placement.node_for(build)
        if node is None:
            return False
        self._serve(node)
        return True

    def _serve(self, node: Node) -> None:
        """Send batches to a node while it has a free slot and something should run there."""
        while (send := self._dispatch.to_node(node)) is not None:
            self._send(send)
        for build_id, at_ns in self._dispatch.take_held():
            self.orders.set_timer(_MORE, at_ns, build_id)

    def _send(self, send: Send) -> None:
        build, node, start_ns = send.build, send.node, 0
        if node is not None:
            start_ns = self._builds.start_ns(build, node)
            self._make_room(build, node)
        tasks, shape_id = self._batching.take(
            send.queue, build, start_ns, send.shape_id, send.choice, node
        )
        if node is not None:
            batch = self.orders.dispatch(tasks, node, build.variant, None, shape_id)
            while build.replicas > 1 and self._placement.wants_replica(node, build):
                self._start(build, node)
        else:
            self._spillover.on_call(build)
            batch = self.orders.dispatch_to_pool(tasks, build.pool, build.variant)
        self._builds.on_sent(build, batch, start_ns)

    def on_pool_available(self, pool_id: int) -> None:
        while (send := self._dispatch.to_pool(pool_id)) is not None:
            self._send(send)
        self._offer_given_up()

    def _call(self, function_id: int) -> None:
        """Call for the tasks of a function that were promised a call, or run nowhere else."""
        while (send := self._dispatch.to_faas(function_id)) is not None:
            self._send(send)
        if (at_ns := self._dispatch.retry_call_at_ns(function_id)) is not None:
            self.orders.set_timer(_CALL, at_ns, function_id)

    def on_timer(self, name: str, number: int) -> None:
        if name == _MORE:
            self._offer(self._builds.all[number])
        else:
            if name == _RESIZE_WARM_POOL:
                self._resize_warm_pool(number)
            self._call(number)
        self._offer_given_up()

    def _resize_warm_pool(self, function_id: int) -> None:
        build = self._builds.faas[function_id]
        assert build is not None
        resize = self._spillover.resize(build)
        if resize is not None:
            self.orders.keep_warm(
                build.variant, build.pool, resize.count, is_provisioned=resize.is_provisioned
            )
        if (at_ns := self._spillover.review_at_ns(build)) is not None:
            self.orders.set_timer(_RESIZE_WARM_POOL, at_ns, function_id)

    # What happens to batches, instances and nodes

    def on_batch_ended(self, batch: Batch, took_ns: int) -> None:
        self._builds.on_batch_ended(batch, took_ns)
        if batch.node is None:
            self._spillover.on_call_ended(self._builds.build_of(batch), batch)
        self._offer_ready()

    def on_instance_started(self, instance: Instance) -> None:
        self._builds.on_instance_started(instance)

    def on_instance_gone(self, instance: Instance) -> None:
        self._builds.on_instance_gone(instance)
        self._leave(self._builds.on_pool[instance.pool.id][instance.variant.function_id])

    def _leave(self, build: Build | None) -> None:
        """Move what waits for a build that has no node any more to other builds."""
        if build is not None and not self._builds.is_usable(build):
            for task in self._queues.drain(build):
                self.on_task_ready(task)
            self._offer_ready()
            self._call(build.function_id)
            self._offer_given_up()

    def plan(self) -> Plan:
        unavailable, needed = self._builds.unavailable_pools(), self._queues.needing_nodes()
        targets = self._autoscaler.targets(self.view.now_ns, unavailable, needed)
        return Plan(tuple(self._builds.in_planned_shape(target) for target in targets))

    def on_node_joined(self, node: Node) -> None:
        self._builds.on_node_joined(node)
        for build in self._builds.on_pool[node.pool.id]:
            if build is not None and self._placement.should_prewarm(build, node):
                self._start(build, node)
        for build in self._builds.on_pool[node.pool.id]:
            while build is not None and self._placement.should_prewarm_replica(build, node):
                self._start(build, node)

    def on_node_lost(self, node: Node) -> None:
        self._builds.on_node_lost(node)
        for build in self._builds.on_pool[node.pool.id]:
            self._leave(build)


POLICY = PolicyKind(Headgate, Config, Capabilities(batches=True, mixed_pools=True, serverless=True))
