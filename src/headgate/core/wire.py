"""Events and actions as lists that JSON can carry: `[class name, field, field, ...]`.

Fields stand in the order of the constructor's arguments, so `cls(*fields)` rebuilds the thing. The
vocabulary is found, not listed: every subclass of `Event` and `Action` in their own modules. Field
names come from the constructors' signatures, because those are all that an interpreted and a
compiled build have in common: native classes have neither `__slots__` nor annotations.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
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
    wire: Wire = [name]
    for field in _FIELDS[name]:
        value = getattr(thing, field)
        wire.append(list(value) if isinstance(value, list | tuple) else value)
    return wire


def from_wire(wire: object, *, where: str | None = None) -> Event | Action:
    """Return the event or the action that `to_wire` made this of.

    Raises `ConfigError`, naming `where` it was read, if no such thing can be built.

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


# JSON knows lists only; these fields were tuples.
_TUPLES: Final = frozenset(("key", "unsure"))


def _vocabulary() -> dict[str, Callable[..., Event | Action]]:
    classes: dict[str, Callable[..., Event | Action]] = {}
    for base in (Event, Action):
        for cls in base.__subclasses__():
            if cls.__module__ == base.__module__:
                classes[cls.__name__] = cls
    return classes


_CLASSES: Final = _vocabulary()
_FIELDS: Final = {name: tuple(inspect.signature(cls).parameters) for name, cls in _CLASSES.items()}
