"""References of the regret search: simple policies to which the tried policy must not lose.

They are not registered, because they are not for use, and they are not tuned: first come first
served with five bounds on the queue, earliest deadline first without admission, and the fastest
build of each function alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Final, final

from headgate.core.model import Pool, Variant
from headgate.core.policy import (
    NOT_NEGATIVE,
    Capabilities,
    Context,
    LazyDeletions,
    Policy,
    PolicyConfig,
    PolicyKind,
    bounded,
)
from headgate.core.records import Batch, Node, Request, Task
from headgate.core.states import (
    TASK_READY,
    Outcome,
    Rejection,
    Settlement,
)
from headgate.core.view import has_free_room

QUEUE_BATCHES: Final = (1, 2, 4, 8, 16)
_REJECTED: Final = Settlement(Outcome.REJECTED, Rejection.OVERLOADED)

Entry = tuple[int, int, Task]  # (key, task id, task): the smallest goes first


@dataclass(frozen=True)
class Config(PolicyConfig):
    """Settings of a reference."""

    order: str = field(default="fifo", metadata=bounded(choices=("fifo", "edf")))
    # Full batches per lane that may wait for a function: a request that would exceed this for one
    # of its stages is rejected on arrival. 0: no bound, every request is admitted.
    queue_batches: int = field(default=0, metadata=NOT_NEGATIVE)
    # Whether only the fastest build of each function is used.
    fastest_only: bool = False


@final
class Reference(Policy):
    """A queue per function; the first task goes to the fastest place that is free.

    Batches are as large as the queue allows and are not waited for. A place that holds the weights
    comes before one that would have to load them.
    """

    def __init__(self, context: Context, config: Config) -> None:
        super().__init__(context, config)
        app = self.view.app
        self._is_edf = config.order == "edf"
        self._queues: list[list[Entry]] = [[] for _ in app.functions]
        self._withdrawals = [LazyDeletions() for _ in app.functions]
        # By function id: its builds and where they run, the fastest first.
        self._places = [
            sorted(
                ((v, app.pools[pool_id]) for v in f.variants for pool_id in v.pool_ids),
                key=lambda place: place[0].profile.exec_ns[0] + 2 * place[1].network_ns,
            )[: 1 if config.fastest_only else None]
            for f in app.functions
        ]
        self._pools = [{pool.id for _, pool in places} for places in self._places]
        self._waiting_items = [0 for _ in app.functions]
        self._items_max = [
            config.queue_batches * sum(_full_batches(v, pool) for v, pool in places)
            for places in self._places
        ]
        self._is_bounded = config.queue_batches > 0
        self._calls = [0 for _ in app.pools]  # in flight, by FaaS pool

    def on_arrival(self, request: Request) -> None:
        if self._is_bounded and any(
            self._waiting_items[task.function.id] + request.items
            > self._items_max[task.function.id]
            for task in request.tasks
        ):
            self.orders.reject(request, _REJECTED)

    def on_task_ready(self, task: Task) -> None:
        request = task.request
        key = request.deadline_ns if self._is_edf else request.arrival_ns
        heappush(self._queues[task.function.id], (key, task.id, task))
        self._waiting_items[task.function.id] += request.items
        self._serve()

    def on_task_withdrawn(self, task: Task) -> None:
        queue = self._queues[task.function.id]
        if self._withdrawals[task.function.id].add(len(queue)):
            queue[:] = [entry for entry in queue if entry[2].state == TASK_READY]
            heapify(queue)
        self._waiting_items[task.function.id] -= task.request.items

    def on_capacity(self, node: Node) -> None:
        self._serve()

    def on_pool_available(self, pool_id: int) -> None:
        self._serve()

    def on_batch_ended(self, batch: Batch, took_ns: int) -> None:
        if batch.node is None:
            self._calls[batch.pool.id] -= 1

    def on_node_joined(self, node: Node) -> None:
        for function in self.view.app.functions:
            variant = node.variants[function.id]
            if variant is None or node.pool.id not in self._pools[function.id]:
                continue
            holders = sum(1 for i in self.view.instances.values() if i.variant.id == variant.id)
            if holders < function.prewarm_nodes and has_free_room(node, variant, 0):
                self.orders.start(variant, node)

    def _serve(self) -> None:
        """Dispatch until the first task of no queue has a place."""
        while True:
            heads = sorted(queue[0] for queue in self._queues if _prune(queue))
            if not any(self._send(task) for _, _, task in heads):
                return

    def _send(self, task: Task) -> bool:
        function_id = task.function.id
        node = self._free_node(function_id)
        if node is not None:
            variant = node.variants[function_id]
            assert variant is not None
            self.orders.dispatch(self._take(function_id, variant), node)
            return True
        for variant, pool in self._places[function_id]:
            if self._can_call(task, pool, variant):
                self._calls[pool.id] += 1
                self.orders.dispatch_to_pool(self._take(function_id, variant), pool, variant)
                return True
        return False

    def _free_node(self, function_id: int) -> Node | None:
        """A free node: one that holds the weights, then the fastest, then the least busy."""
        view = self.view
        best: Node | None = None
        best_rank = (False, 0, 0)
        for node in view.free_nodes.values():
            if node.pool.id in self._pools[function_id] and view.can_take(node, function_id):
                variant = node.variants[function_id]
                assert variant is not None
                exec_ns = variant.profile.exec_ns[0]
                rank = (not view.is_resident(node, function_id), exec_ns, node.running)
                if best is None or rank < best_rank:
                    best, best_rank = node, rank
        return best

    def _can_call(self, task: Task, pool: Pool, variant: Variant) -> bool:
        return (
            pool.faas is not None
            and self._calls[pool.id] < pool.faas.concurrency_max
            and self.view.is_pool_available(pool.id)
            and self.view.fits_call(task, pool, variant)
        )

    def _take(self, function_id: int, variant: Variant) -> list[Task]:
        """Dequeue the first task and those behind it that fit a batch."""
        queue = self._queues[function_id]
        batch: list[Task] = []
        items = 0
        while _prune(queue):
            task = queue[0][2]
            items += task.request.items
            if batch and (items > variant.profile.items_max or task.must_run_alone):
                break
            heappop(queue)
            self._waiting_items[function_id] -= task.request.items
            batch.append(task)
            if task.must_run_alone:
                break
        return batch


def _prune(queue: list[Entry]) -> bool:
    """Drop cancelled tasks from the head of a queue, and return whether a task remains."""
    while queue and queue[0][2].state != TASK_READY:
        heappop(queue)
    return bool(queue)


def _full_batches(variant: Variant, pool: Pool) -> int:
    """Items in one full batch on every lane of a pool."""
    lanes = pool.nodes * pool.slots if pool.faas is None else pool.faas.concurrency_max
    return lanes * variant.profile.items_max


_CAPABILITIES: Final = Capabilities(batches=True, mixed_pools=True, serverless=True)
REFERENCE: Final = PolicyKind(Reference, Config, _CAPABILITIES)

REFERENCES: Final[Mapping[str, Config]] = {
    "edf, no admission": Config(order="edf"),
    "fastest build": Config(order="edf", fastest_only=True),
    **{f"fifo, {n} batches": Config(queue_batches=n) for n in QUEUE_BATCHES},
}
