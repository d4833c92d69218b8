"""The gateways of a run: their Schedulers, which of them live, and which one a request goes to.

A gateway that crashes loses its Scheduler with its timers and everything that waits in its inbox.
The one that replaces it is a new Scheduler with an index of its own. So `schedulers` only ever
grows, and the log of each of them can be replayed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import final

from headgate.core.actions import Action, Settle
from headgate.core.events import Event, RequestArrived, TimerKey
from headgate.core.scheduler.scheduler import Scheduler
from headgate.core.states import Outcome
from headgate.sim.node import SimNode


@final
class Gateways:
    """The Schedulers by index, with what the engine keeps for each."""

    def __init__(self, make: Callable[[int], Scheduler], count: int) -> None:
        self._make = make
        self.schedulers: list[Scheduler] = []
        self.timers: list[dict[TimerKey, int]] = []  # the token of each timer that is set
        self.inboxes: list[deque[Event]] = []
        self.free_at_ns: list[int] = []  # when the decision that is being taken ends
        # By node id: how often each Scheduler has handled that the node was lost.
        self.lives: list[Counter[int]] = []
        self._is_alive: list[bool] = []
        self._places: list[int] = []  # by gateway: the index of its present or last Scheduler
        # Requests by id, where there are several gateways: those that are open, with their
        # Scheduler. A single gateway has all of them.
        self.receivers: dict[int, int] = {}
        for _ in range(count):
            self._places.append(self._add())

    def _add(self) -> int:
        index = len(self.schedulers)
        self.schedulers.append(self._make(index))
        self.timers.append({})
        self.inboxes.append(deque())
        self.free_at_ns.append(0)
        self.lives.append(Counter())
        self._is_alive.append(True)
        return index

    def is_alive(self, index: int) -> bool:
        """Whether this Scheduler has not crashed. One that never was is not alive."""
        return index < len(self._is_alive) and self._is_alive[index]

    def alive(self) -> list[int]:
        """The indices of the Schedulers that have not crashed."""
        return [index for index in self._places if self._is_alive[index]]

    def receiver(self, request_id: int) -> int | None:
        """The Scheduler that receives a request: a hash, as of a load balancer; None if all died.

        Round robin would send every n-th request of a periodic workload to the same Scheduler. A
        load balancer notices a crash at once, because connections to the gateway fail.
        """
        hashed = request_id * 2_654_435_761 >> 16
        index = self._places[hashed % len(self._places)]
        if self._is_alive[index]:
            return index
        alive = self.alive()
        return alive[hashed // len(self._places) % len(alive)] if alive else None

    def crash(self, gateway: int) -> int | None:
        """Take a gateway down; returns the index of its Scheduler, None if it is down already."""
        index = self._places[gateway]
        if not self._is_alive[index]:
            return None
        self._is_alive[index] = False
        self.timers[index].clear()  # those on the event queue are void without their tokens
        self.inboxes[index].clear()
        return index

    def replace(self, gateway: int) -> int | None:
        """Replace a gateway that is down; returns the index of the new Scheduler, else None."""
        if self._is_alive[self._places[gateway]]:
            return None
        self._places[gateway] = self._add()
        return self._places[gateway]


@final
class GatewayWork:
    """Lengthens the batches on all nodes when a request arrives: a gateway computes on their cores.

    `headgate calibrate` finds in an event log how much that is (`headgate.metrics.from_log`).
    """

    def __init__(self, nodes: Sequence[SimNode], arrival_ns: int, refusal_ns: int) -> None:
        self._nodes = nodes
        self._arrival_ns = arrival_ns
        self._refusal_ns = refusal_ns  # in addition

    def on_event(self, now_ns: int, event: Event, actions: Sequence[Action]) -> None:
        """A Scheduler has handled an event. Its actions are still to be carried out."""
        if isinstance(event, RequestArrived):
            is_refused = any(
                isinstance(action, Settle) and action.settlement.outcome == Outcome.REJECTED
                for action in actions
            )
            delay_ns = self._arrival_ns + (self._refusal_ns if is_refused else 0)
            for node in self._nodes:
                node.delay_batches(now_ns, delay_ns)
