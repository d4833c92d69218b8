from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.errors import ConfigError
from headgate.workload.generators import (
    Spacing,
    column_stream,
    counts_of_means,
    expand_counts,
    fill,
)

SPACINGS: tuple[Spacing, ...] = ("uniform", "even")


@given(st.lists(st.integers(0, 50)), st.integers(1, 10**12), st.sampled_from(SPACINGS))
def test_each_step_gets_exactly_its_count(
    counts: list[int], step_ns: int, spacing: Spacing
) -> None:
    arrivals = expand_counts(np.array(counts, dtype=int), step_ns=step_ns, seed=1, spacing=spacing)
    per_step = np.bincount(arrivals.times_ns // step_ns, minlength=len(counts))
    assert per_step.tolist() == counts
    assert arrivals.duration_ns == step_ns * len(counts)


@pytest.mark.parametrize("spacing", SPACINGS)
def test_a_step_larger_than_a_chunk_is_filled_alike(spacing: Spacing) -> None:
    """A step of 300,000 is split to bound memory, which must not change the distribution."""
    arrivals = expand_counts(np.array([3, 300_000, 0, 2]), seed=1, spacing=spacing)
    assert np.bincount(arrivals.times_ns // 10**9, minlength=4).tolist() == [3, 300_000, 0, 2]
    tenths = np.bincount(arrivals.times_ns[3:-2] // 10**8 - 10)
    tolerance = 4 * (30_000 * 0.9) ** 0.5 if spacing == "uniform" else 1
    assert np.abs(tenths - 30_000).max() <= tolerance


def test_arrivals_in_a_step_are_distributed_as_sorted_uniforms() -> None:
    """The j-th of n sorted uniforms has the mean j / (n + 1) and a known variance."""
    n, steps = 5, 20_000
    times_ns = expand_counts(np.full(steps, n), seed=2).times_ns
    offsets = (times_ns % 10**9 / 1e9).reshape(steps, n)
    ranks = np.arange(1, n + 1)
    variance = ranks * (n + 1 - ranks) / ((n + 1) ** 2 * (n + 2))
    assert offsets.mean(axis=0) == pytest.approx(ranks / (n + 1), abs=0.005)
    assert offsets.var(axis=0) == pytest.approx(variance, rel=0.05)


def test_a_seed_fixes_the_arrivals() -> None:
    counts = np.full(100, 20)
    same = [expand_counts(counts, seed=5).times_ns for _ in range(2)]
    assert (same[0] == same[1]).all()
    assert (same[0] != expand_counts(counts, seed=6).times_ns).any()


def test_an_empty_cell_has_its_arrivals_on_its_edge() -> None:
    edges_ns = np.array([0, 7, 7, 9])
    times_ns = fill(edges_ns, np.array([0, 3, 0]), column_stream(0, "x"))
    assert times_ns.tolist() == [7, 7, 7]


@given(st.lists(st.floats(0, 1000), min_size=1))
def test_exact_counts_keep_the_running_total(means: list[float]) -> None:
    totals = np.cumsum(counts_of_means(np.array(means)))
    assert np.abs(totals - np.cumsum(means)).max() <= 0.5


def test_poisson_counts_vary_as_much_as_their_mean() -> None:
    counts = counts_of_means(np.full(20_000, 3.5), draw="poisson", seed=3)
    assert counts.mean() == pytest.approx(3.5, rel=0.02)
    assert counts.var() == pytest.approx(3.5, rel=0.05)


def test_bad_counts_are_refused() -> None:
    with pytest.raises(ConfigError, match="must not be negative"):
        expand_counts(np.array([1, -1]))
    with pytest.raises(ConfigError, match="too many"):
        expand_counts(np.array([2_000_000_000]))
    with pytest.raises(ConfigError, match="step_ns"):
        expand_counts(np.array([1]), step_ns=0)
    with pytest.raises(ConfigError, match="finite"):
        counts_of_means(np.array([float("nan")]))
