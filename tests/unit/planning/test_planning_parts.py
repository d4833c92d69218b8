"""The components of the default policy, each in isolation."""

from __future__ import annotations

from random import Random

import pytest

from headgate.planning.forecast import OfferedLoad, QuantileTracker


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
