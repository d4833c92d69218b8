"""The components of the default policy, each in isolation."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.model import Profile
from headgate.planning.batch_size import max_batch_within
from headgate.planning.forecast import OfferedLoad
from headgate.planning.latency_predictor import QuantileTracker


@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.99])
def test_a_tracker_settles_at_its_quantile(quantile: float) -> None:
    """The share of values below the estimate is the quantile, on average over a long stream."""
    rng = Random(7)
    tracker = QuantileTracker(quantile, value=10.0, step=0.02)
    below = 0
    for number in range(60_000):
        value = rng.lognormvariate(0.0, 0.3)
        below += number >= 10_000 and value <= tracker.value
        tracker.observe(value)
    assert below / 50_000 == pytest.approx(quantile, abs=0.01)


def test_a_tracker_follows_a_drift() -> None:
    tracker = QuantileTracker(0.9)
    for _ in range(200):
        tracker.observe(3.0)
    assert tracker.value == pytest.approx(3.0, rel=0.1)
    for _ in range(2_000):
        tracker.observe(1.0)
    assert tracker.value == pytest.approx(1.0, rel=0.1)


@given(
    st.lists(st.integers(1, 1_000), min_size=1, max_size=40).map(sorted),
    st.integers(-100, 2_000),
    st.floats(0.5, 2.0),
)
def test_a_batch_fits_its_slack_and_a_larger_one_would_not(
    times: list[int], slack_ns: int, correction: float
) -> None:
    size = max_batch_within(Profile(exec_ns=tuple(times)), slack_ns, correction)
    fitting = [b for b, time_ns in enumerate(times, start=1) if time_ns * correction <= slack_ns]
    assert size == max(fitting, default=1)


def test_load_is_work_over_time() -> None:
    load = OfferedLoad(memory_ns=10**9, prior_ns=0)
    for at_ns in range(0, 3 * 10**9, 10**6):
        load.observe(at_ns, 2.5 * 10**6)
    assert load.erlangs(3 * 10**9) == pytest.approx(2.5, rel=0.01)


def test_load_fades_when_nothing_comes() -> None:
    load = OfferedLoad(memory_ns=10**9, prior_ns=0)
    for at_ns in range(0, 10**9, 10**6):
        load.observe(at_ns, 10**6)
    assert load.erlangs(10 * 10**9) < 0.001


def test_the_first_arrival_is_no_flood() -> None:
    """One task of 20 ms at the very beginning: the prior says that it is little work."""
    load = OfferedLoad(memory_ns=30 * 10**9, prior_ns=200 * 10**6)
    assert load.erlangs(0) == 0.0
    load.observe(0, 20 * 10**6)
    assert load.erlangs(0) == pytest.approx(0.1)
