"""Pipelines: dependencies, cascades, and the location of intermediate results."""

from __future__ import annotations

import pytest

from headgate.core.actions import Dispatch, Settle, StartInstance
from headgate.core.events import (
    BatchFailed,
    BatchFinished,
    InstanceStarted,
    RequestArrived,
    RequestCancelled,
)
from headgate.core.model import Pool, Slo, Stage
from headgate.core.states import Outcome, Settlement, TaskState

from .rig import Rig, wires
from .sample_apps import Scripted, make_app, make_function

F0, F1, F2 = (make_function(i, output_bytes=10 ** (i + 1)) for i in range(3))
WIDE = [Pool(0, "gpu", slots=8)]


def states(rig: Rig) -> list[int]:
    return [task.state for task in rig.view.requests[0].tasks]


def test_in_series_the_second_stage_follows_the_first(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(F0, F1, stages=[Stage(F0), Stage(F1, (0,))]), nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.at(0, InstanceStarted(0, 0))
    assert rig.at(10, BatchFinished(0)) == wires(
        StartInstance(1, 1, 0, 0), Dispatch(1, 1, [1], 1, 0, 0, 1)
    )
    rig.at(11, InstanceStarted(1, 0))
    assert rig.at(20, BatchFinished(1)) == wires(Settle(0, Settlement(Outcome.MET)))


def test_a_join_waits_for_all_its_branches(make_rig: type[Rig]) -> None:
    stages = [Stage(F0), Stage(F1), Stage(F2, (0, 1))]
    rig = make_rig(make_app(F0, F1, F2, stages=stages), nodes=2)
    rig.at(0, RequestArrived(0, 0))
    rig.at(0, InstanceStarted(0, 0))
    rig.at(0, InstanceStarted(1, 1))
    assert rig.at(10, BatchFinished(0)) == []
    assert rig.at(12, BatchFinished(1)) == wires(
        StartInstance(2, 2, 0, 0), Dispatch(2, 2, [2], 1, 0, 0, 2, moved_bytes=100)
    )


def test_a_cascade_that_is_sure_skips_the_second_stage(make_rig: type[Rig]) -> None:
    stages = [Stage(F0), Stage(F1, (0,), only_if_unsure=True)]
    rig = make_rig(make_app(F0, F1, stages=stages), nodes=1)
    rig.at(0, RequestArrived(0, 0))
    assert rig.at(10, BatchFinished(0)) == wires(Settle(0, Settlement(Outcome.MET)))


def test_a_cascade_that_is_unsure_goes_on(make_rig: type[Rig]) -> None:
    """`unsure` names tasks: of a batch of two, one request ends and the other goes on."""
    stages = [Stage(F0), Stage(F1, (0,), only_if_unsure=True)]
    rig = make_rig(make_app(F0, F1, stages=stages), Scripted, nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.at(0, RequestArrived(1, 0))
    rig.order(0, lambda p: p.send(0, 0, 256))
    assert rig.at(10, BatchFinished(0, unsure=(256,))) == wires(Settle(0, Settlement(Outcome.MET)))
    assert ("ready", 257) in rig.scripted.hooks_called


def test_what_follows_a_skipped_stage_runs_without_it(make_rig: type[Rig]) -> None:
    stages = [Stage(F0), Stage(F1, (0,), only_if_unsure=True), Stage(F2, (1,))]
    rig = make_rig(make_app(F0, F1, F2, stages=stages), Scripted, nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.order(0, lambda p: p.send(0, 0))
    assert rig.at(10, BatchFinished(0)) == []
    assert states(rig) == [TaskState.DONE, TaskState.SKIPPED, TaskState.READY]


def test_a_cascade_of_cascades_is_skipped_as_a_whole(make_rig: type[Rig]) -> None:
    stages = [Stage(F0), Stage(F1, (0,), only_if_unsure=True), Stage(F2, (1,), only_if_unsure=True)]
    rig = make_rig(make_app(F0, F1, F2, stages=stages), nodes=1)
    rig.at(0, RequestArrived(0, 0))
    assert rig.at(10, BatchFinished(0)) == wires(Settle(0, Settlement(Outcome.MET)))


def test_a_result_lies_where_it_was_made_and_what_must_move_is_counted(
    make_rig: type[Rig],
) -> None:
    """Ten bytes per item lie on node 0: free of charge there, to be moved to node 1."""
    stages = [Stage(F0), Stage(F1, (0,))]
    rig = make_rig(make_app(F0, F1, stages=stages), Scripted, nodes=2)
    rig.at(0, RequestArrived(0, 0, items=2))
    rig.order(0, lambda p: p.send(0, 0))
    rig.at(10, BatchFinished(0))
    datum = rig.view.inputs_of(rig.scripted.task(1))[0]
    assert (datum.task_id, datum.node_id, datum.size_bytes) == (0, 0, 20)
    near, far = rig.order(11, lambda p: (p.send(0, 1), p.send(1, 1)))[1::2]
    assert near == wires(Dispatch(1, 1, [1], 2, 0, 0, 1, moved_bytes=0))[0]
    assert far == wires(Dispatch(2, 1, [1], 2, 0, 1, 2, moved_bytes=20))[0]


def test_in_a_mixed_batch_the_inputs_of_every_task_are_counted(make_rig: type[Rig]) -> None:
    """A first stage, which reads nothing, goes first; the second stage behind it reads."""
    rig = make_rig(make_app(F0, stages=[Stage(F0), Stage(F0, (0,))]), Scripted, nodes=2)
    rig.at(0, RequestArrived(0, 0))
    rig.at(0, RequestArrived(1, 0))
    rig.order(0, lambda p: p.send(0, 0))
    rig.at(10, BatchFinished(0))
    assert rig.order(11, lambda p: p.send(1, 256, 1))[-1:] == wires(
        Dispatch(1, 0, [256, 1], 2, 0, 1, 1, moved_bytes=10)
    )


def test_two_stages_of_one_request_may_share_a_batch(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(F0, stages=[Stage(F0), Stage(F0)]), Scripted, nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.order(0, lambda p: p.send(0, 0, 1))
    assert rig.at(10, BatchFinished(0)) == wires(Settle(0, Settlement(Outcome.MET)))


def test_when_a_stage_fails_the_branches_beside_it_are_cancelled(make_rig: type[Rig]) -> None:
    """Of three branches one fails, one runs and one waits: the request ends, once."""
    once = make_function(0, is_idempotent=False)
    stages = [Stage(once), Stage(F1), Stage(F2)]
    rig = make_rig(make_app(once, F1, F2, stages=stages), Scripted, nodes=2)
    rig.at(0, RequestArrived(0, 0))
    rig.order(0, lambda p: (p.send(0, 0), p.send(1, 1)))
    rig.scripted.hooks_called.clear()
    names = [wire[0] for wire in rig.at(10, BatchFailed(0, "crash"))]
    assert names == ["Settle", "CancelBatch"]
    assert rig.scripted.hooks_called == [("withdrawn", 2), ("ended", 0), ("capacity", 0)]
    assert rig.at(11, BatchFinished(1)) == []


def test_a_request_cancelled_between_its_stages_wakes_nobody(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(F0, F1, stages=[Stage(F0), Stage(F1, (0,))]), Scripted, nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.order(0, lambda p: p.send(0, 0))
    rig.at(5, RequestCancelled(0))
    rig.scripted.hooks_called.clear()
    assert rig.at(10, BatchFinished(0)) == []
    assert rig.scripted.hooks_called == [("ended", 0), ("capacity", 0)]


@pytest.mark.parametrize(("is_hard", "outcome"), [(True, Outcome.EXPIRED), (False, Outcome.LATE)])
def test_a_deadline_that_passes_between_stages(
    make_rig: type[Rig], is_hard: bool, outcome: int
) -> None:
    """Only a request that gives up is given up; the other is answered, late."""
    slo = Slo(latency_ns=100, is_hard=is_hard)
    rig = make_rig(make_app(F0, F1, stages=[Stage(F0), Stage(F1, (0,))], slo=slo), nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.at(0, InstanceStarted(0, 0))
    actions = rig.at(101, BatchFinished(0))
    if not is_hard:
        actions = rig.at(102, BatchFinished(1))
    assert actions[0][:3] == ["Settle", 0, outcome]


def test_a_wide_node_runs_branches_at_the_same_time(make_rig: type[Rig]) -> None:
    app = make_app(F0, F1, stages=[Stage(F0), Stage(F1)], pools=WIDE)
    rig = make_rig(app, nodes=1)
    sent = [wire for wire in rig.at(0, RequestArrived(0, 0)) if wire[0] == "Dispatch"]
    assert [wire[3] for wire in sent] == [[0], [1]]
