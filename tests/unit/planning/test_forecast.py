"""Counts of arrivals over a window, and the rules that forecast from them."""

from __future__ import annotations

import random
from math import cos, pi

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.clock import SECOND_NS
from headgate.planning.forecast import (
    ArrivalCounts,
    ArrivalForecaster,
    ForecastRule,
    Seasonal,
    ewma,
    find_period,
    holt,
    last_value,
    peak_quantile,
    trend,
)

RULES: tuple[ForecastRule, ...] = (trend, last_value, ewma, holt, peak_quantile, Seasonal())


@given(
    gaps_ns=st.lists(st.integers(0, 40), min_size=1, max_size=60),
    bucket_ns=st.integers(1, 10),
    length=st.integers(1, 8),
    start_ns=st.integers(0, 10**15),
    after_ns=st.integers(0, 100),
)
def test_buckets_hold_what_arrived_in_them(
    gaps_ns: list[int], bucket_ns: int, length: int, start_ns: int, after_ns: int
) -> None:
    """As counting anew from the list of arrivals finds them, wherever time begins."""
    counts = ArrivalCounts(bucket_ns, window_ns=length * bucket_ns)
    times_ns = [start_ns + sum(gaps_ns[1 : i + 1]) for i in range(len(gaps_ns))]
    for at_ns in times_ns:
        counts.observe(at_ns)
    now_ns = times_ns[-1] + after_ns
    whole = (now_ns - start_ns) // bucket_ns
    expected = [0.0] * whole
    for at_ns in times_ns:
        if (at_ns - start_ns) // bucket_ns < whole:
            expected[(at_ns - start_ns) // bucket_ns] += 1
    assert counts.buckets(now_ns) == expected[-length:]


def test_nothing_is_known_before_a_bucket_is_over() -> None:
    counts = ArrivalCounts(bucket_ns=10, window_ns=100)
    assert counts.buckets(5) == []
    counts.observe(7, amount=2.5)
    assert counts.buckets(16) == []
    assert counts.buckets(17) == [2.5]


@given(
    slope=st.floats(0, 10),
    start=st.floats(0, 100),
    count=st.integers(2, 20),
    ahead=st.integers(0, 20),
)
def test_a_trend_goes_on(slope: float, start: float, count: int, ahead: int) -> None:
    values = [start + slope * i for i in range(count)]
    expected = start + slope * (count - 1 + ahead)
    assert trend(values, ahead) == pytest.approx(expected, abs=1e-6)


@given(
    values=st.lists(st.floats(0, 1e6), min_size=1, max_size=40),
    ahead=st.floats(0, 100),
    rule=st.sampled_from(RULES),
)
def test_a_forecast_is_a_rate(values: list[float], ahead: float, rule: ForecastRule) -> None:
    """Finite and not negative, from one value on; and without a trend it is one of the values."""
    found = rule(values, ahead)
    assert 0.0 <= found < float("inf")
    if rule not in (trend, holt) and not isinstance(rule, Seasonal):
        assert min(values) * (1 - 1e-9) <= found <= max(values) * (1 + 1e-9)


@given(
    rate=st.floats(0, 1000),
    count=st.integers(1, 40),
    ahead=st.floats(0, 50),
    rule=st.sampled_from((*RULES, Seasonal(period=7))),
)
def test_a_constant_rate_goes_on(rate: float, count: int, ahead: float, rule: ForecastRule) -> None:
    assert rule([rate] * count, ahead) == pytest.approx(rate)


def test_holt_follows_a_ramp_and_damps_it() -> None:
    """It rises with the ramp, but a forecast far ahead stays bounded."""
    ramp = [float(value) for value in range(100)]
    assert ewma(ramp, 1) < holt(ramp, 1) < holt(ramp, 10) < holt(ramp, 1000) < 99 + 10
    assert holt(ramp, 1000) == pytest.approx(holt(ramp, 10_000))
    assert holt(ramp[::-1], 1000) >= 0.0


def test_a_season_is_repeated_at_this_seasons_height() -> None:
    season = [10.0, 20.0, 40.0, 20.0]
    assert [Seasonal(period=4)(season * 2, ahead) for ahead in (1, 2, 3, 7)] == [10, 20, 40, 40]
    higher = season * 2 + [value * 1.5 for value in season]
    assert Seasonal(period=4)(higher, 3) == pytest.approx((60 + 40 + 40) / 3 * 1.5)
    much_higher = season * 2 + [value * 100 for value in season]
    earlier = (4000 + 40 + 40) / 3
    assert Seasonal(period=4)(much_higher, 3) == pytest.approx(2 * earlier)  # not a hundredfold


def test_the_season_of_a_long_period_is_blurred() -> None:
    """A day of minutes: the noise of single minutes is averaged, the shape of the day is kept."""
    rng = random.Random(5)
    shape = [100 + 80 * cos(2 * pi * i / 1440) for i in range(1440)]
    values = [value + rng.gauss(0, 10) for value in shape * 3]
    rule = Seasonal(period=1440)
    errors = [abs(rule(values, ahead) - shape[ahead - 1]) for ahead in range(1, 1440, 60)]
    assert sum(errors) / len(errors) < 4.0


def test_no_season_is_known_in_the_first_one() -> None:
    values = [1.0, 2.0, 3.0]
    assert Seasonal(period=10)(values, 1) == ewma(values, 1)
    assert Seasonal()(values, 1) == ewma(values, 1)


@pytest.mark.parametrize("period", [5, 24, 100, 700])
def test_a_period_is_found_in_noise(period: int) -> None:
    rng = random.Random(period)
    for height in (0.0, 1.0):
        values = [
            100 + height * 80 * cos(2 * pi * i / period) + rng.gauss(0, 20)
            for i in range(4 * period + 100)
        ]
        found = find_period(values)
        if height == 0.0:
            assert found is None
        else:
            assert found is not None and abs(found - period) <= max(1, 0.03 * period)


def test_slow_changes_are_not_taken_for_a_period() -> None:
    """A random walk correlates with itself at some lag, by chance, but seldom at twice the lag."""
    rng = random.Random(1)
    found = 0
    for _ in range(40):
        level, values = 500.0, []
        for _ in range(400):
            level = max(0.0, level + rng.gauss(0, 10))
            values.append(level)
        found += find_period(values) is not None
    assert found <= 4


def test_the_period_of_rare_peaks() -> None:
    """As of a job that runs every hour: the peak itself is forecast, not its mean."""
    values = ([50.0] + [1.0] * 59) * 4
    assert find_period(values) == 60
    forecasts = [Seasonal()(values, ahead) for ahead in range(1, 61)]
    assert forecasts.index(max(forecasts)) == 0 and forecasts[0] == pytest.approx(50.0)


def test_a_found_period_is_searched_again() -> None:
    """When the load changes its rhythm, the rule follows as the window moves on."""
    rule = Seasonal()
    slow = ([40.0] + [0.0] * 9) * 10
    fast = ([40.0] + [0.0] * 4) * 20
    assert rule(slow, 1) == pytest.approx(40.0) and rule(slow, 6) == 0.0
    assert [rule(fast, 6) for _ in range(20)][-1] == pytest.approx(40.0)


def test_a_forecaster_counts_from_the_first_arrival() -> None:
    """The forecast is for a moment; values stand for the middle of their buckets."""
    forecaster = ArrivalForecaster(trend, SECOND_NS, window_ns=60 * SECOND_NS)
    start_ns = 12_345_678_901
    assert forecaster.ahead(start_ns, SECOND_NS) == 0.0
    for second in range(20):  # 2, 4, 6 ... in each second
        for i in range(2 * second + 2):
            forecaster.observe(start_ns + second * SECOND_NS + i)
    assert forecaster.ahead(start_ns + 20 * SECOND_NS, SECOND_NS) == pytest.approx(43.0)
