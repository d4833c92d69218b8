"""Base class of the policies that order tasks by expected time and may know the future.

The printed traces of "Making the Most of Serverless Accelerators" (Berkeley thesis, 2022) can only
come from schedulers that know which requests will arrive. With `clairvoyant=True` a request that is
announced counts as queued, and blocks what is ordered behind it until it arrives.
"""

from __future__ import annotations

from dataclasses import dataclass

from headgate.core.model import Function
from headgate.core.policy import Context, LazyDeletions, Policy, PolicyConfig
from headgate.core.records import STAGES_MAX, Node, Task
from headgate.core.states import TaskState


@dataclass(frozen=True)
class ClairvoyantConfig(PolicyConfig):
    """Settings that these policies share."""

    clairvoyant: bool = False  # consider announced requests, and wait for them


class ClairvoyantQueue(Policy):
    """Knows the tasks that wait and those that are announced, by task id.

    A policy queues the ids in an order of its own: `enqueue` adds one, `serve` dispatches what can
    be, and `sweep` removes the ids that are neither waiting nor announced, which `serve` skips too.
    """

    def __init__(self, context: Context, config: ClairvoyantConfig) -> None:
        super().__init__(context, config)
        self._is_clairvoyant = config.clairvoyant
        self._withdrawals = LazyDeletions()
        self.waiting: dict[int, Task] = {}  # arrived, by task id
        self.announced: set[int] = set()  # not yet arrived, by task id

    def enqueue(self, function: Function, arrival_ns: int, task_id: int) -> None:
        """Queue a task that waits or is announced."""
        raise NotImplementedError

    def serve(self) -> None:
        """Dispatch tasks while nodes are free."""
        raise NotImplementedError

    def queue_length(self) -> int:
        """Number of ids in the queue."""
        raise NotImplementedError

    def sweep(self) -> None:
        """Remove the ids that are not known any more."""
        raise NotImplementedError

    def is_known(self, task_id: int) -> bool:
        """Whether a task waits or is announced."""
        return task_id in self.waiting or task_id in self.announced

    def on_announced(self, request_id: int, pipeline_id: int, arrival_ns: int) -> None:
        """Queue the first stages of the request, if the policy may know the future."""
        if not self._is_clairvoyant:
            return
        for index, stage in enumerate(self.view.app.pipelines[pipeline_id].stages):
            if not stage.after:
                task_id = request_id * STAGES_MAX + index
                self.announced.add(task_id)
                self.enqueue(stage.function, arrival_ns, task_id)

    def on_task_ready(self, task: Task) -> None:
        """Queue the task, unless it was queued when it was announced."""
        self.waiting[task.id] = task
        if task.id in self.announced:
            self.announced.discard(task.id)
        else:
            self.enqueue(task.function, task.request.arrival_ns, task.id)
        self.serve()

    def on_rejected_early(self, request_id: int, pipeline_id: int) -> None:
        """Forget an announced request: nothing waits for it any more."""
        for index in range(len(self.view.app.pipelines[pipeline_id].stages)):
            self.announced.discard(request_id * STAGES_MAX + index)
        self.serve()

    def on_task_withdrawn(self, task: Task) -> None:
        """Forget the task, and sweep the queue when due."""
        self.waiting.pop(task.id, None)  # `serve` may have removed it already
        if self._withdrawals.add(self.queue_length()):
            self.sweep()
        self.serve()

    def on_capacity(self, node: Node) -> None:
        """Serve the queue."""
        self.serve()

    def send(self, task: Task, node: Node) -> None:
        """Dispatch a task that the policy has taken from its queue."""
        del self.waiting[task.id]
        if task.state == TaskState.READY:
            self.orders.dispatch([task], node)
