"""Distributions of execution times, and which of them samples call for."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.errors import ConfigError
from headgate.planning.autoscaling.execution_times import (
    GOODNESS_MAX,
    EmpiricalTimes,
    ExecutionTimes,
    LogNormalTimes,
    fit_execution_times,
)

CVS = st.floats(0.05, 1.5)


def draw(times: LogNormalTimes, count: int, seed: int) -> list[float]:
    rng = Random(seed)
    sigma = math.sqrt(math.log(1.0 + times.cv**2))
    mu = math.log(times.mean_s) - sigma**2 / 2.0
    return [rng.lognormvariate(mu, sigma) for _ in range(count)]


def test_log_normal_samples_are_fitted_as_such() -> None:
    """The test at 1 % rejects about one sample of a hundred, and finds mean and spread."""
    rejected = 0
    for seed in range(200):
        fitted = fit_execution_times(draw(LogNormalTimes(0.1, 0.5), 300, seed))
        rejected += not fitted.is_lognormal
        assert fitted.times.mean_s == pytest.approx(0.1, rel=0.15)
        assert fitted.times.cv == pytest.approx(0.5, rel=0.35)
    assert rejected <= 8


@pytest.mark.parametrize(
    "samples",
    [
        [0.1] * 150 + [0.3] * 50,
        [0.05 + 0.001 * i for i in range(300)],
        [0.1 + 0.0001 * i for i in range(60)] + [2.0],
    ],
    ids=["two modes", "uniform", "an outlier"],
)
def test_other_samples_are_kept_as_they_are(samples: list[float]) -> None:
    fitted = fit_execution_times(samples)
    assert not fitted.is_lognormal
    assert fitted.goodness > GOODNESS_MAX
    assert fitted.times.mean_s == pytest.approx(sum(samples) / len(samples))


def test_the_goodness_of_fit_is_that_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    samples = draw(LogNormalTimes(0.2, 0.3), 80, seed=3)
    logs = [math.log(each) for each in samples]
    expected = stats.anderson(logs, "norm", method="interpolate").statistic
    corrected = expected * (1.0 + 0.75 / 80 + 2.25 / 80**2)
    assert fit_execution_times(samples).goodness == pytest.approx(corrected, rel=1e-6)


def test_equal_samples_have_no_spread() -> None:
    fitted = fit_execution_times([0.2] * 30)
    assert fitted.is_lognormal
    assert fitted.times.mean_s == pytest.approx(0.2)
    assert fitted.times.cv == 0.0
    assert (fitted.times.share_within(0.19), fitted.times.share_within(0.21)) == (0.0, 1.0)


@pytest.mark.parametrize("samples", [[], [0.0], [0.1, -1.0], [0.1, math.nan], [math.inf]])
def test_samples_that_are_no_times_are_refused(samples: list[float]) -> None:
    with pytest.raises(ConfigError, match="execution time"):
        fit_execution_times(samples)


@given(CVS, st.floats(1.05, 20.0), st.booleans())
def test_weights_add_up_to_what_is_within_the_limit(
    cv: float, limit: float, is_empirical: bool
) -> None:
    times: ExecutionTimes = LogNormalTimes(1.0, cv)
    if is_empirical:
        times = EmpiricalTimes(draw(LogNormalTimes(1.0, cv), 200, seed=1))
    points = times.points(limit)
    assert sum(weight for _, weight in points) == pytest.approx(times.share_within(limit), abs=2e-3)
    assert all(0.0 < time <= limit * (1 + 1e-9) for time, _ in points)


@given(CVS)
def test_points_have_the_mean_and_the_residual_falls(cv: float) -> None:
    times = LogNormalTimes(2.0, cv)
    mean = sum(time * weight for time, weight in times.points(math.inf))
    assert mean == pytest.approx(2.0, rel=0.02)
    residuals = [times.residual_beyond(0.25 * i) for i in range(1, 60)]
    assert residuals == sorted(residuals, reverse=True)
    # The mean of a residual execution is half the second moment over the mean.
    area = 0.25 * (0.5 + sum(residuals))
    assert area == pytest.approx(2.0 * (1.0 + cv**2) / 2.0, rel=0.12)


def test_the_residual_of_samples_is_exact() -> None:
    times = EmpiricalTimes([1.0, 3.0])
    # Three quarters of the time belong to the long execution.
    assert times.residual_beyond(1.0) == pytest.approx(0.5)
    assert times.residual_beyond(0.0) == pytest.approx(1.0)
    assert times.residual_beyond(4.0) == 0.0
    assert times.points(0.5) == []
