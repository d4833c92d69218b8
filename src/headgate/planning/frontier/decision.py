"""The choice of a stage's configuration: every candidate that fits, priced with the rest.

At dispatch it matters which configurations fit what is free, so candidates of this stage are not
pruned by time and cost alone: the only one that fits might be dominated. Each is priced with the
frontier of everything behind the stage, a binary search. To price only a few of them, the range of
times left is divided into cells, and for each cell the candidates are sorted once by a lower bound
on their total cost there: their cost with all of the cell's time. A decision prices candidates in
that order and stops at the first whose bound is not below the best found. It is exact for any
division; the division decides only how many are priced.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias, final

import numpy as np

from headgate.core.model import UNLIMITED, Shape
from headgate.planning.frontier.configs import GPU_SEVENTHS_MAX, StageConfig
from headgate.planning.frontier.pareto import Frontier, Ints
from headgate.planning.frontier.pipeline import PipelineFrontier

_CELLS_MAX: Final = 256
_NO_TIME: Final = 2**62

Fits = Callable[[StageConfig], bool]
Packed: TypeAlias = "array[int]"


@final
class Decision:
    """A configuration for a stage, and the point of the rest that its price counts on."""

    __slots__ = ("_index", "_rest", "config", "cost", "slack_ns")

    def __init__(
        self, config: StageConfig, cost: int, slack_ns: int, rest: Frontier, index: int
    ) -> None:
        self.config = config
        self.cost = cost  # expected cost of a request from this stage on
        self.slack_ns = slack_ns  # time that this plan leaves unused
        self._rest = rest
        self._index = index

    @property
    def rest_ns(self) -> int:
        """Time of the plan for everything behind the stage."""
        return self._rest.times_ns[self._index]

    def rest_configs(self) -> dict[int, StageConfig]:
        """Return the configurations that the price counts on, by stage."""
        return self._rest.configs_at(self._index)


@final
class StageDecider:
    """Decides for one stage of a pipeline; made anew when a profile changes.

    `prunes` drops what `useful_configs` drops: right where whatever has room for a configuration
    has room for a smaller one, and wrong where only certain shapes are started.

    >>> from headgate.planning.frontier.graph import StageGraph
    >>> cpu, gpu = StageConfig(9, 1, cpu_milli=1000), StageConfig(2, 5, gpu_sevenths=1)
    >>> pipeline = PipelineFrontier(StageGraph([[], [0]]), [[cpu, gpu], [cpu, gpu]])
    >>> decider = StageDecider(pipeline, 0)
    >>> decider.decide(18).cost, decider.decide(17).cost  # in the time left
    (2, 6)
    >>> found = decider.decide(17, fits=fits_any([Shape(cpu_milli=4000)]))  # and without a GPU
    >>> found.config.time_ns, found.rest_configs()[1].time_ns, found.slack_ns
    (9, 2, 6)
    """

    def __init__(self, pipeline: PipelineFrontier, stage: int, *, prunes: bool = False) -> None:
        rests = pipeline.rest(stage)
        configs = pipeline.configs[stage]
        self.configs = useful_configs(configs) if prunes else list(configs)
        self._costs = [pipeline.weighted_cost(stage, config) for config in self.configs]
        self._times_ns = [config.time_ns for config in self.configs]
        self._batches = [config.batch for config in self.configs]
        self._builds = [config.build for config in self.configs]
        self._rests = [rests[config.place] for config in self.configs]
        # Lists of the rest's points, one per candidate: looked up without a step in between.
        self._rest_times = [rest.times_ns for rest in self._rests]
        self._rest_costs = [rest.costs for rest in self._rests]
        # Cells begin at some points of the frontier of this stage and the rest.
        times_ns = pipeline.from_stage(stage).times_ns
        self._cell_starts = times_ns[:: -(-len(times_ns) // _CELLS_MAX)]
        self._cells = self._order()

    @property
    def fastest_ns(self) -> int:
        """The shortest time from this stage to the end of the pipeline."""
        return self._cell_starts[0]

    def _order(self) -> list[tuple[Packed, Packed]]:
        """For each cell: lower bounds on total cost, ascending, and the candidates they are of."""
        ends_ns = np.array([*self._cell_starts[1:], _NO_TIME], dtype=np.int64) - 1
        bounds = np.empty((len(ends_ns), len(self.configs)), dtype=np.int64)
        for number, rest in enumerate(self._rests):
            left_ns = ends_ns - self._times_ns[number]
            indices = np.searchsorted(rest.time_array, left_ns, side="right") - 1
            costs = rest.cost_array[indices] + self._costs[number]
            bounds[:, number] = np.where(indices >= 0, costs, _NO_TIME)
        order = np.argsort(bounds, axis=1, kind="stable")
        ascending = np.take_along_axis(bounds, order, axis=1)
        counts = np.count_nonzero(bounds < _NO_TIME, axis=1).tolist()
        return [
            (_packed(ascending[cell, :count]), _packed(order[cell, :count]))
            for cell, count in enumerate(counts)
        ]

    def decide(
        self,
        budget_ns: int,
        *,
        batch_max: int = UNLIMITED,
        fits: Fits | None = None,
        starts_ns: Sequence[int] | None = None,
        release_ns: int = 0,
    ) -> Decision | None:
        """Return the cheapest configuration with which the rest can end in time; None: none can.

        `batch_max` is the number of requests that wait, `fits` says what fits the free resources,
        `starts_ns[build]` is the time until a build can run, and `release_ns` that until other
        branches of the request end, before which the rest does not begin. O(log points) for each
        candidate that is priced; a few are, unless many do not fit.
        """
        cell = bisect_right(self._cell_starts, budget_ns) - 1
        if cell < 0:
            return None
        best, best_cost, best_index, best_left_ns = -1, _NO_TIME, 0, 0
        bounds, candidates = self._cells[cell]
        for position, number in enumerate(candidates):
            if bounds[position] >= best_cost:
                break
            if self._batches[number] > batch_max:
                continue
            if fits is not None and not fits(self.configs[number]):
                continue
            end_ns = self._times_ns[number]
            if starts_ns is not None:
                end_ns += starts_ns[self._builds[number]]
            left_ns = budget_ns - (end_ns if end_ns > release_ns else release_ns)
            index = bisect_right(self._rest_times[number], left_ns) - 1
            if index >= 0:
                cost = self._costs[number] + self._rest_costs[number][index]
                if cost < best_cost:
                    best, best_cost, best_index, best_left_ns = number, cost, index, left_ns
        if best < 0:
            return None
        return self._decision(best, best_cost, best_index, best_left_ns)

    def fastest(
        self,
        *,
        batch_max: int = UNLIMITED,
        fits: Fits | None = None,
        starts_ns: Sequence[int] | None = None,
        release_ns: int = 0,
    ) -> Decision | None:
        """Return what ends soonest, for requests that are late already; None if nothing fits."""
        best: tuple[int, int, int] | None = None
        for number, config in enumerate(self.configs):
            if config.batch <= batch_max and (fits is None or fits(config)):
                end_ns = self._end_ns(number, starts_ns, release_ns) + self._rest_times[number][0]
                total = (end_ns, self._costs[number] + self._rest_costs[number][0], number)
                best = total if best is None else min(best, total)
        if best is None:
            return None
        _, cost, number = best
        return self._decision(number, cost, 0, self._rest_times[number][0])

    def _end_ns(self, number: int, starts_ns: Sequence[int] | None, release_ns: int) -> int:
        """Return when the rest can begin after a candidate that is chosen now."""
        end_ns = self._times_ns[number]
        if starts_ns is not None:
            end_ns += starts_ns[self._builds[number]]
        return max(end_ns, release_ns)

    def _decision(self, number: int, cost: int, index: int, left_ns: int) -> Decision:
        rest = self._rests[number]
        return Decision(self.configs[number], cost, left_ns - rest.times_ns[index], rest, index)


def _packed(numbers: Ints) -> Packed:
    """Return numbers as an array of machine words: a fifth of the memory of a list of them."""
    packed: Packed = array("q")
    packed.frombytes(np.ascontiguousarray(numbers, dtype=np.int64).tobytes())
    return packed


def fits_any(rooms: Sequence[Shape]) -> Fits:
    """Return a test whether a configuration fits at least one node's free resources.

    >>> fits = fits_any([Shape(cpu_milli=4000, gpu_sevenths=1), Shape(1000, 3)])
    >>> fits(StageConfig(1, 1, cpu_milli=2000, gpu_sevenths=1))
    True
    >>> fits(StageConfig(1, 1, cpu_milli=2000, gpu_sevenths=2))
    False
    """
    cpu_milli_max = [-1] * (GPU_SEVENTHS_MAX + 1)  # by share: most vCPUs of a node with as much
    for room in rooms:
        for sevenths in range(min(room.gpu_sevenths, GPU_SEVENTHS_MAX) + 1):
            cpu_milli_max[sevenths] = max(cpu_milli_max[sevenths], room.cpu_milli)

    def fits(config: StageConfig) -> bool:
        return config.cpu_milli <= cpu_milli_max[config.gpu_sevenths]

    return fits


def useful_configs(configs: Sequence[StageConfig]) -> list[StageConfig]:
    """Drop the configurations that another one of the same build replaces wherever they fit.

    The other takes no more of anything: time, cost, batch, vCPUs, GPU share. Of equal ones the
    first stays. O(n**2).
    """
    amounts = np.array(
        [(c.time_ns, c.cost, c.batch, c.cpu_milli, c.gpu_sevenths) for c in configs], dtype=np.int64
    )
    kinds = np.array([(c.build, c.place) for c in configs], dtype=np.int64)
    no_more = np.ones((len(configs), len(configs)), dtype=np.bool_)  # row: what replaces column
    equal = np.ones_like(no_more)
    for column in amounts.T:
        no_more &= column[:, None] <= column[None, :]
        equal &= column[:, None] == column[None, :]
    for column in kinds.T:
        no_more &= column[:, None] == column[None, :]
    no_more &= ~equal | np.triu(no_more, k=1)  # of equal ones, the first replaces the others
    return [configs[number] for number in np.flatnonzero(~no_more.any(axis=0)).tolist()]
