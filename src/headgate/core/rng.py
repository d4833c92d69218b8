"""Named random streams of one seed.

Each consumer (arrivals, ground truth, faults, a policy) draws from its own stream, so adding a
consumer, or one more draw in one of them, does not change the numbers of the others.
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
