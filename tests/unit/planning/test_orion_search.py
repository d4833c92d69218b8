"""Orion's search: the cheapest states first, one step at a time, and the best at the limit."""

from __future__ import annotations

from random import Random

import pytest

from headgate.core.errors import ConfigError
from headgate.planning.frontier.configs import StageConfig
from headgate.planning.frontier.graph import StageGraph
from headgate.planning.rivals.esg_search import brute_force
from headgate.planning.rivals.orion_search import OrionSearch

CHAIN = StageGraph([[], [0], [1]])
DIAMOND = StageGraph([[], [0], [0], [1, 2]])
NARROW = StageGraph([[], [], [0], [0, 1]])  # an N: neither series nor parallel


def random_stages(count: int, rng: Random) -> list[list[StageConfig]]:
    return [
        [StageConfig(rng.randint(1, 30), rng.randint(1, 30)) for _ in range(rng.randint(1, 6))]
        for _ in range(count)
    ]


@pytest.mark.parametrize("graph", [CHAIN, DIAMOND, NARROW])
@pytest.mark.parametrize("seed", range(20))
def test_it_finds_what_brute_force_finds(graph: StageGraph, seed: int) -> None:
    """For any time the same cost, and the fastest configurations where no path is in time."""
    rng = Random(seed)
    stages = random_stages(len(graph), rng)
    search = OrionSearch(graph, stages)
    fastest_ns = graph.makespan_ns([min(c.time_ns for c in configs) for configs in stages])
    for budget_ns in range(1, 121, 7):
        plan = search.search(budget_ns)
        paths = brute_force(stages, budget_ns, 1, graph=graph)
        assert plan.is_complete
        if paths:
            assert plan.cost == paths[0].cost
            assert plan.time_ns <= budget_ns
        else:
            assert (plan.time_ns, plan.expansions) == (fastest_ns, 1)
        times_ns = [config.time_ns for config in plan.configs]
        assert graph.makespan_ns(times_ns) == plan.time_ns
        assert sum(config.cost for config in plan.configs) == plan.cost


@pytest.mark.parametrize("seed", range(10))
def test_a_higher_limit_is_never_slower(seed: int) -> None:
    """Up to the state that is in time; every expansion looks at another state."""
    stages = random_stages(4, Random(seed))
    search = OrionSearch(DIAMOND, stages)
    budget_ns = DIAMOND.makespan_ns([min(c.time_ns for c in configs) for configs in stages])
    whole = search.search(budget_ns)
    times_ns = []
    for limit in range(1, whole.expansions):
        plan = search.search(budget_ns, expansions_max=limit)
        assert (plan.expansions, plan.is_complete) == (limit, False)
        times_ns.append(plan.time_ns)
    assert times_ns == sorted(times_ns, reverse=True)
    assert search.search(budget_ns, expansions_max=whole.expansions) == whole
    assert whole.expansions <= len(stages[0]) * len(stages[1]) * len(stages[2]) * len(stages[3])


@pytest.mark.parametrize("seed", range(10))
def test_a_search_that_goes_on_at_its_limit_is_in_time(seed: int) -> None:
    """With any limit; it costs no less than the optimum, and takes a step per size at most."""
    stages = random_stages(4, Random(seed))
    search = OrionSearch(DIAMOND, stages)
    fastest_ns = DIAMOND.makespan_ns([min(c.time_ns for c in configs) for configs in stages])
    for budget_ns in (fastest_ns, round(1.3 * fastest_ns)):
        whole = search.search(budget_ns)
        for limit in range(1, whole.expansions + 2):
            plan = search.search(budget_ns, expansions_max=limit, goes_on=True)
            assert plan.time_ns <= budget_ns
            assert plan.cost >= whole.cost
            assert plan.expansions <= limit + sum(len(configs) - 1 for configs in stages)
            assert plan.is_complete == (limit >= whole.expansions)


def test_a_stage_without_configurations_is_one_clear_line() -> None:
    with pytest.raises(ConfigError, match="stage 1: has no feasible configuration"):
        OrionSearch(StageGraph([[], [0]]), [[StageConfig(1, 1)], []])
