"""The index of dispersion: how bursty arrivals are."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.rng import stream
from headgate.planning.forecast import Dispersion

WINDOW_NS = 100


def dispersion_of(times_ns: list[int], items: int = 1) -> float:
    dispersion = Dispersion(WINDOW_NS, memory_ns=1_000 * WINDOW_NS)
    for at_ns in times_ns:
        dispersion.observe(at_ns, items)
    return dispersion.value


def poisson(count: int, mean_gap_ns: float) -> list[int]:
    rng = stream(5, "arrivals")
    return [int(at) for at in accumulate(rng.expovariate(1 / mean_gap_ns) for _ in range(count))]


def test_it_is_one_before_anything_is_known() -> None:
    assert dispersion_of([]) == 1.0
    assert dispersion_of([5]) == 1.0


def test_it_is_one_where_arrivals_are_independent() -> None:
    assert dispersion_of(poisson(20_000, 10.0)) == pytest.approx(1.0, abs=0.2)


def test_those_that_come_in_tens_are_ten_times_as_bursty() -> None:
    assert dispersion_of(poisson(5_000, 50.0), items=10) == pytest.approx(10.0, rel=0.25)


def test_it_is_small_where_they_keep_time() -> None:
    assert dispersion_of(list(range(0, 50_000, 10))) < 0.1


def test_bursts_that_come_and_go_count_and_a_step_hardly() -> None:
    """Both have windows of ten and of fifty; only the order differs."""
    few, many = list(range(0, WINDOW_NS, 10)), list(range(0, WINDOW_NS, 2))
    step = [few] * 50 + [many] * 50
    waves = [few, many] * 50
    assert dispersion_of(_laid_out(step)) < 1.0
    assert dispersion_of(_laid_out(waves)) > 10.0


def test_the_past_is_forgotten() -> None:
    dispersion = Dispersion(WINDOW_NS, memory_ns=5 * WINDOW_NS)
    few, many = list(range(0, WINDOW_NS, 10)), list(range(0, WINDOW_NS, 2))
    for at_ns in _laid_out([few, many] * 20):
        dispersion.observe(at_ns, 1)
    assert dispersion.value > 10.0
    for at_ns in _laid_out([few] * 60):
        dispersion.observe(at_ns + 40 * WINDOW_NS, 1)
    assert dispersion.value < 0.1


@given(
    before=st.lists(st.integers(0, 400), min_size=1, max_size=30),
    after=st.lists(st.integers(0, 400), min_size=1, max_size=30),
    windows=st.integers(2, 10**9),
)
def test_nothing_is_learnt_from_silence_however_long(
    before: list[int], after: list[int], windows: int
) -> None:
    """A pause of any length is as one of a few windows, and costs no more time."""
    times_ns = list(accumulate(before))
    later_ns = [times_ns[-1] + at for at in accumulate(after)]
    short = [at + 3 * WINDOW_NS for at in later_ns]
    long = [at + (3 + windows) * WINDOW_NS for at in later_ns]
    assert dispersion_of(times_ns + long) == pytest.approx(dispersion_of(times_ns + short))


def _laid_out(windows: list[list[int]]) -> list[int]:
    return [number * WINDOW_NS + at for number, window in enumerate(windows) for at in window]
