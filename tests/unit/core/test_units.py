from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.clock import NEVER_NS
from headgate.core.errors import ConfigError
from headgate.core.units import (
    format_duration,
    format_size,
    parse_dollars,
    parse_duration,
    parse_fraction,
    parse_price_per_gb_second,
    parse_price_per_hour,
    parse_price_per_request,
    parse_rate,
    parse_size,
)

PARSERS: list[Callable[[object], float]] = [
    parse_duration,
    parse_size,
    parse_rate,
    parse_price_per_hour,
    parse_price_per_gb_second,
    parse_price_per_request,
]


@pytest.mark.parametrize(
    ("text", "expected_ns"),
    [
        ("150ms", 150_000_000),
        ("2s", 2_000_000_000),
        ("1.5 min", 90_000_000_000),
        ("20us", 20_000),
        ("20µs", 20_000),
        ("3h", 10_800_000_000_000),
        ("10ns", 10),
        ("0.1ms", 100_000),  # a float would give 100000.00000000001
        ("1e-3s", 1_000_000),
        ("0", 0),
        (0, 0),
        ("0s", 0),
    ],
)
def test_durations_are_exact(text: object, expected_ns: int) -> None:
    assert parse_duration(text) == expected_ns


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (30, "needs a unit"),
        ("30", "needs a unit"),
        (1.5, "needs a unit"),
        ("-2s", "must not be negative"),
        (-1, "must not be negative"),
        ("3 m", "unknown unit 'm'"),
        ("3S", "unknown unit 'S'"),
        ("0.1ns", "finer than a nanosecond"),
        ("300000d", "longer than 292 years"),
        ("soon", "is not a number with a unit"),
        ("", "is not a number with a unit"),
        (None, "is not a number with a unit"),
        (True, "is not a number with a unit"),
        (False, "is not a number with a unit"),
        ("9" * 5000 + "s", "too many digits"),
        ("1e99999999s", "too many digits"),
    ],
)
def test_a_bad_duration_is_refused(value: object, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_duration(value)


def test_an_error_names_the_file_the_key_the_value_and_the_units() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_duration(30, where="app.yaml", key="slo.latency")
    assert str(caught.value) == (
        "app.yaml: slo.latency: 30: needs a unit (allowed: ns, us, ms, s, min, h, d)"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [("512MB", 512_000_000), ("2GiB", 2**31), ("10kB", 10_000), ("1.5 KiB", 1536), ("0B", 0)],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("100/s", 100.0), ("30/min", 0.5), ("5 rps", 5.0), ("36 / h", 0.01)],
)
def test_rates(text: str, expected: float) -> None:
    assert parse_rate(text) == expected


def test_prices() -> None:
    assert parse_price_per_hour("$0.50/h") == 0.5
    assert parse_price_per_hour("$0.0001/s") == 0.36
    assert parse_price_per_gb_second("$0.0000166667/GB-s") == 0.0000166667
    assert parse_price_per_request("$0.20/1M") == 2e-7


def test_amounts_have_a_dollar_and_no_unit() -> None:
    assert [parse_dollars(text) for text in ("$10", "$0.05", "$ 1e2", "$0")] == [10, 0.05, 100, 0]
    for value in ("10", 10, "$", "$-1", "$10/1k", "$10/h", "5€", "$nan", "$ten", True, None):
        with pytest.raises(ConfigError) as caught:
            parse_dollars(value, where="app.yaml", key="budget.per_day")
        line = str(caught.value)
        assert line.startswith("app.yaml: budget.per_day: ")
        assert line.endswith("(allowed: $10, $0.05)")


@pytest.mark.parametrize(("value", "expected"), [("99.9%", 0.999), ("0.999", 0.999), (0.5, 0.5)])
def test_fractions(value: object, expected: float) -> None:
    assert parse_fraction(value) == expected


@pytest.mark.parametrize("value", ["101%", "1.01", 2, "-1%", float("nan"), "half", True])
def test_a_fraction_outside_zero_to_one_is_refused(value: object) -> None:
    with pytest.raises(ConfigError):
        parse_fraction(value)


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize("value", [5, "5", "-5ms", "5 parsecs", "$5", None])
def test_every_parser_says_what_is_allowed(parse: Callable[[object], float], value: object) -> None:
    with pytest.raises(ConfigError, match="allowed: "):
        parse(value)


@given(st.integers(0, NEVER_NS - 1))
def test_a_formatted_duration_parses_back(duration_ns: int) -> None:
    assert parse_duration(format_duration(duration_ns)) == duration_ns


@given(st.integers(0, 2**60))
def test_a_formatted_size_parses_back(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == size_bytes


@pytest.mark.parametrize(
    ("duration_ns", "text"),
    [(999, "999ns"), (100 * 10**9, "100s"), (5400 * 10**9, "1.5h"), (86_400 * 10**9, "1d")],
)
def test_a_duration_is_formatted_in_the_unit_people_expect(duration_ns: int, text: str) -> None:
    assert format_duration(duration_ns) == text
