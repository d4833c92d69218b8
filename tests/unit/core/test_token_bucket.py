"""The token bucket: never more than its rate, and a wait that is long enough."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headgate.core.token_bucket import TokenBucket


@given(
    size=st.integers(1, 50),
    per_s=st.floats(0.1, 100),
    gaps_ns=st.lists(st.integers(0, 2_000_000_000), max_size=200),
)
def test_rate_is_never_exceeded(size: int, per_s: float, gaps_ns: list[int]) -> None:
    """At most the size plus the refill; after the returned wait there is a token."""
    bucket, now_ns = TokenBucket(float(size), per_s), 0
    for taken, gap_ns in enumerate(gaps_ns, 1):
        now_ns += gap_ns
        wait_ns = bucket.take(now_ns)
        if wait_ns:
            now_ns += wait_ns
            assert bucket.take(now_ns) == 0
        assert taken <= size + per_s * now_ns * 1e-9 + 1e-6


def test_a_token_given_back_can_be_taken_again() -> None:
    bucket = TokenBucket(1.0, 1.0)
    bucket.give_back()  # it is full: nothing is added
    assert [bucket.take(0) > 0 for _ in range(2)] == [False, True]
    bucket.give_back()
    assert bucket.take(0) == 0


def test_refill_finds_a_token_without_taking_it() -> None:
    bucket = TokenBucket(1.0, 1.0)
    assert bucket.refill(0) and bucket.refill(0)
    bucket.take_refilled()
    assert not bucket.refill(999_999_999) and bucket.refill(1_000_000_000)
