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
    """Asks the pool's Broker for nodes, and gives them back when it has no work for them.

    It uses its peers' instances as well as its own: whether one is busy is for its node to say.
    """

    def __init__(self, context: Context, config: PolicyConfig) -> None:
        super().__init__(context, config)
        self._queues: list[deque[Task]] = [deque() for _ in self.view.app.functions]
        self._asked: dict[int, Instance] = {}  # by function: an instance that is to be started
        self._mine: dict[int, Instance] = {}

    def on_task_ready(self, task: Task) -> None:
        self._queues[task.function.id].append(task)
        self._serve(task.function.id)

    def on_task_withdrawn(self, task: Task) -> None:
        self._serve(task.function.id)

    def on_instance_started(self, instance: Instance) -> None:
        if self._asked.get(instance.variant.function_id) is instance:
            del self._asked[instance.variant.function_id]
            self._mine[instance.id] = instance

    def on_instance_gone(self, instance: Instance) -> None:
        self._mine.pop(instance.id, None)
        function_id = instance.variant.function_id
        if self._asked.get(function_id) is instance:
            del self._asked[function_id]
            self._serve(function_id)

    def on_capacity(self, node: Node) -> None:
        for function_id in range(len(self._queues)):
            self._serve(function_id)

    def _serve(self, function_id: int) -> None:
        while (task := self._head(function_id)) is not None:
            instance = self._idle_instance(function_id)
            if instance is None or instance.node is None:
                if function_id not in self._asked:
                    self._ask(function_id)
                return
            self._queues[function_id].popleft()
            self.orders.dispatch([task], instance.node, instance.variant)
        self._give_back(function_id)

    def _head(self, function_id: int) -> Task | None:
        queue = self._queues[function_id]
        while queue and queue[0].state != TaskState.READY:
            queue.popleft()
        return queue[0] if queue else None

    def _idle_instance(self, function_id: int) -> Instance | None:
        for instance in self.view.instances.values():
            node = instance.node
            is_free = node is not None and node.id in self.view.free_nodes
            is_ours = instance.variant.function_id == function_id
            if is_free and is_ours and instance.state == InstanceState.IDLE:
                return instance
        return None

    def _ask(self, function_id: int) -> None:
        variant = self.view.app.functions[function_id].variants[0]
        pool = self.view.app.pools[variant.pool_ids[0]]
        self._asked[function_id] = self.orders.start_anywhere(variant, pool)

    def _give_back(self, function_id: int) -> None:
        """Nobody waits: call off what is still to be started, and stop what is idle."""
        asked = self._asked.pop(function_id, None)
        if asked is not None:
            self.orders.stop(asked)
        for instance in list(self._mine.values()):
            is_idle = instance.state == InstanceState.IDLE
            if is_idle and instance.variant.function_id == function_id:
                del self._mine[instance.id]
                self.orders.stop(instance)


SPILL = PolicyKind(Spill, takes=Takes(mixed_pools=True, serverless=True))
SHARE = PolicyKind(Share, takes=Takes(many_schedulers=True))
