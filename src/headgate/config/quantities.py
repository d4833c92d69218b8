"""Quantities of the application file: how each is written, and the number that it becomes.

A field of the schema is declared with one of the types below, and holds a plain number in the unit
of its name (`drain_ns`, `body_bytes_max`). `decode` in `headgate.config.decoding` reads the text of
the file (`5ms`, `64MiB`) into it, within the bounds that the field declares with `Meta`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from math import inf
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, json

from headgate.core import units
from headgate.core.clock import NEVER_NS
from headgate.core.errors import ConfigError
from headgate.core.model import UNLIMITED

# Larger than any machine, yet small enough for sums of sizes to stay within 64 bits.
_SIZE_BYTES_MAX: Final = 10**18


@dataclass(frozen=True, slots=True)
class Quantity:
    """How a number with a unit is written in a file. `words` are numbers that have a name."""

    title: str  # empty: described by the type of the written value
    examples: tuple[object, ...]
    parse: Callable[[object], float]  # raises `ConfigError`
    format: Callable[[Any], object]
    written: Any = str  # type of the written value
    words: Mapping[str, float] = field(default_factory=dict)

    def read(self, value: object) -> float:
        """Return the number that is written as `value`. Raises `ConfigError`."""
        word = self.words.get(value) if isinstance(value, str) else None
        return self.parse(value) if word is None else word

    def write(self, number: float) -> object:
        """Return how a number is written: `read` gives it back."""
        words = [word for word, meaning in self.words.items() if meaning == number]
        return words[0] if words else self.format(number)

    @property
    def meta(self) -> Meta:
        """The annotation that makes a field this quantity.

        `headgate.config.schema` replaces the type of the number by the schema under `written`.
        """
        texts = {"title": self.title, "examples": list(self.examples)} if self.title else {}
        schema = {**texts, "written": json.schema(self.written)}
        return Meta(extra={"quantity": self}, extra_json_schema=schema)


def _parse_size(value: object) -> int:
    size_bytes = units.parse_size(value)
    if size_bytes > _SIZE_BYTES_MAX:
        raise ConfigError("is too large", allowed="up to 1000000TB")
    return size_bytes


def _parse_bandwidth(value: object) -> float:
    text = str(value)
    try:
        size_bytes = units.parse_size(text.removesuffix("/s"))
    except ConfigError:
        size_bytes = 0
    if size_bytes == 0 or not text.endswith("/s"):
        raise ConfigError("is not a bandwidth", allowed="10GB/s, 100MB/s, unlimited")
    return float(size_bytes)


def _parse_gpu_share(value: object) -> int:
    match = re.fullmatch(r"([0-9]{1,4})/7", str(value))
    if match is None:
        raise ConfigError("is not a share of a GPU", allowed="0/7, 1/7, ... 7/7")
    return int(match[1])


def _parse_cpus(value: object) -> int:
    milli = Fraction(str(value)) * 1000
    if milli.denominator != 1:
        raise ConfigError("has more than three decimals", allowed="2, 0.5, 0.125")
    return int(milli)


def _decimal(number: float) -> str:
    """Return a number without an exponent, which parses as the same number."""
    return format(Decimal(repr(number)), "f")


_DURATION: Final = Quantity(
    "duration",
    ("5ms", "1.5s", "10min"),
    units.parse_duration,
    lambda ns: ns and units.format_duration(ns),
    str | Literal[0],
)
_DURATION_OR_NEVER: Final = replace(_DURATION, words={"never": NEVER_NS})
_SIZE: Final = Quantity("size", ("100MB", "16GiB"), _parse_size, units.format_size)
_SIZE_OR_UNLIMITED: Final = replace(_SIZE, words={"unlimited": UNLIMITED})
_BANDWIDTH: Final = Quantity(
    "bandwidth",
    ("10GB/s", "unlimited"),
    _parse_bandwidth,
    lambda bytes_per_s: f"{units.format_size(int(bytes_per_s))}/s",
    words={"unlimited": 0.0},
)
_RATE: Final = Quantity("rate", ("100/s",), units.parse_rate, lambda rate: f"{rate:g}/s")
_PERCENTAGE: Final = Quantity(
    "percentage",
    ("99%", 0.99),
    units.parse_fraction,
    lambda share: f"{_decimal(round(100 * share, 12)).removesuffix('.0')}%",
    str | float,
)
_GPU_SHARE: Final = Quantity(
    "share of a GPU", ("3/7", "7/7"), _parse_gpu_share, lambda sevenths: f"{sevenths}/7"
)
_CPUS: Final = Quantity(
    "",
    (2, 0.5),
    _parse_cpus,
    lambda milli: milli / 1000,
    Annotated[float, Meta(ge=0, le=1_000_000)],
)
_USD: Final = Quantity(
    "sum of money", ("$10", "$0.05"), units.parse_dollars, lambda usd: f"${_decimal(usd)}"
)
_PRICES: Final = ("$1.20/h", "$0.20/1M")
_USD_PER_HOUR: Final = Quantity(
    "price", _PRICES, units.parse_price_per_hour, lambda usd: f"${_decimal(usd)}/h"
)
_USD_PER_GB_S: Final = Quantity(
    "price", _PRICES, units.parse_price_per_gb_second, lambda usd: f"${_decimal(usd)}/GB-s"
)
_USD_PER_REQUEST: Final = Quantity(
    "price", _PRICES, units.parse_price_per_request, lambda usd: f"${_decimal(usd)}/request"
)
_USD_PER_REQUEST_OR_UNLIMITED: Final = replace(_USD_PER_REQUEST, words={"unlimited": inf})

DurationNs = Annotated[int, _DURATION.meta]
PositiveNs = Annotated[DurationNs, Meta(gt=0)]
PositiveOrNeverNs = Annotated[int, _DURATION_OR_NEVER.meta, Meta(gt=0)]
SizeBytes = Annotated[int, _SIZE.meta]
SizeOrUnlimitedBytes = Annotated[int, _SIZE_OR_UNLIMITED.meta, Meta(gt=0)]
BytesPerS = Annotated[float, _BANDWIDTH.meta]
RatePerS = Annotated[float, _RATE.meta, Meta(gt=0)]
Share = Annotated[float, _PERCENTAGE.meta]
GpuSevenths = Annotated[int, _GPU_SHARE.meta]
CpuMilli = Annotated[int, _CPUS.meta]
Usd = Annotated[float, _USD.meta]
UsdPerHour = Annotated[float, _USD_PER_HOUR.meta]
UsdPerGbS = Annotated[float, _USD_PER_GB_S.meta]
UsdPerRequest = Annotated[float, _USD_PER_REQUEST.meta]
UsdPerRequestOrUnlimited = Annotated[float, _USD_PER_REQUEST_OR_UNLIMITED.meta]
