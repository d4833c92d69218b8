"""The estimate of the warm instances of a platform."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headgate.core.model import FaasPlatform
from headgate.planning.targets import WarmPoolEstimate

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
