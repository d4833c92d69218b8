"""The warm instances of a platform: how many there are, and how many to keep."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.clock import SECOND_NS
from headgate.core.model import (
    App,
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
from headgate.planning.pools.targets import choose_faas_target
from headgate.planning.pools.warm_pool import ReadyCount, WarmPool, WarmPoolEstimate, burst_of

START_NS = 100
KEEP_ALIVE_NS = 1_000


def make_warm_pool() -> WarmPoolEstimate:
    return WarmPoolEstimate(FaasPlatform(1, keep_alive_ns=KEEP_ALIVE_NS), START_NS)


def test_a_call_that_ran_leaves_an_instance_behind() -> None:
    warm_pool = make_warm_pool()
    assert (warm_pool.size(0), warm_pool.idle(0)) == (0, 0)
    warm_pool.on_call(0)
    assert (warm_pool.size(0), warm_pool.idle(0), warm_pool.busy) == (1, 0, 1)
    warm_pool.on_return(10, ran=True)
    assert (warm_pool.size(10), warm_pool.idle(10), warm_pool.busy) == (1, 1, 0)


def test_a_call_that_was_refused_leaves_none() -> None:
    warm_pool = make_warm_pool()
    warm_pool.on_call(0)
    warm_pool.on_return(10, ran=False)
    assert warm_pool.size(10) == 0


def test_the_instance_used_last_is_used_first_so_that_the_others_go() -> None:
    """Two are idle, since 10 and since 400; the call at 500 uses that one, and the other goes."""
    warm_pool = make_warm_pool()
    for _ in range(2):
        warm_pool.on_call(0)
    warm_pool.on_return(10, ran=True)
    warm_pool.on_return(400, ran=True)
    warm_pool.on_call(500)
    warm_pool.on_return(510, ran=True)
    assert warm_pool.idle(10 + KEEP_ALIVE_NS - 1) == 2
    assert warm_pool.idle(10 + KEEP_ALIVE_NS) == 1
    assert warm_pool.idle(510 + KEEP_ALIVE_NS) == 0


def test_what_is_kept_is_there_after_a_start_and_does_not_age() -> None:
    warm_pool = make_warm_pool()
    warm_pool.set_desired(0, 3)
    assert (warm_pool.size(99), warm_pool.is_starting(99)) == (0, True)
    assert (warm_pool.size(100), warm_pool.is_starting(100)) == (3, False)
    assert warm_pool.idle(100 * KEEP_ALIVE_NS) == 3


def test_what_is_provisioned_is_there_when_it_is_provisioned() -> None:
    warm_pool = WarmPoolEstimate(FaasPlatform(1, provisioning_ns=5_000), START_NS)
    warm_pool.set_desired(0, 3, is_provisioned=True)
    assert (warm_pool.size(4_999), warm_pool.is_starting(4_999)) == (0, True)
    assert warm_pool.size(5_000) == 3


def test_what_is_up_stays_in_sight_while_more_wake() -> None:
    """Four are up and have never been called; two more are asked for."""
    warm_pool = make_warm_pool()
    warm_pool.set_desired(0, 4)
    assert warm_pool.size(200) == 4
    warm_pool.set_desired(200, 6)
    assert (warm_pool.size(299), warm_pool.is_starting(299)) == (4, True)
    assert warm_pool.size(300) == 6


def test_those_that_wake_are_not_late_because_more_were_asked_for() -> None:
    """A burst raises the desired size with every arrival; each instance still takes one start."""
    warm_pool = make_warm_pool()
    for now_ns, count in ((0, 2), (40, 5), (80, 6)):
        warm_pool.set_desired(now_ns, count)
    assert [warm_pool.size(now_ns) for now_ns in (99, 100, 139, 140, 180)] == [0, 2, 2, 5, 6]
    assert not warm_pool.is_starting(180)


def test_to_keep_fewer_than_wake_leaves_fewer_at_the_same_time() -> None:
    warm_pool = make_warm_pool()
    warm_pool.set_desired(0, 6)
    warm_pool.set_desired(50, 3)
    assert [warm_pool.size(99), warm_pool.size(100), warm_pool.size(150)] == [0, 3, 3]


def test_to_keep_what_is_there_already_takes_no_time() -> None:
    warm_pool = make_warm_pool()
    warm_pool.on_call(0)
    warm_pool.on_return(10, ran=True)
    warm_pool.set_desired(20, 1)
    assert not warm_pool.is_starting(20)
    assert warm_pool.size(10 * KEEP_ALIVE_NS) == 1


def test_to_keep_nothing_lets_them_go() -> None:
    warm_pool = make_warm_pool()
    warm_pool.set_desired(0, 3)
    warm_pool.set_desired(200, 0)
    assert (warm_pool.size(200), warm_pool.is_starting(200)) == (0, False)


STEPS = st.tuples(st.integers(0, 300), st.sampled_from(["call", "ran", "refused", 0, 2, 5, 9]))


@given(st.lists(STEPS, max_size=60))
def test_whatever_happens_the_count_is_that_of_a_platform(
    steps: list[tuple[int, str | int]],
) -> None:
    """Never fewer than are busy; with none starting, never fewer than desired."""
    warm_pool, now_ns = make_warm_pool(), 0
    for length_ns, step in steps:
        now_ns += length_ns
        if isinstance(step, int):
            before = warm_pool.size(now_ns)
            warm_pool.set_desired(now_ns, step)
            assert warm_pool.size(now_ns) >= min(before, step)
        elif step == "call":
            warm_pool.on_call(now_ns)
        elif warm_pool.busy:
            warm_pool.on_return(now_ns, ran=step == "ran")
        assert warm_pool.idle(now_ns) >= 0
        if not warm_pool.is_starting(now_ns):
            assert warm_pool.size(now_ns) >= warm_pool.desired
    assert warm_pool.size(now_ns + START_NS) >= warm_pool.desired
    assert warm_pool.size(now_ns + KEEP_ALIVE_NS) == max(warm_pool.busy, warm_pool.desired)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 6)), max_size=20))
def test_each_that_is_asked_for_is_ready_after_a_start_unless_it_is_given_up(
    steps: list[tuple[int, int]],
) -> None:
    """Compared with instances one by one: the times at which they are ready, earliest first."""
    kept, now_ns, ready_ns = ReadyCount(), 0, list[int]()
    for length_ns, count in steps:
        now_ns += length_ns
        del ready_ns[count:]
        ready_ns += [now_ns + START_NS] * (count - len(ready_ns))
        kept.resize(now_ns, count, START_NS)
        assert kept.at(now_ns) == sum(1 for at_ns in ready_ns if at_ns <= now_ns)
        if ready_ns and ready_ns[-1] > now_ns:
            next_ns = kept.next_ns(now_ns)
            assert next_ns is not None
            assert now_ns < next_ns <= min(at_ns for at_ns in ready_ns if at_ns > now_ns)
    assert kept.at(now_ns + START_NS) == len(ready_ns)
    assert kept.next_ns(now_ns + START_NS) is None


S = SECOND_NS
MEMORY_NS = 3_600 * S
TERMS = FaasPlatform(1 << 30, usd_per_gb_s=1.0, keep_alive_ns=600 * S)


def warm_pool_of(platform: FaasPlatform = TERMS, burst: float = 1.0) -> WarmPool:
    """Calls of 100 ms."""
    pool = Pool(0, "cloud", Tier.SERVERLESS, nodes=0, faas=platform)
    profile = Profile((S // 10,), cold_start_ns=2 * S)
    function = Function(0, "f", (Variant(0, "v", 0, (0,), profile),))
    slo = Slo(S, rate_tolerance=burst)
    app = App((function,), (Pipeline(0, "p", (Stage(function),), slo),), (pool,))
    target = choose_faas_target(app, function)
    assert target is not None
    return WarmPool(target, burst_of(app, function), MEMORY_NS)


def test_what_was_never_needed_is_not_kept() -> None:
    assert warm_pool_of().desired(0) == 0


def test_more_are_kept_than_were_ever_needed_of_late() -> None:
    one = warm_pool_of()
    one.observe_demand(0, 8.0)
    one.observe_demand(S, 2.0)
    assert 8 < one.desired(S) <= 12


def test_a_burst_that_is_to_be_met_is_provided_for() -> None:
    one = warm_pool_of(burst=3.0)
    one.observe_demand(0, 8.0)
    assert one.desired(0) == 24


def test_never_more_than_the_platform_runs() -> None:
    one = warm_pool_of(replace(TERMS, concurrency_max=5))
    one.observe_demand(0, 8.0)
    assert one.desired(0) == 5


def test_a_burst_fades_and_is_forgotten_at_last() -> None:
    one = warm_pool_of()
    one.observe_demand(0, 8.0)
    targets = [one.desired(hour * MEMORY_NS) for hour in range(8)]
    assert targets == sorted(targets, reverse=True)
    assert targets[1] in (3, 4)  # 10 / e
    assert targets[-1] == 0


def busy(platform: FaasPlatform, share: float) -> WarmPool:
    """One instance, in use for this share of the last hours."""
    one = warm_pool_of(platform)
    for second in range(0, 5 * 3_600, 10):
        for _ in range(int(share * 100)):
            one.on_call(second * S)
            one.instances.on_return(second * S, ran=True)
    return one


PROVISIONED = replace(TERMS, provisioned_usd_per_gb_s=0.25, provisioned_run_usd_per_gb_s=0.5)


def test_provisioned_where_it_is_not_sold_is_never_cheaper() -> None:
    assert not busy(TERMS, 1.0).is_provisioned_cheaper(1)


def test_nothing_is_not_provisioned() -> None:
    assert not busy(PROVISIONED, 1.0).is_provisioned_cheaper(0)


@pytest.mark.parametrize(("share", "is_cheaper"), [(0.0, False), (0.4, False), (0.6, True)])
def test_an_instance_is_provisioned_if_it_is_busy_often_enough(
    share: float, is_cheaper: bool
) -> None:
    """It costs a quarter while it waits, and runs at half the price: from one half on it pays."""
    assert busy(PROVISIONED, share).is_provisioned_cheaper(1) == is_cheaper


def test_of_more_instances_each_is_busy_less() -> None:
    assert not busy(PROVISIONED, 0.9).is_provisioned_cheaper(2)


def test_where_calls_that_keep_one_awake_are_dear_it_is_provisioned_though_idle() -> None:
    """A call every 300 s, at 90 USD, is dearer than 0.25 USD a second."""
    dear = replace(PROVISIONED, usd_per_request=90.0)
    assert warm_pool_of(dear).is_provisioned_cheaper(1)
    assert not warm_pool_of(replace(dear, usd_per_request=60.0)).is_provisioned_cheaper(1)


def test_where_none_stays_only_provisioned_ones_can_be_kept() -> None:
    assert warm_pool_of(replace(PROVISIONED, keep_alive_ns=0)).is_provisioned_cheaper(1)
