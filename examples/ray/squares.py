"""A function that needs nothing but NumPy."""

from __future__ import annotations

import numpy as np

from headgate.functions import function


@function(inputs={"x": "FP32[-1]"}, outputs={"y": "FP32[-1]"})
def squares(x: np.ndarray) -> np.ndarray:
    """Return the squares of numbers."""
    return x**2
