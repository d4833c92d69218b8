"""Decisions of `brute_force`: those of `esg`, for the price of every combination."""

from __future__ import annotations

import pytest
from stage_rig import StageRig, make_function

from headgate.config import declare
from headgate.core.errors import ConfigError
from headgate.core.events import BatchFinished, NodeJoined
from headgate.policies import policies_for

TWO = [make_function(0), make_function(1)]
AFTER = {"a": "", "b": "a", "c": "b"}


@pytest.mark.parametrize("slo_ms", [0, 60, 59, 49, 42])
@pytest.mark.parametrize("policy", ["esg", "brute_force"])
def test_the_batch_is_what_the_oldest_request_has_time_for(policy: str, slo_ms: int) -> None:
    """1. A request waits for a node from 0 ms, another from 20 ms. 2. At 30 ms a node joins."""
    rig = StageRig([make_function(0)], slo_ms, nodes=0, policy=policy)
    rig.arrive(0, 0)
    rig.arrive(20, 1)
    sent = rig.at(30, NodeJoined(0, 0, "n0"))
    expected = {
        0: [(2, 0)],
        60: [(2, 0)],
        59: [(1, 0), (1, 0)],
        49: [(2, 1)],
        42: [(1, 1), (1, 0)],
    }
    assert [(each.items, each.shape_id) for each in sent] == expected[slo_ms]


@pytest.mark.parametrize(("ended_ms", "shape_id"), [(20, 0), (30, 1), (60, 1)])
def test_every_stage_is_planned_with_the_time_that_is_left(ended_ms: int, shape_id: int) -> None:
    """45 ms: the second stage is large if the first was slow, and also if it is late."""
    rig = StageRig(TWO, 45, policy="brute_force")
    (first,) = rig.arrive(0, 0)
    (second,) = rig.at(ended_ms, BatchFinished(first.batch_id))
    assert (first.shape_id, second.shape_id) == (0, shape_id)


def test_combinations_are_reported_as_work() -> None:
    """Two shapes of each stage for a batch of one: four for both stages, then two for the last."""
    rig = StageRig(TWO, 45, policy="brute_force")
    (first,) = rig.arrive(0, 0)
    assert rig.scheduler.work == 2 * 2
    rig.at(20, BatchFinished(first.batch_id))
    assert rig.scheduler.work == 2 * 2 + 2


def test_too_many_combinations_are_one_clear_line() -> None:
    """Each stage has two shapes and two batch sizes."""
    settings = {"combinations_max": 15}
    with pytest.raises(ConfigError) as raised:
        StageRig(TWO, 45, policy="brute_force", settings=settings)
    assert str(raised.value) == (
        "policy.combinations_max: 15: stage f0: 16 combinations of configurations "
        "(allowed: 16 or more, a smaller policy.group_max, or another policy)"
    )
    StageRig(TWO, 45, policy="brute_force", settings={"combinations_max": 16})
    StageRig(TWO, 45, policy="brute_force", settings=settings | {"group_max": 1})


def test_what_is_too_large_for_it_is_left_out_of_comparisons() -> None:
    """Three stages in batches of up to 28: 21,952 combinations; 19,683 are not too many."""
    for batch_max, is_in in ((27, True), (28, False)):
        functions = {name: {"exec_time": {1: "5ms", batch_max: "50ms"}} for name in "abc"}
        stages = {name: {"function": name, "after": list(before)} for name, before in AFTER.items()}
        pipelines = {"p": {"stages": stages}}
        app = declare(functions=functions, pipelines=pipelines, pools={"gpu": {"nodes": 1}}).app
        assert ("brute_force" in policies_for(app)) == is_in
        assert "esg" in policies_for(app)
