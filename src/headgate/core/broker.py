"""The Broker: who gets the next node of a pool that several Schedulers share.

A node of such a pool holds one instance at a time. Requests for a node are granted in turn, but a
function that holds fewer nodes goes before one that holds more, so a greedy one cannot starve the
rest. When the pool is exhausted requests wait, up to a bound; beyond it they are denied, which the
Scheduler sees as an instance that could not be started. Pure, like the other two machines.
"""

from __future__ import annotations

from typing import final


@final
class Grant:
    """An instance may be started on a node."""

    __slots__ = ("instance_id", "node_id")

    def __init__(self, instance_id: int, node_id: int) -> None:
        self.instance_id = instance_id
        self.node_id = node_id


@final
class Broker:
    """Free nodes, and requests that wait for one."""

    def __init__(self, waiting_max: int = 1_000) -> None:
        self._waiting_max = waiting_max
        self._free: dict[int, None] = {}  # node ids, longest free first
        self._waiting: dict[int, int] = {}  # instance id -> function id, in order of asking
        self._held: dict[int, tuple[int, int]] = {}  # node id -> (instance id, function id)
        self._nodes_of: dict[int, int] = {}  # function id -> nodes it holds

    def request(self, instance_id: int, function_id: int) -> bool:
        """Ask for a node. False: denied, the pool is exhausted and enough others wait."""
        if not self._free and len(self._waiting) >= self._waiting_max:
            return False
        self._waiting[instance_id] = function_id
        return True

    def withdraw(self, instance_id: int) -> None:
        """The instance is wanted no longer before it got a node."""
        self._waiting.pop(instance_id, None)

    def node_joined(self, node_id: int) -> None:
        """A node is there to be granted."""
        self._free[node_id] = None

    def node_freed(self, node_id: int) -> None:
        """The instance on this node is gone; the node may be granted again."""
        if self._forget(node_id):
            self._free[node_id] = None

    def node_lost(self, node_id: int) -> None:
        """The node is gone."""
        self._forget(node_id)
        self._free.pop(node_id, None)

    def grants(self) -> list[Grant]:
        """Match free nodes with those that wait, the poorest function first, then the oldest."""
        granted: list[Grant] = []
        while self._free and self._waiting:
            instance_id = min(  # dicts keep their order, so ties go to who asked first
                self._waiting, key=lambda i: self._nodes_of.get(self._waiting[i], 0)
            )
            function_id = self._waiting.pop(instance_id)
            node_id = next(iter(self._free))
            del self._free[node_id]
            self._held[node_id] = (instance_id, function_id)
            self._nodes_of[function_id] = self._nodes_of.get(function_id, 0) + 1
            granted.append(Grant(instance_id, node_id))
        return granted

    def _forget(self, node_id: int) -> bool:
        held = self._held.pop(node_id, None)
        if held is None:
            return False
        self._nodes_of[held[1]] -= 1
        return True
