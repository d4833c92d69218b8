"""Decisions of `esg`: configuration by the time left, locality, recheck list, pre-warming."""

from __future__ import annotations

import pytest
from stage_rig import MS, StageRig, make_function

from headgate.core.errors import ConfigError
from headgate.core.events import BatchFinished, BatchLost, NodeJoined, NodeLost
from headgate.core.model import Compute
from headgate.core.states import Outcome


@pytest.mark.parametrize(("slo_ms", "shape_id"), [(0, 0), (20, 0), (19, 1), (10, 1), (5, 1)])
def test_the_cheapest_shape_in_time(slo_ms: int, shape_id: int) -> None:
    """The small shape if it is in time, or there is no objective; the fastest if none is."""
    (sent,) = StageRig([make_function(0)], slo_ms).arrive(0, 0)
    assert (sent.shape_id, sent.items) == (shape_id, 1)


@pytest.mark.parametrize(
    ("slo_ms", "expected"),
    [
        (0, [(2, 0)]),
        (60, [(2, 0)]),  # 30 ms are left: the time of two in the small shape
        (59, [(1, 0), (1, 0)]),  # one in the small shape costs less than two in the large one
        (49, [(2, 1)]),  # two in the large shape cost less than one in it
        (42, [(1, 1), (1, 0)]),  # 12 ms are left: no batch of two is in time; the next has 32 ms
    ],
)
def test_the_batch_is_what_the_oldest_request_has_time_for(
    slo_ms: int, expected: list[tuple[int, int]]
) -> None:
    """1. A request waits for a node from 0 ms, another from 20 ms. 2. At 30 ms a node joins."""
    driver = StageRig([make_function(0)], slo_ms, nodes=0)
    driver.arrive(0, 0)
    driver.arrive(20, 1)
    sent = driver.at(30, NodeJoined(0, 0, "n0"))
    assert [(each.items, each.shape_id) for each in sent] == expected


@pytest.mark.parametrize(("ended_ms", "shape_id"), [(20, 0), (30, 1)])
def test_a_successor_is_planned_with_the_time_that_is_left(ended_ms: int, shape_id: int) -> None:
    """45 ms: both stages are planned small (40 ms); the second is large if the first was slow."""
    driver = StageRig([make_function(0), make_function(1)], 45)
    (first,) = driver.arrive(0, 0)
    assert first.shape_id == 0
    (second,) = driver.at(ended_ms, BatchFinished(first.batch_id))
    assert (second.variant_id, second.shape_id) == (1, shape_id)


@pytest.mark.parametrize("last", [0, 1])
def test_a_successor_prefers_the_node_of_its_predecessor(last: int) -> None:
    """1. Each of two nodes runs a first stage. 2. One request ends: its node is warm and free.

    3. The other first stage ends: both nodes could take the second, and its own one does. So it is
    not the home node of the second function that decides, whichever node that is.
    """
    driver = StageRig([make_function(0), make_function(1)], 0, nodes=2, gpu_sevenths=1)
    first = [sent for id in range(2) for sent in driver.arrive(0, id)]
    assert {sent.node_id for sent in first} == {0, 1}
    (second,) = driver.at(20, BatchFinished(first[1 - last].batch_id))
    driver.at(40, BatchFinished(second.batch_id))
    assert {each.node_id for each in driver.started if each.variant_id == 1} == {0, 1}
    (second,) = driver.at(50, BatchFinished(first[last].batch_id))
    assert (second.variant_id, second.node_id) == (1, first[last].node_id)


def test_a_function_has_a_home_node() -> None:
    """Equal nodes, of which each function uses its own as long as there is room."""
    homes = set()
    for name in ("deblur", "depth", "resize", "segment", "vote"):
        driver = StageRig([make_function(0, name=name)], 0, nodes=5)
        nodes = {sent.node_id for id in range(4) for sent in driver.arrive(id, id)}
        assert len(nodes) == 1
        homes |= nodes
    assert len(homes) > 2


def test_a_queue_that_fits_nowhere_is_rechecked_with_the_smallest_shape() -> None:
    """1. Two urgent requests take 3/7 each. 2. The third waits for 3/7. 3. Then it takes 1/7."""
    driver = StageRig([make_function(0)], 15)
    assert [sent.shape_id for id in range(2) for sent in driver.arrive(0, id)] == [1, 1]
    assert driver.arrive(0, 2) == []
    (sent,) = driver.arrive(1, 3)
    assert (sent.shape_id, sent.task_ids) == (0, [2 * 256])


def test_no_request_is_lost_when_a_node_dies() -> None:
    """1. A node dies with two batches while others wait. 2. The other node serves all of them."""
    driver = StageRig([make_function(0), make_function(1)], 0, nodes=2, gpu_sevenths=2)
    sent = [sent for id in range(7) for sent in driver.arrive(0, id)]
    assert sorted(each.node_id or 0 for each in sent) == [0, 0, 1, 1]
    driver.at(5, NodeLost(0))
    running = []
    for each in sent:
        if each.node_id == 0:
            driver.at(5, BatchLost(each.batch_id))
        else:
            running.append(each)
    now_ms = 20
    while running:
        assert all(each.node_id == 1 for each in running)
        running = driver.at(now_ms, BatchFinished(running[0].batch_id)) + running[1:]
        now_ms += 20
    assert driver.settled == dict.fromkeys(range(7), Outcome.MET)


@pytest.mark.parametrize(("slots", "started"), [(4, [0, 1]), (3, [0])])
def test_successors_are_started_ahead_unless_they_take_the_last_slot(
    slots: int, started: list[int]
) -> None:
    functions = [make_function(id, cold_start_ns=100 * MS) for id in range(2)]
    driver = StageRig(functions, 0, slots=slots)
    driver.arrive(0, 0)
    assert [each.variant_id for each in driver.started] == started


@pytest.mark.parametrize(("memory_bytes", "batches"), [(30, 3), (20, 2)])
def test_another_instance_is_started_where_all_are_busy(memory_bytes: int, batches: int) -> None:
    """Each instance runs one batch at a time. The third one starts if there is memory for it."""
    function = make_function(0, concurrency=1, memory_bytes=10)
    driver = StageRig([function], 0, memory_bytes=memory_bytes)
    sent = [sent for id in range(3) for sent in driver.arrive(0, id)]
    assert len(sent) == len(driver.started) == batches
    assert len({each.instance_id for each in sent}) == batches


def test_a_shape_that_binds_at_the_start_is_started_ahead() -> None:
    """30 ms for two stages: one of them must be large, and is started in that shape."""
    driver = StageRig([make_function(0), make_function(1)], 30, compute=Compute.PER_INSTANCE)
    (first,) = driver.arrive(0, 0)
    (second,) = driver.at(30 - 10 - 10 * first.shape_id, BatchFinished(first.batch_id))
    assert [each.shape_id for each in driver.started][:2] == [first.shape_id, 1 - first.shape_id]
    assert second.shape_id == 1 or first.shape_id == 1


def test_expansions_are_reported_as_work() -> None:
    driver = StageRig([make_function(0), make_function(1)], 45)
    driver.arrive(0, 0)
    assert driver.scheduler.work > 1


def test_a_stage_that_fits_no_pool_is_one_clear_line() -> None:
    with pytest.raises(ConfigError, match=r"stage f0: has no feasible configuration"):
        StageRig([make_function(0, memory_bytes=100)], 0, memory_bytes=99)


@pytest.mark.parametrize(("margin", "shape_id"), [(0.0, 0), (0.04, 0), (0.06, 1)])
def test_plans_leave_a_margin_of_the_time_left(margin: float, shape_id: int) -> None:
    """The small shape takes 20 ms of 21."""
    rig = StageRig([make_function(0)], 21, settings={"margin": margin})
    assert [sent.shape_id for sent in rig.arrive(0, 0)] == [shape_id]
