"""Counts of arrivals over a window, and the forecast of a trend."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.planning.forecast import ArrivalCounts, trend


@given(
    gaps_ns=st.lists(st.integers(0, 40), min_size=1, max_size=60),
    bucket_ns=st.integers(1, 10),
    length=st.integers(1, 8),
    start_ns=st.integers(0, 10**15),
    after_ns=st.integers(0, 100),
)
def test_buckets_hold_what_arrived_in_them(
    gaps_ns: list[int], bucket_ns: int, length: int, start_ns: int, after_ns: int
) -> None:
    """As counting anew from the list of arrivals finds them, wherever time begins."""
    counts = ArrivalCounts(bucket_ns, window_ns=length * bucket_ns)
    times_ns = [start_ns + sum(gaps_ns[1 : i + 1]) for i in range(len(gaps_ns))]
    for at_ns in times_ns:
        counts.observe(at_ns)
    now_ns = times_ns[-1] + after_ns
    whole = (now_ns - start_ns) // bucket_ns
    expected = [0.0] * whole
    for at_ns in times_ns:
        if (at_ns - start_ns) // bucket_ns < whole:
            expected[(at_ns - start_ns) // bucket_ns] += 1
    assert counts.buckets(now_ns) == expected[-length:]


def test_nothing_is_known_before_a_bucket_is_over() -> None:
    counts = ArrivalCounts(bucket_ns=10, window_ns=100)
    assert counts.buckets(5) == []
    counts.observe(7, amount=2.5)
    assert counts.buckets(16) == []
    assert counts.buckets(17) == [2.5]


@given(
    slope=st.floats(0, 10),
    start=st.floats(0, 100),
    count=st.integers(2, 20),
    ahead=st.integers(0, 20),
)
def test_a_trend_goes_on(slope: float, start: float, count: int, ahead: int) -> None:
    values = [start + slope * i for i in range(count)]
    expected = start + slope * (count - 1 + ahead)
    assert trend(values, ahead) == pytest.approx(expected, abs=1e-6)
