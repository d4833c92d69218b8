"""Composition of parts whose order is neither series nor parallel: three ways.

**Conditioning.** Say that nothing precedes part x. Once its point is fixed, x ends at a known time,
and a part that ends at a known time may be copied: each part that directly follows x gets a copy
of its own, one of which carries the cost. What is left has one shared part less and often is
series-parallel. The frontier is the union over the points of x. By symmetry the same holds for a
part that nothing follows. A prime order always has such a part with two neighbours or more (if
every part without predecessors had one follower, the first of those followers would form a module
with it), so repeating this ends. Exact; the work grows with the product of the points of the parts
that were fixed.

**Labels.** Parts are added in topological order. A label is the vector of the ends of the parts
that others still wait for, and a cost; labels that another one dominates in every component are
dropped. Exact; the number of labels grows with the width of the order.

**Dominators.** The dominator tree makes the order series-parallel by adding precedences. Fast, and
valid, because every precedence is kept; not exact, because some plans seem to take longer than they
do. The times of those that are found are computed with the true order.

`compose_prime` tries them in this order, the first two within a bound on their work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from headgate.planning.frontier.graph import Decomposition, StageGraph, bits
from headgate.planning.frontier.pareto import (
    Frontier,
    Ints,
    constant,
    either,
    parallel,
    series,
    undominated,
)

PRIME_WORK_MAX: Final = 50_000_000  # pairs of points or labels: about a second
_COMPOSITION: Final = 5_000  # work of composing two parts, beside their pairs of points
_BLOCK: Final = 128  # labels that are compared at once with those that are kept


def compose_prime(
    parts: Sequence[Frontier], after: Sequence[Sequence[int]], work_max: int = PRIME_WORK_MAX
) -> tuple[Frontier, bool]:
    """Return the frontier of parts in topological order, and whether it is exact."""
    exact = by_conditions(parts, after, work_max)
    if exact is None:
        exact = by_labels(parts, after, work_max)
    if exact is not None:
        return exact, True
    return by_dominators(parts, after), False


@final
class _OutOfWork(Exception):
    """The bound on the work was reached."""


@final
class _Composer:
    """Composes series-parallel structures, and counts the work."""

    def __init__(self, work_max: int) -> None:
        self._left = work_max

    def compose(
        self, parts: Sequence[Frontier], tree: Decomposition, graph: StageGraph
    ) -> Frontier:
        """Return the frontier of some parts of a graph. Raises `_OutOfWork`."""
        if tree.kind == "leaf":
            return parts[tree.stages.bit_length() - 1]
        inner = [self.compose(parts, part, graph) for part in tree.parts]
        if tree.kind == "prime":
            return self._conditioned(inner, covers(quotient(graph, tree.parts)))
        whole = inner[-1]
        for part in reversed(inner[:-1]):
            pairs = len(part) * len(whole) if tree.kind == "series" else len(part) + len(whole)
            self._spend(pairs)
            whole = series(part, whole) if tree.kind == "series" else parallel(part, whole)
        return whole

    def compose_all(self, parts: Sequence[Frontier], after: Sequence[Sequence[int]]) -> Frontier:
        """Return the frontier of all parts."""
        graph = StageGraph(after)
        return self.compose(parts, graph.decompose((1 << len(parts)) - 1), graph)

    def _conditioned(self, parts: Sequence[Frontier], after: Sequence[Sequence[int]]) -> Frontier:
        """Return the union over the points of the part whose points are fixed."""
        fixed = _part_to_fix([len(part) for part in parts], after)
        copied = _with_copies(after, fixed)
        count = len(copied) - len(parts) + 1  # of copies
        found = []
        for index in range(len(parts[fixed])):
            point = parts[fixed].taken(np.array([index], dtype=np.int64))
            copies = [constant(point.fastest_ns) for _ in range(count - 1)]
            others = [*parts[:fixed], point, *parts[fixed + 1 :]]
            found.append(self.compose_all([*others, *copies], copied))
        return either(found)

    def _spend(self, pairs: int) -> None:
        self._left -= _COMPOSITION + pairs
        if self._left < 0:
            raise _OutOfWork


def by_conditions(
    parts: Sequence[Frontier], after: Sequence[Sequence[int]], work_max: int = PRIME_WORK_MAX
) -> Frontier | None:
    """Fix the points of parts until the rest is series-parallel; None: too much work."""
    try:
        return _Composer(work_max).compose_all(parts, after)
    except _OutOfWork:
        return None


def _part_to_fix(sizes: Sequence[int], after: Sequence[Sequence[int]]) -> int:
    """Return a part at either end with several neighbours: if one suffices, such a one."""
    candidates = []
    for index in range(len(after)):
        followers = [i for i, before in enumerate(after) if index in before]
        if min(len(after[index]), len(followers)) == 0 < max(len(after[index]), len(followers)) - 1:
            graph = StageGraph(_with_copies(after, index))
            is_prime = _has_prime(graph.decompose((1 << len(graph)) - 1))
            candidates.append((is_prime, sizes[index], index))
    return min(candidates)[2]


def _has_prime(tree: Decomposition) -> bool:
    return tree.kind == "prime" or any(_has_prime(part) for part in tree.parts)


def _with_copies(after: Sequence[Sequence[int]], fixed: int) -> list[list[int]]:
    """Return the order with a copy of a part for each of its neighbours but the first."""
    copied = [list(before) for before in after]
    followers = [i for i, before in enumerate(after) if fixed in before]
    for follower in followers[1:]:
        copied[follower].remove(fixed)
        copied[follower].append(len(copied))
        copied.append([])
    for before in after[fixed][1:]:
        copied[fixed].remove(before)
        copied.append([before])
    return copied


def quotient(graph: StageGraph, parts: Sequence[Decomposition]) -> list[list[int]]:
    """For each part the parts before it; one stage of each stands for all of them."""
    stages = [next(bits(part.stages)) for part in parts]
    return [
        [number for number, other in enumerate(stages) if graph.precedes[other] >> stage & 1]
        for stage in stages
    ]


def covers(after: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return only the direct predecessors of each part, given all of them.

    >>> covers([[], [0], [0, 1]])
    [[], [0], [1]]
    """
    return [
        [each for each in before if not any(each in after[other] for other in before)]
        for before in after
    ]


def by_labels(
    parts: Sequence[Frontier], after: Sequence[Sequence[int]], work_max: int = PRIME_WORK_MAX
) -> Frontier | None:
    """Enumerate labels; None: too much work."""
    count = len(parts)
    last_use = [
        max([i for i, before in enumerate(after) if j in before], default=count)
        for j in range(count)
    ]
    ends: dict[int, Ints] = {}  # of the parts that others wait for, or that end the pipeline
    costs = np.zeros(1, dtype=np.int64)
    picks = np.zeros((1, 0), dtype=np.int32)
    for number, part in enumerate(parts):
        size = len(part)
        if len(costs) * size > work_max:
            return None
        start = np.zeros(len(costs), dtype=np.int64)
        for before in after[number]:
            start = np.maximum(start, ends[before])
        new = (start[:, None] + part.time_array[None, :]).ravel()
        costs = (costs[:, None] + part.cost_array[None, :]).ravel()
        ends = {j: np.repeat(column, size) for j, column in ends.items() if last_use[j] > number}
        taken = np.tile(np.arange(size, dtype=np.int32), len(picks))
        picks = np.column_stack((np.repeat(picks, size, axis=0), taken))
        ends[number] = new
        ends = _merge_final(ends, last_use, count)
        kept = _undominated_labels(list(ends.values()), costs, work_max)
        if kept is None:
            return None
        ends = {j: column[kept] for j, column in ends.items()}
        costs, picks = costs[kept], picks[kept]
    (times,) = ends.values()
    columns = [picks[:, number].astype(np.int64) for number in range(count)]
    return Frontier(times, costs, parts=parts, picks=columns)


def _merge_final(ends: dict[int, Ints], last_use: Sequence[int], count: int) -> dict[int, Ints]:
    """Merge the ends that nothing waits for into one column: their maximum."""
    final = [j for j in ends if last_use[j] == count]
    if len(final) < 2:
        return ends
    merged = {j: column for j, column in ends.items() if j not in final[1:]}
    merged[final[0]] = np.maximum.reduce([ends[j] for j in final])
    return merged


def _undominated_labels(columns: list[Ints], costs: Ints, work_max: int) -> Ints | None:
    """Return the labels that no other dominates in every column; None: too much work."""
    if len(columns) == 1:
        return undominated(columns[0], costs)
    times = np.column_stack(columns)
    order = np.lexsort((*times.T[::-1], costs))  # what dominates a label comes before it
    times = times[order]
    kept = np.zeros((0, times.shape[1]), dtype=np.int64)
    indices: list[Ints] = []
    work = 0
    for start in range(0, len(order), _BLOCK):
        block = times[start : start + _BLOCK]
        work += len(block) * (len(kept) + len(block))
        if work > work_max:
            return None
        candidates = np.flatnonzero(~_dominated(block, kept))
        block = block[candidates]
        earlier = np.tri(len(block), k=-1, dtype=np.bool_)  # earlier ones cost no more
        inside = np.all(block[None, :, :] <= block[:, None, :], axis=2) & earlier
        survivors = candidates[~inside.any(axis=1)]
        kept = np.concatenate((kept, times[start : start + _BLOCK][survivors]))
        indices.append(order[start : start + _BLOCK][survivors])
    return np.concatenate(indices)


def _dominated(block: Ints, kept: Ints) -> NDArray[np.bool_]:
    """Whether each label of a block is dominated by one that is kept and costs no more."""
    dominated = np.zeros(len(block), dtype=np.bool_)
    for start in range(0, len(kept), 4096):
        some = kept[start : start + 4096]
        within = some[None, :, 0] <= block[:, None, 0]
        for column in range(1, some.shape[1]):
            within &= some[None, :, column] <= block[:, None, column]
        dominated |= within.any(axis=1)
    return dominated


def by_dominators(parts: Sequence[Frontier], after: Sequence[Sequence[int]]) -> Frontier:
    """Compose by the dominator tree, then compute the times with the true order."""
    graph = StageGraph(after)

    def composed(tree: Decomposition) -> Frontier:
        if tree.kind == "leaf":
            return parts[tree.stages.bit_length() - 1]
        compose: Callable[[Frontier, Frontier], Frontier]
        compose = parallel if tree.kind == "parallel" else series
        inner = [composed(part) for part in tree.parts]
        whole = inner[-1]
        for part in reversed(inner[:-1]):
            whole = compose(part, whole)
        return whole

    grouped = composed(graph.group_by_dominators())
    picks = [grouped.picks_of(parts, index) for index in range(len(grouped))]
    ends = [
        graph.makespan_ns([part.times_ns[i] for part, i in zip(parts, pick, strict=True)])
        for pick in picks
    ]
    times = np.array(ends, dtype=np.int64)
    kept = undominated(times, grouped.cost_array)
    columns = np.array(picks, dtype=np.int64)[kept]
    return Frontier(times[kept], grouped.cost_array[kept], parts=parts, picks=list(columns.T))
