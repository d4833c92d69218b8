"""Queues that do not keep what was withdrawn.

A task that was cancelled or has expired while it waited stays in its policy's queue until it comes
to the head, because to look for it would cost every cancellation a search. Where nothing comes to
the head, such a queue would grow for ever. So withdrawals are counted, and the queue is swept when
they may be half of it: O(1) each, all in all, and never more than twice what really waits.
"""

from __future__ import annotations

from collections import deque
from typing import Final, final

from headgate.core.records import Task
from headgate.core.states import TaskState

_READY: Final = TaskState.READY


@final
class LazyDeletions:
    """Counts those of one queue since it was last swept.

    >>> withdrawals = LazyDeletions()
    >>> [withdrawals.add(length) for length in (4, 4, 4, 1)]
    [False, False, True, True]
    """

    __slots__ = ("_count",)

    def __init__(self) -> None:
        self._count = 0

    def add(self, length: int) -> bool:
        """One more task of the queue, which is so long, is withdrawn: whether to sweep it now."""
        self._count += 1
        if 2 * self._count <= length:
            return False
        self._count = 0
        return True


def sweep(queue: deque[Task]) -> None:
    """Keep only what still waits, in its order."""
    waiting = [task for task in queue if task.state == _READY]
    queue.clear()
    queue.extend(waiting)
