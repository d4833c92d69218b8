"""Interfaces through which other code watches a run or sends requests into it.

This module is never compiled and imports nothing of the simulator: interpreted code may extend its
classes, also where the simulator's loop is compiled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from headgate.core.actions import Action
    from headgate.core.events import Event
    from headgate.core.states import Settlement


class Simulation(Protocol):
    """What a client may ask of the run that it takes part in. `Engine` implements it."""

    def submit(
        self,
        at_ns: int,
        pipeline: int,
        client: int,
        items: int = 1,
        sender: SimClient | None = None,
        priority: int = 0,
        timeout_ns: int = 0,
        cost_usd: float = 0.0,
        payload_bytes: int = 0,
    ) -> None:
        """Have a request arrive at `at_ns`; `sender` is notified of its arrival and its outcome.

        `priority` is the one that the client claims: smaller is more urgent, 0 is the default.
        `timeout_ns` is how long the client waits; 0: as long as the objective of the pipeline.
        `cost_usd` is the most that it may cost, `payload_bytes` the size of a call that carries it.
        """

    def cancel(self, at_ns: int, request_id: int) -> None:
        """Cancel a request at `at_ns`, if it is still open then."""

    def wake_client(self, at_ns: int, client: SimClient) -> None:
        """Call `client.on_wake` at `at_ns`."""

    def has_pending_work(self) -> bool:
        """Whether a batch, start, load or message is in flight, or a client is still to be woken.

        O(queue length).
        """

    def open_requests(self) -> list[int]:
        """Return the ids of the requests that have arrived and not ended. O(requests)."""


class Observer:
    """Watches a run without taking part in it, for example to log it or to check it."""

    def on_event(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        """Scheduler number `scheduler` has handled `event` and has returned `actions`."""

    def on_gateway_crashed(self, now_ns: int, scheduler: int) -> None:
        """The gateway of a Scheduler is gone, and the requests that were open there have failed."""

    def on_turned_away(self, now_ns: int, request_id: int, pipeline: int) -> None:
        """A request has failed at its arrival, because all gateways are down."""


class SimClient:
    """A client that reacts to what becomes of its requests, such as a closed-loop load generator.

    The engine calls these methods; each of them may be left out.
    """

    def on_start(self, simulation: Simulation) -> None:
        """The run begins, at time 0."""

    def on_wake(self, simulation: Simulation, now_ns: int) -> None:
        """A time that this client passed to `Simulation.wake_client` has come."""

    def on_arrived(self, simulation: Simulation, now_ns: int, request_id: int) -> None:
        """A request of this client has arrived and has this id. They arrive in order of sending."""

    def on_settled(
        self, simulation: Simulation, now_ns: int, request_id: int, settlement: Settlement
    ) -> None:
        """A request of this client has ended."""
