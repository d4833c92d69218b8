"""Batches that grow by one while they are fast enough, and shrink by a tenth when they are not.

Crankshaw et al., "Clipper: A Low-Latency Online Prediction Serving System" (NSDI 2017). Every model
has a queue and a largest batch size, which adaptive batching finds: additive increase while the
latency of full batches is within the objective, multiplicative decrease when one exceeds it. A free
replica takes up to that many requests at once; there is no admission control, and nothing is
dropped. Rules marked [own] are ours. The size is kept by variant, since a CPU and a GPU differ
[own]. Clipper knows models, not pipelines: a stage has the part of its pipeline's objective that it
takes of the longest path through it [own]. Replicas are not placed by Clipper: a node that is free
runs the model whose oldest request has waited longest, and loads it first if it must [own].
Cost per decision: O(functions + free nodes).

>>> from headgate.policies import find_policy
>>> find_policy("clipper").config().decrease
0.9
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import final

from headgate.core.clock import NEVER_NS
from headgate.core.model import App
from headgate.core.policy import (
    POSITIVE,
    SHARE,
    Capabilities,
    Context,
    LazyDeletions,
    Policy,
    PolicyConfig,
    PolicyKind,
)
from headgate.core.records import Batch, Node, Task
from headgate.core.states import BATCH_FINISHED, TASK_READY
from headgate.planning.dispatch.batching import take_batch


@dataclass(frozen=True)
class Config(PolicyConfig):
    """Settings of `clipper`."""

    # Items that are added to the largest batch after a full one that was fast enough.
    increase: float = field(default=1.0, metadata=POSITIVE)
    # Factor on the largest batch after one that was too slow.
    decrease: float = field(default=0.9, metadata=SHARE)


@final
class Clipper(Policy):
    """A queue per function, and a largest batch size per variant."""

    def __init__(self, context: Context, config: Config) -> None:
        super().__init__(context, config)
        app = self.view.app
        self._increase = config.increase
        self._decrease = config.decrease
        self._queues: list[deque[Task]] = [deque() for _ in app.functions]
        self._withdrawals = [LazyDeletions() for _ in app.functions]
        self._targets_ns = _targets_ns(app)
        self._sizes = [1.0 for _ in app.variants]
        self._enqueued: dict[int, int] = {}  # by task id: its place in the order of readiness
        self._count = 0

    def on_task_ready(self, task: Task) -> None:
        self._count += 1
        self._enqueued[task.id] = self._count
        self._queues[task.function.id].append(task)
        if not task.stage.after:  # else `on_batch_ended` follows, and all of them share a batch
            self._serve()

    def on_task_returned(self, task: Task, reason: int | None) -> None:
        self._enqueued[task.id] = 0
        self._queues[task.function.id].appendleft(task)
        self._serve()

    def on_task_withdrawn(self, task: Task) -> None:
        self._enqueued.pop(task.id, None)
        self._withdrawals[task.function.id].withdraw_from(self._queues[task.function.id])

    def on_capacity(self, node: Node) -> None:
        self._serve()

    def on_batch_ended(self, batch: Batch, took_ns: int) -> None:
        if batch.state == BATCH_FINISHED:
            id, size = batch.variant.id, self._sizes[batch.variant.id]
            if took_ns > self._targets_ns[batch.variant.function_id]:
                self._sizes[id] = max(1.0, size * self._decrease)
            elif batch.items >= int(size):
                self._sizes[id] = min(float(batch.variant.items_max()), size + self._increase)
        self._serve()

    def _serve(self) -> None:
        """Send batches while a free node can run the head of some queue, the oldest head first."""
        while self.view.free_nodes:
            heads = [task for queue in self._queues if (task := _head(queue)) is not None]
            heads.sort(key=lambda task: self._enqueued[task.id])
            for task in heads:
                node = self.view.first_free(task.function.id)
                if node is not None:
                    self._send(task, node)
                    break
            else:
                return

    def _send(self, head: Task, node: Node) -> None:
        variant = node.variants[head.function.id]
        assert variant is not None
        size = max(head.request.items, int(self._sizes[variant.id]))
        batch = take_batch(self._queues[head.function.id], node, size)
        for task in batch:
            del self._enqueued[task.id]
        self.orders.dispatch(batch, node)


def _targets_ns(app: App) -> list[float]:
    """By function: the shortest part of an objective that it has in any pipeline."""
    targets_ns: list[float] = [float(NEVER_NS)] * len(app.functions)
    for pipeline in app.pipelines:
        if pipeline.slo.latency_ns == NEVER_NS:
            continue
        times = [
            float(min(v.exec_ns(1) for v in stage.function.variants)) for stage in pipeline.stages
        ]
        to, on = pipeline.longest_to(times), pipeline.longest_from(times)
        for index, stage in enumerate(pipeline.stages):
            part = times[index] / max(1.0, to[index] + on[index] - times[index])
            id = stage.function.id
            targets_ns[id] = min(targets_ns[id], pipeline.slo.latency_ns * part)
    return targets_ns


def _head(queue: deque[Task]) -> Task | None:
    while queue and queue[0].state != TASK_READY:
        queue.popleft()
    return queue[0] if queue else None


POLICY = PolicyKind(Clipper, Config, Capabilities(batches=True, mixed_pools=True))
