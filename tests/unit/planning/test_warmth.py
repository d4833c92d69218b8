"""What a client can tell of the instances that a platform has ready."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headgate.core.model import FaasPlatform
from headgate.planning.warm_pool import WarmPoolEstimate

START_NS = 100
KEEP_ALIVE_NS = 1_000


def make_warmth() -> WarmPoolEstimate:
    return WarmPoolEstimate(FaasPlatform(1, keep_alive_ns=KEEP_ALIVE_NS), START_NS)


def test_a_call_that_ran_leaves_an_instance_behind() -> None:
    warmth = make_warmth()
    assert (warmth.there(0), warmth.idle(0)) == (0, 0)
    warmth.called(0)
    assert (warmth.there(0), warmth.idle(0), warmth.busy) == (1, 0, 1)
    warmth.returned(10, ran=True)
    assert (warmth.there(10), warmth.idle(10), warmth.busy) == (1, 1, 0)


def test_a_call_that_was_refused_leaves_none() -> None:
    warmth = make_warmth()
    warmth.called(0)
    warmth.returned(10, ran=False)
    assert warmth.there(10) == 0


def test_the_instance_used_last_is_used_first_so_that_the_others_go() -> None:
    """Two are idle, since 10 and since 400; the call at 500 uses that one, and the other goes."""
    warmth = make_warmth()
    for _ in range(2):
        warmth.called(0)
    warmth.returned(10, ran=True)
    warmth.returned(400, ran=True)
    warmth.called(500)
    warmth.returned(510, ran=True)
    assert warmth.idle(10 + KEEP_ALIVE_NS - 1) == 2
    assert warmth.idle(10 + KEEP_ALIVE_NS) == 1
    assert warmth.idle(510 + KEEP_ALIVE_NS) == 0


def test_what_is_kept_is_there_after_a_start_and_does_not_age() -> None:
    warmth = make_warmth()
    warmth.keep(0, 3)
    assert (warmth.there(99), warmth.is_waking(99)) == (0, True)
    assert (warmth.there(100), warmth.is_waking(100)) == (3, False)
    assert warmth.idle(100 * KEEP_ALIVE_NS) == 3


def test_what_is_provisioned_is_there_when_it_is_provisioned() -> None:
    warmth = WarmPoolEstimate(FaasPlatform(1, provisioning_ns=5_000), START_NS)
    warmth.keep(0, 3, is_provisioned=True)
    assert (warmth.there(4_999), warmth.is_waking(4_999)) == (0, True)
    assert warmth.there(5_000) == 3


def test_what_is_up_stays_in_sight_while_more_wake() -> None:
    """Four are up and have never been called; two more are asked for."""
    warmth = make_warmth()
    warmth.keep(0, 4)
    assert warmth.there(200) == 4
    warmth.keep(200, 6)
    assert (warmth.there(299), warmth.is_waking(299)) == (4, True)
    assert warmth.there(300) == 6


def test_those_that_wake_are_not_late_because_more_were_asked_for() -> None:
    """A burst raises the wish with every arrival; each instance still takes but one start."""
    warmth = make_warmth()
    for now_ns, count in ((0, 2), (40, 5), (80, 6)):
        warmth.keep(now_ns, count)
    assert [warmth.there(now_ns) for now_ns in (99, 100, 139, 140, 180)] == [0, 2, 2, 5, 6]
    assert not warmth.is_waking(180)


def test_to_keep_fewer_than_wake_leaves_fewer_at_the_same_time() -> None:
    warmth = make_warmth()
    warmth.keep(0, 6)
    warmth.keep(50, 3)
    assert [warmth.there(99), warmth.there(100), warmth.there(150)] == [0, 3, 3]


def test_to_keep_what_is_there_already_takes_no_time() -> None:
    warmth = make_warmth()
    warmth.called(0)
    warmth.returned(10, ran=True)
    warmth.keep(20, 1)
    assert not warmth.is_waking(20)
    assert warmth.there(10 * KEEP_ALIVE_NS) == 1


def test_to_keep_nothing_lets_them_go() -> None:
    warmth = make_warmth()
    warmth.keep(0, 3)
    warmth.keep(200, 0)
    assert (warmth.there(200), warmth.is_waking(200)) == (0, False)


STEPS = st.tuples(st.integers(0, 300), st.sampled_from(["call", "ran", "refused", 0, 2, 5, 9]))


@given(st.lists(STEPS, max_size=60))
def test_whatever_happens_the_count_is_that_of_a_platform(
    steps: list[tuple[int, str | int]],
) -> None:
    """Never fewer than are busy; with nothing on the way, never fewer than are kept."""
    warmth, now_ns = make_warmth(), 0
    for length_ns, step in steps:
        now_ns += length_ns
        if isinstance(step, int):
            before = warmth.there(now_ns)
            warmth.keep(now_ns, step)
            assert warmth.there(now_ns) >= min(before, step)
        elif step == "call":
            warmth.called(now_ns)
        elif warmth.busy:
            warmth.returned(now_ns, ran=step == "ran")
        assert warmth.idle(now_ns) >= 0
        if not warmth.is_waking(now_ns):
            assert warmth.there(now_ns) >= warmth.kept
    assert warmth.there(now_ns + START_NS) >= warmth.kept
    assert warmth.there(now_ns + KEEP_ALIVE_NS) == max(warmth.busy, warmth.kept)
