"""Handlers of the events about nodes, instances and weights, and the reconciler of plans."""

from __future__ import annotations

from typing import final

from headgate.core.errors import DriverError
from headgate.core.events import (
    InstanceAppeared,
    InstanceStarted,
    InstanceStopped,
    NodeJoined,
    NodeLost,
    WeightsEvicted,
    WeightsLoaded,
)
from headgate.core.orders import Orders
from headgate.core.policy import Plan, Target
from headgate.core.records import Instance, Node
from headgate.core.scheduler.load_failures import LoadFailures
from headgate.core.scheduler.policy_hooks import PolicyHooks
from headgate.core.scheduler.state import InstanceWriter
from headgate.core.states import InstanceState, NodeState, Residency
from headgate.core.view import View


@final
class FleetHandlers:
    """Handles the events about nodes, instances and weights."""

    def __init__(
        self, view: View, instances: InstanceWriter, hooks: PolicyHooks, failures: LoadFailures
    ) -> None:
        self._view = view
        self._instances = instances
        self._hooks = hooks
        self._failures = failures

    def node_joined(self, now_ns: int, event: NodeJoined) -> None:
        """Add a node that joined or came back, with no instance on it."""
        view = self._view
        node = view.nodes.get(event.node_id)
        if node is not None and node.state == NodeState.UP:
            raise DriverError(f"node {event.node_id} has joined already")
        if not 0 <= event.pool_id < len(view.app.pools):
            raise DriverError(f"node {event.node_id}: unknown pool {event.pool_id}")
        if node is not None and node.pool.id != event.pool_id:
            raise DriverError(f"node {event.node_id} has come back to another pool")
        view.now_ns = now_ns
        if node is None:
            pool = view.app.pools[event.pool_id]
            node = Node(event.node_id, event.name, pool, view.variants_by_pool[pool.id])
            view.nodes[node.id] = node
        node.state = NodeState.UP
        self._instances.list_if_free(node)
        self._hooks.node_joined(node)
        self._hooks.capacity(node)

    def node_lost(self, now_ns: int, event: NodeLost) -> None:
        """Remove a node and its instances; its batches end in events of their own."""
        node = self._known_node(event.node_id)
        self._view.now_ns = now_ns
        if node.state != NodeState.UP:
            self._view.events_ignored += 1
            return
        gone = self._instances.lose_node(node)
        for instance in gone:
            self._failures.instance_gone(instance, True, "its node died")
        for instance in gone:
            self._hooks.instance_gone(instance)
        self._hooks.node_lost(node)

    def _known_node(self, node_id: int) -> Node:
        node = self._view.nodes.get(node_id)
        if node is None:
            raise DriverError(f"unknown node {node_id}")
        return node

    def instance_started(self, now_ns: int, event: InstanceStarted) -> None:
        """Mark an instance that this Scheduler started as ready."""
        node = self._known_node(event.node_id)
        instance = self._known_instance(event.instance_id)
        if instance is not None and instance.node not in (None, node):
            raise DriverError(f"instance {event.instance_id} was not ordered on {node.name}")
        if instance is not None and instance.node is None:
            self._check_grant(instance, node)
        self._view.now_ns = now_ns
        if instance is None or instance.state == InstanceState.DRAINING:
            return
        if instance.state != InstanceState.STARTING or node.state != NodeState.UP:
            self._view.events_ignored += 1
            return
        self._instances.instance_started(instance, node)
        self._failures.started(instance.variant)
        self._hooks.instance_started(instance)
        self._hooks.capacity(node)

    def _check_grant(self, instance: Instance, node: Node) -> None:
        if instance.variant.id in node.instances:
            raise DriverError(f"{node.name} holds {instance.variant.name} already")
        need = instance.variant.profile.memory_bytes
        if node.memory_used_bytes + need > node.pool.memory_bytes:
            raise DriverError(f"{node.name} holds too much for {instance.variant.name}")

    def instance_appeared(self, now_ns: int, event: InstanceAppeared) -> None:
        """Add an instance that another Scheduler started and this one may use too."""
        node = self._known_node(event.node_id)
        if event.instance_id < 0 or self._instances.is_own_id(event.instance_id):
            raise DriverError(f"instance {event.instance_id} has an id of this Scheduler")
        if event.instance_id in self._view.instances:
            raise DriverError(f"instance {event.instance_id} appeared twice")
        if not 0 <= event.variant_id < len(self._view.app.variants):
            raise DriverError(f"instance {event.instance_id}: unknown variant {event.variant_id}")
        self._view.now_ns = now_ns
        if node.state != NodeState.UP or event.variant_id in node.instances:
            self._view.events_ignored += 1  # it crossed the loss of its node, or our own start
            return
        variant = self._view.app.variants[event.variant_id]
        instance = self._instances.adopt_instance(event.instance_id, variant, node)
        self._failures.started(variant)
        self._hooks.instance_started(instance)
        self._hooks.capacity(node)

    def instance_stopped(self, now_ns: int, event: InstanceStopped) -> None:
        """Remove an instance, whatever the reason."""
        instance = self._known_instance(event.instance_id)
        self._view.now_ns = now_ns
        if instance is None:
            return
        was_starting = instance.state == InstanceState.STARTING
        self._instances.instance_gone(instance)
        self._failures.instance_gone(instance, was_starting, event.reason)
        self._hooks.instance_gone(instance)
        self._failures.review()
        if instance.node is not None:
            self._hooks.capacity(instance.node)

    def _known_instance(self, instance_id: int) -> Instance | None:
        """The instance that an event names; None if it is gone already."""
        instance = self._view.instances.get(instance_id)
        if instance is None:
            if not self._instances.has_issued_instance(instance_id):
                raise DriverError(f"instance {instance_id} was never started")
            self._view.events_ignored += 1
        return instance

    def weights_loaded(self, now_ns: int, event: WeightsLoaded) -> None:
        """Weights are on the device: loaded as ordered, or an eviction did not happen."""
        instance = self._known_instance(event.instance_id)
        if instance is not None and instance.state == InstanceState.STARTING:
            raise DriverError(f"instance {event.instance_id} is starting, not loading")
        self._view.now_ns = now_ns
        if instance is None or instance.node is None:
            return
        if instance.residency == Residency.HOST:
            self._instances.mark_on_device(instance, instance.node)
        self._instances.end_preparing(instance)
        self._hooks.capacity(instance.node)

    def weights_evicted(self, now_ns: int, event: WeightsEvicted) -> None:
        """Nothing to do: the state assumed the eviction since it was ordered."""
        self._known_instance(event.instance_id)
        self._view.now_ns = now_ns


def reconcile(view: View, orders: Orders, plan: Plan) -> None:
    """Start the instances that a plan lacks, and stop idle ones that it does not want.

    This is the slow time scale, and the same for every policy.
    """
    for target in plan.targets:
        present = [
            instance
            for instance in view.instances.values()
            if instance.variant.id == target.variant_id
            and instance.state != InstanceState.DRAINING
            and instance.pool.id == target.pool_id
        ]
        if len(present) < target.count:
            _start(view, orders, target, target.count - len(present))
        else:
            for instance in sorted(present, key=_stop_order)[: len(present) - target.count]:
                if instance.running == 0:
                    orders.stop(instance)


def _start(view: View, orders: Orders, target: Target, count: int) -> None:
    variant = view.app.variants[target.variant_id]
    for node in list(view.free_nodes.values()):
        if count == 0:
            return
        is_candidate = node.pool.id == target.pool_id and variant.id not in node.instances
        may_start = not view.is_barred(node, variant) and view.can_make_room(node, variant)
        if is_candidate and may_start:
            orders.start(variant, node)
            count -= 1


def _stop_order(instance: Instance) -> tuple[int, int, int]:
    """Starting instances stop first, warm idle ones next; among equals the least recently used."""
    if instance.running:
        order = 2
    else:
        order = 0 if instance.state == InstanceState.STARTING else 1
    return (order, instance.last_used_ns, instance.id)
