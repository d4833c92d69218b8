"""Random pipelines with candidates, and what brute force finds, for the tests of frontiers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from random import Random

from headgate.planning.frontier.configs import StageConfig
from headgate.planning.frontier.graph import StageGraph
from headgate.planning.frontier.pipeline import Edge

Configs = list[list[StageConfig]]
Points = list[tuple[int, int]]


def random_graph(rng: Random, stages: int) -> StageGraph:
    """Any DAG: each stage waits for some of those before it, under shuffled numbers."""
    density = rng.choice((0.2, 0.4, 0.7))
    numbers = list(range(stages))
    rng.shuffle(numbers)
    after: list[list[int]] = [[] for _ in numbers]
    for position, number in enumerate(numbers):
        after[number] = [before for before in numbers[:position] if rng.random() < density]
    return StageGraph(after)


def random_configs(rng: Random, stages: int, count: int, places: int = 1) -> Configs:
    """Small numbers, so that ties and equal points occur."""
    high = rng.choice((4, 12, 1_000_000))
    return [
        [
            StageConfig(
                time_ns=rng.randint(0, high),
                cost=rng.randint(0, high),
                batch=rng.choice((1, 2, 4)),
                cpu_milli=1000 * rng.randint(1, 4),
                gpu_sevenths=rng.randint(0, 7),
                build=rng.randint(0, 1),
                place=rng.randrange(places),
            )
            for _ in range(rng.randint(1, count))
        ]
        for _ in range(stages)
    ]


def random_edges(rng: Random, graph: StageGraph) -> list[Edge]:
    return [
        Edge(before, after, rng.randint(0, 8), rng.randint(0, 8), rng.randint(0, 1))
        for after, befores in enumerate(graph.after)
        for before in befores
        if rng.random() < 0.7
    ]


def makespan_ns(
    graph: StageGraph, configs: Sequence[StageConfig], edges: Sequence[Edge] = ()
) -> int:
    """The end of the last stage, from the definition."""
    delays = {
        (edge.before, edge.after): edge.local_ns
        if configs[edge.before].place == configs[edge.after].place
        else edge.remote_ns
        for edge in edges
    }
    ends: dict[int, int] = {}
    while len(ends) < len(configs):
        for stage, before in enumerate(graph.after):
            if stage not in ends and all(each in ends for each in before):
                start = max([ends[b] + delays.get((b, stage), 0) for b in before], default=0)
                ends[stage] = start + configs[stage].time_ns
    return max(ends.values())


def total_cost(configs: Sequence[StageConfig], edges: Sequence[Edge] = ()) -> int:
    return sum(config.cost for config in configs) + sum(
        edge.local_cost
        if configs[edge.before].place == configs[edge.after].place
        else edge.remote_cost
        for edge in edges
    )


def brute_points(graph: StageGraph, configs: Configs, edges: Sequence[Edge] = ()) -> Points:
    """All points that are not dominated, by looking at every combination."""
    points = {
        (makespan_ns(graph, chosen, edges), total_cost(chosen, edges))
        for chosen in product(*configs)
    }
    kept: Points = []
    for time_ns, cost in sorted(points):
        if not kept or cost < kept[-1][1]:
            kept.append((time_ns, cost))
    return kept
