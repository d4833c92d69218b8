"""Small apps and two policies: a FIFO, and one that a test controls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headgate.core.model import (
    App,
    FaasPlatform,
    Function,
    Limits,
    Pipeline,
    Pool,
    Profile,
    Shape,
    Slo,
    Stage,
    Variant,
)
from headgate.core.policy import Context, Policy, PolicyConfig
from headgate.core.records import Batch, Instance, Node, Request, Task
from headgate.core.states import TaskState

CLOUD = Pool(1, "cloud", faas=FaasPlatform(memory_bytes=1))


def make_function(
    id: int = 0,
    *,
    exec_ns: tuple[int, ...] = (10, 15, 18),
    slowdown: tuple[float, ...] = (1.0,),
    start_ns: int = 0,
    memory_bytes: int = 0,
    output_bytes: int = 0,
    shape: Shape = Shape(),  # noqa: B008 - frozen
    concurrency: int = 1,
    pool_ids: tuple[int, ...] = (0,),
    is_idempotent: bool = True,
) -> Function:
    """A function of one variant; both have the same id."""
    profile = Profile(
        exec_ns=exec_ns,
        slowdown=slowdown,
        cold_start_ns=start_ns,
        memory_bytes=memory_bytes,
        output_bytes=output_bytes,
    )
    variant = Variant(id, f"v{id}", id, pool_ids, profile, shape, concurrency)
    return Function(id, f"f{id}", (variant,), is_idempotent)


def make_app(
    *functions: Function,
    stages: Sequence[Stage] = (),
    slo: Slo = Slo(latency_ns=1_000),  # noqa: B008 - frozen
    pools: Sequence[Pool] = (Pool(0, "gpu"),),
    limits: Limits = Limits(),  # noqa: B008 - frozen
) -> App:
    """An app whose one pipeline is `stages`, or else one pipeline for each function."""
    functions = functions or (make_function(),)
    if stages:
        pipelines: tuple[Pipeline, ...] = (Pipeline(0, "p0", tuple(stages), slo),)
    else:
        pipelines = tuple(Pipeline(f.id, f"p{f.id}", (Stage(f),), slo) for f in functions)
    return App(functions, pipelines, tuple(pools), limits=limits)


class Fifo(Policy):
    """First come, first served, on the first free node; one task to a batch."""

    def __init__(self, context: Context, config: PolicyConfig) -> None:
        super().__init__(context, config)
        self.queue: list[Task] = []

    def on_task_ready(self, task: Task) -> None:
        self.queue.append(task)
        self._send()

    def on_capacity(self, node: Node) -> None:
        self._send()

    def _send(self) -> None:
        waiting = [task for task in self.queue if task.state == TaskState.READY]
        self.queue = []
        for task in waiting:
            node = self.view.first_free(task.function.id)
            if node is None:
                self.queue.append(task)
            else:
                self.orders.dispatch([task], node)


class Scripted(Policy):
    """Writes down what it hears and does nothing but what a test tells it to."""

    def __init__(self, context: Context, config: PolicyConfig) -> None:
        super().__init__(context, config)
        self.hooks_called: list[tuple[str, int]] = []
        self.act: Callable[[Scripted], object] | None = None
        self.at_door: Callable[[Request], object] | None = None

    def task(self, id: int) -> Task:
        return self.view.requests[id // 256].tasks[id % 256]

    def send(self, node_id: int, *task_ids: int) -> Batch:
        return self.orders.dispatch([self.task(id) for id in task_ids], self.view.nodes[node_id])

    def on_announced(self, request_id: int, pipeline_id: int, arrival_ns: int) -> None:
        assert self.act is not None
        self.act(self)

    def on_arrival(self, request: Request) -> None:
        if self.at_door is not None:
            self.at_door(request)

    def on_task_ready(self, task: Task) -> None:
        self.hooks_called.append(("ready", task.id))

    def on_task_returned(self, task: Task, reason: int | None) -> None:
        self.hooks_called.append(("returned", task.id))

    def on_task_withdrawn(self, task: Task) -> None:
        self.hooks_called.append(("withdrawn", task.id))

    def on_capacity(self, node: Node) -> None:
        self.hooks_called.append(("capacity", node.id))

    def on_pool_available(self, pool_id: int) -> None:
        self.hooks_called.append(("pool available", pool_id))

    def on_batch_ended(self, batch: Batch, took_ns: int) -> None:
        self.hooks_called.append(("ended", batch.id))

    def on_instance_started(self, instance: Instance) -> None:
        self.hooks_called.append(("started", instance.id))

    def on_instance_gone(self, instance: Instance) -> None:
        self.hooks_called.append(("gone", instance.id))

    def on_node_joined(self, node: Node) -> None:
        self.hooks_called.append(("joined", node.id))

    def on_node_lost(self, node: Node) -> None:
        self.hooks_called.append(("node lost", node.id))

    def on_timer(self, name: str, number: int) -> None:
        self.hooks_called.append((name, number))
