"""Decisions of `fast_gshare`: the band, p_eff and p_ideal, whole pods, packing."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from replica_rig import ReplicaRig, make_function


def rig_of(*, slo_ms: int = 100, nodes: int = 4, **settings: Any) -> ReplicaRig:
    """One function whose stage has the whole objective, scaled to the brim."""
    options: dict[str, Any] = {"margin": 0.0, "utilisation": 1.0, **settings}
    return ReplicaRig("fast_gshare", [make_function(0)], slo_ms, nodes=nodes, **options)


@pytest.mark.parametrize(
    ("slo_ms", "batches"),
    [(100, {0: 4, 1: 4}), (99, {0: 2, 1: 4}), (40, {0: 1, 1: 2}), (15, {1: 1}), (5, {1: 1})],
)
def test_each_shape_has_the_batch_with_the_most_throughput_in_time(
    slo_ms: int, batches: dict[int, int]
) -> None:
    """A batch takes half of the objective, one item all of it; the fastest if none is in time."""
    ratings = rig_of(slo_ms=slo_ms).stage().ratings
    assert {each.config.shape_id: each.config.batch for each in ratings} == batches


@pytest.mark.parametrize(
    ("demand", "shapes"),
    [
        (79.0, [0]),  # p_ideal takes less than the large shape, and covers it
        (80.0, [0]),
        (160.0, [0, 0]),  # two of p_eff, 80 items per second each
        (200.0, [0, 0, 0]),
        (1e9, [0] * 28),  # all there is room for
    ],
)
def test_missing_rates_are_for_p_eff_and_the_rest_for_p_ideal(
    demand: float, shapes: list[int]
) -> None:
    rig = rig_of()
    rig.policy.scale({rig.stage(): demand})
    assert [shape for _, shape, _ in rig.configs()] == shapes


def test_p_ideal_is_the_one_that_takes_least_of_those_that_cover_the_rest() -> None:
    """30 ms: one item in the small shape is p_eff, with 50 per second; the large one has 83."""
    rig = rig_of(slo_ms=30)
    rig.policy.scale({rig.stage(): 60.0})
    assert [shape for _, shape, _ in rig.configs()] == [0, 0]
    choice = rig.policy.choose(rig.stage(), 49.0, 1)
    assert choice is not None
    assert choice[0].config.shape_id == 0


@pytest.mark.parametrize(("demand", "pods"), [(192.0, 2), (193.0, 3), (129.0, 2), (70.0, 1)])
def test_nothing_changes_within_the_band(demand: float, pods: int) -> None:
    """Two pods of 80: up above 192, down below 128 if one suffices."""
    rig = rig_of()
    rig.policy.scale({rig.stage(): 160.0})
    rig.policy.scale({rig.stage(): demand})
    assert len(rig.configs()) == pods


def test_only_whole_pods_are_removed() -> None:
    rig = rig_of()
    rig.policy.scale({rig.stage(): 240.0})
    rig.policy.scale({rig.stage(): 100.0})
    assert len(rig.configs()) == 2
    rig.policy.scale({rig.stage(): 0.0})
    assert rig.configs() == []


def test_a_pod_that_is_too_large_is_replaced() -> None:
    """30 ms: a pod of the large shape serves 83 per second; for 40 the small one takes less."""
    rig = rig_of(slo_ms=30, nodes=1)
    large = next(each for each in rig.stage().ratings if each.config.shape_id == 1)
    rig.policy._place(rig.stage(), large, rig.scheduler.view.nodes[0])
    rig.policy.scale({rig.stage(): 40.0})
    assert [shape for _, shape, _ in rig.configs()] == [0]


def test_pods_are_packed() -> None:
    """Seven pods of 1/7 fill a node before the next one is used."""
    rig = rig_of(slo_ms=20)
    rig.policy.scale({rig.stage(): 7 * 50.0})
    assert {node for node, _, _ in rig.configs()} == {rig.configs()[0][0]}
    rig.policy.scale({rig.stage(): 20 * 50.0})
    assert len({node for node, _, _ in rig.configs()}) == 3


def test_an_idle_pod_takes_what_waits() -> None:
    """1. The first request is sent alone. 2. Five come meanwhile: four are sent, then one."""
    rig = rig_of(interval="100s", first="100s")
    (first,) = rig.arrive()
    assert first.items == 1
    assert rig.arrive(5) == []
    (second,) = rig.finish(first)
    assert second.items == 4
    (third,) = rig.finish(second)
    assert third.items == 1


def test_evaluations_begin_soon_and_double_their_intervals() -> None:
    """A burst of 40 in the first 100 ms is more than one pod serves: there are more after it."""
    rig = rig_of(utilisation=0.4)
    rig.arrive(40)
    assert len(rig.configs()) == 1
    rig.advance(49)
    assert len(rig.configs()) == 1
    rig.advance(50)
    assert len(rig.configs()) > 1
    times = []
    for now_ms in range(51, 40_000):
        evaluated = rig.policy._evaluated_ns
        rig.advance(now_ms)
        if rig.policy._evaluated_ns != evaluated:
            times.append(now_ms)
    assert times[:4] == [100, 200, 400, 800]
    assert {later - before for before, later in pairwise(times[8:])} == {10_000}
