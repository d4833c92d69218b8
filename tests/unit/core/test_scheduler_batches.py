"""Attempts: refused, failed or lost, retried or not, competing, reported twice or never."""

from __future__ import annotations

import pytest

from headgate.core.actions import (
    CancelBatch,
    CancelTimer,
    Dispatch,
    SetTimer,
    Settle,
    StartInstance,
)
from headgate.core.events import (
    BatchFailed,
    BatchFinished,
    BatchLost,
    BatchRefused,
    Event,
    InstanceStarted,
    Refusal,
    RequestArrived,
    RequestCancelled,
    TimerFired,
)
from headgate.core.model import Limits, Pool, Shape, Slo, Stage
from headgate.core.policy import Context, PolicyConfig
from headgate.core.records import STAGES_MAX, Batch
from headgate.core.states import BatchState, Outcome, Settlement

from .rig import Rig, wires
from .sample_apps import CLOUD, Fifo, Scripted, make_app, make_function

BACKOFF = Limits(backoff_ns=50)


def test_a_refused_task_is_tried_elsewhere_and_the_place_left_alone(make_rig: type[Rig]) -> None:
    """1. Node 0 refuses: the task goes to node 1 at once, node 0 is blocked for the back-off.
    2. While it is blocked, the next request waits.
    3. The timer gives node 0 back, and the request that waited takes it.
    """
    rig = make_rig(make_app(limits=BACKOFF), nodes=2)
    rig.at(0, RequestArrived(0, 0))
    rig.at(0, InstanceStarted(0, 0))
    assert rig.at(1, BatchRefused(0, Refusal.BUSY)) == wires(
        SetTimer(("unblock", 0), 51), StartInstance(1, 0, 0, 1), Dispatch(1, 0, [0], 1, 0, 1, 1)
    )
    assert rig.at(2, RequestArrived(1, 0)) == []
    assert rig.at(51, TimerFired(("unblock", 0))) == wires(Dispatch(2, 0, [256], 1, 0, 0, 0))


def test_a_second_refusal_moves_the_end_of_the_back_off(make_rig: type[Rig]) -> None:
    """A timer event is ignored if the timer was reset while the event was on its way."""
    rig = make_rig(make_app(make_function(concurrency=2), limits=BACKOFF), Scripted, nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.at(0, RequestArrived(1, 0))
    rig.order(0, lambda p: (p.send(0, 0), p.send(0, 256)))
    rig.at(0, InstanceStarted(0, 0))
    rig.at(1, BatchRefused(0, Refusal.BUSY))
    assert rig.at(9, BatchRefused(1, Refusal.BUSY)) == wires(SetTimer(("unblock", 0), 59))
    assert rig.at(51, TimerFired(("unblock", 0))) == []
    assert (rig.view.events_ignored, list(rig.view.free_nodes)) == (1, [])
    rig.at(59, TimerFired(("unblock", 0)))
    assert list(rig.view.free_nodes) == [0]


def test_a_cancelled_batch_causes_no_back_off(
    make_rig: type[Rig],
) -> None:
    rig = make_rig(make_app(limits=BACKOFF), Scripted, nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.order(0, lambda p: p.send(0, 0))
    rig.at(2, InstanceStarted(0, 0))
    assert rig.at(2, BatchRefused(0, Refusal.CANCELLED)) == []
    assert list(rig.view.free_nodes) == [0]
    assert ("returned", 0) in rig.scripted.hooks_called


def test_a_pool_that_throttles_is_left_alone_until_its_timer(make_rig: type[Rig]) -> None:
    app = make_app(make_function(pool_ids=(1,)), pools=[Pool(0, "gpu"), CLOUD], limits=BACKOFF)
    rig = make_rig(app, Scripted)
    rig.at(0, RequestArrived(0, 0))
    assert rig.order(0, lambda p: p.orders.dispatch_to_pool([p.task(0)], CLOUD)) == wires(
        Dispatch(0, 0, [0], 1, 1, None, None)
    )
    assert rig.at(1, BatchRefused(0, Refusal.THROTTLED)) == wires(SetTimer(("unblock_pool", 1), 51))
    assert not rig.view.is_pool_available(1)
    rig.at(51, TimerFired(("unblock_pool", 1)))
    assert rig.view.is_pool_available(1)
    assert rig.scripted.hooks_called[-2:] == [("ended", 0), ("pool available", 1)]


def test_refusals_are_no_attempts_but_they_are_bounded(make_rig: type[Rig]) -> None:
    """Refused is not run: even a task that may not be repeated is tried again, within bounds."""
    limits = Limits(attempts_max=1, refusals_max=2, backoff_ns=0)
    rig = make_rig(make_app(make_function(is_idempotent=False), limits=limits), nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.at(0, InstanceStarted(0, 0))
    assert rig.at(1, BatchRefused(0, Refusal.BUSY)) == wires(SetTimer(("unblock", 0), 1))
    assert rig.at(1, TimerFired(("unblock", 0))) == wires(Dispatch(1, 0, [0], 1, 0, 0, 0))
    assert rig.at(2, BatchRefused(1, Refusal.GONE)) == wires(
        SetTimer(("unblock", 0), 2),
        Settle(0, Settlement(Outcome.FAILED, "refused too often, last reason: gone")),
    )


def test_a_failed_task_is_repeated_until_its_attempts_are_used_up(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(limits=Limits(attempts_max=2)), nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.at(0, InstanceStarted(0, 0))
    assert rig.at(1, BatchFailed(0, "crash")) == wires(Dispatch(1, 0, [0], 1, 0, 0, 0))
    assert rig.at(2, BatchFailed(1, "crash")) == wires(
        Settle(0, Settlement(Outcome.FAILED, "f0: crash"))
    )


def test_a_lost_task_is_repeated_where_nothing_was_lost(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(limits=BACKOFF), nodes=2)
    rig.at(0, RequestArrived(0, 0))
    rig.at(0, InstanceStarted(0, 0))
    assert rig.at(1, BatchLost(0, node_died=False)) == wires(
        SetTimer(("unblock", 0), 51), StartInstance(1, 0, 0, 1), Dispatch(1, 0, [0], 1, 0, 1, 1)
    )


@pytest.mark.parametrize(
    ("event", "reason"), [(BatchFailed(0, "crash"), "f0: crash"), (BatchLost(0), "f0: lost")]
)
def test_what_may_have_run_is_not_repeated_unless_it_is_idempotent(
    make_rig: type[Rig], event: Event, reason: str
) -> None:
    rig = make_rig(make_app(make_function(is_idempotent=False), limits=BACKOFF), nodes=1)
    rig.at(0, RequestArrived(0, 0))
    assert rig.at(1, event)[-1:] == wires(Settle(0, Settlement(Outcome.FAILED, reason)))


def test_the_stage_that_failed_is_named_once(make_rig: type[Rig]) -> None:
    """Two stages side by side: the first to fail settles the request, the other is thrown away."""
    first, second = make_function(0), make_function(1)
    stages = [Stage(first, name="left"), Stage(second, name="right")]
    rig = make_rig(make_app(first, second, stages=stages), nodes=2)
    rig.at(0, RequestArrived(0, 0))
    rig.at(0, InstanceStarted(0, 0))
    rig.at(0, InstanceStarted(1, 1))
    assert rig.at(1, BatchFinished(1, failed_tasks=(1,)))[:2] == wires(
        Settle(0, Settlement(Outcome.FAILED, "f1: it raised an error", stage="right")),
        CancelBatch(0, 0, 0),
    )
    settled = [wire for wire in rig.at(2, BatchFinished(0, failed_tasks=(0,))) if "Settle" in wire]
    assert not settled


class RecordsStates(Fifo):
    """Remembers in what state batches end."""

    def __init__(self, context: Context, config: PolicyConfig) -> None:
        super().__init__(context, config)
        self.ended: list[int] = []

    def on_batch_ended(self, batch: Batch, took_ns: int) -> None:
        self.ended.append(batch.state)


def test_a_batch_of_which_a_task_failed_has_not_finished(make_rig: type[Rig]) -> None:
    """Policies learn from the times of those that did; one that failed may have ended at once."""
    rig = make_rig(make_app(), RecordsStates, nodes=1)
    policy = rig.scheduler.policy
    assert isinstance(policy, RecordsStates)
    for batch_id, failed in enumerate([(), (STAGES_MAX,)]):
        rig.at(batch_id, RequestArrived(batch_id, 0))
        if batch_id == 0:
            rig.at(batch_id, InstanceStarted(0, 0))
        rig.at(batch_id, BatchFinished(batch_id, failed_tasks=failed))
    assert policy.ended == [BatchState.FINISHED, BatchState.FAILED]


def test_nothing_is_repeated_after_its_deadline(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(slo=Slo(latency_ns=100)), nodes=2)
    rig.at(0, RequestArrived(0, 0))
    rig.at(0, RequestArrived(1, 0))
    rig.at(0, InstanceStarted(0, 0))
    assert rig.at(99, BatchFailed(0, "crash")) == wires(Dispatch(2, 0, [0], 1, 0, 0, 0))
    assert rig.at(100, BatchFailed(1, "crash")) == wires(
        Settle(1, Settlement(Outcome.FAILED, "f0: crash"))
    )


def test_in_a_broken_batch_each_task_is_judged_by_itself(make_rig: type[Rig]) -> None:
    """One of the two has its deadline behind it and fails; the other is returned."""
    rig = make_rig(make_app(), Scripted, nodes=1)
    rig.at(0, RequestArrived(0, 0, deadline_ns=5))
    rig.at(0, RequestArrived(1, 0))
    rig.order(0, lambda p: p.send(0, 0, 256))
    rig.scripted.hooks_called.clear()
    assert rig.at(9, BatchFailed(0, "crash")) == wires(
        Settle(0, Settlement(Outcome.FAILED, "f0: crash"))
    )
    assert rig.scripted.hooks_called == [("returned", 256), ("ended", 0), ("capacity", 0)]


@pytest.mark.parametrize(
    "again",
    [BatchFinished(0), BatchFailed(0, "x"), BatchRefused(0, Refusal.BUSY), BatchLost(0)],
    ids=lambda event: type(event).__name__,
)
def test_a_batch_that_has_ended_ends_once(make_rig: type[Rig], again: Event) -> None:
    rig = make_rig(make_app(), nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.at(10, BatchFinished(0))
    assert rig.at(11, again) == []
    assert (rig.view.events_ignored, rig.view.now_ns) == (1, 11)


def test_of_competing_copies_the_first_wins_and_the_other_is_cancelled(
    make_rig: type[Rig],
) -> None:
    rig = make_rig(make_app(), Scripted, nodes=2)
    rig.at(0, RequestArrived(0, 0))
    rig.order(0, lambda p: (p.send(0, 0), p.send(1, 0)))
    assert rig.at(10, BatchFinished(1)) == wires(
        CancelBatch(0, 0, 0), Settle(0, Settlement(Outcome.MET))
    )
    assert rig.at(12, BatchFinished(0)) == []
    assert rig.view.events_ignored == 0


def test_the_first_copy_sent_may_win_as_well(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(), Scripted, nodes=2)
    rig.at(0, RequestArrived(0, 0))
    rig.order(0, lambda p: (p.send(0, 0), p.send(1, 0)))
    assert rig.at(10, BatchFinished(0)) == wires(
        CancelBatch(1, 0, 1), Settle(0, Settlement(Outcome.MET))
    )


def test_a_losing_copy_in_a_batch_that_others_want_goes_on(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(), Scripted, nodes=2)
    rig.at(0, RequestArrived(0, 0))
    rig.at(0, RequestArrived(1, 0))
    rig.order(0, lambda p: (p.send(0, 0, 256), p.send(1, 0)))
    assert rig.at(10, BatchFinished(1)) == wires(Settle(0, Settlement(Outcome.MET)))
    assert rig.at(12, BatchFinished(0)) == wires(Settle(1, Settlement(Outcome.MET)))


def test_while_one_copy_is_out_the_end_of_another_settles_nothing(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(limits=Limits(attempts_max=2)), Scripted, nodes=2)
    rig.at(0, RequestArrived(0, 0))
    rig.order(0, lambda p: (p.send(0, 0), p.send(1, 0)))
    assert rig.at(9, BatchFailed(0, "crash")) == []
    assert rig.at(10, BatchFailed(1, "crash")) == wires(
        Settle(0, Settlement(Outcome.FAILED, "f0: crash"))
    )


def test_all_copies_of_a_cancelled_request_are_cancelled(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(), Scripted, nodes=2)
    rig.at(0, RequestArrived(0, 0))
    rig.order(0, lambda p: (p.send(0, 0), p.send(1, 0)))
    assert rig.at(1, RequestCancelled(0))[1:] == wires(CancelBatch(0, 0, 0), CancelBatch(1, 0, 1))


def test_an_attempt_without_a_result_times_out(make_rig: type[Rig]) -> None:
    """The answer comes after all: it is ignored, and the repeat goes on."""
    limits = Limits(timeout_factor=2.0, timeout_floor_ns=0, backoff_ns=50)
    app = make_app(make_function(start_ns=90), limits=limits)
    rig = make_rig(app, nodes=2)
    assert rig.at(0, RequestArrived(0, 0))[-1:] == wires(SetTimer(("lost", 0), 200))
    rig.at(100, InstanceStarted(0, 0))
    assert rig.at(200, TimerFired(("lost", 0))) == wires(
        SetTimer(("unblock", 0), 250),
        StartInstance(1, 0, 0, 1),
        Dispatch(1, 0, [0], 1, 0, 1, 1),
        SetTimer(("lost", 1), 400),
    )
    assert rig.at(201, BatchFinished(0)) == []
    assert rig.view.events_ignored == 1
    assert rig.at(300, BatchFinished(1)) == wires(
        CancelTimer(("lost", 1)), Settle(0, Settlement(Outcome.MET))
    )


def test_a_batch_times_out_after_a_multiple_of_its_time_on_a_full_node(
    make_rig: type[Rig],
) -> None:
    """Both slots are taken to be in use: 15 ns are expected, and twice that are granted."""
    function = make_function(exec_ns=(10,), slowdown=(1.0, 1.5))
    pools = [Pool(0, "gpu", slots=2)]
    limits = Limits(timeout_factor=2.0, timeout_floor_ns=0)
    rig = make_rig(make_app(function, pools=pools, limits=limits), Scripted, nodes=1)
    rig.at(0, RequestArrived(0, 0))
    assert rig.order(5, lambda p: p.send(0, 0))[-1:] == wires(SetTimer(("lost", 0), 35))


def test_compute_is_held_while_a_batch_is_out(make_rig: type[Rig]) -> None:
    """Two batches of four sevenths do not fit one node, however many slots it has."""
    function = make_function(shape=Shape(cpu_milli=500, gpu_sevenths=4), concurrency=2)
    wide = Pool(0, "gpu", slots=4, gpu_sevenths=7, cpu_milli=1_000)
    rig = make_rig(make_app(function, pools=[wide]), nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.at(0, InstanceStarted(0, 0))
    assert rig.at(1, RequestArrived(1, 0)) == []
    node = rig.view.nodes[0]
    assert (node.gpu_sevenths_used, node.cpu_milli_used) == (4, 500)
    assert rig.at(10, BatchFinished(0)) == wires(
        Settle(0, Settlement(Outcome.MET)), Dispatch(1, 0, [256], 1, 0, 0, 0)
    )
