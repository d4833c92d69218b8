"""The circuit breaker, the back-off and the spend limits before every pay-per-call pool."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.circuit_breaker import DAY_NS, BreakerState, CallBlock, CircuitBreaker
from headgate.core.clock import MINUTE_NS, SECOND_NS
from headgate.core.model import BreakerConfig, FaasPlatform, Pool, Tier
from headgate.core.states import BatchState

from .sample_apps import make_function

BREAKER_CONFIG = BreakerConfig(failure_threshold=2, cooldown_ns=10, cooldown_max_ns=30)
PLATFORM = FaasPlatform(1 << 30, concurrency_max=4, usd_per_request=1.0)
FINISHED, FAILED, LOST, REFUSED = (
    BatchState.FINISHED,
    BatchState.FAILED,
    BatchState.LOST,
    BatchState.REFUSED,
)
S = SECOND_NS


def make_breaker(
    breaker_config: BreakerConfig = BREAKER_CONFIG, platform: FaasPlatform = PLATFORM
) -> CircuitBreaker:
    return CircuitBreaker(
        Pool(0, "cloud", Tier.SERVERLESS, faas=platform, breaker=breaker_config), platform
    )


def call(breaker: CircuitBreaker, now_ns: int, state: int) -> None:
    assert breaker.allows_call(now_ns)
    breaker.on_sent(now_ns, 1)
    breaker.on_ended(now_ns, state, now_ns, 1)


def opened(breaker: CircuitBreaker, now_ns: int = 0) -> CircuitBreaker:
    """The breaker has just opened."""
    call(breaker, now_ns, FAILED)
    call(breaker, now_ns, FAILED)
    assert breaker.state == BreakerState.OPEN
    return breaker


def test_failures_in_a_row_open_the_breaker_and_one_success_between_them_does_not() -> None:
    breaker = make_breaker()
    for state in (FAILED, FINISHED, LOST):
        call(breaker, 0, state)
    assert breaker.state == BreakerState.CLOSED
    call(breaker, 0, FAILED)
    assert breaker.state == BreakerState.OPEN
    assert breaker.blocked_by(9) == CallBlock.BREAKER
    assert breaker.allows_call(10)


def test_what_the_platform_refused_is_no_failure_and_costs_nothing() -> None:
    breaker = make_breaker()
    for _ in range(10):
        call(breaker, 0, REFUSED)
    assert breaker.state == BreakerState.CLOSED
    assert breaker.spent_usd(0) == 0.0


def test_a_platform_that_was_left_alone_is_trusted_again_step_by_step() -> None:
    breaker = opened(make_breaker())
    breaker.to_half_open(9)
    assert breaker.state == BreakerState.OPEN
    breaker.to_half_open(10)
    assert breaker.state == BreakerState.HALF_OPEN
    breaker.on_sent(10, 1)
    assert breaker.blocked_by(10) == CallBlock.BREAKER  # one at a time
    breaker.on_ended(11, FINISHED, 10, 1)
    breaker.on_sent(11, 1)
    breaker.on_sent(11, 1)
    assert not breaker.allows_call(11)  # two
    breaker.on_ended(12, FINISHED, 11, 1)
    assert breaker.state == BreakerState.CLOSED  # as many as the platform takes
    assert breaker.allows_call(12)


def test_a_call_before_the_timer_is_the_half_open_probe() -> None:
    """The time has come, and the timer that says so is late."""
    breaker = opened(make_breaker())
    breaker.on_sent(15, 1)
    assert breaker.state == BreakerState.HALF_OPEN
    assert not breaker.allows_call(15)


def test_failing_again_makes_the_rest_longer_up_to_a_bound() -> None:
    breaker, now_ns, cooldowns = opened(make_breaker()), 0, []
    for _ in range(4):
        cooldowns.append(breaker.next_check_ns(now_ns) - now_ns)
        now_ns = breaker.next_check_ns(now_ns)
        breaker.to_half_open(now_ns)
        call(breaker, now_ns, FAILED)
    assert cooldowns == [10, 20, 30, 30]


def test_what_fails_late_of_what_was_out_when_the_breaker_opened_does_not_count_again() -> None:
    breaker = make_breaker()
    for _ in range(4):
        breaker.on_sent(0, 1)
    for _ in range(4):
        breaker.on_ended(5, FAILED, 0, 1)
    assert breaker.next_check_ns(5) == 15


def test_successes_of_before_the_breaker_opened_do_not_close_it() -> None:
    """Four were out when it opened. They come back while one call at a time is tried."""
    breaker = make_breaker()
    for _ in range(4):
        breaker.on_sent(0, 1)
    opened(breaker, 1)
    breaker.on_ended(2, FINISHED, 0, 1)
    breaker.to_half_open(11)
    for _ in range(2):
        breaker.on_ended(12, FINISHED, 0, 1)
    assert breaker.state == BreakerState.HALF_OPEN
    breaker.on_sent(12, 1)
    assert not breaker.allows_call(12)  # still one at a time
    breaker.on_ended(13, FINISHED, 0, 1)
    assert breaker.state == BreakerState.HALF_OPEN
    breaker.on_ended(14, FINISHED, 12, 1)
    breaker.on_sent(14, 1)
    breaker.on_ended(15, FINISHED, 14, 1)
    assert (breaker.state, breaker.in_flight) == (BreakerState.CLOSED, 0)


def test_failures_of_before_the_breaker_opened_do_not_open_it_again() -> None:
    breaker = make_breaker()
    breaker.on_sent(0, 1)
    opened(breaker, 1)
    breaker.to_half_open(11)
    breaker.on_ended(12, LOST, 0, 1)
    breaker.on_refused(12, 1, 0, is_gone=True)
    assert breaker.state == BreakerState.HALF_OPEN


def test_calls_that_hang_since_before_do_not_keep_the_platform_from_being_tried() -> None:
    breaker = make_breaker()
    for _ in range(3):
        breaker.on_sent(0, 1)
    opened(breaker, 1)
    breaker.to_half_open(11)
    assert (breaker.in_flight, breaker.allows_call(11)) == (3, True)


def test_a_trial_that_succeeds_after_another_failed_does_not_close_it() -> None:
    breaker = opened(make_breaker())
    breaker.to_half_open(10)
    call(breaker, 10, FINISHED)
    breaker.on_sent(11, 1)
    breaker.on_sent(11, 1)
    breaker.on_ended(12, FAILED, 11, 1)
    assert breaker.state == BreakerState.OPEN
    breaker.on_ended(13, FINISHED, 11, 1)
    assert breaker.state == BreakerState.OPEN


def test_a_platform_that_goes_on_refusing_is_asked_less_and_less_often() -> None:
    """Those that were out together count once; one that succeeds ends it."""
    breaker, now_ns, waits = make_breaker(BreakerConfig(cooldown_ns=6)), 0, []
    for _ in range(5):
        breaker.on_refused(now_ns, 1, now_ns, is_gone=False)
        breaker.on_refused(now_ns, 1, now_ns, is_gone=False)
        assert breaker.blocked_by(now_ns) == CallBlock.BACKOFF
        waits.append(breaker.next_check_ns(now_ns) - now_ns)
        now_ns = breaker.next_check_ns(now_ns)
    assert waits == [1, 2, 4, 6, 6]
    call(breaker, now_ns, FINISHED)
    breaker.on_refused(now_ns, 1, now_ns, is_gone=False)
    assert breaker.next_check_ns(now_ns) == now_ns + 1
    assert breaker.state == BreakerState.CLOSED


def test_a_platform_that_is_not_there_has_failed() -> None:
    breaker = make_breaker()
    breaker.on_refused(0, 1, 0, is_gone=True)
    assert breaker.state == BreakerState.CLOSED
    breaker.on_refused(1, 1, 1, is_gone=True)
    assert breaker.state == BreakerState.OPEN
    assert breaker.next_check_ns(1) == 11


def test_each_reason_ends_by_itself() -> None:
    """The budget's minute is over before the breaker's rest is."""
    breaker_config = BreakerConfig(
        failure_threshold=1,
        cooldown_ns=2 * MINUTE_NS,
        cooldown_max_ns=MINUTE_NS,
        usd_per_minute=2.0,
    )
    breaker = make_breaker(breaker_config)
    call(breaker, 1, FINISHED)
    breaker.on_refused(1, S, 1, is_gone=False)
    assert (breaker.blocked_by(1), breaker.next_check_ns(1)) == (CallBlock.BACKOFF, 1 + S)
    call(breaker, 1 + S, FAILED)
    assert breaker.blocked_by(1 + S) == CallBlock.BREAKER
    assert breaker.next_check_ns(1 + S) == 1 + S + 2 * MINUTE_NS
    breaker.to_half_open(1 + S + 2 * MINUTE_NS)
    assert breaker.allows_call(1 + S + 2 * MINUTE_NS)


def test_a_budget_closes_it_until_the_next_minute() -> None:
    breaker = make_breaker(BreakerConfig(usd_per_minute=2.0))
    call(breaker, S, FINISHED)
    call(breaker, S, FINISHED)
    assert breaker.blocked_by(MINUTE_NS - 1) == CallBlock.BUDGET
    assert breaker.next_check_ns(S) == MINUTE_NS
    assert breaker.allows_call(MINUTE_NS)
    call(breaker, MINUTE_NS, FINISHED)
    assert breaker.allows_call(MINUTE_NS)


def test_a_budget_closes_it_until_the_next_day() -> None:
    breaker = make_breaker(BreakerConfig(usd_per_day=1.0))
    call(breaker, S, FINISHED)
    assert not breaker.allows_call(DAY_NS - 1)
    assert breaker.next_check_ns(S) == DAY_NS
    assert breaker.allows_call(DAY_NS)


def test_what_is_out_counts_before_it_is_billed() -> None:
    """Else a burst would be sent out whole before the first bill comes."""
    breaker = make_breaker(BreakerConfig(usd_per_minute=2.0))
    breaker.on_sent(0, 1)
    breaker.on_sent(0, 1)
    assert not breaker.allows_call(0)


@pytest.mark.parametrize(
    "breaker_config", [BreakerConfig(usd_per_minute=2.0), BreakerConfig(usd_per_day=2.0)]
)
def test_what_was_refused_can_be_spent_again_at_once(breaker_config: BreakerConfig) -> None:
    """Nothing is spent, so nothing is closed: not for the minute, and not for the day."""
    breaker = make_breaker(breaker_config)
    breaker.on_sent(0, 1)
    breaker.on_sent(0, 1)
    assert breaker.blocked_by(0) == CallBlock.BUDGET
    breaker.on_ended(1, REFUSED, 0, 1)
    breaker.on_ended(1, REFUSED, 0, 1)
    assert (breaker.blocked_by(1), breaker.next_check_ns(1), breaker.spent_usd(1)) == (
        CallBlock.NONE,
        0,
        0.0,
    )


def test_what_was_cheaper_than_expected_can_be_spent_again_at_once() -> None:
    """A second may be needed, for a dollar, and a tenth of one was."""
    breaker = make_breaker(BreakerConfig(usd_per_day=1.5), FaasPlatform(1 << 30, usd_per_gb_s=1.0))
    breaker.on_sent(0, S)
    breaker.on_sent(0, S)
    assert not breaker.allows_call(0)
    breaker.on_ended(S // 10, FINISHED, 0, S)
    assert breaker.allows_call(S // 10)
    assert breaker.spent_usd(S // 10) == pytest.approx(0.1)


def test_what_is_out_when_a_minute_ends_counts_in_the_next() -> None:
    """It is paid in that one; what the first one had for it is not to be had twice."""
    breaker = make_breaker(BreakerConfig(usd_per_minute=2.0))
    breaker.on_sent(MINUTE_NS - 1, 1)
    breaker.on_sent(MINUTE_NS - 1, 1)
    assert not breaker.allows_call(MINUTE_NS)
    breaker.on_ended(MINUTE_NS + 1, FINISHED, MINUTE_NS - 1, 1)
    assert not breaker.allows_call(MINUTE_NS + 1)
    breaker.on_ended(MINUTE_NS + 2, REFUSED, MINUTE_NS - 1, 1)
    assert breaker.allows_call(MINUTE_NS + 2)
    breaker.on_sent(MINUTE_NS + 3, 1)
    assert not breaker.allows_call(MINUTE_NS + 3)
    assert breaker.next_check_ns(MINUTE_NS + 3) == 2 * MINUTE_NS


STATES = st.sampled_from([FINISHED, FAILED, LOST, REFUSED, None])


@given(st.lists(st.tuples(STATES, st.integers(0, 40)), max_size=80))
def test_no_minute_and_no_day_costs_more_than_its_budget_and_one_call(
    steps: list[tuple[int | None, int]],
) -> None:
    """A call takes 40 s at most, for a dollar. None sends one, if it may go; else one ends so."""
    breaker_config = BreakerConfig(failure_threshold=1_000, usd_per_minute=3.0, usd_per_day=20.0)
    breaker = make_breaker(breaker_config, FaasPlatform(1 << 30, usd_per_gb_s=1 / 40))
    out: list[int] = []
    paid: dict[int, float] = {}  # by when a minute began

    def end(now_ns: int, state: int) -> None:
        sent_ns = out.pop(0)
        breaker.on_ended(now_ns, state, sent_ns, 40 * S)
        minute = now_ns // MINUTE_NS
        usd = 0.0 if state == REFUSED else breaker.platform.usd(now_ns - sent_ns)
        paid[minute] = paid.get(minute, 0.0) + usd

    now_ns = 0
    for state, length_s in steps:
        now_ns += length_s * S
        while out and out[0] + 40 * S <= now_ns:
            end(out[0] + 40 * S, FINISHED)
        if state is not None and out:
            end(now_ns, state)
        elif state is None and breaker.allows_call(now_ns):
            breaker.on_sent(now_ns, 40 * S)
            out.append(now_ns)
    assert all(usd <= 3.0 + 1.0 + 1e-9 for usd in paid.values())
    assert sum(paid.values()) <= 20.0 + 1.0 + 1e-9  # all of it is within a day
    assert breaker.spent_usd(now_ns) == pytest.approx(sum(paid.values()))


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


def warm(
    breaker_config: BreakerConfig, count: int, *, is_provisioned: bool = False
) -> CircuitBreaker:
    breaker = make_breaker(breaker_config, TERMS)
    breaker.set_warm_target(VARIANT, count, is_provisioned)
    return breaker


def granted(breaker: CircuitBreaker, now_ns: int) -> list[tuple[int, bool]]:
    return [(order.count, order.is_provisioned) for order in breaker.grant(now_ns)]


def test_without_budgets_every_warm_target_is_granted_once() -> None:
    breaker = warm(BreakerConfig(), 50)
    assert granted(breaker, 0) == [(50, False)]
    assert granted(breaker, S) == []
    breaker.set_warm_target(VARIANT, 3, True)
    assert granted(breaker, 2 * S) == [(3, True)]
    breaker.set_warm_target(VARIANT, 0, False)
    assert granted(breaker, 3 * S) == [(0, False)]


def test_what_keeps_instances_warm_is_spent() -> None:
    """Ten starts, ten calls at once, and from then on ten calls in 100 s."""
    breaker = warm(BreakerConfig(), 10)
    breaker.grant(0)
    assert breaker.spent_usd(0) == pytest.approx(10.1)
    assert breaker.spent_usd(300 * S) == pytest.approx(10.1 + 0.3)


def test_what_is_provisioned_is_spent_by_the_second() -> None:
    breaker = warm(BreakerConfig(), 10, is_provisioned=True)
    breaker.grant(0)
    assert breaker.spent_usd(100 * S) == pytest.approx(10.0)
    breaker.set_warm_target(VARIANT, 0, True)
    breaker.grant(100 * S)
    assert breaker.spent_usd(500 * S) == pytest.approx(10.0)


def test_what_is_kept_warm_is_paid_before_calls_are() -> None:
    """Of six dollars a minute three are for five instances, to its end: three calls may go."""
    breaker = warm(BreakerConfig(usd_per_minute=6.0), 5, is_provisioned=True)
    assert granted(breaker, 0) == [(5, True)]
    for _ in range(3):
        assert breaker.allows_call(0)
        breaker.on_sent(0, S)
        breaker.on_ended(S, FINISHED, 0, S)
    assert breaker.blocked_by(S) == CallBlock.BUDGET
    assert breaker.blocked_by(MINUTE_NS - 1) == CallBlock.BUDGET
    assert breaker.allows_call(MINUTE_NS)
    assert breaker.spent_usd(MINUTE_NS) == pytest.approx(3.0 + 3.0)


@pytest.mark.parametrize(
    ("breaker_config", "count"),
    [
        (BreakerConfig(usd_per_minute=6.0), 5),
        (BreakerConfig(usd_per_day=10.0), 0),
        (BreakerConfig(usd_per_day=2 * 36.0), 1),
        (BreakerConfig(usd_per_minute=6.0, usd_per_day=4 * 36.0), 2),
        (BreakerConfig(usd_per_minute=0.0), 0),
    ],
)
def test_half_of_a_budget_at_most_is_for_instances_that_are_kept_warm(
    breaker_config: BreakerConfig, count: int
) -> None:
    """All minute long; and of a day, for an hour at least."""
    breaker = warm(breaker_config, 50, is_provisioned=True)
    assert granted(breaker, 0) == ([(count, True)] if count else [])
    assert breaker.allows_call(0) == (breaker_config.usd_per_minute > 0)


def test_the_first_warm_target_is_granted_first_if_the_budget_is_too_small_for_two() -> None:
    breaker = warm(BreakerConfig(usd_per_minute=6.0), 4, is_provisioned=True)
    breaker.set_warm_target(OTHER, 4, True)
    assert granted(breaker, 0) == [(4, True), (1, True)]
    breaker.set_warm_target(VARIANT, 2, True)
    assert granted(breaker, S) == [(2, True), (3, True)]


def test_starts_that_there_is_no_money_for_wait() -> None:
    """Each of 50 costs a dollar at once, and the minute has ten."""
    breaker = warm(BreakerConfig(usd_per_minute=10.0), 50)
    ((count, _),) = granted(breaker, 0)
    assert 5 <= count <= 9
    assert breaker.spent_usd(0) <= 10.0
    assert breaker.is_grant_due(MINUTE_NS)
    ((more, _),) = granted(breaker, MINUTE_NS)
    assert count < more <= 2 * count + 1


def test_calls_that_keep_instances_warm_end_with_the_breaker_and_begin_when_it_is_closed() -> None:
    breaker = warm(replace(BREAKER_CONFIG, cooldown_ns=10 * S), 5)
    breaker.grant(0)
    opened(breaker, S)
    assert breaker.is_grant_due(S)
    assert granted(breaker, S) == [(0, False)]
    spent_usd = breaker.spent_usd(S)
    breaker.to_half_open(11 * S)
    assert granted(breaker, 11 * S) == []
    assert breaker.spent_usd(11 * S) == spent_usd
    for _ in range(7):
        call(breaker, 11 * S, FINISHED)
    assert breaker.state == BreakerState.CLOSED
    assert breaker.is_grant_due(11 * S)
    assert granted(breaker, 11 * S) == [(5, False)]
    assert not breaker.is_grant_due(11 * S)


def test_provisioned_instances_outlast_one_opening_of_the_breaker_and_no_second() -> None:
    """They take long to come back. While it is open there will not be more of them."""
    breaker = warm(BREAKER_CONFIG, 5, is_provisioned=True)
    breaker.grant(0)
    opened(breaker, S)
    breaker.set_warm_target(VARIANT, 9, True)
    assert granted(breaker, S) == []
    breaker.to_half_open(S + 10)
    call(breaker, S + 10, FAILED)
    assert breaker.is_grant_due(S + 10)
    assert granted(breaker, S + 10) == [(0, False)]
    breaker.to_half_open(S + 30)
    for _ in range(7):
        call(breaker, S + 30, FINISHED)
    assert granted(breaker, S + 30) == [(9, True)]


def test_a_day_that_is_spent_withdraws_what_is_kept_warm_until_the_next() -> None:
    """A call of 990 dollars, 9.90 for the instance, and 1.20 for its next two minutes."""
    breaker = warm(BreakerConfig(usd_per_day=1_000.0), 1, is_provisioned=True)
    breaker.grant(0)
    breaker.on_sent(0, 1_500 * S)
    assert not breaker.is_grant_due(0)  # that may come back
    breaker.on_ended(990 * S, FINISHED, 0, 1_500 * S)
    assert breaker.is_grant_due(990 * S)
    assert granted(breaker, 990 * S) == [(0, False)]
    spent_usd = breaker.spent_usd(990 * S)
    assert spent_usd == pytest.approx(999.9)
    assert breaker.allows_call(990 * S)  # what the instance no longer needs is for calls
    assert breaker.next_check_ns(990 * S) == DAY_NS
    assert granted(breaker, DAY_NS - 1) == []
    assert breaker.spent_usd(DAY_NS - 1) == spent_usd
    assert breaker.is_grant_due(DAY_NS)
    assert granted(breaker, DAY_NS) == [(1, True)]
    assert not breaker.is_grant_due(DAY_NS)


def test_half_of_a_day_that_went_into_what_is_kept_warm_leaves_the_other_half_to_calls() -> None:
    """50 dollars last for 5,000 s. The budget is checked every minute, even without calls."""
    breaker = warm(BreakerConfig(usd_per_day=100.0), 1, is_provisioned=True)
    breaker.grant(0)
    now_ns = 0
    while not breaker.is_grant_due(now_ns):
        assert breaker.next_check_ns(now_ns) == now_ns + MINUTE_NS
        now_ns += MINUTE_NS
    assert 5_000 * S - 3 * MINUTE_NS < now_ns <= 5_000 * S
    assert granted(breaker, now_ns) == [(0, False)]
    assert breaker.spent_usd(DAY_NS - 1) <= 50.0
    assert breaker.allows_call(now_ns)


def test_a_minute_that_is_spent_withdraws_nothing() -> None:
    breaker = warm(BreakerConfig(usd_per_minute=6.0), 5, is_provisioned=True)
    breaker.grant(0)
    breaker.on_sent(0, 4 * S)
    breaker.on_ended(4 * S, FINISHED, 0, 4 * S)
    assert breaker.blocked_by(4 * S) == CallBlock.BUDGET
    assert not breaker.is_grant_due(4 * S)
    assert granted(breaker, 4 * S) == []


def test_where_no_instance_stays_calling_keeps_none_and_costs_nothing() -> None:
    breaker = make_breaker(BreakerConfig(usd_per_minute=1.0), replace(TERMS, keep_alive_ns=0))
    breaker.set_warm_target(VARIANT, 5, False)
    assert granted(breaker, 0) == [(5, False)]
    assert breaker.spent_usd(MINUTE_NS) == 0.0
