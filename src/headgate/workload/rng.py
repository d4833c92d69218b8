"""The named random streams of `core.rng`, for drawing whole columns."""

from __future__ import annotations

import numpy as np

from headgate.core.rng import stream


def column_stream(seed: int, name: str) -> np.random.Generator:
    """Return the numpy generator called `name` of `seed`.

    >>> bool(column_stream(7, "a").random() == column_stream(7, "a").random())
    True
    >>> bool(column_stream(7, "a").random() == column_stream(7, "b").random())
    False
    """
    return np.random.default_rng(stream(seed, name).getrandbits(128))
