"""Latency prediction: when a request that arrives now would be answered, given the queues."""

from __future__ import annotations

from math import exp, inf
from typing import final

from headgate.core.model import App, Function, Pipeline, Variant
from headgate.core.records import Batch, Instance, Node, Task
from headgate.core.states import BatchState
from headgate.core.view import View
from headgate.planning.concurrency import KneeLimits


@final
class QuantileTracker:
    """A running estimate of a quantile of recent positive values, in constant memory.

    Stochastic approximation on a logarithmic scale: each value above the estimate moves it up a
    little, each value below moves it down, in the ratio that balances exactly at the quantile. The
    step size is fixed (`step`), so the estimate follows a drift and never gets stuck.

    >>> tracker = QuantileTracker(quantile=0.5)
    >>> for value in [2.0, 2.1, 1.9] * 200:
    ...     tracker.observe(value)
    >>> 1.9 <= tracker.value <= 2.1
    True
    """

    def __init__(self, quantile: float, *, value: float = 1.0, step: float = 0.05) -> None:
        self.value = value
        self._up = exp(step * quantile)
        self._down = exp(-step * (1.0 - quantile))

    def observe(self, value: float) -> None:
        """Update the estimate with one value. O(1)."""
        self.value *= self._up if value > self.value else self._down


@final
class LatencyPredictor:
    """Predicts completion times from profiles, corrected by recent observations.

    The correction of a variant is a quantile of observed over expected time. The policy reports
    what is queued, what is sent where, and how long batches took. Queued work is assumed to be
    dispatched in full batches, as it is under load. A prediction costs O(stages x nodes).
    """

    def __init__(self, view: View, quantile: float) -> None:
        app = view.app
        self._view = view
        self._queued = [0 for _ in app.functions]  # items, by function id
        self._competitors = _competitors(app)
        self._nodes: list[list[Node]] = [[] for _ in app.functions]  # nodes that can run it
        self._free_at_ns: dict[int, float] = {}  # by node id
        self._corrections = [QuantileTracker(quantile) for _ in app.variants]
        self._references = [_reference_variant(app, function) for function in app.functions]
        self._limits = _concurrency_limits(app)
        # Slowdown of each variant at its concurrency limit, by variant id.
        self._slowdowns = [
            max(
                (
                    variant.profile.slowdown_at(concurrency)
                    for (_, id), concurrency in self._limits.items()
                    if id == variant.id
                ),
                default=1.0,
            )
            for variant in app.variants
        ]
        self._isolated_ns: dict[tuple[int, int], int] = {}  # by pipeline and items

    def on_queued(self, task: Task) -> None:
        """Record a task that is queued."""
        self._queued[task.function.id] += task.request.items

    def on_dequeued(self, task: Task) -> None:
        """Record a task that leaves the queue."""
        self._queued[task.function.id] -= task.request.items

    def on_node_joined(self, node: Node) -> None:
        """Add a node. A node of an elastic pool counts only once it has an instance."""
        for function_id, variant in enumerate(node.variants):
            if variant is not None and not node.pool.is_elastic:
                self._nodes[function_id].append(node)

    def on_instance_started(self, instance: Instance) -> None:
        """Count the rented node of an instance that is ready."""
        node = instance.node
        if node is not None and node.pool.is_elastic:
            self._nodes[instance.variant.function_id].append(node)

    def on_instance_gone(self, instance: Instance) -> None:
        """Remove the rented node of an instance that is gone."""
        node = instance.node
        if node is not None and node.pool.is_elastic:
            nodes = self._nodes[instance.variant.function_id]
            if node in nodes:
                nodes.remove(node)

    def on_node_lost(self, node: Node) -> None:
        """Remove a node."""
        self._free_at_ns.pop(node.id, None)
        for nodes in self._nodes:
            if node in nodes:
                nodes.remove(node)

    def on_sent(self, node: Node, variant: Variant, items: int, start_ns: int) -> None:
        """Record a batch sent to a node; `start_ns` is not 0 if the variant must start first."""
        busy_ns = start_ns + self.expected_ns(variant, items)
        self._free_at_ns[node.id] = self._view.now_ns + busy_ns

    def on_batch_ended(self, batch: Batch, took_ns: int) -> None:
        """Update the correction of the batch's variant.

        A time that may include a cold start is not used.
        """
        profile = batch.variant.profile
        expected_ns = int(profile.exec_ns[batch.items - 1] * self._slowdowns[batch.variant.id])
        expected_ns += 2 * batch.pool.network_ns
        cold_ns = profile.cold_start_ns + profile.swap_in_ns
        is_evidence = cold_ns == 0 or took_ns < expected_ns + cold_ns
        if batch.state == BatchState.FINISHED and is_evidence:
            self._corrections[batch.variant.id].observe(took_ns / max(1, expected_ns))

    @property
    def items_queued(self) -> int:
        """Queued items of all functions."""
        return sum(self._queued)

    def items_queued_of(self, function_id: int) -> int:
        """Queued items of one function."""
        return self._queued[function_id]

    def correction(self, variant: Variant) -> float:
        """Correction factor on the profile of a variant."""
        return self._corrections[variant.id].value

    def expected_ns(self, variant: Variant, items: int) -> float:
        """Expected time of a batch at the concurrency limit, with the correction."""
        pace = self._slowdowns[variant.id] * self._corrections[variant.id].value
        return variant.profile.exec_ns[items - 1] * pace

    def reference_variant(self, function_id: int) -> Variant:
        """The variant that predictions are based on: the first one that runs on nodes."""
        return self._references[function_id]

    def has_free_slot(self, node: Node, variant: Variant) -> bool:
        """Whether the node is below its concurrency limit for this variant."""
        return node.running < self._limits[node.pool.id, variant.id]

    def backlog_ns(self, function_id: int) -> float:
        """Time until the queue of a function is finished; infinite if no node can run it."""
        nodes = self._usable(function_id)
        if not nodes:
            return inf
        concurrency = sum(self._limit_of(node, function_id) for node in nodes)
        competitors_ns = sum(
            self._backlog_ns(competitor) for competitor in self._competitors[function_id]
        )
        busy_ns = (self._backlog_ns(function_id) + competitors_ns) / concurrency
        own_ns = self.expected_ns(self.reference_variant(function_id), 1)
        return self.function_free_in_ns(function_id) + max(busy_ns, own_ns)

    def capacity(self, function_id: int) -> int:
        """Total concurrency limit of the nodes that can run a function."""
        return sum(self._limit_of(node, function_id) for node in self._usable(function_id))

    def _usable(self, function_id: int) -> list[Node]:
        """The nodes that can run a function, without those where it is in start back-off."""
        nodes, view = self._nodes[function_id], self._view
        if not view.load_failures:
            return nodes
        return [
            node
            for node in nodes
            if (variant := node.variants[function_id]) is not None
            and not view.is_barred(node, variant)
        ]

    def _limit_of(self, node: Node, function_id: int) -> int:
        variant = node.variants[function_id]
        return 0 if variant is None else self._limits[node.pool.id, variant.id]

    def free_at_ns(self, node: Node) -> float:
        """When a busy node will be free."""
        return self._free_at_ns.get(node.id, 0.0)

    def can_run(self, pipeline: Pipeline) -> bool:
        """Whether there is a node for each stage of a pipeline."""
        return all(self._usable(stage.function.id) for stage in pipeline.stages)

    def isolated_latency_ns(self, pipeline: Pipeline, items: int) -> int:
        """Latency of a request on an idle system, by the profiles."""
        key = (pipeline.id, items)
        latency_ns = self._isolated_ns.get(key)
        if latency_ns is None:
            times_ns = [_fastest_ns(stage.function, items) for stage in pipeline.stages]
            latency_ns = int(max(pipeline.longest_to(times_ns)))
            self._isolated_ns[key] = latency_ns
        return latency_ns

    def optimistic_latency_ns(self, pipeline: Pipeline, items: int) -> int:
        """The isolated latency, reduced by the corrections if those are below 1.

        Corrections above 1 do not count: a request that is slow only under load is not infeasible.
        """
        factor = min(
            self._corrections[variant.id].value
            for stage in pipeline.stages
            for variant in stage.function.variants
        )
        return int(self.isolated_latency_ns(pipeline, items) * min(1.0, factor))

    def queue_ns(self, pipeline: Pipeline, items: int) -> float:
        """Time for which work that is queued ahead occupies the nodes that a request needs."""
        return max(self._queue_ahead_ns(stage.function.id, items) for stage in pipeline.stages)

    def service_ns(self, pipeline: Pipeline, items: int) -> float:
        """Service time of a request in the batches that it is expected to be part of."""
        times_ns: list[float] = []
        for stage in pipeline.stages:
            variant = self.reference_variant(stage.function.id)
            largest = len(variant.profile.exec_ns)
            queued = items + self._queued[stage.function.id]  # the last of these share its batch
            size = max((queued - 1) % largest + 1, min(items, largest))
            times_ns.append(self.expected_ns(variant, size))
        return times_ns[0] if len(times_ns) == 1 else max(pipeline.longest_to(times_ns))

    def function_free_in_ns(self, function_id: int) -> float:
        """Time until a node that can run a function is free."""
        view = self._view
        best_ns: float | None = None
        for node in self._usable(function_id):
            if node.id in view.free_nodes and node.running < self._limit_of(node, function_id):
                return 0.0
            free_ns = self._free_at_ns.get(node.id, 0.0)
            if best_ns is None or free_ns < best_ns:
                best_ns = free_ns
        return 0.0 if best_ns is None else max(0.0, best_ns - view.now_ns)

    def _queue_ahead_ns(self, function_id: int, items: int) -> float:
        variant = self.reference_variant(function_id)
        largest = len(variant.profile.exec_ns)
        full_batches = (self._queued[function_id] + items - 1) // largest
        busy_ns = full_batches * self.expected_ns(variant, largest) if full_batches else 0.0
        for competitor in self._competitors[function_id]:
            busy_ns += self._backlog_ns(competitor)
        if busy_ns == 0.0:
            return 0.0
        return busy_ns / max(1, self.capacity(function_id))

    def _backlog_ns(self, function_id: int) -> float:
        """Time for which the queue of a function would occupy one slot."""
        items = self._queued[function_id]
        if items == 0:
            return 0.0
        variant = self.reference_variant(function_id)
        size = min(items, len(variant.profile.exec_ns))
        return items / size * self.expected_ns(variant, size)


def _reference_variant(app: App, function: Function) -> Variant:
    on_nodes = (
        variant
        for variant in function.variants
        if any(app.pools[id].faas is None for id in variant.pool_ids)
    )
    return next(on_nodes, function.variants[0])


def _concurrency_limits(app: App) -> dict[tuple[int, int], int]:
    """Concurrency limit of a node by (pool id, variant id): the knee of throughput."""
    limits = KneeLimits(app)
    return {
        (pool.id, variant.id): limits.node_limit(pool, variant)
        for variant in app.variants
        for pool in app.pools
        if pool.id in variant.pool_ids
    }


def _competitors(app: App) -> list[list[int]]:
    """By function: the other functions that share a pool with it."""
    pools = [{pool for v in f.variants for pool in v.pool_ids} for f in app.functions]
    return [
        [competitor for competitor, theirs in enumerate(pools) if competitor != id and theirs & own]
        for id, own in enumerate(pools)
    ]


def _fastest_ns(function: Function, items: int) -> float:
    profiles = [variant.profile for variant in function.variants]
    return float(min(p.exec_ns[min(items, p.items_max) - 1] for p in profiles))
