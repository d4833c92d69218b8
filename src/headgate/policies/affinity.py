"""Fair queueing by virtual time per client, with a penalty for nodes without the weights.

The *affinity* policy of the kernel-as-a-service pool (Pemberton et al., arXiv 2212.08146; rule read
from its public repository): each client has a virtual time that grows by the expected time of the
tasks it is served. When a node becomes free, the client with the least virtual time is served; a
client whose function is not resident on that node has `miss_penalty` expected times added for the
comparison. So fairness dominates in the long run and locality in the short run. A client that was
idle rejoins at the least virtual time of the active ones, so idling earns no credit. Ties go to the
client served longest ago.

With `batch_max` above 1 a client's tasks of the same function are batched. Cost per decision:
O(clients with work waiting).

>>> from headgate.policies import find_policy
>>> find_policy("affinity").config().miss_penalty
10.0
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import final

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
from headgate.core.records import Node, Task
from headgate.core.states import TaskState
from headgate.planning.dispatch.batching import take_batch


@dataclass(frozen=True)
class Config(PolicyConfig):
    """Settings of `affinity`."""

    # In expected times of the task.
    miss_penalty: float = field(default=10.0, metadata=NOT_NEGATIVE)
    # Items per batch, up to the largest batch of the function.
    batch_max: int = field(default=1, metadata=bounded(ge=1))


@final
class _Flow:
    """The queue of one client and function, with its virtual time."""

    __slots__ = ("queue", "served_last", "virtual_ns", "withdrawals")

    def __init__(self) -> None:
        self.queue: deque[Task] = deque()
        self.withdrawals = LazyDeletions()
        self.virtual_ns = 0.0
        self.served_last = 0


@final
class Affinity(Policy):
    """A flow per client and function; the flow with the least virtual time is served next."""

    def __init__(self, context: Context, config: Config) -> None:
        super().__init__(context, config)
        self._miss_penalty = config.miss_penalty
        self._batch_max = config.batch_max
        self._flows: dict[tuple[int, int], _Flow] = {}
        self._busy: dict[tuple[int, int], _Flow] = {}  # flows with tasks waiting
        self._base_ns = 0.0
        self._dispatches = 0

    def on_task_ready(self, task: Task) -> None:
        self._join(task).queue.append(task)
        self._serve()

    def on_task_returned(self, task: Task, reason: int | None) -> None:
        self._join(task).queue.appendleft(task)
        self._serve()

    def on_task_withdrawn(self, task: Task) -> None:
        flow = self._flows[task.request.client, task.function.id]
        flow.withdrawals.withdraw_from(flow.queue)

    def on_capacity(self, node: Node) -> None:
        self._serve()

    def _join(self, task: Task) -> _Flow:
        key = (task.request.client, task.function.id)
        flow = self._flows.get(key)
        if flow is None:
            flow = self._flows[key] = _Flow()
        if key not in self._busy:
            flow.virtual_ns = max(flow.virtual_ns, self._base_ns)
            self._busy[key] = flow
        return flow

    def _serve(self) -> None:
        for node in list(self.view.free_nodes.values()):
            while self._busy and node.id in self.view.free_nodes:
                key = self._choose(node)
                if key is None:
                    break
                self._send(key, node)

    def _choose(self, node: Node) -> tuple[int, int] | None:
        best: tuple[int, int] | None = None
        best_rank = (0.0, 0)
        for key in list(self._busy):
            flow = self._busy[key]
            queue = flow.queue
            while queue and queue[0].state != TaskState.READY:
                queue.popleft()
            if not queue:
                del self._busy[key]
                continue
            function = queue[0].function
            if not self.view.can_take(node, function.id):
                continue
            virtual_ns = flow.virtual_ns
            if not self.view.is_resident(node, function.id):
                virtual_ns += self._miss_penalty * function.reference_exec_ns
            rank = (virtual_ns, flow.served_last)
            if best is None or rank < best_rank:
                best, best_rank = key, rank
        return best

    def _send(self, key: tuple[int, int], node: Node) -> None:
        flow = self._busy[key]
        self._base_ns = min(f.virtual_ns for f in self._busy.values())
        batch = take_batch(flow.queue, node, self._batch_max)
        weight = self.view.app.clients[key[0]].weight
        flow.virtual_ns += sum(t.function.reference_exec_ns for t in batch) / weight
        self._dispatches += 1
        flow.served_last = self._dispatches
        if not flow.queue:
            del self._busy[key]
        self.orders.dispatch(batch, node)


POLICY = PolicyKind(Affinity, Config, Capabilities(batches=True, mixed_pools=True))
