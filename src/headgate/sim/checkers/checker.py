"""The base of all checkers, the checker that combines others, and the checker of the clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from headgate.core.actions import Action
from headgate.core.errors import InvariantError
from headgate.core.events import (
    BatchFailed,
    BatchFinished,
    BatchLost,
    BatchRefused,
    Event,
    InstanceAppeared,
    NodeJoined,
    TimerFired,
)
from headgate.metrics.columns import RunColumns
from headgate.sim.interfaces import Observer

_VIOLATIONS_MAX: Final = 20  # per checker: one cause tends to have many effects
EVENTS_MAX: Final = 1_000_000_000


class Checker(Observer):
    """Observes one run and collects violations as text.

    Subclasses check events and actions in the order in which they occur, and the columns of the
    run once it is over.
    """

    def __init__(self) -> None:
        self.violations: list[str] = []

    def on_event(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        self.check_event(now_ns, scheduler, event)
        if isinstance(event, NodeJoined) and event.instances:
            for appeared in _with_node(event):
                self.check_event(now_ns, scheduler, appeared)
        for action in actions:
            self.check_action(now_ns, scheduler, action)

    def check_event(self, now_ns: int, scheduler: int, event: Event) -> None:
        """Check or record an event that Scheduler number `scheduler` handles."""

    def check_action(self, now_ns: int, scheduler: int, action: Action) -> None:
        """Check or record an action that Scheduler number `scheduler` returns."""

    def finish(self, run: RunColumns) -> None:
        """Check the columns of the run, which is over."""

    def report(self, now_ns: int, text: str) -> None:
        """Add a violation, unless this checker has reported too many already."""
        if len(self.violations) < _VIOLATIONS_MAX:
            self.violations.append(f"{type(self).__name__}: at {now_ns} ns: {text}")

    def raise_if_any(self) -> None:
        """Raise `InvariantError` if there was any violation."""
        if self.violations:
            raise InvariantError("\n".join(self.violations))


def _with_node(event: NodeJoined) -> list[InstanceAppeared]:
    """The instances that a node brings along, as if each had appeared after it."""
    flat = event.instances
    return [
        InstanceAppeared(flat[place], flat[place + 1], event.node_id, flat[place + 2])
        for place in range(0, len(flat), 3)
    ]


def ended_batch(event: Event) -> int | None:
    """The batch that has ended, or that its Scheduler gives up as lost; None if there is none."""
    if isinstance(event, BatchFinished | BatchFailed | BatchRefused | BatchLost):
        return event.batch_id
    if isinstance(event, TimerFired) and event.key[0] == "lost":
        return event.key[1]
    return None


@final
class Checkers(Checker):
    """Several checkers combined into one."""

    def __init__(self, checkers: Sequence[Checker]) -> None:
        super().__init__()
        self._checkers = checkers

    @property
    def names(self) -> tuple[str, ...]:
        """The class names of the checkers."""
        return tuple(type(checker).__name__ for checker in self._checkers)

    def on_event(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        for checker in self._checkers:
            checker.on_event(now_ns, scheduler, event, actions)

    def on_gateway_crashed(self, now_ns: int, scheduler: int) -> None:
        for checker in self._checkers:
            checker.on_gateway_crashed(now_ns, scheduler)

    def on_turned_away(self, now_ns: int, request_id: int, pipeline: int) -> None:
        for checker in self._checkers:
            checker.on_turned_away(now_ns, request_id, pipeline)

    def finish(self, run: RunColumns) -> None:
        """Finish all checkers and collect their violations."""
        for checker in self._checkers:
            checker.finish(run)
            self.violations.extend(checker.violations)


@final
class Clock(Checker):
    """Time never goes back, and a run does not loop for ever: raises after `events_max` events."""

    def __init__(self, events_max: int = EVENTS_MAX) -> None:
        super().__init__()
        self._events_left = events_max
        self._last_ns = 0

    def check_event(self, now_ns: int, scheduler: int, event: Event) -> None:
        if now_ns < self._last_ns:
            self.report(now_ns, f"time went back from {self._last_ns} ns")
        self._last_ns = now_ns
        self._events_left -= 1
        if self._events_left < 0:
            raise InvariantError(
                f"{now_ns} ns: too many events; the last was {type(event).__name__}"
            )
