"""Errors, split by who is to blame.

`ConfigError` blames the user's input and is shown as one line. `PolicyError` blames a policy,
`DriverError` blames the driver that delivers events, `InvariantError` blames Headgate itself. A
failure of the environment (a crash, a timeout, a refusal) is not an error: it is an event.

`error_text` makes a line of text of any exception, such as one that a model has raised.
"""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable, Sequence
from typing import Final

CHARS_MAX: Final = 1000  # of the text of an exception
_VALUE_MAX: Final = 200  # characters of a value that are shown


class HeadgateError(Exception):
    """Every error that Headgate raises on purpose."""


class ConfigError(HeadgateError):
    """Bad input from the user: names the file, the key, the value and what is allowed, in one line.

    >>> str(ConfigError("must be positive", where="app.yaml", key="pools.gpu.nodes", value=-1))
    'app.yaml: pools.gpu.nodes: -1: must be positive'
    """

    def __init__(
        self,
        problem: str,
        *,
        where: str | None = None,
        key: str | None = None,
        value: object = None,
        allowed: str | None = None,
    ) -> None:
        self.problem = problem
        self.where = where
        self.key = key
        self.value = value
        self.allowed = allowed
        parts = [part for part in (where, key) if part]
        if value is not None:
            text = repr(value)
            # A whole file may have been taken for one value.
            parts.append(text if len(text) <= _VALUE_MAX else f"{text[:_VALUE_MAX]}...")
        parts.append(problem if allowed is None else f"{problem} (allowed: {allowed})")
        super().__init__(": ".join(parts))

    def located(self, where: str, key: str | None = None) -> ConfigError:
        """Return the error with its place, and its key below `key`, unless it has a place."""
        if self.where is not None:
            return self
        keys = ": ".join(part for part in (key, self.key) if part)
        return ConfigError(
            self.problem, where=where, key=keys, value=self.value, allowed=self.allowed
        )


def import_problem(error: Exception, key: str) -> ConfigError:
    """Return the error about a module of the user's that raised this while it was imported.

    It names the line of code, because the module may be a file that the command is not about.
    """
    if isinstance(error, ConfigError):
        return error
    last = traceback.extract_tb(error.__traceback__)[-1]
    file, line = last.filename, last.lineno
    if isinstance(error, SyntaxError):
        file, line = error.filename or file, error.lineno
    return ConfigError(f"{type(error).__name__}: {error}", where=f"{file}:{line}", key=key)


class PolicyError(HeadgateError):
    """A hook of a policy gave an illegal order, or raised another exception (the `__cause__`).

    An illegal order changes nothing, and the event is still handled to its end: `actions` are all
    actions of that event. `tasks` are the tasks that the illegal order named.
    """

    actions: Sequence[object] = ()
    tasks: Sequence[object] = ()

    def __reduce__(self) -> tuple[type[PolicyError], tuple[object, ...]]:
        """Go to another process without actions and tasks, which are of this one alone."""
        return type(self), self.args


class DriverError(HeadgateError):
    """A driver delivered an event that cannot have happened. Such an event changes nothing."""


class InvariantError(HeadgateError):
    """The state contradicts itself: a defect in Headgate, found by `validate` or by a checker."""


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


def error_text(error: BaseException) -> str:
    """Return type and message of an exception in one line, even if its `__str__` raises.

    >>> error_text(ValueError("no\\nway"))
    'ValueError: no way'
    """
    try:
        text = f"{type(error).__name__}: {error}"
    except BaseException:
        text = type(error).__name__
    return sendable(" ".join(text[:CHARS_MAX].split()))


def sendable(text: str) -> str:
    """Return text that can be encoded as UTF-8: lone surrogates are replaced.

    >>> sendable("a\\udcff")
    'a?'
    """
    if type(text) is str and text.isascii():
        return text
    return str.encode(text, "utf-8", "replace").decode()  # works for subclasses of `str` as well
