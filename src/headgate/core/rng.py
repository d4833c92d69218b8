"""Named random streams of one seed.

Each consumer (arrivals, truth, faults, a policy) draws from its own stream, so that adding a
consumer, or drawing once more in one of them, moves no other.
"""

from __future__ import annotations

import random


def stream(seed: int, name: str) -> random.Random:
    """Return the random stream called `name` of `seed`.

    >>> stream(7, "faults").random() == stream(7, "faults").random()
    True
    >>> stream(7, "faults").random() == stream(7, "truth").random()
    False
    """
    return random.Random(f"{seed}/{name}")
