"""The driver: owns the Scheduler, and is the only one to speak to it.

A driver of the seam like the simulator's engine, and as small: no decision is made here. Everybody
else posts events to its inbox; once per turn of the event loop it hands them over, what ends work
before what brings work, and carries out what the Scheduler says. The clock is read once per event.

Everything runs on one event loop, so there is nothing to lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from operator import attrgetter
from time import monotonic_ns
from typing import Final, Protocol, final

from headgate.core.actions import (
    Action,
    CancelTimer,
    Dispatch,
    KeepWarm,
    PlacedAction,
    ReportFault,
    SetTimer,
    Settle,
)
from headgate.core.errors import DriverError, PolicyError
from headgate.core.events import Event, TimerFired, TimerKey
from headgate.core.scheduler import Scheduler


class Hands(Protocol):
    """Who carries out what the Scheduler says."""

    def settle(self, now_ns: int, action: Settle) -> None:
        """Answer a client."""

    def dispatch(self, now_ns: int, action: Dispatch) -> None:
        """Send a batch to its worker."""

    def order(self, action: PlacedAction) -> None:
        """Send a worker any other order."""

    def keep_warm(self, action: KeepWarm) -> None:
        """Have a platform keep instances ready from now on."""


Record = Callable[[int, Event, list[Action]], None]


@final
class Driver:
    """Feeds one Scheduler on one event loop."""

    def __init__(
        self,
        scheduler: Scheduler,
        hands: Hands,
        loop: asyncio.AbstractEventLoop,
        *,
        record: Record | None = None,
        complain: Callable[[str], None],
    ) -> None:
        self.scheduler = scheduler
        self._hands = hands
        self._loop = loop
        self._record = record
        self._complain = complain
        self._inbox: list[Event] = []
        self._is_awake = False
        self._timers: dict[TimerKey, tuple[int, asyncio.TimerHandle]] = {}
        self._is_stopped = False

    def post(self, event: Event) -> None:
        """Have the Scheduler told, before the loop waits again."""
        self._inbox.append(event)
        if not self._is_awake:
            self._is_awake = True
            self._loop.call_soon(self._drain)

    def stop(self) -> None:
        """Forget all timers and take no more events."""
        self._is_stopped = True
        for _, handle in self._timers.values():
            handle.cancel()
        self._timers.clear()

    def _drain(self) -> None:
        self._is_awake = False
        inbox, self._inbox = self._inbox, []
        if self._is_stopped:
            return
        if len(inbox) > 1:
            inbox.sort(key=_RANK)  # stable: among equals, in the order they came about
        for event in inbox:
            self._tell(event)

    def _tell(self, event: Event) -> None:
        now_ns = monotonic_ns()
        try:
            actions = self.scheduler.handle(now_ns, event)
        except PolicyError as error:
            # A defect of the policy. What it ordered before stands, so the world must hear of it.
            self._complain(f"the policy gave an order that is not legal: {error}")
            actions = [action for action in error.actions if isinstance(action, Action)]
        except DriverError as error:
            # A defect of ours, or a worker that tells stories. It has changed nothing.
            self._complain(f"an event that cannot have happened: {error}")
            return
        if self._record is not None:
            self._record(now_ns, event, actions)
        # Workers first: answering takes a while, and they had better work meanwhile.
        hands = self._hands
        settled: list[Settle] = []
        for action in actions:
            if isinstance(action, Settle):
                settled.append(action)
            elif isinstance(action, Dispatch):
                hands.dispatch(now_ns, action)
            elif isinstance(action, SetTimer):
                self._set_timer(now_ns, action.key, action.at_ns)
            elif isinstance(action, CancelTimer):
                self._cancel_timer(action.key)
            elif isinstance(action, KeepWarm):
                hands.keep_warm(action)
            elif isinstance(action, PlacedAction):
                hands.order(action)
            else:
                assert isinstance(action, ReportFault)  # for the log; the error has been told
        for settle in settled:
            hands.settle(now_ns, settle)

    # --- timers --------------------------------------------------------------------------------

    def _set_timer(self, now_ns: int, key: TimerKey, at_ns: int) -> None:
        self._cancel_timer(key)
        delay_s = max(0, at_ns - now_ns) / 1e9
        self._timers[key] = (at_ns, self._loop.call_later(delay_s, self._fire, key))

    def _cancel_timer(self, key: TimerKey) -> None:
        found = self._timers.pop(key, None)
        if found is not None:
            found[1].cancel()

    def _fire(self, key: TimerKey) -> None:
        at_ns, _ = self._timers.pop(key)
        now_ns = monotonic_ns()
        if now_ns < at_ns:  # the loop counts in milliseconds and may round down
            self._set_timer(now_ns, key, at_ns)
        else:
            self.post(TimerFired(key))


_RANK: Final = attrgetter("rank")
