"""Properties of frontiers that hold for any candidates and any pipeline."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from headgate.planning.frontier.configs import InfeasibleError, StageConfig
from headgate.planning.frontier.graph import StageGraph
from headgate.planning.frontier.pareto import (
    Frontier,
    either,
    leaf,
    parallel,
    series,
    thin,
    undominated,
)
from headgate.planning.frontier.pipeline import PipelineFrontier
from headgate.planning.rivals.esg_search import EsgSearch, brute_force

Configs = list[StageConfig]

numbers = st.integers(0, 30) | st.integers(0, 10**12)
configs = st.lists(st.builds(StageConfig, time_ns=numbers, cost=numbers), min_size=1, max_size=4)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[StageGraph, list[Configs]]:
    """Any order of up to five stages, each with candidates."""
    count = draw(st.integers(1, 5))
    after = [[before for before in range(index) if draw(st.booleans())] for index in range(count)]
    return StageGraph(after), [draw(configs) for _ in range(count)]


def points(frontier: Frontier) -> list[tuple[int, int]]:
    return list(zip(frontier.times_ns, frontier.costs, strict=True))


def pruned(candidates: set[tuple[int, int]]) -> list[tuple[int, int]]:
    return sorted(
        (t, c)
        for t, c in candidates
        if not any((u, d) != (t, c) and u <= t and d <= c for u, d in candidates)
    )


@given(pipelines())
def test_no_combination_beats_the_frontier_and_each_point_is_one(
    pipeline: tuple[StageGraph, list[Configs]],
) -> None:
    graph, candidates = pipeline
    found = {
        (graph.makespan_ns([c.time_ns for c in chosen]), sum(c.cost for c in chosen))
        for chosen in product(*candidates)
    }
    assert points(PipelineFrontier(graph, candidates).whole) == pruned(found)


@given(configs, configs, configs)
def test_compositions_do_not_depend_on_the_order_of_parts(
    first: Configs, second: Configs, third: Configs
) -> None:
    a, b, c = leaf(0, first), leaf(1, second), leaf(2, third)
    assert points(series(a, b)) == points(series(b, a))
    assert points(parallel(a, b)) == points(parallel(b, a))
    assert points(series(series(a, b), c)) == points(series(a, series(b, c)))
    assert points(parallel(parallel(a, b), c)) == points(parallel(a, parallel(b, c)))
    assert points(either([a, b, c])) == points(either([either([c, b]), a]))
    apart = either([series(a, c), series(b, c)])
    assert points(series(either([a, b]), c)) == points(apart)


@given(configs, st.fractions(0, 1, max_denominator=50))
def test_thinning_stays_within_its_step(candidates: Configs, step: Fraction) -> None:
    whole = leaf(0, candidates)
    thinned = thin(whole, step)
    assert set(points(thinned)) <= set(points(whole))
    for time_ns, cost in points(whole):
        assert any(t <= time_ns and c <= (1 + step) * cost for t, c in points(thinned))


@given(st.lists(st.tuples(numbers, numbers), min_size=1), st.integers(1, 400))
def test_a_large_set_is_pruned_like_a_small_one(
    candidates: list[tuple[int, int]], copies: int
) -> None:
    """Beyond some thousand points most are dropped before any is sorted."""
    shifted = [(t + n, c + n) for t, c in candidates for n in range(copies)]
    many = leaf(0, [StageConfig(t, c) for t, c in shifted])
    assert points(many) == pruned(set(candidates))
    assert len(undominated(many.time_array, many.cost_array)) == len(many)


@given(st.lists(configs, min_size=1, max_size=3), st.integers(0, 100), st.integers(1, 6))
def test_the_search_finds_the_cheapest_paths(
    stages: list[Configs], budget_ns: int, paths_max: int
) -> None:
    expected = [path.cost for path in brute_force(stages, budget_ns, paths_max)]
    for is_plain in (False, True):
        try:
            found = EsgSearch(stages, is_plain=is_plain).search(budget_ns, paths_max)
        except InfeasibleError:
            assert not expected
        else:
            assert [path.cost for path in found.paths] == expected
