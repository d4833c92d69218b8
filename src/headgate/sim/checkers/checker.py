"""What a checker is: it watches a run, then says what was wrong with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from headgate.core.actions import Action
from headgate.core.errors import InvariantError
from headgate.core.events import Event
from headgate.metrics.columns import RunColumns
from headgate.sim.interfaces import Observer

_VIOLATIONS_MAX: Final = 20  # of one checker; one cause tends to have many effects
EVENTS_MAX: Final = 1_000_000_000


class Checker(Observer):
    """Collects violations as text. Good for one run.

    Subclasses take note of events and actions, in the order they came about, and of the columns
    of the run once it is over.
    """

    def __init__(self) -> None:
        self.violations: list[str] = []

    def on_event(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        """An event was handled, and these are the actions it led to."""
        self.note_event(now_ns, scheduler, event)
        for action in actions:
            self.note_action(now_ns, scheduler, action)

    def note_event(self, now_ns: int, scheduler: int, event: Event) -> None:
        """Something happened."""

    def note_action(self, now_ns: int, scheduler: int, action: Action) -> None:
        """Something was ordered."""

    def finish(self, run: RunColumns) -> None:
        """The run is over, and this is what it left behind."""

    def blame(self, now_ns: int, text: str) -> None:
        """Put a violation down."""
        if len(self.violations) < _VIOLATIONS_MAX:
            self.violations.append(f"{type(self).__name__}: at {now_ns} ns: {text}")

    def raise_if_any(self) -> None:
        """Raise `InvariantError` if there was any violation."""
        if self.violations:
            raise InvariantError("\n".join(self.violations))


@final
class Checkers(Checker):
    """Several checkers as one."""

    def __init__(self, checkers: Sequence[Checker]) -> None:
        super().__init__()
        self._checkers = checkers

    @property
    def names(self) -> tuple[str, ...]:
        """What is checked."""
        return tuple(type(checker).__name__ for checker in self._checkers)

    def on_event(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        """Pass it on to all."""
        for checker in self._checkers:
            checker.on_event(now_ns, scheduler, event, actions)

    def finish(self, run: RunColumns) -> None:
        """Let all finish, and gather what they found."""
        for checker in self._checkers:
            checker.finish(run)
            self.violations.extend(checker.violations)


@final
class Clock(Checker):
    """Time never goes back, and goes on: a run that stands still is stopped."""

    def __init__(self, events_max: int = EVENTS_MAX) -> None:
        super().__init__()
        self._events_left = events_max
        self._last_ns = 0

    def note_event(self, now_ns: int, scheduler: int, event: Event) -> None:
        """Compare with the event before."""
        if now_ns < self._last_ns:
            self.blame(now_ns, f"time went back from {self._last_ns} ns")
        self._last_ns = now_ns
        self._events_left -= 1
        if self._events_left < 0:
            raise InvariantError(
                f"{now_ns} ns: too many events; the last was {type(event).__name__}"
            )
