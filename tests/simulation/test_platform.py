"""A function platform: how long its instances stay, how they are kept ready, and what it bills.

A call takes 10 ms, a start 5 ms: whoever waits for 15 ms has waited for a start.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.events import BatchRefused
from headgate.core.model import FaasPlatform
from headgate.core.policy import Policy, PolicyKind
from headgate.core.records import Node, Task
from headgate.metrics.columns import ResourceUse
from headgate.sim.faas import ProvisionedConcurrency

from .apps import CLOUD, MS, at_ms, make_app, run, waits_ms
from .policies import SPILL

Wish = tuple[int, int, bool]  # at what time in ms, how many, whether provisioned
S = 1_000 * MS
TERMS = FaasPlatform(1 << 30, usd_per_gb_s=1.0, keep_alive_ns=100 * MS, ping_ns=2 * MS)


def keeper(*wishes: Wish) -> PolicyKind:
    """Sends everything to the platform at once, and has it keep instances, at these times."""

    class Keeper(Policy):
        def on_task_ready(self, task: Task) -> None:
            if task.id == 0:
                for number, (at, _, _) in enumerate(wishes):
                    self.orders.set_timer("wish", at * MS, number)
            self.orders.dispatch_to_pool([task], self.view.app.pools[0])

        def on_capacity(self, node: Node) -> None:
            pass

        def on_timer(self, name: str, number: int) -> None:
            _, count, is_provisioned = wishes[number]
            app = self.view.app
            self.orders.keep_warm(
                app.variants[0], app.pools[0], count, is_provisioned=is_provisioned
            )

    return PolicyKind(Keeper)


def serve(
    platform: FaasPlatform, times_ms: tuple[int, ...], *wishes: Wish, network_ms: int = 0
) -> tuple[list[float], ResourceUse]:
    """How long each request took, and what became of the platform."""
    pool = replace(CLOUD, id=0, faas=platform, network_ns=network_ms * MS)
    app = make_app(start_ms=5, pools=(pool,))
    columns, _ = run(app, at_ms(*times_ms), policy=keeper(*wishes))
    (use,) = columns.resources
    return waits_ms(columns), use


# --- how long instances stay --------------------------------------------------------------------


def test_an_instance_stays_for_its_keep_alive() -> None:
    """It is idle from 15 on, then from 125: the third call comes a millisecond too late."""
    waits, use = serve(TERMS, (0, 115, 226))
    assert waits == [15.0, 10.0, 15.0]
    assert use.cold_starts == 2


def test_an_instance_that_is_too_old_is_not_used_again_however_busy_it_was() -> None:
    waits, _ = serve(replace(TERMS, age_max_ns=50 * MS), (0, 20, 40, 60, 80))
    assert waits == [15.0, 10.0, 10.0, 15.0, 10.0]


def test_the_one_used_last_is_used_first() -> None:
    """Two are there at 15. One is used now and then, so that the other one goes."""
    waits, use = serve(TERMS, (0, 0, 60, 110, 150, 150))
    assert waits == [15.0, 15.0, 10.0, 10.0, 10.0, 15.0]
    assert use.cold_starts == 3


# --- starts: the burst and its refill -----------------------------------------------------------


def test_the_burst_is_refilled_at_its_rate() -> None:
    """Two starts at once and ten more a second: the third waits for 100 ms, the fourth for 200."""
    cloud = replace(
        CLOUD,
        id=0,
        faas=replace(TERMS, burst_concurrency=2, burst_refill_per_s=10.0, keep_alive_ns=MS),
    )
    app = make_app(exec_ms=(1_000,), pools=(cloud,))
    columns, seen = run(app, at_ms(0, 0, 0, 0), policy=SPILL)
    waits = waits_ms(columns)
    assert waits[:2] == [1_000.0, 1_000.0]
    assert 1_100 <= waits[2] < 1_200 <= waits[3] < 1_300
    assert seen.count(BatchRefused) > 2


def test_a_burst_is_never_more_than_its_bound_however_long_it_rests() -> None:
    """After a minute without calls there are still but two starts at once."""
    cloud = replace(
        CLOUD,
        id=0,
        faas=replace(TERMS, burst_concurrency=2, burst_refill_per_s=10.0, keep_alive_ns=MS),
    )
    app = make_app(exec_ms=(1_000,), pools=(cloud,))
    columns, _ = run(app, at_ms(0, 60_000, 60_000, 60_000), policy=SPILL)
    waits = waits_ms(columns)
    assert waits[1:3] == [1_000.0, 1_000.0]
    assert waits[3] >= 1_100


# --- the bill of calls --------------------------------------------------------------------------


@pytest.mark.parametrize(("bills_start", "billed_ms"), [(True, 25), (False, 20)])
def test_a_start_is_on_the_bill_or_not(bills_start: bool, billed_ms: int) -> None:
    _, use = serve(replace(TERMS, bills_cold_start=bills_start), (0, 20))
    assert use.usage_usd == pytest.approx(billed_ms / 1_000)


def test_the_way_there_is_not_on_the_bill() -> None:
    waits, use = serve(TERMS, (0,), network_ms=7)
    assert waits == [29.0]
    assert use.usage_usd == pytest.approx(0.015)


# --- kept ready by calling ----------------------------------------------------------------------


def test_those_that_are_called_stay_for_longer_than_a_keep_alive() -> None:
    """Three are asked for at 20, of which one is there; at 990 nobody waits for a start."""
    waits, use = serve(TERMS, (0, 990, 990, 990, 990), (20, 3, False))
    assert waits == [15.0, 10.0, 10.0, 10.0, 15.0]
    assert use.cold_starts == 2


def test_without_a_wish_they_go() -> None:
    waits, _ = serve(TERMS, (0, 990, 990, 990), (20, 3, False), (30, 0, False))
    assert waits == [15.0, 15.0, 15.0, 15.0]


def test_those_that_wake_are_not_there_yet() -> None:
    waits, _ = serve(TERMS, (0, 24, 24, 30), (20, 2, False))
    assert waits == [15.0, 10.0, 15.0, 10.0]


def test_each_round_of_calls_is_on_the_bill() -> None:
    """At 20 one is called and two are started; at 70, 120 and 170 all three; at 175 it ends."""
    _, use = serve(TERMS, (0, 200), (20, 3, False), (175, 0, False))
    calls_ms = 15 + 10
    pings_ms = 2 + 2 * (5 + 2) + 3 * (3 * 2)
    assert use.usage_usd == pytest.approx((calls_ms + pings_ms) / 1_000)


def test_a_new_wish_ends_the_rounds_of_the_one_before() -> None:
    """Called are the first at 20 and 70, both at 110 and 160 (one being started), and no more."""
    _, use = serve(TERMS, (0, 200), (20, 1, False), (110, 2, False), (175, 0, False))
    pings_ms = 2 + 2 + (2 + 5 + 2) + 2 * 2
    assert use.usage_usd == pytest.approx((15 + 10 + pings_ms) / 1_000)


def test_a_start_for_keeping_is_billed_like_any_other() -> None:
    """At 20 two are started, of which the start is not billed; the third was there."""
    unbilled = replace(TERMS, bills_cold_start=False)
    _, use = serve(unbilled, (0, 40), (20, 3, False), (30, 0, False))
    assert use.usage_usd == pytest.approx((10 + 10 + 3 * 2) / 1_000)


def test_what_is_busy_need_not_be_called() -> None:
    """At 5 the one instance is at work; nothing is started beside it, and nothing paid."""
    _, use = serve(TERMS, (0,), (5, 1, False), (6, 0, False))
    assert use.usage_usd == pytest.approx(0.015)


def test_where_none_stays_calling_keeps_none() -> None:
    waits, use = serve(replace(TERMS, keep_alive_ns=0), (0, 40), (20, 1, False))
    assert waits == [15.0, 15.0]
    assert use.usage_usd == pytest.approx(2 * 0.015)


def test_an_instance_that_is_too_old_is_replaced_before_it_is_needed() -> None:
    """The one of 0 is too old at 60, when the next round of calls (70) starts another."""
    waits, use = serve(replace(TERMS, age_max_ns=60 * MS), (0, 80, 130), (20, 1, False))
    assert waits == [15.0, 10.0, 10.0]
    assert use.cold_starts == 1


def test_no_more_are_kept_than_may_be_started() -> None:
    """Two starts there are; one was used by the first call. The rest comes with later rounds."""
    few = replace(TERMS, burst_concurrency=2, burst_refill_per_s=20.0)
    waits, _ = serve(few, (0, 30, 30, 200, 200, 200), (20, 4, False))
    assert waits == [15.0, 10.0, 10.0, 10.0, 10.0, 10.0]


# --- provisioned --------------------------------------------------------------------------------

PROVISIONED = replace(
    TERMS,
    provisioning_ns=50 * MS,
    provisioned_usd_per_gb_s=0.1,
    provisioned_run_usd_per_gb_s=0.5,
)


def test_provisioned_ones_are_there_after_a_while_and_for_good() -> None:
    waits, use = serve(PROVISIONED, (0, 0, 500, 500, 500), (10, 2, True))
    assert waits == [15.0, 15.0, 10.0, 10.0, 15.0]
    assert use.cold_starts == 3


def test_until_they_are_there_calls_start_instances_of_their_own() -> None:
    waits, _ = serve(replace(PROVISIONED, keep_alive_ns=MS), (0, 59, 75), (10, 1, True))
    assert waits == [15.0, 15.0, 10.0]


def test_provisioned_ones_are_paid_for_while_they_wait_and_run_at_their_own_price() -> None:
    """Two from 10 to 510, which is a gigabyte second; one call of their own, one before."""
    _, use = serve(PROVISIONED, (0, 100, 600), (10, 2, True), (510, 0, True))
    waiting, running, others = 2 * 0.5 * 0.1, 0.010 * 0.5, 2 * 0.015
    assert use.usage_usd == pytest.approx(waiting + running + others)


def test_to_go_over_to_calling_ends_the_rent() -> None:
    """Two for 100 ms; then the one that is idle is called at 110 and at 160."""
    _, use = serve(PROVISIONED, (0, 600), (10, 2, True), (110, 1, False), (170, 0, False))
    assert use.usage_usd == pytest.approx(2 * 0.1 * 0.1 + (2 * 15 + 2 * 2) / 1_000)


def test_fewer_go_at_once_and_more_take_their_time() -> None:
    provisioned = ProvisionedConcurrency(PROVISIONED)
    provisioned.resize(0, 4)
    provisioned.resize(100 * MS, 1)
    assert [provisioned.acquire(100 * MS) for _ in range(2)] == [True, False]
    provisioned.resize(100 * MS, 3)
    assert not provisioned.acquire(149 * MS)
    assert [provisioned.acquire(150 * MS) for _ in range(3)] == [True, True, False]


def test_those_on_their_way_are_not_late_because_more_were_asked_for() -> None:
    provisioned = ProvisionedConcurrency(PROVISIONED)
    provisioned.resize(0, 2)
    provisioned.resize(40 * MS, 3)
    assert not provisioned.acquire(49 * MS)
    assert [provisioned.acquire(50 * MS) for _ in range(3)] == [True, True, False]
    assert provisioned.acquire(90 * MS)


def test_one_that_runs_when_fewer_are_wanted_ends_its_call() -> None:
    provisioned = ProvisionedConcurrency(PROVISIONED)
    provisioned.resize(0, 2)
    assert [provisioned.acquire(50 * MS) for _ in range(2)] == [True, True]
    provisioned.resize(60 * MS, 1)
    provisioned.release()
    assert not provisioned.acquire(70 * MS)
    provisioned.release()
    assert provisioned.acquire(80 * MS)


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 5)), max_size=20))
def test_the_rent_is_the_sum_of_what_was_wanted_over_time(steps: list[tuple[int, int]]) -> None:
    provisioned, now_ms, held_ms, count = ProvisionedConcurrency(PROVISIONED), 0, 0, 0
    for length_ms, wanted in steps:
        now_ms += length_ms
        held_ms += length_ms * count
        count = wanted
        provisioned.resize(now_ms * MS, count)
        there = 0
        while provisioned.acquire(now_ms * MS):
            there += 1
        assert there <= count
        for _ in range(there):
            provisioned.release()
    assert provisioned.usd(now_ms * MS) == pytest.approx(held_ms / 1_000 * 0.1)
