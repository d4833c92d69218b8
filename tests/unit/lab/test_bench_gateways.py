"""The comparison of one gateway with two, from made-up measurements."""

from __future__ import annotations

from headgate.lab.bench import gateways
from headgate.lab.bench.live.load_driver import LoadMeasurement


def measured(*rates: tuple[float, float], errors: int = 0) -> gateways.Measured:
    """Rates of one gateway and of two, round by round."""
    return {
        (number, count, 32): LoadMeasurement(rate, 1.0, 2.0, errors)
        for number, pair in enumerate(rates)
        for count, rate in zip(gateways.GATEWAYS, pair, strict=True)
    }


def test_ratios_are_taken_within_a_round() -> None:
    """The machine was half as fast in the second round."""
    result = gateways.report(measured((1000.0, 1800.0), (500.0, 900.0), (1000.0, 1800.0)))
    assert [row["times_one"] for row in result.rows] == [1.0, 1.8]
    assert [row["requests_per_s"] for row in result.rows] == [1000, 1800]
    assert not result.failing


def test_an_error_fails_the_check() -> None:
    assert gateways.report(measured((1.0, 2.0), errors=1)).failing
