"""What may watch, load or disturb a run from outside: the bases that everybody else extends.

They are never compiled, so that code which is not may extend them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headgate.core.actions import Action
    from headgate.core.events import Event
    from headgate.sim.engine import Engine


class Observer:
    """Watches a run from outside: logs it, checks it. All methods are optional."""

    def on_event(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        """An event was handled, and these are the actions it led to."""


class SimClient:
    """Somebody who reacts to answers: closed-loop load. `Engine` calls these."""

    def on_start(self, engine: Engine) -> None:
        """The run begins."""

    def on_wake(self, engine: Engine, now_ns: int) -> None:
        """A time asked for with `Engine.wake_client` has come."""

    def on_arrived(self, engine: Engine, now_ns: int, request_id: int) -> None:
        """One of its requests has arrived, and this is its id. They arrive in order."""

    def on_settled(self, engine: Engine, now_ns: int, request_id: int, outcome: int) -> None:
        """One of its requests has ended."""


class FaultAction:
    """A fault that begins or ends. See `headgate.sim.faults`."""

    __slots__ = ()

    def apply(self, engine: Engine, now_ns: int) -> None:
        """Let it happen."""
