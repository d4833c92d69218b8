"""Ranges of ids: every Scheduler numbers its batches and instances in a range of its own.

So Schedulers need not know of each other to choose ids that are unique in all pools they share, and
an id tells whose it is, also when that Scheduler has left and others have come. The range follows
from the index of the Scheduler. An index is never given to a second Scheduler: not to the one that
replaces a crashed gateway either, because instances of the crashed one may live on.
"""

from __future__ import annotations

from typing import Final

_BITS: Final = 40
IDS_PER_SCHEDULER: Final = 1 << _BITS
# A request id may be drawn from such a range as well. Then a task id, which has eight more bits,
# still fits into the 62 bits that a compiled build keeps in a register.
SCHEDULERS_MAX: Final = 1 << 14


def first_id(index: int) -> int:
    """Return the first id of the Scheduler with this index. Raises `ValueError` out of range.

    >>> first_id(0), hex(first_id(3))
    (0, '0x30000000000')
    """
    if not 0 <= index < SCHEDULERS_MAX:
        raise ValueError(f"a Scheduler cannot have the index {index}")
    return index << _BITS


def owner(id: int) -> int:
    """Return the index of the Scheduler that gave this id to a batch or an instance.

    >>> owner(first_id(3) + 7)
    3
    """
    return id >> _BITS
