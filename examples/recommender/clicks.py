"""A shop that nobody visits: sessions of clicks whose structure is known, because it is made here.

Every item belongs to a category and to a taste, and so to one cell of a few items. A visitor has a
taste, which most clicks follow, and begins in a category; from there the next click stays in the
category, or goes to one of the few that follow it. Which item of a cell is clicked is a matter of
its popularity, which is skewed: few items are clicked often and most are hardly seen. Now and then
a visitor looks again at something he has seen.

So the category of what comes next stands in the last click, but the taste in all of them: whoever
looks at the last click alone must do worse. Item ids begin at 1; 0 is padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

LENGTH_MIN = 2
LENGTH_MAX = 20


@dataclass(frozen=True, slots=True)
class Shop:
    """What is sold, and how visitors behave."""

    categories: int = 50
    tastes: int = 8
    cell: int = 10  # items of one category and one taste
    followers: int = 3  # categories that visitors go to from a category
    stays: float = 0.65  # how often the next click is in the same category
    follows_taste: float = 0.75  # how often a click is to the visitor's taste
    returns: float = 0.08  # how often a click is on an item seen before
    ends: float = 0.15  # how often a click is the last one
    skew: float = 1.0  # of popularity: the n-th most popular has 1/n**skew of the first

    @property
    def items(self) -> int:
        """How many there are."""
        return self.categories * self.tastes * self.cell


def sessions(shop: Shop, count: int, seed: int) -> list[Ids]:
    """Return so many sessions. The shop's own shape is the same for every seed."""
    random = np.random.default_rng(seed)
    shape = _Shape.of(shop)
    return [_session(shop, shape, random) for _ in range(count)]


def padded(clicks: Sequence[Ids], length: int = LENGTH_MAX) -> Ids:
    """Return the last clicks of each session as rows, zeros behind."""
    rows = np.zeros((len(clicks), length), np.int64)
    for row, session in zip(rows, clicks, strict=True):
        last = session[-length:]
        row[: len(last)] = last
    return rows


def chances(shop: Shop, clicks: Ids) -> NDArray[np.float64]:
    """Return how likely each id is to be clicked next, by one who knows how the shop was made.

    No recommender can do better than to recommend what is likeliest here.
    """
    shape = _Shape.of(shop)
    _, first = np.unique(clicks, return_index=True)
    styles = (clicks[np.sort(first)] - 1) // shop.cell % shop.tastes
    by_style = np.full((shop.tastes, shop.tastes), (1 - shop.follows_taste) / shop.tastes)
    np.fill_diagonal(by_style, by_style.diagonal() + shop.follows_taste)
    taste = np.exp(np.log(by_style[:, styles]).sum(axis=1))
    style = by_style @ (taste / taste.sum())
    last = _category(shop, int(clicks[-1]))
    category = np.zeros(shop.categories)
    category[last] = shop.stays
    category[shape.followers[last]] += (1 - shop.stays) / shop.followers
    returns = shop.returns if len(clicks) > 1 else 0.0
    likely = np.zeros(shop.items + 1)
    likely[1:] = (1 - returns) * np.einsum("c,s,r->csr", category, style, shape.rank).ravel()
    np.add.at(likely, clicks[:-1], returns / max(len(clicks) - 1, 1))
    return likely


@dataclass(frozen=True, slots=True)
class _Shape:
    """What the shop's visitors all have in common."""

    followers: Ids  # [categories, followers]
    category: NDArray[np.float64]  # probability that a session begins there
    rank: NDArray[np.float64]  # probability of the most popular item of a cell, the second, ...

    @staticmethod
    @cache
    def of(shop: Shop) -> _Shape:
        random = np.random.default_rng(0)
        others = [
            random.choice(np.delete(np.arange(shop.categories), own), shop.followers, replace=False)
            for own in range(shop.categories)
        ]
        return _Shape(
            np.array(others), _zipf(shop.categories, shop.skew), _zipf(shop.cell, shop.skew)
        )


def _session(shop: Shop, shape: _Shape, random: np.random.Generator) -> Ids:
    taste = random.integers(shop.tastes)
    category = random.choice(shop.categories, p=shape.category)
    clicks: list[int] = []
    while len(clicks) < LENGTH_MAX:
        if len(clicks) > 1 and random.random() < shop.returns:
            clicks.append(clicks[random.integers(len(clicks) - 1)])
            category = _category(shop, clicks[-1])
        else:
            if clicks and random.random() >= shop.stays:
                category = random.choice(shape.followers[category])
            own = random.random() < shop.follows_taste
            style = taste if own else random.integers(shop.tastes)
            rank = random.choice(shop.cell, p=shape.rank)
            clicks.append(int(1 + (category * shop.tastes + style) * shop.cell + rank))
        if len(clicks) >= LENGTH_MIN and random.random() < shop.ends:
            break
    return np.array(clicks, np.int64)


def _category(shop: Shop, item: int) -> int:
    return (item - 1) // (shop.tastes * shop.cell)


def _zipf(count: int, skew: float) -> NDArray[np.float64]:
    weights = 1 / np.arange(1, count + 1) ** skew
    return weights / weights.sum()
