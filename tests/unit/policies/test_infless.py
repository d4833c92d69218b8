"""Decisions of `infless`: feasible configurations, residual rates, load split, batch timeouts."""

from __future__ import annotations

from typing import Any

import pytest
from replica_rig import ReplicaRig, make_function
from stage_rig import MS

from headgate.planning.rivals.replicas import RatedConfig
from headgate.policies.infless import Infless


def rig_of(slo_ms: int = 100, **settings: Any) -> ReplicaRig:
    """One function whose stage has the whole objective, scaled to the brim."""
    options: dict[str, Any] = {"margin": 0.0, "utilisation": 1.0, **settings}
    return ReplicaRig("infless", [make_function(0, has_large=False)], slo_ms, **options)


def ratings_of(rig: ReplicaRig) -> dict[int, RatedConfig]:
    return {rating.config.batch: rating for rating in rig.stage().ratings}


@pytest.mark.parametrize(
    ("slo_ms", "batches"),
    [
        (100, [1, 2, 4]),  # 50 ms is half of it
        (99, [1, 2]),
        (60, [1, 2]),
        (59, [1]),
        (20, [1]),
        (19, [1]),  # nothing is in time: the fastest
    ],
)
def test_a_batch_takes_half_of_the_objective_and_one_item_all_of_it(
    slo_ms: int, batches: list[int]
) -> None:
    assert sorted(ratings_of(rig_of(slo_ms))) == batches


def test_rates_and_limits_on_waiting() -> None:
    """r_up = b / t, r_low = b / (SLO - t), and the batch waits for SLO - t."""
    ratings = ratings_of(rig_of(100))
    single, double = ratings[1], ratings[2]
    assert (single.rate_max, single.rate_min, single.wait_ns) == (50.0, 1.0, 0)
    assert double.rate_max == pytest.approx(2 / 0.03)
    assert double.rate_min == pytest.approx(2 / 0.07)
    assert double.wait_ns == 70 * MS


def test_without_an_objective_no_batch_waits() -> None:
    ratings = ratings_of(rig_of(0))
    assert sorted(ratings) == [1, 2, 4]
    assert {(rating.rate_min, rating.wait_ns) for rating in ratings.values()} == {(0.0, 0)}


@pytest.mark.parametrize(
    ("missing", "batch"),
    [(0.0, 1), (28.0, 1), (29.0, 2), (79.0, 2), (80.0, 4), (500.0, 4)],
)
def test_the_residual_rate_must_fill_the_batch(missing: float, batch: int) -> None:
    """r_low is 28.6 items per second for a batch of two, and 80 for one of four."""
    choice = rig_of(100).policy.choose(rig_of(100).stage(), missing, 1)
    assert choice is not None
    assert choice[0].config.batch == batch


def test_among_the_usable_the_most_efficient_is_taken() -> None:
    """100 ms for all: the large shape is faster, and costs more per item."""
    rig = ReplicaRig("infless", [make_function(0)], 100, margin=0.0)
    choice = rig.policy.choose(rig.stage(), 40.0, 1)
    assert choice is not None
    assert (choice[0].config.shape_id, choice[0].config.batch) == (0, 2)


def test_equal_scores_go_to_the_node_that_is_left_with_least() -> None:
    rig = ReplicaRig("infless", [make_function(0)], 100, nodes=3)
    for _ in range(4):
        rig.add(0.0)
    assert len({node for node, _, _ in rig.configs()}) == 1


@pytest.mark.parametrize(("left_over_min", "shape_id"), [(0.9, 0), (0.01, 1)])
def test_the_part_that_is_left_counts_within_bounds(left_over_min: float, shape_id: int) -> None:
    """Three sevenths are left: the large shape leaves nothing, which would beat any efficiency."""
    rig = ReplicaRig(
        "infless", [make_function(0)], 100, gpu_sevenths=3, left_over_min=left_over_min
    )
    choice = rig.policy.choose(rig.stage(), 0.0, 1)
    assert choice is not None
    assert choice[0].config.shape_id == shape_id


def test_the_first_request_starts_every_stage_at_once() -> None:
    functions = [make_function(id, cold_start_ms=500) for id in range(3)]
    rig = ReplicaRig("infless", functions, 300)
    assert rig.arrive() == []
    assert [start.variant_id for start in rig.started] == [0, 1, 2]
    (sent,) = rig.advance(500)
    assert sent.variant_id == 0


def test_a_batch_is_sent_when_it_is_full_or_has_waited() -> None:
    """1. One batch of two runs at a time. 2. The first two fill it. 3. The third waits 70 ms."""
    rig = rig_of(100, interval="100s", first="100s")
    rig.add(40.0)
    assert rig.configs() == [(0, 0, 2)]
    assert rig.arrive() == []
    (full,) = rig.arrive()
    assert full.items == 2
    rig.advance(30)
    rig.finish(full)
    assert rig.arrive() == []
    assert rig.advance(99) == []
    (late,) = rig.advance(100)
    assert late.items == 1


def test_rates_scale_out_and_in() -> None:
    """1. 100 items per second: more instances. 2. None for a window: no instances."""
    rig = rig_of(100, interval="1s", window="1s", first="1s")
    for number in range(100):
        rig.advance(10 * number)
        for sent in rig.arrive():
            rig.finish(sent)
    rig.advance(1_000)
    assert rig.stage().rate_max >= 100.0
    rig.advance(10_000)
    assert rig.configs() == []


@pytest.mark.parametrize(
    ("rate", "batches"),
    [(91.0, [1, 4]), (81.0, [1, 4]), (80.0, [4]), (31.0, [4]), (0.0, [])],
)
def test_below_the_band_the_least_efficient_are_released_while_the_rest_can_serve(
    rate: float, batches: list[int]
) -> None:
    """Batches of 1 and 4: R_max = 50 + 80, R_min = 1 + 80, and the band begins at 90.8.

    An instance that the others cannot replace stays, although the rate is below the band.
    """
    rig = rig_of(100)
    rig.add(0.0)
    rig.add(80.0)
    rig.policy.scale({rig.stage(): rate})
    assert [batch for _, _, batch in rig.configs()] == batches


@pytest.mark.parametrize(
    ("rate", "shares"), [(200.0, (50, 80)), (105.5, (25.5, 80)), (81, (1, 80))]
)
def test_the_load_is_split_between_lowest_and_highest_rates(
    rate: float, shares: tuple[float, float]
) -> None:
    rig = rig_of(100)
    rig.add(0.0)
    rig.add(80.0)
    assert isinstance(rig.policy, Infless)
    rig.policy._set_shares(rig.stage(), rate)
    by_batch = {replica.config.batch: replica.share for replica in rig.stage().replicas}
    assert (by_batch[1], by_batch[4]) == pytest.approx(shares)


def test_items_are_given_in_proportion_to_shares() -> None:
    """Of thirteen requests a batch of one gets five, one at a time, and a batch of four eight."""
    rig = rig_of(100, interval="100s", first="100s")
    rig.add(0.0)
    rig.add(80.0)
    for _ in range(13):
        for sent in rig.arrive():
            rig.finish(sent)
    sizes = [sent.items for sent in rig.sent]
    assert (sizes.count(1), sizes.count(4)) == (5, 2)


def test_what_has_waited_for_every_limit_is_taken_by_any() -> None:
    """1. A batch of four is meant for one instance, which is busy. 2. Then another takes it."""
    rig = rig_of(100, interval="100s", first="100s")
    rig.add(80.0)
    (first,) = rig.arrive(4)
    rig.add(80.0)
    assert rig.arrive(2) == []
    (sent,) = rig.advance(50)
    assert sent.items == 2
    assert sent.batch_id != first.batch_id


def test_the_split_of_the_objective_is_fixed() -> None:
    """200 ms for two stages: the second one waits as long if the first one took all of it."""
    rig = ReplicaRig(
        "infless", [make_function(id, has_large=False) for id in range(2)], 200,
        margin=0.0, interval="100s", first="100s",
    )  # fmt: skip
    rig.add(0.0, 0)
    rig.add(80.0, 1)
    (first,) = rig.arrive()
    rig.advance(180)
    assert rig.finish(first) == []
    assert rig.advance(229) == []
    (second,) = rig.advance(230)
    assert second.variant_id == 1
