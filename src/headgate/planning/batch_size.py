"""Batch sizes: the largest that meets a deadline, the knee of throughput, and batch formation."""

from __future__ import annotations

from collections import deque
from typing import Final

from headgate.core.model import Profile
from headgate.core.records import Node, Task
from headgate.core.states import TASK_READY

_BATCH_OVERHEAD_NS: Final = 1_000_000  # cost of a batch beyond its profile: dispatch and response
_KNEE_TOLERANCE: Final = 1.05  # time per item at the knee, relative to the best


def max_batch_within(profile: Profile, slack_ns: float, correction: float = 1.0) -> int:
    """The largest batch whose expected time, times `correction`, fits into the slack.

    Never less than one: a task that is late already must still run. Times grow with the batch size,
    so this is a binary search: O(log largest batch).

    >>> max_batch_within(Profile(exec_ns=(10, 12, 14, 16)), slack_ns=15)
    3
    >>> max_batch_within(Profile(exec_ns=(10, 12)), slack_ns=5)
    1
    """
    times_ns = profile.exec_ns
    low, high = 1, len(times_ns)
    while low < high:
        middle = (low + high + 1) // 2
        if times_ns[middle - 1] * correction <= slack_ns:
            low = middle
        else:
            high = middle - 1
    return low


def knee_batch_size(profile: Profile) -> int:
    """Batch size at the throughput knee: the smallest within 5 % of the best time per item.

    A larger batch only makes the first items wait for the last, and uses up the slack that absorbs
    variance.

    >>> knee_batch_size(Profile(exec_ns=(20_000_000, 40_000_000, 60_000_000)))
    1
    >>> knee_batch_size(Profile(exec_ns=(20_000_000, 24_000_000, 28_000_000)))
    3
    """
    per_item_ns = [
        (time_ns + _BATCH_OVERHEAD_NS) / (i + 1) for i, time_ns in enumerate(profile.exec_ns)
    ]
    enough_ns = _KNEE_TOLERANCE * min(per_item_ns)
    return next(i + 1 for i, item_ns in enumerate(per_item_ns) if item_ns <= enough_ns)


def take_batch(queue: deque[Task], node: Node, items_max: int) -> list[Task]:
    """Dequeue tasks of one function from the head of the queue: one, or as many as fit a batch.

    Items are counted, not requests. The head must be READY and runnable on the node; tasks behind
    it that are no longer READY are discarded on the way. A quarantined task goes alone.
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
        if following.state == TASK_READY:
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
