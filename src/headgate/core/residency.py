"""The books of the fleet: which instance is where, what memory it holds, who must make room.

Like the `Ledger` it only writes: what is legal has been checked before.
"""

from __future__ import annotations

from typing import final

from headgate.core.actions import EvictWeights, LoadWeights, StartInstance, StopInstance
from headgate.core.ledger import Ledger
from headgate.core.lifecycle import InstanceState, NodeState, Residency
from headgate.core.model import Pool, Variant
from headgate.core.records import Instance, Node
from headgate.core.view import View, is_evictable, is_free


@final
class Residents:
    """Starts, stops, loads and evicts, in the books and as actions."""

    def __init__(self, view: View, ledger: Ledger, ids_start: int, ids_step: int) -> None:
        self._view = view
        self._ledger = ledger
        self._ids_step = ids_step
        self._next_id = ids_start

    # --- ids -----------------------------------------------------------------------------------

    def was_instance(self, instance_id: int) -> bool:
        """Whether this id can have been an instance. Peers' ids run ahead of or behind ours."""
        is_drawn = instance_id < self._next_id or not self.is_ours(instance_id)
        return instance_id >= 0 and is_drawn

    def is_ours(self, instance_id: int) -> bool:
        """Whether this Scheduler is the one that gives this id."""
        return (instance_id - self._next_id) % self._ids_step == 0

    # --- nodes ---------------------------------------------------------------------------------

    def offer_node(self, node: Node) -> None:
        """Put the node at the end of the free ones if it is free and not among them."""
        view = self._view
        if is_free(view, node) and node.id not in view.free_nodes:
            view.free_nodes[node.id] = node

    def lose_node(self, node: Node) -> list[Instance]:
        """A node and all that was on it is gone; returns the instances."""
        view = self._view
        node.state = NodeState.DOWN
        view.free_nodes.pop(node.id, None)
        # Those that drain are attached no longer, but they are on the node all the same.
        gone = [instance for instance in view.instances.values() if instance.node is node]
        for instance in gone:
            instance.state = InstanceState.GONE
            instance.residency = Residency.NOWHERE
            instance.is_preparing = False
            del view.instances[instance.id]
        node.instances.clear()
        node.running = 0
        node.cpu_milli_used = 0
        node.gpu_sevenths_used = 0
        node.memory_used_bytes = 0
        node.host_bytes_used = 0
        return gone

    # --- instances -----------------------------------------------------------------------------

    def start_instance(self, variant: Variant, pool: Pool, node: Node | None) -> Instance:
        """Order a variant to be started; on a known node it takes a slot and memory at once."""
        view = self._view
        instance = Instance(self._next_id, variant, pool, node, view.now_ns)
        self._next_id += self._ids_step
        view.instances[instance.id] = instance
        if node is not None:
            self.make_room(node, variant)
            self._attach(instance, node)
            self._begin_preparing(instance, node)
        self._ledger.actions.append(
            StartInstance(instance.id, variant.id, pool.id, None if node is None else node.id)
        )
        return instance

    def instance_started(self, instance: Instance, node: Node) -> None:
        """A start has ended well."""
        if instance.node is None:  # the pool has picked the node
            self._attach(instance, node)
        self.end_preparing(instance)
        instance.residency = Residency.DEVICE
        instance.state = InstanceState.BUSY if instance.running else InstanceState.IDLE

    def adopt_instance(self, instance_id: int, variant: Variant, node: Node) -> Instance:
        """Take note of an instance that a peer started."""
        instance = Instance(instance_id, variant, node.pool, node, self._view.now_ns)
        instance.state = InstanceState.IDLE
        instance.residency = Residency.DEVICE
        self._view.instances[instance_id] = instance
        self._attach(instance, node)
        return instance

    def _attach(self, instance: Instance, node: Node) -> None:
        instance.node = node
        node.instances[instance.variant.id] = instance
        node.memory_used_bytes += instance.variant.profile.memory_bytes

    def stop_instance(self, instance: Instance) -> None:
        """Order an instance to stop.

        What it held is free for the next order on that node: a Backend carries its orders out in
        the order they were given.
        """
        node = instance.node
        instance.state = InstanceState.DRAINING
        if node is not None:
            self._detach(instance, node)
            self.end_preparing(instance)
        node_id = None if node is None else node.id
        self._ledger.actions.append(StopInstance(instance.id, node_id))

    def instance_gone(self, instance: Instance) -> None:
        """An instance is not there any more, whatever the reason."""
        node = instance.node
        was_attached = instance.state != InstanceState.DRAINING
        instance.state = InstanceState.GONE
        del self._view.instances[instance.id]
        if node is None:
            instance.residency = Residency.NOWHERE
            return
        if was_attached:
            self._detach(instance, node)
        self.end_preparing(instance)
        if instance.running:
            self._free_slots(instance, node)

    def _free_slots(self, instance: Instance, node: Node) -> None:
        """Its batches end in events of their own, but they hold nothing on the node any more."""
        if node.limits_compute:
            shape = instance.variant.shape
            node.cpu_milli_used -= shape.cpu_milli * instance.running
            node.gpu_sevenths_used -= shape.gpu_sevenths * instance.running
        node.running -= instance.running
        instance.running = 0
        self.offer_node(node)

    def _detach(self, instance: Instance, node: Node) -> None:
        if node.instances.get(instance.variant.id) is instance:
            del node.instances[instance.variant.id]
        size = instance.variant.profile.memory_bytes
        if instance.residency == Residency.HOST:
            node.host_bytes_used -= size
        else:
            node.memory_used_bytes -= size
        instance.residency = Residency.NOWHERE

    def _begin_preparing(self, instance: Instance, node: Node) -> None:
        """Starting and loading are work: they take a slot while they last."""
        instance.is_preparing = True
        node.running += 1
        if node.running >= node.slots:
            self._view.free_nodes.pop(node.id, None)

    def end_preparing(self, instance: Instance) -> None:
        """The start or the load has ended, or nobody waits for it any more."""
        node = instance.node
        if instance.is_preparing and node is not None:
            instance.is_preparing = False
            node.running -= 1
            self.offer_node(node)

    # --- weights -------------------------------------------------------------------------------

    def make_room(self, node: Node, variant: Variant) -> None:
        """Evict idle instances, least recently used first, until the variant fits."""
        need = variant.profile.memory_bytes
        limit = node.pool.memory_bytes
        if node.memory_used_bytes + need <= limit:
            return
        for victim in sorted(node.instances.values(), key=lambda i: (i.last_used_ns, i.id)):
            if victim.residency != Residency.HOST and is_evictable(victim):
                self._put_away(victim, node)
                if node.memory_used_bytes + need <= limit:
                    return

    def _put_away(self, victim: Instance, node: Node) -> None:
        """To host memory if it has room there, else out altogether."""
        size = victim.variant.profile.memory_bytes
        if node.host_bytes_used + size <= node.pool.host_memory_bytes:
            self.evict_weights(victim, node)
        else:
            self.stop_instance(victim)

    def evict_weights(self, instance: Instance, node: Node) -> None:
        """Order the weights from the device into host memory."""
        size = instance.variant.profile.memory_bytes
        node.memory_used_bytes -= size
        node.host_bytes_used += size
        instance.residency = Residency.HOST
        self._ledger.actions.append(EvictWeights(instance.id, node.id))

    def load_weights(self, instance: Instance, node: Node) -> None:
        """Order the weights from host memory onto the device."""
        self.make_room(node, instance.variant)
        self.keep_weights(instance, node)
        self._begin_preparing(instance, node)
        self._ledger.actions.append(LoadWeights(instance.id, node.id))

    def keep_weights(self, instance: Instance, node: Node) -> None:
        """The weights are on the device and not in host memory."""
        size = instance.variant.profile.memory_bytes
        node.host_bytes_used -= size
        node.memory_used_bytes += size
        instance.residency = Residency.DEVICE
