"""Requests arrive, wait, run, and end in exactly one outcome."""

from __future__ import annotations

from headgate.core.actions import (
    CancelBatch,
    CancelTimer,
    Dispatch,
    ReportWouldReject,
    SetTimer,
    Settle,
    StartInstance,
)
from headgate.core.events import (
    BatchFailed,
    BatchFinished,
    BatchRefused,
    InstanceStarted,
    NodeJoined,
    Refusal,
    RequestArrived,
    RequestCancelled,
    TimerFired,
)
from headgate.core.model import OBSERVE, Limits, Slo
from headgate.core.records import Request
from headgate.core.states import Outcome, Settlement

from .rig import Rig, wires
from .sample_apps import Scripted, make_app, make_function

HARD_SLO = Slo(latency_ns=100, is_hard=True)


def test_a_request_is_run_on_the_free_node_and_met(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(), nodes=1)
    assert rig.at(5, RequestArrived(0, 0)) == wires(
        StartInstance(0, 0, 0, 0), Dispatch(0, 0, [0], 1, 0, 0, 0)
    )
    assert rig.at(6, InstanceStarted(0, 0)) == []
    assert rig.at(16, BatchFinished(0)) == wires(Settle(0, Settlement(Outcome.MET)))


def test_an_answer_at_the_deadline_is_met_and_one_after_it_is_late(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(), nodes=2)
    rig.at(0, RequestArrived(0, 0))
    rig.at(0, RequestArrived(1, 0))
    assert rig.at(1_000, BatchFinished(0)) == wires(Settle(0, Settlement(Outcome.MET)))
    assert rig.at(1_001, BatchFinished(1)) == wires(Settle(1, Settlement(Outcome.LATE)))


def test_a_deadline_of_its_own_overrides_the_objective(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(), nodes=1)
    rig.at(0, RequestArrived(0, 0, deadline_ns=20))
    assert rig.at(21, BatchFinished(0)) == wires(Settle(0, Settlement(Outcome.LATE)))


def test_requests_wait_in_line_for_the_one_node(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(), nodes=1)
    rig.at(0, RequestArrived(0, 0))
    assert rig.at(1, RequestArrived(1, 0)) == []
    assert rig.at(2, RequestArrived(2, 0)) == []
    rig.at(3, InstanceStarted(0, 0))
    assert rig.at(13, BatchFinished(0)) == wires(
        Settle(0, Settlement(Outcome.MET)), Dispatch(1, 0, [256], 1, 0, 0, 0)
    )
    assert rig.at(23, BatchFinished(1)) == wires(
        Settle(1, Settlement(Outcome.MET)), Dispatch(2, 0, [512], 1, 0, 0, 0)
    )


def test_a_request_that_finds_no_node_runs_when_one_joins(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app())
    assert rig.at(0, RequestArrived(0, 0)) == []
    assert rig.at(9, NodeJoined(0, 0, "n0")) == wires(
        StartInstance(0, 0, 0, 0), Dispatch(0, 0, [0], 1, 0, 0, 0)
    )


def test_a_request_rejected_at_the_door_never_becomes_ready(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(slo=HARD_SLO), Scripted, nodes=1)
    rig.scripted.at_door = lambda request: rig.scripted.orders.reject(
        request, Settlement(Outcome.REJECTED, "full")
    )
    rig.scripted.hooks_called.clear()
    assert rig.at(0, RequestArrived(0, 0)) == wires(Settle(0, Settlement(Outcome.REJECTED, "full")))
    assert rig.scripted.hooks_called == []
    assert rig.view.arrivals == [1]


def test_a_rejection_that_is_only_observed_is_reported_once_and_the_request_runs(
    make_rig: type[Rig],
) -> None:
    """The order says that nothing was rejected; the core's own limits hold all the same."""
    limits = Limits(admission=OBSERVE, open_requests_max=1)
    rig = make_rig(make_app(slo=HARD_SLO, limits=limits), Scripted, nodes=1)
    was_rejected: list[bool] = []

    def reject_twice(request: Request) -> None:
        for reason in ("full", "full again"):
            settlement = Settlement(Outcome.REJECTED, reason)
            was_rejected.append(rig.scripted.orders.reject(request, settlement))

    rig.scripted.at_door = reject_twice
    rig.scripted.hooks_called.clear()
    actions = rig.at(0, RequestArrived(0, 0))
    assert actions[0] == wires(ReportWouldReject(0, "full"))[0]
    assert [action[0] for action in actions] == ["ReportWouldReject", "SetTimer"]
    assert was_rejected == [False, False]
    assert rig.scripted.hooks_called == [("ready", 0)]
    assert rig.at(1, RequestArrived(1, 0)) == wires(
        Settle(1, Settlement(Outcome.REJECTED, "too_many_open"))
    )


def test_more_open_requests_than_the_limit_are_rejected_by_the_core(
    make_rig: type[Rig],
) -> None:
    rig = make_rig(make_app(limits=Limits(open_requests_max=1)), Scripted)
    rig.at(0, RequestArrived(0, 0))
    assert rig.at(1, RequestArrived(1, 0)) == wires(
        Settle(1, Settlement(Outcome.REJECTED, "too_many_open"))
    )
    assert rig.scripted.hooks_called == [("ready", 0)]
    rig.at(2, RequestCancelled(0))
    assert rig.at(3, RequestArrived(2, 0)) == []


def test_the_policy_may_expire_a_request_that_waits(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(), Scripted)
    rig.at(0, RequestArrived(0, 0))
    assert rig.order(5, lambda p: p.orders.expire(p.view.requests[0], "hopeless")) == wires(
        Settle(0, Settlement(Outcome.EXPIRED, "hopeless"))
    )


def test_a_request_still_waiting_at_its_deadline_expires(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(slo=HARD_SLO), Scripted)
    assert rig.at(0, RequestArrived(0, 0)) == wires(SetTimer(("deadline", 0), 100))
    assert rig.at(100, TimerFired(("deadline", 0))) == wires(
        Settle(0, Settlement(Outcome.EXPIRED, "deadline_exceeded"))
    )
    assert rig.scripted.hooks_called == [("ready", 0), ("withdrawn", 0)]


def test_a_request_that_is_running_at_its_deadline_may_yet_be_late(make_rig: type[Rig]) -> None:
    """Its client got 504, with the same reason."""
    rig = make_rig(make_app(slo=HARD_SLO), nodes=1)
    rig.at(0, RequestArrived(0, 0))
    assert rig.at(100, TimerFired(("deadline", 0))) == []
    assert rig.at(101, BatchFinished(0)) == wires(
        Settle(0, Settlement(Outcome.LATE, "deadline_exceeded"))
    )


def test_an_answer_in_time_calls_the_deadline_off(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(slo=HARD_SLO), nodes=1)
    rig.at(0, RequestArrived(0, 0))
    assert rig.at(10, BatchFinished(0)) == wires(
        Settle(0, Settlement(Outcome.MET)), CancelTimer(("deadline", 0))
    )


def test_cancelled_while_queued(make_rig: type[Rig]) -> None:
    """The task is withdrawn, and the policy does not send it when a node comes free."""
    rig = make_rig(make_app(), nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.at(0, RequestArrived(1, 0))
    assert rig.at(1, RequestCancelled(1)) == wires(
        Settle(1, Settlement(Outcome.CANCELLED, "cancelled by the client"))
    )
    rig.at(2, InstanceStarted(0, 0))
    assert rig.at(10, BatchFinished(0)) == wires(Settle(0, Settlement(Outcome.MET)))


def test_cancelled_while_running(make_rig: type[Rig]) -> None:
    """Work in flight cannot be un-started: the slot is taken until the batch has ended."""
    rig = make_rig(make_app(), nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.at(1, InstanceStarted(0, 0))
    assert rig.at(2, RequestCancelled(0)) == wires(
        Settle(0, Settlement(Outcome.CANCELLED, "cancelled by the client")), CancelBatch(0, 0, 0)
    )
    assert rig.at(3, RequestArrived(1, 0)) == []
    assert rig.at(10, BatchFinished(0)) == wires(Dispatch(1, 0, [256], 1, 0, 0, 0))


def test_a_batch_cancelled_before_it_began_is_refused_and_blocks_nothing(
    make_rig: type[Rig],
) -> None:
    rig = make_rig(make_app(), nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.at(0, InstanceStarted(0, 0))
    rig.at(1, RequestCancelled(0))
    rig.at(1, RequestArrived(1, 0))
    assert rig.at(2, BatchRefused(0, Refusal.CANCELLED)) == wires(Dispatch(1, 0, [256], 1, 0, 0, 0))


def test_cancelled_in_a_shared_batch(make_rig: type[Rig]) -> None:
    """The batch is called back only when the last of its requests is cancelled."""
    rig = make_rig(make_app(), Scripted, nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.at(0, RequestArrived(1, 0))
    rig.order(0, lambda p: p.send(0, 0, 256))
    cancelled = "cancelled by the client"
    assert rig.at(1, RequestCancelled(0)) == wires(
        Settle(0, Settlement(Outcome.CANCELLED, cancelled))
    )
    assert rig.at(2, RequestCancelled(1)) == wires(
        Settle(1, Settlement(Outcome.CANCELLED, cancelled)), CancelBatch(0, 0, 0)
    )
    assert rig.at(9, BatchFinished(0)) == []


def test_in_a_shared_batch_the_cancelled_ones_are_thrown_away(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(), Scripted, nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.at(0, RequestArrived(1, 0))
    rig.order(0, lambda p: p.send(0, 0, 256))
    rig.at(1, RequestCancelled(0))
    assert rig.at(9, BatchFinished(0)) == wires(Settle(1, Settlement(Outcome.MET)))


def test_a_cancelled_request_is_not_retried_when_its_batch_breaks(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(), nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.at(1, RequestCancelled(0))
    assert rig.at(9, BatchFailed(0, "crash")) == []


def test_a_cancellation_that_crosses_the_answer_is_ignored_and_counted(
    make_rig: type[Rig],
) -> None:
    rig = make_rig(make_app(), nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.at(10, BatchFinished(0))
    assert rig.at(10, RequestCancelled(0)) == []
    assert rig.view.events_ignored == 1


def test_items_of_a_request_are_the_items_of_its_batch(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(make_function(exec_ns=(1, 2, 3))), nodes=1)
    assert rig.at(0, RequestArrived(0, 0, items=3))[-1:] == wires(Dispatch(0, 0, [0], 3, 0, 0, 0))
