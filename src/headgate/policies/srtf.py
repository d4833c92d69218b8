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

from headgate.core.model import Function
from headgate.core.policy import Capabilities, Context, PolicyKind
from headgate.policies._clairvoyant import ClairvoyantConfig, ClairvoyantQueue


@dataclass(frozen=True)
class Config(ClairvoyantConfig):
    """Settings of `srtf`."""


@final
class Srtf(ClairvoyantQueue):
    """A heap ordered by expected time, then arrival, then id."""

    def __init__(self, context: Context, config: Config) -> None:
        super().__init__(context, config)
        self._heap: list[tuple[int, int, int]] = []  # (expected ns, arrival ns, task id)

    def enqueue(self, function: Function, arrival_ns: int, task_id: int) -> None:
        heappush(self._heap, (function.reference_exec_ns, arrival_ns, task_id))

    def queue_length(self) -> int:
        return len(self._heap)

    def sweep(self) -> None:
        self._heap[:] = [entry for entry in self._heap if self.is_known(entry[2])]
        heapify(self._heap)

    def serve(self) -> None:
        heap = self._heap
        while heap and self.view.free_nodes:
            task_id = heap[0][2]
            task = self.waiting.get(task_id)
            if task is None:
                if task_id in self.announced:
                    return  # it has not arrived yet, and nothing may overtake it
                heappop(heap)
                continue
            node = self.view.first_free(task.function.id)
            if node is None:
                return
            heappop(heap)
            self.send(task, node)


POLICY = PolicyKind(Srtf, Config, Capabilities(clairvoyance=True))
