"""The present, as one Scheduler knows it. Policies read it and never write it.

`free_nodes` is kept in order of when each node became free, so that "the node that has been free
longest" is its first entry and costs nothing to find.
"""

from __future__ import annotations

from typing import Final, final

from headgate.core.circuit_breaker import CircuitBreaker
from headgate.core.events import TimerKey
from headgate.core.model import App, Pipeline, Pool, Variant
from headgate.core.records import Batch, Datum, Instance, LoadFailure, Node, Request, Task
from headgate.core.states import InstanceState, NodeState, Residency, TaskState

# Interpreted, a name of the module is read much faster.
_HOST: Final = Residency.HOST
_STARTING: Final = InstanceState.STARTING


@final
class View:
    """Requests, batches, nodes and instances by id, and questions about them."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.now_ns = 0
        self.requests: dict[int, Request] = {}  # open ones
        self.batches: dict[int, Batch] = {}  # those that are out
        self.nodes: dict[int, Node] = {}
        self.free_nodes: dict[int, Node] = {}  # up, a slot left, not blocked
        self.instances: dict[int, Instance] = {}  # not yet gone
        self.timers: dict[TimerKey, int] = {}
        self.breakers = [
            None if pool.faas is None else CircuitBreaker(pool, pool.faas) for pool in app.pools
        ]
        self.kept_warm: dict[tuple[int, int], tuple[int, bool]] = {}  # by (pool, variant) id
        self.arrivals_seen = [0] * len(app.pipelines)  # offered, whether admitted or not
        self.events_ignored = 0  # late duplicates of events that had already been handled
        self.load_failures: dict[int, LoadFailure] = {}  # by variant id: no order may start these
        self.unloadable: set[int] = set()  # functions of which nothing is up nor may be started
        self.suspects: dict[int, Task] = {}  # by function id: the one that runs alone just now
        self.policy_faults = 0  # exceptions that hooks of the policy have raised
        self.variants_by_pool = [app.variants_on(pool.id) for pool in app.pools]

    # --- places --------------------------------------------------------------------------------

    def can_take(self, node: Node, function_id: int) -> bool:
        """Whether a free node could begin a batch of this function now: compute and memory."""
        variant = node.variants[function_id]
        if variant is None or (self.load_failures and self.is_barred(node, variant)):
            return False
        instance = node.instances.get(variant.id)
        if instance is None or instance.residency == _HOST:
            if not self.can_make_room(node, variant):
                return False
        elif instance.running >= variant.concurrency:
            return False
        return not node.limits_compute or self._has_compute(node, variant)

    def is_barred(self, node: Node, variant: Variant) -> bool:
        """Whether the node has yet to start the variant, which failed to start of late."""
        if variant.id not in self.load_failures:
            return False
        instance = node.instances.get(variant.id)
        return instance is None or instance.state == _STARTING

    def _has_compute(self, node: Node, variant: Variant) -> bool:
        shape = variant.shape
        return (
            node.cpu_milli_used + shape.cpu_milli <= node.pool.cpu_milli
            and node.gpu_sevenths_used + shape.gpu_sevenths <= node.pool.gpu_sevenths
        )

    def load_retry_ns(self, pipeline: Pipeline) -> int:
        """How long until all that a pipeline needs has been tried again; 0: all can be loaded."""
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

    def can_make_room(self, node: Node, variant: Variant) -> bool:
        """Whether evicting idle instances could free the device memory this variant needs."""
        need = variant.profile.memory_bytes
        if node.memory_used_bytes + need <= node.pool.memory_bytes:
            return True
        pinned = sum(
            i.variant.profile.memory_bytes
            for i in node.instances.values()
            if i.residency != Residency.HOST and not is_evictable(i)
        )
        return pinned + need <= node.pool.memory_bytes

    def is_resident(self, node: Node, function_id: int) -> bool:
        """Whether the node holds this function's weights on its device, or is loading them."""
        variant = node.variants[function_id]
        if variant is None:
            return False
        instance = node.instances.get(variant.id)
        return instance is not None and instance.residency != Residency.HOST

    def first_free(self, function_id: int) -> Node | None:
        """The node that can take this function: least loaded, then free for longest."""
        best: Node | None = None
        for node in self.free_nodes.values():
            if self.can_take(node, function_id):
                if node.running == 0:
                    return node
                if best is None or node.running < best.running:
                    best = node
        return best

    def is_pool_available(self, pool_id: int) -> bool:
        """Whether a call may go to a pool that picks its own instances just now."""
        spillway = self.breakers[pool_id]
        return spillway is not None and spillway.allows_call(self.now_ns)

    def fits_call(self, task: Task, pool: Pool, variant: Variant) -> bool:
        """Whether one call of a serverless pool can carry a task: its items, and its inputs."""
        platform = pool.faas
        return (
            platform is not None
            and task.request.items <= len(variant.profile.exec_ns)
            and task.payload_bytes <= platform.payload_bytes_max
        )

    def fits_somewhere(self, task: Task) -> bool:
        """Whether there is a pool that a task is not too large for; nodes take any size."""
        for variant in task.function.variants:
            for pool_id in variant.pool_ids:
                platform = self.app.pools[pool_id].faas
                if platform is None or task.payload_bytes <= platform.payload_bytes_max:
                    return True
        return False

    def start_ns(self, node: Node, variant: Variant) -> int:
        """How long it takes until a variant that is started on this node now is ready."""
        boot_ns = node.pool.boot_ns if node.pool.is_elastic and not node.instances else 0
        return boot_ns + variant.profile.cold_start_ns

    def inputs_of(self, task: Task) -> list[Datum]:
        """The intermediate results this task reads, and where they lie."""
        inputs: list[Datum] = []
        for index in task.stage.after:
            before = task.request.tasks[index]
            if before.state == TaskState.DONE:  # one that was skipped has no result
                size = before.function.variants[0].profile.output_bytes * task.request.items
                inputs.append(Datum(before.id, before.pool_id, before.node_id, size))
        return inputs

    def moved_bytes(self, task: Task, pool_id: int, node_id: int | None) -> int:
        """How much of this task's input lies elsewhere."""
        return sum(
            datum.size_bytes
            for datum in self.inputs_of(task)
            if datum.pool_id != pool_id or datum.node_id != node_id
        )


def is_evictable(instance: Instance) -> bool:
    """Whether an instance can be put out of the way at once: it is idle, and not loading."""
    return instance.state == InstanceState.IDLE and not instance.is_preparing


def is_free(view: View, node: Node) -> bool:
    """The rule behind `View.free_nodes`."""
    return (
        node.state == NodeState.UP
        and node.running < node.slots
        and node.blocked_until_ns <= view.now_ns
    )
