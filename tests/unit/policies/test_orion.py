"""Decisions of `orion`: one plan at arrival, within a limit of expansions, and kept."""

from __future__ import annotations

import pytest
from stage_rig import StageRig, make_function

from headgate.core.actions import Dispatch
from headgate.core.events import BatchFinished, NodeJoined

TWO = [make_function(0), make_function(1)]


def run_alone(rig: StageRig, *ends_ms: int) -> list[Dispatch]:
    """One request, whose batches end at these times; its dispatches."""
    rig.arrive(0, 0)
    for at_ms in ends_ms:
        rig.at(at_ms, BatchFinished(rig.sent[-1].batch_id))
    return rig.sent


@pytest.mark.parametrize(("slo_ms", "shapes"), [(0, 0), (40, 0), (39, 1), (30, 1), (29, 2), (5, 2)])
def test_the_cheapest_shapes_of_all_stages_in_time(slo_ms: int, shapes: int) -> None:
    """Small ones (20 ms) if both are in time, then one large (10 ms), then both; also if late."""
    sent = run_alone(StageRig(TWO, slo_ms, policy="orion"), 1, 2)
    assert [each.variant_id for each in sent] == [0, 1]
    assert sum(each.shape_id for each in sent) == shapes


def test_a_plan_stays_whatever_time_is_left() -> None:
    """45 ms: both stages are planned small. The first takes 30 ms: `esg` speeds up the second."""
    by_plan = {
        policy: [each.shape_id for each in run_alone(StageRig(TWO, 45, policy=policy), 30)]
        for policy in ("orion", "esg")
    }
    assert by_plan == {"orion": [0, 0], "esg": [0, 1]}


def test_batches_are_planned_by_what_waits_at_arrival() -> None:
    """1. One runs, three wait: the first of them was alone, the others had one before them.

    2. So the first runs alone although three wait, and the others run together.
    """
    rig = StageRig([make_function(0)], 0, policy="orion", gpu_sevenths=1)
    for id in range(4):
        rig.arrive(0, id)
    while len(rig.settled) < 4:
        rig.at(20, BatchFinished(rig.sent[-1].batch_id))
    assert [each.items for each in rig.sent] == [1, 1, 2]


def test_a_batch_may_turn_out_smaller_than_planned() -> None:
    """The second request is planned for a batch of two, and waits alone when its turn comes."""
    rig = StageRig([make_function(0)], 0, policy="orion", nodes=0)
    rig.arrive(0, 0)
    rig.arrive(0, 1)
    sent = rig.at(0, NodeJoined(0, 0, "n0"))
    assert [each.items for each in sent] == [1, 1]


def test_requests_of_several_items_are_planned_for_batches_of_as_many() -> None:
    rig = StageRig(TWO, 0, policy="orion")
    rig.arrive(0, 0, items=2)
    rig.at(30, BatchFinished(rig.sent[-1].batch_id))
    assert [each.items for each in rig.sent] == [2, 2]


@pytest.mark.parametrize(("expansions_max", "shapes"), [(1, 0), (3, 1), (4, 2)])
def test_at_the_limit_the_fastest_plan_so_far_is_taken(expansions_max: int, shapes: int) -> None:
    """20 ms need both stages large: the fourth state, after small ones and one large."""
    settings = {"expansions_max": expansions_max, "goes_on": False}
    rig = StageRig(TWO, 20, policy="orion", settings=settings)
    sent = run_alone(rig, 1)
    assert sum(each.shape_id for each in sent) == shapes
    assert rig.scheduler.work == expansions_max


@pytest.mark.parametrize(("expansions_max", "work"), [(1, 3), (3, 4), (4, 4)])
def test_it_goes_on_at_the_limit_until_the_plan_is_in_time(expansions_max: int, work: int) -> None:
    """From both small two steps, from one large a step; each is reported."""
    rig = StageRig(TWO, 20, policy="orion", settings={"expansions_max": expansions_max})
    sent = run_alone(rig, 1)
    assert [each.shape_id for each in sent] == [1, 1]
    assert rig.scheduler.work == work


def test_expansions_are_reported_for_every_request() -> None:
    """Also where the answer is known, and one for a request that no plan can save."""
    rig = StageRig(TWO, 20, policy="orion")
    run_alone(rig, 1, 2)
    assert rig.scheduler.work == 4
    rig.arrive(100, 1)
    assert rig.scheduler.work == 8
    late = StageRig(TWO, 5, policy="orion")
    late.arrive(0, 0)
    assert late.scheduler.work == 1


def test_what_fits_nowhere_twice_runs_in_the_smallest_shape() -> None:
    """1. Two urgent requests take 3/7 each. 2. The third waits for 3/7. 3. Then it takes 1/7."""
    rig = StageRig([make_function(0)], 15, policy="orion")
    assert [sent.shape_id for id in range(2) for sent in rig.arrive(0, id)] == [1, 1]
    assert rig.arrive(0, 2) == []
    (sent,) = rig.arrive(1, 3)
    assert (sent.shape_id, sent.task_ids) == (0, [2 * 256])
