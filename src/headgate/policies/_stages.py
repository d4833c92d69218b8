"""A base of policies that keep a queue per stage and choose a configuration per batch.

Every stage of every pipeline has a queue, the oldest request first, and the queues are served in
turn. A policy says which *paths* it would take for the head of a queue: a configuration of this
stage (variant, pool, shape and batch size) and, behind it, those that it counts on for the stages
that follow. The rest is the same for all of them, as in ESG (HPDC 2024), so that a comparison is
one of the plans. Rules marked [own] are ours, where the paper leaves one open.

- *ESG_Dispatch* takes the first configuration of the list that fits a free node. Nodes with a warm
  instance come first [own: cold starts take seconds, moving data milliseconds]; then the node of
  the predecessor, the home node (a hash of the function's name over the nodes of the pool in the
  order they joined), and the node with the least compute left [own]. Where all instances on a node
  are busy and it has memory and compute to spare, another one is started, as OpenWhisk does.
- A batch is of what waits: none waits to be filled [own].
- Plans leave a `margin` of the time left unused [own: execution times vary, and the cheapest plan
  often ends just in time].
- A queue for which nothing fits goes on the recheck list. If nothing fits the next time either, or
  no batch is running whose end could help, the smallest shape is taken [own].
- Successors are started ahead on the node of their predecessor, where this takes neither an
  eviction nor the last slot [own]. Keep-alive is the pool's `idle_timeout`. Nodes that join start
  the functions whose `prewarm_nodes` they are among.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import final
from zlib import crc32

from headgate.core.clock import NEVER_NS
from headgate.core.model import Pipeline, Variant
from headgate.core.orders import Orders
from headgate.core.policy import Context, LazyDeletions, Policy, PolicyConfig
from headgate.core.records import STAGES_MAX, Batch, Node, Request, Task
from headgate.core.states import NODE_UP, TASK_READY, Residency
from headgate.core.view import View, has_free_compute, has_free_room
from headgate.planning.frontier.candidates import node_candidates, pipeline_graph, priced
from headgate.planning.frontier.configs import StageConfig
from headgate.planning.frontier.graph import StageGraph

# The configuration of a stage, then those that are planned for the stages right behind it.
Path = Sequence[StageConfig]


@final
class StageQueue:
    """The waiting tasks of one stage, oldest request first, and the candidates that could run it.

    A policy reads it; `StagePolicy` alone writes it.
    """

    def __init__(self, pipeline: Pipeline, index: int, configs: list[StageConfig]) -> None:
        function = pipeline.stages[index].function
        self.pipeline_id = pipeline.id
        self.index = index  # of the stage in its pipeline
        self.configs = configs  # candidates on nodes, in the order of declaration
        self.after = pipeline.stages[index].after  # the stages that it waits for
        self.successors = pipeline.successors[index]  # those that wait for it
        self.following = [pipeline.stages[each].function.id for each in self.successors]
        self.home_hash = crc32(function.name.encode())
        self.items_most = max(config.batch for config in configs)
        size = attrgetter("gpu_sevenths", "cpu_milli", "batch", "time_ns")
        self.by_size: list[StageConfig] = sorted(configs, key=size)
        self.cpu_milli_min = min(config.cpu_milli for config in configs)
        self.gpu_sevenths_min = self.by_size[0].gpu_sevenths
        self.failed_ns: int | None = None  # on the recheck list since then
        self._heap: list[tuple[int, int, Task]] = []  # (arrival ns, task id, task)
        self._withdrawals = LazyDeletions()

    def add(self, task: Task) -> None:
        """Enqueue a task."""
        heappush(self._heap, (task.request.arrival_ns, task.id, task))

    def withdraw(self) -> None:
        """Sweep the queue if withdrawn tasks may be half of it."""
        if self._withdrawals.add(len(self._heap)):
            self._heap[:] = [entry for entry in self._heap if entry[2].state == TASK_READY]
            heapify(self._heap)

    def head(self) -> Task | None:
        """The task of the oldest request."""
        while self._heap and self._heap[0][2].state != TASK_READY:
            heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def batch_max(self, head: Task) -> int:
        """Items that a batch with this head can have: those that wait."""
        return head.request.items if head.must_run_alone else self.waiting()

    def waiting(self) -> int:
        """Items that wait and may share a batch, at most as many as the largest batch has."""
        items = 0
        for _, _, task in self._heap:
            if task.state == TASK_READY and not task.must_run_alone:
                items += task.request.items
                if items >= self.items_most:
                    return self.items_most
        return items

    def take(self, items_max: int) -> list[Task]:
        """Dequeue the head and those behind it that fit a batch; one in quarantine goes alone."""
        batch: list[Task] = []
        items = 0
        while (task := self.head()) is not None:
            items += task.request.items
            if batch and (items > items_max or task.must_run_alone):
                break
            heappop(self._heap)
            batch.append(task)
            if task.must_run_alone:
                break
        return batch


class StagePolicy(Policy):
    """Serves a queue per stage of each pipeline; a subclass plans with `paths_for`.

    `candidates` has the configurations on nodes by pipeline id and stage, `graphs` the order of
    the stages by pipeline id. Raises `ConfigError` if a stage fits no pool. A decision costs a plan
    for each queue, then O(paths x free nodes).
    """

    def __init__(
        self, context: Context, config: PolicyConfig, *, prewarms: bool = True, margin: float = 0.0
    ) -> None:
        super().__init__(context, config)
        self._part_used = 1.0 - margin  # of the time left: the rest is for times that vary
        self._prewarms = prewarms
        # Where no pool has a price, all nodes cost the same.
        app = priced(self.view.app)
        self.graphs: list[StageGraph] = [pipeline_graph(pipeline) for pipeline in app.pipelines]
        self.candidates: list[list[list[StageConfig]]] = [
            node_candidates(app, pipeline) for pipeline in app.pipelines
        ]
        self.queues: list[list[StageQueue]] = [
            [StageQueue(pipeline, index, each) for index, each in enumerate(configs)]
            for pipeline, configs in zip(app.pipelines, self.candidates, strict=True)
        ]
        self._busy: dict[tuple[int, int], StageQueue] = {}  # the next one to serve first
        # By pool id: the place of each node in the order in which they joined. Node ids are labels.
        self._places: list[dict[int, int]] = [{} for _ in app.pools]

    def paths_for(self, queue: StageQueue, head: Task) -> Sequence[Path]:
        """Return what to run the head of a queue in now, whatever is free: the best path first.

        The head has no more items than the largest batch of its stage.
        """
        raise NotImplementedError

    def budget_ns(self, request: Request, share: float = 1.0) -> int:
        """A share of the time that a request has left, less the margin; endless if no deadline."""
        deadline_ns = request.deadline_ns
        if deadline_ns >= NEVER_NS:
            return deadline_ns
        return int((deadline_ns - self.view.now_ns) * share * self._part_used)

    def on_task_ready(self, task: Task) -> None:
        """Enqueue the task, and serve the queues."""
        key = (task.request.pipeline.id, task.id % STAGES_MAX)
        queue = self.queues[key[0]][key[1]]
        queue.add(task)
        self._busy.setdefault(key, queue)
        if not task.stage.after:
            self._serve()
        # Else a batch has ended whose other tasks have successors too: `on_batch_ended` follows,
        # and all of them can share a batch.

    def on_task_returned(self, task: Task, reason: int | None) -> None:
        """Enqueue the task again, and serve the queues."""
        self.on_task_ready(task)
        self._serve()

    def on_task_withdrawn(self, task: Task) -> None:
        """Sweep the task's queue when that is due."""
        self.queues[task.request.pipeline.id][task.id % STAGES_MAX].withdraw()

    def on_capacity(self, node: Node) -> None:
        """Serve the queues."""
        self._serve()

    def on_batch_ended(self, batch: Batch, took_ns: int) -> None:
        """Serve the queues, which have the successors of the batch's tasks now."""
        if batch.node is None or batch.node.state != NODE_UP:
            self._serve()  # otherwise `on_capacity` follows

    def on_node_joined(self, node: Node) -> None:
        """Give the node its place among the home nodes of its pool, and load what is pre-warmed."""
        places = self._places[node.pool.id]
        start_prewarmed(self.view, self.orders, node, places.setdefault(node.id, len(places)))

    def _serve(self) -> None:
        """Plan and dispatch one queue after the other, until none has a batch that fits."""
        pending = deque(self._busy)
        recheck: list[StageQueue] = []
        while pending and self.view.free_nodes:
            key = pending.popleft()
            queue = self._busy.pop(key)
            head = queue.head()
            if head is None:
                queue.failed_ns = None
                continue
            self._busy[key] = queue
            if self._send_planned(queue, head):
                pending.append(key)
            else:
                recheck.append(queue)
        for queue in recheck:
            self._recheck(queue)

    def _send_planned(self, queue: StageQueue, head: Task) -> bool:
        """Dispatch in the first planned configuration that fits a node; whether there was one."""
        if head.request.items > queue.items_most or not self._may_fit(queue):
            return False
        tried: list[StageConfig] = []
        for path in self.paths_for(queue, head):
            if path[0] not in tried:  # several paths may begin alike
                tried.append(path[0])
                if self._send(queue, head, path):
                    return True
        return False

    def _may_fit(self, queue: StageQueue) -> bool:
        """Whether a free node has the least that any candidate needs: if not, no search is due."""
        return any(
            not node.counts_batches
            or (
                node.cpu_milli_used + queue.cpu_milli_min <= node.pool.cpu_milli
                and node.gpu_sevenths_used + queue.gpu_sevenths_min <= node.pool.gpu_sevenths
            )
            for node in self.view.free_nodes.values()
        )

    def _recheck(self, queue: StageQueue) -> None:
        """Keep a queue for which nothing fits on the recheck list, or send the smallest shape."""
        head = queue.head()
        if queue.failed_ns is None:
            queue.failed_ns = self.view.now_ns
        if head is None or (queue.failed_ns == self.view.now_ns and self.view.batches):
            return
        items = head.request.items
        if items > queue.items_most:  # more than any batch: the Scheduler fails it, and says so
            free = self.view.first_free(head.function.id)
            if free is not None:
                self.orders.dispatch(queue.take(1), free)
            return
        tried: set[tuple[int, int]] = set()
        for config in queue.by_size:
            # Of each variant and pool the smallest one that takes the head.
            build = (config.build, config.place)
            if config.batch >= items and build not in tried:
                tried.add(build)
                if self._send(queue, head, (config,)):
                    return

    def _send(self, queue: StageQueue, head: Task, path: Path) -> bool:
        """ESG_Dispatch: send a batch in the first configuration of a path, if it fits a node."""
        config = path[0]
        variant = self.view.app.variants[config.build]
        node = self._node_for(queue, head, config, variant)
        if node is None:
            return False
        queue.failed_ns = None
        instance = None
        if not self.view.fits(node, variant, config.shape_id):
            shape_id = config.shape_id if node.binds_at_start else 0
            instance = self.orders.start(variant, node, shape_id)
        self.orders.dispatch(queue.take(config.batch), node, variant, instance, config.shape_id)
        if self._prewarms:
            for function_id in queue.following:
                self._prewarm(node, function_id, path[1:])
        return True

    def _node_for(
        self, queue: StageQueue, head: Task, config: StageConfig, variant: Variant
    ) -> Node | None:
        """The best free node for a batch in this configuration; None if it fits none."""
        places = self._places[config.place]
        before = {head.request.tasks[index].node_id for index in head.stage.after}
        best: Node | None = None
        best_rank = (0, 0, (0, 0), 0)
        for node in self.view.free_by_pool[config.place].values():
            coldness = 2  # an instance must be started
            if self.view.fits(node, variant, config.shape_id):
                instance = self.view.instance_for(node, variant, config.shape_id)
                if instance is not None:
                    coldness = int(instance.residency != Residency.DEVICE)
            elif not can_start(self.view, node, variant, config.shape_id) or not has_free_compute(
                node, variant, config.shape_id
            ):
                continue
            distance = (places[node.id] - queue.home_hash) % len(places)
            locality = 0 if node.id in before else 1 if distance == 0 else 2
            packing = (-node.gpu_sevenths_used, -node.cpu_milli_used)
            rank = (coldness, locality, packing, distance)
            if best is None or rank < best_rank:
                best, best_rank = node, rank
        return best

    def _prewarm(self, node: Node, function_id: int, planned: Path) -> None:
        """Start a successor on the node of its predecessor if there is room to spare."""
        variant = node.variants[function_id]
        shape_id = 0
        for config in planned:
            build = self.view.app.variants[config.build]
            if build.function_id == function_id and config.place == node.pool.id:
                variant = build
                shape_id = config.shape_id if node.binds_at_start else 0
                break
        if (
            variant is not None
            and not node.by_variant.get(variant.id)
            and node.id in self.view.free_nodes
            and node.running + 1 < node.slots
            and can_start(self.view, node, variant, shape_id)
        ):
            self.orders.start(variant, node, shape_id)


def can_start(view: View, node: Node, variant: Variant, shape_id: int) -> bool:
    """Whether a node can start an instance without any eviction."""
    return variant.id not in view.load_failures and has_free_room(node, variant, shape_id)


def start_prewarmed(view: View, orders: Orders, node: Node, place: int) -> None:
    """Start what is pre-warmed on more nodes than joined the pool before this one."""
    for function in view.app.functions:
        variant = node.variants[function.id]
        if (
            variant is not None
            and place < function.prewarm_nodes
            and can_start(view, node, variant, 0)
        ):
            orders.start(variant, node)


def planned_path(queue: StageQueue, plan: Sequence[StageConfig]) -> Path:
    """The path of a queue's stage in a plan that has a configuration for every stage."""
    return [plan[queue.index], *[plan[index] for index in queue.successors]]


def within_batches(
    stages: Sequence[list[StageConfig]], items: int, items_max: int
) -> list[list[StageConfig]]:
    """The candidates of some stages with batches of `items` to `items_max`.

    A stage that has none keeps them all: it may have only larger ones, or shapes too small.
    """
    return [
        [config for config in configs if items <= config.batch <= items_max] or configs
        for configs in stages
    ]
