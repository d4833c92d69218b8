"""Made-up pictures of four patterns: stripes, checks, dots and rings, in any colour and turn.

They are noisy, some of them very much so, and those are hard to tell apart.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

CLASSES = ("stripes", "checks", "dots", "rings")
SIZE = 256

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]


def pictures(count: int, seed: int) -> tuple[Images, Labels]:
    """Return images of (count, 256, 256, 3), and the class of each."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, len(CLASSES), count)
    images = np.stack([_picture(int(label), rng) for label in labels])
    return images, labels


def _picture(label: int, rng: np.random.Generator) -> Images:
    turn, period = rng.uniform(0, np.pi), rng.uniform(12, 40)
    shift = rng.uniform(0, period, 2)
    y, x = np.mgrid[0:SIZE, 0:SIZE].astype(np.float32)
    across = (np.cos(turn) * x + np.sin(turn) * y + shift[0]) * 2 * np.pi / period
    along = (np.cos(turn) * y - np.sin(turn) * x + shift[1]) * 2 * np.pi / period
    centre = rng.uniform(SIZE / 4, 3 * SIZE / 4, 2)
    radius = np.hypot(x - centre[0], y - centre[1]) * 2 * np.pi / period
    wave = (
        np.sin(across),
        np.sin(across) * np.sin(along),
        np.minimum(np.sin(across), np.sin(along)) + 0.3,
        np.sin(radius),
    )[label]
    dark, light = rng.uniform(0, 100, 3), rng.uniform(150, 255, 3)
    image = np.where(wave[..., None] > 0, light, dark)
    noise = rng.normal(0, rng.uniform(0, 120), image.shape)
    return np.clip(image + noise, 0, 255).astype(np.uint8)
