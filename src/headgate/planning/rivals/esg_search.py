"""ESG_1Q: the K cheapest configuration paths of a sequence of stages within a time, by A*.

Hui, Xu, Guo and Shen, "ESG: Pipeline-Conscious Efficient Scheduling of DNN Workflows on Serverless
Platforms with Shareable GPUs" (HPDC 2024). A path is one configuration for each stage; a partial
path has those of the first stages. Of a partial path with time T and cost R, behind which the
stages j, j + 1, ... are left:

- `T + (shortest times of the rest)` is a lower bound on its time. If it is over the budget no
  completion is in time: the *time blade* drops it.
- `R + (lowest costs of the rest)` is a lower bound on its cost: the order in which A* expands.
- `R + (costs of the fastest configurations of the rest)` is the cost of a completion that is in
  time, so an upper bound. If the lower bound of a partial path exceeds the K-th smallest upper
  bound of different completions, K better paths exist: the *cost blade* drops it.

The configurations of a stage are sorted by cost, and siblings are generated one at a time, so what
the cost blade drops takes all later siblings with it. Both bounds are admissible, and paths leave
the heap in order of their lower bounds: the first K complete ones are the K cheapest.

Three steps that the paper does not have make bounds tighter and leave the K lowest costs the same;
`is_plain` leaves them out:

- the time blade first cuts single configurations with which no path at all is in time;
- a configuration is left out if K others of its stage are no slower and cost no more: a path with
  it has K alternatives that are as good;
- stages are searched in descending order of their lowest cost, so that what is left to bound is
  small. The order of stages matters to no sum.

`brute_force` looks at every combination, also of pipelines that are no sequences; `PathTable` lists
all of them once.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from itertools import product
from operator import attrgetter
from typing import final

from headgate.planning.frontier.configs import StageConfig, check_configs, infeasible
from headgate.planning.frontier.graph import StageGraph


@dataclass(frozen=True, slots=True)
class ConfigPath:
    """One configuration per stage, with the time and cost of all of them."""

    configs: tuple[StageConfig, ...]
    time_ns: int
    cost: int


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The cheapest paths, and the work it took to find them."""

    paths: tuple[ConfigPath, ...]  # the cheapest first; fewer than K if fewer are in time
    expansions: int  # partial and complete paths that were taken from the heap
    is_complete: bool = True  # False: the limit on expansions was reached


@final
class _SearchStage:
    """The configurations of a stage, sorted by cost, and bounds on the stages behind it."""

    __slots__ = (
        "configs",
        "costs",
        "faster",
        "fastest",
        "number",
        "rest_fast_cost",
        "rest_low_cost",
        "rest_ns",
        "times_ns",
    )

    def __init__(self, number: int, configs: list[StageConfig]) -> None:
        self.number = number  # in the order of the pipeline
        self.configs = configs
        self.times_ns = [config.time_ns for config in configs]
        self.costs = [config.cost for config in configs]
        self.fastest = self.times_ns.index(min(self.times_ns))  # the cheapest of them
        self.faster: list[int] = []
        self.rest_ns = self.rest_low_cost = self.rest_fast_cost = 0

    def prepare(self, behind: _SearchStage | None) -> None:
        """Compute what a search needs, given the stage that is searched next."""
        count = len(self.costs)
        # The next configuration that is faster: where one is too slow, so are those in between.
        self.faster = [count] * count
        for index in reversed(range(count - 1)):
            following = index + 1
            while following < count and self.times_ns[following] >= self.times_ns[index]:
                following = self.faster[following]
            self.faster[index] = following
        if behind is not None:
            self.rest_ns = behind.times_ns[behind.fastest] + behind.rest_ns
            self.rest_low_cost = behind.costs[0] + behind.rest_low_cost
            self.rest_fast_cost = behind.costs[behind.fastest] + behind.rest_fast_cost

    def within(self, limit_ns: int, paths_max: int) -> _SearchStage:
        """Return the stage without configurations that are too slow, or that K others replace."""
        kept: list[StageConfig] = []
        kept_ns: list[int] = []  # ascending
        for config, time_ns in zip(self.configs, self.times_ns, strict=True):
            if time_ns <= limit_ns:
                position = bisect_right(kept_ns, time_ns)
                if position < paths_max:  # all before it in `configs` cost no more
                    kept.append(config)
                    kept_ns.insert(position, time_ns)
        return _SearchStage(self.number, kept)


@final
class EsgSearch:
    """ESG_1Q over the candidates of a sequence of stages.

    >>> configs = [StageConfig(time_ns=1, cost=10), StageConfig(time_ns=4, cost=1)]
    >>> found = EsgSearch([configs, configs]).search(6, 2)
    >>> [(path.cost, path.time_ns) for path in found.paths]
    [(11, 5), (11, 5)]
    """

    def __init__(
        self,
        stages: Sequence[Sequence[StageConfig]],
        names: Sequence[str] = (),
        *,
        is_plain: bool = False,
    ) -> None:
        assert stages
        self._is_plain = is_plain
        self._names = tuple(names) or tuple(str(index) for index in range(len(stages)))
        self._stages: list[_SearchStage] = []
        for number, (name, configs) in enumerate(zip(self._names, stages, strict=True)):
            check_configs(name, configs)
            by_cost = sorted(configs, key=attrgetter("cost", "time_ns"))
            self._stages.append(_SearchStage(number, by_cost))
        self._fastest_ns = sum(stage.times_ns[stage.fastest] for stage in self._stages)

    @property
    def fastest(self) -> ConfigPath:
        """The fastest path: ESG's choice where no path is in time."""
        configs = tuple(stage.configs[stage.fastest] for stage in self._stages)
        return ConfigPath(configs, self._fastest_ns, sum(config.cost for config in configs))

    def search(
        self, budget_ns: int, paths_max: int = 5, *, expansions_max: int | None = None
    ) -> SearchResult:
        """Return the `paths_max` cheapest paths within a time.

        A limit on expansions is a limit on time: then the paths found so far are the cheapest of
        all, but there may be fewer of them than asked for. Raises `InfeasibleError` if no path is
        in time.
        """
        assert paths_max > 0
        if self._fastest_ns > budget_ns:
            raise infeasible(budget_ns, self._fastest_ns, self._names)
        stages = self._prepared(budget_ns, paths_max)
        # Largest first: the negated upper bounds of `paths_max` different completions. A partial
        # path that ends in a stage's fastest configuration has the completion of the one before.
        uppers = [-sum(stage.costs[stage.fastest] for stage in stages)]
        expansions = serial = 0  # ties in the heap are first in, first out
        found: list[ConfigPath] = []
        last = len(stages) - 1
        # (lower bound, serial, stage, configuration, time and cost before it, path before it)
        heap: list[tuple[int, int, int, int, int, int, tuple[int, ...]]] = []
        heap.append((0, 0, -1, 0, 0, 0, ()))
        while heap:
            if expansions_max is not None and expansions >= expansions_max:
                return SearchResult(tuple(found), expansions, is_complete=False)
            _, _, number, index, before_ns, before, path = heappop(heap)
            expansions += 1
            new = []  # (stage, configuration, time and cost before it, path before it)
            if number >= 0:
                stage = stages[number]
                new.append((number, index + 1, before_ns, before, path))
                before_ns += stage.times_ns[index]
                before += stage.costs[index]
                path = (*path, index)
            if number == last:
                found.append(_path(stages, path, before_ns, before))
                if len(found) == paths_max:
                    break
            else:
                new.append((number + 1, 0, before_ns, before, path))
            for number, index, before_ns, before, path in new:
                stage = stages[number]
                limit_ns = budget_ns - before_ns - stage.rest_ns
                count = len(stage.costs)
                while index < count and stage.times_ns[index] > limit_ns:
                    index = stage.faster[index]
                if index == count:
                    continue
                cost = before + stage.costs[index]
                lower = cost + stage.rest_low_cost
                if len(uppers) == paths_max and lower > -uppers[0]:
                    continue
                if index != stage.fastest:
                    upper = cost + stage.rest_fast_cost
                    if len(uppers) < paths_max:
                        heappush(uppers, -upper)
                    elif upper < -uppers[0]:
                        heapreplace(uppers, -upper)
                serial += 1
                heappush(heap, (lower, serial, number, index, before_ns, before, path))
        return SearchResult(tuple(found), expansions)

    def _prepared(self, budget_ns: int, paths_max: int) -> list[_SearchStage]:
        """Return the stages in the order of the search, the last one prepared first."""
        stages = self._stages
        if not self._is_plain:
            slack_ns = budget_ns - self._fastest_ns
            stages = [
                stage.within(slack_ns + stage.times_ns[stage.fastest], paths_max)
                for stage in stages
            ]
            stages.sort(key=lambda stage: -stage.costs[0])
        behind: _SearchStage | None = None
        for stage in reversed(stages):
            stage.prepare(behind)
            behind = stage
        return stages


def _path(
    stages: Sequence[_SearchStage], path: Sequence[int], time_ns: int, cost: int
) -> ConfigPath:
    """Return a path in the order of the pipeline."""
    configs = {stage.number: stage.configs[c] for stage, c in zip(stages, path, strict=True)}
    return ConfigPath(tuple(configs[number] for number in range(len(stages))), time_ns, cost)


def brute_force(
    stages: Sequence[Sequence[StageConfig]],
    budget_ns: int,
    paths_max: int = 5,
    *,
    graph: StageGraph | None = None,
) -> tuple[ConfigPath, ...]:
    """Return the cheapest paths within a time by looking at every combination.

    Stages are a sequence unless a graph says otherwise. The product of the numbers of
    configurations is the number of steps.
    """
    assert paths_max > 0
    found: list[tuple[int, int, int, tuple[StageConfig, ...]]] = []  # the worst one first
    for serial, configs in enumerate(product(*stages)):
        cost = sum([config.cost for config in configs])
        if len(found) == paths_max and cost > -found[0][0]:
            continue
        times_ns = [config.time_ns for config in configs]
        time_ns = sum(times_ns) if graph is None else graph.makespan_ns(times_ns)
        if time_ns <= budget_ns:
            path = (-cost, -time_ns, -serial, configs)
            if len(found) < paths_max:
                heappush(found, path)
            elif path > found[0]:
                heapreplace(found, path)
    return tuple(ConfigPath(c, -time_ns, -cost) for cost, time_ns, _, c in sorted(found)[::-1])


@final
class PathTable:
    """All paths of a sequence of stages, the cheapest first: brute force that is asked again.

    The product of the numbers of configurations is the length of the table.

    >>> configs = [StageConfig(time_ns=1, cost=10), StageConfig(time_ns=4, cost=1)]
    >>> table = PathTable([configs, configs])
    >>> [[config.cost for config in path] for path in table.cheapest(6, 2)]
    [[10, 1], [1, 10]]
    """

    def __init__(self, stages: Sequence[Sequence[StageConfig]]) -> None:
        assert stages
        self._stages = [list(configs) for configs in stages]
        sums = [
            (
                sum([config.cost for config in path]),
                sum([config.time_ns for config in path]),
                serial,
            )
            for serial, path in enumerate(product(*self._stages))
        ]
        sums.sort()
        # Machine words, because tables are long; a path is known by its place in the product.
        self._times_ns = array("q", [time_ns for _, time_ns, _ in sums])
        self._serials = array("q", [serial for _, _, serial in sums])

    def __len__(self) -> int:
        return len(self._serials)

    def cheapest(self, budget_ns: int, paths_max: int) -> list[tuple[StageConfig, ...]]:
        """Return what `brute_force` returns; the fastest path alone if none is in time."""
        found: list[tuple[StageConfig, ...]] = []
        for place, time_ns in enumerate(self._times_ns):
            if time_ns <= budget_ns:
                found.append(self._path(self._serials[place]))
                if len(found) == paths_max:
                    break
        if not found:
            fastest_ns = min(self._times_ns)
            found.append(self._path(self._serials[self._times_ns.index(fastest_ns)]))
        return found

    def _path(self, serial: int) -> tuple[StageConfig, ...]:
        path: list[StageConfig] = []
        for configs in reversed(self._stages):
            serial, number = divmod(serial, len(configs))
            path.append(configs[number])
        return tuple(reversed(path))
