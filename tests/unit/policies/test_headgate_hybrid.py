"""The default policy with a FaaS pool beside its nodes, and with an elastic pool.

A node answers one after the other, each in 360 ms; a function answers in 300 ms, after a start of
400 ms where there is none. An answer is due after 2 s.
"""

from __future__ import annotations

from dataclasses import replace

import hybrid_rig
import pytest
from hybrid_rig import BOOT_S, CLOUD, MS, NODES, RENTED, HybridRig

from headgate.core.actions import Action, Dispatch, Settle, StartInstance
from headgate.core.clock import HOUR_NS, MINUTE_NS, NEVER_NS, SECOND_NS
from headgate.core.events import BatchFailed, BatchRefused, Refusal, RequestArrived
from headgate.core.model import LAMBDA_PAYLOAD_BYTES_MAX, BreakerConfig, FaasPlatform, Pool
from headgate.core.states import Outcome, Rejection

RESIZE_WARM_POOL = "resize_warm_pool"

S = SECOND_NS
ONE = replace(NODES, nodes=1)
ALONE = replace(CLOUD, id=0)
FEW = replace(CLOUD, breaker=BreakerConfig(failure_threshold=1, cooldown_ns=5 * S))


def rig_of(*pools: Pool, start_ms: int = 400, **options: int) -> HybridRig:
    return HybridRig("headgate", pools=pools, start_ms=start_ms, **options)


def awake(*pools: Pool, count: int = 12, **options: int) -> HybridRig:
    """A burst has come and gone, so that functions are kept warm."""
    rig = rig_of(*pools, **options)
    rig.ask(count)
    for _ in range(40):
        rig.wait(300 * MS)
        for batch_id in list(rig.out):
            rig.finish(batch_id)
    assert not rig.view.requests
    return rig


def functions_out(rig: HybridRig) -> int:
    return sum(1 for place in rig.out.values() if place is None)


def kept(rig: HybridRig) -> int:
    return max((count for count, _ in rig.view.kept_warm.values()), default=0)


def settled(actions: list[Action]) -> list[tuple[int, str]]:
    return [(a.settlement.outcome, a.settlement.reason) for a in actions if isinstance(a, Settle)]


def arrive(rig: HybridRig, deadline_ms: int = 0) -> list[Action]:
    """One more request, due at another time than usual if that is said."""
    deadline_ns = rig.now_ns + deadline_ms * MS if deadline_ms else 0
    actions = rig.tell(RequestArrived(rig.requests, 0, 0, deadline_ns=deadline_ns))
    rig.requests += 1
    return actions


def sent(actions: list[Action]) -> list[tuple[int, int | None]]:
    """Which requests went where."""
    dispatches = [a for a in actions if isinstance(a, Dispatch)]
    return [(task_id // 256, d.node_id) for d in dispatches for task_id in d.task_ids]


def test_what_the_node_has_done_in_time_is_not_spilled() -> None:
    """Four take 1.4 s of the 2 s."""
    rig = awake(ONE, CLOUD)
    assert rig.ask(4) == [0]
    assert [rig.finish() for _ in range(4)] == [[0], [0], [0], []]


def test_what_it_cannot_do_in_time_goes_to_functions_that_are_warm() -> None:
    rig = awake(ONE, CLOUD)
    places = rig.ask(7)
    assert places[0] == 0
    assert places[1:] == [None] * len(places[1:])
    waiting = 7 - len(places)
    assert 360 * (1 + waiting) < 2_000  # what is left is done in time,
    assert 360 * (1 + waiting + 2) > 1_700  # and not much more was paid for than had to be


def test_what_a_cold_start_has_done_in_time_is_called_at_once() -> None:
    """Ten at once and nothing warm: some wait for the node, and the others pay for their starts."""
    rig = rig_of(ONE, CLOUD)
    places = rig.ask(10)
    assert places == [0, *[None] * (len(places) - 1)]
    assert len(rig.view.requests) == 10
    assert 360 * (1 + 10 - len(places)) < 2_000  # what waits is done in time,
    assert 360 * (1 + 10 - len(places) + 2) > 1_700  # and not much more was paid for than had to be
    rig.wait(300 * MS)
    assert kept(rig) > 1


def test_without_an_objective_nothing_is_spilled_for() -> None:
    """There is no hurry, and the node costs nothing more."""
    rig = rig_of(ONE, CLOUD, latency_ms=10**9)
    assert rig.ask(50) == [0]


def test_each_function_is_spilled_for_itself() -> None:
    """The second function has no warm instance, however many the first has."""
    rig = rig_of(ONE, CLOUD, functions=2)
    rig.ask(10)
    rig.wait(S)
    assert rig.ask(1, function=1) in ([], [None])
    variants = {rig.view.batches[b].variant.function_id for b, p in rig.out.items() if p is None}
    assert 0 in variants


TOO_LARGE = LAMBDA_PAYLOAD_BYTES_MAX + 1


def test_what_no_call_can_carry_does_not_block_spilling_of_the_tasks_behind_it() -> None:
    """The second of two that are too large waits for the node, and is due before all others."""
    rig = awake(ONE, CLOUD)
    first = rig.requests
    for _ in range(2):
        due_ns = rig.now_ns + 1_500 * MS
        rig.tell(RequestArrived(rig.requests, 0, deadline_ns=due_ns, payload_bytes=TOO_LARGE))
        rig.requests += 1
    assert list(rig.out.values()) == [0]
    assert None in rig.ask(9)
    rig.finish(min(rig.out))
    (batch,) = [b for b in rig.view.batches.values() if b.node is not None]
    assert [task.request.id for task in batch.tasks] == [first + 1]


def test_what_no_call_can_carry_is_let_in_only_where_a_node_has_time() -> None:
    rig = awake(ONE, CLOUD)
    admitted = 0
    for _ in range(9):
        actions = rig.tell(RequestArrived(rig.requests, 0, payload_bytes=TOO_LARGE))
        rig.requests += 1
        admitted += not settled(actions)
    assert admitted == 5  # 1.8 s of work
    assert functions_out(rig) == 0
    assert not settled(arrive(rig))


def test_a_node_is_rented_for_what_no_call_can_carry() -> None:
    """It would not pay for itself, and there is no other place."""
    rig = rig_of(RENTED, CLOUD, warm=0)
    rig.tell(RequestArrived(0, 0, deadline_ns=NEVER_NS, payload_bytes=TOO_LARGE))
    rig.wait((BOOT_S + 2) * S)  # until the next plan, and the boot
    assert list(rig.out.values()) == [0]
    rig.finish()
    assert not rig.view.requests


def test_more_items_than_a_call_takes_do_not_block_spilling_of_the_tasks_behind_them() -> None:
    rig = HybridRig("headgate", pools=(ONE, CLOUD), items_max=2, start_ms=0, latency_ms=1_000)
    rig.ask(3, items=2)
    assert None in rig.ask(6)


def test_after_a_burst_functions_stay_warm_for_the_next_one() -> None:
    rig = awake(ONE, CLOUD)
    before = kept(rig)
    assert before > 1
    rig.wait(600 * S)
    assert kept(rig) == before
    assert rig.ask(12).count(None) >= 12 - 5  # the node has five done in time


def test_warm_instances_that_are_not_needed_are_released() -> None:
    rig = awake(ONE, CLOUD)
    assert kept(rig) > 0
    rig.wait(8 * HOUR_NS)
    assert kept(rig) == 0
    assert not [key for key in rig.view.timers if key[0] == RESIZE_WARM_POOL]


def test_what_is_provisioned_is_so_where_that_is_cheaper() -> None:
    """Calls that keep one awake cost a dollar each, and provisioned ones next to nothing."""
    terms = FaasPlatform(
        1 << 30, usd_per_gb_s=0.002, usd_per_request=1.0, provisioned_usd_per_gb_s=1e-6
    )
    rig = awake(ONE, replace(CLOUD, faas=terms))
    assert [is_provisioned for _, is_provisioned in rig.view.kept_warm.values()] == [True]
    assert [is_provisioned for _, is_provisioned in awake(ONE, CLOUD).view.kept_warm.values()] == [
        False
    ]


def test_without_nodes_everything_goes_to_functions() -> None:
    rig = awake(ALONE)
    assert rig.ask(2) == [None, None]


def test_without_nodes_and_warm_instances_all_are_answered() -> None:
    rig = rig_of(ALONE)
    rig.ask(6)
    for _ in range(20):
        rig.wait(700 * MS)
        for batch_id in list(rig.out):
            rig.finish(batch_id)
    assert not rig.view.requests


def test_without_a_platform_the_overload_is_rejected() -> None:
    rig = rig_of(ONE)
    outcomes = [settled(arrive(rig)) for _ in range(10)]
    assert outcomes[0] == []
    assert outcomes[-1] == [(Outcome.REJECTED, Rejection.OVERLOADED)]


def test_where_platform_and_nodes_are_full_requests_are_rejected() -> None:
    """No call ends; the backlog exceeds its limit of cold starts, and requests are rejected."""
    terms = FaasPlatform(1 << 30, concurrency_max=2)
    rig = rig_of(ONE, replace(CLOUD, faas=terms))
    rejected = 0
    for _ in range(60):
        rejected += len(settled(arrive(rig)))
        rig.wait(10 * MS)
    assert functions_out(rig) <= 2
    assert 20 < rejected < 60
    assert len(rig.view.requests) == 60 - rejected


def broken(rig: HybridRig) -> None:
    """The calls in flight fail, and the breaker opens."""
    for batch_id in [id for id, place in rig.out.items() if place is None]:
        del rig.out[batch_id]
        rig.tell(BatchFailed(batch_id, "broken"))


def test_nothing_is_sent_while_the_breaker_is_open() -> None:
    rig = rig_of(ONE, FEW)
    assert None in rig.ask(8)
    broken(rig)
    for _ in range(4):
        rig.wait(S)
        assert functions_out(rig) == 0
        assert rig.ask(1) == []


def test_while_it_is_open_no_more_is_let_in_than_the_node_has_done_in_time() -> None:
    rig = rig_of(ONE, FEW)
    rig.ask(5)
    broken(rig)
    outcomes = [settled(arrive(rig)) for _ in range(5)]
    assert outcomes[-1] == [(Outcome.REJECTED, Rejection.OVERLOADED)]


def test_without_nodes_all_are_rejected_while_the_breaker_is_open() -> None:
    rig = rig_of(replace(FEW, id=0))
    rig.ask(1)
    broken(rig)
    assert settled(arrive(rig)) == [(Outcome.REJECTED, Rejection.UNAVAILABLE)]


def test_when_it_may_be_tried_again_one_call_goes() -> None:
    rig = rig_of(replace(FEW, id=0), latency_ms=60_000)
    rig.ask(3)
    broken(rig)
    rig.wait(4 * S)
    assert functions_out(rig) == 0
    rig.wait(2 * S)
    assert functions_out(rig) == 1


def test_a_budget_that_is_spent_closes_it_until_the_next_minute() -> None:
    """A cold call may cost 1.4 thousandths of a dollar: after three of them four are spent."""
    rig = rig_of(replace(ALONE, breaker=BreakerConfig(usd_per_minute=0.004)), latency_ms=120_000)
    rig.ask(3)
    rig.wait(S)
    assert functions_out(rig) == 3
    assert settled(arrive(rig)) == [(Outcome.REJECTED, Rejection.UNAVAILABLE)]
    for _ in range(3):
        rig.finish()
    rig.wait(MINUTE_NS - rig.now_ns - 1)
    assert settled(arrive(rig)) == [(Outcome.REJECTED, Rejection.UNAVAILABLE)]
    rig.wait(S)
    assert sent(arrive(rig)) == [(rig.requests - 1, None)]


def test_what_the_platform_refused_is_not_lost() -> None:
    rig = rig_of(ONE, CLOUD)
    rig.ask(8)
    batch_id = min(id for id, place in rig.out.items() if place is None)
    task = rig.view.batches[batch_id].tasks[0]
    del rig.out[batch_id]
    rig.tell(BatchRefused(batch_id, Refusal.THROTTLED))
    while rig.out:
        rig.finish()
    rig.wait(10 * S)
    while rig.out:
        rig.finish()
    assert task.request.id not in rig.view.requests


def test_a_load_that_pays_for_a_node_comes_to_have_it_and_one_that_does_not_does_not() -> None:
    """It costs as much as 1.67 calls per second."""
    rig = rig_of(RENTED, CLOUD, warm=0)
    rig.load(seconds=600, rate_per_s=1)
    assert rig.instances == 0
    rig.load(seconds=600, rate_per_s=2.5)
    assert rig.ready == 1


def test_nodes_that_are_not_needed_are_released() -> None:
    rig = rig_of(RENTED, CLOUD, warm=3)
    assert rig.ready == 3
    rig.load(seconds=600, rate_per_s=0.1)
    assert rig.instances == 0


@pytest.mark.parametrize("slowdown", [hybrid_rig.SHARED, (1.0, 1.1, 1.2, 1.3)])
def test_a_node_that_boots_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, slowdown: tuple[float, ...]
) -> None:
    """Requests during the boot go to FaaS, and to the node once it is ready.

    Also where it runs several at once, so that it could take more while it boots.
    """
    monkeypatch.setattr(hybrid_rig, "SHARED", slowdown)
    rig = rig_of(RENTED, CLOUD, warm=0)
    while not rig.instances:
        rig.load(seconds=1, rate_per_s=2.5)
    assert rig.ready == 0
    assert rig.ask(1) == [None]
    rig.finish()
    rig.wait(BOOT_S * S)
    assert rig.ready == 1
    assert rig.ask(1) == [0]


def test_an_empty_node_is_not_taken_for_a_single_request() -> None:
    """A dispatch there would boot it; only the plan takes nodes."""
    rig = rig_of(RENTED, CLOUD, warm=0)
    actions = arrive(rig)
    assert sent(actions) == [(0, None)]
    assert not [a for a in actions if isinstance(a, StartInstance)]


def test_with_nothing_else_one_node_is_always_rented_and_requests_wait_for_it() -> None:
    rig = rig_of(RENTED, warm=0, latency_ms=10**9)
    rig.wait(2 * S)
    assert (rig.instances, rig.ready) == (1, 0)
    assert settled(arrive(rig)) == []  # it can wait
    rig.wait(BOOT_S * S)
    assert list(rig.out.values()) == [0]


def test_a_request_that_cannot_wait_for_a_boot_is_refused() -> None:
    rig = rig_of(RENTED, warm=0, latency_ms=1000 * BOOT_S // 2)
    rig.wait(2 * S)
    assert (rig.instances, rig.ready) == (1, 0)
    assert settled(arrive(rig)) == [(Outcome.REJECTED, Rejection.UNAVAILABLE)]


def test_a_node_is_rented_for_a_request_that_can_wait_and_no_longer_than_requests_come() -> None:
    rig = rig_of(replace(RENTED, idle_timeout_ns=60 * S), warm=0, latency_ms=10**9)
    rig.wait(62 * S)
    assert rig.instances == 0
    assert [a for a in arrive(rig) if isinstance(a, StartInstance)]
    rig.wait(BOOT_S * S)
    assert list(rig.out.values()) == [0]
    rig.finish()
    rig.wait(62 * S)
    assert rig.instances == 0


def test_while_the_breaker_is_open_a_node_is_rented() -> None:
    rig = rig_of(
        RENTED,
        replace(FEW, breaker=BreakerConfig(failure_threshold=1, cooldown_ns=300 * S)),
        warm=0,
    )
    rig.ask(1)
    broken(rig)
    rig.wait((BOOT_S + 2) * S)
    assert rig.ready == 1
    assert list(rig.out.values()) == [0]  # what had failed is repeated there


@pytest.mark.parametrize(("rate_per_s", "rented"), [(6, 0), (10.5, 1)])
def test_demand_that_static_nodes_serve_is_not_rented_for(rate_per_s: float, rented: int) -> None:
    """Three static nodes serve 8.3 per second, so 2.2 of 10.5 are left for a rented one."""
    own = replace(NODES, nodes=3)
    rig = rig_of(own, replace(RENTED, id=1), replace(CLOUD, id=2), warm=3)
    rig.load(seconds=300, rate_per_s=rate_per_s)
    taken = [i for i in rig.view.instances.values() if i.pool.id == 1]
    assert len(taken) == rented
