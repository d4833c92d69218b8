"""When what arrives now would be answered: behind what runs, and behind what waits."""

from __future__ import annotations

from math import exp, inf
from typing import final

from headgate.core.clock import NEVER_NS
from headgate.core.model import App, Function, Pipeline, Pool, Profile, Variant
from headgate.core.records import Batch, Instance, Node, Task
from headgate.core.states import BatchState
from headgate.core.view import View
from headgate.planning.concurrency import knee_concurrency

# Following a quantile of a stream that drifts, in constant memory.


@final
class QuantileTracker:
    """Where a quantile of the values seen lately lies. For positive values.

    Stochastic approximation on a logarithmic scale: each value above the estimate pushes it up a
    little, each below pushes it down, in the ratio that balances exactly at the quantile. It
    forgets the past at a fixed pace (`step`), so it follows a drift and never gets stuck.

    >>> tracker = QuantileTracker(quantile=0.5)
    >>> for value in [2.0, 2.1, 1.9] * 200:
    ...     tracker.see(value)
    >>> 1.9 <= tracker.value <= 2.1
    True
    """

    def __init__(self, quantile: float, *, value: float = 1.0, step: float = 0.05) -> None:
        self.value = value
        self._up = exp(step * quantile)
        self._down = exp(-step * (1.0 - quantile))

    def see(self, value: float) -> None:
        """Take one more value into account. O(1)."""
        self.value *= self._up if value > self.value else self._down


@final
class LatencyPredictor:
    """Predicts from profiles, corrected by a quantile of what was lately observed over them.

    It is told what waits, what is sent where and how long that took. Work is taken to go out in
    full batches, as it does when there is more than enough of it. Costs O(stages x nodes).
    """

    def __init__(self, view: View, quantile: float) -> None:
        app = view.app
        self._view = view
        self._items = [0 for _ in app.functions]  # that wait
        self._rivals = _rivals(app)
        self._homes: list[list[Node]] = [[] for _ in app.functions]  # nodes that can run it
        self._free_at_ns: dict[int, float] = {}  # by node id
        self._corrections = [QuantileTracker(quantile) for _ in app.variants]
        self._references = [_reference(app, function) for function in app.functions]
        self._lanes = _lanes(app)
        # How much longer everything takes in the company that it is given.
        self._paces = [
            max(
                (
                    variant.profile.slowdown_at(lanes)
                    for (_, id), lanes in self._lanes.items()
                    if id == variant.id
                ),
                default=1.0,
            )
            for variant in app.variants
        ]
        self._alone_ns: dict[tuple[int, int], int] = {}  # by pipeline and items

    # --- what it is told -----------------------------------------------------------------------

    def waits(self, task: Task) -> None:
        """A task has come to wait."""
        self._items[task.function.id] += task.request.items

    def left(self, task: Task) -> None:
        """A task waits no longer."""
        self._items[task.function.id] -= task.request.items

    def node_joined(self, node: Node) -> None:
        """A node is there. One that is yet to be taken counts once it holds something."""
        for function_id, variant in enumerate(node.variants):
            if variant is not None and not node.pool.is_elastic:
                self._homes[function_id].append(node)

    def started(self, instance: Instance) -> None:
        """An instance is ready."""
        node = instance.node
        if node is not None and node.pool.is_elastic:
            self._homes[instance.variant.function_id].append(node)

    def stopped(self, instance: Instance) -> None:
        """An instance is gone."""
        node = instance.node
        if node is not None and node.pool.is_elastic:
            homes = self._homes[instance.variant.function_id]
            if node in homes:
                homes.remove(node)

    def node_lost(self, node: Node) -> None:
        """A node is gone."""
        self._free_at_ns.pop(node.id, None)
        for homes in self._homes:
            if node in homes:
                homes.remove(node)

    def sent(self, node: Node, variant: Variant, items: int, start_ns: int) -> None:
        """A batch goes to a node, which has to start the variant first if `start_ns` is not 0."""
        busy_ns = start_ns + self.expected_ns(variant, items)
        self._free_at_ns[node.id] = self._view.now_ns + busy_ns

    def came_back(self, batch: Batch, took_ns: int) -> None:
        """A batch has ended. What may have included a cold start is no evidence."""
        profile = batch.variant.profile
        expected_ns = int(profile.exec_ns[batch.items - 1] * self._paces[batch.variant.id])
        expected_ns += 2 * batch.pool.network_ns
        cold_ns = profile.cold_start_ns + profile.swap_in_ns
        is_evidence = cold_ns == 0 or took_ns < expected_ns + cold_ns
        if batch.state == BatchState.FINISHED and is_evidence:
            self._corrections[batch.variant.id].see(took_ns / max(1, expected_ns))

    # --- what it is asked ----------------------------------------------------------------------

    @property
    def items_waiting(self) -> int:
        """Of all functions."""
        return sum(self._items)

    def waiting(self, function_id: int) -> int:
        """Of one function."""
        return self._items[function_id]

    def correction(self, variant: Variant) -> float:
        """What the profile of a variant is to be multiplied by."""
        return self._corrections[variant.id].value

    def expected_ns(self, variant: Variant, items: int) -> float:
        """How long a batch takes."""
        pace = self._paces[variant.id] * self._corrections[variant.id].value
        return variant.profile.exec_ns[items - 1] * pace

    def reference(self, function_id: int) -> Variant:
        """The build that predictions go by: the first that runs on nodes."""
        return self._references[function_id]

    def has_lane(self, node: Node, variant: Variant) -> bool:
        """Whether one more on this node is more work done, and not only more company."""
        return node.running < self._lanes[node.pool.id, variant.id]

    def backlog_ns(self, function_id: int) -> float:
        """How long until all that waits of a function is done; infinite if no node can run it."""
        homes = self._usable(function_id)
        if not homes:
            return inf
        lanes = sum(self._lanes_of(node, function_id) for node in homes)
        rivals_ns = sum(self._backlog_ns(rival) for rival in self._rivals[function_id])
        busy_ns = (self._backlog_ns(function_id) + rivals_ns) / lanes
        own_ns = self.expected_ns(self.reference(function_id), 1)
        return self.soonest_for_ns(function_id) + max(busy_ns, own_ns)

    def lanes(self, function_id: int) -> int:
        """How many of a function its nodes run at once."""
        return sum(self._lanes_of(node, function_id) for node in self._usable(function_id))

    def _usable(self, function_id: int) -> list[Node]:
        """The nodes that can run a function; not those that cannot load it just now."""
        homes, view = self._homes[function_id], self._view
        if not view.load_failures:
            return homes
        return [
            node
            for node in homes
            if (variant := node.variants[function_id]) is not None
            and not view.is_barred(node, variant)
        ]

    def _lanes_of(self, node: Node, function_id: int) -> int:
        variant = node.variants[function_id]
        return 0 if variant is None else self._lanes[node.pool.id, variant.id]

    def free_at_ns(self, node: Node) -> float:
        """When a node that is busy will be free."""
        return self._free_at_ns.get(node.id, 0.0)

    def can_run(self, pipeline: Pipeline) -> bool:
        """Whether there is a node for each of its stages."""
        return all(self._usable(stage.function.id) for stage in pipeline.stages)

    def alone_ns(self, pipeline: Pipeline, items: int) -> int:
        """How long a request takes with nobody else about, as the profiles have it."""
        key = (pipeline.id, items)
        found = self._alone_ns.get(key)
        if found is None:
            times_ns = [_fastest_ns(profiles, items) for profiles in _builds(pipeline)]
            found = int(_longest_path_ns(pipeline, times_ns))
            self._alone_ns[key] = found
        return found

    def best_ns(self, pipeline: Pipeline, items: int) -> int:
        """The same, as it was lately where that is less than the profiles have it.

        What is slow only because much is going on is not infeasible.
        """
        factor = min(
            self._corrections[variant.id].value
            for stage in pipeline.stages
            for variant in stage.function.variants
        )
        return int(self.alone_ns(pipeline, items) * min(1.0, factor))

    def queue_ns(self, pipeline: Pipeline, items: int) -> float:
        """How long what goes out before these items keeps busy what they need."""
        return max(self._ahead_ns(stage.function.id, items) for stage in pipeline.stages)

    def own_ns(self, pipeline: Pipeline, items: int) -> float:
        """How long a request takes once it is its turn, in the company that it will have."""
        times_ns: list[float] = []
        for stage in pipeline.stages:
            variant = self.reference(stage.function.id)
            largest = len(variant.profile.exec_ns)
            company = items + self._items[stage.function.id]  # the last of those go out with it
            size = max((company - 1) % largest + 1, min(items, largest))
            times_ns.append(self.expected_ns(variant, size))
        return _longest_path_ns(pipeline, times_ns)

    def soonest_ns(self, pipeline: Pipeline) -> float:
        """How long until a node that can begin with it is free."""
        return self.soonest_for_ns(pipeline.stages[0].function.id)

    def soonest_for_ns(self, function_id: int) -> float:
        """The same, for one function."""
        view = self._view
        best_ns: float | None = None
        for node in self._usable(function_id):
            if node.id in view.free_nodes and node.running < self._lanes_of(node, function_id):
                return 0.0
            free_ns = self._free_at_ns.get(node.id, 0.0)
            if best_ns is None or free_ns < best_ns:
                best_ns = free_ns
        return 0.0 if best_ns is None else max(0.0, best_ns - view.now_ns)

    # --- how -----------------------------------------------------------------------------------

    def _ahead_ns(self, function_id: int, items: int) -> float:
        variant = self.reference(function_id)
        largest = len(variant.profile.exec_ns)
        full_batches = (self._items[function_id] + items - 1) // largest
        busy_ns = full_batches * self.expected_ns(variant, largest) if full_batches else 0.0
        for rival in self._rivals[function_id]:
            busy_ns += self._backlog_ns(rival)
        if busy_ns == 0.0:
            return 0.0
        return busy_ns / max(1, self.lanes(function_id))

    def _backlog_ns(self, function_id: int) -> float:
        """How long what waits of a function would keep one place busy."""
        items = self._items[function_id]
        if items == 0:
            return 0.0
        variant = self.reference(function_id)
        size = min(items, len(variant.profile.exec_ns))
        return items / size * self.expected_ns(variant, size)


def _reference(app: App, function: Function) -> Variant:
    on_nodes = (
        variant
        for variant in function.variants
        if any(app.pools[id].faas is None for id in variant.pool_ids)
    )
    return next(on_nodes, function.variants[0])


def _lanes(app: App) -> dict[tuple[int, int], int]:
    """By pool and variant: how many had better run on a node at once."""
    allowed_ns = [NEVER_NS for _ in app.functions]
    for pipeline in app.pipelines:
        for stage in pipeline.stages:
            id = stage.function.id
            allowed_ns[id] = min(allowed_ns[id], pipeline.slo.latency_ns)
    return {
        (pool.id, variant.id): knee_concurrency(
            variant.profile,
            pool.slots if len(variant.profile.slowdown) == 1 else _slots(pool, variant),
            allowed_ns[variant.function_id],
        )
        for variant in app.variants
        for pool in app.pools
        if pool.id in variant.pool_ids
    }


def _slots(pool: Pool, variant: Variant) -> int:
    return min(pool.slots, variant.concurrency)


def _rivals(app: App) -> list[list[int]]:
    """By function: the others that compete with it for nodes."""
    pools = [{pool for v in f.variants for pool in v.pool_ids} for f in app.functions]
    return [
        [rival for rival, theirs in enumerate(pools) if rival != id and theirs & own]
        for id, own in enumerate(pools)
    ]


def _builds(pipeline: Pipeline) -> list[list[Profile]]:
    return [[v.profile for v in stage.function.variants] for stage in pipeline.stages]


def _fastest_ns(profiles: list[Profile], items: int) -> float:
    return min(p.exec_ns[min(items, p.items_max) - 1] for p in profiles)


def _longest_path_ns(pipeline: Pipeline, times_ns: list[float]) -> float:
    """Time from the first stage to the last, given that of each.

    A file may list stages in any order; one not seen yet counts for nothing here.
    """
    if len(times_ns) == 1:
        return times_ns[0]
    finish_ns: list[float] = []
    for stage, time_ns in zip(pipeline.stages, times_ns, strict=True):
        before_ns = [finish_ns[i] for i in stage.after if i < len(finish_ns)]
        finish_ns.append(time_ns + max(before_ns, default=0.0))
    return max(finish_ns)
