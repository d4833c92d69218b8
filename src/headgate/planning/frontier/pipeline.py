"""The frontier of a pipeline, and of what is left of it behind each stage.

A pipeline is decomposed (`graph`) and its parts compose (`pareto`). Three things need more than
that:

**Moving data.** An edge takes time and cost that depend on whether its two stages are at the same
place, so their configurations do not compose independently. Such an edge becomes a node of its
own between its stages, and a part is not one frontier but a table of them, keyed by the places of
its *open* stages: those that an edge outside the part still asks for. Joining two parts pairs the
entries that agree on shared stages; a stage that no other part mentions is closed by taking the
best of its places. With p places a chain has tables of p entries, a fork and join of p**2. Without
such edges every table has one entry.

**Prime parts.** What is neither series nor parallel is composed exactly within a bound on the work
(`prime`). Beyond the bound it is grouped by its dominator tree: plans are valid, but perhaps not
the cheapest ones (`is_exact` says so).

**Profiles that drift.** Tables are kept by the set of stages they cover. `with_configs` returns
a pipeline with another list for one stage that shares all tables without that stage. If the points
of the stage that are not dominated stay the same, it shares everything.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Final, final

from headgate.core.errors import ConfigError
from headgate.planning.frontier.configs import (
    SUM_MAX,
    StageConfig,
    check_configs,
    infeasible,
)
from headgate.planning.frontier.graph import Decomposition, StageGraph
from headgate.planning.frontier.pareto import (
    Frontier,
    constant,
    either,
    leaf,
    parallel,
    series,
    thin,
    tolerance_step,
    weighted,
)
from headgate.planning.frontier.prime import PRIME_WORK_MAX, compose_prime, quotient

Places = tuple[tuple[int, int], ...]  # of the open stages: (stage, place), ascending
Table = dict[Places, Frontier]
_PROBABILITY_DENOMINATOR: Final = 10**6


@dataclass(frozen=True, slots=True)
class Edge:
    """What it takes to move the result of one stage to another, by locality."""

    before: int
    after: int
    remote_ns: int
    remote_cost: int = 0
    local_ns: int = 0  # both stages at the same place
    local_cost: int = 0

    def between(self, place: int, other: int) -> tuple[int, int]:
        """Return time and cost of a transfer from one place to another."""
        if place == other:
            return self.local_ns, self.local_cost
        return self.remote_ns, self.remote_cost


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """A configuration for each stage, with the time and cost of a request."""

    configs: tuple[StageConfig, ...]
    ends_ns: tuple[int, ...]  # by stage, after arrival
    time_ns: int
    cost: int  # expected, if some stages run with a probability


@final
class PipelineFrontier:
    """Frontiers of a pipeline, built when asked for and kept.

    `configs[i]` are the candidates of stage i, `visits[i]` the probability that it runs: it
    weighs costs, while times count in full. A `tolerance` of 0.01 lets plans cost up to 1 % more
    than the optimum, and never makes them late (proof in `pareto`); 0 is exact. Raises
    `ConfigError`.

    >>> chain = StageGraph([[], [0]])
    >>> configs = [StageConfig(time_ns=1, cost=10), StageConfig(time_ns=4, cost=1)]
    >>> pipeline = PipelineFrontier(chain, [configs, configs])
    >>> pipeline.whole.times_ns, pipeline.whole.costs, pipeline.plan(6).cost
    ([2, 5, 8], [20, 11, 2], 11)
    """

    def __init__(
        self,
        graph: StageGraph,
        configs: Sequence[Sequence[StageConfig]],
        *,
        edges: Sequence[Edge] = (),
        visits: Sequence[float | Fraction] = (),
        tolerance: float | Fraction = 0,
        work_max: int = PRIME_WORK_MAX,
    ) -> None:
        assert len(configs) == len(graph)
        for name, each in zip(graph.names, configs, strict=True):
            check_configs(name, each)
        if not 0 <= tolerance <= 1:
            raise ConfigError(f"the tolerance is {tolerance}", allowed="0 to 1")
        self.graph = graph
        self.configs = tuple(tuple(each) for each in configs)
        self.visits = tuple(_fraction(each) for each in visits) or (Fraction(1),) * len(graph)
        if not all(0 <= each <= 1 for each in self.visits):
            raise ConfigError("a stage runs with a probability", allowed="0 to 1")
        self.tolerance = _fraction(tolerance)
        self._work_max = work_max
        self._given_edges = tuple(edges)
        self._places = [sorted({config.place for config in each}) for each in self.configs]
        self._nodes, self._edges = _with_edges(graph, edges, self._places)
        self._mentions = self._count_mentions()
        self._step = tolerance_step(self.tolerance, len(self._nodes))
        self._tables: dict[tuple[int, int], Table] = {}  # by nodes, and edges that are ignored
        self._grouped: set[int] = set()  # parts that were grouped, and are not exact
        self._rests: dict[int, Decomposition] = {}
        self._capped: dict[int, PipelineFrontier] = {}
        self._check_sums()

    def _count_mentions(self) -> dict[int, int]:
        """For each stage whose place matters to an edge: the nodes that mention it."""
        mentions: dict[int, int] = {}
        for node, edge in self._edges.items():
            outcomes = {
                edge.between(*pair)
                for pair in product(self._places[edge.before], self._places[edge.after])
            }
            for stage in (edge.before, edge.after):
                if len(outcomes) > 1 and len(self._places[stage]) > 1:
                    mentions[stage] = mentions.get(stage, 1 << stage) | 1 << node
        return mentions

    def _check_sums(self) -> None:
        edges = self._edges.values()
        times = sum(max(c.time_ns for c in each) for each in self.configs)
        times += sum(max(edge.remote_ns, edge.local_ns) for edge in edges)
        costs = sum(max(c.cost for c in each) for each in self.configs)
        costs += sum(max(edge.remote_cost, edge.local_cost) for edge in edges)
        if max(times, costs) > SUM_MAX:
            raise ConfigError("the times or costs of the pipeline add up to more than 2**62")

    @property
    def whole(self) -> Frontier:
        """The frontier of the whole pipeline."""
        return self._build(self._decomposition((1 << len(self._nodes)) - 1))[()]

    @property
    def is_exact(self) -> bool:
        """Whether every frontier that was built so far is exact, up to the tolerance."""
        return not self._grouped

    def rest(self, stage: int) -> Mapping[int, Frontier]:
        """Return, for each place of a stage, the frontier of everything that waits for it.

        The time of a point counts from the end of the stage. Exact if the stages that the rest
        waits for beside this one end no later than this one, as always in a chain; otherwise the
        cost is a lower bound, because another branch may leave less time. Costs are those of a
        request, weighted by `visits`.
        """
        nodes, ignored = self._behind(stage)
        if not nodes:
            return dict.fromkeys(self._places[stage], constant())
        table = self._build(self._decomposition(nodes), ignored)
        return {place: _entry(table, stage, place) for place in self._places[stage]}

    def from_stage(self, stage: int) -> Frontier:
        """Return the frontier of a stage and everything that waits for it."""
        nodes, ignored = self._behind(stage)
        for node, edge in self._edges.items():
            if edge.after == stage:
                ignored |= 1 << node
        return self._build(self._decomposition(nodes | 1 << stage), ignored)[()]

    def _behind(self, stage: int) -> tuple[int, int]:
        """Return the nodes that wait for a stage, and the edges from other branches to them.

        Edges from other branches do not count: their data is there when the stage ends.
        """
        nodes = self._nodes.precedes[stage]
        own = nodes | 1 << stage
        ignored = 0
        for node, edge in self._edges.items():
            if nodes >> edge.after & 1 and not own >> edge.before & 1:
                ignored |= 1 << node
        return nodes & ~ignored, ignored

    def plan(self, budget_ns: int) -> PipelinePlan:
        """Return the cheapest plan within a time. Raises `InfeasibleError` if there is none."""
        whole = self.whole
        index = whole.cheapest_within(budget_ns)
        if index is None:
            fastest = self._configs_at(whole, 0)
            times = self._times_ns(fastest)
            path = [node for node in self._nodes.longest_path(times) if node < len(self.graph)]
            names = [self.graph.names[stage] for stage in path]
            raise infeasible(budget_ns, whole.fastest_ns, names)
        return self.plan_at(index)

    def plan_at(self, index: int) -> PipelinePlan:
        """Return the plan of a point of the whole pipeline's frontier."""
        configs = self._configs_at(self.whole, index)
        ends = self._nodes.ends_ns(self._times_ns(configs))
        cost = self.whole.costs[index]
        return PipelinePlan(configs, tuple(ends[: len(self.graph)]), max(ends), cost)

    def fastest_rest_ns(self, stage: int, place: int) -> int:
        """Return the shortest time of everything that waits for a stage at a place."""
        return self.rest(stage)[place].fastest_ns

    def weighted_cost(self, stage: int, config: StageConfig) -> int:
        """Return what a configuration of a stage adds to the expected cost of a request."""
        return weighted(config.cost, self.visits[stage])

    def with_configs(self, stage: int, configs: Sequence[StageConfig]) -> PipelineFrontier:
        """Return the pipeline with other candidates for a stage. Equal to building it anew."""
        lists = [configs if index == stage else each for index, each in enumerate(self.configs)]
        other = PipelineFrontier(
            self.graph,
            lists,
            edges=self._given_edges,
            visits=self.visits,
            tolerance=self.tolerance,
            work_max=self._work_max,
        )
        if other._places != self._places:
            return other  # its edges are others too
        changed = 1 << stage if self._has_changed(stage, configs) else 0
        other._nodes, other._rests = self._nodes, self._rests
        other._tables = {key: t for key, t in self._tables.items() if not key[0] & changed}
        other._grouped = {s for s in self._grouped if not s & changed}
        other._capped = {
            level: each.with_configs(stage, [c for c in configs if c.batch <= level])
            for level, each in self._capped.items()
        }
        return other

    def _has_changed(self, stage: int, configs: Sequence[StageConfig]) -> bool:
        """Whether other candidates of a stage give another frontier, or other configurations."""
        old, new = (self._stage_table(stage, each) for each in (self.configs[stage], configs))
        return any(
            [frontier.configs_at(i) for i in range(len(frontier))]
            != [new[key].configs_at(i) for i in range(len(new[key]))]
            for key, frontier in old.items()
        )

    def capped(self, batch_max: int) -> PipelineFrontier:
        """Return the pipeline without configurations of larger batches: too few requests wait.

        Kept for each batch size that occurs. Raises `ConfigError` if a stage has none left.
        """
        sizes = sorted({config.batch for each in self.configs for config in each})
        level = sizes[max(0, bisect_right(sizes, batch_max) - 1)]
        if level == sizes[-1] and batch_max >= level:
            return self
        if level not in self._capped:
            self._capped[level] = PipelineFrontier(
                self.graph,
                [[c for c in each if c.batch <= batch_max] for each in self.configs],
                edges=self._given_edges,
                visits=self.visits,
                tolerance=self.tolerance,
                work_max=self._work_max,
            )
        return self._capped[level]

    def _configs_at(self, frontier: Frontier, index: int) -> tuple[StageConfig, ...]:
        configs = frontier.configs_at(index)
        return tuple(configs[stage] for stage in range(len(self.graph)))

    def _times_ns(self, configs: Sequence[StageConfig]) -> list[int]:
        """Return the times of all nodes: stages, then edges."""
        times = [config.time_ns for config in configs]
        for edge in self._edges.values():
            pair = configs[edge.before].place, configs[edge.after].place
            times.append(edge.between(*pair)[0])
        return times

    def _decomposition(self, nodes: int) -> Decomposition:
        if nodes not in self._rests:
            self._rests[nodes] = self._nodes.decompose(nodes)
        return self._rests[nodes]

    def _build(self, tree: Decomposition, ignored: int = 0) -> Table:
        """Return the table of a part. Chains are built from their end, so suffixes are shared.

        `ignored` are edges from outside that ask for no place.
        """
        if (tree.stages, ignored) in self._tables:
            return self._tables[tree.stages, ignored]
        if tree.kind == "leaf":
            node = tree.stages.bit_length() - 1
            if node in self._edges:
                table = self._edge_table(node)
            else:
                table = self._stage_table(node, self.configs[node])
        elif tree.kind == "prime":
            table = self._prime(tree, ignored)
        elif tree.kind == "series":
            first, *others = tree.parts
            behind = tree.stages & ~first.stages
            rest = others[0] if len(others) == 1 else Decomposition("series", behind, (*others,))
            table = _joined(self._build(first, ignored), self._build(rest, ignored), series)
        else:
            table = self._build(tree.parts[0], ignored)
            for part in tree.parts[1:]:
                table = _joined(table, self._build(part, ignored), parallel)
        table = self._closed(table, tree.stages | ignored)
        if tree.kind != "leaf":
            table = {key: thin(frontier, self._step) for key, frontier in table.items()}
        self._tables[tree.stages, ignored] = table
        return table

    def _stage_table(self, stage: int, configs: Sequence[StageConfig]) -> Table:
        weight = self.visits[stage]
        if stage not in self._mentions:
            return {(): leaf(stage, configs, weight)}
        return {
            ((stage, place),): leaf(stage, [c for c in configs if c.place == place], weight)
            for place in self._places[stage]
        }

    def _edge_table(self, node: int) -> Table:
        edge = self._edges[node]
        table: Table = {}
        ends = (edge.before, edge.after)
        for places in product(self._places[edge.before], self._places[edge.after]):
            time_ns, cost = edge.between(*places)
            pairs = zip(ends, places, strict=True)
            mentioned = [pair for pair in pairs if self._mentions.get(pair[0], 0) >> node & 1]
            key = tuple(sorted(mentioned))
            table[key] = constant(time_ns, weighted(cost, self.visits[edge.after]))
        return table

    def _closed(self, table: Table, covered: int) -> Table:
        """Take the best place of every stage that nothing outside the part asks for."""
        merged: dict[Places, list[Frontier]] = {}
        for key, frontier in table.items():
            still_open = tuple((s, place) for s, place in key if self._mentions[s] & ~covered)
            merged.setdefault(still_open, []).append(frontier)
        return {key: either(frontiers) for key, frontiers in merged.items()}

    def _prime(self, tree: Decomposition, ignored: int) -> Table:
        """Return the table of a part that is neither series nor parallel."""
        after = quotient(self._nodes, tree.parts)
        tables = [self._build(part, ignored) for part in tree.parts]
        table: Table = {}
        for entries in product(*(table.items() for table in tables)):
            key = _merged([key for key, _ in entries])
            if key is not None:
                parts = [frontier for _, frontier in entries]
                table[key], is_exact = compose_prime(parts, after, self._work_max)
                if not is_exact:
                    self._grouped.add(tree.stages)
        return table


def _fraction(number: float | Fraction) -> Fraction:
    return Fraction(number).limit_denominator(_PROBABILITY_DENOMINATOR)


def _with_edges(
    graph: StageGraph, edges: Sequence[Edge], places: Sequence[Sequence[int]]
) -> tuple[StageGraph, dict[int, Edge]]:
    """Return the graph with a node for each edge that can take anything, and those nodes."""
    pairs = {(edge.before, edge.after) for edge in edges}
    if len(pairs) < len(edges):
        raise ConfigError("two edges connect the same stages")
    after = [list(before) for before in graph.after]
    names = list(graph.names)
    nodes: dict[int, Edge] = {}
    for edge in edges:
        if not 0 <= edge.after < len(graph) or edge.before not in graph.after[edge.after]:
            problem = f"stage {edge.after} does not wait for stage {edge.before}"
            raise ConfigError(f"edge {edge.before} > {edge.after}: {problem}")
        if min(edge.local_ns, edge.local_cost, edge.remote_ns, edge.remote_cost) < 0:
            raise ConfigError(f"edge {edge.before} > {edge.after}: takes less than nothing")
        outcomes = [edge.between(*p) for p in product(places[edge.before], places[edge.after])]
        if any(outcome != (0, 0) for outcome in outcomes):
            node = len(after)
            nodes[node] = edge
            after.append([edge.before])
            names.append(f"{graph.names[edge.before]} > {graph.names[edge.after]}")
            after[edge.after].remove(edge.before)
            after[edge.after].append(node)
    return StageGraph(after, names), nodes


def _joined(
    first: Table, second: Table, compose: Callable[[Frontier, Frontier], Frontier]
) -> Table:
    """Compose the entries of two tables that agree on the places of shared stages."""
    joined: Table = {}
    for (key, frontier), (other_key, other) in product(first.items(), second.items()):
        merged = _merged([key, other_key])
        if merged is not None:
            joined[merged] = compose(frontier, other)
    return joined


def _merged(keys: Sequence[Places]) -> Places | None:
    """Return the places of several keys together; None if they disagree."""
    merged: dict[int, int] = {}
    for stage, place in (pair for key in keys for pair in key):
        if merged.setdefault(stage, place) != place:
            return None
    return tuple(sorted(merged.items()))


def _entry(table: Table, stage: int, place: int) -> Frontier:
    """Return the entry for a place of the one stage that may be open."""
    return table[((stage, place),)] if ((stage, place),) in table else table[()]
