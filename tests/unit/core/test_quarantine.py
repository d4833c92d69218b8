"""Quarantine: a task that killed its worker alone fails; of several, each is retried alone."""

from __future__ import annotations

from headgate.core.actions import CancelBatch, Dispatch, SetTimer, Settle
from headgate.core.events import (
    BatchFailed,
    BatchFinished,
    BatchLost,
    BatchRefused,
    InstanceStarted,
    NodeLost,
    Refusal,
    RequestArrived,
    RequestCancelled,
    TimerFired,
)
from headgate.core.model import Limits, Pool, Slo
from headgate.core.states import Failure, Outcome, Settlement, TaskState

from .rig import Rig, wires
from .sample_apps import CLOUD, Scripted, make_app, make_function

KILLED = f"f0: {Failure.KILLED_WORKER}"
LIMITS = Limits(backoff_ns=1)


def lost_together(rig: Rig, count: int) -> list[list[object]]:
    """So many requests run in one batch when their node dies."""
    for request_id in range(count):
        rig.at(0, RequestArrived(request_id, 0))
    rig.order(0, lambda p: p.send(0, *(256 * i for i in range(count))))
    for instance_id in list(rig.view.instances):
        rig.at(1, InstanceStarted(instance_id, 0))
    actions = rig.at(5, BatchLost(0))
    rig.at(5, NodeLost(0))
    return actions


def states(rig: Rig) -> list[int]:
    return [request.tasks[0].state for request in rig.view.requests.values()]


def test_a_request_that_was_alone_is_final(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(limits=LIMITS), Scripted, nodes=2)
    assert lost_together(rig, 1)[-1:] == wires(Settle(0, Settlement(Outcome.FAILED, KILLED)))


def test_where_gateways_share_nodes_nobody_is_known_to_have_been_alone(
    make_rig: type[Rig],
) -> None:
    """Another gateway's batch may have run there, and ours have waited. Alone, it is final."""
    app = make_app(limits=LIMITS, pools=[Pool(0, "gpu", queue_max=1)])
    rig = make_rig(app, Scripted, nodes=2, index=0, peers=2)
    lost_together(rig, 1)
    assert states(rig) == [TaskState.READY]
    assert rig.scripted.task(0).must_run_alone
    rig.order(6, lambda p: p.send(1, 0))
    rig.at(7, InstanceStarted(1, 1))
    assert rig.at(8, BatchLost(1))[-1:] == wires(Settle(0, Settlement(Outcome.FAILED, KILLED)))


def test_suspects_are_released_one_after_the_other(make_rig: type[Rig]) -> None:
    """The next comes when the one before is answered, and each must run alone."""
    rig = make_rig(make_app(limits=LIMITS), Scripted, nodes=2)
    lost_together(rig, 3)
    assert states(rig) == [TaskState.READY, TaskState.HELD, TaskState.HELD]
    for id in range(3):
        assert states(rig)[0] == TaskState.READY
        assert rig.scripted.hooks_called.count(("returned", 256 * id)) == 1
        assert rig.scripted.task(256 * id).must_run_alone
        rig.order(20, lambda p: p.send(1, 256 * id))  # noqa: B023 - at once
        assert rig.at(20, BatchFinished(id + 1))[:1] == wires(Settle(id, Settlement(Outcome.MET)))
    assert (rig.view.requests, rig.view.suspects) == ({}, {})


def test_a_suspect_that_kills_again_is_final_and_the_next_has_its_turn(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(limits=LIMITS), Scripted, nodes=3)
    lost_together(rig, 2)
    rig.order(6, lambda p: p.send(1, 0))
    rig.at(7, InstanceStarted(1, 1))
    assert rig.at(8, BatchLost(1))[-1:] == wires(Settle(0, Settlement(Outcome.FAILED, KILLED)))
    assert rig.scripted.hooks_called[-1] == ("returned", 256)


def test_a_suspect_may_not_run_with_others_nor_twice_at_once(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(limits=LIMITS), Scripted, nodes=3)
    lost_together(rig, 2)
    rig.at(6, RequestArrived(2, 0))
    rig.forbids(lambda p: p.send(1, 0, 512), "task 0 must run alone")
    rig.forbids(lambda p: p.send(1, 512, 0), "task 0 must run alone")
    rig.forbids(lambda p: p.send(1, 256), "task 256 is not ready")
    rig.order(6, lambda p: p.send(1, 0))
    rig.forbids(lambda p: p.send(2, 0), "task 0 is in quarantine and in flight already")


def test_only_what_may_be_repeated_is_a_suspect(make_rig: type[Rig]) -> None:
    """Not a function that is not idempotent, nor a task without attempts left or time."""
    once = make_rig(make_app(make_function(is_idempotent=False)), Scripted, nodes=1)
    assert lost_together(once, 2)[-2:] == wires(
        Settle(0, Settlement(Outcome.FAILED, "f0: lost")),
        Settle(1, Settlement(Outcome.FAILED, "f0: lost")),
    )
    spent = make_rig(make_app(limits=Limits(attempts_max=1)), Scripted, nodes=1)
    assert lost_together(spent, 2)[-2:] == wires(
        Settle(0, Settlement(Outcome.FAILED, "f0: lost")),
        Settle(1, Settlement(Outcome.FAILED, "f0: lost")),
    )
    late = make_rig(make_app(slo=Slo(latency_ns=5)), Scripted, nodes=1)
    assert lost_together(late, 2)[-2:] == wires(
        Settle(0, Settlement(Outcome.FAILED, "f0: lost")),
        Settle(1, Settlement(Outcome.FAILED, "f0: lost")),
    )


def test_what_did_not_run_there_is_not_suspected(make_rig: type[Rig]) -> None:
    """Its instance was yet to start: it is tried again as before, and not alone."""
    rig = make_rig(make_app(limits=LIMITS), Scripted, nodes=2)
    rig.at(0, RequestArrived(0, 0))
    rig.order(0, lambda p: p.send(0, 0))
    rig.at(5, BatchLost(0))
    assert rig.scripted.hooks_called[-3] == ("returned", 0)
    assert not rig.scripted.task(0).must_run_alone


def test_where_only_the_answer_is_missing_nobody_is_suspected(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(limits=LIMITS), Scripted, nodes=2)
    rig.at(0, RequestArrived(0, 0))
    rig.order(0, lambda p: p.send(0, 0))
    rig.at(1, InstanceStarted(0, 0))
    rig.at(5, BatchLost(0, node_died=False))
    assert states(rig) == [TaskState.READY]
    assert not rig.scripted.task(0).must_run_alone


def test_a_call_to_a_platform_kills_no_worker_of_ours(make_rig: type[Rig]) -> None:
    app = make_app(make_function(pool_ids=(1,)), pools=[Pool(0, "gpu"), CLOUD], limits=LIMITS)
    rig = make_rig(app, Scripted)
    rig.at(0, RequestArrived(0, 0))
    rig.order(0, lambda p: p.orders.dispatch_to_pool([p.task(0)], CLOUD))
    rig.at(5, BatchLost(0))
    assert states(rig) == [TaskState.READY]


def test_batches_that_shared_the_node_suspect_each_other_in_any_order(make_rig: type[Rig]) -> None:
    """Two batches of one task each: neither was alone, whichever is reported first."""
    pools = [Pool(0, "gpu", slots=2)]
    app = make_app(make_function(concurrency=2), pools=pools, limits=LIMITS)
    rig = make_rig(app, Scripted, nodes=2)
    rig.at(0, RequestArrived(0, 0))
    rig.at(0, RequestArrived(1, 0))
    rig.order(0, lambda p: (p.send(0, 0), p.send(0, 256)))
    rig.at(1, InstanceStarted(0, 0))
    rig.at(5, BatchLost(1))
    rig.at(5, BatchLost(0))
    rig.at(5, NodeLost(0))
    assert states(rig) == [TaskState.HELD, TaskState.READY]


def test_a_suspect_that_is_refused_or_fails_stays_the_one(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(limits=LIMITS), Scripted, nodes=2)
    lost_together(rig, 2)
    rig.order(6, lambda p: p.send(1, 0))
    rig.at(7, BatchRefused(1, Refusal.BUSY))
    rig.order(8, lambda p: p.send(1, 0))
    rig.at(9, BatchFailed(2, "broke"))
    assert states(rig) == [TaskState.READY, TaskState.HELD]
    assert rig.scripted.hooks_called[-3] == ("returned", 0)


def test_those_held_back_can_be_cancelled(make_rig: type[Rig]) -> None:
    """The policy does not have them, so no hook is called."""
    rig = make_rig(make_app(limits=LIMITS), Scripted, nodes=2)
    lost_together(rig, 3)
    rig.scripted.hooks_called.clear()
    reason = "cancelled by the client"
    assert rig.at(6, RequestCancelled(1)) == wires(Settle(1, Settlement(Outcome.CANCELLED, reason)))
    assert rig.scripted.hooks_called == []
    rig.at(7, RequestCancelled(0))
    assert rig.scripted.hooks_called == [("withdrawn", 0), ("returned", 512)]


def test_a_suspect_nobody_wants_any_more_is_out_until_its_batch_has_ended(
    make_rig: type[Rig],
) -> None:
    rig = make_rig(make_app(limits=LIMITS), Scripted, nodes=2)
    lost_together(rig, 2)
    rig.order(6, lambda p: p.send(1, 0))
    rig.at(7, InstanceStarted(1, 1))
    assert rig.at(8, RequestCancelled(0))[1:] == wires(CancelBatch(1, 0, 1))
    assert states(rig) == [TaskState.HELD]
    rig.at(9, BatchLost(1))
    assert states(rig) == [TaskState.READY]


def test_deadlines_hold_for_those_held_back(make_rig: type[Rig]) -> None:
    """One gives up at its deadline; one that does not fails when it would be its turn."""
    rig = make_rig(make_app(slo=Slo(latency_ns=100), limits=LIMITS), Scripted, nodes=2)
    for request_id in range(3):
        rig.at(0, RequestArrived(request_id, 0, is_hard=request_id == 1))
    rig.order(0, lambda p: p.send(0, 0, 256, 512))
    rig.at(1, InstanceStarted(0, 0))
    rig.at(5, BatchLost(0))
    assert rig.at(100, TimerFired(("deadline", 1))) == wires(
        Settle(1, Settlement(Outcome.EXPIRED, "deadline_exceeded"))
    )
    rig.order(100, lambda p: p.send(1, 0))
    assert rig.at(110, BatchFinished(1)) == wires(
        Settle(0, Settlement(Outcome.LATE)), Settle(2, Settlement(Outcome.FAILED, "f0: lost"))
    )


def test_functions_do_not_wait_for_each_others_suspects(make_rig: type[Rig]) -> None:
    pools = [Pool(0, "gpu", slots=2)]
    app = make_app(make_function(0), make_function(1), pools=pools, limits=LIMITS)
    rig = make_rig(app, Scripted, nodes=1)
    for request_id in range(4):
        rig.at(0, RequestArrived(request_id, request_id % 2))
    rig.order(0, lambda p: (p.send(0, 0, 512), p.send(0, 256, 768)))
    rig.at(1, InstanceStarted(0, 0))
    rig.at(1, InstanceStarted(1, 0))
    rig.at(5, BatchLost(0))
    rig.at(5, BatchLost(1))
    assert states(rig) == [TaskState.READY, TaskState.READY, TaskState.HELD, TaskState.HELD]


def test_a_copy_that_is_out_elsewhere_is_the_last_chance(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(limits=LIMITS), Scripted, nodes=2)
    rig.at(0, RequestArrived(0, 0))
    rig.order(0, lambda p: (p.send(0, 0), p.send(1, 0)))
    rig.at(1, InstanceStarted(0, 0))
    assert rig.at(5, BatchLost(0)) == wires(SetTimer(("unblock", 0), 6))
    rig.forbids(lambda p: p.send(0, 0), "no attempts left")
    assert rig.at(7, BatchRefused(1, Refusal.BUSY))[-1:] == wires(
        Settle(0, Settlement(Outcome.FAILED, "refused too often, last reason: busy"))
    )


def test_innocents_in_batches_are_unaffected_by_a_suspect(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(limits=LIMITS), Scripted, nodes=2)
    lost_together(rig, 2)
    rig.at(6, RequestArrived(2, 0))
    rig.at(6, RequestArrived(3, 0))
    assert rig.order(6, lambda p: p.send(1, 512, 768))[-1:] == wires(
        Dispatch(1, 0, [512, 768], 2, 0, 1, 1)
    )
