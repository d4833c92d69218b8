"""From a plan to starts and stops: the slow time scale, the same for every policy."""

from __future__ import annotations

from headgate.core.lifecycle import InstanceState
from headgate.core.orders import Orders
from headgate.core.policy import Plan, Target
from headgate.core.records import Instance
from headgate.core.view import View


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
