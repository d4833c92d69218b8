"""The Broker: grants the nodes of a pool that several Schedulers share.

A node of such a pool holds one instance at a time. Requests for a node are granted in order of
arrival, but a function that holds fewer nodes goes before one that holds more, so no function can
starve the others. When no node is free, requests wait in a queue of bounded length; beyond the
bound they are denied, and the Scheduler sees an instance that could not be started. Like the
Scheduler and the Backend, the Broker is pure.
"""

from __future__ import annotations

from typing import final


@final
class Grant:
    """Permission to start an instance on a node."""

    __slots__ = ("instance_id", "node_id")

    def __init__(self, instance_id: int, node_id: int) -> None:
        self.instance_id = instance_id
        self.node_id = node_id


@final
class Broker:
    """The free nodes of a shared pool, and the requests that wait for one."""

    def __init__(self, waiting_max: int = 1_000) -> None:
        self._waiting_max = waiting_max
        self._free: dict[int, None] = {}  # node ids, longest free first
        self._waiting: dict[int, int] = {}  # instance id -> function id, in order of request
        self._held: dict[int, tuple[int, int]] = {}  # node id -> (instance id, function id)
        self._nodes_of: dict[int, int] = {}  # function id -> nodes it holds

    def request(self, instance_id: int, function_id: int) -> bool:
        """Request a node. False if denied: no node is free and the queue is full."""
        if not self._free and len(self._waiting) >= self._waiting_max:
            return False
        self._waiting[instance_id] = function_id
        return True

    def withdraw(self, instance_id: int) -> None:
        """Drop the request of an instance that has not been granted a node."""
        self._waiting.pop(instance_id, None)

    def node_joined(self, node_id: int) -> None:
        """Add a node that may be granted."""
        self._free[node_id] = None

    def node_freed(self, node_id: int) -> None:
        """Release a node whose instance is gone, so that it may be granted again."""
        if self._release(node_id):
            self._free[node_id] = None

    def node_lost(self, node_id: int) -> None:
        """Remove a node from the pool."""
        self._release(node_id)
        self._free.pop(node_id, None)

    def grants(self) -> list[Grant]:
        """Grant free nodes to waiting requests: the function with fewest nodes first, then FIFO."""
        granted: list[Grant] = []
        while self._free and self._waiting:
            instance_id = min(  # dicts keep their order, so ties go to the oldest request
                self._waiting, key=lambda i: self._nodes_of.get(self._waiting[i], 0)
            )
            function_id = self._waiting.pop(instance_id)
            node_id = next(iter(self._free))
            del self._free[node_id]
            self._held[node_id] = (instance_id, function_id)
            self._nodes_of[function_id] = self._nodes_of.get(function_id, 0) + 1
            granted.append(Grant(instance_id, node_id))
        return granted

    def _release(self, node_id: int) -> bool:
        held = self._held.pop(node_id, None)
        if held is None:
            return False
        self._nodes_of[held[1]] -= 1
        return True
