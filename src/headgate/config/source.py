"""Reads YAML strictly, and reduces it to plain data.

A duplicate key is an error, and every error has a position in the file. Everything that is loaded
passes through `normalise` first, so that the code behind it sees only text, finite numbers,
booleans, None, lists and maps with text keys, and so that an event log can carry it as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, final

import yaml

from headgate.core.errors import ConfigError

DEPTH_MAX: Final = 20
VALUES_MAX: Final = 1_000_000
_INTEGER_MAX: Final = 2**63 - 1
_MERGE_TAG: Final = "tag:yaml.org,2002:merge"


def read_yaml(path: str) -> object:
    """Return the content of a YAML file; raise `ConfigError` with file:line:column."""
    try:
        return yaml.load(Path(path).read_bytes(), _StrictLoader)  # a `SafeLoader`
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=path) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = path if mark is None else f"{path}:{mark.line + 1}:{mark.column + 1}"
        # PyYAML reports in two parts, what it was doing and what went wrong. Some problems are
        # only the second half of a sentence.
        is_half = (error.problem or "").startswith("but ")
        problem = f"{error.context}, {error.problem}" if is_half else error.problem
        raise ConfigError(_one_line(problem), where=where) from None
    except RecursionError:
        raise ConfigError("is nested too deeply", where=path) from None
    except (yaml.YAMLError, ValueError) as error:
        # Not text at all, or an impossible date such as 2024-13-01, which PyYAML passes to Python.
        raise ConfigError(_one_line(str(error)), where=path) from None


def normalise(value: object, where: str, key: str = "") -> object:
    """Return a copy of `value` as plain data: tuples become lists, whole-number keys become text.

    >>> normalise({"exec_time": {1: "5ms", 8: "20ms"}, "slowdown": (1.0, 1.5)}, "app.yaml")
    {'exec_time': {'1': '5ms', '8': '20ms'}, 'slowdown': [1.0, 1.5]}
    """
    return _Copier(where).copy(value, key, 0)


def join(key: str, name: str) -> str:
    """Return the path of `name` inside `key` (empty at the top), always on one line."""
    name = name if name.isprintable() else repr(name)
    return f"{key}.{name}" if key else name


class _StrictLoader(yaml.SafeLoader):
    """Refuses duplicate keys in a mapping, of which YAML would silently keep the last.

    Keys are compared as written, before `<<` merges others in: a merged key may be overridden.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:  # the stubs are wrong on it
        node = super().compose_mapping_node(anchor)
        keys: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE_TAG:
                continue
            if (key.tag, key.value) in keys:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value!r} is a duplicate key", key.start_mark
                )
            keys.add((key.tag, key.value))
        return node


def _one_line(text: str | None) -> str:
    return " ".join((text or "is not YAML").split())


@final
class _Copier:
    """Copies plain data and counts values: YAML aliases can expand to more than fits in memory."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._values_left = VALUES_MAX

    def copy(self, value: object, key: str, depth: int) -> object:
        self._values_left -= 1
        if depth > DEPTH_MAX or self._values_left < 0:
            allowed = f"{DEPTH_MAX} levels, {VALUES_MAX} values"
            raise self._error("is too large or contains itself", key, allowed)
        if isinstance(value, Mapping):
            return self._copy_map(value, key, depth)
        if isinstance(value, list | tuple):
            return [self.copy(v, f"{key}[{i}]", depth + 1) for i, v in enumerate(value)]
        if value is None or isinstance(value, str | bool):
            return value
        if isinstance(value, int | float):
            return self._checked_number(value, key)
        allowed = "text (in quotes), a number, true, false, a list, a map"
        raise self._error(f"has the unsupported type {type(value).__name__}", key, allowed)

    def _error(self, problem: str, key: str, allowed: str) -> ConfigError:
        return ConfigError(problem, where=self._where, key=key, allowed=allowed)

    def _copy_map(self, value: Mapping[object, object], key: str, depth: int) -> dict[str, object]:
        copied: dict[str, object] = {}
        for name, item in value.items():
            if isinstance(name, bool) or not isinstance(name, str | int):
                allowed = "text (in quotes, if YAML reads it otherwise)"
                raise self._error(f"has the key {name!r}, which is not text", key, allowed)
            text = name if isinstance(name, str) else str(self._checked_number(name, key))
            if text in copied:
                raise ConfigError("is a duplicate key", where=self._where, key=key, value=text)
            copied[text] = self.copy(item, join(key, text), depth + 1)
        return copied

    def _checked_number(self, value: float, key: str) -> float:
        if abs(value) <= _INTEGER_MAX:  # false for NaN as well
            return value
        # The value is not shown: Python refuses to print an integer of many digits.
        allowed = f"{-_INTEGER_MAX} to {_INTEGER_MAX}"
        raise self._error("is not a finite number of 64 bits", key, allowed)
