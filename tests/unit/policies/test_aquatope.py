"""Decisions of `aquatope`: one configuration for each stage, given or by the profiles alone."""

from __future__ import annotations

import pytest
from stage_rig import StageRig, make_function

from headgate.core.actions import Dispatch
from headgate.core.errors import ConfigError
from headgate.core.events import BatchFinished, NodeJoined

TWO = [make_function(0), make_function(1)]
FIRST = "p f0: v0 on gpu, shape 1, batch 2"
SECOND = "p f1: v1 on gpu, shape 0, batch 1"


def make_rig(*configs: str, slo_ms: int = 0, nodes: int = 1, gpu_sevenths: int = 7) -> StageRig:
    return StageRig(
        TWO,
        slo_ms,
        policy="aquatope",
        settings={"configs": list(configs)},
        nodes=nodes,
        gpu_sevenths=gpu_sevenths,
    )


def run_two(rig: StageRig) -> list[Dispatch]:
    """Two requests that wait when the first node joins; the dispatches."""
    rig.arrive(0, 0)
    rig.arrive(0, 1)
    rig.at(0, NodeJoined(0, 0, "n0"))
    for sent in rig.sent:  # what follows is appended meanwhile
        rig.at(30, BatchFinished(sent.batch_id))
    return rig.sent


def test_every_stage_has_its_configuration() -> None:
    """The first stage runs both together in the large shape, the second each in the small one."""
    sent = run_two(make_rig(FIRST, SECOND, nodes=0))
    assert [(each.variant_id, each.shape_id, each.items) for each in sent] == [
        (0, 1, 2),
        (1, 0, 1),
        (1, 0, 1),
    ]


def test_a_batch_is_not_waited_for() -> None:
    (sent,) = make_rig(FIRST, SECOND).arrive(0, 0)
    assert (sent.shape_id, sent.items) == (1, 1)


@pytest.mark.parametrize(("slo_ms", "shapes"), [(0, 0), (60, 0), (59, 0), (39, 1), (20, 2), (5, 2)])
def test_without_configurations_the_profiles_decide(slo_ms: int, shapes: int) -> None:
    """Small ones, one large, both large: in batches of two where there is time for them."""
    rig = make_rig(slo_ms=slo_ms)
    (first,) = rig.arrive(0, 0)
    (second,) = rig.at(1, BatchFinished(first.batch_id))
    assert first.shape_id + second.shape_id == shapes


def test_time_left_changes_nothing() -> None:
    rig = make_rig(slo_ms=60)
    (first,) = rig.arrive(0, 0)
    (second,) = rig.at(59, BatchFinished(first.batch_id))
    assert (first.shape_id, second.shape_id) == (0, 0)


def test_a_request_larger_than_the_configured_batch_runs_alone() -> None:
    rig = make_rig(FIRST, SECOND)
    (first,) = rig.arrive(0, 0, items=2)
    (second,) = rig.at(30, BatchFinished(first.batch_id))
    assert (second.shape_id, second.items) == (0, 2)


@pytest.mark.parametrize(
    ("configs", "error"),
    [
        (["p f0"], "['p f0']: is no configuration (allowed: PIPELINE STAGE: VARIANT on POOL, sha"),
        (["q f0: v0 on gpu, shape 1, batch 2"], "'q': unknown pipeline (allowed: p)"),
        (["p f2: v0 on gpu, shape 1, batch 2"], "'f2': unknown stage (allowed: f0, f1)"),
        ([FIRST], "'f1': has no configuration (allowed: all stages of p, or none)"),
        ([FIRST, SECOND, FIRST], "'f0': has two configurations (allowed: one for each stage)"),
        (
            [FIRST, "p f1: v1 on gpu, shape 1, batch 3"],
            "'p f1: v1 on gpu, shape 1, batch 3': does not exist (allowed: "
            "v1 on gpu in shape 0 with batch 1 to 2, v1 on gpu in shape 1 with batch 1 to 2)",
        ),
    ],
)
def test_wrong_configurations_are_one_clear_line(configs: list[str], error: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make_rig(*configs)
    assert f"policy.configs: {error}" in str(raised.value)
