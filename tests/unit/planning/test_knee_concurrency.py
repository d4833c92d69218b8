"""The concurrency at the throughput knee of a node."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headgate.core.clock import NEVER_NS
from headgate.core.model import Profile
from headgate.planning.pools.concurrency import knee_concurrency

SLOWDOWNS = st.lists(st.floats(0.0, 1.2), min_size=1, max_size=8).map(
    lambda steps: tuple(1.0 + sum(steps[:i]) for i in range(len(steps) + 1))
)


def test_without_interference_all_slots_are_used() -> None:
    assert knee_concurrency(Profile((10,)), slots=4, latency_ns=1) == 4


def test_where_two_take_twice_as_long_they_take_turns() -> None:
    assert knee_concurrency(Profile((10,), (1.0, 2.0, 3.0)), slots=3, latency_ns=NEVER_NS) == 1


def test_as_many_as_get_more_done_and_no_more() -> None:
    """Beyond two, slowdown is proportional: a third adds no throughput."""
    assert knee_concurrency(Profile((10,), (1.0, 1.1, 1.65)), slots=3, latency_ns=NEVER_NS) == 2


def test_no_more_than_are_in_time() -> None:
    """Four would get most done, in 13 of the 14 that they have: nothing is left for waiting."""
    profile = Profile((10,), (1.0, 1.05, 1.1, 1.3))
    assert knee_concurrency(profile, slots=4, latency_ns=1_000) == 4
    assert knee_concurrency(profile, slots=4, latency_ns=14) < 4


def test_one_runs_even_where_none_is_in_time() -> None:
    assert knee_concurrency(Profile((10,), (1.0, 1.1)), slots=2, latency_ns=5) == 1


@given(slowdown=SLOWDOWNS, slots=st.integers(1, 8), latency_ns=st.integers(500, 20_000))
def test_it_is_in_time_and_nearly_nothing_is_gained_by_more(
    slowdown: tuple[float, ...], slots: int, latency_ns: int
) -> None:
    profile = Profile((1_000,), slowdown)
    best = knee_concurrency(profile, slots, latency_ns)
    in_time = [c for c in range(1, slots + 1) if profile.time_ns(1, c) <= latency_ns // 2]
    paces = {c: c / profile.slowdown_at(c) for c in range(1, slots + 1)}
    assert best in paces
    assert best == 1 or profile.time_ns(1, best) <= latency_ns
    assert all(paces[best] > paces[fewer] for fewer in range(1, best))
    assert all(paces[best] > 0.9 * paces[more] for more in in_time)
