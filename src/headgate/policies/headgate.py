"""Promises from a capacity calendar, kept in the order of their latest starts.

The general-purpose policy, with one configuration. Its parts in `headgate.planning` return values:

- *Admission* (`control`, `calendar`, `cost_budgets`, `shares`). A request is admitted if every
  stage can start in time, within the cost objective, and so can everything promised before. The
  promise has a build (a variant on a pool) and a time per stage. Tenants have max-min fair shares.
- *Order* (`task_queues`). Promised tasks go by latest start. What has no objective, or can no
  longer be in time, is best effort: it gets what is left, and 5 % of a pool while it waits.
- *Batching* (`batching`, `shapes`). As large as the promises of the members allow. Where batches
  have shapes: the cheapest shape and size with which the rest of the pipeline is in time.
- *Placement* (`placement`, `builds`, `node_room`). A free node that holds the weights. Functions
  share scarce memory and resident compute by their load: so are starts and evictions chosen.
- *Dispatch* (`next_batch`, `spillover`). Which queue goes next to a free node. What no node can do
  in time is promised a call of a FaaS platform, which keeps as many warm as such calls need.
- *Renting* (`rent_or_call`, `fleet_size`). A node is rented when the calls that it saves are worth
  it; without a platform, when the objective needs it at the forecast rate, or at U times that rate.
- *Several gateways* (`peer_gateways`). Each promises its part of a pool, and scales
  for all. A node that is busy with the batches of others refuses: another one is asked, and that
  one again, the sooner the more urgent the task is.

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
from headgate.core.events import Refusal
from headgate.core.policy import (
    POSITIVE,
    Capabilities,
    Context,
    Plan,
    Policy,
    PolicyConfig,
    PolicyKind,
    Target,
)
from headgate.core.records import Batch, Instance, Node, Request, Task
from headgate.core.states import TASK_READY, Settlement
from headgate.planning.admission.control import AdmissionControl
from headgate.planning.admission.refusals import Refusals
from headgate.planning.admission.spillover import Spillover
from headgate.planning.autoscaling.rent_or_call import NodeAutoscaler
from headgate.planning.dispatch.batching import Batching
from headgate.planning.dispatch.next_batch import Dispatcher, Send
from headgate.planning.dispatch.placement import Placement, fits_host
from headgate.planning.dispatch.shapes import ShapeChooser
from headgate.planning.dispatch.task_queues import TaskQueues
from headgate.planning.pools.build import Build
from headgate.planning.pools.builds import Builds
from headgate.planning.pools.peer_gateways import RETRY_MIN_NS, BusyNodes

_RESIZE_WARM_POOL: Final = "resize_warm_pool"  # names of timers, with the number of a function
_CALL: Final = "call"
_TRY_AGAIN: Final = "try_again"  # its number is a node id
_MORE: Final = "more"  # its number is a build id: what waits for more tasks is looked at again
_REFUSALS_MAX: Final = 1000  # of one task, after which it is refused as for a single gateway
_BEST_EFFORT_RETRY_NS: Final = 100_000_000  # while other gateways have need of all slots


@dataclass(frozen=True)
class Config(PolicyConfig):
    """Settings of `headgate`. The default is meant to stay."""

    # Best effort goes by arrival plus so many execution times: short ones first, and none starves.
    default_deadline_factor: float = field(default=30.0, metadata=POSITIVE)


@final
class Headgate(Policy):
    """Turns the decisions of its components into orders."""

    def __init__(self, context: Context, config: Config) -> None:
        super().__init__(context, config)
        app = self.view.app
        self._builds = Builds(self.view)
        self._spillover = Spillover(self.view, self._builds)
        self._admission = AdmissionControl(self.view, self._builds, self._spillover)
        paid = (self._builds, self._admission.budgets)
        self._refusals = Refusals(self.view, self._builds, self._admission)
        self._queues = TaskQueues(app, *paid, config.default_deadline_factor)
        self._shapes = ShapeChooser(self.view, *paid)
        parts = (self.view, self._builds, self._admission, self._queues)
        self._batching = Batching(*parts, self._shapes)
        self._busy = BusyNodes(self.view, self.rng)
        self._placement = Placement(self.view, self._builds, self._busy, self.rng)
        self._dispatch = Dispatcher(
            *parts, self._batching, self._placement, self._spillover, self._shapes
        )
        self._autoscaler = NodeAutoscaler(
            app, self._builds.faas_targets(), shares_nodes=self.view.gateways == 1
        )
        self._rents = self._autoscaler.is_needed
        if self._rents:
            self.plan_every_ns = SECOND_NS
        self._has_faas = any(build is not None for build in self._builds.faas)
        self._ready: deque[Task] = deque()  # queued, and not offered to nodes yet
        self.admission_margins = self._admission.margins.z
        # Batches of a gateway that is gone may still run.
        self._has_had_peers = self.view.gateways > 1
        if self._has_had_peers:
            self._order_standing()

    def _order_standing(self) -> None:
        """Order what is pre-warmed on shared pools: the first instance of every function first."""
        app, targets = self.view.app, self._targets()
        for nth in range(1, 1 + max((target.count for target in targets), default=0)):
            for target in targets:
                if nth <= target.count:
                    variant, pool = app.variants[target.variant_id], app.pools[target.pool_id]
                    self.orders.start_anywhere(variant, pool, target.shape_id, nth)

    def on_arrival(self, request: Request) -> None:
        if self._rents and self.view.gateways == 1:
            self._wake(request)
        is_admitted = self._admission.admit(request)
        if self._rents:
            self._forecast(request, was_admitted=is_admitted)
        if request.deadline_ns < NEVER_NS and (self._has_faas or not is_admitted):
            self._grow(request, was_admitted=is_admitted)
        if not is_admitted:
            self.orders.reject(request, self._refusals.explain(request))

    def on_settled(self, request: Request, settlement: Settlement) -> None:
        self._admission.on_settled(request, settlement.outcome)

    def _forecast(self, request: Request, *, was_admitted: bool) -> None:
        late = self._admission.late_stage
        stages = None if was_admitted else () if late is None else (late,)
        now_ns, gateways = self.view.now_ns, self.view.gateways
        self._autoscaler.on_arrival(now_ns, request.pipeline, request.items, gateways, stages)

    def _wake(self, request: Request) -> None:
        """Rent a node for a function that nothing runs now, if the request can wait for it."""
        for task in request.tasks:
            function_id = task.function.id
            if self._autoscaler.can_wait(function_id):
                build = self._builds.to_wake(function_id)
                if build is not None:
                    self._start(build, self._placement.rentable_node(build))

    def _grow(self, request: Request, *, was_admitted: bool) -> None:
        """Start what the request would have needed, for those that follow."""
        for task in request.tasks:
            for build in self._admission.budgets.affordable(task):
                if build.warm_pool is not None:
                    if (at_ns := self._spillover.resize_at_ns(build)) is not None:
                        self.orders.set_timer(_RESIZE_WARM_POOL, at_ns, build.function_id)
                elif not was_admitted and build.cold_start_ns:
                    self._start(build, self._placement.missing_node(build))

    def _start(self, build: Build, node: Node | None) -> None:
        if node is not None:
            self._make_room(build, node)
            instance = self.orders.start(build.variant, node, build.start_shape_id)
            self._builds.nodes.on_start(instance)

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
        # Else `on_batch_ended` follows: all that the same batch has made ready can share a batch.

    def backs_off(self, batch: Batch) -> bool:
        """A node is busy with batches of other gateways: ask another one, and this one later."""
        node = batch.node
        if not self._has_had_peers or node is None:
            return True
        refusals = max(task.busy_refusals for task in batch.tasks)
        if refusals >= _REFUSALS_MAX:
            return True
        self._busy.hold_back(node)
        self._try_again_later(node, self._builds.build_of(batch).lane_ns(batch.items), refusals)
        return False

    def _try_again_later(self, node: Node, batch_ns: float, refusals: int = 0) -> None:
        slack_ns = self._dispatch.slack_ns(node.pool.id)
        at_ns = self._busy.retry_at_ns(slack_ns, batch_ns, refusals)
        self.orders.set_timer(_TRY_AGAIN, at_ns, node.id)

    def on_task_returned(self, task: Task, reason: int | None) -> None:
        self._admission.promise_again(task)
        if reason == Refusal.BUSY and self._has_had_peers:
            self._queues.push(task, self._admission.confirm(task))
            self._ready.append(task)  # for `on_batch_ended`, so that the tasks stay together
            return
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
        if not self._builds.is_left_to_others(node.pool.id) or not self._yields(node):
            self._serve(node)
        self._offer_given_up()

    def _offer_best_effort(self, function_id: int) -> None:
        """Offer free nodes to the best effort of a function, and calls to what cannot use them."""
        for build in self._builds.of_function[function_id]:
            is_limited = self._queues.has_limited(function_id)  # each build may have its own queue
            if build.warm_pool is None and self._offer(build) and not is_limited:
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
        if self._dispatch.take_left() and (_TRY_AGAIN, node.id) not in self.view.timers:
            at_ns = self.view.now_ns + _BEST_EFFORT_RETRY_NS
            self.orders.set_timer(_TRY_AGAIN, at_ns, node.id)

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
            self._batching.on_sent(batch)
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
        """Call for tasks that were promised a call, or run nowhere else: the most urgent first."""
        while (send := self._dispatch.to_platform_of(function_id)) is not None:
            self._send(send)
        if (at_ns := self._dispatch.retry_call_at_ns(function_id)) is not None:
            self.orders.set_timer(_CALL, at_ns, function_id)

    def on_timer(self, name: str, number: int) -> None:
        if name == _MORE:
            self._offer(self._builds.all[number])
        elif name == _TRY_AGAIN:
            self._try_again(number)
        else:
            if name == _RESIZE_WARM_POOL:
                self._resize_warm_pool(number)
            self._call(number)
        self._offer_given_up()

    def _yields(self, node: Node) -> bool:
        """Leave a slot that is free again to more urgent tasks of other gateways for a moment."""
        batch_ns = self._builds.calendars[node.pool.id].mean_batch_ns(0.0)
        slack_ns = self._dispatch.slack_ns(node.pool.id)
        at_ns = self._busy.yield_until_ns(node, slack_ns, batch_ns)
        if at_ns is None:
            return False
        self._busy.hold_back(node)
        self.orders.set_timer(_TRY_AGAIN, at_ns, node.id)
        return True

    def _try_again(self, node_id: int) -> None:
        """Ask a node again that was busy with batches of other gateways, if anything waits."""
        node = self.view.nodes[node_id]
        if self._busy.allow_one_more(node):
            longest_ns = self._builds.calendars[node.pool.id].mean_batch_ns(RETRY_MIN_NS)
            self._try_again_later(node, longest_ns)
        self._serve(node)

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
        self._batching.on_ended(batch)
        if batch.node is None:
            self._spillover.on_call_ended(self._builds.build_of(batch), batch)
        self._offer_ready()

    def on_planned_start(self, instance: Instance) -> None:
        self._builds.nodes.on_start(instance)

    def on_instance_started(self, instance: Instance) -> None:
        self._builds.nodes.on_instance_started(instance)

    def on_instance_gone(self, instance: Instance) -> None:
        self._builds.nodes.on_instance_gone(instance)
        self._leave(self._builds.on_pool[instance.pool.id][instance.variant.function_id])

    def _leave(self, build: Build | None) -> None:
        """Move what waits for a build that has no node any more to other builds."""
        if build is not None and not self._builds.is_usable(build):
            for task in self._queues.drain(build):
                self.on_task_ready(task)
            self._offer_ready()
            self._call(build.function_id)
            self._offer_given_up()

    def on_gateways_changed(self) -> None:
        self._has_had_peers = self._has_had_peers or self.view.gateways > 1
        self._builds.on_gateways_changed()

    def plan(self) -> Plan:
        return Plan(self._targets())

    def _targets(self) -> tuple[Target, ...]:
        without_place, waiting = self._builds.without_place(), self._queues.needing_nodes()
        now_ns, gateways = self.view.now_ns, self.view.gateways
        targets = self._autoscaler.targets(now_ns, without_place, waiting, gateways)
        return tuple(self._builds.as_promised(target) for target in targets)

    def on_node_joined(self, node: Node) -> None:
        self._builds.nodes.on_node_joined(node)
        for build in self._builds.on_pool[node.pool.id]:
            if build is not None and self._placement.should_prewarm(build, node):
                self._start(build, node)
        for build in self._builds.on_pool[node.pool.id]:
            while build is not None and self._placement.should_prewarm_replica(build, node):
                self._start(build, node)

    def on_node_lost(self, node: Node) -> None:
        self._builds.nodes.on_node_lost(node)
        self._busy.forget(node)
        for build in self._builds.on_pool[node.pool.id]:
            self._leave(build)


POLICY = PolicyKind(
    Headgate,
    Config,
    Capabilities(
        batches=True, mixed_pools=True, serverless=True, shares_nodes=True, retries_busy=True
    ),
)
