"""YAML, read strictly: a key that is there twice is an error, and every error has a place."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import yaml

from headgate.core.errors import ConfigError

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
        # PyYAML tells in two parts: what it was doing, and what went wrong. Some problems are
        # only the second half of a sentence.
        is_half = (error.problem or "").startswith("but ")
        problem = f"{error.context}, {error.problem}" if is_half else error.problem
        raise ConfigError(_one_line(problem), where=where) from None
    except RecursionError:
        raise ConfigError("is nested too deeply", where=path) from None
    except (yaml.YAMLError, ValueError) as error:
        # Not text at all, or a date such as 2024-13-01, which PyYAML leaves to Python to refuse.
        raise ConfigError(_one_line(str(error)), where=path) from None


class _StrictLoader(yaml.SafeLoader):
    """Refuses a mapping with the same key twice, where YAML would let the last one win.

    It looks at the text, before `<<` merges others in: overriding a merged key is the point of it.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:  # the stubs are wrong on it
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE_TAG:
                continue
            if (key.tag, key.value) in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value!r} is there twice", key.start_mark
                )
            seen.add((key.tag, key.value))
        return node


def _one_line(text: str | None) -> str:
    return " ".join((text or "is not YAML").split())
