"""Keep-warm orders, and calls to a pool that is unavailable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from headgate.core.actions import Dispatch, KeepWarm
from headgate.core.circuit_breaker import DAY_NS
from headgate.core.clock import MINUTE_NS, SECOND_NS
from headgate.core.event_log import from_wire
from headgate.core.events import (
    BatchFailed,
    BatchFinished,
    BatchRefused,
    Refusal,
    RequestArrived,
    TimerFired,
)
from headgate.core.model import BreakerConfig, FaasPlatform, Pool
from headgate.core.policy import Context, PolicyConfig

from .rig import Rig, wires
from .sample_apps import Scripted, make_app, make_function

GPU = Pool(0, "gpu")
TERMS = FaasPlatform(1 << 30, concurrency_max=5, usd_per_request=1.0)
CLOUD = Pool(
    1, "cloud", nodes=0, faas=TERMS, breaker=BreakerConfig(failure_threshold=1, cooldown_ns=100)
)
DEAR = replace(TERMS, usd_per_gb_s=1.0)  # of a second
BOTH = make_function(0, pool_ids=(0, 1))
NODES = make_function(1, pool_ids=(0,))


def keep(count: int, *, is_provisioned: bool = False) -> Callable[[Scripted], object]:
    return lambda policy: policy.orders.keep_warm(
        BOTH.variants[0], CLOUD, count, is_provisioned=is_provisioned
    )


def call(task_id: int, pool: Pool = CLOUD) -> Callable[[Scripted], object]:
    return lambda policy: policy.orders.dispatch_to_pool([policy.task(task_id)], pool)


def make(make_rig: type[Rig], pool: Pool = CLOUD) -> Rig:
    """Two requests wait; request n has task 256 n."""
    rig = make_rig(make_app(BOTH, NODES, pools=[GPU, pool]), Scripted)
    rig.at(0, RequestArrived(0, 0))
    rig.at(0, RequestArrived(1, 0))
    return rig


def test_a_keep_warm_order_is_passed_on_and_remembered(make_rig: type[Rig]) -> None:
    rig = make(make_rig)
    assert rig.order(1, keep(3)) == wires(KeepWarm(1, 0, 3, False))
    assert rig.view.kept_warm == {(1, 0): (3, False)}


def test_only_what_is_news_is_passed_on(make_rig: type[Rig]) -> None:
    """Nothing is kept warm at first, so an order for none changes nothing."""
    rig = make(make_rig)
    assert rig.order(1, keep(0)) == []
    rig.order(2, keep(3))
    assert rig.order(3, keep(3)) == []
    assert rig.order(4, keep(3, is_provisioned=True)) == wires(KeepWarm(1, 0, 3, True))
    assert rig.order(5, keep(0)) == wires(KeepWarm(1, 0, 0, False))


def test_a_keep_warm_order_waits_while_the_breaker_is_open(make_rig: type[Rig]) -> None:
    """A failing platform gets no pings. The order is granted when the breaker closes."""
    rig = make(make_rig)
    rig.order(1, keep(3))
    rig.order(1, call(0))
    failed = rig.at(2, BatchFailed(0, "broken"))
    assert wires(KeepWarm(1, 0, 0, False))[0] in failed
    assert rig.view.kept_warm == {(1, 0): (0, False)}
    assert rig.order(3, keep(2)) == []
    for now_ns in (102, 104, 106):
        if now_ns == 102:
            assert rig.at(now_ns, TimerFired(("unblock_pool", 1))) == []
        rig.order(now_ns, call(256 if now_ns == 102 else 0))
        ended = rig.at(now_ns + 1, BatchRefused(now_ns // 2 - 50, Refusal.CANCELLED))
        assert ended == []
    rig.order(108, call(0))
    for request in (2, 3):
        rig.at(108, RequestArrived(request, 0))
    assert rig.at(109, BatchFinished(4))[:1] != wires(KeepWarm(1, 0, 2, False))
    rig.order(110, call(512))
    rig.at(111, BatchFinished(5))
    rig.order(112, call(768))
    assert wires(KeepWarm(1, 0, 2, False))[0] in rig.at(113, BatchFinished(6))
    assert rig.view.kept_warm == {(1, 0): (2, False)}


def test_a_keep_warm_order_before_the_first_event_is_granted_and_paid_with_that_event(
    make_rig: type[Rig],
) -> None:
    """A live clock does not begin at 0."""

    class Keeper(Scripted):
        def __init__(self, context: Context, config: PolicyConfig) -> None:
            super().__init__(context, config)
            self.orders.keep_warm(BOTH.variants[0], CLOUD, 2)

    rig = make_rig(make_app(BOTH, NODES, pools=[GPU, CLOUD]), Keeper)
    assert rig.view.kept_warm == {}
    begin_ns = 10 * DAY_NS
    assert rig.at(begin_ns, RequestArrived(0, 0)) == wires(KeepWarm(1, 0, 2, False))
    breaker = rig.view.breakers[1]
    assert breaker is not None
    assert breaker.spent_usd(begin_ns) == 2.0
    assert breaker.spent_usd(begin_ns + TERMS.ping_every_ns) == pytest.approx(4.0)


def test_what_is_kept_warm_is_looked_at_every_minute_where_a_day_has_a_budget(
    make_rig: type[Rig],
) -> None:
    """Without calls, keep-warm spends half of the daily budget and no more."""
    pool = replace(CLOUD, breaker=BreakerConfig(usd_per_day=70.0), faas=DEAR)
    rig = make(make_rig, pool)
    rig.order(1, lambda p: p.orders.keep_warm(BOTH.variants[0], pool, 2))
    key = ("unblock_pool", 1)
    while rig.view.kept_warm == {(1, 0): (2, False)}:
        at_ns = rig.view.timers[key]
        assert at_ns % MINUTE_NS == 0
        rig.at(at_ns, TimerFired(key))
    assert rig.view.kept_warm == {(1, 0): (0, False)}
    breaker = rig.view.breakers[1]
    assert breaker is not None
    assert 30.0 < breaker.spent_usd(rig.view.now_ns) <= 35.0
    assert rig.view.timers[key] == DAY_NS


def test_a_day_that_is_spent_ends_what_is_kept_warm_until_the_next(make_rig: type[Rig]) -> None:
    """A call of 601 dollars, and of 6.50 that are left 6.12 on what was kept warm meanwhile."""
    pool = replace(CLOUD, breaker=BreakerConfig(usd_per_day=607.5), faas=DEAR)
    rig = make(make_rig, pool)
    rig.order(1, lambda p: p.orders.keep_warm(BOTH.variants[0], pool, 2))
    rig.order(1, call(0, pool))
    actions = rig.at(600 * SECOND_NS, BatchFinished(0))
    assert wires(KeepWarm(1, 0, 0, False))[0] in actions
    assert rig.view.timers[("unblock_pool", 1)] == DAY_NS
    assert wires(KeepWarm(1, 0, 2, False))[0] in rig.at(DAY_NS, TimerFired(("unblock_pool", 1)))


@pytest.mark.parametrize(("count", "is_legal"), [(-1, False), (0, True), (5, True), (6, False)])
def test_no_more_are_kept_than_the_platform_runs(
    make_rig: type[Rig], count: int, is_legal: bool
) -> None:
    rig = make(make_rig)
    rig.order(1, keep(1))
    if is_legal:
        assert rig.order(1, keep(count)) == wires(KeepWarm(1, 0, count, False))
    else:
        rig.forbids(keep(count), f"pool cloud cannot keep {count} instances")


def test_nothing_is_kept_warm_where_there_is_no_platform(make_rig: type[Rig]) -> None:
    rig = make(make_rig)
    variant = BOTH.variants[0]
    rig.forbids(lambda p: p.orders.keep_warm(variant, GPU, 1), "pool gpu cannot keep v0 warm")


def test_nothing_is_kept_warm_that_does_not_run_there(make_rig: type[Rig]) -> None:
    rig = make(make_rig)
    variant = NODES.variants[0]
    rig.forbids(lambda p: p.orders.keep_warm(variant, CLOUD, 1), "cannot keep v1 warm")


def test_a_keep_warm_order_survives_the_wire() -> None:
    (wire,) = wires(KeepWarm(1, 0, 3, True))
    order = from_wire(wire)
    assert isinstance(order, KeepWarm)
    assert (order.pool_id, order.variant_id, order.count, order.is_provisioned) == (1, 0, 3, True)


def test_nothing_goes_to_a_pool_whose_breaker_is_open(make_rig: type[Rig]) -> None:
    rig = make(make_rig)
    rig.order(1, call(0))
    rig.at(2, BatchFailed(0, "broken"))
    rig.forbids(call(256), "pool cloud takes no calls: circuit breaker or budget")
    rig.at(102, TimerFired(("unblock_pool", 1)))
    assert ("pool available", 1) in rig.scripted.hooks_called
    (sent,) = rig.order(102, call(256))
    assert isinstance(from_wire(sent), Dispatch)


def test_a_pool_that_is_tried_takes_one_call_at_a_time(make_rig: type[Rig]) -> None:
    rig = make(make_rig)
    rig.order(1, call(0))
    rig.at(2, BatchFailed(0, "broken"))
    rig.at(102, TimerFired(("unblock_pool", 1)))
    rig.order(102, call(256))
    rig.forbids(call(0), "pool cloud takes no calls")
    rig.at(110, BatchFinished(1))
    assert rig.order(110, call(0)) != []


def test_nothing_goes_to_a_pool_whose_budget_is_spent(make_rig: type[Rig]) -> None:
    """The first call costs the dollar that a minute has; what it took is known before it ends."""
    pool = replace(CLOUD, breaker=BreakerConfig(usd_per_minute=1.0))
    rig = make(make_rig, pool)
    rig.order(1, call(0, pool))
    rig.forbids(call(256, pool), "or budget")
    rig.at(2, BatchFinished(0))
    rig.forbids(call(256, pool), "or budget")
    rig.at(MINUTE_NS, TimerFired(("unblock_pool", 1)))
    assert rig.order(MINUTE_NS, call(256, pool)) != []


@pytest.mark.parametrize(
    "breaker_config", [BreakerConfig(usd_per_minute=1.0), BreakerConfig(usd_per_day=1.0)]
)
def test_a_refund_makes_a_pool_available_again_and_the_policy_is_called(
    make_rig: type[Rig], breaker_config: BreakerConfig
) -> None:
    """The one call that the budget has was refused: nothing is spent."""
    pool = replace(CLOUD, breaker=breaker_config)
    rig = make(make_rig, pool)
    rig.order(1, call(0, pool))
    rig.forbids(call(256, pool), "or budget")
    rig.scripted.hooks_called.clear()
    rig.at(2, BatchRefused(0, Refusal.CANCELLED))
    assert ("pool available", 1) in rig.scripted.hooks_called
    assert rig.order(2, call(256, pool)) != []


def test_a_timer_that_finds_the_pool_closed_again_is_set_again(make_rig: type[Rig]) -> None:
    """A call in flight when the minute ends is paid in the next one."""
    pool = replace(CLOUD, breaker=BreakerConfig(usd_per_minute=1.0))
    rig = make(make_rig, pool)
    rig.order(1, call(0, pool))
    rig.scripted.hooks_called.clear()
    rig.at(MINUTE_NS, TimerFired(("unblock_pool", 1)))
    assert rig.view.timers[("unblock_pool", 1)] == 2 * MINUTE_NS
    assert rig.scripted.hooks_called == []
