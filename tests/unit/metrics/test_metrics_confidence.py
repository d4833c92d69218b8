from __future__ import annotations

import math
from importlib import import_module
from types import ModuleType

import numpy as np
import pytest

from headgate.metrics.confidence import batch_means, mean_interval, student_t


@pytest.fixture(scope="module")
def stats() -> ModuleType:
    """Imported late: it takes a second, and every process of `make test` collects all tests."""
    return import_module("scipy.stats")


@pytest.mark.parametrize("level", [0.5, 0.8, 0.9, 0.95, 0.99, 0.999])
def test_student_t_agrees_with_scipy(stats: ModuleType, level: float) -> None:
    for dof in [*range(1, 40), 100, 199, 200, 201, 1000, 1_000_000]:
        expected = stats.t.ppf((1 + level) / 2, dof)
        assert student_t(level, dof) == pytest.approx(expected, rel=1e-5)


def test_interval_agrees_with_scipy(stats: ModuleType) -> None:
    values = [3.1, 2.7, 4.4, 3.9, 3.3]
    low, high = stats.t.interval(0.9, 4, np.mean(values), stats.sem(values))
    interval = mean_interval(values, 0.9)
    assert [interval.low, interval.high] == pytest.approx([low, high])
    assert interval.n == 5


def test_one_value_has_no_interval() -> None:
    interval = mean_interval([7.0])
    assert interval.mean == 7.0
    assert math.isnan(interval.low)
    assert math.isnan(interval.high)


def test_ninety_percent_of_the_intervals_contain_the_mean() -> None:
    draws = np.random.default_rng(5).normal(10.0, 3.0, size=(400, 6))
    intervals = [mean_interval(row.tolist(), 0.9) for row in draws]
    held = sum(interval.low <= 10.0 <= interval.high for interval in intervals)
    assert 0.85 <= held / 400 <= 0.95


def test_batch_means_are_wider_than_the_naive_interval_of_a_correlated_series() -> None:
    """A slow random walk back to 0: neighbours are alike, so few values are independent."""
    noise = np.random.default_rng(1).normal(size=20_000)
    series = np.zeros(20_000)
    for i in range(1, 20_000):
        series[i] = 0.95 * series[i - 1] + noise[i]
    naive, batched = mean_interval(series.tolist()), batch_means(series)
    assert batched.high - batched.low > 3 * (naive.high - naive.low)
    assert batched.low < 0.0 < batched.high
    assert batched.n == 20


def test_batches_leave_out_the_warm_up() -> None:
    """Seven values in three batches: the first one is left out."""
    interval = batch_means([1000.0, 1, 3, 2, 2, 0, 4], batches=3)
    assert interval.mean == 2.0
