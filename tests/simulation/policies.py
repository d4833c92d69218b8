"""Policies for tests: spillover to a FaaS platform, a shared pool, and random actions."""

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
from headgate.core.states import InstanceState, Outcome, Settlement, TaskState


@final
class Spill(Policy):
    """First come, first served, on the first free node; without one a task goes to the platform."""

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
    """Requests nodes from the pool's Broker and releases them when it has no work for them.

    It uses the instances of its peers as well: a node refuses a batch if an instance is busy.
    """

    def __init__(self, context: Context, config: PolicyConfig) -> None:
        super().__init__(context, config)
        self._queues: list[deque[Task]] = [deque() for _ in self.view.app.functions]
        self._requested: dict[int, Instance] = {}  # by function id: an instance to be started
        self._own: dict[int, Instance] = {}

    def on_task_ready(self, task: Task) -> None:
        self._queues[task.function.id].append(task)
        self._serve(task.function.id)

    def on_task_withdrawn(self, task: Task) -> None:
        self._serve(task.function.id)

    def on_instance_started(self, instance: Instance) -> None:
        if self._requested.get(instance.variant.function_id) is instance:
            del self._requested[instance.variant.function_id]
            self._own[instance.id] = instance

    def on_instance_gone(self, instance: Instance) -> None:
        self._own.pop(instance.id, None)
        function_id = instance.variant.function_id
        if self._requested.get(function_id) is instance:
            del self._requested[function_id]
            # After a pause: if starts fail at once, retries would never leave this instant.
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
                if function_id not in self._requested and not self._is_pausing(function_id):
                    self._request(function_id)
                return
            self._queues[function_id].popleft()
            self.orders.dispatch([task], instance.node, instance.variant)
        self._release(function_id)

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

    def _request(self, function_id: int) -> None:
        variant = self.view.app.functions[function_id].variants[0]
        pool = self.view.app.pools[variant.pool_ids[0]]
        if variant.id in self.view.load_failures:
            return
        self._requested[function_id] = self.orders.start_anywhere(variant, pool)

    def _release(self, function_id: int) -> None:
        """Without tasks in the queue, cancel a pending start and stop idle instances."""
        requested = self._requested.pop(function_id, None)
        if requested is not None:
            self.orders.stop(requested)
        for instance in list(self._own.values()):
            is_idle = instance.state == InstanceState.IDLE
            if is_idle and instance.variant.function_id == function_id:
                del self._own[instance.id]
                self.orders.stop(instance)


@final
class RandomActions(Policy):
    """Issues random actions at any time, legal or not; a timer makes sure that all requests end.

    Illegal actions must raise and change nothing. Legal actions must not break anything.
    """

    def on_arrival(self, request: Request) -> None:
        if self.rng.random() < 0.05:
            self.orders.reject(request, Settlement(Outcome.REJECTED, "at random"))

    def on_task_ready(self, task: Task) -> None:
        if ("tick", 0) not in self.view.timers:
            self.orders.set_timer("tick", self.view.now_ns + 3 * MILLISECOND_NS)
        self._act()

    def on_capacity(self, node: Node) -> None:
        self._act()

    def on_pool_available(self, pool_id: int) -> None:
        self._act()

    def on_instance_started(self, instance: Instance) -> None:
        self._act()

    def on_instance_gone(self, instance: Instance) -> None:
        self._act()

    def on_batch_ended(self, batch: Batch, took_ns: int) -> None:
        self._act()

    def on_node_lost(self, node: Node) -> None:
        self._act()

    def on_task_withdrawn(self, task: Task) -> None:
        self._act()

    def on_timer(self, name: str, number: int) -> None:
        """Try to dispatch all tasks, so that none waits for ever."""
        for request in list(self.view.requests.values()):
            for task in list(request.tasks):
                self._try(self._dispatch, [task])
        if self.view.requests:
            self.orders.set_timer("tick", self.view.now_ns + 3 * MILLISECOND_NS)

    def _act(self) -> None:
        self.orders.report_work(self.rng.randrange(3))
        tasks = [task for request in self.view.requests.values() for task in request.tasks]
        instances = list(self.view.instances.values())
        if tasks:
            self._try(
                self._dispatch, self.rng.sample(tasks, min(len(tasks), self.rng.choice((1, 3))))
            )
        if tasks and self.rng.random() < 0.1:
            self._try(self.orders.expire, self.rng.choice(tasks).request, "at random")
        if instances and self.rng.random() < 0.3:
            order = self.rng.choice((self.orders.stop, self.orders.evict, self.orders.load))
            self._try(order, self.rng.choice(instances))
        if self.view.nodes and self.rng.random() < 0.15:
            node = self.rng.choice(list(self.view.nodes.values()))
            variant = self.rng.choice(self.view.app.variants)
            self._try(self.orders.start, variant, node, self.rng.choice((0, 0, 1, 2)))

    def _dispatch(self, tasks: list[Task]) -> None:
        targets: list[Node | Pool] = [*self.view.nodes.values(), *self.view.app.pools]
        target = self.rng.choice(targets)
        if isinstance(target, Node):
            choices = [None, *target.by_variant.get(self.rng.randrange(4), ())]
            shape_id = self.rng.choice((None, None, 0, 1, 2))
            self.orders.dispatch(tasks, target, None, self.rng.choice(choices), shape_id)
        else:
            self.orders.dispatch_to_pool(tasks, target)

    def _try(self, order: Callable[..., object], *arguments: object) -> None:
        with suppress(PolicyError):
            order(*arguments)


EVERYTHING = Capabilities(batches=True, mixed_pools=True, serverless=True)
RANDOM_ACTIONS = PolicyKind(RandomActions, capabilities=EVERYTHING)
SPILL = PolicyKind(Spill, capabilities=Capabilities(mixed_pools=True, serverless=True))
SHARE = PolicyKind(Share, capabilities=Capabilities(multi_gateway=True))
