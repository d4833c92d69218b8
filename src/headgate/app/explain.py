"""Says, for people, what msgspec found wrong.

msgspec checks fast and reports `$.pools[...].nodes`, which does not tell which pool. So when it
has refused a file, this walks the file beside the types and stops at the first thing that does
not fit, with its whole path, its value, and what would be allowed.
"""

from __future__ import annotations

import re

from msgspec import inspect

from headgate.app.names import unknown
from headgate.app.plain import join
from headgate.core.errors import ConfigError


def check(value: object, kind: inspect.Type, *, where: str, key: str) -> None:
    """Raise `ConfigError` for the first part of `value` (plain data) that is not of its kind."""
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
    """Say in words what is allowed.

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


def _check_struct(value: dict[str, object], kind: inspect.StructType, where: str, key: str) -> None:
    fields = {field.name: field for field in kind.fields}
    for name in value:
        if name not in fields:
            is_cost = (kind.cls.__name__, name) == ("SloSpec", "cost")
            noun = "key, objectives for cost are not supported yet" if is_cost else "key"
            raise unknown(noun, name, fields, where=where, key=key)
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
                "cannot be a key here",
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
    """Return the alternatives of a type, with what was merely said about them taken off."""
    match kind:
        case inspect.Metadata(type=inner):
            return _members(inner)
        case inspect.UnionType(types=types):
            return [member for inner in types for member in _members(inner)]
    return [kind]


def _accepts(member: inspect.Type, value: object) -> bool:
    """Whether a value that is no map and no list is of a type that has no alternatives."""
    is_boolean = isinstance(value, bool)  # which Python takes for a number
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
    """Say which numbers are allowed.

    >>> _range(inspect.IntType(ge=1, le=9)), _range(inspect.FloatType(gt=0))
    (' from 1 to 9', ' above 0')
    """
    low = "" if kind.ge is None else f" from {kind.ge}"
    low = low if kind.gt is None else f" above {kind.gt}"
    return low + ("" if kind.le is None else f" to {kind.le}")


def _problem(value: object, members: list[inspect.Type]) -> str:
    """Say what the value is, where that alone is the problem."""
    has_numbers = any(isinstance(m, inspect.IntType | inspect.FloatType) for m in members)
    has_text = any(isinstance(m, inspect.StrType | inspect.LiteralType) for m in members)
    match value:
        case None:
            return "is empty"
        case bool():
            return "is true or false"
        case str():
            return "does not fit" if has_text else "is text"
        case int() | float():
            return "does not fit" if has_numbers else "is a number"
        case list():
            return "is a list"
    return "is a map"
