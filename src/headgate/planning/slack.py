"""How many items may go out together before the most urgent of them would be late."""

from __future__ import annotations

from headgate.core.model import Profile


def items_within(profile: Profile, slack_ns: float, correction: float = 1.0) -> int:
    """The largest batch whose expected time, times `correction`, fits into the slack.

    Never less than one: what is late already must run all the same. Times grow with the batch, so
    this is a binary search: O(log largest batch).

    >>> items_within(Profile(exec_ns=(10, 12, 14, 16)), slack_ns=15)
    3
    >>> items_within(Profile(exec_ns=(10, 12)), slack_ns=5)
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
