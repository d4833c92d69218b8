"""What all policies have in common that serve from nodes by the hour and platforms by the call.

A task goes to a node that holds its function and has fewer requests than its threshold; else to a
platform that is open; else it waits, first come first served per function, for whichever is first.
Where a function has no platform, or it is closed, a node that does not hold it yet may be used.
What no call of a platform can carry waits for a node in a queue of its own, or it would keep those
behind it from going to a platform.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from headgate.core.lazy_deletion import LazyDeletions, sweep
from headgate.core.model import Variant
from headgate.core.policy import Context, Plan, Policy, PolicyConfig, Target
from headgate.core.records import Batch, Instance, Node, Task
from headgate.core.states import InstanceState, NodeState, Residency, TaskState
from headgate.planning.concurrency import Thresholds
from headgate.planning.forecast import ArrivalCounts
from headgate.planning.placement import has_room
from headgate.planning.rent_or_call import excess_instances, is_nowhere, present
from headgate.planning.targets import FaasOption, NodeOption, Targets

# Interpreted, a name of the module is read many times faster than one of a class.
_BUSY: Final = InstanceState.BUSY
_DEVICE: Final = Residency.DEVICE
_IDLE: Final = InstanceState.IDLE
_READY: Final = TaskState.READY


class ThresholdRouter(Policy):
    """Queues, routing by threshold, and a fleet of so many instances of each lot as are `wanted`.

    A policy gives `thresholds` (for routing) and `tiers` (for planning); it says which functions
    spill, and in `resize` it may change what is wanted. `warm_functions` of each function are kept
    ready by its cheapest platform. Deciding costs O(nodes).
    """

    def __init__(
        self,
        context: Context,
        config: PolicyConfig,
        thresholds: Thresholds,
        tiers: Targets,
        *,
        nodes: int = 0,
        packs: bool = False,
        warm_functions: int = 0,
    ) -> None:
        super().__init__(context, config)
        app = self.view.app
        self.tiers = tiers
        self._thresholds = thresholds
        self._packs = packs
        # By function; behind those, likewise, tasks that no platform can carry.
        self._queues: list[deque[Task]] = [deque() for _ in range(2 * len(app.functions))]
        self._withdrawals = [LazyDeletions() for _ in self._queues]
        # By (variant, pool) id: how many instances there are to be on nodes that are rented.
        self.wanted: dict[tuple[int, int], int] = {}
        for function in app.functions:
            lot = tiers.elastic_lot(function.id)
            if lot is not None and self.rents(function.id):
                self.want(lot, nodes or function.prewarm_nodes)
            if warm_functions and self.spills(function.id):
                self._keep_warm(tiers.outlets[function.id][0], warm_functions)

    def _keep_warm(self, outlet: FaasOption, count: int) -> None:
        platform = outlet.pool.faas
        assert platform is not None
        count = min(count, platform.concurrency_max)
        self.orders.keep_warm(outlet.variant, outlet.pool, count)

    # --- what a policy may say -----------------------------------------------------------------

    def spills(self, function_id: int) -> bool:
        """Whether tasks of this function may go to a platform."""
        return bool(self.tiers.outlets[function_id])

    def rents(self, function_id: int) -> bool:
        """Whether tasks of this function may go to nodes."""
        return bool(self.tiers.lots[function_id])

    def keeps(self, task: Task, node: Node, variant: Variant) -> bool:
        """Whether a node that holds the function may take this task. It has a slot."""
        return self.is_below_threshold(task, node, variant)

    def sent(self, batch: Batch, node: Node) -> None:
        """A task has gone to a node."""

    def resize(self) -> None:
        """Say what is wanted, now that it is time to plan."""

    def want(self, lot: NodeOption, count: int) -> None:
        """Want so many instances of a rented lot from now on, within what there is.

        Where nothing spills, at least one of the best lot.
        """
        function_id = lot.variant.function_id
        is_last_resort = not self.spills(function_id) and lot == self.tiers.elastic_lot(function_id)
        least = 1 if is_last_resort else 0
        self.wanted[lot.variant.id, lot.pool.id] = min(max(count, least), lot.pool.nodes)

    # --- tasks ---------------------------------------------------------------------------------

    def on_task_ready(self, task: Task) -> None:
        """Send it if it may go now; else it waits."""
        queue = self._queues[self._queue_number(task)]
        queue.append(task)
        if len(queue) == 1 or queue[0].state != _READY:
            self._serve(queue)

    def on_task_returned(self, task: Task) -> None:
        """Send it before those that wait."""
        queue = self._queues[self._queue_number(task)]
        queue.appendleft(task)  # it has waited once already
        self._serve(queue)

    def on_task_withdrawn(self, task: Task) -> None:
        """Forget it, in time."""
        number = self._queue_number(task)
        queue = self._queues[number]
        if self._withdrawals[number].add(len(queue)):
            sweep(queue)

    def _queue_number(self, task: Task) -> int:
        function_id = task.function.id
        is_for_nodes = self.spills(function_id) and not self.tiers.can_spill(self.view, task)
        return function_id + (len(self._queues) // 2 if is_for_nodes else 0)

    def on_capacity(self, node: Node) -> None:
        """Serve whoever waits."""
        self._serve_all()

    def on_pool_available(self, pool_id: int) -> None:
        """Serve whoever waits."""
        self._serve_all()

    def _serve_all(self) -> None:
        waiting = [queue for queue in self._queues if queue]
        if len(waiting) > 1:  # who has waited longest goes first
            waiting.sort(key=lambda queue: queue[0].id)
        for queue in waiting:
            self._serve(queue)

    def _serve(self, queue: deque[Task]) -> None:
        while queue:
            if queue[0].state == _READY and not self._send(queue[0]):
                return
            queue.popleft()

    def _send(self, task: Task) -> bool:
        """Send a task wherever it may go now; whether there was such a place."""
        function_id = task.function.id
        rents = self.rents(function_id) or not self.tiers.can_spill(self.view, task)
        node = self._place(task) if rents else None
        if node is None and self.spills(function_id):
            outlet = self.tiers.open_outlet(self.view, task)
            if outlet is not None:
                self.orders.dispatch_to_pool([task], outlet.pool, outlet.variant)
                if rents:
                    self._wake_idle_node(task)
                return True
        if node is None and rents:
            node = self._place_cold(task)
        if node is None:
            return False
        self.sent(self.orders.dispatch([task], node), node)
        return True

    # --- nodes for tasks -----------------------------------------------------------------------

    def _place(self, task: Task) -> Node | None:
        """The node that holds the function and may take it: least loaded, or fullest."""
        best: Node | None = None
        for node in self.view.free_nodes.values():
            variant = node.variants[task.function.id]
            if variant is None or not _is_ready(node.instances.get(variant.id)):
                continue
            is_better = best is None or (
                node.running > best.running if self._packs else node.running < best.running
            )
            if (
                is_better
                and self.view.can_take(node, task.function.id)
                and self.keeps(task, node, variant)
            ):
                best = node
        return best

    def is_below_threshold(self, task: Task, node: Node, variant: Variant, least: int = 0) -> bool:
        """Whether one more would still leave it, and all who are there, in time."""
        most = self._thresholds.of(variant, node.pool, task.request.items)
        if len(node.instances) > 1:
            for instance in node.instances.values():
                if instance.running:
                    most = min(most, self._thresholds.of(instance.variant, node.pool))
        return node.running < max(most, least)

    def _place_cold(self, task: Task) -> Node | None:
        """No platform: the least loaded node, though it must first start the function, or be late.

        A rented node that holds nothing is taken only for a function that is nowhere, and one that
        boots is not waited for: what waits here goes to whichever is ready first.
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
                        is_new = is_nowhere(self.view, task.function.id)
                    if not is_new:
                        continue
                elif instance.state == InstanceState.STARTING:
                    continue
            is_better = best is None or node.running < best.running
            if is_better and self.view.can_take(node, task.function.id):
                best = node
        return best

    def _wake_idle_node(self, task: Task) -> None:
        """A node of ours stands idle while its work goes elsewhere: start the function there."""
        for node in self.view.free_nodes.values():
            variant = node.variants[task.function.id]
            if variant is None or node.pool.is_elastic or node.running:
                continue
            if has_room(self.view, node, variant) and self._thresholds.of(variant, node.pool):
                self.orders.start(variant, node)
                return

    # --- the fleet -----------------------------------------------------------------------------

    def on_node_joined(self, node: Node) -> None:
        """Start there what is wanted and not yet there."""
        for function in self.view.app.functions:
            variant = node.variants[function.id]
            if variant is None or not self.rents(function.id):
                continue
            key = (variant.id, node.pool.id)
            count = self.wanted.get(key, 0) if node.pool.is_elastic else function.prewarm_nodes
            if len(present(self.view, key)) < count and has_room(self.view, node, variant):
                self.orders.start(variant, node)

    def plan(self) -> Plan:
        """Give up what is wanted no longer, busy or not, and ask for the rest."""
        self.resize()
        for key, count in self.wanted.items():
            for instance in excess_instances(self.view, key, count):
                self.orders.stop(instance)  # it ends what it has begun
        return Plan(tuple(Target(*key, count) for key, count in self.wanted.items()))


def _is_ready(instance: Instance | None) -> bool:
    return (
        instance is not None
        and (instance.state == _IDLE or instance.state == _BUSY)
        and instance.residency == _DEVICE
        and not instance.is_preparing
    )


# What policies have in common that rent as many nodes as the load of late seems to need.


class AutoscalingRouter(ThresholdRouter):
    """Counts what arrives of each function; asks `count_for` how many nodes that needs.

    Arrivals are counted in requests of one item: larger ones count for as much as they take.
    Until the first bucket of time is over, the fleet stays as it is.
    """

    def __init__(
        self,
        context: Context,
        config: PolicyConfig,
        thresholds: Thresholds,
        tiers: Targets,
        *,
        bucket_ns: int,
        window_ns: int,
        nodes_min: int = 0,
        packs: bool = False,
        warm_functions: int = 0,
    ) -> None:
        super().__init__(
            context, config, thresholds, tiers, packs=packs, warm_functions=warm_functions
        )
        functions = self.view.app.functions
        self.bucket_ns = bucket_ns
        self._arrivals = [ArrivalCounts(bucket_ns, window_ns) for _ in functions]
        self._nodes_min = nodes_min
        self._plans: dict[tuple[int, int], deque[int]] = {}

    def count_for(self, lot: NodeOption, buckets: list[float]) -> int | None:
        """How many nodes of the lot this demand is worth; None: as many as before."""
        raise NotImplementedError

    def on_task_ready(self, task: Task) -> None:
        """Count it; then as ever."""
        exec_ns = task.function.variants[0].profile.exec_ns
        weight = exec_ns[min(task.request.items, len(exec_ns)) - 1] / max(1, exec_ns[0])
        self._arrivals[task.function.id].see(self.view.now_ns, weight)
        super().on_task_ready(task)

    def resize(self) -> None:
        """Want what is worth it, and never less than the minimum."""
        for function in self.view.app.functions:
            lot = self.tiers.elastic_lot(function.id)
            if lot is None or not self.rents(function.id):
                continue
            buckets = self.demand(function.id)
            count = self.count_for(lot, buckets) if buckets else None
            if count is not None:
                self.want(lot, max(count, self._nodes_min))

    def demand(self, function_id: int) -> list[float]:
        """What arrived in each bucket, oldest first, less what nodes that are ours anyway take."""
        buckets = self._arrivals[function_id].buckets(self.view.now_ns)
        rates = {lot.pool.id: lot.rate_per_s for lot in self.tiers.lots[function_id]}
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

    def most_of(self, lot: NodeOption, count: int, plans: int) -> int:
        """Remember a plan; the largest of the last `plans`, this one included."""
        key = (lot.variant.id, lot.pool.id)
        history = self._plans.setdefault(key, deque(maxlen=max(1, plans)))
        history.append(count)
        return max(history)

    def wanted_of(self, lot: NodeOption) -> int:
        """How many instances of the lot are wanted so far."""
        return self.wanted.get((lot.variant.id, lot.pool.id), 0)
