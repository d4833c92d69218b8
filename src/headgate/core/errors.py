"""Errors, split by who is to blame.

`ConfigError` blames the person at the keyboard and is shown to them as one line. `PolicyError`
blames a policy, `DriverError` blames whoever feeds the machines events, `InvariantError` blames
Headgate itself. A failure of the outside world (a crash, a timeout, a refusal) is not an error at
all: it is an event.
"""

from __future__ import annotations

from collections.abc import Sequence


class HeadgateError(Exception):
    """Every error that Headgate raises on purpose."""


class ConfigError(HeadgateError):
    """Bad input from the user: says where, what, and what is allowed, in one line.

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
            parts.append(repr(value))
        parts.append(problem if allowed is None else f"{problem} (allowed: {allowed})")
        super().__init__(": ".join(parts))


class PolicyError(HeadgateError):
    """A hook of a policy gave an order that is not legal, or raised something else (the cause).

    The order changed nothing, and the event has been handled to its end all the same: `actions`
    are everything it led to. `tasks` are those that an illegal order was about.
    """

    actions: Sequence[object] = ()
    tasks: Sequence[object] = ()


class DriverError(HeadgateError):
    """A driver delivered an event that cannot have happened. The event changed nothing."""


class InvariantError(HeadgateError):
    """The state contradicts itself: a defect in Headgate, found by `validate` or by a checker."""
