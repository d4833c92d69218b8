"""The current state as one Scheduler knows it. Policies read it and never write it.

`free_nodes` is kept in the order in which nodes became free, so the node that has been free longest
is its first entry and costs O(1) to find. `instances_of` is kept in the order in which instances
were started, as `instances` is, so that a loop over either meets them in the same order.
"""

from __future__ import annotations

from typing import final

from headgate.core.circuit_breaker import CircuitBreaker
from headgate.core.events import TimerKey
from headgate.core.model import App, Pipeline, Pool, Variant
from headgate.core.records import Batch, Datum, Instance, LoadFailure, Node, Request, Task
from headgate.core.states import (
    INSTANCE_IDLE,
    INSTANCE_STARTING,
    ON_HOST,
    NodeState,
    Residency,
    TaskState,
)


@final
class View:
    """Requests, batches, nodes and instances by id, with queries about them."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.now_ns = 0
        self.gateways = 1  # how many share the load, this one included, as far as is known
        self.requests: dict[int, Request] = {}  # open ones
        self.batches: dict[int, Batch] = {}  # in flight
        self.nodes: dict[int, Node] = {}
        self.free_nodes: dict[int, Node] = {}  # up, with a free slot, not in back-off
        # The same by pool id, for decisions that must not look at the nodes of other pools.
        self.free_by_pool: list[dict[int, Node]] = [{} for _ in app.pools]
        self.instances: dict[int, Instance] = {}  # all that are not GONE
        # By variant id: its instances by id, without the DRAINING ones. One whose node a Broker has
        # yet to pick is here and on no node.
        self.instances_of: list[dict[int, Instance]] = [{} for _ in app.variants]
        # Of those: the ones whose weights are in host memory.
        self.on_host_of: list[dict[int, Instance]] = [{} for _ in app.variants]
        self.timers: dict[TimerKey, int] = {}
        self.breakers = [
            None if pool.faas is None else CircuitBreaker(pool, pool.faas) for pool in app.pools
        ]
        self.kept_warm: dict[tuple[int, int], tuple[int, bool]] = {}  # by (pool, variant) id
        self.arrivals = [0] * len(app.pipelines)  # requests offered, admitted or not
        self.events_ignored = 0  # duplicates of, or crossings with, events handled before
        self.load_failures: dict[int, LoadFailure] = {}  # by variant id: no order may start these
        self.unloadable: set[int] = set()  # functions with no instance, none of which may start
        self.suspects: dict[int, Task] = {}  # by function id: the quarantined task whose turn it is
        self.policy_faults = 0  # exceptions raised by hooks of the policy
        # By pool and function id: the fastest variant, which is the default of orders and queries
        # that name only a function; and all variants.
        self.variants_by_pool = [app.variants_on(pool.id) for pool in app.pools]
        self.all_variants_by_pool = [app.variants_in(pool.id) for pool in app.pools]

    def can_take(self, node: Node, function_id: int) -> bool:
        """Whether a free node can begin a batch of this function now, as its default variant."""
        variant = node.variants[function_id]
        if variant is None:
            return False
        if self.load_failures or node.replicas:
            return self.fits(node, variant)
        # `fits` in the usual case, inlined because policies ask this several times per task.
        instance = node.instances.get(variant.id)
        shape_id = 0 if instance is None else instance.shape_id
        if instance is None or instance.residency == ON_HOST:
            if not self.can_make_room(node, variant, shape_id):
                return False
        elif instance.running >= variant.concurrency:
            return False
        return not node.limits_compute or self.has_compute(node, variant, shape_id)

    def fits(self, node: Node, variant: Variant, shape_id: int | None = None) -> bool:
        """Whether a free node has the compute and memory to begin a batch of this variant now.

        Without a shape: in the shape of the instance that would take the batch, or the variant's
        own. O(1), unless memory is short or the node holds several instances of the variant.
        """
        instance = self.instance_for(node, variant, shape_id)
        is_ready = instance is not None and instance.state != INSTANCE_STARTING
        if self.load_failures and not is_ready and variant.id in self.load_failures:
            return False
        shape = 0 if shape_id is None else shape_id
        if instance is None or instance.residency == ON_HOST:
            if not self.can_make_room(
                node, variant, shape if instance is None else instance.shape_id
            ):
                return False
        elif instance.running >= variant.concurrency:
            return False
        if not node.counts_batches:
            return True
        if instance is not None and node.binds_at_start:
            shape = instance.shape_id
        return self.has_compute(node, variant, shape)

    def instance_for(
        self, node: Node, variant: Variant, shape_id: int | None = None
    ) -> Instance | None:
        """The instance on a node that takes the next batch of a variant; None if it holds none.

        Where instances have a shape, only those of this shape count, if one is given. One that can
        begin a batch is preferred to one that is being prepared, that one to one whose weights are
        in host memory, and a full one is the last choice. Among equals it is the one with the
        fewest batches, then the oldest. O(instances of the variant on the node).
        """
        is_any = shape_id is None or not node.binds_at_start
        if not node.replicas:  # the usual case: it holds one at most
            only = node.instances.get(variant.id)
            return only if only is None or is_any or only.shape_id == shape_id else None
        best: Instance | None = None
        best_rank = 0
        for instance in node.by_variant.get(variant.id, ()):
            if not is_any and instance.shape_id != shape_id:
                continue
            rank = _rank(instance)
            if best is None or (rank, instance.running) < (best_rank, best.running):
                best, best_rank = instance, rank
        return best

    def is_barred(self, node: Node, variant: Variant) -> bool:
        """Whether the variant is in start back-off and not running on this node."""
        return variant.id in self.load_failures and not has_ready(node, variant.id)

    def has_compute(self, node: Node, variant: Variant, shape_id: int = 0) -> bool:
        """Whether a node has the compute to begin a batch of a variant in a shape now.

        Where compute is resident, an instance that is loaded has it.
        """
        if node.counts_batches:  # `has_free_compute`, inlined for the sake of interpreted code
            shape = variant.shapes[shape_id].shape
            return (
                node.cpu_milli_used + shape.cpu_milli <= node.pool.cpu_milli
                and node.gpu_sevenths_used + shape.gpu_sevenths <= node.pool.gpu_sevenths
            )
        if not node.has_resident_compute:
            return True
        instance = self.instance_for(node, variant)
        is_loaded = instance is not None and instance.holds_compute
        return is_loaded or can_free_compute(node, variant, shape_id)

    def load_retry_ns(self, pipeline: Pipeline) -> int:
        """Time until every unloadable function of a pipeline was retried; 0 if there is none."""
        longest_ns = 0
        for stage in pipeline.stages:
            if stage.function.id in self.unloadable:
                soonest_ns = min(
                    self.load_failures[variant.id].retry_at_ns
                    for variant in stage.function.variants
                    if variant.id in self.load_failures
                )
                longest_ns = max(longest_ns, soonest_ns - self.now_ns, 1)
        return longest_ns

    def can_make_room(self, node: Node, variant: Variant, shape_id: int = 0) -> bool:
        """Whether the node has, or evicting idle instances would free, room for an instance.

        Room is memory and, where compute is resident, the compute of its shape.
        """
        need = variant.profile.memory_bytes
        if node.memory_used_bytes + need > node.pool.memory_bytes and need > room_bytes(node):
            return False
        return not node.has_resident_compute or can_free_compute(node, variant, shape_id)

    def is_resident(self, node: Node, function_id: int) -> bool:
        """Whether the node holds this function's weights on its device, or is loading them."""
        variant = node.variants[function_id]
        if variant is None:
            return False
        instance = node.instances.get(variant.id)
        return instance is not None and instance.residency != Residency.HOST

    def has_instance(self, function_id: int) -> bool:
        """Whether an instance of this function runs or starts. O(variants of the function)."""
        for variant in self.app.functions[function_id].variants:
            if self.instances_of[variant.id]:
                return True
        return False

    def instances_in(self, variant_id: int, pool_id: int) -> list[Instance]:
        """The instances of a variant in a pool that run or start, oldest first."""
        return [i for i in self.instances_of[variant_id].values() if i.pool.id == pool_id]

    def first_free(self, function_id: int) -> Node | None:
        """The node that can take this function: the least loaded, then the one free longest."""
        best: Node | None = None
        for node in self.free_nodes.values():
            if self.can_take(node, function_id):
                if node.running == 0:
                    return node
                if best is None or node.running < best.running:
                    best = node
        return best

    def is_pool_available(self, pool_id: int) -> bool:
        """Whether a FaaS pool can take a call now: its circuit breaker allows one."""
        breaker = self.breakers[pool_id]
        return breaker is not None and breaker.allows_call(self.now_ns)

    def fits_call(self, task: Task, pool: Pool, variant: Variant) -> bool:
        """Whether a task fits one call of a FaaS pool: its number of items and its payload."""
        platform = pool.faas
        return (
            platform is not None
            and task.request.items <= len(variant.profile.exec_ns)
            and task.payload_bytes <= platform.payload_bytes_max
        )

    def fits_somewhere(self, task: Task) -> bool:
        """Whether some pool can take the task's items and its payload; nodes take any payload."""
        for variant in task.function.variants:
            for pool_id in variant.pool_ids:
                pool = self.app.pools[pool_id]
                if pool.faas is not None:
                    if self.fits_call(task, pool, variant):
                        return True
                elif task.request.items <= len(variant.profile.exec_ns):
                    return True
        return False

    def start_ns(self, node: Node, variant: Variant) -> int:
        """Time until a variant that is started on this node now is ready."""
        boot_ns = node.pool.boot_ns if node.pool.is_elastic and not node.instances else 0
        return boot_ns + variant.profile.cold_start_ns

    def inputs_of(self, task: Task) -> list[Datum]:
        """The intermediate results that this task reads, and where they are."""
        inputs: list[Datum] = []
        for index in task.stage.after:
            before = task.request.tasks[index]
            if before.state == TaskState.DONE:  # one that was skipped has no result
                size = before.function.variants[0].profile.output_bytes * task.request.items
                inputs.append(Datum(before.id, before.pool_id, before.node_id, size))
        return inputs

    def moved_bytes(self, task: Task, pool_id: int, node_id: int | None) -> int:
        """Bytes of this task's input that must be moved to this node or pool."""
        return sum(
            datum.size_bytes
            for datum in self.inputs_of(task)
            if datum.pool_id != pool_id or datum.node_id != node_id
        )


def is_evictable(instance: Instance) -> bool:
    """Whether an instance can be evicted at once: it is idle and not loading."""
    return instance.state == INSTANCE_IDLE and not instance.is_preparing


def has_free_compute(node: Node, variant: Variant, shape_id: int) -> bool:
    """Whether the compute of a shape of this variant is free on a node."""
    shape = variant.shapes[shape_id].shape
    return (
        node.cpu_milli_used + shape.cpu_milli <= node.pool.cpu_milli
        and node.gpu_sevenths_used + shape.gpu_sevenths <= node.pool.gpu_sevenths
    )


def can_free_compute(node: Node, variant: Variant, shape_id: int) -> bool:
    """Whether a node with resident compute has that of a shape, or can free it by evictions."""
    if has_free_compute(node, variant, shape_id):
        return True
    cpu_milli, gpu_sevenths = node.cpu_milli_used, node.gpu_sevenths_used
    for group in node.by_variant.values():
        for instance in group:
            if instance.holds_compute and is_evictable(instance):
                held = instance.variant.shapes[instance.shape_id].shape
                cpu_milli -= held.cpu_milli
                gpu_sevenths -= held.gpu_sevenths
    shape = variant.shapes[shape_id].shape
    return (
        cpu_milli + shape.cpu_milli <= node.pool.cpu_milli
        and gpu_sevenths + shape.gpu_sevenths <= node.pool.gpu_sevenths
    )


def has_free_room(node: Node, variant: Variant, shape_id: int) -> bool:
    """Whether a node has memory and resident compute for an instance without any eviction."""
    if node.memory_used_bytes + variant.profile.memory_bytes > node.pool.memory_bytes:
        return False
    return not node.has_resident_compute or has_free_compute(node, variant, shape_id)


def room_bytes(node: Node) -> int:
    """Device memory that a node has, or can free by evicting idle instances."""
    if node.running == 0:  # whatever runs, starts or loads has a slot: all is idle
        return node.pool.memory_bytes
    pinned = 0
    for group in node.by_variant.values():
        for instance in group:
            # `is_evictable`, inlined because it is asked of all that a node holds.
            if instance.residency != ON_HOST and (
                instance.state != INSTANCE_IDLE or instance.is_preparing
            ):
                pinned += instance.variant.profile.memory_bytes
    return node.pool.memory_bytes - pinned


def has_ready(node: Node, variant_id: int) -> bool:
    """Whether a node holds an instance of a variant that has started."""
    for instance in node.by_variant.get(variant_id, ()):
        if instance.state != INSTANCE_STARTING:
            return True
    return False


def _rank(instance: Instance) -> int:
    """The rank of `View.instance_for`: smaller is better."""
    if instance.running >= instance.variant.concurrency:
        return 3
    if instance.residency == ON_HOST:
        return 2
    return 1 if instance.is_preparing or instance.state == INSTANCE_STARTING else 0


def is_free(view: View, node: Node) -> bool:
    """Whether a node belongs into `View.free_nodes`."""
    return (
        node.state == NodeState.UP
        and node.running < node.slots
        and node.blocked_until_ns <= view.now_ns
    )
