"""The worlds of the regret search: what they cover, what they keep to, and that files run them."""

from __future__ import annotations

from collections import Counter
from itertools import permutations
from pathlib import Path

import pytest
import yaml

from headgate.cli.app_loading import load_app
from headgate.cli.options import WorkloadOptions
from headgate.cli.workload import choose_workload
from headgate.core.model import UNLIMITED, App
from headgate.lab.regret.scores import features
from headgate.lab.regret.worlds import (
    REQUESTS_MIN,
    LoadedWorld,
    critical_path_ns,
    draw_world,
    has_objective,
    with_truth,
)

SEEDS = range(120)
PRIORITIES = 15  # a world whose requests claim priorities


@pytest.fixture(scope="module")
def worlds() -> list[LoadedWorld]:
    return [draw_world(seed).load() for seed in SEEDS]


def speed_ratio(app: App) -> float:
    """The largest ratio of the times of two builds of one function."""
    times = [[v.profile.exec_ns[0] for v in function.variants] for function in app.functions]
    return max(max(each) / min(each) for each in times)


def test_a_seed_is_one_world() -> None:
    assert draw_world(5) == draw_world(5)
    assert draw_world(5) != draw_world(6)


def test_worlds_of_a_single_function_are_small_and_their_objectives_can_be_met() -> None:
    batches: set[int] = set()
    for seed in range(40):
        world = draw_world(seed, kind="single").load()
        (variant,), (pipeline,), (pool,) = (
            world.app.variants, world.app.pipelines, world.app.pools,
        )  # fmt: skip
        full_ns = variant.profile.exec_ns[-1] + 2 * pool.network_ns
        assert 1.49 * full_ns <= pipeline.slo.latency_ns <= 10.1 * full_ns
        assert 0.4 <= world.load <= 3.5
        assert len(world.arrivals.sizes) >= REQUESTS_MIN
        batches.add(len(variant.profile.exec_ns))
    assert {1, 32} <= batches


def test_the_truth_changes_the_service_times_only() -> None:
    exact, scattered, wrong = (
        draw_world(5, truth).spec for truth in ("exact", "scattered", "wrong")
    )
    assert "simulation" not in exact
    assert scattered == {**exact, "simulation": scattered["simulation"]}
    assert scattered["simulation"]["service_times"] == {"distribution": "lognormal", "cv": 0.1}
    scale = wrong["simulation"]["service_times"].pop("scale")
    assert wrong == scattered
    assert set(scale) == set(exact["functions"])
    assert all(0.7 <= factor <= 1.3 for factor in scale.values())
    assert with_truth(exact, "scattered", 5) == scattered


def test_worlds_keep_their_rules(worlds: list[LoadedWorld]) -> None:
    """Objectives of at least two critical paths, windows of many objectives, enough requests."""
    for world in worlds:
        app, arrivals = world.app, world.arrivals
        objectives = [p for p in app.pipelines if has_objective(p)]
        assert objectives
        items = int(arrivals.sizes.max())
        for pipeline in objectives:
            assert pipeline.slo.latency_ns >= 2 * critical_path_ns(app, pipeline, items)
            assert world.window_ns >= 20 * pipeline.slo.latency_ns
        names = [arrivals.pipelines[index] for index in arrivals.pipeline]
        scored = sum(Counter(names)[pipeline.name] for pipeline in objectives)
        assert REQUESTS_MIN <= scored <= 8_000, world.seed


def test_worlds_cover_what_the_definition_lists(worlds: list[LoadedWorld]) -> None:
    words = Counter(word for world in worlds for word in features(world))
    for word in (
        "faas",
        "elastic",
        "slots",
        "network",
        "cold",
        "memory",
        "items",
        "priorities",
        "best-effort",
        "cascade",
        "bursts",
    ):
        assert words[word] >= 2, word
    apps = [world.app for world in worlds]
    assert {len(app.pools) for app in apps} >= {1, 2, 3}
    assert {len(app.clients) for app in apps} >= {1, 2, 3}
    assert len({client.weight for app in apps for client in app.clients}) > 2
    nodes = {pool.nodes for app in apps for pool in app.pools if pool.faas is None}
    assert min(nodes) == 1
    assert max(nodes) >= 30
    batches = {v.profile.items_max for app in apps for v in app.variants}
    assert {1, 2, 4, 8, 16, 32} <= batches
    assert max(speed_ratio(app) for app in apps) > 50
    stages = {tuple(len(s.after) for s in p.stages) for app in apps for p in app.pipelines}
    assert {(0,), (0, 1), (0, 1, 1), (0, 1, 1, 2)} <= stages
    quantiles = {p.slo.quantile for app in apps for p in app.pipelines}
    assert quantiles >= {0.9, 0.95, 0.99}
    latencies = [p.slo.latency_ns for app in apps for p in app.pipelines if has_objective(p)]
    assert max(latencies) >= 1_000 * min(latencies)


def test_loads_reach_from_idle_to_five_times_capacity(worlds: list[LoadedWorld]) -> None:
    loads = sorted(world.load for world in worlds)
    assert 0.2 < loads[0] < 0.45
    assert 3.5 < loads[-1] < 6.5
    assert sum(load > 1 for load in loads) > len(loads) // 3


@pytest.fixture(scope="module")
def shape_worlds() -> list[LoadedWorld]:
    return [draw_world(seed, kind="shapes").load() for seed in SEEDS]


def test_worlds_with_shapes_are_others_and_keep_the_rules(shape_worlds: list[LoadedWorld]) -> None:
    test_worlds_keep_their_rules(shape_worlds)
    assert draw_world(5, kind="shapes") == draw_world(5, kind="shapes")
    assert draw_world(5, kind="shapes") != draw_world(5)
    for world in shape_worlds:
        limited = [p for p in world.app.pools if p.faas is None]
        assert all(p.cpu_milli < UNLIMITED for p in limited)


def test_worlds_with_shapes_cover_what_a_pool_can_say(shape_worlds: list[LoadedWorld]) -> None:
    words = Counter(word for world in shape_worlds for word in features(world))
    for word in ("shapes", "one-batch", "per-instance", "resident", "compute-price"):
        assert words[word] >= 10, word
    assert words["per-instance"] + words["resident"] < len(SEEDS)  # most are per batch
    apps = [world.app for world in shape_worlds]
    shapes = [len(v.shapes) for app in apps for v in app.variants]
    assert min(shapes) == 1
    assert max(shapes) == 8
    assert any(v.concurrency > 1 for app in apps for v in app.variants)


def test_larger_shapes_are_faster_by_less_than_they_are_larger(
    shape_worlds: list[LoadedWorld],
) -> None:
    compared = 0
    for variant in (v for world in shape_worlds for v in world.app.variants):
        for one, other in permutations(variant.shapes, 2):
            cpus = other.shape.cpu_milli / max(1, one.shape.cpu_milli)
            share = other.shape.gpu_sevenths / max(1, one.shape.gpu_sevenths)
            if cpus >= 1 and (share >= 1 or not one.shape.gpu_sevenths):
                compared += 1
                faster = one.exec_ns[0] / other.exec_ns[0]
                assert 0.99 <= faster <= 1.01 * max(cpus, share)
    assert compared > 100


@pytest.mark.parametrize("seed", [1, 16, 41, PRIORITIES])
def test_a_file_of_a_world_is_the_same_world(tmp_path: Path, seed: int) -> None:
    """`headgate simulate FILE --seed N` has the same application and the same arrivals."""
    drawn = draw_world(seed)
    path = tmp_path / "world.yaml"
    path.write_text(yaml.safe_dump(drawn.spec, sort_keys=False), encoding="utf-8")
    world = drawn.load()
    config = load_app(str(path))
    workload = choose_workload(config, str(path), WorkloadOptions(), seed)
    assert config.app == world.app
    assert workload.arrivals is not None
    assert workload.window_ns == world.window_ns
    for column in ("times_ns", "pipeline", "client", "sizes", "priorities"):
        ours, theirs = getattr(world.arrivals, column), getattr(workload.arrivals, column)
        assert ours.tolist() == theirs.tolist()
