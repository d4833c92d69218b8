"""What receiving a request, and refusing one, takes from the batches that run meanwhile.

A gateway on the machine of its workers computes on their cores. `headgate calibrate` finds in an
event log how much that is (`headgate.metrics.arrival_delay`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from headgate.core.actions import Action, Settle
from headgate.core.events import Event, RequestArrived
from headgate.core.states import Outcome
from headgate.sim.node import SimNode


@final
class GatewayWork:
    """Lengthens the batches on all nodes when a request arrives."""

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
