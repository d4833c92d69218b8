"""Plans: instances are started and stopped until they are as a plan wants them."""

from __future__ import annotations

from typing import Final, final

from headgate.core.clock import NEVER_NS
from headgate.core.model import UNLIMITED
from headgate.core.orders import Orders
from headgate.core.policy import Plan, Target
from headgate.core.records import Instance, Node
from headgate.core.states import InstanceState
from headgate.core.view import View, room_bytes

_STOPPED: Final = (InstanceState.DRAINING, InstanceState.GONE)


def reconcile(view: View, orders: Orders, plan: Plan) -> list[Instance]:
    """Start the instances that a plan lacks, stop those that it does not want; return starts.

    This is the slow time scale, and the same for every policy. O(targets + instances of their
    variants + instances on free nodes); for each target that lacks instances it looks at the free
    nodes of its pool that have memory left for any target.
    """
    reconciliation = _Reconciliation(view, orders, plan)
    for target in plan.targets:
        reconciliation.apply(target)
    return reconciliation.started


@final
class _Candidate:
    """A free node, and the memory that it has or can free."""

    __slots__ = ("node", "room_bytes")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.room_bytes = room_bytes(node)


@final
class _Reconciliation:
    """One pass over the targets of a plan: instances and nodes are listed once for all of them."""

    def __init__(self, view: View, orders: Orders, plan: Plan) -> None:
        self._view = view
        self._orders = orders
        variants = view.app.variants
        sizes = [variants[target.variant_id].profile.memory_bytes for target in plan.targets]
        self._size_min_bytes = min(sizes, default=0)  # of an instance of any target
        self._grouped: set[int] = set()  # variant ids
        # By variant, pool and shape id, oldest first.
        self._groups: dict[tuple[int, int, int], list[Instance]] = {}
        self._candidates: dict[int, list[_Candidate]] = {}  # by pool id, in the order of free nodes
        self.started: list[Instance] = []

    def apply(self, target: Target) -> None:
        """Start or stop instances of one target."""
        group = self._group(target)
        # Orders for earlier targets may have stopped some to make room.
        present = [i for i in group if i.state not in _STOPPED]
        missing = target.count - len(present)
        if missing > 0 and target.is_shared:
            self._start_anywhere(target, len(present), group)
        elif missing > 0:
            self._start(target, missing, group)
        elif missing < 0:
            has_order = target.is_shared or target.rented_max < UNLIMITED
            order = _common_stop_order if has_order else _stop_order
            for instance in sorted(present, key=order)[:-missing]:
                if instance.running == 0 or target.drains:
                    self._orders.stop(instance)
                    self._candidates.pop(target.pool_id, None)  # its node has room again

    def _group(self, target: Target) -> list[Instance]:
        variant_id = target.variant_id
        if variant_id not in self._grouped:
            self._grouped.add(variant_id)
            for instance in self._view.instances_of[variant_id].values():
                key = (variant_id, instance.pool.id, instance.shape_id)
                self._groups.setdefault(key, []).append(instance)
        return self._groups.setdefault((variant_id, target.pool_id, target.shape_id), [])

    def _start(self, target: Target, count: int, group: list[Instance]) -> None:
        view, shape_id = self._view, target.shape_id
        variant = view.app.variants[target.variant_id]
        if variant.id in view.load_failures:
            return
        free, need_bytes = view.free_by_pool[target.pool_id], variant.profile.memory_bytes
        before = count
        may_rent = target.rented_max - self._rented(target)
        for held_max in range(target.per_node_max):  # first one to every node, then a second one
            for candidate in self._candidates_of(target.pool_id):
                node = candidate.node
                if count == 0:
                    break
                if need_bytes > candidate.room_bytes or node.id not in free:
                    continue
                if variant.id in node.instances and _count(node, variant.id, shape_id) > held_max:
                    continue
                if not node.instances and may_rent <= 0:
                    continue
                if view.can_make_room(node, variant, shape_id):
                    may_rent -= not node.instances
                    group.append(self._orders.start(variant, node, shape_id))
                    self.started.append(group[-1])
                    candidate.room_bytes = room_bytes(node)
                    count -= 1
        if count < before:
            self._keep_candidates(target.pool_id, self._candidates_of(target.pool_id))

    def _rented(self, target: Target) -> int:
        """Number of nodes of a pool that hold instances, where that matters."""
        if target.rented_max == UNLIMITED:
            return 0
        nodes = self._view.nodes.values()
        return sum(1 for node in nodes if node.pool.id == target.pool_id and node.instances)

    def _start_anywhere(self, target: Target, present: int, group: list[Instance]) -> None:
        """Order the instances that a shared pool lacks, each by its number."""
        view = self._view
        variant = view.app.variants[target.variant_id]
        pool = view.app.pools[target.pool_id]
        if variant.id not in view.load_failures:
            for nth in range(present + 1, target.count + 1):
                group.append(self._orders.start_anywhere(variant, pool, target.shape_id, nth))
                self.started.append(group[-1])

    def _candidates_of(self, pool_id: int) -> list[_Candidate]:
        if pool_id not in self._candidates:
            nodes = list(self._view.free_by_pool[pool_id].values())
            if self._view.app.pools[pool_id].is_elastic:
                nodes.sort(key=lambda node: (not node.instances, node.id))  # rented ones first
            self._keep_candidates(pool_id, [_Candidate(node) for node in nodes])
        return self._candidates[pool_id]

    def _keep_candidates(self, pool_id: int, candidates: list[_Candidate]) -> None:
        """Keep those that have memory for the smallest target. Starts only ever take memory."""
        least = self._size_min_bytes
        self._candidates[pool_id] = [c for c in candidates if c.room_bytes >= least]


def _count(node: Node, variant_id: int, shape_id: int) -> int:
    return sum(1 for i in node.by_variant.get(variant_id, ()) if i.shape_id == shape_id)


def _common_stop_order(instance: Instance) -> tuple[int, int, int]:
    """The same for all Schedulers and variants: those without a node first, then node by node.

    So Schedulers stop the same instances, and nodes that are rented become empty.
    """
    node_id = NEVER_NS if instance.node is None else instance.node.id
    return (-node_id, 0, instance.id)


def _stop_order(instance: Instance) -> tuple[int, int, int]:
    """Starting instances stop first, warm idle ones next; among equals the least recently used."""
    if instance.running:
        order = 2
    else:
        order = 0 if instance.state == InstanceState.STARTING else 1
    return (order, instance.last_used_ns, instance.id)
