"""How many items may go out together before the most urgent of them would be late."""

from __future__ import annotations

from collections import deque
from typing import Final

from headgate.core.model import Profile
from headgate.core.records import Node, Task
from headgate.core.states import TaskState


def max_batch_within(profile: Profile, slack_ns: float, correction: float = 1.0) -> int:
    """The largest batch whose expected time, times `correction`, fits into the slack.

    Never less than one: what is late already must run all the same. Times grow with the batch, so
    this is a binary search: O(log largest batch).

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


# How many items it pays to send out together.


# What a batch costs beyond its profile, on the way there and back; and how much of the best pace
# is given for an earlier answer.
_BATCH_NS: Final = 1_000_000
_GIVEN: Final = 1.05


def knee_batch_size(profile: Profile) -> int:
    """The smallest batch that is about as good as the best in time per item.

    More would only make the first of them wait for the last, and use up slack that is all there
    is against surprises.

    >>> knee_batch_size(Profile(exec_ns=(20_000_000, 40_000_000, 60_000_000)))
    1
    >>> knee_batch_size(Profile(exec_ns=(20_000_000, 24_000_000, 28_000_000)))
    3
    """
    paces_ns = [(time_ns + _BATCH_NS) / (i + 1) for i, time_ns in enumerate(profile.exec_ns)]
    enough_ns = _GIVEN * min(paces_ns)
    return next(i + 1 for i, pace_ns in enumerate(paces_ns) if pace_ns <= enough_ns)


# Forming a batch from the head of a queue: the part that every batching policy shares.


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
