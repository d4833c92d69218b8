"""One entry of the application file, with where it stands: reads its quantities."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, Generic, Protocol, TypeVar

from headgate.app.names import unknown
from headgate.app.plain import join
from headgate.app.spec import Section
from headgate.core import units
from headgate.core.clock import NEVER_NS
from headgate.core.errors import ConfigError

# Larger than any machine, and small enough for sums of sizes to stay within 64 bits.
SIZE_BYTES_MAX: Final = 10**18

SectionT_co = TypeVar("SectionT_co", bound=Section, covariant=True)


class ParsePrice(Protocol):
    """One of the parsers of prices in `headgate.core.units`: they differ in the unit."""

    def __call__(self, value: object, *, where: str | None, key: str | None) -> float:
        """Return dollars per that unit."""


@dataclass(frozen=True, slots=True)
class Entry(Generic[SectionT_co]):
    """A section `spec` found at `key` of the file `where`.

    The readers take the name of a field, so that an error can name its path and its value.
    """

    spec: SectionT_co
    where: str
    key: str

    def error(self, name: str, problem: str, *, allowed: str | None = None) -> ConfigError:
        """Return the error that `problem` is with the field `name`."""
        value: object = getattr(self.spec, name)
        shown = None if isinstance(value, dict | tuple | Section) else value
        return ConfigError(
            problem, where=self.where, key=self.path(name), value=shown, allowed=allowed
        )

    def path(self, name: str) -> str:
        """Return the path of a field."""
        return join(self.key, name)

    def duration_ns(self, name: str) -> int:
        """Read `5ms`."""
        return units.parse_duration(getattr(self.spec, name), where=self.where, key=self.path(name))

    def positive_ns(self, name: str) -> int:
        """Read a duration that must not be zero."""
        duration_ns = self.duration_ns(name)
        if duration_ns == 0:
            raise self.error(name, "must be longer than zero", allowed="5ms, 10min")
        return duration_ns

    def duration_or_never_ns(self, name: str) -> int:
        """Read a positive duration, or `never`."""
        return NEVER_NS if getattr(self.spec, name) == "never" else self.positive_ns(name)

    def size_bytes(self, name: str) -> int:
        """Read `100MB`."""
        value: object = getattr(self.spec, name)
        size_bytes = units.parse_size(value, where=self.where, key=self.path(name))
        if size_bytes > SIZE_BYTES_MAX:
            raise self.error(name, "is too large", allowed="up to 1000000TB")
        return size_bytes

    def size_or_unlimited_bytes(self, name: str) -> int:
        """Read a size that is not zero, or `unlimited`."""
        if getattr(self.spec, name) == "unlimited":
            return NEVER_NS
        size_bytes = self.size_bytes(name)
        if size_bytes == 0:
            raise self.error(name, "must be more than zero", allowed="16GB, unlimited")
        return size_bytes

    def bytes_per_s(self, name: str) -> float:
        """Read `10GB/s`; `unlimited` is 0."""
        value = str(getattr(self.spec, name))
        if value == "unlimited":
            return 0.0
        try:
            size_bytes = units.parse_size(value.removesuffix("/s"))
        except ConfigError:
            size_bytes = 0
        if size_bytes == 0 or not value.endswith("/s"):
            raise self.error(name, "is not a bandwidth", allowed="10GB/s, 100MB/s, unlimited")
        return float(size_bytes)

    def positive_rate_per_s(self, name: str) -> float:
        """Read `100/s`, which must not be zero."""
        rate_per_s = units.parse_rate(
            getattr(self.spec, name), where=self.where, key=self.path(name)
        )
        if rate_per_s == 0:
            raise self.error(name, "must be more than zero", allowed="100/s, 30/min")
        return rate_per_s

    def fraction(self, name: str) -> float:
        """Read `99%` or 0.99."""
        return units.parse_fraction(getattr(self.spec, name), where=self.where, key=self.path(name))

    def gpu_sevenths(self, name: str) -> int:
        """Read `3/7`."""
        match = re.fullmatch(r"([0-9]{1,4})/7", str(getattr(self.spec, name)))
        if match is None:
            raise self.error(name, "is not a share of a GPU", allowed="0/7, 1/7, ... 7/7")
        return int(match[1])

    def cpu_milli(self, name: str) -> int:
        """Read a number of CPUs, which may have three decimals."""
        milli = Fraction(str(getattr(self.spec, name))) * 1000
        if milli.denominator != 1:
            raise self.error(name, "is finer than a thousandth of a CPU", allowed="2, 0.5, 0.125")
        return int(milli)

    def price(self, name: str, parse: ParsePrice) -> float:
        """Read a price, in the unit that `parse` reads; none at all is 0."""
        value: object = getattr(self.spec, name)
        if value is None:
            return 0.0
        try:
            return parse(value, where=self.where, key=self.path(name))
        except ConfigError as error:  # which shows the value without its dollar
            raise self.error(name, error.problem, allowed=error.allowed) from None

    def one_of(self, noun: str, name: str, known: Collection[str]) -> str:
        """Read a name, which must be known."""
        value: str = getattr(self.spec, name)
        if value not in known:
            raise unknown(noun, value, known, where=self.where, key=self.path(name))
        return value

    def some_of(self, noun: str, name: str, known: Collection[str]) -> tuple[str, ...]:
        """Read a list of names, which must be known and different."""
        values: tuple[str, ...] = getattr(self.spec, name)
        for value in values:
            if value not in known:
                raise unknown(noun, value, known, where=self.where, key=self.path(name))
            if values.count(value) > 1:
                raise self.error(name, f"names {noun} {value} twice", allowed="each once")
        return values
