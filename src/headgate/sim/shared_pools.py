"""Pools that several Schedulers share and that pick the node of an instance themselves.

The `Broker` of the core decides which node an instance gets; this module carries that out in the
simulator. A Scheduler that starts an instance without naming a node learns the node only when the
instance has started. Until then this module handles the actions for, and the loss of, the instance.
"""

from __future__ import annotations

from typing import final

from headgate.core.actions import StartInstance, StopInstance
from headgate.core.backend import Broker
from headgate.core.events import InstanceStopped, Rank
from headgate.core.model import App
from headgate.sim.event_queue import EventQueue
from headgate.sim.node import EventInTransit, SimNode


@final
class SharedPools:
    """The Brokers of a run: one for every pool that was ever asked to pick a node."""

    def __init__(self, app: App, nodes: list[SimNode], queue: EventQueue) -> None:
        self._app = app
        self._nodes = nodes
        self._queue = queue
        self._brokers: dict[int, Broker] = {}  # by pool id
        self._starts: dict[int, StartInstance] = {}  # by instance id, waiting for a grant
        self._granted: dict[int, int] = {}  # instance id -> node id
        self._unannounced: set[int] = set()  # granted, but the Scheduler does not know the node yet
        self._denied: set[int] = set()  # they never held a node

    def request_start(self, now_ns: int, action: StartInstance) -> None:
        """Start an instance on a node of the pool, now or as soon as a node is free."""
        broker = self._brokers.get(action.pool_id)
        if broker is None:
            broker = self._create_broker(action.pool_id)
        variant = self._app.variants[action.variant_id]
        denied = broker.request(action.instance_id, variant.function_id, action.nth)
        if denied:
            self._denied.add(action.instance_id)
            self._report(now_ns, action.instance_id, denied)
        else:
            self._starts[action.instance_id] = action
            self._grant(now_ns, broker)

    def has_waiting_starts(self) -> bool:
        """Whether a start waits for a node."""
        return bool(self._starts)

    def cancel_start(self, now_ns: int, action: StopInstance) -> None:
        """Stop an instance whose Scheduler does not know its node, or cancel its start."""
        start = self._starts.pop(action.instance_id, None)
        node_id = self._granted.get(action.instance_id)
        if start is not None:
            self._brokers[start.pool_id].withdraw(action.instance_id)
            self._report(now_ns, action.instance_id, "the start was cancelled")
        elif node_id is not None:
            self._nodes[node_id].execute(now_ns, StopInstance(action.instance_id, node_id))
        else:
            self._report(now_ns, action.instance_id, "the instance had already stopped")

    def on_started(self, instance_id: int) -> None:
        """Note that the Scheduler of an instance now learns its node."""
        self._unannounced.discard(instance_id)

    def on_stopped(self, now_ns: int, instance_id: int) -> None:
        """Free the node of an instance that has stopped, and grant it to the next in line."""
        if instance_id in self._denied:
            self._denied.discard(instance_id)
            return
        self._unannounced.discard(instance_id)
        self._granted.pop(instance_id, None)
        for pool_id, broker in self._brokers.items():
            for node in self._nodes:
                if node.pool.id == pool_id and node.is_up and not node.backend.instances:
                    broker.node_freed(node.id)
            self._grant(now_ns, broker)

    def on_gateway_crashed(self, ids: range) -> None:
        """Withdraw the starts that a Scheduler with these ids has ordered and that wait.

        Those that were granted go on: the instance is for whoever is left.
        """
        for broker in self._brokers.values():
            for instance_id in broker.withdraw_all(ids):
                del self._starts[instance_id]

    def on_node_joined(self, now_ns: int, node: SimNode) -> None:
        """Offer a node that has joined to the Broker of its pool, if the pool has one."""
        broker = self._brokers.get(node.pool.id)
        if broker is not None:
            broker.node_joined(node.id)
            self._grant(now_ns, broker)

    def on_node_lost(self, node: SimNode) -> list[int]:
        """Withdraw a node; return its instances whose Schedulers do not know their node yet.

        Those Schedulers cannot tell from `NodeLost` that their instance is gone.
        """
        broker = self._brokers.get(node.pool.id)
        if broker is not None:
            broker.node_lost(node.id)
        here = [i for i, node_id in self._granted.items() if node_id == node.id]
        for instance_id in here:
            del self._granted[instance_id]
        return [instance_id for instance_id in here if instance_id in self._unannounced]

    def _create_broker(self, pool_id: int) -> Broker:
        broker = self._brokers[pool_id] = Broker()
        for node in self._nodes:
            if node.pool.id == pool_id and node.is_up:
                broker.node_joined(node.id)
        return broker

    def _grant(self, now_ns: int, broker: Broker) -> None:
        for grant in broker.grants():
            start = self._starts.pop(grant.instance_id)
            self._granted[grant.instance_id] = grant.node_id
            self._unannounced.add(grant.instance_id)
            variant_id, pool_id, shape_id = start.variant_id, start.pool_id, start.shape_id
            node_id, instance_id = grant.node_id, grant.instance_id
            start = StartInstance(instance_id, variant_id, pool_id, node_id, shape_id)
            self._nodes[grant.node_id].execute(now_ns, start)

    def _report(self, now_ns: int, instance_id: int, reason: str) -> None:
        stopped = InstanceStopped(instance_id, reason)
        self._queue.push(now_ns, Rank.COMPLETION, EventInTransit(stopped))
