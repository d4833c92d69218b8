"""Best-first search over the configurations of all stages, with a limit on its expansions.

Mahgoub, Yi, Shankar, Elnikety, Chaterji and Bagchi, "ORION and the Three Rights: Sizing, Bundling,
and Prewarming for Serverless DAGs" (OSDI 2022) sizes a whole pipeline at once. Its search begins
with every stage at its smallest size and takes steps that enlarge one stage, until the latency of
the pipeline is within the objective. What is kept of it, and what is ours [own]:

- A state has one configuration per stage. In the first one every stage has its cheapest. A step
  moves one stage to the next configuration on its own frontier of time and cost [own: Orion's
  sizes are one-dimensional, and there as well each step costs more and saves time].
- The latency of a state is that of the critical path, by the profile [own: Orion composes
  distributions, and profiles have a single time for each batch size].
- The state with the lowest cost is expanded first, as ESG's comparison frames it: the first state
  in time is the cheapest one [own: Orion's public code goes on from the one state of lowest
  latency; it finds a state in time sooner, and pays more than needed].
- At the limit the fastest state so far is taken, as ESG's comparison frames it; or the search goes
  on from there as Orion's public code does, by the step of lowest latency, until the state is in
  time: at most one expansion more for each size of each stage. Either is a choice of the caller
  [own]. If not even the fastest configurations are in time, they are taken without a search [own].

Unlike ESG_1Q it has no bounds, so the number of expansions is exponential in the number of stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from operator import attrgetter
from typing import final

from headgate.planning.frontier.configs import StageConfig, check_configs
from headgate.planning.frontier.graph import StageGraph


@dataclass(frozen=True, slots=True)
class SizingPlan:
    """One configuration per stage, with the time and cost of all, and the work it took."""

    configs: tuple[StageConfig, ...]
    time_ns: int
    cost: int
    expansions: int  # states that were taken from the heap
    is_complete: bool = True  # False: the limit was reached before the cheapest in time was found


@final
class OrionSearch:
    """The search over the candidates of a pipeline's stages. Raises `ConfigError` if one has none.

    >>> configs = [StageConfig(time_ns=1, cost=10), StageConfig(time_ns=4, cost=1)]
    >>> search = OrionSearch(StageGraph([[], [0]]), [configs, configs])
    >>> search.search(6)
    SizingPlan(configs=(...), time_ns=5, cost=11, expansions=2, is_complete=True)
    >>> search.search(6, expansions_max=1).time_ns
    8
    >>> search.search(6, expansions_max=1, goes_on=True).time_ns
    5
    """

    def __init__(self, graph: StageGraph, stages: Sequence[Sequence[StageConfig]]) -> None:
        for name, configs in zip(graph.names, stages, strict=True):
            check_configs(name, configs)
        self._graph = graph
        self._sizes = [_sizes(configs) for configs in stages]
        self._times_ns = [[config.time_ns for config in sizes] for sizes in self._sizes]
        self._costs = [[config.cost for config in sizes] for sizes in self._sizes]
        self._fastest_ns = graph.makespan_ns([times_ns[-1] for times_ns in self._times_ns])

    def search(
        self, budget_ns: int, *, expansions_max: int | None = None, goes_on: bool = False
    ) -> SizingPlan:
        """Return the cheapest configurations in time.

        At the limit return the fastest so far or, if the search `goes_on`, what is in time next.
        """
        if self._fastest_ns > budget_ns:
            fastest = tuple(len(sizes) - 1 for sizes in self._sizes)
            return self._plan(fastest, self._fastest_ns, 1, is_complete=True)
        first = (0,) * len(self._sizes)
        best, best_ns = first, -1
        serial = expansions = 0  # ties in the heap are first in, first out
        # (cost, serial, state, stage that was enlarged last). A state is reached in one way alone:
        # by steps in the order of the stages.
        heap = [(sum(costs[0] for costs in self._costs), 0, first, 0)]
        while heap and (expansions_max is None or expansions < expansions_max):
            cost, _, state, last = heappop(heap)
            expansions += 1
            time_ns = self._time_ns(state)
            if best_ns < 0 or time_ns < best_ns:
                best, best_ns = state, time_ns
            if time_ns <= budget_ns:
                return self._plan(state, time_ns, expansions, is_complete=True)
            for stage in range(last, len(state)):
                size = state[stage] + 1
                costs = self._costs[stage]
                if size < len(costs):
                    serial += 1
                    larger = (*state[:stage], size, *state[stage + 1 :])
                    dearer = cost + costs[size] - costs[size - 1]
                    heappush(heap, (dearer, serial, larger, stage))
        while goes_on and best_ns > budget_ns:
            best_ns, best = min((self._time_ns(state), state) for state in self._enlarged(best))
            expansions += 1
        return self._plan(best, best_ns, expansions, is_complete=False)

    def _enlarged(self, state: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yield the states in which one stage is a size larger; the largest of all has none."""
        for stage, size in enumerate(state):
            if size + 1 < len(self._sizes[stage]):
                yield (*state[:stage], size + 1, *state[stage + 1 :])

    def _time_ns(self, state: tuple[int, ...]) -> int:
        times_ns = [times[size] for times, size in zip(self._times_ns, state, strict=True)]
        return self._graph.makespan_ns(times_ns)

    def _plan(
        self, state: tuple[int, ...], time_ns: int, expansions: int, *, is_complete: bool
    ) -> SizingPlan:
        configs = tuple(sizes[size] for sizes, size in zip(self._sizes, state, strict=True))
        cost = sum(config.cost for config in configs)
        return SizingPlan(configs, time_ns, cost, expansions, is_complete)


def _sizes(configs: Sequence[StageConfig]) -> list[StageConfig]:
    """The frontier of a stage: the cheapest configuration first, each one faster and dearer."""
    sizes: list[StageConfig] = []
    for config in sorted(configs, key=attrgetter("cost", "time_ns")):
        if not sizes or config.time_ns < sizes[-1].time_ns:
            sizes.append(config)
    return sizes
