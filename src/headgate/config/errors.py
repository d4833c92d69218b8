"""Error messages for the application file: one line with file, key, value and what is allowed.

msgspec checks fast but reports `$.pools[...].nodes`, which does not name the pool. So when it
refuses a file, `check` walks the file beside the types and raises for the first value that is not
of its type, with its whole path, its value, and what is allowed. `FieldReader` parses the
quantities of one section and knows the path of each, for the same kind of message.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, Generic, Protocol, TypeVar

from msgspec import inspect

from headgate.config.schema import Section
from headgate.config.source import join
from headgate.core import units
from headgate.core.clock import NEVER_NS
from headgate.core.errors import ConfigError
from headgate.core.model import UNLIMITED

# Larger than any machine, yet small enough for sums of sizes to stay within 64 bits.
SIZE_BYTES_MAX: Final = 10**18

SectionT_co = TypeVar("SectionT_co", bound=Section, covariant=True)


class ParsePrice(Protocol):
    """A parser of prices in `headgate.core.units`; each is for another unit."""

    def __call__(self, value: object, *, where: str | None, key: str | None) -> float:
        """Return dollars per unit."""


def unknown_name_error(
    noun: str, name: str, known: Iterable[str], *, where: str, key: str | None
) -> ConfigError:
    """Return the error for a name that is not among the known ones.

    >>> pools = ["gpu", "cpu"]
    >>> str(unknown_name_error("pool", "gpus", pools, where="app.yaml", key="functions.f.pools"))
    "app.yaml: functions.f.pools: 'gpus': unknown pool, did you mean gpu? (allowed: gpu, cpu)"
    """
    names = list(known)
    # Truncated, because finding the closest name takes time quadratic in the length.
    close = difflib.get_close_matches(name[:64], names, n=1)
    problem = f"unknown {noun}" + (f", did you mean {close[0]}?" if close else "")
    allowed = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    return ConfigError(problem, where=where, key=key, value=name, allowed=allowed or "none")


def check(value: object, kind: inspect.Type, *, where: str, key: str) -> None:
    """Raise `ConfigError` for the first part of `value` (plain data) that is not of its type."""
    members = _members(kind)
    for member in members:
        match value, member:
            case dict(), inspect.StructType():
                _check_struct(value, member, where, key)
                return
            case dict(), inspect.DictType():
                _check_dict(value, member, where, key)
                return
            case list(), inspect.VarTupleType():
                _check_list(value, member, where, key)
                return
    if not any(_accepts(member, value) for member in members):
        is_container = isinstance(value, dict | list)
        raise ConfigError(
            _problem(value, members),
            where=where,
            key=key,
            value=None if is_container else value,
            allowed=describe(kind),
        )


def describe(kind: inspect.Type) -> str:
    """Describe in words the values of a type.

    >>> describe(inspect.type_info(int | None)), describe(inspect.type_info(bool | list[str]))
    ('a whole number', 'true or false or a list')
    """
    match kind:
        case inspect.Metadata(extra_json_schema={"title": title, "examples": examples}):
            return f"a {title} such as {', '.join(map(str, examples))}"
        case inspect.Metadata(type=inner):
            return describe(inner)
        case inspect.UnionType(types=types):
            members = [t for t in types if not isinstance(t, inspect.NoneType)]
            return " or ".join(describe(member) for member in members)
        case inspect.StructType(fields=fields):
            return f"a map with the keys {', '.join(field.name for field in fields)}"
        case inspect.DictType():
            return "a map"
        case inspect.VarTupleType() | inspect.ListType():
            return "a list"
        case inspect.LiteralType(values=values):
            return ", ".join(map(str, values))
        case inspect.IntType():
            return "a whole number" + _range(kind)
        case inspect.FloatType():
            return "a number" + _range(kind)
        case inspect.BoolType():
            return "true or false"
    return "text"


@dataclass(frozen=True, slots=True)
class FieldReader(Generic[SectionT_co]):
    """Reads the fields of a section `spec`, found at `key` in the file `where`.

    Its methods take the name of a field, so that an error can name the path and the value.
    """

    spec: SectionT_co
    where: str
    key: str

    def error(self, name: str, problem: str, *, allowed: str | None = None) -> ConfigError:
        """Return a `ConfigError` about the field `name`."""
        value: object = getattr(self.spec, name)
        scalar = None if isinstance(value, dict | tuple | Section) else value
        return ConfigError(
            problem, where=self.where, key=self.path(name), value=scalar, allowed=allowed
        )

    def path(self, name: str) -> str:
        """Return the path of a field in the file."""
        return join(self.key, name)

    def duration_ns(self, name: str) -> int:
        """Read a duration, such as `5ms`."""
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
        """Read a size, such as `100MB`."""
        value: object = getattr(self.spec, name)
        size_bytes = units.parse_size(value, where=self.where, key=self.path(name))
        if size_bytes > SIZE_BYTES_MAX:
            raise self.error(name, "is too large", allowed="up to 1000000TB")
        return size_bytes

    def size_or_unlimited_bytes(self, name: str) -> int:
        """Read a size that is not zero, or `unlimited`."""
        if getattr(self.spec, name) == "unlimited":
            return UNLIMITED
        size_bytes = self.size_bytes(name)
        if size_bytes == 0:
            raise self.error(name, "must be more than zero", allowed="16GB, unlimited")
        return size_bytes

    def bytes_per_s(self, name: str) -> float:
        """Read a bandwidth, such as `10GB/s`; `unlimited` is 0."""
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
        """Read a rate that is not zero, such as `100/s`."""
        rate_per_s = units.parse_rate(
            getattr(self.spec, name), where=self.where, key=self.path(name)
        )
        if rate_per_s == 0:
            raise self.error(name, "must be more than zero", allowed="100/s, 30/min")
        return rate_per_s

    def fraction(self, name: str) -> float:
        """Read a share, such as `99%` or 0.99."""
        return units.parse_fraction(getattr(self.spec, name), where=self.where, key=self.path(name))

    def gpu_sevenths(self, name: str) -> int:
        """Read a share of a GPU, such as `3/7`."""
        match = re.fullmatch(r"([0-9]{1,4})/7", str(getattr(self.spec, name)))
        if match is None:
            raise self.error(name, "is not a share of a GPU", allowed="0/7, 1/7, ... 7/7")
        return int(match[1])

    def cpu_milli(self, name: str) -> int:
        """Read a number of CPUs, which may have three decimals."""
        milli = Fraction(str(getattr(self.spec, name))) * 1000
        if milli.denominator != 1:
            raise self.error(name, "has more than three decimals", allowed="2, 0.5, 0.125")
        return int(milli)

    def price(self, name: str, parse: ParsePrice) -> float:
        """Read a price in the unit of `parse`; a missing one is 0."""
        value: object = getattr(self.spec, name)
        if value is None:
            return 0.0
        try:
            return parse(value, where=self.where, key=self.path(name))
        except ConfigError as error:  # its value lacks the dollar sign
            raise self.error(name, error.problem, allowed=error.allowed) from None

    def one_of(self, noun: str, name: str, known: Collection[str]) -> str:
        """Read a name, which must be known."""
        value: str = getattr(self.spec, name)
        if value not in known:
            raise unknown_name_error(noun, value, known, where=self.where, key=self.path(name))
        return value

    def some_of(self, noun: str, name: str, known: Collection[str]) -> tuple[str, ...]:
        """Read a list of names, which must be known and different."""
        values: tuple[str, ...] = getattr(self.spec, name)
        for value in values:
            if value not in known:
                raise unknown_name_error(noun, value, known, where=self.where, key=self.path(name))
            if values.count(value) > 1:
                raise self.error(name, f"names {noun} {value} twice", allowed="each name once")
        return values


def _check_struct(value: dict[str, object], kind: inspect.StructType, where: str, key: str) -> None:
    fields = {field.name: field for field in kind.fields}
    for name in value:
        if name not in fields:
            is_cost = (kind.cls.__name__, name) == ("SloSpec", "cost")
            noun = "key, objectives for cost are not supported yet" if is_cost else "key"
            raise unknown_name_error(noun, name, fields, where=where, key=key)
    for name, field in fields.items():
        if name in value:
            check(value[name], field.type, where=where, key=join(key, name))
        elif field.required:
            raise ConfigError(
                "is missing", where=where, key=join(key, name), allowed=describe(field.type)
            )


def _check_dict(value: dict[str, object], kind: inspect.DictType, where: str, key: str) -> None:
    for name, item in value.items():
        if not any(_accepts(member, name) for member in _members(kind.key_type)):
            raise ConfigError(
                "is not a valid key",
                where=where,
                key=key,
                value=name,
                allowed=describe(kind.key_type),
            )
        check(item, kind.value_type, where=where, key=join(key, name))


def _check_list(value: list[object], kind: inspect.VarTupleType, where: str, key: str) -> None:
    if len(value) < (kind.min_length or 0):
        raise ConfigError("is an empty list", where=where, key=key, allowed=describe(kind))
    for index, item in enumerate(value):
        check(item, kind.item_type, where=where, key=f"{key}[{index}]")


def _members(kind: inspect.Type) -> list[inspect.Type]:
    """Return the alternatives of a type, without their metadata."""
    match kind:
        case inspect.Metadata(type=inner):
            return _members(inner)
        case inspect.UnionType(types=types):
            return [member for inner in types for member in _members(inner)]
    return [kind]


def _accepts(member: inspect.Type, value: object) -> bool:
    """Whether a scalar value is of a type that has no alternatives."""
    is_boolean = isinstance(value, bool)  # which is an int in Python
    match member:
        case inspect.AnyType():
            return True
        case inspect.NoneType():
            return value is None
        case inspect.BoolType():
            return is_boolean
        case inspect.StrType(pattern=pattern):
            return isinstance(value, str) and (not pattern or bool(re.search(pattern, value)))
        case inspect.LiteralType(values=values):
            return any(type(value) is type(v) and value == v for v in values)
        case inspect.IntType():
            return isinstance(value, int) and not is_boolean and _is_in_range(member, value)
        case inspect.FloatType():
            return isinstance(value, int | float) and not is_boolean and _is_in_range(member, value)
    return False


def _is_in_range(kind: inspect.IntType | inspect.FloatType, value: float) -> bool:
    return (
        (kind.ge is None or value >= kind.ge)
        and (kind.gt is None or value > kind.gt)
        and (kind.le is None or value <= kind.le)
    )


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    """Describe the range of numbers allowed.

    >>> _range(inspect.IntType(ge=1, le=9)), _range(inspect.FloatType(gt=0))
    (' from 1 to 9', ' above 0')
    """
    low = "" if kind.ge is None else f" from {kind.ge}"
    low = low if kind.gt is None else f" above {kind.gt}"
    return low + ("" if kind.le is None else f" to {kind.le}")


def _problem(value: object, members: list[inspect.Type]) -> str:
    """Say what is wrong with a value: out of range, or of the wrong type."""
    has_numbers = any(isinstance(m, inspect.IntType | inspect.FloatType) for m in members)
    has_text = any(isinstance(m, inspect.StrType | inspect.LiteralType) for m in members)
    match value:
        case None:
            return "is empty"
        case bool():
            return "is true or false"
        case str():
            return "is not valid" if has_text else "is text"
        case int() | float():
            return "is not valid" if has_numbers else "is a number"
        case list():
            return "is a list"
    return "is a map"


# One reader of the application file, with where it stands: reads its quantities.
