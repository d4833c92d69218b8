"""The spillway: a circuit breaker, a back-off and budgets before every pool paid by the call."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.circuit_breaker import DAY_NS, BreakerState, CircuitBreaker, Closed
from headgate.core.clock import MINUTE_NS, SECOND_NS
from headgate.core.model import BreakerConfig, FaasPlatform, Pool, Tier
from headgate.core.states import BatchState

from .toys import make_function

GUARD = BreakerConfig(failure_threshold=2, cooldown_ns=10, cooldown_max_ns=30)
PLATFORM = FaasPlatform(1 << 30, concurrency_max=4, usd_per_request=1.0)
FINISHED, FAILED, LOST, REFUSED = (
    BatchState.FINISHED,
    BatchState.FAILED,
    BatchState.LOST,
    BatchState.REFUSED,
)
S = SECOND_NS


def spillway(guard: BreakerConfig = GUARD, platform: FaasPlatform = PLATFORM) -> CircuitBreaker:
    return CircuitBreaker(Pool(0, "cloud", Tier.SERVERLESS, faas=platform, breaker=guard), platform)


def call(way: CircuitBreaker, now_ns: int, state: int) -> None:
    assert way.allows_call(now_ns)
    way.sent(now_ns, 1)
    way.ended(now_ns, state, now_ns, 1)


def opened(way: CircuitBreaker, now_ns: int = 0) -> CircuitBreaker:
    """The breaker has just opened."""
    call(way, now_ns, FAILED)
    call(way, now_ns, FAILED)
    assert way.breaker == BreakerState.OPEN
    return way


# --- the circuit breaker ------------------------------------------------------------------------


def test_failures_in_a_row_open_the_breaker_and_one_success_between_them_does_not() -> None:
    way = spillway()
    for state in (FAILED, FINISHED, LOST):
        call(way, 0, state)
    assert way.breaker == BreakerState.CLOSED
    call(way, 0, FAILED)
    assert way.breaker == BreakerState.OPEN
    assert way.closed_by(9) == Closed.BREAKER
    assert way.allows_call(10)


def test_what_the_platform_refused_is_no_failure_and_costs_nothing() -> None:
    way = spillway()
    for _ in range(10):
        call(way, 0, REFUSED)
    assert way.breaker == BreakerState.CLOSED
    assert way.spent_usd(0) == 0.0


def test_a_platform_that_was_left_alone_is_trusted_again_step_by_step() -> None:
    way = opened(spillway())
    way.to_half_open(9)
    assert way.breaker == BreakerState.OPEN
    way.to_half_open(10)
    assert way.breaker == BreakerState.HALF_OPEN
    way.sent(10, 1)
    assert way.closed_by(10) == Closed.BREAKER  # one at a time
    way.ended(11, FINISHED, 10, 1)
    way.sent(11, 1)
    way.sent(11, 1)
    assert not way.allows_call(11)  # two
    way.ended(12, FINISHED, 11, 1)
    assert way.breaker == BreakerState.CLOSED  # as many as the platform takes
    assert way.allows_call(12)


def test_whoever_calls_before_the_timer_is_the_trial() -> None:
    """The time has come, and the timer that says so is late."""
    way = opened(spillway())
    way.sent(15, 1)
    assert way.breaker == BreakerState.HALF_OPEN
    assert not way.allows_call(15)


def test_failing_again_makes_the_rest_longer_up_to_a_bound() -> None:
    way, now_ns, rests = opened(spillway()), 0, []
    for _ in range(4):
        rests.append(way.wakes_ns(now_ns) - now_ns)
        now_ns = way.wakes_ns(now_ns)
        way.to_half_open(now_ns)
        call(way, now_ns, FAILED)
    assert rests == [10, 20, 30, 30]


def test_what_fails_late_of_what_was_out_when_the_breaker_opened_does_not_count_again() -> None:
    way = spillway()
    for _ in range(4):
        way.sent(0, 1)
    for _ in range(4):
        way.ended(5, FAILED, 0, 1)
    assert way.wakes_ns(5) == 15


def test_successes_of_before_the_breaker_opened_do_not_close_it() -> None:
    """Four were out when it opened. They come back while one call at a time is tried."""
    way = spillway()
    for _ in range(4):
        way.sent(0, 1)
    opened(way, 1)
    way.ended(2, FINISHED, 0, 1)
    way.to_half_open(11)
    for _ in range(2):
        way.ended(12, FINISHED, 0, 1)
    assert way.breaker == BreakerState.HALF_OPEN
    way.sent(12, 1)
    assert not way.allows_call(12)  # still one at a time
    way.ended(13, FINISHED, 0, 1)
    assert way.breaker == BreakerState.HALF_OPEN
    way.ended(14, FINISHED, 12, 1)
    way.sent(14, 1)
    way.ended(15, FINISHED, 14, 1)
    assert (way.breaker, way.in_flight) == (BreakerState.CLOSED, 0)


def test_failures_of_before_the_breaker_opened_do_not_open_it_again() -> None:
    way = spillway()
    way.sent(0, 1)
    opened(way, 1)
    way.to_half_open(11)
    way.ended(12, LOST, 0, 1)
    way.refused(12, 1, 0, is_gone=True)
    assert way.breaker == BreakerState.HALF_OPEN


def test_calls_that_hang_since_before_do_not_keep_the_platform_from_being_tried() -> None:
    way = spillway()
    for _ in range(3):
        way.sent(0, 1)
    opened(way, 1)
    way.to_half_open(11)
    assert (way.in_flight, way.allows_call(11)) == (3, True)


def test_a_trial_that_succeeds_after_another_failed_does_not_close_it() -> None:
    way = opened(spillway())
    way.to_half_open(10)
    call(way, 10, FINISHED)
    way.sent(11, 1)
    way.sent(11, 1)
    way.ended(12, FAILED, 11, 1)
    assert way.breaker == BreakerState.OPEN
    way.ended(13, FINISHED, 11, 1)
    assert way.breaker == BreakerState.OPEN


# --- the back-off -------------------------------------------------------------------------------


def test_a_platform_that_goes_on_refusing_is_asked_less_and_less_often() -> None:
    """Those that were out together count once; one that succeeds ends it."""
    way, now_ns, waits = spillway(BreakerConfig(cooldown_ns=6)), 0, []
    for _ in range(5):
        way.refused(now_ns, 1, now_ns, is_gone=False)
        way.refused(now_ns, 1, now_ns, is_gone=False)
        assert way.closed_by(now_ns) == Closed.BACKOFF
        waits.append(way.wakes_ns(now_ns) - now_ns)
        now_ns = way.wakes_ns(now_ns)
    assert waits == [1, 2, 4, 6, 6]
    call(way, now_ns, FINISHED)
    way.refused(now_ns, 1, now_ns, is_gone=False)
    assert way.wakes_ns(now_ns) == now_ns + 1
    assert way.breaker == BreakerState.CLOSED


def test_a_platform_that_is_not_there_has_failed() -> None:
    way = spillway()
    way.refused(0, 1, 0, is_gone=True)
    assert way.breaker == BreakerState.CLOSED
    way.refused(1, 1, 1, is_gone=True)
    assert way.breaker == BreakerState.OPEN
    assert way.wakes_ns(1) == 11


def test_each_reason_ends_by_itself() -> None:
    """The budget's minute is over before the breaker's rest is."""
    guard = BreakerConfig(
        failure_threshold=1,
        cooldown_ns=2 * MINUTE_NS,
        cooldown_max_ns=MINUTE_NS,
        usd_per_minute=2.0,
    )
    way = spillway(guard)
    call(way, 1, FINISHED)
    way.refused(1, S, 1, is_gone=False)
    assert (way.closed_by(1), way.wakes_ns(1)) == (Closed.BACKOFF, 1 + S)
    call(way, 1 + S, FAILED)
    assert way.closed_by(1 + S) == Closed.BREAKER
    assert way.wakes_ns(1 + S) == 1 + S + 2 * MINUTE_NS
    way.to_half_open(1 + S + 2 * MINUTE_NS)
    assert way.allows_call(1 + S + 2 * MINUTE_NS)


# --- budgets ------------------------------------------------------------------------------------


def test_a_budget_closes_it_until_the_next_minute() -> None:
    way = spillway(BreakerConfig(usd_per_minute=2.0))
    call(way, S, FINISHED)
    call(way, S, FINISHED)
    assert way.closed_by(MINUTE_NS - 1) == Closed.BUDGET
    assert way.wakes_ns(S) == MINUTE_NS
    assert way.allows_call(MINUTE_NS)
    call(way, MINUTE_NS, FINISHED)
    assert way.allows_call(MINUTE_NS)


def test_a_budget_closes_it_until_the_next_day() -> None:
    way = spillway(BreakerConfig(usd_per_day=1.0))
    call(way, S, FINISHED)
    assert not way.allows_call(DAY_NS - 1)
    assert way.wakes_ns(S) == DAY_NS
    assert way.allows_call(DAY_NS)


def test_what_is_out_counts_before_it_is_billed() -> None:
    """Else a burst would be sent out whole before the first bill comes."""
    way = spillway(BreakerConfig(usd_per_minute=2.0))
    way.sent(0, 1)
    way.sent(0, 1)
    assert not way.allows_call(0)


@pytest.mark.parametrize(
    "guard", [BreakerConfig(usd_per_minute=2.0), BreakerConfig(usd_per_day=2.0)]
)
def test_what_was_refused_can_be_spent_again_at_once(guard: BreakerConfig) -> None:
    """Nothing is spent, so nothing is closed: not for the minute, and not for the day."""
    way = spillway(guard)
    way.sent(0, 1)
    way.sent(0, 1)
    assert way.closed_by(0) == Closed.BUDGET
    way.ended(1, REFUSED, 0, 1)
    way.ended(1, REFUSED, 0, 1)
    assert (way.closed_by(1), way.wakes_ns(1), way.spent_usd(1)) == (Closed.NOT, 0, 0.0)


def test_what_was_cheaper_than_expected_can_be_spent_again_at_once() -> None:
    """A second may be needed, for a dollar, and a tenth of one was."""
    way = spillway(BreakerConfig(usd_per_day=1.5), FaasPlatform(1 << 30, usd_per_gb_s=1.0))
    way.sent(0, S)
    way.sent(0, S)
    assert not way.allows_call(0)
    way.ended(S // 10, FINISHED, 0, S)
    assert way.allows_call(S // 10)
    assert way.spent_usd(S // 10) == pytest.approx(0.1)


def test_what_is_out_when_a_minute_ends_counts_in_the_next() -> None:
    """It is paid in that one; what the first one had for it is not to be had twice."""
    way = spillway(BreakerConfig(usd_per_minute=2.0))
    way.sent(MINUTE_NS - 1, 1)
    way.sent(MINUTE_NS - 1, 1)
    assert not way.allows_call(MINUTE_NS)
    way.ended(MINUTE_NS + 1, FINISHED, MINUTE_NS - 1, 1)
    assert not way.allows_call(MINUTE_NS + 1)
    way.ended(MINUTE_NS + 2, REFUSED, MINUTE_NS - 1, 1)
    assert way.allows_call(MINUTE_NS + 2)
    way.sent(MINUTE_NS + 3, 1)
    assert not way.allows_call(MINUTE_NS + 3)
    assert way.wakes_ns(MINUTE_NS + 3) == 2 * MINUTE_NS


STATES = st.sampled_from([FINISHED, FAILED, LOST, REFUSED, None])


@given(st.lists(st.tuples(STATES, st.integers(0, 40)), max_size=80))
def test_no_minute_and_no_day_costs_more_than_its_budget_and_one_call(
    steps: list[tuple[int | None, int]],
) -> None:
    """A call takes 40 s at most, for a dollar. None sends one, if it may go; else one ends so."""
    guard = BreakerConfig(failure_threshold=1_000, usd_per_minute=3.0, usd_per_day=20.0)
    way = spillway(guard, FaasPlatform(1 << 30, usd_per_gb_s=1 / 40))
    out: list[int] = []
    paid: dict[int, float] = {}  # by when a minute began

    def end(now_ns: int, state: int) -> None:
        sent_ns = out.pop(0)
        way.ended(now_ns, state, sent_ns, 40 * S)
        minute = now_ns // MINUTE_NS
        usd = 0.0 if state == REFUSED else way.platform.usd(now_ns - sent_ns)
        paid[minute] = paid.get(minute, 0.0) + usd

    now_ns = 0
    for state, length_s in steps:
        now_ns += length_s * S
        while out and out[0] + 40 * S <= now_ns:
            end(out[0] + 40 * S, FINISHED)
        if state is not None and out:
            end(now_ns, state)
        elif state is None and way.allows_call(now_ns):
            way.sent(now_ns, 40 * S)
            out.append(now_ns)
    assert all(usd <= 3.0 + 1.0 + 1e-9 for usd in paid.values())
    assert sum(paid.values()) <= 20.0 + 1.0 + 1e-9  # all of it is within a day
    assert way.spent_usd(now_ns) == pytest.approx(sum(paid.values()))


# --- instances that are kept warm ---------------------------------------------------------------

VARIANT = make_function(0, start_ns=S).variants[0]
OTHER = make_function(1, start_ns=S).variants[0]
# A call that keeps an instance warm costs a cent, every 100 s; to start one first, a dollar more. A
# provisioned instance costs a cent a second.
TERMS = FaasPlatform(
    1 << 30,
    concurrency_max=100,
    keep_alive_ns=200 * S,
    usd_per_gb_s=1.0,
    ping_ns=S // 100,
    provisioned_usd_per_gb_s=0.01,
)


def warm(guard: BreakerConfig, count: int, *, is_provisioned: bool = False) -> CircuitBreaker:
    way = spillway(guard, TERMS)
    way.wish(VARIANT, count, is_provisioned)
    return way


def granted(way: CircuitBreaker, now_ns: int) -> list[tuple[int, bool]]:
    return [(wish.count, wish.is_provisioned) for wish in way.grant(now_ns)]


def test_without_budgets_every_wish_is_granted_once() -> None:
    way = warm(BreakerConfig(), 50)
    assert granted(way, 0) == [(50, False)]
    assert granted(way, S) == []
    way.wish(VARIANT, 3, True)
    assert granted(way, 2 * S) == [(3, True)]
    way.wish(VARIANT, 0, False)
    assert granted(way, 3 * S) == [(0, False)]


def test_what_keeps_instances_warm_is_spent() -> None:
    """Ten starts, ten calls at once, and from then on ten calls in 100 s."""
    way = warm(BreakerConfig(), 10)
    way.grant(0)
    assert way.spent_usd(0) == pytest.approx(10.1)
    assert way.spent_usd(300 * S) == pytest.approx(10.1 + 0.3)


def test_what_is_provisioned_is_spent_by_the_second() -> None:
    way = warm(BreakerConfig(), 10, is_provisioned=True)
    way.grant(0)
    assert way.spent_usd(100 * S) == pytest.approx(10.0)
    way.wish(VARIANT, 0, True)
    way.grant(100 * S)
    assert way.spent_usd(500 * S) == pytest.approx(10.0)


def test_what_is_kept_warm_is_paid_before_calls_are() -> None:
    """Of six dollars a minute three are for five instances, to its end: three calls may go."""
    way = warm(BreakerConfig(usd_per_minute=6.0), 5, is_provisioned=True)
    assert granted(way, 0) == [(5, True)]
    for _ in range(3):
        assert way.allows_call(0)
        way.sent(0, S)
        way.ended(S, FINISHED, 0, S)
    assert way.closed_by(S) == Closed.BUDGET
    assert way.closed_by(MINUTE_NS - 1) == Closed.BUDGET
    assert way.allows_call(MINUTE_NS)
    assert way.spent_usd(MINUTE_NS) == pytest.approx(3.0 + 3.0)


@pytest.mark.parametrize(
    ("guard", "count"),
    [
        (BreakerConfig(usd_per_minute=6.0), 5),
        (BreakerConfig(usd_per_day=10.0), 0),
        (BreakerConfig(usd_per_day=2 * 36.0), 1),
        (BreakerConfig(usd_per_minute=6.0, usd_per_day=4 * 36.0), 2),
        (BreakerConfig(usd_per_minute=0.0), 0),
    ],
)
def test_half_of_a_budget_at_most_is_for_instances_that_are_kept_warm(
    guard: BreakerConfig, count: int
) -> None:
    """All minute long; and of a day, for an hour at least."""
    way = warm(guard, 50, is_provisioned=True)
    assert granted(way, 0) == ([(count, True)] if count else [])
    assert way.allows_call(0) == (guard.usd_per_minute > 0)


def test_the_first_wish_comes_first_where_there_is_too_little_for_two() -> None:
    way = warm(BreakerConfig(usd_per_minute=6.0), 4, is_provisioned=True)
    way.wish(OTHER, 4, True)
    assert granted(way, 0) == [(4, True), (1, True)]
    way.wish(VARIANT, 2, True)
    assert granted(way, S) == [(2, True), (3, True)]


def test_starts_that_there_is_no_money_for_wait() -> None:
    """Each of 50 costs a dollar at once, and the minute has ten."""
    way = warm(BreakerConfig(usd_per_minute=10.0), 50)
    ((count, _),) = granted(way, 0)
    assert 5 <= count <= 9
    assert way.spent_usd(0) <= 10.0
    assert way.is_grant_due(MINUTE_NS)
    ((more, _),) = granted(way, MINUTE_NS)
    assert count < more <= 2 * count + 1


def test_calls_that_keep_instances_warm_end_with_the_breaker_and_begin_when_it_is_closed() -> None:
    way = warm(replace(GUARD, cooldown_ns=10 * S), 5)
    way.grant(0)
    opened(way, S)
    assert way.is_grant_due(S)
    assert granted(way, S) == [(0, False)]
    spent_usd = way.spent_usd(S)
    way.to_half_open(11 * S)
    assert granted(way, 11 * S) == []
    assert way.spent_usd(11 * S) == spent_usd
    for _ in range(7):
        call(way, 11 * S, FINISHED)
    assert way.breaker == BreakerState.CLOSED
    assert way.is_grant_due(11 * S)
    assert granted(way, 11 * S) == [(5, False)]
    assert not way.is_grant_due(11 * S)


def test_provisioned_instances_outlast_one_opening_of_the_breaker_and_no_second() -> None:
    """They take long to come back. While it is open there will not be more of them."""
    way = warm(GUARD, 5, is_provisioned=True)
    way.grant(0)
    opened(way, S)
    way.wish(VARIANT, 9, True)
    assert granted(way, S) == []
    way.to_half_open(S + 10)
    call(way, S + 10, FAILED)
    assert way.is_grant_due(S + 10)
    assert granted(way, S + 10) == [(0, False)]
    way.to_half_open(S + 30)
    for _ in range(7):
        call(way, S + 30, FINISHED)
    assert granted(way, S + 30) == [(9, True)]


def test_a_day_that_is_spent_withdraws_what_is_kept_warm_until_the_next() -> None:
    """A call of 990 dollars, 9.90 for the instance, and 1.20 for its next two minutes."""
    way = warm(BreakerConfig(usd_per_day=1_000.0), 1, is_provisioned=True)
    way.grant(0)
    way.sent(0, 1_500 * S)
    assert not way.is_grant_due(0)  # that may come back
    way.ended(990 * S, FINISHED, 0, 1_500 * S)
    assert way.is_grant_due(990 * S)
    assert granted(way, 990 * S) == [(0, False)]
    spent_usd = way.spent_usd(990 * S)
    assert spent_usd == pytest.approx(999.9)
    assert way.allows_call(990 * S)  # what the instance no longer needs is for calls
    assert way.wakes_ns(990 * S) == DAY_NS
    assert granted(way, DAY_NS - 1) == []
    assert way.spent_usd(DAY_NS - 1) == spent_usd
    assert way.is_grant_due(DAY_NS)
    assert granted(way, DAY_NS) == [(1, True)]
    assert not way.is_grant_due(DAY_NS)


def test_half_of_a_day_that_went_into_what_is_kept_warm_leaves_the_other_half_to_calls() -> None:
    """50 dollars last for 5,000 s. It is looked at every minute, though nobody calls."""
    way = warm(BreakerConfig(usd_per_day=100.0), 1, is_provisioned=True)
    way.grant(0)
    now_ns = 0
    while not way.is_grant_due(now_ns):
        assert way.wakes_ns(now_ns) == now_ns + MINUTE_NS
        now_ns += MINUTE_NS
    assert 5_000 * S - 3 * MINUTE_NS < now_ns <= 5_000 * S
    assert granted(way, now_ns) == [(0, False)]
    assert way.spent_usd(DAY_NS - 1) <= 50.0
    assert way.allows_call(now_ns)


def test_a_minute_that_is_spent_withdraws_nothing() -> None:
    way = warm(BreakerConfig(usd_per_minute=6.0), 5, is_provisioned=True)
    way.grant(0)
    way.sent(0, 4 * S)
    way.ended(4 * S, FINISHED, 0, 4 * S)
    assert way.closed_by(4 * S) == Closed.BUDGET
    assert not way.is_grant_due(4 * S)
    assert granted(way, 4 * S) == []


def test_where_no_instance_stays_calling_keeps_none_and_costs_nothing() -> None:
    way = spillway(BreakerConfig(usd_per_minute=1.0), replace(TERMS, keep_alive_ns=0))
    way.wish(VARIANT, 5, False)
    assert granted(way, 0) == [(5, False)]
    assert way.spent_usd(MINUTE_NS) == 0.0
