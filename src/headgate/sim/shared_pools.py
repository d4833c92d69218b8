"""Pools that pick the node themselves: the real Broker decides, this carries it out.

A Scheduler that asks for an instance "anywhere" is told where it is only when it has started. Until
then what it orders about that instance, and what befalls it, is settled here.
"""

from __future__ import annotations

from typing import final

from headgate.core.actions import StartInstance, StopInstance
from headgate.core.broker import Broker
from headgate.core.events import InstanceStopped, Rank
from headgate.core.model import App
from headgate.sim.event_queue import EventQueue
from headgate.sim.node import EventInTransit, SimNode


@final
class SharedPools:
    """A Broker for every pool that was ever asked for a node."""

    def __init__(self, app: App, nodes: list[SimNode], agenda: EventQueue) -> None:
        self._app = app
        self._nodes = nodes
        self._agenda = agenda
        self._brokers: dict[int, Broker] = {}  # by pool id
        self._starts: dict[int, StartInstance] = {}  # by instance id, waiting for a grant
        self._granted: dict[int, int] = {}  # instance id -> node id
        self._untold: set[int] = set()  # those of them whose Scheduler does not know where yet

    # --- orders --------------------------------------------------------------------------------

    def ask(self, now_ns: int, order: StartInstance) -> None:
        """Find a node for an instance, now or when one is free."""
        broker = self._brokers.get(order.pool_id)
        if broker is None:
            broker = self._open(order.pool_id)
        variant = self._app.variants[order.variant_id]
        if broker.request(order.instance_id, variant.function_id):
            self._starts[order.instance_id] = order
            self._grant(now_ns, broker)
        else:
            self._report(now_ns, order.instance_id, "the pool is exhausted")

    def call_off(self, now_ns: int, order: StopInstance) -> None:
        """Stop an instance whose Scheduler does not know where it is, if it is anywhere yet."""
        start = self._starts.pop(order.instance_id, None)
        node_id = self._granted.get(order.instance_id)
        if start is not None:
            self._brokers[start.pool_id].withdraw(order.instance_id)
            self._report(now_ns, order.instance_id, "never started")
        elif node_id is not None:
            self._nodes[node_id].take(now_ns, StopInstance(order.instance_id, node_id))
        else:
            self._report(now_ns, order.instance_id, "gone already")

    # --- what happens --------------------------------------------------------------------------

    def started(self, instance_id: int) -> None:
        """Its Scheduler is being told where an instance is."""
        self._untold.discard(instance_id)

    def stopped(self, now_ns: int, instance_id: int) -> None:
        """An instance is gone; its node may be granted again."""
        self._untold.discard(instance_id)
        self._granted.pop(instance_id, None)
        for pool_id, broker in self._brokers.items():
            for node in self._nodes:
                if node.pool.id == pool_id and node.is_up and not node.backend.instances:
                    broker.node_freed(node.id)
            self._grant(now_ns, broker)

    def node_joined(self, now_ns: int, node: SimNode) -> None:
        """A node is there to be granted."""
        broker = self._brokers.get(node.pool.id)
        if broker is not None:
            broker.node_joined(node.id)
            self._grant(now_ns, broker)

    def node_lost(self, node: SimNode) -> list[int]:
        """A node is gone; returns the instances whose Schedulers do not know it was theirs."""
        broker = self._brokers.get(node.pool.id)
        if broker is not None:
            broker.node_lost(node.id)
        here = [i for i, node_id in self._granted.items() if node_id == node.id]
        for instance_id in here:
            del self._granted[instance_id]
        return [instance_id for instance_id in here if instance_id in self._untold]

    def _open(self, pool_id: int) -> Broker:
        broker = self._brokers[pool_id] = Broker()
        for node in self._nodes:
            if node.pool.id == pool_id and node.is_up:
                broker.node_joined(node.id)
        return broker

    def _grant(self, now_ns: int, broker: Broker) -> None:
        for grant in broker.grants():
            asked = self._starts.pop(grant.instance_id)
            self._granted[grant.instance_id] = grant.node_id
            self._untold.add(grant.instance_id)
            order = StartInstance(asked.instance_id, asked.variant_id, asked.pool_id, grant.node_id)
            self._nodes[grant.node_id].take(now_ns, order)

    def _report(self, now_ns: int, instance_id: int, reason: str) -> None:
        stopped = InstanceStopped(instance_id, reason)
        self._agenda.push(now_ns, Rank.COMPLETION, EventInTransit(stopped))
