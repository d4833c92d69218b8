"""Synthetic arrivals. Seeds are fixed; tolerances are about four standard errors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from headgate.core.clock import SECOND_NS
from headgate.core.errors import ConfigError
from headgate.workload.arrivals import Arrivals
from headgate.workload.generators import deterministic, gamma, mmpp, poisson, stepped

HOUR_NS = 3600 * SECOND_NS


def cv_of_gaps(arrivals: Arrivals) -> float:
    gaps = np.diff(arrivals.times_ns)
    return float(gaps.std() / gaps.mean())


def dispersion(arrivals: Arrivals, step_ns: int) -> float:
    counts = np.bincount(arrivals.times_ns // step_ns, minlength=arrivals.duration_ns // step_ns)
    return float(counts.var() / counts.mean())


def test_deterministic_arrivals_do_not_drift() -> None:
    times_ns = deterministic(3.0, HOUR_NS).times_ns
    assert len(times_ns) == 10_800
    assert (times_ns == np.arange(10_800) * SECOND_NS // 3).all()


def test_deterministic_stops_before_the_end() -> None:
    assert deterministic(1.0, 3 * SECOND_NS).times_ns.tolist() == [0, SECOND_NS, 2 * SECOND_NS]
    assert deterministic(1.0, 3 * SECOND_NS + 1).times_ns[-1] == 3 * SECOND_NS


def test_poisson_has_its_rate_and_exponential_inter_arrival_times() -> None:
    arrivals = poisson(50.0, HOUR_NS, seed=1)
    assert arrivals.mean_rate_per_s == pytest.approx(50, rel=0.01)
    assert cv_of_gaps(arrivals) == pytest.approx(1, rel=0.01)
    assert dispersion(arrivals, SECOND_NS) == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("cv", [0.25, 1.0, 4.0])
def test_gamma_has_its_rate_and_cv(cv: float) -> None:
    arrivals = gamma(50.0, cv, HOUR_NS, seed=2)
    assert arrivals.mean_rate_per_s == pytest.approx(50, rel=0.01 * max(cv, 1))
    assert cv_of_gaps(arrivals) == pytest.approx(cv, rel=0.03)


def test_mmpp_has_the_mean_rate_and_dispersion_of_theory() -> None:
    """The index of dispersion of a two-state MMPP is known in closed form for any window."""
    high, low, out_of_high, out_of_low = 100.0, 10.0, 1 / 2.0, 1 / 6.0
    duration_ns, window_s = 20 * HOUR_NS, 10.0
    arrivals = mmpp([high, low], [2 * SECOND_NS, 6 * SECOND_NS], duration_ns, seed=3)
    both = out_of_high + out_of_low
    mean = (high * out_of_low + low * out_of_high) / both
    limit = 2 * (high - low) ** 2 * out_of_high * out_of_low / (both**3 * mean)
    expected = 1 + limit * (1 - (1 - np.exp(-both * window_s)) / (both * window_s))
    assert arrivals.mean_rate_per_s == pytest.approx(mean, rel=0.03)
    assert dispersion(arrivals, int(window_s) * SECOND_NS) == pytest.approx(expected, rel=0.1)


def test_mmpp_visits_each_of_three_states_for_its_share() -> None:
    """With rates 0, 0 and 90, and equal shares of time, the mean is 30."""
    dwells_ns = [SECOND_NS, SECOND_NS, SECOND_NS]
    arrivals = mmpp([0.0, 0.0, 90.0], dwells_ns, 5 * HOUR_NS, seed=4)
    assert arrivals.mean_rate_per_s == pytest.approx(30, rel=0.05)


def test_stepped_changes_its_rate_and_holds_the_last() -> None:
    arrivals = stepped([100.0, 0.0, 400.0], 10 * SECOND_NS, 40 * SECOND_NS, seed=5)
    counts = np.bincount(arrivals.times_ns // (10 * SECOND_NS), minlength=4)
    assert counts[1] == 0
    assert counts[[0, 2, 3]] == pytest.approx([1000, 4000, 4000], rel=0.13)


def test_stepped_is_cut_at_the_end() -> None:
    arrivals = stepped([100.0, 100.0], 10 * SECOND_NS, 5 * SECOND_NS, seed=5)
    assert arrivals.duration_ns == 5 * SECOND_NS
    assert len(arrivals) == pytest.approx(500, rel=0.2)


MAKERS: dict[str, Callable[[int], Arrivals]] = {
    "poisson": lambda seed: poisson(20.0, 10 * SECOND_NS, seed=seed),
    "gamma": lambda seed: gamma(20.0, 2.0, 10 * SECOND_NS, seed=seed),
    "mmpp": lambda seed: mmpp([5.0, 50.0], [SECOND_NS, SECOND_NS], 10 * SECOND_NS, seed=seed),
    "stepped": lambda seed: stepped([5.0, 50.0], SECOND_NS, 10 * SECOND_NS, seed=seed),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_seed_fixes_the_arrivals(name: str) -> None:
    first, again, other = (MAKERS[name](seed).times_ns.tolist() for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    "make",
    [
        lambda: deterministic(0.0, SECOND_NS),
        lambda: poisson(-1.0, SECOND_NS, seed=0),
        lambda: poisson(float("nan"), SECOND_NS, seed=0),
        lambda: poisson(1e12, HOUR_NS, seed=0),
        lambda: gamma(1.0, 0.0, SECOND_NS, seed=0),
        lambda: gamma(1.0, 1e9, SECOND_NS, seed=0),
        lambda: mmpp([1.0], [SECOND_NS], SECOND_NS, seed=0),
        lambda: mmpp([1.0, 2.0], [SECOND_NS], SECOND_NS, seed=0),
        lambda: mmpp([1.0, 2.0], [SECOND_NS, 0], SECOND_NS, seed=0),
        lambda: stepped([], SECOND_NS, SECOND_NS, seed=0),
        lambda: stepped([1.0, -2.0], SECOND_NS, SECOND_NS, seed=0),
    ],
)
def test_invalid_parameters_are_refused(make: Callable[[], Arrivals]) -> None:
    with pytest.raises(ConfigError):
        make()
