"""Orders: each is checked before it is carried out, so an illegal one changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headgate.core.actions import CancelTimer, SetTimer, Settle
from headgate.core.events import (
    BatchFinished,
    BatchRefused,
    InstanceStarted,
    NodeJoined,
    NodeLost,
    Refusal,
    RequestArrived,
    RequestCancelled,
    TimerFired,
)
from headgate.core.model import Pool, Shape, Stage
from headgate.core.orders import RESERVED_TIMERS
from headgate.core.states import Outcome, Settlement

from .rig import Rig, wires
from .sample_apps import CLOUD, Scripted, make_app, make_function

GPU = Pool(0, "gpu", memory_bytes=100, gpu_sevenths=7, cpu_milli=2_000)
FIRST = make_function(0, memory_bytes=80, shape=Shape(1_000, 4))
SECOND = make_function(1, memory_bytes=80, shape=Shape(1_000, 4))
CLOUDY = make_function(2, pool_ids=(1,))
APP = make_app(
    FIRST,
    SECOND,
    CLOUDY,
    stages=[Stage(FIRST), Stage(SECOND, (0,)), Stage(CLOUDY)],
    pools=[GPU, CLOUD],
)


@pytest.fixture
def rig(make_rig: type[Rig]) -> Rig:
    """Request 0 is running on node 0 and request 1 waits; node 1 is empty, node 2 is down.

    A request has tasks n (ready), n + 1 (blocked) and n + 2 (ready, for the cloud).
    """
    rig = make_rig(APP, Scripted, nodes=3)
    rig.at(0, NodeLost(2))
    rig.at(0, RequestArrived(0, 0))
    rig.at(0, RequestArrived(1, 0))
    rig.order(0, lambda p: p.send(0, 0))
    rig.at(0, InstanceStarted(0, 0))
    return rig


Act = Callable[[Scripted], object]
ILLEGAL: list[tuple[str, Act, str]] = [
    ("blocked task", lambda p: p.send(0, 257), "not ready"),
    ("no task", lambda p: p.send(1), "batch of no tasks"),
    ("one task twice", lambda p: p.send(1, 256, 256), "in a batch twice"),
    ("wrong place", lambda p: p.send(1, 258), "n1 cannot run f2"),
    ("node down", lambda p: p.send(2, 256), "n2 is down"),
    (
        "two functions",
        lambda p: p.orders.dispatch_to_pool([p.task(2), p.task(256)], CLOUD),
        "task 256 is not of the function of v2",
    ),
    (
        "variant of another function",
        lambda p: p.orders.dispatch([p.task(256)], p.view.nodes[1], SECOND.variants[0]),
        "task 256 is not of the function of v1",
    ),
    (
        "variant of another pool",
        lambda p: p.orders.dispatch([p.task(258)], p.view.nodes[1], CLOUDY.variants[0]),
        "does not run on pool gpu",
    ),
    (
        "instance on another node",
        lambda p: p.orders.dispatch([p.task(256)], p.view.nodes[1], None, p.view.instances[0]),
        "instance 0 is not on n1",
    ),
    (
        "instance of another variant",
        lambda p: p.orders.dispatch(
            [p.task(256)], p.view.nodes[0], SECOND.variants[0], p.view.instances[0]
        ),
        "instance 0 is not of v1",
    ),
    (
        "pool without a platform",
        lambda p: p.orders.dispatch_to_pool([p.task(256)], GPU),
        "is not a FaaS pool",
    ),
    (
        "pool that cannot run it",
        lambda p: p.orders.dispatch_to_pool([p.task(256)], CLOUD),
        "pool cloud cannot run f0",
    ),
    (
        "variant that the pool cannot run",
        lambda p: p.orders.dispatch_to_pool([p.task(256)], CLOUD, FIRST.variants[0]),
        "does not run on pool cloud",
    ),
    (
        "reject the admitted",
        lambda p: p.orders.reject(p.view.requests[0], Settlement(Outcome.REJECTED, "")),
        "expire it",
    ),
    ("expire the running", lambda p: p.orders.expire(p.view.requests[0], ""), "is running"),
    (
        "start on a node that is down",
        lambda p: p.orders.start(FIRST.variants[0], p.view.nodes[2]),
        "is down",
    ),
    (
        "start a second one without memory",
        lambda p: p.orders.start(FIRST.variants[0], p.view.nodes[0]),
        "no memory for v0",
    ),
    (
        "start in another pool",
        lambda p: p.orders.start(CLOUDY.variants[0], p.view.nodes[0]),
        "does not run on pool gpu",
    ),
    (
        "start without memory",
        lambda p: p.orders.start(SECOND.variants[0], p.view.nodes[0]),
        "no memory for v1",
    ),
    (
        "start anywhere in another pool",
        lambda p: p.orders.start_anywhere(FIRST.variants[0], CLOUD),
        "does not run on pool cloud",
    ),
    ("evict the busy", lambda p: p.orders.evict(p.view.instances[0]), "not idle on a device"),
    ("load what is loaded", lambda p: p.orders.load(p.view.instances[0]), "not in host memory"),
    ("timer in the past", lambda p: p.orders.set_timer("tick", -1), "set for the past"),
]


@pytest.mark.parametrize(
    ("act", "match"), [case[1:] for case in ILLEGAL], ids=[c[0] for c in ILLEGAL]
)
def test_an_illegal_order_changes_nothing(rig: Rig, act: Act, match: str) -> None:
    rig.forbids(act, match)


def test_a_settled_request_is_settled(rig: Rig) -> None:
    request, task = rig.view.requests[1], rig.scripted.task(256)
    rig.at(1, RequestCancelled(1))
    rig.forbids(
        lambda p: p.orders.reject(request, Settlement(Outcome.REJECTED, "")), "settled already"
    )
    rig.forbids(lambda p: p.orders.expire(request, ""), "settled already")
    rig.forbids(lambda p: p.orders.dispatch([task], p.view.nodes[1]), "not ready")


@pytest.mark.parametrize("name", sorted(RESERVED_TIMERS))
def test_the_schedulers_own_timers_are_out_of_reach(rig: Rig, name: str) -> None:
    rig.forbids(lambda p: p.orders.set_timer(name, 10), "the Scheduler's own")
    rig.forbids(lambda p: p.orders.cancel_timer(name), "the Scheduler's own")


def test_a_batch_is_no_larger_than_its_profile(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(make_function(exec_ns=(1, 2))), Scripted, nodes=1)
    rig.at(0, RequestArrived(0, 0, items=2))
    rig.at(0, RequestArrived(1, 0))
    rig.forbids(lambda p: p.send(0, 0, 256), "3 items exceed the largest batch of v0")


def test_an_instance_is_stopped_once(rig: Rig) -> None:
    instance = rig.view.instances[0]
    rig.order(1, lambda p: p.orders.stop(instance))
    rig.forbids(lambda p: p.orders.stop(instance), "gone already")


def test_evicting_needs_room_in_host_memory(rig: Rig) -> None:
    rig.at(9, BatchFinished(0))
    rig.forbids(lambda p: p.orders.evict(p.view.instances[0]), "no host memory for v0")


def test_a_policys_timers_fire_once_and_can_be_moved_or_called_off(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(), Scripted)
    assert rig.order(0, lambda p: p.orders.set_timer("tick", 10, 3)) == wires(
        SetTimer(("tick", 3), 10)
    )
    assert rig.order(5, lambda p: p.orders.set_timer("tick", 20, 3)) == wires(
        SetTimer(("tick", 3), 20)
    )
    rig.at(10, TimerFired(("tick", 3)))
    assert (rig.scripted.hooks_called, rig.view.events_ignored) == ([], 1)
    rig.at(20, TimerFired(("tick", 3)))
    assert rig.scripted.hooks_called == [("tick", 3)]
    rig.order(21, lambda p: p.orders.set_timer("tick", 30))
    assert rig.order(22, lambda p: p.orders.cancel_timer("tick")) == wires(CancelTimer(("tick", 0)))
    assert rig.order(23, lambda p: p.orders.cancel_timer("tick")) == []


def test_a_policy_sees_the_effect_of_its_own_orders(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(), Scripted, nodes=1)
    rig.at(0, RequestArrived(0, 0))

    def act(scripted: Scripted) -> None:
        assert list(scripted.view.free_nodes) == [0]
        batch = scripted.send(0, 0)
        assert (scripted.view.free_nodes, scripted.view.batches) == ({}, {0: batch})

    rig.order(1, act)


def test_a_refused_request_was_admitted_all_the_same(make_rig: type[Rig]) -> None:
    """Late rejection is not allowed: once dispatched, a request can only be expired."""
    rig = make_rig(make_app(), Scripted, nodes=1)
    rig.at(0, RequestArrived(0, 0))
    rig.order(0, lambda p: p.send(0, 0))
    rig.at(1, BatchRefused(0, Refusal.BUSY))
    rig.forbids(
        lambda p: p.orders.reject(p.view.requests[0], Settlement(Outcome.REJECTED, "")), "expire it"
    )
    assert rig.order(2, lambda p: p.orders.expire(p.view.requests[0], "hopeless")) == wires(
        Settle(0, Settlement(Outcome.EXPIRED, "hopeless"))
    )


def test_what_may_not_be_repeated_has_no_competing_copies(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(make_function(is_idempotent=False)), Scripted, nodes=2)
    rig.at(0, RequestArrived(0, 0))
    rig.order(0, lambda p: p.send(0, 0))
    rig.forbids(lambda p: p.send(1, 0), "is not idempotent")


def test_copies_are_attempts_and_attempts_are_bounded(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(), Scripted, nodes=4)
    rig.at(0, RequestArrived(0, 0))
    rig.order(0, lambda p: [p.send(node_id, 0) for node_id in range(3)])
    rig.forbids(lambda p: p.send(3, 0), "no attempts left")


def test_a_node_that_returns_may_be_used_again(rig: Rig) -> None:
    rig.at(1, NodeJoined(2, 0, "n2"))
    assert rig.order(1, lambda p: p.send(2, 256))[-1][0] == "Dispatch"
