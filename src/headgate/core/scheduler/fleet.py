"""Nodes and instances that come, change and go."""

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
    """Handles what happens to the places where work is done."""

    def __init__(
        self, view: View, residents: InstanceWriter, hooks: PolicyHooks, failures: LoadFailures
    ) -> None:
        self._view = view
        self._residents = residents
        self._hooks = hooks
        self._failures = failures

    # --- nodes ---------------------------------------------------------------------------------

    def node_joined(self, now_ns: int, event: NodeJoined) -> None:
        """A node is there, or back, and empty."""
        view = self._view
        node = view.nodes.get(event.node_id)
        if node is not None and node.state == NodeState.UP:
            raise DriverError(f"node {event.node_id} has joined already")
        if not 0 <= event.pool_id < len(view.app.pools):
            raise DriverError(f"node {event.node_id}: there is no pool {event.pool_id}")
        if node is not None and node.pool.id != event.pool_id:
            raise DriverError(f"node {event.node_id} has come back to another pool")
        view.now_ns = now_ns
        if node is None:
            pool = view.app.pools[event.pool_id]
            node = Node(event.node_id, event.name, pool, view.variants_by_pool[pool.id])
            view.nodes[node.id] = node
        node.state = NodeState.UP
        self._residents.offer_node(node)
        self._hooks.node_joined(node)
        self._hooks.capacity(node)

    def node_lost(self, now_ns: int, event: NodeLost) -> None:
        """A node is gone with all that was on it; its batches end in events of their own."""
        node = self._known_node(event.node_id)
        self._view.now_ns = now_ns
        if node.state != NodeState.UP:
            self._view.events_ignored += 1
            return
        gone = self._residents.lose_node(node)
        for instance in gone:
            self._failures.gone(instance, True, "its node died")
        for instance in gone:
            self._hooks.instance_gone(instance)
        self._hooks.node_lost(node)

    def _known_node(self, node_id: int) -> Node:
        node = self._view.nodes.get(node_id)
        if node is None:
            raise DriverError(f"there is no node {node_id}")
        return node

    # --- instances -----------------------------------------------------------------------------

    def instance_started(self, now_ns: int, event: InstanceStarted) -> None:
        """An instance we asked for is ready."""
        node = self._known_node(event.node_id)
        instance = self._known_instance(event.instance_id)
        if instance is not None and instance.node not in (None, node):
            raise DriverError(f"instance {event.instance_id} was not to start on {node.name}")
        if instance is not None and instance.node is None:
            self._check_grant(instance, node)
        self._view.now_ns = now_ns
        if instance is None or instance.state == InstanceState.DRAINING:
            return
        if instance.state != InstanceState.STARTING or node.state != NodeState.UP:
            self._view.events_ignored += 1
            return
        self._residents.instance_started(instance, node)
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
        """A peer has started an instance that we may use too."""
        node = self._known_node(event.node_id)
        if event.instance_id < 0 or self._residents.is_ours(event.instance_id):
            raise DriverError(f"instance {event.instance_id} is not a peer's but ours to start")
        if event.instance_id in self._view.instances:
            raise DriverError(f"instance {event.instance_id} appeared twice")
        if not 0 <= event.variant_id < len(self._view.app.variants):
            raise DriverError(f"instance {event.instance_id}: no variant {event.variant_id}")
        self._view.now_ns = now_ns
        if node.state != NodeState.UP or event.variant_id in node.instances:
            self._view.events_ignored += 1  # it crossed the loss of its node, or a start of ours
            return
        variant = self._view.app.variants[event.variant_id]
        instance = self._residents.adopt_instance(event.instance_id, variant, node)
        self._failures.started(variant)
        self._hooks.instance_started(instance)
        self._hooks.capacity(node)

    def instance_stopped(self, now_ns: int, event: InstanceStopped) -> None:
        """An instance is gone, whatever the reason."""
        instance = self._known_instance(event.instance_id)
        self._view.now_ns = now_ns
        if instance is None:
            return
        was_starting = instance.state == InstanceState.STARTING
        self._residents.instance_gone(instance)
        self._failures.gone(instance, was_starting, event.reason)
        self._hooks.instance_gone(instance)
        self._failures.review()
        if instance.node is not None:
            self._hooks.capacity(instance.node)

    def _known_instance(self, instance_id: int) -> Instance | None:
        """The instance an event speaks of; None if it is gone already."""
        instance = self._view.instances.get(instance_id)
        if instance is None:
            if not self._residents.was_instance(instance_id):
                raise DriverError(f"instance {instance_id} was never started")
            self._view.events_ignored += 1
        return instance

    # --- weights -------------------------------------------------------------------------------

    def weights_loaded(self, now_ns: int, event: WeightsLoaded) -> None:
        """Weights are on the device: loaded as ordered, or kept there against our order."""
        instance = self._known_instance(event.instance_id)
        if instance is not None and instance.state == InstanceState.STARTING:
            raise DriverError(f"instance {event.instance_id} is starting, not loading")
        self._view.now_ns = now_ns
        if instance is None or instance.node is None:
            return
        if instance.residency == Residency.HOST:
            self._residents.keep_weights(instance, instance.node)
        self._residents.end_preparing(instance)
        self._hooks.capacity(instance.node)

    def weights_evicted(self, now_ns: int, event: WeightsEvicted) -> None:
        """Weights are in host memory, as we have taken for granted since we ordered it."""
        self._known_instance(event.instance_id)
        self._view.now_ns = now_ns


# From a plan to starts and stops: the slow time scale, the same for every policy.


def reconcile(view: View, orders: Orders, plan: Plan) -> None:
    """Start what the plan wants and is not there; stop what is there and not wanted."""
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
    """Never stop a warm instance while a starting one could be called off; then the idlest."""
    if instance.running:
        order = 2
    else:
        order = 0 if instance.state == InstanceState.STARTING else 1
    return (order, instance.last_used_ns, instance.id)
