"""Forecasts are scored by backend-time at equal violations."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.clock import SECOND_NS
from headgate.planning.autoscaling.waiting_time import erlang_b
from headgate.planning.capacity.backtest import (
    SCALE_MAX,
    Backtest,
    ReplayModel,
    forecast_rates,
    known_rates,
    load_limits,
    ranked,
    split_counts,
    violation_share,
)
from headgate.planning.capacity.mix import Floats, Ints
from headgate.planning.forecast import ewma, forecast_rules, last_value

MODEL = ReplayModel(
    bucket_ns=10 * SECOND_NS,
    setup_ns=20 * SECOND_NS,
    service_ns=SECOND_NS // 10,
    latency_ns=SECOND_NS // 2,
    level=0.01,
    backends_max=100,
)


def share(backends: int, load: float, patience: float) -> float:
    """One cell of `violation_share`."""
    return float(violation_share(np.array([backends]), np.array([load]), patience)[0])


def simulated_share(backends: int, load: float, patience: float, requests: int) -> float:
    """The share of requests that a queue drops when they would wait longer than their patience."""
    rng = random.Random(backends)
    free = [0.0] * backends
    now, dropped = 0.0, 0
    for _ in range(requests):
        now += rng.expovariate(load)
        if max(0.0, free[0] - now) > patience:
            dropped += 1
        else:
            heapq.heapreplace(free, max(now, free[0]) + rng.expovariate(1.0))
    return dropped / requests


@given(backends=st.integers(1, 60), load=st.floats(0.01, 100))
def test_without_patience_it_is_a_loss_system(backends: int, load: float) -> None:
    assert share(backends, load, 0.0) == pytest.approx(erlang_b(backends, load))


@pytest.mark.parametrize(
    ("backends", "load", "patience"),
    [(1, 0.7, 4.0), (8, 8.0, 4.0), (8, 7.0, 0.5), (20, 24.0, 2.0), (3, 3.0, 1.0)],
)
def test_violations_of_a_simulated_queue(backends: int, load: float, patience: float) -> None:
    found = simulated_share(backends, load, patience, requests=200_000)
    assert share(backends, load, patience) == pytest.approx(found, rel=0.1)


@given(
    backends=st.lists(st.integers(1, 200), min_size=1, max_size=30),
    load=st.floats(0, 500),
    patience=st.floats(0, 50),
)
def test_more_backends_drop_less(backends: list[int], load: float, patience: float) -> None:
    """Whatever their order in the array, and however far from saturation."""
    ordered = np.array(sorted(backends))
    shares = violation_share(ordered, np.full(len(ordered), load), patience)
    assert (np.diff(shares) <= 1e-12).all()
    assert ((shares >= max(0.0, 1.0 - ordered.max() / max(load, 1e-9)) - 1e-9) & (shares < 1)).all()
    shuffled = violation_share(np.array(backends), np.full(len(backends), load), patience)
    assert sorted(shuffled.tolist(), reverse=True) == pytest.approx(shares.tolist())


def test_the_limit_of_a_load_is_at_the_level() -> None:
    limits = load_limits(50, patience=4.0, level=0.01)
    numbers = np.arange(1, 51)
    assert violation_share(numbers, limits, 4.0) == pytest.approx(np.full(50, 0.01))
    assert (np.diff(limits) > 0).all()


def test_a_forecast_is_for_the_bucket_in_which_backends_are_ready() -> None:
    """A set-up of two buckets: what follows bucket 0 is decided at its end, for bucket 3."""
    counts = np.arange(10, 110, 10)
    assert MODEL.lead == 3
    assert replace(MODEL, setup_ns=15 * SECOND_NS).lead == 3
    assert replace(MODEL, setup_ns=0).lead == 1
    rates = forecast_rates(counts, last_value, MODEL, window_ns=60 * SECOND_NS)
    assert rates.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert known_rates(counts, MODEL).tolist() == [4, 5, 6, 7, 8, 9, 10]
    trended = forecast_rules()["linear_regression"]
    rising = forecast_rates(counts, trended, MODEL, window_ns=60 * SECOND_NS)
    assert rising[1:] == pytest.approx(known_rates(counts, MODEL)[1:])


@pytest.mark.parametrize("name", forecast_rules())
def test_no_rule_sees_the_future(name: str) -> None:
    counts = _noisy_cycle(200)
    changed = counts.copy()
    changed[120:] = 7
    first, second = (
        forecast_rates(each, forecast_rules()[name], MODEL, window_ns=300 * SECOND_NS)
        for each in (counts, changed)
    )
    assert (first[:120] == second[:120]).all()
    assert (first[120:] != second[120:]).any()


def test_every_rule_is_scored_at_the_same_violations() -> None:
    """And the forecast that is right, and smooth, is the cheapest."""
    counts = _noisy_cycle(600)
    backtest = Backtest(counts, MODEL)
    scores = {
        name: backtest.score(name, forecast_rates(counts, rule, MODEL, 300 * SECOND_NS))
        for name, rule in forecast_rules(period=100).items()
    }
    smooth = backtest.score("smooth", _cycle(600)[MODEL.lead :] / 10)
    for score in scores.values():
        assert score.is_reached and score.violations == MODEL.level
        assert score.backend_s > smooth.backend_s
    assert ranked(list(scores.values()))[-1].backend_s == max(s.backend_s for s in scores.values())


def test_the_error_is_not_the_score() -> None:
    """A third of a forecast has a large error, and the same price with three times the scale."""
    counts = _noisy_cycle(300)
    backtest = Backtest(counts, MODEL)
    rates = forecast_rates(counts, ewma, MODEL, 300 * SECOND_NS)
    whole, third = backtest.score("whole", rates), backtest.score("third", rates / 3)
    assert third.adjustment == pytest.approx(3 * whole.adjustment, rel=1e-3)
    assert third.backend_s == pytest.approx(whole.backend_s, rel=1e-3)
    assert third.error > 3 * whole.error


def test_a_forecast_that_is_too_low_by_a_constant() -> None:
    """A margin repairs it, and a scale does not."""
    counts = _noisy_cycle(300)
    rates = known_rates(counts, MODEL)
    by_margin = Backtest(counts, MODEL, "margin")
    right, low = by_margin.score("right", rates + 5), by_margin.score("low", rates)
    assert low.adjustment == pytest.approx(right.adjustment + 5, abs=1e-3)
    assert low.backend_s == pytest.approx(right.backend_s, rel=1e-3)


def test_no_scale_raises_a_forecast_of_zero() -> None:
    counts = np.full(50, 1000)
    nothing = np.zeros(50 - MODEL.lead)
    score = Backtest(counts, MODEL).score("nothing", nothing)
    assert not score.is_reached and score.adjustment == SCALE_MAX
    assert score.violations > MODEL.level
    assert Backtest(counts, MODEL, "margin").score("nothing", nothing).is_reached
    good = Backtest(counts, MODEL).score("good", known_rates(counts, MODEL))
    assert [each.name for each in ranked([score, good])] == ["good", "nothing"]


def test_a_pool_that_is_too_small() -> None:
    counts = np.full(50, 10_000)  # 100 Erlangs
    model = replace(MODEL, backends_max=60)
    for by in ("scale", "margin"):
        score = Backtest(counts, model, by).score("known", known_rates(counts, model))
        assert not score.is_reached
        assert score.violations == pytest.approx(0.4, abs=0.01)


def test_backend_time_counts_buckets_and_starts() -> None:
    """One backend, then three, then one: two are started, and paid while they are set up."""
    counts = np.array([10] * 10 + [150] * 5 + [10] * 5)
    rates = known_rates(counts, MODEL)
    found = Backtest(counts, MODEL).replay("known", rates, position=0.0)
    limits = load_limits(10, MODEL.patience, MODEL.level)
    high = int(np.searchsorted(limits, 1.5)) + 1
    assert high == 3 and limits[0] > 0.1
    assert found.starts == high - 1
    buckets = 7 + 5 * high + 5
    assert found.backend_s == buckets * 10 + (high - 1) * 20
    assert found.adjustment == 1.0 and found.error == 0.0


def test_one_backend_that_is_more_than_enough() -> None:
    """Nothing is cheaper than one, so violations stay below the level."""
    counts = np.full(30, 1)
    score = Backtest(counts, MODEL).score("known", known_rates(counts, MODEL))
    assert score.is_reached and score.violations < MODEL.level
    assert score.backend_s == 27 * 10


def test_frontends_share_the_arrivals() -> None:
    counts = _noisy_cycle(200)
    rows = split_counts(counts, 8, seed=1)
    assert rows.shape == (8, 200) and (rows.sum(axis=0) == counts).all()
    assert rows.sum(axis=1) == pytest.approx(np.full(8, counts.sum() / 8), rel=0.05)
    assert (split_counts(counts, 1, seed=1) == counts).all()


def _cycle(buckets: int) -> Floats:
    rates: Floats = 500 + 300 * np.sin(np.arange(buckets) * 2 * np.pi / 100)
    return rates


def _noisy_cycle(buckets: int) -> Ints:
    return np.random.default_rng(3).poisson(_cycle(buckets))
