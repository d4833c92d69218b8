"""An instance per request at a time, started wherever there is memory, whatever the kind of node.

AWS Lambda on heterogeneous nodes, as "Making the Most of Serverless Accelerators" (Berkeley thesis
EECS-2022-88, chapter 4) simulates it for comparison: an instance runs one request at a time, never
a batch, and nobody asks whether an objective can be met. A task takes an idle instance of its
function, the one used last, so that others grow old; else a new one is started on a node with
memory for it, whichever kind that is; else the task waits. Rules marked [own] are ours: tasks wait
in the order in which they became ready, but one that no free node can run is passed over [own].
Idle instances of other functions give way to a new one [own: the cluster is fixed].
Cost per decision: O(functions + instances of the function + free nodes).

>>> from headgate.policies import find_policy
>>> find_policy("lambda_like").capabilities.batches
False
"""

from __future__ import annotations

from collections import deque
from operator import itemgetter
from typing import final

from headgate.core.model import Variant
from headgate.core.policy import (
    Capabilities,
    Context,
    LazyDeletions,
    Policy,
    PolicyConfig,
    PolicyKind,
)
from headgate.core.records import Instance, Node, Task
from headgate.core.states import INSTANCE_IDLE, ON_DEVICE, ON_HOST, TASK_READY


@final
class LambdaLike(Policy):
    """A queue per function; the head that has waited longest goes first."""

    def __init__(self, context: Context, config: PolicyConfig) -> None:
        super().__init__(context, config)
        self._queues: list[deque[tuple[int, Task]]] = [deque() for _ in self.view.app.functions]
        self._withdrawals = [LazyDeletions() for _ in self.view.app.functions]
        self._enqueued = 0  # numbers the tasks in the order in which they became ready

    def on_task_ready(self, task: Task) -> None:
        self._enqueued += 1
        self._queues[task.function.id].append((self._enqueued, task))
        self._serve()

    def on_task_returned(self, task: Task, reason: int | None) -> None:
        self._queues[task.function.id].appendleft((0, task))  # it has waited once already
        self._serve()

    def on_task_withdrawn(self, task: Task) -> None:
        queue = self._queues[task.function.id]
        if self._withdrawals[task.function.id].add(len(queue)):
            waiting = [each for each in queue if each[1].state == TASK_READY]
            queue.clear()
            queue.extend(waiting)

    def on_capacity(self, node: Node) -> None:
        self._serve()

    def _serve(self) -> None:
        """Send heads of queues, the oldest first, as long as one of them finds an instance."""
        while self.view.free_nodes:
            heads = [head for queue in self._queues if (head := _head(queue)) is not None]
            heads.sort(key=itemgetter(0))
            if not any(self._send(task) for _, task in heads):
                return

    def _send(self, task: Task) -> bool:
        """Send a task, the head of its queue, to an idle instance or to a new one."""
        instance = self._idle_instance(task)
        if instance is None:
            place = self._place(task)
            if place is None:
                return False
            node, variant = place
            instance = node.instances.get(variant.id)
            if instance is not None and instance.residency == ON_HOST:
                self.orders.load(instance)
            else:
                instance = self.orders.start(variant, node)
        self._queues[task.function.id].popleft()
        assert instance.node is not None
        self.orders.dispatch([task], instance.node, instance.variant, instance)
        return True

    def _idle_instance(self, task: Task) -> Instance | None:
        """The idle instance of the function, on a free node, that was used last."""
        best: Instance | None = None
        for variant in task.function.variants:
            if task.request.items > variant.items_max():
                continue
            for instance in self.view.instances_of[variant.id].values():
                node = instance.node
                if (
                    node is not None
                    and instance.state == INSTANCE_IDLE
                    and instance.residency == ON_DEVICE
                    and not instance.is_preparing
                    and node.id in self.view.free_nodes
                    and self.view.has_compute(node, variant, instance.shape_id)
                    and (best is None or instance.last_used_ns > best.last_used_ns)
                ):
                    best = instance
        return best

    def _place(self, task: Task) -> tuple[Node, Variant] | None:
        """The node that has been free longest of those with memory for one more instance."""
        for node in self.view.free_nodes.values():
            for variant in self.view.all_variants_by_pool[node.pool.id][task.function.id]:
                if (
                    task.request.items <= variant.items_max()
                    and variant.id not in self.view.load_failures
                    and self.view.can_make_room(node, variant)
                    and self.view.has_compute(node, variant)
                ):
                    return node, variant
        return None


def _head(queue: deque[tuple[int, Task]]) -> tuple[int, Task] | None:
    while queue and queue[0][1].state != TASK_READY:
        queue.popleft()
    return queue[0] if queue else None


POLICY = PolicyKind(LambdaLike, PolicyConfig, Capabilities(mixed_pools=True))
