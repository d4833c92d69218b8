"""A deep snapshot of a Scheduler, to detect any change of its state."""

from __future__ import annotations

from collections import deque
from dataclasses import is_dataclass
from random import Random

from headgate.core.scheduler.scheduler import Scheduler


def snapshot(scheduler: Scheduler) -> object:
    """All state reachable from the Scheduler, including its policy and state writers."""
    return _freeze(scheduler, {})


def _freeze(value: object, visited: dict[int, int]) -> object:
    if value is None or isinstance(value, int | float | str) or callable(value):
        return value
    if id(value) in visited:  # records point at each other
        return ("seen", visited[id(value)])
    if is_dataclass(value):  # configuration: frozen
        return id(value)
    visited[id(value)] = len(visited)
    if isinstance(value, Random):
        return value.getstate()
    if isinstance(value, dict):
        return [(key, _freeze(item, visited)) for key, item in value.items()]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [_freeze(item, visited) for item in value]
    kind = type(value)  # native classes of a compiled build have their fields listed as well
    names = getattr(kind, "__mypyc_attrs__", None) or getattr(kind, "__slots__", None)
    names = vars(value) if names is None else names
    fields = [(name, _freeze(getattr(value, name), visited)) for name in names if name != "actions"]
    return (kind.__name__, fields)
