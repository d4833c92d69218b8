"""Variants that cannot be started: back-off, probes, and requests that would wait in vain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headgate.core.actions import CancelTimer, Dispatch, SetTimer, Settle, StartInstance
from headgate.core.events import (
    BatchFinished,
    BatchLost,
    BatchRefused,
    InstanceStarted,
    InstanceStopped,
    LoadFailed,
    NodeJoined,
    NodeLost,
    Refusal,
    RequestArrived,
    TimerFired,
)
from headgate.core.model import App, Function, Limits, Pool, Stage, Variant
from headgate.core.policy import Plan, Target
from headgate.core.states import Failure, Outcome, Rejection, Settlement

from .rig import Rig, wires
from .sample_apps import CLOUD, Fifo, Scripted, make_app, make_function

LIMITS = Limits(backoff_ns=1, start_backoff_ns=100, start_backoff_max_ns=350)
PROBE = TimerFired(("probe", 0))


def broken_rig(make_rig: type[Rig]) -> Rig:
    """One request has come, and the instance that was started for it could not be."""
    rig = make_rig(make_app(limits=LIMITS), nodes=1)
    assert rig.at(0, RequestArrived(0, 0)) == wires(
        StartInstance(0, 0, 0, 0), Dispatch(0, 0, [0], 1, 0, 0, 0)
    )
    assert rig.at(10, BatchRefused(0, Refusal.GONE))[:1] == wires(SetTimer(("unblock", 0), 11))
    return rig


def test_a_start_that_fails_is_not_ordered_again_and_fails_who_waits_for_it(
    make_rig: type[Rig],
) -> None:
    rig = broken_rig(make_rig)
    assert rig.at(10, InstanceStopped(0, "no such file")) == wires(
        SetTimer(("probe", 0), 110),
        Settle(0, Settlement(Outcome.FAILED, Rejection.LOAD_FAILED, 0, 100)),
    )
    failure = rig.view.load_failures[0]
    assert (failure.reason, failure.failures, failure.retry_at_ns) == ("no such file", 1, 110)
    assert rig.at(11, TimerFired(("unblock", 0))) == []


def test_the_batch_may_end_after_its_instance_is_gone(
    make_rig: type[Rig],
) -> None:
    rig = make_rig(make_app(limits=LIMITS), nodes=2)
    rig.at(0, RequestArrived(0, 0))
    assert rig.at(10, InstanceStopped(0, "broken")) == wires(SetTimer(("probe", 0), 110))
    assert rig.at(10, BatchRefused(0, Refusal.GONE)) == wires(
        SetTimer(("unblock", 0), 11),
        Settle(0, Settlement(Outcome.FAILED, Rejection.LOAD_FAILED, 0, 100)),
    )


def test_new_requests_are_rejected_at_once_with_a_retry_delay(make_rig: type[Rig]) -> None:
    rig = broken_rig(make_rig)
    rig.at(10, InstanceStopped(0, "broken"))
    assert rig.at(30, RequestArrived(1, 0)) == wires(
        Settle(1, Settlement(Outcome.REJECTED, Rejection.LOAD_FAILED, 0, 80))
    )


def test_one_probe_per_back_off_which_doubles_up_to_its_bound(make_rig: type[Rig]) -> None:
    """It fails at 10, 110, 310, 660 and 1010: after 100, 200 and then always 350."""
    rig = broken_rig(make_rig)
    now_ns, waits_ns = 10, []
    rig.at(now_ns, InstanceStopped(0, "broken"))
    for instance_id in range(1, 5):
        retry_ns = rig.view.load_failures[0].retry_at_ns
        waits_ns.append(retry_ns - now_ns)
        now_ns = retry_ns
        assert rig.at(now_ns, PROBE) == wires(StartInstance(instance_id, 0, 0, 0))
        assert rig.at(now_ns, RequestArrived(instance_id, 0))[-1:] == wires(
            Settle(instance_id, Settlement(Outcome.REJECTED, Rejection.LOAD_FAILED, 0, 100))
        )
        rig.at(now_ns, InstanceStopped(instance_id, "broken"))
    assert waits_ns == [100, 200, 350, 350]
    assert rig.view.load_failures[0].failures == 5


def test_a_probe_that_goes_well_ends_it(make_rig: type[Rig]) -> None:
    rig = broken_rig(make_rig)
    rig.at(10, InstanceStopped(0, "broken"))
    rig.at(110, PROBE)
    assert rig.at(120, InstanceStarted(1, 0)) == []
    assert (rig.view.load_failures, rig.view.unloadable) == ({}, set())
    assert rig.at(130, RequestArrived(1, 0)) == wires(Dispatch(1, 0, [256], 1, 0, 0, 1))


def test_a_start_that_was_under_way_elsewhere_is_waited_for_and_may_end_it(
    make_rig: type[Rig],
) -> None:
    """Two starts are under way when the first fails: the task waits for the second."""
    rig = make_rig(make_app(limits=LIMITS), nodes=2)
    rig.at(0, RequestArrived(0, 0))
    rig.at(0, RequestArrived(1, 0))
    rig.at(10, InstanceStopped(0, "broken"))
    assert rig.at(10, BatchRefused(0, Refusal.GONE)) == wires(SetTimer(("unblock", 0), 11))
    assert rig.at(20, InstanceStarted(1, 1)) == wires(CancelTimer(("probe", 0)))
    assert rig.at(30, BatchFinished(1)) == wires(
        Settle(1, Settlement(Outcome.MET)), Dispatch(2, 0, [0], 1, 0, 1, 1)
    )


def test_if_that_fails_too_it_is_the_same_failure(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(limits=LIMITS), nodes=2)
    rig.at(0, RequestArrived(0, 0))
    rig.at(0, RequestArrived(1, 0))
    rig.at(10, InstanceStopped(0, "first"))
    assert rig.at(50, InstanceStopped(1, "second")) == []
    failure = rig.view.load_failures[0]
    assert (failure.reason, failure.failures, failure.retry_at_ns) == ("second", 1, 110)


def test_the_probe_goes_to_another_node_if_there_is_one(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(limits=LIMITS), nodes=2)
    rig.at(0, LoadFailed(0, 0, "broken"))
    for instance_id, node_id in enumerate((1, 0, 1)):
        retry_ns = rig.view.load_failures[0].retry_at_ns
        assert rig.at(retry_ns, PROBE) == wires(StartInstance(instance_id, 0, 0, node_id))
        rig.at(retry_ns, InstanceStopped(instance_id, "broken"))


def test_without_a_node_the_probe_waits_for_one(make_rig: type[Rig]) -> None:
    rig = broken_rig(make_rig)
    rig.at(10, InstanceStopped(0, "broken"))
    rig.at(20, NodeLost(0))
    assert rig.at(110, PROBE) == wires(SetTimer(("probe", 0), 210))
    rig.at(150, NodeJoined(0, 0, "n0"))
    assert rig.at(210, PROBE) == wires(StartInstance(1, 0, 0, 0))


def test_a_probe_evicts_others_only_where_there_is_no_room(make_rig: type[Rig]) -> None:
    """Node 0 is full, node 1 is not: though it failed on node 1 last, room comes after that."""
    big, other = make_function(0, memory_bytes=60), make_function(1, memory_bytes=60)
    pools = [Pool(0, "gpu", memory_bytes=100)]
    rig = make_rig(make_app(big, other, pools=pools, limits=LIMITS), Scripted, nodes=3)
    app = rig.view.app
    rig.order(0, lambda p: p.orders.start(app.variants[1], p.view.nodes[0]))
    rig.at(1, InstanceStarted(0, 0))
    rig.at(2, LoadFailed(0, 1, "broken"))
    assert rig.at(102, PROBE) == wires(StartInstance(1, 0, 0, 2))


def test_a_probe_whose_node_dies_under_it_has_failed(make_rig: type[Rig]) -> None:
    """Loading it may be what kills the node. Of another start that is not to be said."""
    rig = broken_rig(make_rig)
    rig.at(10, InstanceStopped(0, "broken"))
    rig.at(110, PROBE)
    assert rig.at(120, NodeLost(0)) == wires(SetTimer(("probe", 0), 320))
    rig.at(130, NodeJoined(0, 0, "n0"))
    rig.at(131, LoadFailed(0, 0, "it died of a signal"))
    failure = rig.view.load_failures[0]
    assert (failure.reason, failure.failures) == ("it died of a signal", 2)


def test_a_start_that_dies_with_its_node_is_no_failure_of_the_function(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(limits=LIMITS), Scripted, nodes=1)
    rig.order(0, lambda p: p.orders.start(p.view.app.variants[0], p.view.nodes[0]))
    rig.at(1, NodeLost(0))
    assert rig.view.load_failures == {}


def test_a_start_that_was_called_off_is_no_failure(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(limits=LIMITS), Scripted, nodes=1)
    rig.order(0, lambda p: p.orders.start(p.view.app.variants[0], p.view.nodes[0]))
    rig.order(1, lambda p: p.orders.stop(p.view.instances[0]))
    rig.at(2, InstanceStopped(0, "stopped"))
    assert rig.view.load_failures == {}


def test_a_probe_that_is_called_off_is_repeated_after_the_same_back_off(
    make_rig: type[Rig],
) -> None:
    rig = make_rig(make_app(limits=LIMITS), Scripted, nodes=1)
    rig.at(0, LoadFailed(0, 0, "broken"))
    rig.at(100, PROBE)
    actions = rig.order(110, lambda p: p.orders.stop(p.view.instances[0]))
    assert actions[-1:] == wires(SetTimer(("probe", 0), 210))
    assert rig.view.load_failures[0].failures == 1


def test_a_node_may_say_so_before_anybody_asks(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(limits=LIMITS), nodes=2)
    assert rig.at(5, LoadFailed(0, 0, "no module")) == wires(SetTimer(("probe", 0), 105))
    assert rig.at(5, LoadFailed(0, 1, "no module")) == []  # all say the same: one failure
    assert rig.view.load_failures[0].failures == 1
    assert rig.at(6, RequestArrived(0, 0)) == wires(
        Settle(0, Settlement(Outcome.REJECTED, Rejection.LOAD_FAILED, 0, 99))
    )


def test_what_is_up_elsewhere_goes_on_being_used(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(limits=LIMITS), nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.at(0, InstanceStarted(0, 0))
    rig.at(1, NodeJoined(1, 0, "n1"))
    rig.at(2, LoadFailed(0, 1, "out of memory"))
    assert rig.at(3, RequestArrived(1, 0)) == []  # not on node 1
    assert rig.at(10, BatchFinished(0)) == wires(
        Settle(0, Settlement(Outcome.MET)), Dispatch(1, 0, [256], 1, 0, 0, 0)
    )
    assert rig.at(102, PROBE) == wires(StartInstance(1, 0, 0, 1))


def test_if_that_is_lost_as_well_who_waits_fails(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(limits=LIMITS), nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.at(0, InstanceStarted(0, 0))
    rig.at(1, NodeJoined(1, 0, "n1"))
    rig.at(1, LoadFailed(0, 1, "out of memory"))
    rig.at(2, RequestArrived(1, 0))
    assert rig.at(5, NodeLost(0)) == wires(
        Settle(1, Settlement(Outcome.FAILED, Rejection.LOAD_FAILED, 0, 96))
    )
    assert rig.at(5, BatchLost(0)) == wires(
        Settle(0, Settlement(Outcome.FAILED, f"f0: {Failure.KILLED_WORKER}"))
    )


def test_it_is_over_when_it_is_up_wherever_it_can_be(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(limits=LIMITS), nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.at(0, InstanceStarted(0, 0))
    rig.at(1, NodeJoined(1, 0, "n1"))
    rig.at(2, LoadFailed(0, 1, "out of memory"))
    rig.at(3, NodeLost(1))
    assert rig.at(102, PROBE) == []
    assert rig.view.load_failures == {}


@pytest.mark.parametrize(
    ("event", "match"),
    [
        (LoadFailed(0, 7, "x"), "unknown node 7"),
        (LoadFailed(7, 0, "x"), "unknown variant 7"),
    ],
)
def test_what_cannot_be_said(make_rig: type[Rig], event: LoadFailed, match: str) -> None:
    make_rig(make_app(limits=LIMITS), nodes=1).rejects(1, event, match)


def test_what_crosses_a_loss_or_a_start_is_ignored(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(limits=LIMITS), nodes=2)
    rig.at(0, RequestArrived(0, 0))
    rig.at(0, InstanceStarted(0, 0))
    rig.at(1, LoadFailed(0, 0, "late"))
    rig.at(2, NodeLost(1))
    rig.at(3, LoadFailed(0, 1, "late"))
    assert (rig.view.load_failures, rig.view.events_ignored) == ({}, 2)


def test_no_order_may_start_it(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(make_function(0), make_function(1), limits=LIMITS), Scripted, nodes=2)
    rig.at(0, RequestArrived(0, 0))
    rig.order(0, lambda p: p.send(0, 0))
    rig.at(1, InstanceStarted(0, 0))
    rig.at(1, LoadFailed(0, 1, "broken"))
    rig.at(2, RequestArrived(1, 0))
    variant, match = rig.view.app.variants[0], "v0 failed to load"
    rig.forbids(lambda p: p.orders.start(variant, p.view.nodes[1]), match)
    rig.forbids(lambda p: p.orders.start_anywhere(variant, p.view.nodes[1].pool), match)
    rig.forbids(lambda p: p.send(1, 256), match)
    view = rig.view
    assert not view.can_take(view.nodes[1], 0)
    assert view.can_take(view.nodes[1], 1)


class Planner(Fifo):
    """Wants two instances, always."""

    plan_every_ns = 10

    def plan(self) -> Plan:
        return Plan((Target(0, 0, 2),))


def test_a_plan_does_not_start_it_either(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(limits=LIMITS), Planner, nodes=2)
    rig.at(5, LoadFailed(0, 0, "broken"))
    plan = TimerFired(("plan", 0))
    assert rig.at(15, plan) == wires(SetTimer(("plan", 0), 25))
    rig.at(105, PROBE)
    rig.at(110, InstanceStarted(0, 1))
    assert rig.at(115, plan)[:1] == wires(StartInstance(1, 0, 0, 0))


def test_any_stage_of_a_pipeline_counts(make_rig: type[Rig]) -> None:
    """The second stage breaks while the first runs: the request fails at once, not then."""
    first, second, third = (make_function(i) for i in range(3))
    app = make_app(first, second, third, stages=[Stage(first), Stage(second, (0,))], limits=LIMITS)
    rig = make_rig(app, nodes=1)
    rig.at(0, RequestArrived(0, 0))
    assert rig.at(5, LoadFailed(1, 0, "broken"))[1:2] == wires(
        Settle(0, Settlement(Outcome.FAILED, Rejection.LOAD_FAILED, 0, 100, second.name))
    )
    assert rig.at(6, RequestArrived(1, 0)) == wires(
        Settle(1, Settlement(Outcome.REJECTED, Rejection.LOAD_FAILED, 0, 99))
    )
    rig.at(7, LoadFailed(2, 0, "broken too"))  # of no concern to anybody


def two_builds(second: Pool) -> App:
    """A function of two variants: one on each pool."""
    function = make_function(0)
    other = Variant(1, "v1", 0, (1,), function.variants[0].profile)
    function = replace(function, variants=(*function.variants, other))
    return make_app(function, pools=[Pool(0, "gpu"), second], limits=LIMITS)


def test_another_build_takes_over(make_rig: type[Rig]) -> None:
    rig = make_rig(two_builds(Pool(1, "cpu")), nodes=1)
    rig.at(0, NodeJoined(1, 1, "n1"))
    rig.at(5, LoadFailed(0, 0, "no GPU"))
    assert rig.at(6, RequestArrived(0, 0)) == wires(
        StartInstance(0, 1, 1, 1), Dispatch(0, 1, [0], 1, 1, 1, 0)
    )
    rig.at(7, InstanceStopped(0, "broken too"))
    assert rig.view.unloadable == {0}


def test_a_platform_counts_only_where_the_policy_uses_it(make_rig: type[Rig]) -> None:
    """`Fifo` takes no platforms, so there is nowhere to go."""
    rig = make_rig(two_builds(replace(CLOUD, id=1)), nodes=1)
    rig.at(5, LoadFailed(0, 0, "broken"))
    assert rig.view.unloadable == {0}


def test_other_functions_are_served_when_those_before_them_fail(make_rig: type[Rig]) -> None:
    """After a task that can never run is failed, the node is offered to the tasks behind it."""

    class Strict(Fifo):
        """Strict FIFO: no task overtakes another."""

        def _send(self) -> None:
            while self.queue:
                node = self.view.first_free(self.queue[0].function.id)
                if self.queue[0].state == 1 and node is None:
                    return
                task = self.queue.pop(0)
                if task.state == 1 and node is not None:
                    self.orders.dispatch([task], node)

    functions: list[Function] = [make_function(0), make_function(1)]
    pools = [Pool(0, "gpu", slots=2)]
    rig = make_rig(make_app(*functions, pools=pools, limits=LIMITS), Strict, nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.at(0, RequestArrived(1, 0))  # behind the instance that starts, which takes one at a time
    rig.at(0, RequestArrived(2, 1))
    actions = rig.at(10, InstanceStopped(0, "broken"))
    assert [wire[0] for wire in actions] == ["SetTimer", "Settle", "StartInstance", "Dispatch"]
    rig.at(10, BatchRefused(0, Refusal.GONE))
