"""A decision is the cheapest configuration that fits, with the cheapest rest behind it."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from frontier_cases import random_configs, random_edges, random_graph

from headgate.core.model import Shape
from headgate.lab.stage_configs import measured_configs
from headgate.planning.frontier.configs import StageConfig
from headgate.planning.frontier.decision import StageDecider, fits_any, useful_configs
from headgate.planning.frontier.graph import StageGraph
from headgate.planning.frontier.pipeline import PipelineFrontier


def priced(
    pipeline: PipelineFrontier,
    stage: int,
    budget_ns: int,
    starts_ns: list[int],
    release_ns: int = 0,
) -> list[tuple[int, StageConfig]]:
    """Every configuration of a stage that can still end in time, priced from the definition."""
    found = []
    for config in pipeline.configs[stage]:
        rest = pipeline.rest(stage)[config.place]
        left_ns = budget_ns - max(release_ns, config.time_ns + starts_ns[config.build])
        costs = [c for t, c in zip(rest.times_ns, rest.costs, strict=True) if t <= left_ns]
        if costs:
            found.append((config.cost + min(costs), config))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_a_decision_is_the_best_of_what_fits(seed: int) -> None:
    rng = Random(seed)
    answers = 0
    for _ in range(60):
        graph = random_graph(rng, 4)
        configs = random_configs(rng, 4, 12, places=2)
        pipeline = PipelineFrontier(graph, configs, edges=random_edges(rng, graph))
        stage = rng.randrange(4)
        decider, pruned = (StageDecider(pipeline, stage, prunes=p) for p in (False, True))
        for _ in range(10):
            budget_ns = rng.randint(0, 2 * pipeline.whole.times_ns[-1] + 2)
            rooms = [Shape(1000 * rng.randint(0, 4), rng.randint(0, 7)) for _ in range(3)]
            fits, batch_max = fits_any(rooms), rng.choice((1, 2, 3, 9))
            starts_ns = [0, rng.choice((0, 3))]
            release_ns = rng.choice((0, 0, 5))
            possible = priced(pipeline, stage, budget_ns, starts_ns, release_ns)
            when: dict[str, Any] = {
                "batch_max": batch_max,
                "starts_ns": starts_ns,
                "release_ns": release_ns,
            }
            allowed = [
                (cost, config)
                for cost, config in possible
                if config.batch <= batch_max
                and any(
                    config.cpu_milli <= room.cpu_milli and config.gpu_sevenths <= room.gpu_sevenths
                    for room in rooms
                )
            ]
            for each in (decider, pruned):
                found = each.decide(budget_ns, fits=fits, **when)
                assert (found is None) == (not allowed)
                if found is not None:
                    answers += 1
                    assert found.cost == min(cost for cost, _ in allowed)
                    assert (found.cost, found.config) in allowed
                    start_ns = starts_ns[found.config.build]
                    used_ns = max(release_ns, start_ns + found.config.time_ns) + found.rest_ns
                    assert used_ns + found.slack_ns == budget_ns
                    assert found.slack_ns >= 0
    assert answers > 100


def test_the_plan_of_the_rest_has_every_stage_behind() -> None:
    rng = Random(2)
    graph = StageGraph([[], [0], [1], [1]])
    pipeline = PipelineFrontier(graph, random_configs(rng, 4, 5))
    decider = StageDecider(pipeline, 1)
    found = decider.decide(10**9)
    assert found is not None
    assert sorted(found.rest_configs()) == [2, 3]
    assert decider.decide(decider.fastest_ns - 1) is None


def test_what_ends_soonest_is_offered_to_late_requests() -> None:
    configs = [[StageConfig(9, 1), StageConfig(5, 7, cpu_milli=4000)], [StageConfig(1, 1)]]
    decider = StageDecider(PipelineFrontier(StageGraph([[], [0]]), configs), 0)
    fastest = decider.fastest()
    assert fastest is not None and fastest.config.time_ns == 5
    small = decider.fastest(fits=fits_any([Shape(1000, 0)]))
    assert small is not None and small.config.time_ns == 9
    assert decider.fastest(batch_max=0) is None


def test_the_only_configuration_that_fits_may_be_dominated() -> None:
    """1. A config is dominated in time and cost. 2. The other needs a GPU that is not free."""
    on_gpu, on_cpu = StageConfig(1, 1, gpu_sevenths=1), StageConfig(5, 5, cpu_milli=1000)
    decider = StageDecider(PipelineFrontier(StageGraph([[]]), [[on_gpu, on_cpu]]), 0, prunes=True)
    found = decider.decide(10, fits=fits_any([Shape(2000, 0)]))
    assert found is not None and found.config == on_cpu


def test_useful_configs_keep_one_of_equal_ones_and_builds_apart() -> None:
    one = StageConfig(1, 1)
    other_build = StageConfig(1, 1, build=1)
    larger = StageConfig(1, 1, cpu_milli=1000)
    assert useful_configs([larger, one, one, other_build]) == [one, other_build]


def test_measured_tables_decide_as_a_scan_of_all_candidates_does() -> None:
    names = ("super_resolution", "segmentation", "classification")
    configs = [measured_configs(name) for name in names]
    pipeline = PipelineFrontier(StageGraph([[], [0], [1]]), configs)
    decider = StageDecider(pipeline, 0)
    whole = pipeline.whole
    rng = Random(1)
    for _ in range(40):
        budget_ns = rng.randint(whole.times_ns[0], whole.times_ns[-1])
        fits = fits_any([Shape(1000 * rng.randint(1, 16), rng.randint(1, 7))])
        found = decider.decide(budget_ns, fits=fits)
        scan = [(c, f) for c, f in priced(pipeline, 0, budget_ns, [0]) if fits(f)]
        assert (found.cost if found else None) == min([cost for cost, _ in scan], default=None)
