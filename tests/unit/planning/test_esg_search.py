"""A* with both blades finds what brute force finds."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from frontier_cases import random_configs, random_graph

from headgate.core.errors import ConfigError
from headgate.lab.stage_configs import ESG_BASE_MS, infless_configs, law_configs, measured_configs
from headgate.planning.frontier.configs import InfeasibleError, StageConfig
from headgate.planning.frontier.graph import Decomposition, StageGraph, bits
from headgate.planning.frontier.pipeline import PipelineFrontier
from headgate.planning.frontier.slo_split import normalised_lengths, shares_of_rest, split_slo
from headgate.planning.rivals.esg_search import EsgSearch, PathTable, brute_force


def chain(stages: int) -> StageGraph:
    return StageGraph([[] if index == 0 else [index - 1] for index in range(stages)])


@pytest.mark.parametrize("seed", range(10))
def test_the_k_best_equal_brute_force(seed: int) -> None:
    rng = Random(seed)
    for _ in range(100):
        stages = rng.randint(1, 4)
        configs = random_configs(rng, stages, 8 if stages < 4 else 5)
        budget_ns = rng.randint(0, sum(max(c.time_ns for c in each) for each in configs))
        paths_max = rng.choice((1, 2, 5, 20))
        expected = brute_force(configs, budget_ns, paths_max)
        search = EsgSearch(configs, is_plain=rng.random() < 0.5)
        listed = PathTable(configs).cheapest(budget_ns, paths_max)
        if not expected:
            (only,) = listed
            assert sum(config.time_ns for config in only) == search.fastest.time_ns
            with pytest.raises(InfeasibleError):
                search.search(budget_ns, paths_max)
            assert search.fastest.time_ns > budget_ns
            continue
        assert listed == [path.configs for path in expected]
        found = search.search(budget_ns, paths_max)
        assert [path.cost for path in found.paths] == [path.cost for path in expected]
        assert len({tuple(map(id, path.configs)) for path in found.paths}) == len(found.paths)
        for path in found.paths:
            assert path.time_ns == sum(config.time_ns for config in path.configs) <= budget_ns
            assert path.cost == sum(config.cost for config in path.configs)
        assert found.is_complete
        best = PipelineFrontier(chain(stages), configs).plan(budget_ns)
        assert best.cost == found.paths[0].cost


def test_the_blades_save_work() -> None:
    configs = [law_configs(ms, (1, 2, 4, 8), (1, 2, 4), (1, 3, 7)) for ms in (86.0, 293.0, 147.0)]
    budget_ns = 500_000_000
    expected = [path.cost for path in brute_force(configs, budget_ns)]
    plain = EsgSearch(configs, is_plain=True).search(budget_ns)
    found = EsgSearch(configs).search(budget_ns)
    for each in (plain, found):
        assert [path.cost for path in each.paths] == expected
    assert found.expansions < plain.expansions < 36**2


def test_a_limit_on_expansions_is_said_to_have_been_reached() -> None:
    configs = [law_configs(ms, (1, 2, 4, 8), (1, 2), (1, 7)) for ms in (86.0, 293.0)]
    search = EsgSearch(configs)
    whole = search.search(400_000_000)
    cut = search.search(400_000_000, expansions_max=whole.expansions - 1)
    assert not cut.is_complete
    assert cut.paths == whole.paths[: len(cut.paths)]
    assert len(cut.paths) < len(whole.paths)


@pytest.mark.parametrize("functions", [("deblur", "classification"), ("super_resolution", "depth")])
def test_measured_tables(functions: tuple[str, ...]) -> None:
    """Two stages of 252 measured configurations: A*, the frontier and brute force agree."""
    configs = [measured_configs(name) for name in functions]
    search, pipeline = EsgSearch(configs, functions), PipelineFrontier(chain(2), configs)
    fastest_ns = search.fastest.time_ns
    assert fastest_ns == pipeline.whole.fastest_ns
    for percent in (100, 130, 300):
        budget_ns = fastest_ns * percent // 100
        expected = brute_force(configs, budget_ns)
        found = search.search(budget_ns)
        assert [p.cost for p in found.paths] == [p.cost for p in expected]
        assert pipeline.plan(budget_ns).cost == expected[0].cost
        assert pipeline.plan(budget_ns).time_ns <= budget_ns
    with pytest.raises(InfeasibleError, match=" > ".join(functions)):
        search.search(fastest_ns - 1)


@pytest.mark.parametrize("after", [([], [0], [0]), ([], [], [0, 1]), ([], [0], [])])
def test_measured_tables_in_a_fork(after: tuple[list[int], ...]) -> None:
    """Three stages of 27 measured configurations that are not a sequence, against brute force."""
    names = ("deblur", "segmentation", "depth")
    configs = [
        [
            config
            for config in measured_configs(name)
            if config.batch in (1, 4, 16)
            and config.cpu_milli in (1000, 4000, 16000)
            and config.gpu_sevenths in (1, 3, 7)
        ]
        for name in names
    ]
    assert [len(each) for each in configs] == [27, 27, 27]
    graph = StageGraph(after, names)
    pipeline = PipelineFrontier(graph, configs)
    for percent in (100, 140, 300):
        budget_ns = pipeline.whole.fastest_ns * percent // 100
        (best,) = brute_force(configs, budget_ns, 1, graph=graph)
        plan = pipeline.plan(budget_ns)
        assert plan.cost == best.cost
        assert graph.makespan_ns([config.time_ns for config in plan.configs]) <= budget_ns
    assert not brute_force(configs, pipeline.whole.fastest_ns - 1, 1, graph=graph)


def test_seven_stages_agree_with_the_search() -> None:
    configs = [
        law_configs(ms, (1, 2, 4, 8, 16), (1, 2, 4, 8, 16), (1, 2, 3, 5, 7))
        for ms in [*ESG_BASE_MS.values(), 500.0]
    ]
    pipeline, search = PipelineFrontier(chain(7), configs), EsgSearch(configs)
    for percent in (105, 115):
        budget_ns = search.fastest.time_ns * percent // 100
        found = search.search(budget_ns, 1, expansions_max=20_000)
        plan = pipeline.plan(budget_ns)
        assert sum(config.time_ns for config in plan.configs) <= budget_ns
        assert not found.is_complete or found.paths[0].cost == plan.cost


@pytest.mark.parametrize("seed", range(4))
def test_an_slo_is_distributed_along_every_path(seed: int) -> None:
    """Groups cover each stage once, are small enough, and fit the SLO one after the other."""
    rng = Random(f"slo-{seed}")
    for _ in range(100):
        stages = rng.randint(1, 8)
        graph = random_graph(rng, stages)
        configs = [[StageConfig(rng.randint(1, 99), 1)] for _ in range(stages)]
        group_max = rng.randint(1, 4)
        groups = split_slo(graph, configs, 10**9, group_max=group_max)
        members = [stage for group in groups for stage in group.stages]
        assert sorted(members) == list(range(stages))
        for group in groups:
            assert 1 <= len(group.stages) <= group_max
            assert not any(graph.precedes[b] >> a & 1 for a, b in pairwise(group.stages))
        # Every stage at the end of its group's time: no path may take longer than the SLO.
        times = [0] * stages
        for group in groups:
            times[group.stages[-1]] = group.budget_ns
        assert graph.makespan_ns(times) <= 10**9
        for index, share in enumerate(shares_of_rest(graph, configs, group_max=group_max)):
            assert share.stages[0] == index
            is_last = not graph.successors[share.stages[-1]]
            assert share.part == 1 if is_last else 0 < share.part < 1


def test_parallel_branches_have_the_same_time_and_the_longest_decides() -> None:
    graph = StageGraph([[], [0], [0], [2], [1, 3]])
    configs = [[StageConfig(ms, 1)] for ms in (10, 30, 20, 20, 10)]
    groups = {group.stages: group.budget_ns for group in split_slo(graph, configs, 600)}
    assert groups == {(0,): 100, (1,): 400, (2, 3): 400, (4,): 100}
    parts = [round(share.part, 3) for share in shares_of_rest(graph, configs)]
    assert parts[:3] == [round(100 / 600, 3), 0.8, 0.8]
    assert parts[4] == 1.0


def test_lengths_are_normalised_per_configuration() -> None:
    """A config that is slow everywhere counts as much as one that is fast everywhere."""
    slow, fast = {"batch": 2}, {"batch": 1}
    configs = [
        [StageConfig(300, 1, **slow), StageConfig(1, 1, **fast)],
        [StageConfig(100, 1, **slow), StageConfig(3, 1, **fast)],
    ]
    assert normalised_lengths(configs) == [0.5, 0.5]
    other = [[StageConfig(30, 1, cpu_milli=1)], [StageConfig(10, 1, cpu_milli=2)]]
    assert normalised_lengths(other) == [0.75, 0.25]


def test_dominators() -> None:
    graph = StageGraph([[], [0], [0], [0, 2], [1, 3], [4]])
    dominators = graph.immediate_dominators()
    assert dominators == [None, 0, 0, 0, 0, 4]
    rng = Random(5)
    for _ in range(200):
        graph = random_graph(rng, rng.randint(1, 8))
        for stage, dominator in enumerate(graph.immediate_dominators()):
            assert dominator == _last_dominator(graph, stage)


def _last_dominator(graph: StageGraph, stage: int) -> int | None:
    """From the definition: removing it leaves no path from an entry to the stage."""
    dominators = []
    for other in range(len(graph)):
        reached = {i for i in graph.order if not graph.after[i] and i != other}
        for index in graph.order:
            if index != other and any(before in reached for before in graph.after[index]):
                reached.add(index)
        if other != stage and stage not in reached:
            dominators.append(other)
    return max(dominators, key=graph.order.index, default=None)


def test_grouping_keeps_every_precedence() -> None:
    """Times by the dominator tree are never shorter than the true ones."""
    rng = Random(6)
    for _ in range(200):
        graph = random_graph(rng, rng.randint(1, 8))
        times = [rng.randint(0, 20) for _ in range(len(graph))]
        tree = graph.group_by_dominators()
        assert sorted(bits(tree.stages)) == list(range(len(graph)))
        assert _tree_ns(tree, times) >= graph.makespan_ns(times)


def _tree_ns(tree: Decomposition, times: list[int]) -> int:
    if tree.kind == "leaf":
        return times[tree.stages.bit_length() - 1]
    inner = [_tree_ns(part, times) for part in tree.parts]
    return max(inner) if tree.kind == "parallel" else sum(inner)


def test_bad_groups() -> None:
    with pytest.raises(ConfigError, match="maximum group size is 0"):
        split_slo(chain(1), [[StageConfig(1, 1)]], 10, group_max=0)


def test_tables_of_infless() -> None:
    """Where the public table is: a pipeline of its models, against brute force."""
    directory = os.environ.get("HEADGATE_TRACES")
    name = "profiles/infless_model_vcpu_gpupct_batch.csv.gz"
    table = next((d / name for d in _near(directory) if (d / name).exists()), None)
    if table is None:
        pytest.skip("HEADGATE_TRACES names no directory with INFless's table")
    models = ("ssd", "mobilenet", "resnet-50")
    configs = [infless_configs(table, model) for model in models]
    search, pipeline = EsgSearch(configs, models), PipelineFrontier(chain(3), configs)
    for percent in (105, 150, 400):
        budget_ns = search.fastest.time_ns * percent // 100
        expected = brute_force(configs, budget_ns)
        assert [p.cost for p in search.search(budget_ns).paths] == [p.cost for p in expected]
        plan = pipeline.plan(budget_ns)
        assert (plan.cost, plan.time_ns <= budget_ns) == (expected[0].cost, True)


def _near(directory: str | None) -> list[Path]:
    """The directory of traces, and the one that it is in."""
    return [] if not directory else [Path(directory), Path(directory).parent]
