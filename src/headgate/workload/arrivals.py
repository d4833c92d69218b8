"""Workloads as data: open-loop arrivals as columns, and closed loops as steps of concurrency."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, fields
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headgate.core.clock import SECOND_NS
from headgate.core.errors import ConfigError

Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]
Float64 = NDArray[np.float64]

ARRIVALS_MAX: Final = 1_000_000_000  # 8 GB of times; more is surely a mistake in a rate
DEFAULT_NAME: Final = "default"
_CHECK_ROWS: Final = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class RequestTerms:
    """The terms that each request states, as in an event log; 0: it does not state one.

    Times count from the arrival, so that a request that is moved keeps them.
    """

    timeout_ns: Int64  # the client's deadline, after which a response is useless
    cancel_ns: Int64  # when the client cancels the request, if it is still open then
    cost_usd: Float64  # the most that the request may cost
    payload_bytes: Int64  # of a FaaS call that carries the inputs

    def check(self, length: int) -> None:
        """Raise `ConfigError` unless each column has this many rows, none of them negative."""
        for column in fields(self):
            values = getattr(self, column.name)
            kind = np.float64 if column.name == "cost_usd" else np.int64
            _check_column(column.name, values, kind, length)
            if length and not values.min() >= 0:
                raise ConfigError("must not be negative", key=column.name, value=values.min())

    def rows(self, rows: slice | NDArray[np.integer]) -> RequestTerms:
        """Return some rows of each column."""
        return RequestTerms(*(getattr(self, column.name)[rows] for column in fields(self)))


def no_terms(length: int) -> RequestTerms:
    """Return the terms of requests that state none."""
    zeros = np.zeros(length, np.int64)
    return RequestTerms(zeros, zeros, np.zeros(length), zeros)


@dataclass(frozen=True, slots=True, eq=False)
class Arrivals:
    """Requests in order of arrival, within the window `[0, duration_ns)`.

    Checked on construction; the columns become read-only views of the arguments, not copies. A
    column made by `constant_column` takes no memory, so 72 million arrivals take 8 bytes each.
    """

    times_ns: Int64  # ascending
    duration_ns: int
    pipeline: Int32  # index into `pipelines`
    client: Int32  # index into `clients`
    pipelines: tuple[str, ...] = (DEFAULT_NAME,)
    clients: tuple[str, ...] = (DEFAULT_NAME,)
    items: Int32 | None = None  # the number of items of each request; None: one each
    priority: Int32 | None = None  # that each client claims, smaller is more urgent; None: 0
    terms: RequestTerms | None = None  # what requests of a log asked for besides; None: nothing

    def __post_init__(self) -> None:
        _check_times(self.times_ns, self.duration_ns)
        _check_index("pipeline", self.pipeline, len(self.times_ns), self.pipelines)
        _check_index("client", self.client, len(self.times_ns), self.clients)
        if self.items is not None:
            _check_column("items", self.items, np.int32, len(self.times_ns))
            if len(self.items) and self.items.min() < 1:
                raise ConfigError("a request has at least one item", key="items")
        if self.priority is not None:
            _check_column("priority", self.priority, np.int32, len(self.times_ns))
        if self.terms is not None:
            self.terms.check(len(self.times_ns))
        for name in ("times_ns", "pipeline", "client", "items", "priority"):
            column = getattr(self, name)
            if column is not None:
                view = column.view()
                view.flags.writeable = False
                object.__setattr__(self, name, view)

    def __len__(self) -> int:
        return len(self.times_ns)

    @property
    def sizes(self) -> Int32:
        """The number of items of each request, as a column also where `items` is None."""
        return constant_column(len(self), 1) if self.items is None else self.items

    @property
    def priorities(self) -> Int32:
        """The priority of each request, as a column also where `priority` is None."""
        return constant_column(len(self)) if self.priority is None else self.priority

    @property
    def mean_rate_per_s(self) -> float:
        """Arrivals per second over the whole window."""
        return len(self) * SECOND_NS / self.duration_ns if self.duration_ns else 0.0


def arrivals_at(times_ns: Int64, duration_ns: int) -> Arrivals:
    """Return arrivals of the default client for the default pipeline, one item each.

    >>> len(arrivals_at(np.array([0, 5, 5]), 10))
    3
    """
    zeros = constant_column(len(times_ns))
    return Arrivals(times_ns, duration_ns, zeros, zeros)


def constant_column(length: int, value: int = 0) -> Int32:
    """Return a read-only column of one repeated value, which takes no memory."""
    return np.broadcast_to(np.array(value, dtype=np.int32), (length,))


def is_constant(column: Int32) -> bool:
    """Whether the column is stored as one repeated value."""
    return column.strides == (0,)


def take_rows(column: Int32, rows: slice | NDArray[np.integer]) -> Int32:
    """Return some rows of a column; constant columns stay constant."""
    if isinstance(rows, slice) or not len(column) or not is_constant(column):
        return column[rows]
    return constant_column(len(rows), int(column[0]))


def check_total(total: float) -> None:
    """Raise ConfigError if there would be more arrivals than fit into memory."""
    if not total <= ARRIVALS_MAX:
        raise ConfigError(f"{total:.3g} arrivals are too many", allowed=f"up to {ARRIVALS_MAX:,}")


def check_positive(key: str, value: float) -> None:
    """Raise ConfigError if a number is not positive and finite."""
    if not 0 < value < math.inf:
        raise ConfigError("must be positive", key=key, value=value, allowed="more than 0")


def _check_times(times_ns: Int64, duration_ns: int) -> None:
    _check_column("times_ns", times_ns, np.int64, len(times_ns))
    if duration_ns < 0:
        raise ConfigError("must not be negative", key="duration_ns", value=duration_ns)
    if not len(times_ns):
        return
    for start in range(0, len(times_ns), _CHECK_ROWS):  # in chunks: a whole mask may take 1 GB
        part = times_ns[start : start + _CHECK_ROWS + 1]
        if (part[1:] < part[:-1]).any():
            row = start + 1 + int(np.argmax(part[1:] < part[:-1]))
            message = f"row {row} is earlier than the row before"
            raise ConfigError(message, key="times_ns", value=int(times_ns[row]))
    if times_ns[0] < 0:
        raise ConfigError("must not be negative", key="times_ns", value=int(times_ns[0]))
    if times_ns[-1] >= duration_ns:
        message = f"must be before the end of the window, {duration_ns}"
        raise ConfigError(message, key="times_ns", value=int(times_ns[-1]))


def _check_index(name: str, column: Int32, length: int, names: tuple[str, ...]) -> None:
    _check_column(name, column, np.int32, length)
    if len(set(names)) != len(names):
        raise ConfigError("a name appears twice", key=f"{name}s", value=names)
    if not length:
        return
    lowest, highest = (
        (column[0], column[0]) if is_constant(column) else (column.min(), column.max())
    )
    if lowest < 0 or highest >= len(names):
        value = int(lowest if lowest < 0 else highest)
        raise ConfigError("no such index", key=name, value=value, allowed=f"0 to {len(names) - 1}")


def _check_column(name: str, column: NDArray[np.generic], dtype: type, length: int) -> None:
    if column.dtype != dtype or column.ndim != 1:
        problem = f"is {column.ndim}-dimensional {column.dtype}"
        raise ConfigError(problem, key=name, allowed=f"one column of {np.dtype(dtype)}")
    if len(column) != length:
        raise ConfigError(f"has {len(column)} rows beside {length} times", key=name)


@dataclass(frozen=True, slots=True)
class ConcurrencyStep:
    """From `at_ns` on there are `clients` concurrent clients."""

    at_ns: int
    clients: int


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A closed loop: each client sends its next request when its previous one is answered.

    This is only a description; a driver sends the requests. The concurrency changes in steps. A
    client thinks for `think_ns` between a response and its next request. No request is sent at or
    after `duration_ns`, nor once `requests_max` have been sent.
    """

    steps: tuple[ConcurrencyStep, ...]  # in order of time; no clients before the first step
    duration_ns: int
    think_ns: int = 0
    pipeline: str = DEFAULT_NAME
    client: str = DEFAULT_NAME
    requests_max: int | None = None

    def __post_init__(self) -> None:
        if not self.steps:
            raise ConfigError("needs at least one step", key="steps")
        if self.duration_ns <= 0:
            raise ConfigError("must be positive", key="duration_ns", value=self.duration_ns)
        if self.think_ns < 0:
            raise ConfigError("must not be negative", key="think_ns", value=self.think_ns)
        if self.requests_max is not None and self.requests_max < 1:
            raise ConfigError("must be positive", key="requests_max", value=self.requests_max)
        before_ns = -1
        for step in self.steps:
            if step.at_ns <= before_ns:
                problem = "steps start at 0 or later, each after the previous one"
                raise ConfigError(problem, key="at_ns", value=step.at_ns)
            if step.clients < 0:
                raise ConfigError("must not be negative", key="clients", value=step.clients)
            before_ns = step.at_ns

    def clients_at(self, now_ns: int) -> int:
        """Return the number of clients at a time.

        >>> loop = ClosedLoop((ConcurrencyStep(0, 5), ConcurrencyStep(10, 20)), duration_ns=30)
        >>> [loop.clients_at(ns) for ns in (0, 9, 10, 29, 30)]
        [5, 5, 20, 20, 0]
        """
        if now_ns >= self.duration_ns:
            return 0
        index = bisect_right(self.steps, now_ns, key=lambda step: step.at_ns)
        return self.steps[index - 1].clients if index else 0
