"""Forming a batch from the head of a queue: the part that every batching policy shares."""

from __future__ import annotations

from collections import deque
from typing import Final

from headgate.core.lifecycle import TaskState
from headgate.core.records import Node, Task

_READY: Final = TaskState.READY  # interpreted, a name of the module is read much faster


def take_batch(queue: deque[Task], node: Node, items_max: int) -> list[Task]:
    """Take tasks of one function from the head of the queue: one, or as many as fit a batch.

    Items are counted, not requests. The head must be READY and something the node can run; tasks
    behind it that are wanted no longer are thrown away as they are met. A suspect goes alone.
    """
    first = queue.popleft()
    batch = [first]
    if items_max == 1 or not queue or first.must_run_alone:
        return batch
    variant = node.variants[first.function.id]
    if variant is not None:
        items_max = min(items_max, len(variant.profile.exec_ns))
    items = first.request.items
    while queue:
        following = queue[0]
        if following.state == _READY:
            items += following.request.items
            if (
                following.function is not first.function
                or items > items_max
                or following.must_run_alone
            ):
                break
            batch.append(following)
        queue.popleft()
    return batch
