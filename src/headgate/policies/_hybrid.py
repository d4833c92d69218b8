"""Base classes of the policies that combine nodes by the hour with FaaS platforms by the call.

`ThresholdRouter` routes: a task goes to a node that holds its function and is below its concurrency
threshold; else to a FaaS platform that is available; else it waits, first come first served per
function, for whichever is available first. If a function has no platform, or the platform is
unavailable, a node that does not hold the function yet may be used. A task that no call can carry
waits for a node in a separate queue; otherwise it would keep the tasks behind it from spilling.

`AutoscalingRouter` adds a fleet that follows the recent arrival rate.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from headgate.core.model import Variant
from headgate.core.policy import (
    NOT_NEGATIVE,
    POSITIVE,
    Context,
    LazyDeletions,
    Plan,
    Policy,
    PolicyConfig,
    Target,
)
from headgate.core.records import Batch, Instance, Node, Task
from headgate.core.states import (
    INSTANCE_BUSY,
    INSTANCE_IDLE,
    ON_DEVICE,
    TASK_READY,
    InstanceState,
    NodeState,
)
from headgate.core.view import View
from headgate.planning.dispatch.placement import has_room
from headgate.planning.forecast import ArrivalCounts
from headgate.planning.pools.concurrency import ConcurrencyLimits, ThresholdLimits
from headgate.planning.pools.targets import FaasTarget, NodeTarget, Targets


class ThresholdRouter(Policy):
    """FIFO queues, routing by threshold, and a fleet of the `desired` number of rented instances.

    A policy passes `limits`, the thresholds for routing, and `planned`, those by which nodes are
    compared, if they are others; it says which functions use nodes and FaaS, and in `resize` it may
    change the desired numbers. The cheapest platform of each function keeps `warm_instances` warm.
    A decision costs O(nodes).
    """

    def __init__(
        self,
        context: Context,
        config: PolicyConfig,
        limits: ConcurrencyLimits,
        *,
        planned: ConcurrencyLimits | None = None,
        nodes: int = 0,
        plan_every_ns: int = 0,
        bin_pack: bool = False,
        warm_instances: int = 0,
    ) -> None:
        super().__init__(context, config)
        app = self.view.app
        self.plan_every_ns = plan_every_ns
        self.targets = targets = Targets(app, planned or limits)
        self._limits = limits
        self._bin_pack = bin_pack
        # By function id, and then again by function id for tasks that no FaaS call can carry.
        self._queues: list[deque[Task]] = [deque() for _ in range(2 * len(app.functions))]
        self._withdrawals = [LazyDeletions() for _ in self._queues]
        # Desired number of instances on rented nodes, by (variant id, pool id).
        self.desired: dict[tuple[int, int], int] = {}
        for function in app.functions:
            rented = targets.cheapest_elastic(function.id)
            if rented is not None and self.uses_nodes(function.id):
                self.set_desired(rented, nodes or function.prewarm_nodes)
            if warm_instances and self.uses_faas(function.id):
                self._keep_warm(targets.faas[function.id][0], warm_instances)

    def _keep_warm(self, target: FaasTarget, count: int) -> None:
        count = min(count, target.platform.concurrency_max)
        self.orders.keep_warm(target.variant, target.pool, count)

    def uses_faas(self, function_id: int) -> bool:
        """Whether tasks of this function may go to a FaaS platform."""
        return bool(self.targets.faas[function_id])

    def uses_nodes(self, function_id: int) -> bool:
        """Whether tasks of this function may go to nodes."""
        return bool(self.targets.nodes[function_id])

    def admits(self, task: Task, node: Node, variant: Variant) -> bool:
        """Whether a node that holds the function and has a free slot may take this task."""
        return self.is_below_threshold(task, node, variant)

    def on_sent(self, batch: Batch, node: Node) -> None:
        """A batch was dispatched to a node."""

    def resize(self) -> None:
        """Update the desired numbers; called at the beginning of `plan`."""

    def set_desired(self, target: NodeTarget, count: int) -> None:
        """Set the desired number of rented instances of a target, within the size of its pool.

        A function without FaaS keeps at least one instance of its best target.
        """
        function_id = target.variant.function_id
        is_last_resort = not self.uses_faas(
            function_id
        ) and target == self.targets.cheapest_elastic(function_id)
        least = 1 if is_last_resort else 0
        self.desired[target.variant.id, target.pool.id] = min(max(count, least), target.pool.nodes)

    def on_task_ready(self, task: Task) -> None:
        """Dispatch the task if possible; else queue it."""
        queue = self._queues[self._queue_number(task)]
        queue.append(task)
        if len(queue) == 1 or queue[0].state != TASK_READY:
            self._serve(queue)

    def on_task_returned(self, task: Task, reason: int | None) -> None:
        """Dispatch the task before the queued ones."""
        queue = self._queues[self._queue_number(task)]
        queue.appendleft(task)  # it has queued once already
        self._serve(queue)

    def on_task_withdrawn(self, task: Task) -> None:
        """Count the withdrawn task, and sweep its queue when due."""
        number = self._queue_number(task)
        self._withdrawals[number].withdraw_from(self._queues[number])

    def _queue_number(self, task: Task) -> int:
        function_id = task.function.id
        is_for_nodes = self.uses_faas(function_id) and not self.targets.can_spill(self.view, task)
        return function_id + (len(self._queues) // 2 if is_for_nodes else 0)

    def on_capacity(self, node: Node) -> None:
        """Serve all queues."""
        self._serve_all()

    def on_pool_available(self, pool_id: int) -> None:
        """Serve all queues."""
        self._serve_all()

    def _serve_all(self) -> None:
        waiting = [queue for queue in self._queues if queue]
        if len(waiting) > 1:  # oldest head first
            waiting.sort(key=lambda queue: queue[0].id)
        for queue in waiting:
            self._serve(queue)

    def _serve(self, queue: deque[Task]) -> None:
        while queue:
            if queue[0].state == TASK_READY and not self._send(queue[0]):
                return
            queue.popleft()

    def _send(self, task: Task) -> bool:
        """Dispatch a task if a node or a platform can take it now; whether one could."""
        function_id = task.function.id
        rents = self.uses_nodes(function_id) or not self.targets.can_spill(self.view, task)
        node = self._choose_node(task) if rents else None
        if node is None and self.uses_faas(function_id):
            target = self.targets.available_faas(self.view, task)
            if target is not None:
                self.orders.dispatch_to_pool([task], target.pool, target.variant)
                if rents:
                    self._start_on_idle_node(task)
                return True
        if node is None and rents:
            node = self._choose_cold_node(task)
        if node is None:
            return False
        self.on_sent(self.orders.dispatch([task], node), node)
        return True

    def _choose_node(self, task: Task) -> Node | None:
        """The node that holds the function and may take the task: least loaded, or fullest."""
        best: Node | None = None
        for node in self.view.free_nodes.values():
            variant = node.variants[task.function.id]
            if variant is None or not _is_ready(node.instances.get(variant.id)):
                continue
            is_better = best is None or (
                node.running > best.running if self._bin_pack else node.running < best.running
            )
            if (
                is_better
                and self.view.can_take(node, task.function.id)
                and self.admits(task, node, variant)
            ):
                best = node
        return best

    def is_below_threshold(self, task: Task, node: Node, variant: Variant, least: int = 0) -> bool:
        """Whether one more request keeps all requests on the node within their objectives."""
        most = self._limits.limit(node.pool, variant, task.request.items)
        if len(node.instances) > 1:
            for instance in node.instances.values():
                if instance.running:
                    most = min(most, self._limits.limit(node.pool, instance.variant))
        return node.running < max(most, least)

    def _choose_cold_node(self, task: Task) -> Node | None:
        """The least loaded node for a task without FaaS, although it may need a cold start.

        An empty rented node is used only for a function that has no instance. A node that is
        booting is not used: the queued task goes to whichever node is ready first.
        """
        best: Node | None = None
        is_new: bool | None = None
        for node in self.view.free_nodes.values():
            variant = node.variants[task.function.id]
            if variant is None or not self.is_below_threshold(task, node, variant, least=1):
                continue
            instance = node.instances.get(variant.id)
            if node.pool.is_elastic:
                if instance is None:
                    if is_new is None:
                        is_new = not self.view.has_instance(task.function.id)
                    if not is_new:
                        continue
                elif instance.state == InstanceState.STARTING:
                    continue
            is_better = best is None or node.running < best.running
            if is_better and self.view.can_take(node, task.function.id):
                best = node
        return best

    def _start_on_idle_node(self, task: Task) -> None:
        """Start the function on an idle node that is not rented, so that it need not spill."""
        for node in self.view.free_nodes.values():
            variant = node.variants[task.function.id]
            if variant is None or node.pool.is_elastic or node.running:
                continue
            if has_room(self.view, node, variant) and self._limits.limit(node.pool, variant):
                self.orders.start(variant, node)
                return

    def on_node_joined(self, node: Node) -> None:
        """Start the instances that are desired and missing."""
        for function in self.view.app.functions:
            variant = node.variants[function.id]
            if variant is None or not self.uses_nodes(function.id):
                continue
            key = (variant.id, node.pool.id)
            count = self.desired.get(key, 0) if node.pool.is_elastic else function.prewarm_nodes
            present = self.view.instances_in(*key)
            if len(present) < count and has_room(self.view, node, variant):
                self.orders.start(variant, node)

    def plan(self) -> Plan:
        """Stop instances beyond the desired number, busy or not, and return the desired numbers."""
        self.resize()
        for key, count in self.desired.items():
            for instance in excess_instances(self.view, key, count):
                self.orders.stop(instance)  # it finishes its running batches first
        return Plan(tuple(Target(*key, count) for key, count in self.desired.items()))


def excess_instances(view: View, key: tuple[int, int], count: int) -> list[Instance]:
    """The instances of a (variant, pool) beyond `count`: those to be stopped.

    Starting instances first, then those with least running work, then the newest.
    """
    instances = view.instances_in(*key)
    if len(instances) <= count:
        return []
    instances.sort(key=lambda i: (i.state != InstanceState.STARTING, i.running, -i.id))
    return instances[: len(instances) - count]


def _is_ready(instance: Instance | None) -> bool:
    return (
        instance is not None
        and (instance.state == INSTANCE_IDLE or instance.state == INSTANCE_BUSY)
        and instance.residency == ON_DEVICE
        and not instance.is_preparing
    )


@dataclass(frozen=True)
class AutoscalingConfig(PolicyConfig):
    """Settings that the autoscaling policies share."""

    # Factor on the profile's times when thresholds are computed, and on predicted times.
    margin: float = field(default=1.0, metadata=POSITIVE)
    bin_pack: bool = False  # fill one node before the next, instead of the least loaded first
    # FaaS instances kept warm, per function.
    warm_instances: int = field(default=0, metadata=NOT_NEGATIVE)


class AutoscalingRouter(ThresholdRouter):
    """Counts the arrivals of each function and asks `count_for` how many nodes they need.

    Arrivals are counted in requests of one item: larger ones count in proportion to their execution
    time. Until the first time bucket is complete, the fleet stays as it is.
    """

    def __init__(
        self,
        context: Context,
        config: AutoscalingConfig,
        *,
        bucket_ns: int,
        window_ns: int,
        nodes_min: int,
        plan_every_ns: int,
        limits: ConcurrencyLimits | None = None,
    ) -> None:
        """`limits` are for routing; without them, those that the fleet is planned by."""
        planned = ThresholdLimits(context.view.app, config.margin)
        super().__init__(
            context,
            config,
            limits or planned,
            planned=planned,
            plan_every_ns=plan_every_ns,
            bin_pack=config.bin_pack,
            warm_instances=config.warm_instances,
        )
        self.bucket_ns = bucket_ns
        window_ns = max(window_ns, bucket_ns)
        self._arrivals = [ArrivalCounts(bucket_ns, window_ns) for _ in self.view.app.functions]
        self._nodes_min = nodes_min
        self._plans: dict[tuple[int, int], deque[int]] = {}

    def count_for(self, target: NodeTarget, buckets: list[float]) -> int | None:
        """How many nodes of the target this demand needs; None: as many as before."""
        raise NotImplementedError

    def on_task_ready(self, task: Task) -> None:
        """Count the arrival, then route the task."""
        exec_ns = task.function.variants[0].profile.exec_ns
        weight = exec_ns[min(task.request.items, len(exec_ns)) - 1] / max(1, exec_ns[0])
        self._arrivals[task.function.id].observe(self.view.now_ns, weight)
        super().on_task_ready(task)

    def resize(self) -> None:
        """Set the desired number of nodes of each function, at least the minimum."""
        for function in self.view.app.functions:
            target = self.targets.cheapest_elastic(function.id)
            if target is None or not self.uses_nodes(function.id):
                continue
            buckets = self.demand(function.id)
            count = self.count_for(target, buckets) if buckets else None
            if count is not None:
                self.set_desired(target, max(count, self._nodes_min))

    def demand(self, function_id: int) -> list[float]:
        """Arrivals per bucket, oldest first, less what nodes that are not rented can serve."""
        buckets = self._arrivals[function_id].buckets(self.view.now_ns)
        rates = {target.pool.id: target.rate_per_s for target in self.targets.nodes[function_id]}
        taken_per_s = sum(
            rates.get(node.pool.id, 0.0)
            for node in self.view.nodes.values()
            if node.state == NodeState.UP and not node.pool.is_elastic
        )
        if taken_per_s == 0.0:
            return buckets
        return [max(0.0, amount - taken_per_s * self.bucket_ns / 1e9) for amount in buckets]

    def mean_per_s(self, buckets: list[float]) -> float:
        """The mean rate of these buckets."""
        return sum(buckets) / (len(buckets) * self.bucket_ns) * 1e9

    def hold_max(self, target: NodeTarget, count: int, plans: int) -> int:
        """Record a planned count; return the largest of the last `plans`, this one included."""
        key = (target.variant.id, target.pool.id)
        history = self._plans.setdefault(key, deque(maxlen=max(1, plans)))
        history.append(count)
        return max(history)

    def desired_of(self, target: NodeTarget) -> int:
        """The desired number of instances of a target so far."""
        return self.desired.get((target.variant.id, target.pool.id), 0)
