"""Strict round robin: the first request to the first node, the next to the next, and so on.

The *round robin* policy of "Making the Most of Serverless Accelerators" (Berkeley thesis, 2022,
chapter 6). The head of the queue waits for exactly the node whose turn it is, even while others are
idle: pure head-of-line blocking, and the baseline that every other policy should beat. A node that
is down loses its turn, and so does one where the function is in start back-off.
Cost per decision: O(1).

>>> from headgate.policies import find_policy
>>> find_policy("round_robin").capabilities.batches
False
"""

from __future__ import annotations

from collections import deque
from typing import final

from headgate.core.policy import (
    Capabilities,
    Context,
    LazyDeletions,
    Policy,
    PolicyConfig,
    PolicyKind,
)
from headgate.core.records import Node, Task
from headgate.core.states import TaskState


@final
class RoundRobin(Policy):
    """One FIFO queue and an index that cycles through the nodes."""

    def __init__(self, context: Context, config: PolicyConfig) -> None:
        super().__init__(context, config)
        self._queue: deque[Task] = deque()
        self._withdrawals = LazyDeletions()
        self._ring: list[Node] = []  # nodes that are up, in order of id
        self._turn = 0

    def on_node_joined(self, node: Node) -> None:
        before = sum(1 for other in self._ring if other.id < node.id)
        self._ring.insert(before, node)
        if before < self._turn:
            self._turn += 1

    def on_node_lost(self, node: Node) -> None:
        index = self._ring.index(node)
        del self._ring[index]
        if index < self._turn:
            self._turn -= 1
        self._serve()

    def on_task_ready(self, task: Task) -> None:
        self._queue.append(task)
        self._serve()

    def on_task_returned(self, task: Task, reason: int | None) -> None:
        self._queue.appendleft(task)
        self._serve()

    def on_task_withdrawn(self, task: Task) -> None:
        self._withdrawals.withdraw_from(self._queue)

    def on_capacity(self, node: Node) -> None:
        self._serve()

    def _serve(self) -> None:
        queue = self._queue
        while queue and self._ring:
            task = queue[0]
            if task.state != TaskState.READY:
                queue.popleft()
                continue
            turn = self._next_turn(task)
            node = self._ring[turn]
            if node.id not in self.view.free_nodes or not self.view.can_take(
                node, task.function.id
            ):
                return
            queue.popleft()
            self._turn = turn + 1
            self.orders.dispatch([task], node)

    def _next_turn(self, task: Task) -> int:
        """Index of the next node that may load the function; the plain next one if none may."""
        ring, function_id = self._ring, task.function.id
        turn = self._turn % len(ring)
        if self.view.load_failures:
            for step in range(len(ring)):
                place = (turn + step) % len(ring)
                variant = ring[place].variants[function_id]
                if variant is not None and not self.view.is_barred(ring[place], variant):
                    return place
        return turn


POLICY = PolicyKind(RoundRobin, capabilities=Capabilities(shares_nodes=True))
