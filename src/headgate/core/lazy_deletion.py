"""Lazy deletion from a policy's queue, with a bound on the garbage that it may hold.

A task that is cancelled or expires while it is queued stays in its policy's queue until it reaches
the head, because removing it at once would cost every cancellation a search. If the head does not
move, such a queue would grow without bound. So withdrawn tasks are counted, and the queue is swept
when they may be half of it: O(1) amortised per withdrawal, and a queue is never longer than twice
the number of tasks that really wait.
"""

from __future__ import annotations

from collections import deque
from typing import final

from headgate.core.records import Task
from headgate.core.states import (
    TASK_READY,
)


@final
class LazyDeletions:
    """Counts the withdrawn tasks of one queue since the queue was last swept.

    >>> withdrawals = LazyDeletions()
    >>> [withdrawals.add(length) for length in (4, 4, 4, 1)]
    [False, False, True, True]
    """

    __slots__ = ("_count",)

    def __init__(self) -> None:
        self._count = 0

    def add(self, length: int) -> bool:
        """Count one more withdrawn task of a queue of this length; whether to sweep it now."""
        self._count += 1
        if 2 * self._count <= length:
            return False
        self._count = 0
        return True


def sweep(queue: deque[Task]) -> None:
    """Remove the tasks that are no longer READY, keeping the order of the others."""
    waiting = [task for task in queue if task.state == TASK_READY]
    queue.clear()
    queue.extend(waiting)
