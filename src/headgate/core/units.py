"""Quantities with units, as people write them in YAML and on the command line.

A bare number is refused: `timeout: 30` does not say whether it means seconds.
The arithmetic is exact (`Fraction`), so `0.1ms` is 100,000 ns and not one less. Every parser
raises `ConfigError` naming `where` (the file), `key`, the value and the units it allows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Final

from headgate.core.clock import HOUR_NS, MICROSECOND_NS, MILLISECOND_NS, NEVER_NS, SECOND_NS
from headgate.core.errors import ConfigError

DURATION_NS: Final[Mapping[str, int]] = {
    "ns": 1,
    "us": MICROSECOND_NS,
    "ms": MILLISECOND_NS,
    "s": SECOND_NS,
    "min": 60 * SECOND_NS,
    "h": HOUR_NS,
    "d": 24 * HOUR_NS,
}
SIZE_BYTES: Final[Mapping[str, int]] = {
    "B": 1,
    "kB": 10**3,
    "KiB": 2**10,
    "MB": 10**6,
    "MiB": 2**20,
    "GB": 10**9,
    "GiB": 2**30,
    "TB": 10**12,
    "TiB": 2**40,
}
_RATE_PER_S: Final[Mapping[str, Fraction]] = {
    "/s": Fraction(1),
    "/min": Fraction(1, 60),
    "/h": Fraction(1, 3600),
    "rps": Fraction(1),
}
_PRICE_PER_HOUR: Final[Mapping[str, int]] = {"/h": 1, "/min": 60, "/s": 3600}
_PRICE_PER_GB_SECOND: Final[Mapping[str, Fraction]] = {
    "/GB-s": Fraction(1),
    "/GB-h": Fraction(1, 3600),
}
_PRICE_PER_REQUEST: Final[Mapping[str, Fraction]] = {
    "/request": Fraction(1),
    "/1k": Fraction(1, 10**3),
    "/1M": Fraction(1, 10**6),
}

# Digits are bounded so that no input, however silly, makes a number of a million digits.
_NUMBER_AND_UNIT: Final = re.compile(
    r"(?P<sign>[+-]?)(?P<number>(?:\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})(?:[eE][+-]?\d{1,2})?)"
    r"\s*(?P<unit>.*)",
    re.ASCII,
)


def parse_duration(value: object, *, where: str | None = None, key: str | None = None) -> int:
    """Return whole nanoseconds. Only `0` may go without a unit.

    >>> parse_duration("150ms"), parse_duration("1.5 min"), parse_duration(0)
    (150000000, 90000000000, 0)
    """
    if not isinstance(value, bool) and value in (0, "0"):
        return 0
    duration_ns = _whole(_parse(value, DURATION_NS, where, key), "a nanosecond", value, where, key)
    if duration_ns >= NEVER_NS:
        raise ConfigError("is longer than 292 years", where=where, key=key, value=value)
    return duration_ns


def parse_size(value: object, *, where: str | None = None, key: str | None = None) -> int:
    """Return whole bytes: `kB` is 1000 and `KiB` is 1024.

    >>> parse_size("512MB"), parse_size("2GiB")
    (512000000, 2147483648)
    """
    return _whole(_parse(value, SIZE_BYTES, where, key), "a byte", value, where, key)


def parse_rate(value: object, *, where: str | None = None, key: str | None = None) -> float:
    """Return a rate per second.

    >>> parse_rate("100/s"), parse_rate("30/min"), parse_rate("5 rps")
    (100.0, 0.5, 5.0)
    """
    return float(_parse(value, _RATE_PER_S, where, key))


def parse_fraction(value: object, *, where: str | None = None, key: str | None = None) -> float:
    """Return a fraction between 0 and 1. It has no unit, so a bare number is fine.

    >>> parse_fraction("99.9%"), parse_fraction("0.999"), parse_fraction(1)
    (0.999, 0.999, 1.0)
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    text = str(value) if is_number else value
    allowed = "0% to 100%, or 0 to 1, such as 99% or 0.99"
    try:
        fraction = _parse(text, {"%": Fraction(1, 100), "": Fraction(1)}, where, key)
    except ConfigError as error:
        raise ConfigError(
            error.problem, where=where, key=key, value=value, allowed=allowed
        ) from None
    if fraction > 1:
        raise ConfigError("is more than one", where=where, key=key, value=value, allowed=allowed)
    return float(fraction)


def parse_price_per_hour(
    value: object, *, where: str | None = None, key: str | None = None
) -> float:
    """Return dollars per hour of holding something.

    >>> parse_price_per_hour("$0.50/h"), parse_price_per_hour("$0.001/s")
    (0.5, 3.6)
    """
    return _parse_price(value, _PRICE_PER_HOUR, where, key)


def parse_price_per_gb_second(
    value: object, *, where: str | None = None, key: str | None = None
) -> float:
    """Return dollars per gigabyte of memory and second of running.

    >>> parse_price_per_gb_second("$0.0000166667/GB-s")
    1.66667e-05
    """
    return _parse_price(value, _PRICE_PER_GB_SECOND, where, key)


def parse_price_per_request(
    value: object, *, where: str | None = None, key: str | None = None
) -> float:
    """Return dollars per request.

    >>> parse_price_per_request("$0.20/1M"), parse_price_per_request("$0.50/1k")
    (2e-07, 0.0005)
    """
    return _parse_price(value, _PRICE_PER_REQUEST, where, key)


def parse_dollars(value: object, *, where: str | None = None, key: str | None = None) -> float:
    """Return an amount of money, which has no unit but its dollar.

    >>> parse_dollars("$10"), parse_dollars("$0.05")
    (10.0, 0.05)
    """
    text = str(value).strip()
    allowed = "$10, $0.05"
    if not text.startswith("$"):
        problem = "an amount starts with $"
        raise ConfigError(problem, where=where, key=key, value=value, allowed=allowed)
    try:
        return float(_parse(text[1:], {"": Fraction(1)}, where, key))
    except ConfigError as error:  # which shows the value without its dollar
        problem = error.problem.replace("a number with a unit", "a number")
        raise ConfigError(problem, where=where, key=key, value=value, allowed=allowed) from None


def format_duration(duration_ns: int) -> str:
    """Return the shortest exact text; `parse_duration` gives the same number back.

    >>> [format_duration(ns) for ns in (0, 150_000_000, 90_000_000_000, 1_234_567)]
    ['0s', '150ms', '1.5min', '1.234567ms']
    >>> format_duration(NEVER_NS), format_duration(-2_000)
    ('never', '-2us')
    """
    if duration_ns == NEVER_NS:
        return "never"
    sign = "-" if duration_ns < 0 else ""
    return sign + (_shortest(abs(duration_ns), DURATION_NS) or "0s")


def format_size(size_bytes: int) -> str:
    """Return the shortest exact text; `parse_size` gives the same number back.

    >>> [format_size(size) for size in (0, 512_000_000, 2**31, 1_234_567)]
    ['0B', '512MB', '2GiB', '1.234567MB']
    """
    return _shortest(size_bytes, SIZE_BYTES) or "0B"


def _parse(
    value: object,
    units: Mapping[str, int] | Mapping[str, Fraction],
    where: str | None,
    key: str | None,
) -> Fraction:
    """Return the number times its unit."""
    match = _NUMBER_AND_UNIT.fullmatch(str(value).strip())
    unit = match["unit"].replace(" ", "").replace("µ", "u").replace("μ", "u") if match else ""
    factor = units.get(unit)
    if match is None or isinstance(value, bool):
        problem = "is not a number with a unit"
    elif match["sign"] == "-":
        problem = "must not be negative"
    elif not unit and factor is None:
        problem = "needs a unit"
    elif factor is None:
        problem = "has too many digits" if unit[0].isdigit() else f"unknown unit {unit!r}"
    else:
        return Fraction(match["number"]) * factor
    allowed = ", ".join(unit for unit in units if unit)
    raise ConfigError(problem, where=where, key=key, value=value, allowed=allowed)


def _parse_price(
    value: object,
    units: Mapping[str, int] | Mapping[str, Fraction],
    where: str | None,
    key: str | None,
) -> float:
    text = str(value).strip()
    if not text.startswith("$"):
        allowed = ", ".join(f"$0.50{unit}" for unit in units)
        raise ConfigError(
            "a price starts with $", where=where, key=key, value=value, allowed=allowed
        )
    return float(_parse(text[1:], units, where, key))


def _whole(
    amount: Fraction, smallest: str, value: object, where: str | None, key: str | None
) -> int:
    if amount.denominator != 1:
        raise ConfigError(f"is finer than {smallest}", where=where, key=key, value=value)
    return amount.numerator


def _shortest(amount: int, units: Mapping[str, int]) -> str:
    """Return the exact text with the fewest digits; among equals, the one in the largest unit.

    Empty when `amount` is smaller than every unit.
    """
    texts: list[tuple[int, int, str]] = []
    with localcontext() as context:
        context.prec = 80  # a sixteen-digit number of bytes in TiB has some fifty digits
        for unit, size in units.items():
            number = format((Decimal(amount) / size).normalize(), "f")
            # A third of an hour has no end in decimals: such a unit is no candidate.
            if amount >= size and Fraction(number) * size == amount:
                texts.append((len(number.replace(".", "")), -size, number + unit))
    return min(texts)[2] if texts else ""
