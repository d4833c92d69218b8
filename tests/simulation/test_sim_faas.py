"""The simulated FaaS platform: reuse and expiry of instances, warm instances, and billing.

A call takes 10 ms, a cold start 5 ms: a request that takes 15 ms has waited for a cold start.
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

KeepWarmStep = tuple[int, int, bool]  # time in ms, number of instances, whether provisioned
S = 1_000 * MS
TERMS = FaasPlatform(1 << 30, usd_per_gb_s=1.0, keep_alive_ns=100 * MS, ping_ns=2 * MS)


def keep_warm_policy(*steps: KeepWarmStep) -> PolicyKind:
    """Return a policy that dispatches all tasks to the platform and keeps instances warm."""

    class KeepWarmPolicy(Policy):
        def on_task_ready(self, task: Task) -> None:
            if task.id == 0:
                for number, (at, _, _) in enumerate(steps):
                    self.orders.set_timer("keep_warm", at * MS, number)
            self.orders.dispatch_to_pool([task], self.view.app.pools[0])

        def on_capacity(self, node: Node) -> None:
            pass

        def on_timer(self, name: str, number: int) -> None:
            _, count, is_provisioned = steps[number]
            app = self.view.app
            self.orders.keep_warm(
                app.variants[0], app.pools[0], count, is_provisioned=is_provisioned
            )

    return PolicyKind(KeepWarmPolicy)


def serve(
    platform: FaasPlatform, times_ms: tuple[int, ...], *steps: KeepWarmStep, network_ms: int = 0
) -> tuple[list[float], ResourceUse]:
    """Return the time of each request, and the use of the platform."""
    pool = replace(CLOUD, id=0, faas=platform, network_ns=network_ms * MS)
    app = make_app(start_ms=5, pools=(pool,))
    columns, _ = run(app, at_ms(*times_ms), policy=keep_warm_policy(*steps))
    (use,) = columns.resources
    return waits_ms(columns), use


def test_an_idle_instance_lives_for_its_keep_alive() -> None:
    """The instance is idle from 15, then from 125: the third call is a millisecond too late."""
    waits, use = serve(TERMS, (0, 115, 226))
    assert waits == [15.0, 10.0, 15.0]
    assert use.cold_starts == 2


def test_an_instance_beyond_its_maximum_age_is_not_reused() -> None:
    waits, _ = serve(replace(TERMS, age_max_ns=50 * MS), (0, 20, 40, 60, 80))
    assert waits == [15.0, 10.0, 10.0, 15.0, 10.0]


def test_the_instance_used_last_is_reused_first() -> None:
    """Two instances are idle at 15. One is used again and again, so that the other expires."""
    waits, use = serve(TERMS, (0, 0, 60, 110, 150, 150))
    assert waits == [15.0, 15.0, 10.0, 10.0, 10.0, 15.0]
    assert use.cold_starts == 3


def test_burst_concurrency_refills_at_its_rate() -> None:
    """Two starts at once and ten more a second: the third waits for 100 ms, the fourth for 200."""
    cloud = replace(
        CLOUD,
        id=0,
        faas=replace(TERMS, burst_concurrency=2, burst_refill_per_s=10.0, keep_alive_ns=MS),
    )
    app = make_app(exec_ms=(1_000,), pools=(cloud,))
    columns, observer = run(app, at_ms(0, 0, 0, 0), policy=SPILL)
    waits = waits_ms(columns)
    assert waits[:2] == [1_000.0, 1_000.0]
    assert 1_100 <= waits[2] < 1_200 <= waits[3] < 1_300
    assert observer.count(BatchRefused) > 2


def test_burst_concurrency_never_exceeds_its_bound() -> None:
    """After a minute without calls there are still only two starts at once."""
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


@pytest.mark.parametrize(("bills_start", "billed_ms"), [(True, 25), (False, 20)])
def test_cold_starts_are_billed_or_not(bills_start: bool, billed_ms: int) -> None:
    _, use = serve(replace(TERMS, bills_cold_start=bills_start), (0, 20))
    assert use.usage_usd == pytest.approx(billed_ms / 1_000)


def test_network_delay_is_not_billed() -> None:
    waits, use = serve(TERMS, (0,), network_ms=7)
    assert waits == [29.0]
    assert use.usage_usd == pytest.approx(0.015)


def test_pinged_instances_outlive_their_keep_alive() -> None:
    """Three are requested at 20, of which one is warm; at 990 only the fourth call starts cold."""
    waits, use = serve(TERMS, (0, 990, 990, 990, 990), (20, 3, False))
    assert waits == [15.0, 10.0, 10.0, 10.0, 15.0]
    assert use.cold_starts == 2


def test_without_pings_instances_expire() -> None:
    waits, _ = serve(TERMS, (0, 990, 990, 990), (20, 3, False), (30, 0, False))
    assert waits == [15.0, 15.0, 15.0, 15.0]


def test_instances_being_started_are_not_ready() -> None:
    waits, _ = serve(TERMS, (0, 24, 24, 30), (20, 2, False))
    assert waits == [15.0, 10.0, 15.0, 10.0]


def test_every_ping_is_billed() -> None:
    """At 20 one is pinged and two are started; at 70, 120 and 170 all three; at 175 it ends."""
    _, use = serve(TERMS, (0, 200), (20, 3, False), (175, 0, False))
    calls_ms = 15 + 10
    pings_ms = 2 + 2 * (5 + 2) + 3 * (3 * 2)
    assert use.usage_usd == pytest.approx((calls_ms + pings_ms) / 1_000)


def test_a_new_keep_warm_ends_the_pings_of_the_previous_one() -> None:
    """The first is pinged at 20 and 70, both at 110 (one being started) and 160, then none."""
    _, use = serve(TERMS, (0, 200), (20, 1, False), (110, 2, False), (175, 0, False))
    pings_ms = 2 + 2 + (2 + 5 + 2) + 2 * 2
    assert use.usage_usd == pytest.approx((15 + 10 + pings_ms) / 1_000)


def test_a_keep_warm_start_is_billed_like_any_other() -> None:
    """At 20 two are started, whose cold start is not billed; the third was warm."""
    unbilled = replace(TERMS, bills_cold_start=False)
    _, use = serve(unbilled, (0, 40), (20, 3, False), (30, 0, False))
    assert use.usage_usd == pytest.approx((10 + 10 + 3 * 2) / 1_000)


def test_busy_instances_are_not_pinged() -> None:
    """At 5 the only instance is busy; no other is started, and nothing is billed."""
    _, use = serve(TERMS, (0,), (5, 1, False), (6, 0, False))
    assert use.usage_usd == pytest.approx(0.015)


def test_without_keep_alive_pings_keep_nothing_warm() -> None:
    waits, use = serve(replace(TERMS, keep_alive_ns=0), (0, 40), (20, 1, False))
    assert waits == [15.0, 15.0]
    assert use.usage_usd == pytest.approx(2 * 0.015)


def test_an_instance_beyond_its_maximum_age_is_replaced_by_a_ping() -> None:
    """The instance started at 0 is too old at 60; the next ping, at 70, starts another."""
    waits, use = serve(replace(TERMS, age_max_ns=60 * MS), (0, 80, 130), (20, 1, False))
    assert waits == [15.0, 10.0, 10.0]
    assert use.cold_starts == 1


def test_keep_warm_stays_within_the_start_limits() -> None:
    """Of two start tokens the first call has used one. Later pings start the other instances."""
    few = replace(TERMS, burst_concurrency=2, burst_refill_per_s=20.0)
    waits, _ = serve(few, (0, 30, 30, 200, 200, 200), (20, 4, False))
    assert waits == [15.0, 10.0, 10.0, 10.0, 10.0, 10.0]


PROVISIONED = replace(
    TERMS,
    provisioning_ns=50 * MS,
    provisioned_usd_per_gb_s=0.1,
    provisioned_run_usd_per_gb_s=0.5,
)


def test_provisioned_instances_are_ready_after_provisioning_and_do_not_expire() -> None:
    waits, use = serve(PROVISIONED, (0, 0, 500, 500, 500), (10, 2, True))
    assert waits == [15.0, 15.0, 10.0, 10.0, 15.0]
    assert use.cold_starts == 3


def test_calls_during_provisioning_start_cold() -> None:
    waits, _ = serve(replace(PROVISIONED, keep_alive_ns=MS), (0, 59, 75), (10, 1, True))
    assert waits == [15.0, 15.0, 10.0]


def test_provisioned_instances_are_billed_idle_and_at_their_own_rate() -> None:
    """Two from 10 to 510, which is one GB-second; one call on them, and two on other instances."""
    _, use = serve(PROVISIONED, (0, 100, 600), (10, 2, True), (510, 0, True))
    waiting, running, others = 2 * 0.5 * 0.1, 0.010 * 0.5, 2 * 0.015
    assert use.usage_usd == pytest.approx(waiting + running + others)


def test_switching_to_pings_ends_provisioning_costs() -> None:
    """Two for 100 ms; then the idle instance is pinged at 110 and at 160."""
    _, use = serve(PROVISIONED, (0, 600), (10, 2, True), (110, 1, False), (170, 0, False))
    assert use.usage_usd == pytest.approx(2 * 0.1 * 0.1 + (2 * 15 + 2 * 2) / 1_000)


def test_shrinking_is_instant_and_growing_takes_time() -> None:
    provisioned = ProvisionedConcurrency(PROVISIONED)
    provisioned.resize(0, 4)
    provisioned.resize(100 * MS, 1)
    assert [provisioned.acquire(100 * MS) for _ in range(2)] == [True, False]
    provisioned.resize(100 * MS, 3)
    assert not provisioned.acquire(149 * MS)
    assert [provisioned.acquire(150 * MS) for _ in range(3)] == [True, True, False]


def test_growing_does_not_delay_instances_being_provisioned() -> None:
    provisioned = ProvisionedConcurrency(PROVISIONED)
    provisioned.resize(0, 2)
    provisioned.resize(40 * MS, 3)
    assert not provisioned.acquire(49 * MS)
    assert [provisioned.acquire(50 * MS) for _ in range(3)] == [True, True, False]
    assert provisioned.acquire(90 * MS)


def test_shrinking_lets_a_running_call_end() -> None:
    provisioned = ProvisionedConcurrency(PROVISIONED)
    provisioned.resize(0, 2)
    assert [provisioned.acquire(50 * MS) for _ in range(2)] == [True, True]
    provisioned.resize(60 * MS, 1)
    provisioned.release()
    assert not provisioned.acquire(70 * MS)
    provisioned.release()
    assert provisioned.acquire(80 * MS)


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 5)), max_size=20))
def test_provisioning_cost_is_the_integral_of_the_requested_count(
    steps: list[tuple[int, int]],
) -> None:
    provisioned, now_ms, held_ms, count = ProvisionedConcurrency(PROVISIONED), 0, 0, 0
    for length_ms, requested in steps:
        now_ms += length_ms
        held_ms += length_ms * count
        count = requested
        provisioned.resize(now_ms * MS, count)
        ready = 0
        while provisioned.acquire(now_ms * MS):
            ready += 1
        assert ready <= count
        for _ in range(ready):
            provisioned.release()
    assert provisioned.usd(now_ms * MS) == pytest.approx(held_ms / 1_000 * 0.1)
