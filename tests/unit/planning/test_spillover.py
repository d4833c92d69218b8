"""When a task spills to a FaaS platform, and how many instances are kept warm there.

A node has one done in a second, and so has a platform, after a start of two. All are due after ten.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from headgate.core.clock import NEVER_NS, SECOND_NS
from headgate.core.events import (
    BatchFailed,
    BatchFinished,
    BatchLost,
    BatchRefused,
    Event,
    NodeJoined,
    Refusal,
    RequestArrived,
    TimerFired,
)
from headgate.core.model import (
    App,
    BreakerConfig,
    FaasPlatform,
    Function,
    Pipeline,
    Pool,
    Profile,
    Slo,
    Stage,
    Tier,
    Variant,
)
from headgate.core.policy import Policy, PolicyKind
from headgate.core.records import Batch, Node, Task
from headgate.core.scheduler.scheduler import Scheduler
from headgate.planning.latency_predictor import LatencyPredictor
from headgate.planning.spillover import RESIZE_WARM_POOL, Spillover
from headgate.planning.warm_pool import WarmPool

S = SECOND_NS
NODE = Pool(0, "node")
TERMS = FaasPlatform(1 << 30, keep_alive_ns=600 * S)
CLOUD = Pool(
    1, "cloud", Tier.SERVERLESS, nodes=0, faas=TERMS, breaker=BreakerConfig(failure_threshold=1)
)
KEY = (RESIZE_WARM_POOL, 0)


class Waiting(Policy):
    """Does nothing but hand on what it hears."""

    rig: Rig

    def on_task_ready(self, task: Task) -> None:
        self.rig.waiting.append(task)
        self.rig.spilling.on_queued(task)
        self.rig.predictor.on_queued(task)

    def on_task_returned(self, task: Task) -> None:
        pass

    def on_capacity(self, node: Node) -> None:
        pass

    def on_batch_ended(self, batch: Batch, took_ns: int) -> None:
        self.rig.spilling.on_call_ended(batch)

    def on_timer(self, name: str, number: int) -> None:
        self.rig.spilling.resize_warm_pool(number)


class Rig:
    """Tasks that wait, and the spilling that is asked about them."""

    def __init__(
        self, *, has_node: bool = True, latency_s: int | None = 10, cloud: Pool = CLOUD
    ) -> None:
        profile = Profile((S, 2 * S), cold_start_ns=2 * S)
        pools = (0, 1) if has_node else (1,)
        function = Function(0, "f", (Variant(0, "f", 0, pools, profile),))
        slo = Slo(NEVER_NS if latency_s is None else latency_s * S)
        app = App((function,), (Pipeline(0, "p", (Stage(function),), slo),), (NODE, cloud))
        self.scheduler = Scheduler(app, PolicyKind(Waiting), validate=True)
        policy = self.scheduler.policy
        assert isinstance(policy, Waiting)
        policy.rig = self
        self.orders = policy.orders
        self.view = self.scheduler.view
        self.predictor = LatencyPredictor(self.view, 0.9)
        self.spilling = Spillover(self.view, self.orders, self.predictor, 0.2, 600 * S)
        self.waiting: list[Task] = []
        self.asked = 0
        if has_node:
            self.tell(0, NodeJoined(0, 0, "n0"))
            self.predictor.on_node_joined(self.view.nodes[0])

    def tell(self, now_s: float, event: Event) -> None:
        self.scheduler.handle(int(now_s * S), event)

    def ask(self, now_s: float, count: int, *, items: int = 1, due_s: int = 0) -> None:
        for _ in range(count):
            arrived = RequestArrived(self.asked, 0, items=items, deadline_ns=due_s * S)
            self.tell(now_s, arrived)
            self.asked += 1

    def spill(self) -> int:
        """Send what is to go; how many went."""
        sent = 0
        while self.waiting:
            task = self.waiting[0]
            target = self.spilling.spill_target(task)
            if target is None:
                return sent
            self.orders.dispatch_to_pool([task], target.pool, target.variant)
            self.predictor.on_dequeued(self.waiting.pop(0))
            sent += 1
        return sent

    def can_take(self) -> bool:
        return self.spilling.can_take(self.view.requests[self.asked - 1])

    @property
    def warm_pool(self) -> WarmPool:
        warm_pool = self.spilling.warm_pools[0]
        assert warm_pool is not None
        return warm_pool

    @property
    def kept(self) -> int:
        return self.view.kept_warm.get((1, 0), (0, False))[0]


def warm(count: int, **options: bool) -> Rig:
    """Mark this many instances as ready."""
    rig = Rig(**options)  # type: ignore[arg-type]
    rig.warm_pool.instances.set_desired(-10 * S, count)
    return rig


def test_what_the_node_can_do_in_time_stays() -> None:
    rig = warm(20)
    rig.ask(0, 8)
    assert rig.spill() == 0


def test_only_what_the_node_cannot_do_in_time_goes() -> None:
    """It has eight of twenty done before the part of the time that is left for surprises."""
    rig = warm(20)
    rig.ask(0, 20)
    assert rig.spill() == 12
    assert rig.spill() == 0


def test_no_more_go_than_are_ready() -> None:
    rig = warm(5)
    rig.ask(0, 20)
    assert rig.spill() == 5


def test_where_there_is_nothing_one_goes_first_and_more_are_made_ready() -> None:
    """It pays for its start. The others wait for theirs, which takes two seconds."""
    rig = Rig()
    rig.ask(0, 20)
    assert (rig.spill(), rig.kept) == (1, 0)
    ready_s = rig.view.timers[KEY] / S
    assert ready_s < 0.1
    rig.tell(ready_s, TimerFired(KEY))
    assert rig.kept > 1
    assert (rig.view.timers[KEY], rig.spill()) == (int((ready_s + 2) * S), 0)
    rig.tell(ready_s + 2, TimerFired(KEY))
    assert rig.spill() == rig.kept - 1  # the first one is still out


def test_with_no_nodes_all_goes_as_far_as_there_is_something_ready() -> None:
    rig = warm(3, has_node=False)
    rig.ask(0, 5)
    assert rig.spill() == 3


def test_what_has_no_deadline_waits_for_a_node_if_there_is_one() -> None:
    rig = Rig(latency_s=None)
    rig.ask(0, 50)
    assert rig.spill() == 0
    rig = Rig(latency_s=None, has_node=False)
    rig.ask(0, 50)
    assert rig.spill() == 1


def test_what_is_late_already_is_not_paid_for() -> None:
    rig = warm(20)
    rig.ask(0, 20)
    rig.tell(11, TimerFired(KEY))  # of no meaning; time has passed
    assert rig.spill() == 0


def test_one_that_had_time_leaves_no_trace_once_it_is_gone() -> None:
    """It was due in an hour; those that come when nothing waits any more are not."""
    rig = warm(20)
    rig.ask(0, 1, due_s=3_600)
    rig.predictor.on_dequeued(rig.waiting.pop())
    rig.ask(1, 20)
    assert rig.spill() == 12


def test_what_is_too_large_for_the_platform_stays() -> None:
    rig = warm(20, has_node=False)
    target = rig.spilling.targets[0]
    assert target is not None
    profile = replace(target.variant.profile, exec_ns=(S,))
    variant = replace(target.variant, profile=profile)
    rig.spilling.targets[0] = replace(target, variant=variant)
    rig.ask(0, 1, items=2)
    assert (rig.can_take(), rig.spill()) == (False, 0)


def test_more_is_let_in_until_what_waits_takes_several_starts() -> None:
    """One instance there could be, in three seconds: twelve seconds' worth may wait."""
    rig = Rig(has_node=False)
    rig.ask(0, 12)
    assert rig.can_take()
    rig.ask(0, 1)
    assert not rig.can_take()


def test_where_more_are_ready_more_may_wait() -> None:
    rig = warm(3, has_node=False)
    rig.ask(0, 36)
    assert rig.can_take()
    rig.ask(0, 1)
    assert not rig.can_take()


def test_nothing_goes_while_the_platform_is_closed() -> None:
    rig = warm(20, has_node=False)
    rig.ask(0, 3)
    assert (rig.can_take(), rig.spilling.is_available(0), rig.spilling.unavailable_pools()) == (
        True,
        True,
        [],
    )
    rig.warm_pool.on_call(0)
    rig.orders.dispatch_to_pool([rig.waiting.pop()], CLOUD)
    rig.tell(1, BatchFailed(0, "broken"))
    assert (rig.can_take(), rig.spilling.is_available(0)) == (False, False)
    assert rig.spilling.unavailable_pools() == [1]
    assert rig.spill() == 0


@pytest.mark.parametrize(
    ("end", "there"),
    [
        (BatchFinished(0), 1),
        (BatchFailed(0, "broken"), 1),
        (BatchRefused(0, Refusal.THROTTLED), 0),
        (BatchLost(0), 0),
    ],
    ids=["finished", "failed", "refused", "lost"],
)
def test_where_a_call_ran_there_is_an_instance(end: Event, there: int) -> None:
    rig = Rig(has_node=False)
    rig.ask(0, 1)
    assert rig.spill() == 1
    instances = rig.warm_pool.instances
    rig.tell(3, end)
    assert (instances.busy, instances.size(3 * S)) == (0, there)


def tended(rig: Rig, until_s: int) -> list[int]:
    """How many are kept, over time: each value once."""
    kept = [rig.kept]
    while (at_ns := rig.view.timers.get(KEY, NEVER_NS)) <= until_s * S:
        rig.scheduler.handle(at_ns, TimerFired(KEY))
        if rig.kept != kept[-1]:
            kept.append(rig.kept)
    return kept


def test_after_a_burst_the_warm_pool_is_kept_for_a_while_and_scaled_in_by_steps() -> None:
    rig = Rig(has_node=False)
    rig.ask(0, 12)
    rig.spill()
    assert tended(rig, 10)[-1] > 2
    burst = rig.kept
    assert tended(rig, 100) == [burst]
    after = tended(rig, 5 * 600)
    assert after == sorted(after, reverse=True)
    assert after[-1] == 0
    assert KEY not in rig.view.timers


def test_a_function_without_a_platform_spills_nothing() -> None:
    function = Function(0, "f", (Variant(0, "f", 0, (0,), Profile((S,))),))
    app = App((function,), (Pipeline(0, "p", (Stage(function),)),), (NODE,))
    scheduler = Scheduler(app, PolicyKind(Waiting), validate=True)
    predictor = LatencyPredictor(scheduler.view, 0.9)
    spilling = Spillover(scheduler.view, scheduler.policy.orders, predictor, 0.2, 3_600 * S)
    assert not spilling.is_possible
    assert not spilling.is_available(0)
    assert spilling.unavailable_pools() == []
