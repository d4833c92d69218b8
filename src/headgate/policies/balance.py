"""First come, first served, to the next node that is free.

The *balance* policy of "Making the Most of Serverless Accelerators" (Berkeley thesis, 2022,
chapter 6) and of the KaaS pool: one FIFO queue that ignores residency of weights and clients. A
free node is never idle while a task is queued. Neither cold starts nor fairness are considered, so
a client that sends more gets more. On nodes of several kinds it is the FIFO of the thesis's chapter
4: the head goes to whichever node is free next of those that can run it, fast or slow, and what is
behind it waits with it.

With `batch_max` above 1 it batches consecutive tasks of the same function at the head of the queue.
Cost per decision: O(1).

>>> from headgate.policies import find_policy
>>> find_policy("balance").config(batch_max=4).batch_max
4
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import final

from headgate.core.policy import (
    Capabilities,
    Context,
    LazyDeletions,
    Policy,
    PolicyConfig,
    PolicyKind,
    bounded,
)
from headgate.core.records import Node, Task
from headgate.core.states import TASK_READY
from headgate.planning.dispatch.batching import take_batch


@dataclass(frozen=True)
class Config(PolicyConfig):
    """Settings of `balance`."""

    # Items per batch, up to the largest batch of the function.
    batch_max: int = field(default=1, metadata=bounded(ge=1))


@final
class Balance(Policy):
    """One FIFO queue; its head goes to the node that has been free longest."""

    def __init__(self, context: Context, config: Config) -> None:
        super().__init__(context, config)
        self._batch_max = config.batch_max
        self._queue: deque[Task] = deque()
        self._withdrawals = LazyDeletions()

    def on_task_ready(self, task: Task) -> None:
        self._queue.append(task)
        if self.view.free_nodes:
            self._serve()

    def on_task_returned(self, task: Task, reason: int | None) -> None:
        self._queue.appendleft(task)  # it has queued once already
        self._serve()

    def on_task_withdrawn(self, task: Task) -> None:
        self._withdrawals.withdraw_from(self._queue)

    def on_capacity(self, node: Node) -> None:
        if self._queue:
            self._serve()

    def _serve(self) -> None:
        queue = self._queue
        free = self.view.free_nodes
        while queue and free:
            task = queue[0]
            if task.state != TASK_READY:
                queue.popleft()
                continue
            node = self.view.first_free(task.function.id)
            if node is None:
                return
            self.orders.dispatch(take_batch(queue, node, self._batch_max), node)


POLICY = PolicyKind(
    Balance, Config, Capabilities(batches=True, mixed_pools=True, shares_nodes=True)
)
