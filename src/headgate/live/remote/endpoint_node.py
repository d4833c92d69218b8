"""A node that is an endpoint: it is there when it answers, and nothing has to be loaded onto it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol, final

from headgate.core.actions import (
    EvictWeights,
    LoadWeights,
    PlacedAction,
    StartInstance,
    StopInstance,
)
from headgate.core.events import (
    InstanceStarted,
    InstanceStopped,
    WeightsEvicted,
    WeightsLoaded,
)
from headgate.core.model import App, Function
from headgate.functions.tensor import Signature
from headgate.live.assignment import Place
from headgate.live.remote.errand import Errand
from headgate.live.remote.outpost import Listener, Outpost

RETRY_S: Final = 0.5


class NodeListener(Listener, Protocol):
    """Who hears of nodes that come and go."""

    def node_joined(self, place: Place) -> None:
        """It is there, or there again, empty."""

    def node_lost(self, place: Place) -> None:
        """It is gone; what it was running ends in events of its own."""


Ping = Callable[[str, int, Signature], str]


@final
class EndpointNode:
    """Carries out the orders for one node of an outpost."""

    def __init__(
        self,
        place: Place,
        app: App,
        signatures: Sequence[Signature],
        outpost: Outpost,
        ping: Ping,
        listener: NodeListener,
    ) -> None:
        self.place = place
        self.outpost = outpost
        self._app = app
        self._signatures = signatures
        self._ping = ping
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._is_up = False
        self._starting: dict[int, Function] = {}  # by instance

    def join(self) -> None:
        """Be there. Whether anybody answers shows when something is started."""
        self._is_up = True
        self._listener.node_joined(self.place)

    def order(self, action: PlacedAction) -> None:
        """Carry out any order but to run a batch."""
        listener = self._listener
        if isinstance(action, StartInstance):
            function_id = self._app.variants[action.variant_id].function_id
            self._starting[action.instance_id] = self._app.functions[function_id]
            self._try(action.instance_id)
        elif isinstance(action, StopInstance):
            self._starting.pop(action.instance_id, None)
            listener.reported(InstanceStopped(action.instance_id, "stopped"))
        elif isinstance(action, LoadWeights):
            listener.reported(WeightsLoaded(action.instance_id))
        elif isinstance(action, EvictWeights):
            listener.reported(WeightsEvicted(action.instance_id))

    def gone(self, errand: Errand) -> None:
        """Nobody is there: the node is lost until somebody answers again."""
        if self._is_up:
            self._is_up = False
            self._starting.clear()
            self._listener.node_lost(self.place)
            function_id = self._app.variants[errand.variant_id].function_id
            self._look_again(self._app.functions[function_id])

    # --- asking whether it is there ------------------------------------------------------------

    def _try(self, instance_id: int) -> None:
        function = self._starting.get(instance_id)
        if function is not None:
            self._ask(function, partial(self._tried, instance_id))

    def _tried(self, instance_id: int, problem: str) -> None:
        if instance_id not in self._starting:
            return  # nobody wants it any more
        if problem:
            self.outpost.warn(f"{self.place.name} does not answer yet: {problem}")
            self._loop.call_later(RETRY_S, self._try, instance_id)
            return
        del self._starting[instance_id]
        self._listener.reported(InstanceStarted(instance_id, self.place.id))

    def _look_again(self, function: Function) -> None:
        self._ask(function, partial(self._looked, function))

    def _looked(self, function: Function, problem: str) -> None:
        if problem:
            self._loop.call_later(RETRY_S, self._look_again, function)
        else:
            self.join()

    def _ask(self, function: Function, then: Callable[[str], None]) -> None:
        threads = self.outpost.threads
        if not threads.free:
            self._loop.call_later(RETRY_S, self._ask, function, then)
            return
        signature = self._signatures[function.id]
        threads.do(partial(self._ping, function.name, self.place.id, signature), then)
