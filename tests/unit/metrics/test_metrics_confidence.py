from __future__ import annotations

import math
from importlib import import_module
from types import ModuleType

import numpy as np
import pytest

from headgate.core.clock import MILLISECOND_NS, SECOND_NS
from headgate.core.states import Outcome
from headgate.metrics.columns import RequestColumns, build_requests
from headgate.metrics.confidence import mean_interval, resample_windows, run_figures, student_t


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


def burst(late: int) -> RequestColumns:
    """200 requests in 20 s; those of the first `late` windows of 1 s are late, after 100 ms."""
    arrival_ns = np.arange(200) * SECOND_NS // 10
    is_late = arrival_ns < late * SECOND_NS
    return build_requests(
        arrival_ns,
        finished_ns=arrival_ns + np.where(is_late, 100, 10) * MILLISECOND_NS,
        outcome=np.where(is_late, Outcome.LATE, Outcome.MET),
    )


def test_figures_of_a_run() -> None:
    figures = run_figures(burst(late=4))
    assert (figures.in_time, figures.refused) == (0.8, 0)
    assert (figures.p50_ms, figures.p95_ms, figures.p99_ms) == (10.0, 100.0, 100.0)
    nothing = run_figures(build_requests([]))
    assert nothing.in_time == 1.0
    assert math.isnan(nothing.p50_ms)


def test_windows_are_drawn_whole() -> None:
    """One burst in 20 windows: a draw has it never, once, or several times."""
    drawn = [figures.in_time for figures in resample_windows(burst(late=1), 200, seed=1)]
    assert {round(20 * (1 - share), 6) for share in drawn} <= set(range(20))
    assert np.mean(drawn) == pytest.approx(0.95, abs=0.01)
    assert np.std(drawn) == pytest.approx(math.sqrt(20 * 0.05 * 0.95) / 20, rel=0.2)
    steady = list(resample_windows(burst(late=0), 10, seed=1))
    assert {figures.in_time for figures in steady} == {1.0}
