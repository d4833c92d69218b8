"""Frontiers are exact: they equal brute force wherever it can run."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from random import Random

import pytest
from frontier_cases import (
    brute_points,
    makespan_ns,
    random_configs,
    random_edges,
    random_graph,
    total_cost,
)

from headgate.core.errors import ConfigError
from headgate.planning.frontier.configs import InfeasibleError, StageConfig
from headgate.planning.frontier.graph import StageGraph, bits
from headgate.planning.frontier.pareto import (
    Frontier,
    either,
    leaf,
    parallel,
    series,
    thin,
)
from headgate.planning.frontier.pipeline import Edge, PipelineFrontier
from headgate.planning.frontier.prime import by_conditions, by_labels

Method = Callable[..., Frontier | None]
N = StageGraph([[], [], [0], [0, 1]])  # the smallest order that is not series-parallel


def points(pipeline: PipelineFrontier) -> list[tuple[int, int]]:
    return list(zip(pipeline.whole.times_ns, pipeline.whole.costs, strict=True))


@pytest.mark.parametrize("seed", range(10))
def test_the_frontier_of_random_pipelines_equals_brute_force(seed: int) -> None:
    """1. Draw pipelines of up to 6 stages. 2. Compare all points. 3. Check every plan."""
    rng = Random(seed)
    for _ in range(200):
        stages = rng.randint(1, 6)
        graph = random_graph(rng, stages)
        configs = random_configs(rng, stages, 4 if stages < 5 else 3)
        pipeline = PipelineFrontier(graph, configs)
        expected = brute_points(graph, configs)
        assert points(pipeline) == expected
        assert pipeline.is_exact
        for index, (time_ns, cost) in enumerate(expected):
            plan = pipeline.plan_at(index)
            assert all(c in configs[stage] for stage, c in enumerate(plan.configs))
            assert makespan_ns(graph, plan.configs) == plan.time_ns == time_ns
            assert total_cost(plan.configs) == plan.cost == cost


@pytest.mark.parametrize("seed", range(5))
def test_edges_by_locality_equal_brute_force(seed: int) -> None:
    rng = Random(f"edges-{seed}")
    for _ in range(100):
        stages = rng.randint(2, 5)
        graph = random_graph(rng, stages)
        configs = random_configs(rng, stages, 3, places=rng.randint(1, 3))
        edges = random_edges(rng, graph)
        pipeline = PipelineFrontier(graph, configs, edges=edges)
        assert points(pipeline) == brute_points(graph, configs, edges)
        for index in range(len(pipeline.whole)):
            plan = pipeline.plan_at(index)
            assert makespan_ns(graph, plan.configs, edges) == plan.time_ns
            assert total_cost(plan.configs, edges) == plan.cost


def test_the_optimum_within_any_objective_meets_it() -> None:
    rng = Random(3)
    for _ in range(100):
        graph = random_graph(rng, 4)
        configs = random_configs(rng, 4, 4)
        pipeline = PipelineFrontier(graph, configs)
        expected = brute_points(graph, configs)
        for budget_ns in range(expected[0][0], expected[-1][0] + 2, max(1, expected[-1][0] // 9)):
            plan = pipeline.plan(budget_ns)
            assert makespan_ns(graph, plan.configs) <= budget_ns
            assert plan.cost == min(cost for time_ns, cost in expected if time_ns <= budget_ns)


def test_the_rest_of_a_stage_is_the_frontier_of_what_waits_for_it() -> None:
    rng = Random(4)
    for _ in range(200):
        graph = random_graph(rng, 5)
        configs = random_configs(rng, 5, 3)
        pipeline = PipelineFrontier(graph, configs)
        for stage in range(5):
            behind = list(bits(graph.precedes[stage]))
            rest = pipeline.rest(stage)[configs[stage][0].place]
            found = list(zip(rest.times_ns, rest.costs, strict=True))
            if not behind:
                assert found == [(0, 0)]
                continue
            numbers = {old: new for new, old in enumerate(behind)}
            after = [[numbers[b] for b in graph.after[old] if b in numbers] for old in behind]
            assert found == brute_points(StageGraph(after), [configs[old] for old in behind])


def test_the_rest_counts_the_edge_from_each_place() -> None:
    configs = [
        [StageConfig(1, 1, place=0), StageConfig(1, 1, place=1)],
        [StageConfig(10, 5, place=0), StageConfig(12, 2, place=1)],
    ]
    pipeline = PipelineFrontier(StageGraph([[], [0]]), configs, edges=[Edge(0, 1, 100, 3)])
    rests = pipeline.rest(0)
    assert (rests[0].times_ns, rests[0].costs) == ([10], [5])
    assert (rests[1].times_ns, rests[1].costs) == ([12], [2])


def test_the_rest_of_a_branch_ignores_edges_of_other_branches() -> None:
    rng = Random(5)
    for _ in range(100):
        graph = random_graph(rng, 5)
        configs = random_configs(rng, 5, 3, places=2)
        edges = random_edges(rng, graph)
        pipeline = PipelineFrontier(graph, configs, edges=edges)
        for stage in range(5):
            behind = [stage, *bits(graph.precedes[stage])]
            numbers = {old: new for new, old in enumerate(behind)}
            after = [[numbers[b] for b in graph.after[old] if b in numbers] for old in behind]
            inner = [
                Edge(numbers[e.before], numbers[e.after], e.remote_ns, e.remote_cost, e.local_ns)
                for e in edges
                if e.before in numbers and e.after in numbers
            ]
            suffix = pipeline.from_stage(stage)
            assert list(zip(suffix.times_ns, suffix.costs, strict=True)) == brute_points(
                StageGraph(after), [configs[old] for old in behind], inner
            )
            for place, rest in pipeline.rest(stage).items():
                here = [[StageConfig(0, 0, place=place)], *(configs[old] for old in behind[1:])]
                found = list(zip(rest.times_ns, rest.costs, strict=True))
                assert found == brute_points(StageGraph(after), here, inner)


def test_a_cold_configuration_carries_its_start() -> None:
    warm, cold = StageConfig(10, 5), StageConfig(108, 2, start_ns=100)
    pipeline = PipelineFrontier(StageGraph([[]]), [[warm, cold]])
    assert points(pipeline) == [(10, 5), (108, 2)]
    assert pipeline.plan(108).configs[0].start_ns == 100


def test_a_cascade_counts_costs_by_probability_and_times_in_full() -> None:
    small, large = [StageConfig(1, 10)], [StageConfig(4, 100), StageConfig(9, 50)]
    pipeline = PipelineFrontier(StageGraph([[], [0]]), [small, large], visits=[1, 0.25])
    assert points(pipeline) == [(5, 35), (10, 22)]
    assert pipeline.plan(10).configs == (small[0], large[1])


def test_large_sets_are_pruned_and_composed_like_small_ones() -> None:
    """Beyond some thousand points most are dropped unsorted, and pairs are formed in blocks."""
    rng = Random(8)
    many = [
        (t, max(0, 10**6 - t + rng.randint(-300, 300)))
        for t in (rng.randint(0, 10**6) for _ in range(20_000))
    ]
    large = leaf(0, [StageConfig(t, c) for t, c in many])
    assert list(zip(large.times_ns, large.costs, strict=True)) == pruned(many)
    first, second = ([(t, 10**6 - t) for t in rng.sample(range(10**6), 520)] for _ in range(2))
    both = series(
        *(leaf(n, [StageConfig(*p) for p in each]) for n, each in ((0, first), (1, second)))
    )
    sums = [(t + u, c + d) for t, c in first for u, d in second]
    assert list(zip(both.times_ns, both.costs, strict=True)) == pruned(sums)
    for index in range(0, len(both), 997):
        chosen = both.configs_at(index)
        assert sum(config.time_ns for config in chosen.values()) == both.times_ns[index]
        assert sum(config.cost for config in chosen.values()) == both.costs[index]


def pruned(candidates: list[tuple[int, int]]) -> list[tuple[int, int]]:
    kept: list[tuple[int, int]] = []
    for time_ns, cost in sorted(candidates):
        if not kept or cost < kept[-1][1]:
            kept.append((time_ns, cost))
    return kept


def test_alternatives_are_a_union() -> None:
    fast = series(leaf(0, [StageConfig(1, 9)]), leaf(1, [StageConfig(1, 9)]))
    cheap = parallel(leaf(2, [StageConfig(5, 2)]), leaf(3, [StageConfig(7, 1)]))
    both = either([fast, cheap])
    assert (both.times_ns, both.costs) == ([2, 7], [18, 3])
    assert sorted(both.configs_at(0)) == [0, 1]
    assert sorted(both.configs_at(1)) == [2, 3]


@pytest.mark.parametrize("seed", range(5))
def test_the_tolerance_bounds_the_cost_and_never_the_time(seed: int) -> None:
    rng = Random(f"tolerance-{seed}")
    tolerance = rng.choice((Fraction(1, 100), Fraction(1, 10), Fraction(1, 2)))
    saved = 0
    for _ in range(60):
        stages = rng.randint(2, 6)
        graph = random_graph(rng, stages)
        configs = random_configs(rng, stages, 4 if stages < 6 else 3)
        exact = PipelineFrontier(graph, configs)
        thinned = PipelineFrontier(graph, configs, tolerance=tolerance)
        saved += len(exact.whole) - len(thinned.whole)
        for time_ns, cost in points(exact):
            plan = thinned.plan(time_ns)
            assert makespan_ns(graph, plan.configs) == plan.time_ns <= time_ns
            assert cost <= plan.cost <= (1 + tolerance) * cost
    assert saved > 0 or tolerance < Fraction(1, 10)


def test_thinning_keeps_as_few_points_as_it_can() -> None:
    frontier = leaf(0, [StageConfig(10 - n, 100 + n) for n in range(10)])
    assert thin(frontier, Fraction(1, 10)).costs == [109]
    assert thin(frontier, Fraction(1, 20)).costs == [109, 103]
    assert thin(frontier, Fraction(0)).costs == frontier.costs


@pytest.mark.parametrize("seed", range(4))
def test_a_rebuild_after_drift_equals_a_fresh_build(seed: int) -> None:
    rng = Random(f"drift-{seed}")
    for _ in range(25):
        stages = rng.randint(2, 5)
        graph = random_graph(rng, stages)
        places = rng.randint(1, 2)
        configs = random_configs(rng, stages, 4, places)
        edges = random_edges(rng, graph)
        pipeline = PipelineFrontier(graph, configs, edges=edges)
        for _ in range(4):
            assert pipeline.whole and all(pipeline.rest(stage) for stage in range(stages))
            stage = rng.randrange(stages)
            configs = list(configs)
            configs[stage] = random_configs(rng, 1, 4, places)[0]
            pipeline = pipeline.with_configs(stage, configs[stage])
            fresh = PipelineFrontier(graph, configs, edges=edges)
            assert points(pipeline) == points(fresh)
            for index in range(len(fresh.whole)):
                assert pipeline.plan_at(index) == fresh.plan_at(index)
            for each in range(stages):
                rests, fresh_rests = pipeline.rest(each), fresh.rest(each)
                assert {p: (r.times_ns, r.costs) for p, r in rests.items()} == {
                    p: (r.times_ns, r.costs) for p, r in fresh_rests.items()
                }


def test_a_rebuild_shares_what_is_behind_the_stage() -> None:
    rng = Random(6)
    chain = StageGraph([[], [0], [1], [2]])
    configs = random_configs(rng, 4, 8)
    pipeline = PipelineFrontier(chain, configs)
    assert pipeline.whole
    drifted = pipeline.with_configs(1, [StageConfig(3, 3)])
    assert drifted.rest(1)[0] is pipeline.rest(1)[0]
    assert drifted.rest(0)[0] is not pipeline.rest(0)[0]
    dominated = StageConfig(10**9, 10**9)
    same = pipeline.with_configs(1, [*configs[1], dominated])
    assert same.whole is pipeline.whole


def test_batches_are_capped_by_the_queue() -> None:
    configs = [[StageConfig(5, 8), StageConfig(6, 4, batch=2), StageConfig(8, 2, batch=8)]]
    pipeline = PipelineFrontier(StageGraph([[]]), configs)
    assert pipeline.capped(9) is pipeline
    assert pipeline.capped(8) is pipeline
    assert points(pipeline.capped(7)) == [(5, 8), (6, 4)]
    assert pipeline.capped(7) is pipeline.capped(2)
    assert points(pipeline.capped(1)) == [(5, 8)]


def test_grouping_beyond_the_work_limit_is_valid_and_said_to_be_inexact() -> None:
    rng = Random(7)
    worse = 0
    for _ in range(100):
        configs = random_configs(rng, 4, 4)
        exact = PipelineFrontier(N, configs)
        grouped = PipelineFrontier(N, configs, work_max=0)
        assert points(exact) == brute_points(N, configs)
        assert exact.is_exact
        for index in range(len(grouped.whole)):
            plan = grouped.plan_at(index)
            assert makespan_ns(N, plan.configs) == plan.time_ns
            assert total_cost(plan.configs) == plan.cost
        assert not grouped.is_exact
        for time_ns, cost in points(grouped):
            assert cost >= exact.plan(time_ns).cost
        worse += points(grouped) != points(exact)
    assert worse > 0, "the fallback is never needed for exactness, so this test shows nothing"


@pytest.mark.parametrize("method", [by_conditions, by_labels])
def test_each_way_to_compose_a_prime_part_equals_brute_force(method: Method) -> None:
    rng = Random(9)
    primes = 0
    while primes < 30:
        stages = rng.randint(4, 6)
        graph = random_graph(rng, stages)
        if graph.decompose((1 << stages) - 1).kind != "prime" or list(graph.order) != sorted(
            graph.order
        ):
            continue
        primes += 1
        configs = random_configs(rng, stages, 4 if stages < 6 else 3)
        parts = [leaf(stage, each) for stage, each in enumerate(configs)]
        found = method(parts, graph.after)
        assert found is not None
        assert list(zip(found.times_ns, found.costs, strict=True)) == brute_points(graph, configs)
        for index in range(len(found)):
            chosen = found.configs_at(index)
            assert len(chosen) == stages
            in_order = [chosen[stage] for stage in range(stages)]
            assert makespan_ns(graph, in_order) == found.times_ns[index]
            assert total_cost(in_order) == found.costs[index]
        assert method(parts, graph.after, 0) is None


def test_a_prime_part_contracts_what_it_can() -> None:
    """An N whose first stage is a chain: the chain is one part of four."""
    graph = StageGraph([[4], [], [0], [0, 1], []])  # 4 > 0 > 2, 0 > 3, 1 > 3
    tree = graph.decompose(0b11111)
    assert tree.kind == "prime"
    assert sorted(part.kind for part in tree.parts) == ["leaf", "leaf", "leaf", "series"]


def test_bad_input_is_one_clear_line() -> None:
    one = [StageConfig(1, 1)]
    with pytest.raises(ConfigError, match=r"^the stages wait for each other: a > b > a$"):
        StageGraph([[1], [0]], ["a", "b"])
    with pytest.raises(ConfigError, match=r"^stage b: waits for stage 7 \(allowed: 0 to 1\)$"):
        StageGraph([[], [7]], ["a", "b"])
    with pytest.raises(ConfigError, match=r"^the pipeline has no stages$"):
        StageGraph([])
    chain = StageGraph([[], [0]], ["a", "b"])
    with pytest.raises(ConfigError, match=r"^stage b: has no feasible configuration$"):
        PipelineFrontier(chain, [one, []])
    share = [StageConfig(1, 1, gpu_sevenths=8)]
    with pytest.raises(ConfigError, match=r"^stage b: GPU share 8/7 \(allowed: 0/7 to 7/7\)$"):
        PipelineFrontier(chain, [one, share])
    with pytest.raises(ConfigError, match=r"^stage b: batch is 0 \(allowed: 1 to 2\*\*62\)$"):
        PipelineFrontier(chain, [one, [StageConfig(1, 1, batch=0)]])
    with pytest.raises(ConfigError, match=r"add up to more than 2\*\*62$"):
        PipelineFrontier(chain, [[StageConfig(2**62, 1)]] * 2)
    with pytest.raises(ConfigError, match="does not wait for"):
        PipelineFrontier(chain, [one, one], edges=[Edge(1, 0, 5)])
    with pytest.raises(ConfigError, match=r"^a stage runs with a probability"):
        PipelineFrontier(chain, [one, one], visits=[1, 2])
    with pytest.raises(ConfigError, match="tolerance is 2"):
        PipelineFrontier(chain, [one, one], tolerance=2)


def test_an_objective_below_the_fastest_path_names_that_path() -> None:
    fork = StageGraph([[], [0], [0], [1, 2]], ["a", "b", "c", "d"])
    configs = [[StageConfig(ms * 10**6, 1)] for ms in (1, 2, 5, 1)]
    pipeline = PipelineFrontier(fork, configs)
    expected = r"^the objective is 6ms, and the fastest path takes 7ms: a > c > d$"
    with pytest.raises(InfeasibleError, match=expected) as raised:
        pipeline.plan(6 * 10**6)
    assert raised.value.fastest_ns == 7 * 10**6
    assert pipeline.plan(7 * 10**6).time_ns == 7 * 10**6
