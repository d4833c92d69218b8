"""Earliest deadline first with deadline-aware batching, admission control and FaaS spillover.

The general-purpose policy, meant to work with one configuration. Its parts:

- *Order.* Within a priority, the earliest deadline goes first (EDF). A request without an objective
  gets a deadline for ordering only, `default_deadline_factor` times its own execution time after
  its arrival: short requests go first, and no request starves.
- *Batching.* A batch is as large as the slack of its most urgent member allows, and no larger than
  the throughput knee: where two items take twice as long as one, a batch only adds latency. Sizes
  are counted in items. An idle node never waits for a batch to fill.
- *Placement.* A free node that holds the weights. On another node a cold start is paid if it takes
  no longer than waiting for a node with the weights and no other queued task wants that node, or if
  waiting would miss a deadline or has lasted many times the cold start. Idle nodes with free memory
  pre-start functions according to the recent load.
- *Admission.* A request whose predicted completion is past its deadline is rejected at once, with
  the prediction. Once the queue takes half of the time that the deadline allows, a client with more
  than its fair share of the queue is rejected too, so that others are admitted.
- *Spillover.* If the nodes cannot finish the whole queue in time, the most urgent tasks go to a
  pay-per-call platform, as far as it has warm instances. A task that a cold start would make late
  anyway waits for a node instead, which costs nothing. As many instances are kept warm as were
  recently needed at once, provisioned or by ping calls, whichever is cheaper.
- *Renting.* A node of an elastic pool is rented and released when the calls that it would have
  saved are worth it (`headgate.planning.rent_or_call`).
- *Correction.* Predictions are the profile's times, multiplied by a quantile of recently observed
  over expected time.

Cost per decision: O(functions + nodes).

>>> from headgate.policies import find_policy
>>> find_policy("headgate").capabilities.batches
True
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final, final

from headgate.core.clock import NEVER_NS, SECOND_NS
from headgate.core.model import Variant
from headgate.core.policy import (
    POSITIVE,
    SHARE,
    Capabilities,
    Context,
    LazyDeletions,
    Plan,
    Policy,
    PolicyConfig,
    PolicyKind,
)
from headgate.core.records import Batch, Instance, Node, Request, Task
from headgate.core.states import InstanceState, Outcome, Rejection, Settlement, TaskState
from headgate.planning.batch_size import knee_batch_size, max_batch_within
from headgate.planning.concurrency import KneeLimits
from headgate.planning.forecast import OfferedLoad
from headgate.planning.latency_predictor import LatencyPredictor
from headgate.planning.placement import has_room, next_prestart
from headgate.planning.rent_or_call import ALLOWED_NS, NodeAutoscaler
from headgate.planning.spillover import RESIZE_WARM_POOL, Spillover

_REJECTED: Final = Outcome.REJECTED

Entry = tuple[int, int, int, Task]  # (priority, deadline, task id, task): the smallest goes first


@dataclass(frozen=True)
class Config(PolicyConfig):
    """Settings of `headgate`. The defaults are meant to stay."""

    # Deadline of a request without an objective, as a multiple of its own execution time.
    default_deadline_factor: float = field(default=30.0, metadata=POSITIVE)
    # Queueing time, in cold starts, after which one is paid.
    cold_start_patience: float = field(default=5.0, metadata=POSITIVE)
    # Time constant of the load estimate.
    load_memory_ns: int = field(default=30_000_000_000, metadata=POSITIVE)
    # Quantile of the ratio of observed to expected times.
    correction_quantile: float = field(default=0.9, metadata=SHARE)
    # How often a request that looks infeasible is admitted.
    probe_every_ns: int = field(default=10_000_000_000, metadata=POSITIVE)
    # Share of the allowed wait that is kept as slack.
    slack_reserve: float = field(default=0.2, metadata=SHARE)
    # Share of the allowed time that the queue may take before fair shares are enforced.
    fair_share_threshold: float = field(default=0.5, metadata=SHARE)
    # Time constant of the demand for warm instances.
    warm_memory_ns: int = field(default=3_600_000_000_000, metadata=POSITIVE)
    # Time constant of the index of dispersion.
    rent_memory_ns: int = field(default=1_800_000_000_000, metadata=POSITIVE)


@final
class Headgate(Policy):
    """A heap of tasks per function, and a prediction of when each node will be free."""

    def __init__(self, context: Context, config: Config) -> None:
        super().__init__(context, config)
        app = self.view.app
        self._config = config
        self._queues: list[list[Entry]] = [[] for _ in app.functions]
        self._withdrawals = [LazyDeletions() for _ in app.functions]
        # Tasks that no FaaS call can carry can only run on nodes. They have queues of their own;
        # otherwise they would keep the tasks behind them from spilling.
        self._large: list[list[Entry]] = [[] for _ in app.functions]
        self._ready_ns: dict[int, int] = {}  # by task id: when it was queued
        self._probe_ns: dict[int, int] = {}  # by pipeline: next admission that looks infeasible
        self._client_items = [0 for _ in app.clients]
        self._weight_sum = sum(client.weight for client in app.clients)
        self._predictor = LatencyPredictor(self.view, config.correction_quantile)
        self._knee_batch_sizes = [knee_batch_size(variant.profile) for variant in app.variants]
        self._loads = [
            OfferedLoad(config.load_memory_ns, 10 * f.reference_exec_ns) for f in app.functions
        ]
        self._spillover = Spillover(
            self.view, self.orders, self._predictor, config.slack_reserve, config.warm_memory_ns
        )
        limits = KneeLimits(app, default_ns=ALLOWED_NS)
        self._autoscaler = NodeAutoscaler(
            app, self._spillover.targets, limits, config.rent_memory_ns
        )
        if self._autoscaler.is_needed:
            self.plan_every_ns = SECOND_NS

    def on_arrival(self, request: Request) -> None:
        self._autoscaler.on_arrival(self.view.now_ns, request.pipeline, request.items)
        if request.deadline_ns == NEVER_NS:
            return
        predictor, pipeline, items = self._predictor, request.pipeline, request.items
        allowed_ns = request.deadline_ns - self.view.now_ns
        if predictor.isolated_latency_ns(pipeline, items) > allowed_ns:
            best_ns = predictor.optimistic_latency_ns(pipeline, items)
            if best_ns > allowed_ns:
                if not self._is_probe(request):
                    self.orders.reject(
                        request, Settlement(_REJECTED, Rejection.INFEASIBLE, predicted_ns=best_ns)
                    )
                return
        if self._spillover.is_possible and self._spillover.can_take(request):
            return
        if not predictor.can_run(pipeline):
            self.orders.reject(request, Settlement(_REJECTED, Rejection.UNAVAILABLE))
            return
        queue_ns = predictor.queue_ns(pipeline, items)
        wait_ns = queue_ns + predictor.function_free_in_ns(pipeline.stages[0].function.id)
        service_ns = predictor.service_ns(pipeline, items)
        if wait_ns == 0.0:
            return  # always admit to an idle node, or a pessimistic correction is never re-measured
        latency_ns = int(wait_ns + service_ns)
        # Queued requests inherit the variance of everything ahead of them, so `slack_reserve` of
        # the allowed wait is kept as slack.
        waits_too_long_ns = wait_ns - (1.0 - self._config.slack_reserve) * (allowed_ns - service_ns)
        if waits_too_long_ns > 0:  # after this time the queue is short enough
            self.orders.reject(
                request,
                Settlement(_REJECTED, Rejection.OVERLOADED, latency_ns, int(waits_too_long_ns)),
            )
        elif queue_ns > self._config.fair_share_threshold * allowed_ns and self._exceeds_fair_share(
            request
        ):
            self.orders.reject(
                request, Settlement(_REJECTED, Rejection.UNFAIR, latency_ns, int(queue_ns))
            )

    def _is_probe(self, request: Request) -> bool:
        """Whether to admit an infeasible request as a probe, to correct a wrong profile."""
        pipeline_id, now_ns = request.pipeline.id, self.view.now_ns
        if now_ns < self._probe_ns.get(pipeline_id, now_ns):
            return False
        self._probe_ns[pipeline_id] = now_ns + self._config.probe_every_ns
        return True

    def _exceeds_fair_share(self, request: Request) -> bool:
        """Whether a client has more of the queue than the share of its weight."""
        share = self.view.app.clients[request.client].weight / self._weight_sum
        waiting = self._client_items[request.client]
        return share < 1 and waiting > share * self._predictor.items_queued

    def uses_faas(self, function_id: int) -> bool:
        return self._spillover.targets[function_id] is not None

    def on_task_ready(self, task: Task) -> None:
        work_ns = task.function.reference_exec_ns * task.request.items
        self._loads[task.function.id].observe(self.view.now_ns, work_ns)
        self.on_task_returned(task)

    def on_task_returned(self, task: Task) -> None:
        request = task.request
        deadline_ns = request.deadline_ns
        if deadline_ns == NEVER_NS:
            deadline_ns = request.arrival_ns + self._default_deadline_ns(task)
        entry = (request.priority, deadline_ns, task.id, task)
        queues = self._large if self._spillover.is_too_large(task) else self._queues
        heappush(queues[task.function.id], entry)
        self._spillover.on_queued(task)
        self._ready_ns[task.id] = self.view.now_ns
        self._predictor.on_queued(task)
        self._client_items[request.client] += request.items
        self._serve()

    def _default_deadline_ns(self, task: Task) -> int:
        return int(self._config.default_deadline_factor * task.function.reference_exec_ns)

    def on_task_withdrawn(self, task: Task) -> None:
        function_id = task.function.id
        queues = (self._queues[function_id], self._large[function_id])
        if self._withdrawals[function_id].add(len(queues[0]) + len(queues[1])):
            for queue in queues:
                queue[:] = [entry for entry in queue if entry[3].state == TaskState.READY]
                heapify(queue)
        self._dequeue(task)

    def _dequeue(self, task: Task) -> None:
        """Update the counters for a task that leaves its queue."""
        del self._ready_ns[task.id]
        self._predictor.on_dequeued(task)
        self._client_items[task.request.client] -= task.request.items

    def on_capacity(self, node: Node) -> None:
        self._serve()

    def on_timer(self, name: str, number: int) -> None:
        if name == RESIZE_WARM_POOL:
            self._spillover.resize_warm_pool(number)
        self._serve()

    def on_pool_available(self, pool_id: int) -> None:
        self._serve()

    def on_instance_started(self, instance: Instance) -> None:
        self._predictor.on_instance_started(instance)

    def on_instance_gone(self, instance: Instance) -> None:
        self._predictor.on_instance_gone(instance)

    def plan(self) -> Plan:
        return Plan(self._autoscaler.targets(self.view.now_ns, self._spillover.unavailable_pools()))

    def on_node_joined(self, node: Node) -> None:
        self._predictor.on_node_joined(node)
        self._prewarm(node)

    def _prewarm(self, node: Node) -> None:
        """Start functions that have `prewarm_nodes` before the first request, where they fit."""
        for function in self.view.app.functions:
            variant = node.variants[function.id]
            if function.prewarm_nodes == 0 or variant is None:
                continue
            holders = sum(1 for i in self.view.instances.values() if i.variant.id == variant.id)
            if holders < function.prewarm_nodes and has_room(self.view, node, variant):
                self.orders.start(variant, node)

    def on_node_lost(self, node: Node) -> None:
        self._predictor.on_node_lost(node)

    def _serve(self) -> None:
        """Dispatch, most urgent first; a task that should wait for a certain node is skipped."""
        while self.view.free_nodes:
            heads = sorted(queue[0] for queue in self._all_queues() if self._prune_head(queue))
            if not heads:
                self._prestart()
            if not any(self._send(entry) for entry in heads):
                break
        if self._spillover.is_possible:
            self._spill()

    def _all_queues(self) -> list[list[Entry]]:
        """All queues. Those of tasks that cannot spill are used only if other tasks can."""
        return self._queues + self._large if self._spillover.is_possible else self._queues

    def _spill(self) -> None:
        """Spill the most urgent tasks while the nodes cannot finish the whole queue in time."""
        for queue in self._queues:
            while self._prune_head(queue):
                task = queue[0][3]
                target = self._spillover.spill_target(task)
                if target is None:
                    break
                heappop(queue)
                self._dequeue(task)
                self.orders.dispatch_to_pool([task], target.pool, target.variant)

    def _prestart(self) -> None:
        """Nothing is queued: pre-start a function according to the recent load."""
        prestart = next_prestart(self.view, self._loads)
        if prestart is not None:
            self.orders.start(*prestart)

    def _prune_head(self, queue: list[Entry]) -> bool:
        """Prune the head of a queue, and return whether a task remains.

        Drops cancelled tasks, and re-keys tasks that can no longer meet their deadline with a later
        one, like that of tasks without an objective: feasible tasks go first, without starving the
        others.
        """
        while queue:
            priority, deadline_ns, task_id, task = queue[0]
            if task.state != TaskState.READY:
                heappop(queue)
            elif deadline_ns == task.request.deadline_ns and self._cannot_meet_deadline(task):
                heapreplace(
                    queue, (priority, deadline_ns + self._default_deadline_ns(task), task_id, task)
                )
            else:
                return True
        return False

    def _cannot_meet_deadline(self, task: Task) -> bool:
        variant = self._predictor.reference_variant(task.function.id)
        exec_ns = self._predictor.expected_ns(
            variant, min(task.request.items, variant.profile.items_max)
        )
        target = self._spillover.targets[task.function.id]
        if target is not None:
            exec_ns = min(exec_ns, self._predictor.expected_ns(target.variant, 1))
        return self.view.now_ns + exec_ns > task.request.deadline_ns

    def _send(self, entry: Entry) -> bool:
        _, deadline_ns, _, task = entry
        node = self._choose_node(task, deadline_ns)
        if node is None:
            return False
        variant = node.variants[task.function.id]
        assert variant is not None
        # A deadline that is for ordering only does not limit the batch size.
        until_ns = NEVER_NS if task.request.deadline_ns == NEVER_NS else deadline_ns
        batch = self._take_batch(task.function.id, variant, until_ns)
        items = sum(member.request.items for member in batch)
        start_ns = (
            0 if self.view.is_resident(node, task.function.id) else variant.profile.cold_start_ns
        )
        self._predictor.on_sent(node, variant, items, start_ns)
        self.orders.dispatch(batch, node)
        return True

    def _take_batch(self, function_id: int, variant: Variant, until_ns: int) -> list[Task]:
        """Dequeue the most urgent task and the tasks that fit into a batch within its slack."""
        correction = self._predictor.correction(variant)
        slack_ns = until_ns - self.view.now_ns
        items_max = min(
            max_batch_within(variant.profile, slack_ns, correction),
            self._knee_batch_sizes[variant.id],
        )
        batch: list[Task] = []
        items = 0
        while (queue := self._first_queue(function_id)) is not None:
            task = queue[0][3]
            items += task.request.items
            if batch and (items > items_max or task.must_run_alone):
                break
            heappop(queue)
            self._dequeue(task)
            batch.append(task)
            if task.must_run_alone:
                break
        return batch

    def _first_queue(self, function_id: int) -> list[Entry] | None:
        """The queue of a function with the most urgent head; None if nothing is queued."""
        queue, large = self._queues[function_id], self._large[function_id]
        if (
            large
            and self._prune_head(large)
            and (not self._prune_head(queue) or large[0] < queue[0])
        ):
            return large
        return queue if self._prune_head(queue) else None

    def _choose_node(self, task: Task, deadline_ns: int) -> Node | None:
        """A free node that holds the weights, or one without them if a cold start is justified."""
        view, function_id = self.view, task.function.id
        cold_node: Node | None = None
        for node in view.free_nodes.values():
            variant = node.variants[function_id]
            if variant is None or not self._predictor.has_free_slot(node, variant):
                continue
            if node.pool.is_elastic:
                if self._can_use_rented_node(task, node, variant) and view.can_take(
                    node, function_id
                ):
                    return node
            elif view.can_take(node, function_id):
                if view.is_resident(node, function_id):
                    return node
                if cold_node is None:
                    cold_node = node
        if cold_node is None or self._should_cold_start(task, cold_node, deadline_ns):
            return cold_node
        variant = cold_node.variants[function_id]
        assert variant is not None
        if not self._is_wanted(cold_node) and has_room(view, cold_node, variant):
            self.orders.start(variant, cold_node)  # for the tasks behind this one
        return None

    def _can_use_rented_node(self, task: Task, node: Node, variant: Variant) -> bool:
        """Whether a task may go to a node of an elastic pool.

        It may if the node is ready. It may wait for a booting node only if there is no other
        capacity. For a task that no FaaS call can carry, a node is rented if necessary.
        """
        instance, function_id = node.instances.get(variant.id), variant.function_id
        if instance is not None and instance.state != InstanceState.STARTING:
            return True
        if self._predictor.capacity(function_id):
            return False
        is_for_nodes = self._spillover.is_too_large(task)
        if instance is None:
            return is_for_nodes and not self.view.has_instance(function_id)
        return is_for_nodes or not self._spillover.is_available(function_id)

    def _should_cold_start(self, task: Task, node: Node, deadline_ns: int) -> bool:
        view, function_id = self.view, task.function.id
        variant = node.variants[function_id]
        assert variant is not None
        holders = [n for n in view.nodes.values() if view.is_resident(n, function_id)]
        if not holders:
            return True
        free_ns = min(self._predictor.free_at_ns(holder) for holder in holders)
        wait_ns = max(0.0, free_ns - view.now_ns)
        wait_ns += self._predictor.expected_ns(variant, task.request.items)
        if task.request.deadline_ns < NEVER_NS and view.now_ns + wait_ns > deadline_ns:
            return True
        start_ns = variant.profile.cold_start_ns
        if start_ns <= wait_ns and not self._is_wanted(node) and has_room(view, node, variant):
            return True
        until_ns = self._ready_ns[task.id] + int(self._config.cold_start_patience * start_ns)
        if until_ns > view.now_ns:
            self.orders.set_timer("patience", until_ns, function_id)
        return until_ns <= view.now_ns

    def _is_wanted(self, node: Node) -> bool:
        """Whether a task is queued for a function whose weights the node holds."""
        view = self.view
        return any(
            view.is_resident(node, function_id) and self._first_queue(function_id) is not None
            for function_id in range(len(self._queues))
        )

    def on_batch_ended(self, batch: Batch, took_ns: int) -> None:
        self._predictor.on_batch_ended(batch, took_ns)
        if batch.node is None:
            self._spillover.on_call_ended(batch)


POLICY = PolicyKind(Headgate, Config, Capabilities(batches=True, mixed_pools=True, serverless=True))
