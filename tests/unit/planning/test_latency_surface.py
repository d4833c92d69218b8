"""The latency surface: recovers its parameters, is monotonic, and states its error honestly."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.planning.capacity.latency_model import (
    FORMS,
    Interpolation,
    LatencySample,
    Surface,
    _nnls,
    fit_surface,
)

CORES = (1.0, 2.0, 4.0, 8.0)
TOGETHER = (1.0, 2.0, 5.0, 10.0, 20.0)
TERMS = {"shared": 3, "calls": 5, "crowded": 7}


def sampled(surface: Surface, noise: float = 0.0) -> list[LatencySample]:
    rng = Random(0)
    return [
        LatencySample(n, c, b, surface.time_ms(n, c, b) * (1 + noise * rng.uniform(-1, 1)))
        for n in CORES
        for c in TOGETHER
        for b in (1.0, 8.0)
    ]


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_found_again(form: str) -> None:
    true = Surface(form, 4.0, tuple(float(2 + index) for index in range(TERMS[form])))
    found = fit_surface(sampled(true))
    assert found.max_error is not None and found.max_error < 1e-6
    assert found.time_ms(3, 7, 2) == pytest.approx(true.time_ms(3, 7, 2))
    assert (found.form, found.knee) == (form, 4.0)


def test_errors_are_those_of_points_it_was_not_shown() -> None:
    """Ten per cent of noise cannot be predicted, so the stated error cannot be smaller."""
    noisy = sampled(Surface("shared", 4.0, (1.0, 3.0, 8.0)), noise=0.1)
    found = fit_surface(noisy)
    assert found.mean_error is not None and found.max_error is not None
    assert 0.02 < found.mean_error < 0.15
    assert found.max_error >= found.mean_error


def test_too_few_points_have_no_error_but_a_surface() -> None:
    found = fit_surface([LatencySample(1, 1, 1, 10.0), LatencySample(1, 2, 1, 20.0)])
    assert found.mean_error is None and found.max_error is None
    assert found.time_ms(1, 4) == pytest.approx(40.0)


def test_half_a_core_takes_twice_as_long() -> None:
    surface = Surface("calls", 2.0, (1.0, 2.0, 3.0, 4.0, 5.0))
    assert surface.time_ms(0.5, 3, 2) == pytest.approx(2 * surface.time_ms(1, 3, 2))


def test_it_is_exact_where_it_was_measured_and_bends_in_between() -> None:
    surface = Surface("shared", 1.0, (0.0, 10.0, 0.0))
    interpolation = Interpolation(
        surface, [LatencySample(1, 1, 1, 12.0), LatencySample(1, 4, 1, 48.0)]
    )
    assert interpolation.time_ms(1, 1) == 12.0
    assert interpolation.time_ms(1, 2) == pytest.approx(24.0)  # both are a fifth above the surface


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(CORES), st.sampled_from(TOGETHER), st.floats(0.01, 1e4)),
        min_size=1,
        max_size=20,
        unique_by=lambda each: each[:2],
    )
)
def test_more_concurrency_is_never_faster_whatever_was_measured(
    rows: list[tuple[float, float, float]],
) -> None:
    found = fit_surface([LatencySample(n, c, 1.0, time_ms) for n, c, time_ms in rows])
    assert all(value >= 0 for value in found.coefficients)
    for cores in CORES:
        times = [found.time_ms(cores, c) for c in TOGETHER]
        assert times == sorted(times) and times[0] > 0
    assert found.time_ms(8, 5) <= found.time_ms(1, 5) * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 9))
def test_non_negative_least_squares_is_optimal(seed: int, columns: int, rows: int) -> None:
    """The conditions of Karush, Kuhn and Tucker: nothing can be improved by any small step."""
    rng = np.random.default_rng(seed)
    matrix, wanted = rng.normal(size=(rows, columns)), rng.normal(size=rows)
    found = _nnls(matrix, wanted)
    slope = matrix.T @ (matrix @ found - wanted)
    assert (found >= 0).all()
    assert (slope >= -1e-6).all()
    assert np.abs(slope[found > 1e-9]).max(initial=0.0) < 1e-6
