"""Events and actions as lists that JSON can carry: `[class name, field, field, ...]`.

Fields stand in the order of the constructor's arguments, so `cls(*fields)` rebuilds the thing. The
vocabulary is found, not listed: every subclass of `Event` and `Action` in their own modules. Field
names come from the constructors' signatures, because those are all that an interpreted and a
compiled build have in common: native classes have neither `__slots__` nor annotations. Where there
are annotations, values are checked against them; a compiled constructor checks by itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Final

from headgate.core.actions import Action
from headgate.core.errors import ConfigError
from headgate.core.events import Event

Wire = list[object]


def to_wire(thing: Event | Action) -> Wire:
    """Return an event or an action as a list of its own, sharing nothing with it.

    >>> from headgate.core.events import TimerFired
    >>> to_wire(TimerFired(("plan", 0)))
    ['TimerFired', ['plan', 0]]
    """
    name = type(thing).__name__
    wire: Wire = [name, *_GETTERS[name](thing)]
    for place in _LIST_PLACES[name]:
        value = wire[place]
        assert isinstance(value, list | tuple)
        wire[place] = list(value)
    return wire


def from_wire(wire: object, *, where: str | None = None) -> Event | Action:
    """Return the event or the action that `to_wire` made this of.

    Raises `ConfigError`, naming `where` it was read, if no such thing can be built. Integers
    beyond 64 bits are refused: no clock and no counter of ours gets there.

    >>> from_wire(["TimerFired", ["plan", 0]]).key
    ('plan', 0)
    """
    name = wire[0] if isinstance(wire, list) and wire else None
    if not isinstance(wire, list) or not isinstance(name, str) or name not in _FIELDS:
        raise ConfigError("is neither an event nor an action", where=where, value=wire)
    fields = _FIELDS[name]
    if len(wire) != len(fields) + 1:
        raise ConfigError(
            "has too few or too many fields", where=where, value=wire, allowed=", ".join(fields)
        )
    for field, value in zip(fields, wire[1:], strict=True):
        _check(name, field, value, where)
    try:
        values = [
            tuple(value) if field in _TUPLES else value
            for field, value in zip(fields, wire[1:], strict=True)
        ]
        return _CLASSES[name](*values)
    except TypeError as error:  # a compiled constructor checks its arguments
        raise ConfigError(
            f"has a field of a wrong type: {error}", where=where, value=wire
        ) from None


def is_int(value: object) -> bool:
    """Whether it is an integer of 64 bits. For Python `True` is one, for us it is not."""
    return isinstance(value, int) and not isinstance(value, bool) and -_INT_END <= value < _INT_END


def _check(name: str, field: str, value: object, where: str | None) -> None:
    kind = _KINDS[name, field]
    if kind == "int":
        is_right = is_int(value)
    elif kind == "int | None":
        is_right = value is None or is_int(value)
    elif kind == "float":
        is_right = isinstance(value, float) or is_int(value)
    elif kind == "str":
        is_right = isinstance(value, str)
    elif kind == "bool":
        is_right = isinstance(value, bool)
    elif kind in ("list[int]", "tuple[int, ...]"):
        is_right = isinstance(value, list) and all(is_int(each) for each in value)
    elif kind == "TimerKey":
        is_right = (
            isinstance(value, list)
            and len(value) == 2
            and isinstance(value[0], str)
            and is_int(value[1])
        )
    else:
        is_right = not isinstance(value, int) or is_int(value)
    if not is_right:
        problem = "null is a wrong type" if value is None else "is of a wrong type"
        key, allowed = f"{name}.{field}", _ALLOWED.get(kind, kind)
        raise ConfigError(problem, where=where, key=key, value=value, allowed=allowed)


_INT_END: Final = 1 << 63
# As JSON has it.
_ALLOWED: Final[Mapping[str, str]] = {
    "int": "an integer of 64 bits",
    "int | None": "an integer of 64 bits, or null",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "list[int]": "a list of integers",
    "tuple[int, ...]": "a list of integers",
    "TimerKey": "[string, integer]",
}
# JSON knows lists only; these fields were tuples.
_TUPLES: Final = frozenset(("broken", "key", "too_large", "unsure"))
_LISTS: Final = _TUPLES | {"task_ids"}
# A compiled constructor checks that it is given a list, but not what is in it; and for it, as for
# Python, `True` is an integer.
_STRICT: Final[Mapping[str, str]] = {
    "broken": "tuple[int, ...]",
    "gives_up": "bool",
    "is_provisioned": "bool",
    "key": "TimerKey",
    "node_died": "bool",
    "task_ids": "list[int]",
    "too_large": "tuple[int, ...]",
    "unsure": "tuple[int, ...]",
}


def _vocabulary() -> dict[str, Callable[..., Event | Action]]:
    classes: dict[str, Callable[..., Event | Action]] = {}
    for base in (Event, Action):
        for cls in base.__subclasses__():
            if cls.__module__ == base.__module__:
                classes[cls.__name__] = cls
    return classes


def _getter(fields: tuple[str, ...]) -> Callable[[object], tuple[object, ...]]:
    get = attrgetter(*fields)
    return get if len(fields) > 1 else lambda thing: (get(thing),)


def _kind(parameter: inspect.Parameter) -> str:
    """Its annotation as it is written, which is how it is kept; compiled, there is none."""
    if isinstance(parameter.annotation, str):
        return parameter.annotation
    return _STRICT.get(parameter.name, "")


_CLASSES: Final = _vocabulary()
_FIELDS: Final = {name: tuple(inspect.signature(cls).parameters) for name, cls in _CLASSES.items()}
# Fetching all fields at once: a live gateway logs every event, so this is on its hot path.
_GETTERS: Final = {name: _getter(fields) for name, fields in _FIELDS.items()}
_LIST_PLACES: Final = {
    name: tuple(place for place, field in enumerate(fields, start=1) if field in _LISTS)
    for name, fields in _FIELDS.items()
}
_KINDS: Final = {
    (name, parameter.name): _kind(parameter)
    for name, cls in _CLASSES.items()
    for parameter in inspect.signature(cls).parameters.values()
}
