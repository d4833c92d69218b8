"""Shortest job first (SJF): the task with the least expected time, to the next free node.

Without preemption, which is what the field calls SJF. The name is that of the *shortest remaining
time first* policy of "Making the Most of Serverless Accelerators" (Berkeley thesis, 2022, chapter
6): work on an accelerator cannot be interrupted, so the remaining time of a queued task is its
whole expected time. The mean wait is short; a long function starves while short ones keep arriving.

The thesis's printed trace can only come from a scheduler that knows the future: it lets a node idle
because a shorter request is about to arrive. `clairvoyant=True` is that variant: requests are
announced ahead, and the shortest one blocks the queue until it arrives. The default is causal.
Cost per decision: O(log queue).

>>> from headgate.policies import find_policy
>>> find_policy("srtf").config().clairvoyant
False
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import final

from headgate.core.policy import (
    Capabilities,
    Context,
    LazyDeletions,
    Policy,
    PolicyConfig,
    PolicyKind,
)
from headgate.core.records import STAGES_MAX, Node, Task
from headgate.core.states import TaskState


@dataclass(frozen=True)
class Config(PolicyConfig):
    """Settings of `srtf`."""

    clairvoyant: bool = False  # consider announced requests, and wait for them


@final
class Srtf(Policy):
    """A heap ordered by expected time, then arrival, then id."""

    def __init__(self, context: Context, config: Config) -> None:
        super().__init__(context, config)
        self._is_clairvoyant = config.clairvoyant
        self._heap: list[tuple[int, int, int]] = []  # (expected ns, arrival ns, task id)
        self._ready: dict[int, Task] = {}  # arrived and waiting, by task id
        self._expected: set[int] = set()  # announced, not yet arrived, by task id
        self._withdrawals = LazyDeletions()

    def on_announced(self, request_id: int, pipeline_id: int, arrival_ns: int) -> None:
        if not self._is_clairvoyant:
            return
        stages = self.view.app.pipelines[pipeline_id].stages
        for index, stage in enumerate(stages):
            if not stage.after:
                task_id = request_id * STAGES_MAX + index
                self._expected.add(task_id)
                heappush(self._heap, (stage.function.reference_exec_ns, arrival_ns, task_id))

    def on_task_ready(self, task: Task) -> None:
        self._ready[task.id] = task
        if task.id in self._expected:
            self._expected.discard(task.id)
        else:
            heappush(
                self._heap, (task.function.reference_exec_ns, task.request.arrival_ns, task.id)
            )
        self._serve()

    def on_rejected_early(self, request_id: int, pipeline_id: int) -> None:
        for index in range(len(self.view.app.pipelines[pipeline_id].stages)):
            self._expected.discard(request_id * STAGES_MAX + index)
        self._serve()

    def on_task_withdrawn(self, task: Task) -> None:
        self._ready.pop(task.id, None)  # `_serve` may have removed it already
        if self._withdrawals.add(len(self._heap)):
            known = self._ready.keys() | self._expected
            self._heap[:] = [entry for entry in self._heap if entry[2] in known]
            heapify(self._heap)
        self._serve()

    def on_capacity(self, node: Node) -> None:
        self._serve()

    def _serve(self) -> None:
        heap = self._heap
        free = self.view.free_nodes
        while heap and free:
            task_id = heap[0][2]
            task = self._ready.get(task_id)
            if task is None:
                if task_id in self._expected:
                    return  # it has not arrived yet, and nothing may overtake it
                heappop(heap)
                continue
            node = self.view.first_free(task.function.id)
            if node is None:
                return
            heappop(heap)
            del self._ready[task_id]
            if task.state == TaskState.READY:
                self.orders.dispatch([task], node)


POLICY = PolicyKind(Srtf, Config, Capabilities(clairvoyance=True))
