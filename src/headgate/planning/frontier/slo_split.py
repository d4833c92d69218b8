"""Distribution of an objective over groups of stages, by the dominator tree.

ESG (HPDC 2024) searches groups of a few stages instead of whole pipelines. The dominator tree
(`graph`) makes a pipeline a sequence of stages and of parallel parts. Runs of consecutive stages
are cut into groups of at most `group_max`; the branches of a parallel part are distributed in the
same way, each with the time of the part. A group gets time in proportion to its weight: a stage
weighs its *average normalised length*, the mean over configurations of its part of the total time
of all stages at the same configuration; a sequence weighs the sum of its parts, a parallel part
the maximum of its branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from headgate.core.errors import ConfigError
from headgate.planning.frontier.configs import StageConfig
from headgate.planning.frontier.graph import Decomposition, StageGraph

GROUP_MAX: Final = 3  # stages; the paper's evaluation
_WHOLE_NS: Final = 10**12  # an objective to divide where only the proportions are of interest


@dataclass(frozen=True, slots=True)
class SloGroup:
    """Consecutive stages, and the time that they have together."""

    stages: tuple[int, ...]
    weight: float
    budget_ns: int


def split_slo(
    graph: StageGraph,
    configs: Sequence[Sequence[StageConfig]],
    slo_ns: int,
    *,
    group_max: int = GROUP_MAX,
) -> list[SloGroup]:
    """Return groups that cover every stage once; no path has more time than the SLO.

    >>> stage = [StageConfig(time_ns=10, cost=1)]
    >>> groups = split_slo(StageGraph([[], [0], [1], [2]]), [stage] * 4, 80, group_max=3)
    >>> [(group.stages, group.budget_ns) for group in groups]
    [((0, 1, 2), 60), ((3,), 20)]
    """
    if group_max < 1:
        raise ConfigError(f"the maximum group size is {group_max}", allowed="1 or more")
    lengths = normalised_lengths(configs)
    return list(_split(graph.group_by_dominators(), lengths, slo_ns, group_max))


@dataclass(frozen=True, slots=True)
class RestShare:
    """A stage with those behind it in its group, and their part of the time that is left."""

    stages: tuple[int, ...]
    part: float  # of the time from the start of the first stage to the end of the pipeline


def shares_of_rest(
    graph: StageGraph, configs: Sequence[Sequence[StageConfig]], *, group_max: int = GROUP_MAX
) -> list[RestShare]:
    """By stage: how the time that is left when it starts is divided, in proportion to `split_slo`.

    Within a group, time is divided by the lengths of its stages.

    >>> stage = [StageConfig(time_ns=10, cost=1)]
    >>> shares = shares_of_rest(StageGraph([[], [0], [1], [2]]), [stage] * 4, group_max=3)
    >>> [(share.stages, round(share.part, 3)) for share in shares]
    [((0, 1, 2), 0.75), ((1, 2), 0.667), ((2,), 0.5), ((3,), 1.0)]
    """
    lengths = normalised_lengths(configs)
    groups = split_slo(graph, configs, _WHOLE_NS, group_max=group_max)
    ahead = [0.0] * len(configs)  # by stage: from its start to the end of the pipeline
    shares: dict[int, RestShare] = {}
    for group in reversed(groups):  # the parts of a series are in order, so successors are known
        behind = max([ahead[each] for each in graph.successors[group.stages[-1]]], default=0.0)
        length = sum(lengths[each] for each in group.stages)
        for number, index in enumerate(group.stages):
            rest = group.stages[number:]
            part = sum(lengths[each] for each in rest) / length if length else 1.0
            ahead[index] = group.budget_ns * part + behind
            is_all = not behind or not ahead[index]
            shares[index] = RestShare(rest, 1.0 if is_all else 1.0 - behind / ahead[index])
    return [shares[index] for index in range(len(configs))]


def normalised_lengths(configs: Sequence[Sequence[StageConfig]]) -> list[float]:
    """Return the average normalised length of each stage; they add up to 1.

    The mean is over the configurations (batch, vCPUs, GPU share) that every stage has. If there
    is none, each stage counts with its mean time.
    """
    tables = [
        {(c.batch, c.cpu_milli, c.gpu_sevenths, c.build): c.time_ns for c in each}
        for each in configs
    ]
    common = [key for key in tables[0] if all(key in table for table in tables)]
    if not common:
        means = [sum(c.time_ns for c in each) / len(each) for each in configs]
        total = sum(means)
        return [mean / total if total else 1 / len(means) for mean in means]
    lengths = [0.0] * len(tables)
    for key in common:
        total_ns = sum(table[key] for table in tables)
        for index, table in enumerate(tables):
            lengths[index] += table[key] / total_ns if total_ns else 1 / len(tables)
    return [length / len(common) for length in lengths]


def _split(
    tree: Decomposition, lengths: Sequence[float], budget_ns: int, group_max: int
) -> list[SloGroup]:
    """Distribute a time over a sequence, whose parts are stages and parallel parts."""
    parts = tree.parts if tree.kind == "series" else (tree,)
    runs = _runs(parts, group_max)
    weights = [sum(_weight(part, lengths) for part in run) for run in runs]
    if not sum(weights):
        weights = [1.0] * len(runs)
    sums = list(accumulate(weights))
    # Rounded at the boundaries between groups, so that all of the time is given and no more.
    ends_ns = [round(budget_ns * (each / sums[-1])) for each in sums]
    groups: list[SloGroup] = []
    for run, weight, start_ns, end_ns in zip(runs, weights, [0, *ends_ns], ends_ns, strict=False):
        share_ns = end_ns - start_ns
        if run[0].kind == "parallel":
            for branch in run[0].parts:
                groups += _split(branch, lengths, share_ns, group_max)
        else:
            stages = tuple(part.stages.bit_length() - 1 for part in run)
            groups.append(SloGroup(stages, weight, share_ns))
    return groups


def _runs(parts: Sequence[Decomposition], group_max: int) -> list[list[Decomposition]]:
    """Cut a sequence into runs of stages; a parallel part is a run of its own."""
    runs: list[list[Decomposition]] = []
    for part in parts:
        is_next = runs and part.kind == runs[-1][-1].kind == "leaf" and len(runs[-1]) < group_max
        if is_next:
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def _weight(tree: Decomposition, lengths: Sequence[float]) -> float:
    if tree.kind == "leaf":
        return lengths[tree.stages.bit_length() - 1]
    weights = [_weight(part, lengths) for part in tree.parts]
    return max(weights) if tree.kind == "parallel" else sum(weights)
