"""Decodes plain data into the structs of the schema, in one walk beside their types.

The walk reads quantities, checks types and bounds, and fills in defaults. msgspec reports
`$.pools[...].nodes` for an error, which does not name the pool, and its `dec_hook` is told neither
the key nor the bounds of a field; so the walk does all of it, and msgspec makes the structs.
Every error is a `ConfigError`: one line with file, key, value and what is allowed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct, inspect

from headgate.config.quantities import Quantity
from headgate.config.source import join, normalise
from headgate.core.errors import ConfigError, unknown_name_error

ValueT = TypeVar("ValueT")
StructT_co = TypeVar("StructT_co", bound=Struct, covariant=True)
type_info = cache(inspect.type_info)


def decode(data: object, kind: type[ValueT], where: str) -> tuple[ValueT, dict[str, object]]:
    """Return a struct of the schema, and the data with every default filled in, as plain data."""
    plain = normalise(data, where)
    decoded = msgspec.convert(read(plain, kind, where, ""), kind)
    assert isinstance(plain, dict)  # `read` refuses anything else
    return decoded, plain


def read(value: object, kind: Any, where: str, key: str) -> object:
    """Return plain data with its quantities as numbers, and fill defaults into `value` itself.

    Raises `ConfigError` for the first part of `value` that is not of its type.
    """
    return read_as(value, type_info(kind), where, key)


def read_as(value: object, kind: inspect.Type, where: str, key: str) -> object:
    """Read like `read`, beside a type that is known already."""
    return _Decoder(where).read(value, kind, key)


def write(value: object, kind: inspect.Type) -> Any:
    """Return a value as plain data, with quantities as a file has them."""
    match value, kind:
        case _, inspect.Metadata(type=inner, extra=extra):
            quantity = (extra or {}).get("quantity")
            return write(value, inner) if quantity is None else quantity.write(value)
        case Struct(), inspect.StructType(fields=fields):
            return {f.encode_name: write(getattr(value, f.name), f.type) for f in fields}
        case tuple(), _:
            return list(value)
        case None, _:
            return None
        case int() | float(), inspect.UnionType(types=types):
            return next(write(value, t) for t in types if not isinstance(t, inspect.NoneType))
    return value


def default_of(field: inspect.Field) -> object:
    """Return the default of an optional field."""
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default


def describe(kind: inspect.Type) -> str:
    """Describe in words the values of a type.

    >>> describe(inspect.type_info(int | None)), describe(inspect.type_info(bool | list[str]))
    ('a whole number', 'true or false or a list')
    """
    match kind:
        case inspect.Metadata(extra_json_schema={"title": title, "examples": examples}):
            return f"a {title} such as {', '.join(map(str, examples))}"
        case inspect.Metadata(extra={"quantity": quantity}):
            return describe(type_info(quantity.written))
        case inspect.Metadata(type=inner):
            return describe(inner)
        case inspect.UnionType(types=types):
            members = [t for t in types if not isinstance(t, inspect.NoneType)]
            return " or ".join(describe(member) for member in members)
        case inspect.StructType():
            return f"a map with the keys {', '.join(_fields(kind))}"
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
class Located(Generic[StructT_co]):
    """A decoded section of a file: `spec`, found at `key` in the file `where`."""

    spec: StructT_co
    where: str
    key: str

    def error(self, name: str, problem: str, *, allowed: str | None = None) -> ConfigError:
        """Return a `ConfigError` about the field `name`, with its value as a file has it."""
        value = write(getattr(self.spec, name), self._field(name).type)
        scalar = None if isinstance(value, dict | list) else value
        return ConfigError(
            problem, where=self.where, key=self.path(name), value=scalar, allowed=allowed
        )

    def path(self, name: str) -> str:
        """Return the path of a field in the file."""
        return join(self.key, self._field(name).encode_name)

    def _field(self, name: str) -> inspect.Field:
        kind = type_info(type(self.spec))
        assert isinstance(kind, inspect.StructType)
        return next(field for field in kind.fields if field.name == name)

    def one_of(self, noun: str, name: str, known: Collection[str]) -> str:
        """Return the name in a field, which must be known."""
        value: str = getattr(self.spec, name)
        if value not in known:
            raise unknown_name_error(noun, value, known, where=self.where, key=self.path(name))
        return value

    def some_of(self, noun: str, name: str, known: Collection[str]) -> tuple[str, ...]:
        """Return the names in a field, which must be known and different."""
        values: tuple[str, ...] = getattr(self.spec, name)
        for value in values:
            if value not in known:
                raise unknown_name_error(noun, value, known, where=self.where, key=self.path(name))
            if values.count(value) > 1:
                raise self.error(name, f"names {noun} {value} twice", allowed="each name once")
        return values


class _Decoder:
    """Walks over plain data beside its types."""

    def __init__(self, where: str) -> None:
        self._where = where

    def read(self, value: object, kind: inspect.Type, key: str) -> object:
        members = list(_members(kind))
        for member, _ in members:
            match value, member:
                case dict(), inspect.StructType():
                    return self._read_struct(value, member, key)
                case dict(), inspect.DictType():
                    return self._read_dict(value, member, key)
                case list(), inspect.VarTupleType():
                    return self._read_list(value, member, key)
        for member, quantity in members:
            if quantity is None and _accepts(member, value):
                return value
            if quantity is not None and any(
                _accepts(written, value) for written in _written([(member, quantity)])
            ):
                return self._read_quantity(value, member, quantity, key)
        scalar = None if isinstance(value, dict | list) else value
        raise self._error(_problem(value, list(_written(members))), key, describe(kind), scalar)

    def _error(
        self, problem: str, key: str, allowed: str | None, value: object = None
    ) -> ConfigError:
        return ConfigError(problem, where=self._where, key=key, value=value, allowed=allowed)

    def _read_quantity(
        self, value: object, kind: inspect.Type, quantity: Quantity, key: str
    ) -> float:
        try:
            number = quantity.read(value)
            _check_bounds(number, kind, quantity)
        except ConfigError as error:
            raise self._error(error.problem, key, error.allowed, value) from None
        return number

    def _read_struct(
        self, value: dict[str, object], kind: inspect.StructType, key: str
    ) -> dict[str, object]:
        fields = _fields(kind)
        for name in value:
            if name not in fields:
                raise unknown_name_error("key", name, fields, where=self._where, key=key)
        read: dict[str, object] = {}
        for name, field in fields.items():
            if name not in value and field.required:
                raise self._error("is missing", join(key, name), describe(field.type))
            if name not in value:
                value[name] = write(default_of(field), field.type)
            read[name] = self.read(value[name], field.type, join(key, name))
        return read

    def _read_dict(
        self, value: dict[str, object], kind: inspect.DictType, key: str
    ) -> dict[str, object]:
        for name in value:
            if not any(_accepts(member, name) for member, _ in _members(kind.key_type)):
                raise self._error("is not a valid key", key, describe(kind.key_type), name)
        return {
            name: self.read(item, kind.value_type, join(key, name)) for name, item in value.items()
        }

    def _read_list(self, value: list[object], kind: inspect.VarTupleType, key: str) -> list[object]:
        if len(value) < (kind.min_length or 0):
            raise self._error("is an empty list", key, describe(kind))
        if kind.max_length is not None and len(value) > kind.max_length:
            raise self._error("is too long", key, f"up to {kind.max_length} values")
        return [
            self.read(item, kind.item_type, f"{key}[{index}]") for index, item in enumerate(value)
        ]


def _fields(kind: inspect.StructType) -> dict[str, inspect.Field]:
    """Return the fields by their keys, those of the class itself before those it inherits."""
    own = kind.cls.__annotations__
    return {f.encode_name: f for f in sorted(kind.fields, key=lambda field: field.name not in own)}


def _members(
    kind: inspect.Type, quantity: Quantity | None = None
) -> Iterator[tuple[inspect.Type, Quantity | None]]:
    """Yield the alternatives of a type without their metadata, each with its quantity."""
    match kind:
        case inspect.Metadata(type=inner, extra=extra):
            yield from _members(inner, (extra or {}).get("quantity", quantity))
        case inspect.UnionType(types=types):
            for inner in types:
                yield from _members(inner)
        case _:
            yield kind, quantity


def _written(members: Iterable[tuple[inspect.Type, Quantity | None]]) -> Iterator[inspect.Type]:
    """Yield the types of values as they are written."""
    for member, quantity in members:
        if quantity is None:
            yield member
        else:
            yield from (written for written, _ in _members(type_info(quantity.written)))


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
        case inspect.StrType(pattern=pattern, min_length=min_length):
            return (
                isinstance(value, str)
                and len(value) >= (min_length or 0)
                and (not pattern or bool(re.search(pattern, value)))
            )
        case inspect.LiteralType(values=values):
            return any(type(value) is type(v) and value == v for v in values)
        case inspect.IntType():
            return isinstance(value, int) and not is_boolean and _is_in_range(member, value)
        case inspect.FloatType():
            return isinstance(value, int | float) and not is_boolean and _is_in_range(member, value)
    return False


def _is_in_range(kind: inspect.IntType | inspect.FloatType, value: float) -> bool:
    return not _is_below(kind, value) and not _is_above(kind, value)


def _is_below(kind: inspect.IntType | inspect.FloatType, value: float) -> bool:
    return (kind.ge is not None and value < kind.ge) or (kind.gt is not None and value <= kind.gt)


def _is_above(kind: inspect.IntType | inspect.FloatType, value: float) -> bool:
    return (kind.le is not None and value > kind.le) or (kind.lt is not None and value >= kind.lt)


def _check_bounds(number: float, kind: inspect.Type, quantity: Quantity) -> None:
    assert isinstance(kind, inspect.IntType | inspect.FloatType)
    if _is_in_range(kind, number):
        return
    is_bounded_above = kind.le is not None or kind.lt is not None
    if kind.gt == 0 and not is_bounded_above:
        examples = dict.fromkeys([*quantity.examples, *quantity.words])
        raise ConfigError("must be more than zero", allowed=", ".join(map(str, examples)))
    bounds = [
        f"{word}{quantity.write(bound)}"
        for word, bound in (("", kind.ge), ("above ", kind.gt), ("", kind.le), ("below ", kind.lt))
        if bound is not None
    ]
    is_low = _is_below(kind, number)
    between = " to " if kind.gt is None and kind.lt is None else " and "
    end = "" if len(bounds) == 2 else " or more" if is_low else " or less"
    raise ConfigError(
        "is too small" if is_low else "is too large", allowed=between.join(bounds) + end
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
        case None | "":
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
