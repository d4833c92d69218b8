"""Policies for tests: one spills over to a platform, one shares a pool, one does as it likes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import final

from headgate.core.clock import MILLISECOND_NS
from headgate.core.errors import PolicyError
from headgate.core.model import Pool
from headgate.core.policy import Capabilities, Context, Policy, PolicyConfig, PolicyKind
from headgate.core.records import Batch, Instance, Node, Request, Task
from headgate.core.states import InstanceState, TaskState


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

    def on_pool_available(self, pool_id: int) -> None:
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
            variant = self.view.variants_by_pool[pool.id][task.function.id]
            if (
                variant is not None
                and self.view.fits_call(task, pool, variant)
                and self.view.is_pool_available(pool.id)
            ):
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
            # Not at once: if starts fail, and in no time, we would ask for ever at this instant.
            self.orders.set_timer("retry", self.view.now_ns + MILLISECOND_NS, function_id)

    def on_timer(self, name: str, number: int) -> None:
        self._serve(number)

    def on_capacity(self, node: Node) -> None:
        for function_id in range(len(self._queues)):
            self._serve(function_id)

    def _serve(self, function_id: int) -> None:
        while (task := self._head(function_id)) is not None:
            instance = self._idle_instance(function_id)
            if instance is None or instance.node is None:
                if function_id not in self._asked and not self._is_pausing(function_id):
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

    def _is_pausing(self, function_id: int) -> bool:
        return ("retry", function_id) in self.view.timers

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


@final
class Wild(Policy):
    """Orders anything at any time, legal or not; but looks again and again, so that all ends.

    What is illegal must raise and change nothing. What is legal must not break anything.
    """

    def on_arrival(self, request: Request) -> None:
        if self.rng.random() < 0.05:
            self.orders.reject(request, "on a whim")

    def on_task_ready(self, task: Task) -> None:
        if ("tick", 0) not in self.view.timers:
            self.orders.set_timer("tick", self.view.now_ns + 3 * MILLISECOND_NS)
        self._play()

    def on_capacity(self, node: Node) -> None:
        self._play()

    def on_pool_available(self, pool_id: int) -> None:
        self._play()

    def on_instance_started(self, instance: Instance) -> None:
        self._play()

    def on_instance_gone(self, instance: Instance) -> None:
        self._play()

    def on_batch_ended(self, batch: Batch, took_ns: int) -> None:
        self._play()

    def on_node_lost(self, node: Node) -> None:
        self._play()

    def on_task_withdrawn(self, task: Task) -> None:
        self._play()

    def on_timer(self, name: str, number: int) -> None:
        """Send everything out, as far as that is possible: nothing waits for ever."""
        for request in list(self.view.requests.values()):
            for task in list(request.tasks):
                self._try(self._dispatch, [task])
        if self.view.requests:
            self.orders.set_timer("tick", self.view.now_ns + 3 * MILLISECOND_NS)

    def _play(self) -> None:
        self.orders.report_work(self.rng.randrange(3))
        tasks = [task for request in self.view.requests.values() for task in request.tasks]
        instances = list(self.view.instances.values())
        if tasks:
            self._try(
                self._dispatch, self.rng.sample(tasks, min(len(tasks), self.rng.choice((1, 3))))
            )
        if tasks and self.rng.random() < 0.1:
            self._try(self.orders.expire, self.rng.choice(tasks).request, "on a whim")
        if instances and self.rng.random() < 0.3:
            order = self.rng.choice((self.orders.stop, self.orders.evict, self.orders.load))
            self._try(order, self.rng.choice(instances))
        if self.view.nodes and self.rng.random() < 0.1:
            node = self.rng.choice(list(self.view.nodes.values()))
            self._try(self.orders.start, self.rng.choice(self.view.app.variants), node)

    def _dispatch(self, tasks: list[Task]) -> None:
        places: list[Node | Pool] = [*self.view.nodes.values(), *self.view.app.pools]
        place = self.rng.choice(places)
        if isinstance(place, Node):
            self.orders.dispatch(tasks, place)
        else:
            self.orders.dispatch_to_pool(tasks, place)

    def _try(self, order: Callable[..., object], *arguments: object) -> None:
        with suppress(PolicyError):
            order(*arguments)


EVERYTHING = Capabilities(batches=True, mixed_pools=True, serverless=True)
WILD = PolicyKind(Wild, capabilities=EVERYTHING)
SPILL = PolicyKind(Spill, capabilities=Capabilities(mixed_pools=True, serverless=True))
SHARE = PolicyKind(Share, capabilities=Capabilities(multi_gateway=True))
