"""A closed loop: so many clients, each sending its next request when the last was answered."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from headgate.core.errors import ConfigError
from headgate.workload.arrivals import DEFAULT_NAME


@dataclass(frozen=True, slots=True)
class ConcurrencyStep:
    """From `at_ns` on there are `clients` concurrent clients."""

    at_ns: int
    clients: int


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Concurrency that changes in steps. It only describes; the driver sends the requests.

    A client thinks for `think_ns` between an answer and its next request. No request is sent at
    or after `duration_ns`, nor once `requests_max` have been sent.
    """

    steps: tuple[ConcurrencyStep, ...]  # in order of time; nobody is there before the first
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
                problem = "steps start at 0 or later, each after the one before"
                raise ConfigError(problem, key="at_ns", value=step.at_ns)
            if step.clients < 0:
                raise ConfigError("must not be negative", key="clients", value=step.clients)
            before_ns = step.at_ns

    def clients_at(self, now_ns: int) -> int:
        """Return how many clients there are at an instant.

        >>> loop = ClosedLoop((ConcurrencyStep(0, 5), ConcurrencyStep(10, 20)), duration_ns=30)
        >>> [loop.clients_at(ns) for ns in (0, 9, 10, 29, 30)]
        [5, 5, 20, 20, 0]
        """
        if now_ns >= self.duration_ns:
            return 0
        index = bisect_right(self.steps, now_ns, key=lambda step: step.at_ns)
        return self.steps[index - 1].clients if index else 0
