"""Pareto sets of (time, cost) and how they compose: series, parallel, alternatives, cascades.

A `Frontier` holds the points that no other point dominates: ascending in time, strictly descending
in cost. Every point knows the points of the parts that it was made from, so `configs_at` finds the
configurations behind a point in time proportional to their number.

All compositions are monotone: a smaller time or cost of a part never gives a larger one of the
whole. Therefore a dominated point of a part only gives dominated points of the whole, and dropping
it changes nothing: composition of frontiers is exact.

**Tolerance.** `thin(f, step)` keeps a subset of the points so that for every point p that it drops
there is a point q that it keeps with time(q) <= time(p) and cost(q) <= (1 + step) * cost(p). Say
that a set approximates a frontier within a factor A if it has, for every point p of the frontier,
a point q with time(q) <= time(p) and cost(q) <= A * cost(p). If the parts of a composition are
approximated within A, so is the composition, because costs enter it as sums with weights that are
not negative, and times through sums and maxima. Thinning after it makes A * (1 + step). With n
thinnings between a leaf and the root, the root is within (1 + step)**n. `tolerance_step` returns
step = e / (n * (1 + e)), for which (1 + step)**n <= exp(e / (1 + e)) <= 1 + e: the first because
1 + x <= exp(x), the second because log(1 + e) >= e / (1 + e). So the cheapest point within any
time costs at most 1 + e times the optimum, and no time is ever understated.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from fractions import Fraction
from operator import neg
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from headgate.planning.frontier.configs import StageConfig

Ints = NDArray[np.int64]

_BLOCK: Final = 1 << 18  # pairs of points that are compared at once: bounds the memory
_LARGE: Final = 4096  # points from which on most are dropped before any is sorted
_CELL_BITS: Final = 12
_EMPTY: Final = np.zeros(0, dtype=np.int64)


@final
class Frontier:
    """Points that are not dominated, with the points of the parts that each was made from."""

    __slots__ = (
        "_labels",
        "_parts",
        "_picks",
        "_which",
        "cost_array",
        "costs",
        "time_array",
        "times_ns",
    )

    def __init__(
        self,
        times: Ints,
        costs: Ints,
        *,
        labels: Sequence[tuple[int, StageConfig]] = (),
        parts: Sequence[Frontier] = (),
        picks: Sequence[Ints] = (),
        which: Ints | None = None,
    ) -> None:
        self.time_array = times
        self.cost_array = costs
        # Python's integers, for lookups: an element of an array takes several times as long.
        self.times_ns: list[int] = times.tolist()
        self.costs: list[int] = costs.tolist()
        self._labels = labels  # of a leaf: stage and configuration of each point
        self._parts = parts
        self._picks = picks  # for each part, the index of the point taken from it
        self._which = which  # of alternatives: the part that each point is from

    def __len__(self) -> int:
        return len(self.times_ns)

    @property
    def fastest_ns(self) -> int:
        """The shortest time of any point."""
        return self.times_ns[0]

    def cheapest_within(self, budget_ns: int) -> int | None:
        """Return the index of the cheapest point within a time; None if none is. O(log points).

        >>> leaf(0, [StageConfig(5, 30), StageConfig(9, 10)]).cheapest_within(8)
        0
        """
        index = bisect_right(self.times_ns, budget_ns) - 1
        return None if index < 0 else index

    def fastest_within(self, cost: float) -> int | None:
        """Return the index of the fastest point within a cost; None if none is. O(log points).

        >>> leaf(0, [StageConfig(5, 30), StageConfig(9, 10)]).fastest_within(29)
        1
        """
        index = bisect_left(self.costs, -cost, key=neg)
        return None if index == len(self) else index

    def configs_at(self, index: int) -> dict[int, StageConfig]:
        """Return the configuration of each stage at a point."""
        configs: dict[int, StageConfig] = {}
        waiting: list[tuple[Frontier, int]] = [(self, index)]
        while waiting:
            frontier, point = waiting.pop()
            if frontier._labels:
                stage, config = frontier._labels[point]
                configs[stage] = config
            elif frontier._which is not None:
                part = frontier._parts[int(frontier._which[point])]
                waiting.append((part, int(frontier._picks[0][point])))
            else:
                for part, picks in zip(frontier._parts, frontier._picks, strict=True):
                    waiting.append((part, int(picks[point])))
        return configs

    def picks_of(self, parts: Sequence[Frontier], index: int) -> list[int]:
        """Return the points of some parts, anywhere below, that a point was made from.

        The parts must be different objects.
        """
        numbers = {id(part): number for number, part in enumerate(parts)}
        picks = [0] * len(parts)
        waiting: list[tuple[Frontier, int]] = [(self, index)]
        while waiting:
            frontier, point = waiting.pop()
            if id(frontier) in numbers:
                picks[numbers[id(frontier)]] = point
            else:
                for part, indices in zip(frontier._parts, frontier._picks, strict=True):
                    waiting.append((part, int(indices[point])))
        return picks

    def taken(self, indices: Ints) -> Frontier:
        """Return the frontier of some of the points; they must be in order."""
        return Frontier(
            self.time_array[indices],
            self.cost_array[indices],
            labels=[self._labels[i] for i in indices.tolist()] if self._labels else (),
            parts=self._parts,
            picks=[picks[indices] for picks in self._picks],
            which=None if self._which is None else self._which[indices],
        )


def leaf(stage: int, configs: Sequence[StageConfig], weight: Fraction = Fraction(1)) -> Frontier:
    """Return the frontier of one stage. `weight` is the probability that the stage runs."""
    times = np.array([config.time_ns for config in configs], dtype=np.int64)
    costs = np.array([weighted(config.cost, weight) for config in configs], dtype=np.int64)
    kept = undominated(times, costs)
    labels = [(stage, configs[index]) for index in kept.tolist()]
    return Frontier(times[kept], costs[kept], labels=labels)


def constant(time_ns: int = 0, cost: int = 0) -> Frontier:
    """Return a frontier of one point without a configuration, such as a transfer of data."""
    return Frontier(np.array([time_ns], dtype=np.int64), np.array([cost], dtype=np.int64))


def weighted(cost: int, weight: Fraction) -> int:
    """Return the expected cost of what happens with a probability, rounded to a unit."""
    return cost if weight == 1 else round(cost * weight)


def series(first: Frontier, second: Frontier) -> Frontier:
    """Return the frontier of one part after the other: times and costs add.

    O(n m log(n m)) for parts with n and m points.

    >>> fast_or_cheap = [StageConfig(1, 10), StageConfig(2, 1)]
    >>> both = series(leaf(0, fast_or_cheap), leaf(1, fast_or_cheap))
    >>> both.times_ns, both.costs
    ([2, 3, 4], [20, 11, 2])
    """
    # The sort finds the rows in order: few long ones merge faster than many short ones.
    few, many = (first, second) if len(first) <= len(second) else (second, first)
    rows = max(1, _BLOCK // len(many))
    times, costs, row, column = _EMPTY, _EMPTY, _EMPTY, _EMPTY
    for start in range(0, len(few), rows):
        block = slice(start, start + rows)
        sums_ns = (few.time_array[block, None] + many.time_array[None, :]).ravel()
        sums = (few.cost_array[block, None] + many.cost_array[None, :]).ravel()
        kept = undominated(sums_ns, sums)
        times = np.concatenate((times, sums_ns[kept]))
        costs = np.concatenate((costs, sums[kept]))
        row = np.concatenate((row, start + kept // len(many)))
        column = np.concatenate((column, kept % len(many)))
        if start:
            kept = undominated(times, costs)
            times, costs, row, column = times[kept], costs[kept], row[kept], column[kept]
    left, right = (row, column) if few is first else (column, row)
    return Frontier(times, costs, parts=(first, second), picks=(left, right))


def parallel(first: Frontier, second: Frontier) -> Frontier:
    """Return the frontier of two parts side by side: the maximum of times, the sum of costs.

    At every time, each part takes its cheapest point within it: O((n + m) log(n + m)).

    >>> a, b = leaf(0, [StageConfig(1, 10), StageConfig(4, 1)]), leaf(1, [StageConfig(3, 5)])
    >>> parallel(a, b).times_ns, parallel(a, b).costs
    ([3, 4], [15, 6])
    """
    times = np.union1d(first.time_array, second.time_array)
    times = times[times >= max(first.fastest_ns, second.fastest_ns)]
    left = np.searchsorted(first.time_array, times, side="right") - 1
    right = np.searchsorted(second.time_array, times, side="right") - 1
    costs = first.cost_array[left] + second.cost_array[right]
    kept = undominated(times, costs)
    picks = (left[kept], right[kept])
    return Frontier(times[kept], costs[kept], parts=(first, second), picks=picks)


def either(parts: Sequence[Frontier]) -> Frontier:
    """Return the frontier of alternatives: one of the parts is chosen.

    >>> either([leaf(0, [StageConfig(1, 10)]), leaf(0, [StageConfig(4, 1)])]).times_ns
    [1, 4]
    """
    if len(parts) == 1:
        return parts[0]
    times = np.concatenate([part.time_array for part in parts])
    costs = np.concatenate([part.cost_array for part in parts])
    which = np.concatenate([np.full(len(part), n, np.int64) for n, part in enumerate(parts)])
    picks = np.concatenate([np.arange(len(part), dtype=np.int64) for part in parts])
    kept = undominated(times, costs)
    return Frontier(times[kept], costs[kept], parts=parts, picks=[picks[kept]], which=which[kept])


def thin(frontier: Frontier, step: Fraction) -> Frontier:
    """Return as few points as can stand for all within a relative cost of `step`.

    The contract is in the module's docstring. O(points kept * log(points)).
    """
    if step <= 0 or len(frontier) < 3:
        return frontier
    negated = [-cost for cost in frontier.costs]  # ascending, for bisect
    kept = [0]
    while True:
        # A later point is dropped as long as cost(kept) <= (1 + step) * cost(point).
        scaled = negated[kept[-1]] * step.denominator
        floor = -(scaled // (step.denominator + step.numerator))  # the smallest that is dropped
        following = bisect_right(negated, -floor)
        if following >= len(negated):
            break
        kept.append(following)
    return frontier.taken(np.array(kept, dtype=np.int64))


def tolerance_step(tolerance: Fraction, thinnings: int) -> Fraction:
    """Return the step of `thin` with which so many thinnings stay within a tolerance."""
    return tolerance / (max(1, thinnings) * (1 + tolerance))


def undominated(times: Ints, costs: Ints) -> Ints:
    """Return the indices of the points that no other dominates, in order of time.

    Of equal points the first is kept. O(n log n), with O(n) for most points of a large set.
    """
    if len(times) > _LARGE:
        near = _near_frontier(times, costs)
        return near[_undominated(times[near], costs[near])]
    return _undominated(times, costs)


def _near_frontier(times: Ints, costs: Ints) -> Ints:
    """Return the indices of a superset of the points that no other dominates.

    Time is divided into cells; a point is dropped if one of an earlier cell costs no more. That
    is cheaper than sorting, and leaves little to sort.
    """
    earliest, latest = int(times.min()), int(times.max())
    shift = max(0, (latest - earliest).bit_length() - _CELL_BITS)
    cells = (times - earliest) >> shift
    lowest = np.full((1 << _CELL_BITS) + 1, np.iinfo(np.int64).max, dtype=np.int64)
    np.minimum.at(lowest, cells + 1, costs)
    np.minimum.accumulate(lowest, out=lowest)
    return np.flatnonzero(costs < lowest[cells])


def _undominated(times: Ints, costs: Ints) -> Ints:
    if not len(times):
        return _EMPTY
    order = np.argsort(times, kind="stable")
    sorted_costs = costs[order]
    lowest = np.minimum.accumulate(sorted_costs)
    keeps = np.ones(len(order), dtype=np.bool_)
    keeps[1:] = sorted_costs[1:] < lowest[:-1]
    kept = order[keeps]
    kept_ns = times[kept]
    is_last = np.ones(len(kept), dtype=np.bool_)  # of those with the same time: the cheapest
    is_last[:-1] = kept_ns[1:] != kept_ns[:-1]
    return kept[is_last]
