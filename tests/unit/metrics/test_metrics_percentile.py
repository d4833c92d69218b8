from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.metrics.summary import jain, nearest_rank

values = st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=200)


@pytest.mark.parametrize(
    ("per_mille", "expected"), [(1, 1), (70, 7), (500, 50), (990, 99), (999, 100), (1000, 100)]
)
def test_ranks_of_one_to_hundred(per_mille: int, expected: int) -> None:
    """The 7th percentile is 7: in floating point `ceil(0.07 * 100)` would say 8."""
    assert nearest_rank(np.arange(1, 101), [per_mille]) == (expected,)


@given(values, st.integers(1, 1000))
def test_a_percentile_is_observed_and_has_enough_below(observed: list[int], per_mille: int) -> None:
    (rank,) = nearest_rank(np.array(observed, dtype=np.int64), [per_mille])
    assert rank in observed
    below_or_equal = sum(value <= rank for value in observed)
    below = sum(value < rank for value in observed)
    wanted = Fraction(per_mille, 1000) * len(observed)
    assert below < wanted <= below_or_equal


def test_the_input_keeps_its_order_unless_it_may_be_overwritten() -> None:
    original = np.array([5, 1, 4, 2, 3], dtype=np.int64)
    nearest_rank(original, [500])
    assert original.tolist() == [5, 1, 4, 2, 3]


@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=50))
def test_jain_lies_between_one_over_n_and_one(shares: list[float]) -> None:
    index = jain(shares)
    assert index <= 1.0
    assert index >= 1 / len(shares) or math.isclose(index, 1 / len(shares))


@pytest.mark.parametrize(
    ("shares", "expected"), [([], 1.0), ([0.0, 0.0], 1.0), ([3.0], 1.0), ([1.0, 2.0, 3.0], 36 / 42)]
)
def test_jain_by_hand(shares: list[float], expected: float) -> None:
    assert jain(shares) == pytest.approx(expected)
