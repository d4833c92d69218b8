"""Composition of parts whose precedence is neither series nor parallel.

`compose_prime` is exact within a bound on its work, and falls back to the dominator tree beyond
it (see `pipeline`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headgate.planning.frontier.graph import Decomposition, StageGraph
from headgate.planning.frontier.pareto import (
    Frontier,
    Ints,
    fold_parallel,
    series,
    undominated,
)

LABEL_WORK_MAX: Final = 200_000_000  # comparisons of labels: a second or two
_BLOCK: Final = 128  # labels that are compared at once with those that are kept


def compose_prime(
    parts: Sequence[Frontier], after: Sequence[Sequence[int]], work_max: int = LABEL_WORK_MAX
) -> tuple[Frontier, bool]:
    """Return the frontier of parts in topological order, and whether it is exact."""
    exact = _by_labels(parts, after, work_max)
    if exact is not None:
        return exact, True
    return _by_dominators(parts, StageGraph(after)), False


def _by_labels(
    parts: Sequence[Frontier], after: Sequence[Sequence[int]], work_max: int
) -> Frontier | None:
    """Enumerate labels; None if that takes too much work."""
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


def _by_dominators(parts: Sequence[Frontier], graph: StageGraph) -> Frontier:
    """Compose by the dominator tree, then compute the times with the true precedence."""

    def composed(tree: Decomposition) -> Frontier:
        if tree.kind == "leaf":
            return parts[tree.stages.bit_length() - 1]
        inner = [composed(part) for part in tree.parts]
        if tree.kind == "parallel":
            return fold_parallel(inner)
        whole = inner[-1]
        for part in reversed(inner[:-1]):
            whole = series(part, whole)
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
