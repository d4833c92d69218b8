"""Two policies for tests: one that spills over to a function platform, one that shares a pool."""

from __future__ import annotations

from collections import deque
from typing import final

from headgate.core.lifecycle import InstanceState, TaskState
from headgate.core.policy import Context, Policy, PolicyConfig, PolicyKind, Takes
from headgate.core.records import Instance, Node, Task


@final
class Spill(Policy):
    """First come, first served, on the first free node; what finds none goes to the platform."""

    def __init__(self, context: Context, config: PolicyConfig) -> None:
        super().__init__(context, config)
        self._queue: deque[Task] = deque()

    def on_task_ready(self, task: Task) -> None:
        self._queue.append(task)
        self._serve()

    def on_capacity(self, node: Node) -> None:
        self._serve()

    def on_pool_open(self, pool_id: int) -> None:
        self._serve()

    def _serve(self) -> None:
        waiting = [task for task in self._queue if task.state == TaskState.READY]
        self._queue.clear()
        for task in waiting:
            if not self._send(task):
                self._queue.append(task)

    def _send(self, task: Task) -> bool:
        node = self.view.first_free(task.function.id)
        if node is not None:
            self.orders.dispatch([task], node)
            return True
        for pool in self.view.app.pools:
            if pool.serverless is not None and self.view.is_pool_open(pool.id):
                self.orders.dispatch_to_pool([task], pool)
                return True
        return False


@final
class Share(Policy):
    """Asks the pool's Broker for nodes and gives back what it has no work for.

    One instance to a node, whoever started it; whether a peer keeps it busy is for the node to
    say.
    """

    def __init__(self, context: Context, config: PolicyConfig) -> None:
        super().__init__(context, config)
        self._queues: list[deque[Task]] = [deque() for _ in self.view.app.functions]
        self._asked: dict[int, Instance] = {}  # by function: an instance that is to be started

    def on_task_ready(self, task: Task) -> None:
        self._queues[task.function.id].append(task)
        self._serve(task.function.id)

    def on_task_withdrawn(self, task: Task) -> None:
        """Call off what is started for nobody."""
        asked = self._asked.get(task.function.id)
        if self._head(task.function.id) is None and asked is not None:
            del self._asked[task.function.id]
            self.orders.stop(asked)

    def on_instance_started(self, instance: Instance) -> None:
        self._forget(instance)
        self._serve(instance.variant.function_id)

    def on_instance_gone(self, instance: Instance) -> None:
        self._forget(instance)
        self._serve(instance.variant.function_id)

    def on_capacity(self, node: Node) -> None:
        for function_id in range(len(self._queues)):
            self._serve(function_id)

    def _serve(self, function_id: int) -> None:
        while (task := self._head(function_id)) is not None:
            instance = self._idle_instance(function_id)
            if instance is None or instance.node is None:
                self._ask_for_more(function_id)
                return
            self._queues[function_id].popleft()
            self.orders.dispatch([task], instance.node, instance.variant)

    def _head(self, function_id: int) -> Task | None:
        queue = self._queues[function_id]
        while queue and queue[0].state != TaskState.READY:
            queue.popleft()
        return queue[0] if queue else None

    def _idle_instance(self, function_id: int) -> Instance | None:
        for instance in self.view.instances.values():
            if instance.variant.function_id == function_id and self._is_idle(instance):
                return instance
        return None

    def _is_idle(self, instance: Instance) -> bool:
        node = instance.node
        is_free = node is not None and node.id in self.view.free_nodes
        return is_free and instance.state == InstanceState.IDLE

    def _ask_for_more(self, function_id: int) -> None:
        """Start one more, and stop an idle one that is of no use to us: the pool may be small."""
        if function_id in self._asked:
            return
        for instance in list(self.view.instances.values()):
            if self._is_idle(instance) and self._head(instance.variant.function_id) is None:
                self.orders.stop(instance)
                break
        variant = self.view.app.functions[function_id].variants[0]
        pool = self.view.app.pools[variant.pool_ids[0]]
        self._asked[function_id] = self.orders.start_anywhere(variant, pool)

    def _forget(self, instance: Instance) -> None:
        if self._asked.get(instance.variant.function_id) is instance:
            del self._asked[instance.variant.function_id]


SPILL = PolicyKind(Spill, takes=Takes(mixed_pools=True, serverless=True))
SHARE = PolicyKind(Share, takes=Takes(many_schedulers=True))
