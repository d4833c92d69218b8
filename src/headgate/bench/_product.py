"""A model that computes for real, for as long as it is told to: a product of many matrices.

python -m headgate.bench._product 20     how many layers take 20 ms on one core
"""

from __future__ import annotations

import sys
from statistics import median
from time import perf_counter
from typing import Final

import numpy as np

from headgate.functions import Model
from headgate.functions.arrays import Array

ROWS: Final = 64
WIDTH: Final = 256
_TRIALS: Final = 40


class Product(Model):
    """Takes `layers` products for each item. A batch saves nothing: it takes as long as its items.

    So what a server makes of it is the server's doing, and capacity is one number.
    """

    def __init__(self, layers: int = 1) -> None:
        self._layers = layers

    def load(self) -> None:
        """Make the weights, always the same."""
        self.inputs = {"x": f"FP32[-1, {ROWS}]"}
        self.outputs = {"y": "FP32[-1]"}
        weights = np.random.default_rng(1).standard_normal((WIDTH, WIDTH), dtype=np.float32)
        self._weights = weights * np.float32(np.sqrt(2 / WIDTH))

    def predict(self, batch: dict[str, Array]) -> dict[str, Array]:
        """Return one number for each item."""
        return {"y": np.array([self._one(x) for x in batch["x"]], np.float32)}

    def _one(self, x: Array) -> float:
        hidden = np.repeat(x[:, None], WIDTH, axis=1)
        for _ in range(self._layers):
            hidden = np.maximum(hidden @ self._weights, 0)
        return float(hidden.mean())


def layers_for(milliseconds: float) -> int:
    """Return how many layers take so long here and now."""
    model = Product(layers=8)
    model.load()
    x = {"x": np.ones((1, ROWS), np.float32)}
    took_s = []
    for _ in range(_TRIALS):
        begin_s = perf_counter()
        model.predict(x)
        took_s.append(perf_counter() - begin_s)
    return max(1, round(8 * milliseconds / 1e3 / median(took_s)))


if __name__ == "__main__":
    sys.stdout.write(f"{layers_for(float(sys.argv[1]))}\n")
