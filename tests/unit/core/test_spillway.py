"""The spillway: a breaker, a ramp and budgets before every pool that is paid by the call."""

from __future__ import annotations

from headgate.core.clock import MINUTE_NS, SECOND_NS
from headgate.core.lifecycle import BatchState
from headgate.core.model import Guard, Pool, Serverless, Tier
from headgate.core.spillway import DAY_NS, Breaker, Spillway

GUARD = Guard(failures_max=2, rest_ns=10, rest_max_ns=30)
PLATFORM = Serverless(1 << 30, concurrency_max=4, usd_per_request=1.0)


def spillway(guard: Guard = GUARD) -> Spillway:
    return Spillway(Pool(0, "cloud", Tier.SERVERLESS, serverless=PLATFORM, guard=guard), PLATFORM)


def call(way: Spillway, now_ns: int, state: int) -> None:
    assert way.is_open(now_ns)
    way.sent(now_ns, 1)
    way.ended(now_ns, state, 1, 1)


def test_failures_in_a_row_open_the_breaker_and_one_success_between_them_does_not() -> None:
    way = spillway()
    for state in (BatchState.FAILED, BatchState.FINISHED, BatchState.LOST):
        call(way, 0, state)
    assert way.breaker == Breaker.CLOSED
    call(way, 0, BatchState.FAILED)
    assert way.breaker == Breaker.OPEN
    assert not way.is_open(9)
    assert way.is_open(10)


def test_what_the_platform_refused_is_no_failure_and_costs_nothing() -> None:
    way = spillway()
    for _ in range(10):
        call(way, 0, BatchState.REFUSED)
    assert way.breaker == Breaker.CLOSED
    assert way.spent_usd == 0.0


def test_a_platform_that_was_left_alone_is_trusted_again_step_by_step() -> None:
    way = spillway()
    call(way, 0, BatchState.FAILED)
    call(way, 0, BatchState.FAILED)
    way.rested(10)
    assert way.breaker == Breaker.TRYING
    way.sent(10, 1)
    assert not way.is_open(10)  # one at a time
    way.ended(11, BatchState.FINISHED, 1, 1)
    way.sent(11, 1)
    way.sent(11, 1)
    assert not way.is_open(11)  # two
    way.ended(12, BatchState.FINISHED, 1, 1)
    assert way.breaker == Breaker.CLOSED  # as many as the platform takes
    assert way.is_open(12)


def test_failing_again_makes_the_rest_longer_up_to_a_bound() -> None:
    way = spillway()
    call(way, 0, BatchState.FAILED)
    call(way, 0, BatchState.FAILED)
    rests = []
    for _ in range(3):
        now_ns = way.blocked_until_ns
        way.rested(now_ns)
        call(way, now_ns, BatchState.FAILED)
        rests.append(way.blocked_until_ns - now_ns)
    assert rests == [20, 30, 30]


def test_what_fails_late_of_what_was_out_when_the_breaker_opened_does_not_count_again() -> None:
    way = spillway()
    for _ in range(4):
        way.sent(0, 1)
    for _ in range(4):
        way.ended(5, BatchState.FAILED, 1, 5)
    assert way.blocked_until_ns == 15


def test_a_budget_closes_it_until_the_next_minute() -> None:
    way = spillway(Guard(usd_per_minute=2.0))
    call(way, SECOND_NS, BatchState.FINISHED)
    call(way, SECOND_NS, BatchState.FINISHED)
    assert not way.is_open(MINUTE_NS - 1)
    assert way.is_open(MINUTE_NS)
    call(way, MINUTE_NS, BatchState.FINISHED)
    assert way.is_open(MINUTE_NS)


def test_a_budget_closes_it_until_the_next_day() -> None:
    way = spillway(Guard(usd_per_day=1.0))
    call(way, SECOND_NS, BatchState.FINISHED)
    assert not way.is_open(DAY_NS - 1)
    assert way.is_open(DAY_NS)


def test_what_is_out_counts_before_it_is_billed() -> None:
    """Else a burst would be sent out whole before the first bill comes."""
    way = spillway(Guard(usd_per_minute=2.0))
    way.sent(0, 1)
    way.sent(0, 1)
    assert not way.is_open(0)


def test_a_platform_that_goes_on_refusing_is_asked_less_and_less_often() -> None:
    """Those that were out together count once; one that succeeds ends it."""
    way = spillway(Guard(rest_ns=6))
    waits = []
    for _ in range(5):
        now_ns = way.blocked_until_ns
        way.refused(now_ns, 1, is_gone=False)
        way.refused(now_ns, 1, is_gone=False)
        waits.append(way.blocked_until_ns - now_ns)
    assert waits == [1, 2, 4, 6, 6]
    now_ns = way.blocked_until_ns
    call(way, now_ns, BatchState.FINISHED)
    way.refused(now_ns, 1, is_gone=False)
    assert way.blocked_until_ns == now_ns + 1
    assert way.breaker == Breaker.CLOSED


def test_a_platform_that_is_not_there_has_failed() -> None:
    way = spillway()
    way.refused(0, 1, is_gone=True)
    assert way.breaker == Breaker.CLOSED
    way.refused(1, 1, is_gone=True)
    assert way.breaker == Breaker.OPEN
    assert way.blocked_until_ns == 11
