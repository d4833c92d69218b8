"""ESG: at every stage the cheapest configurations for the rest of a pipeline in the time left.

Hui, Xu, Guo and Shen, "ESG: Pipeline-Conscious Efficient Scheduling of DNN Workflows on Serverless
Platforms with Shareable GPUs" (HPDC 2024). Rules marked [own] are ours, where it leaves one open.

- Every stage of every pipeline has a queue, the oldest request first. Queues are served in turn.
- *ESG_1Q* plans a queue, whatever is free: A* with the time blade and the cost blade finds the
  `paths_max` cheapest choices of variant, pool, shape and batch size for this stage and those that
  follow in its group; the fastest one if none is in time. A batch is no larger than the number of
  items that wait, and none waits for more [own].
- The dominator tree distributes the objective over groups of at most `group_max` stages. At each
  stage the time that the oldest request has left is distributed anew over the groups ahead.
- *ESG_Dispatch* takes the first configuration of the list that fits a free node. Nodes with a warm
  instance come first [own: cold starts take seconds, moving data milliseconds]; then the node of
  the predecessor, the home node (a hash of the function's name over the nodes of the pool in the
  order they joined), and the node with the least compute left [own]. Where all instances on a node
  are busy and it has memory and compute to spare, another one is started, as OpenWhisk does.
- A queue for which nothing fits goes on the recheck list. If nothing fits the next time either, or
  no batch is running whose end could help, the smallest shape is taken [own].
- Successors are started ahead on the node of their predecessor, where this takes neither an
  eviction nor the last slot [own]. Keep-alive is the pool's `idle_timeout`.

Expansions are reported as work, for which the simulator charges `per_work_unit` of time. Where no
pool has a price, all nodes cost the same. The time to move data is not planned for.
Cost per decision: a search for each queue, then O(`paths_max` x free nodes).

>>> from headgate.policies import find_policy
>>> find_policy("esg").config().group_max
3
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import final
from zlib import crc32

from headgate.core.clock import NEVER_NS
from headgate.core.model import App, Function, Pipeline, Variant
from headgate.core.policy import (
    Capabilities,
    Context,
    LazyDeletions,
    Policy,
    PolicyConfig,
    PolicyKind,
    bounded,
)
from headgate.core.records import STAGES_MAX, Batch, Node, Task
from headgate.core.states import NODE_UP, TASK_READY, Residency
from headgate.core.view import has_free_compute, has_free_room
from headgate.planning.esg_search import EsgSearch
from headgate.planning.frontier.candidates import priced, stage_candidates
from headgate.planning.frontier.configs import InfeasibleError, StageConfig, check_configs
from headgate.planning.frontier.graph import StageGraph
from headgate.planning.frontier.slo_split import GROUP_MAX, shares_of_rest


@dataclass(frozen=True)
class Config(PolicyConfig):
    """Settings of `esg`."""

    paths_max: int = field(default=5, metadata=bounded(ge=1))  # K: configurations on the list
    group_max: int = field(default=GROUP_MAX, metadata=bounded(ge=1))  # stages searched together
    expansions_max: int = field(default=20_000, metadata=bounded(ge=1))  # of a search
    prewarm: bool = True  # start successors on the node of their predecessor


@final
class _StageQueue:
    """The waiting tasks of one stage, oldest request first, and what planning it needs."""

    def __init__(
        self, function: Function, rest: list[list[StageConfig]], share: float, following: list[int]
    ) -> None:
        self.rest = rest  # candidates of this stage and of those behind it in its group
        self.share = share  # of the time left that these stages may take
        self.following = following  # ids of the functions of its successors
        self.home_hash = crc32(function.name.encode())
        self.items_most = max(config.batch for config in rest[0])
        size = attrgetter("gpu_sevenths", "cpu_milli", "batch", "time_ns")
        self.by_size: list[StageConfig] = sorted(rest[0], key=size)
        self.cpu_milli_min = min(config.cpu_milli for config in rest[0])
        self.gpu_sevenths_min = self.by_size[0].gpu_sevenths
        self.heap: list[tuple[int, int, Task]] = []  # (arrival ns, task id, task)
        self.withdrawals = LazyDeletions()
        self.searches: dict[tuple[int, int], EsgSearch] = {}  # by smallest and largest batch
        self.failed_ns: int | None = None  # on the recheck list since then

    def withdraw(self) -> None:
        """Sweep the queue if withdrawn tasks may be half of it."""
        if self.withdrawals.add(len(self.heap)):
            self.heap[:] = [entry for entry in self.heap if entry[2].state == TASK_READY]
            heapify(self.heap)

    def head(self) -> Task | None:
        """The task of the oldest request."""
        while self.heap and self.heap[0][2].state != TASK_READY:
            heappop(self.heap)
        return self.heap[0][2] if self.heap else None

    def batch_max(self, head: Task) -> int:
        """Items that a batch with this head can have: those that wait."""
        if head.must_run_alone:
            return head.request.items
        waiting = 0
        for _, _, task in self.heap:
            if task.state == TASK_READY and not task.must_run_alone:
                waiting += task.request.items
                if waiting >= self.items_most:
                    return self.items_most
        return waiting

    def take(self, items_max: int) -> list[Task]:
        """Dequeue the head and those behind it that fit a batch; one in quarantine goes alone."""
        batch: list[Task] = []
        items = 0
        while (task := self.head()) is not None:
            items += task.request.items
            if batch and (items > items_max or task.must_run_alone):
                break
            heappop(self.heap)
            batch.append(task)
            if task.must_run_alone:
                break
        return batch

    def search(self, items: int, items_max: int) -> EsgSearch:
        """The search over batches of `items` to `items_max`; later stages may have only larger."""
        key = (items, items_max)
        search = self.searches.get(key)
        if search is None:
            within = [
                [config for config in configs if items <= config.batch <= items_max] or configs
                for configs in self.rest
            ]
            search = self.searches[key] = EsgSearch(within)
        return search


@final
class Esg(Policy):
    """A queue per stage of each pipeline, planned by ESG_1Q and sent by ESG_Dispatch."""

    def __init__(self, context: Context, config: Config) -> None:
        super().__init__(context, config)
        self._paths_max = config.paths_max
        self._expansions_max = config.expansions_max
        self._prewarms = config.prewarm
        app = priced(self.view.app)
        self._queues = [_make_queues(app, pipeline, config) for pipeline in app.pipelines]
        self._busy: dict[tuple[int, int], _StageQueue] = {}  # the next one to serve first
        # By pool id: the place of each node in the order in which they joined. Node ids are labels.
        self._places: list[dict[int, int]] = [{} for _ in app.pools]

    def on_task_ready(self, task: Task) -> None:
        key = (task.request.pipeline.id, task.id % STAGES_MAX)
        queue = self._queues[key[0]][key[1]]
        heappush(queue.heap, (task.request.arrival_ns, task.id, task))
        self._busy.setdefault(key, queue)
        self._serve()

    def on_task_withdrawn(self, task: Task) -> None:
        self._queues[task.request.pipeline.id][task.id % STAGES_MAX].withdraw()

    def on_capacity(self, node: Node) -> None:
        self._serve()

    def on_batch_ended(self, batch: Batch, took_ns: int) -> None:
        if batch.node is None or batch.node.state != NODE_UP:
            self._serve()  # no `on_capacity` follows, for which the recheck list may wait

    def on_node_joined(self, node: Node) -> None:
        places = self._places[node.pool.id]
        places.setdefault(node.id, len(places))

    def _serve(self) -> None:
        """Plan and dispatch one queue after the other, until none has a batch that fits."""
        pending = deque(self._busy)
        recheck: list[_StageQueue] = []
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

    def _send_planned(self, queue: _StageQueue, head: Task) -> bool:
        """Dispatch in the first planned configuration that fits a node; whether there was one."""
        if head.request.items > queue.items_most or not self._may_fit(queue):
            return False
        tried: list[StageConfig] = []
        for path in self._plan(queue, head):
            if path[0] not in tried:  # several paths may begin alike
                tried.append(path[0])
                if self._send(queue, head, path):
                    return True
        return False

    def _plan(self, queue: _StageQueue, head: Task) -> list[tuple[StageConfig, ...]]:
        """ESG_1Q: the cheapest paths within this group's share of the time that is left."""
        search = queue.search(head.request.items, queue.batch_max(head))
        budget_ns = deadline_ns = head.request.deadline_ns
        if deadline_ns < NEVER_NS:
            budget_ns = int((deadline_ns - self.view.now_ns) * queue.share)
        try:
            found = search.search(budget_ns, self._paths_max, expansions_max=self._expansions_max)
        except InfeasibleError:
            self.orders.report_work(1)
            return [search.fastest.configs]
        self.orders.report_work(found.expansions)
        return [path.configs for path in found.paths] or [search.fastest.configs]

    def _may_fit(self, queue: _StageQueue) -> bool:
        """Whether a free node has the least that any candidate needs: if not, no search is due."""
        return any(
            not node.counts_batches
            or (
                node.cpu_milli_used + queue.cpu_milli_min <= node.pool.cpu_milli
                and node.gpu_sevenths_used + queue.gpu_sevenths_min <= node.pool.gpu_sevenths
            )
            for node in self.view.free_nodes.values()
        )

    def _recheck(self, queue: _StageQueue) -> None:
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

    def _send(self, queue: _StageQueue, head: Task, path: Sequence[StageConfig]) -> bool:
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
        self, queue: _StageQueue, head: Task, config: StageConfig, variant: Variant
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
            elif not self._can_start(node, variant, config.shape_id) or not has_free_compute(
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

    def _can_start(self, node: Node, variant: Variant, shape_id: int) -> bool:
        """Whether a node can start an instance without any eviction."""
        may_start = variant.id not in self.view.load_failures
        return may_start and has_free_room(node, variant, shape_id)

    def _prewarm(self, node: Node, function_id: int, planned: Sequence[StageConfig]) -> None:
        """Start a successor on the node of its predecessor if there is room to spare."""
        variant = node.variants[function_id]
        shape_id = 0
        for config in planned[:1]:
            build = self.view.app.variants[config.build]
            if build.function_id == function_id and config.place == node.pool.id:
                variant = build
                shape_id = config.shape_id if node.binds_at_start else 0
        if (
            variant is not None
            and not node.by_variant.get(variant.id)
            and node.id in self.view.free_nodes
            and node.running + 1 < node.slots
            and self._can_start(node, variant, shape_id)
        ):
            self.orders.start(variant, node, shape_id)


def _make_queues(app: App, pipeline: Pipeline, config: Config) -> list[_StageQueue]:
    """The queues of a pipeline's stages, with each one's share of the time that is left.

    Raises `ConfigError` if a stage fits no pool.
    """
    names = [stage.name or stage.function.name for stage in pipeline.stages]
    candidates = [
        [c for c in stage_candidates(app, stage.function) if app.pools[c.place].faas is None]
        for stage in pipeline.stages
    ]
    for name, configs in zip(names, candidates, strict=True):
        check_configs(name, configs)
    graph = StageGraph([stage.after for stage in pipeline.stages], names)
    queues: list[_StageQueue] = []
    for share in shares_of_rest(graph, candidates, group_max=config.group_max):
        index = share.stages[0]
        rest = [candidates[each] for each in share.stages]
        after = [pipeline.stages[each].function.id for each in pipeline.successors[index]]
        queues.append(_StageQueue(pipeline.stages[index].function, rest, share.part, after))
    return queues


POLICY = PolicyKind(Esg, Config, Capabilities(batches=True, mixed_pools=True))
