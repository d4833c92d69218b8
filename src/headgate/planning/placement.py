"""Placement: which function to start on an idle node in advance, and proportional shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from headgate.core.model import Variant
from headgate.core.records import Node
from headgate.core.view import View
from headgate.planning.forecast import OfferedLoad

# A function with less load than this, in Erlangs, needs no additional node.
_ERLANGS_MIN: Final = 0.05


def has_room(view: View, node: Node, variant: Variant) -> bool:
    """Whether a node could start a variant without evicting anything."""
    free_bytes = node.pool.memory_bytes - node.memory_used_bytes
    return (
        variant.id not in node.instances
        and variant.profile.memory_bytes <= free_bytes
        and not view.is_barred(node, variant)
    )


def next_prestart(view: View, loads: Sequence[OfferedLoad]) -> tuple[Variant, Node] | None:
    """The most useful start on an idle node with room; None if no start is useful.

    The function with most load per node that holds it is started. One idle node is kept free for
    requests that arrive during the start. O(functions x nodes).
    """
    idle = [
        node
        for node in view.free_nodes.values()
        if node.running == 0 and not node.pool.is_elastic  # rented nodes are left to the plan
    ]
    best: tuple[Variant, Node] | None = None
    best_load = 0.0
    for function in view.app.functions if len(idle) > 1 else ():
        load = loads[function.id].erlangs(view.now_ns)
        if load < _ERLANGS_MIN:
            continue
        nodes = view.resident_count(function.id)
        if nodes and load / nodes <= best_load:
            continue
        for node in idle:
            variant = node.variants[function.id]
            if variant is not None and has_room(view, node, variant):
                best, best_load = (variant, node), load / max(1, nodes)
                break
    return best


def apportion(total: int, weights: list[float]) -> list[int]:
    """Divide `total` into integers proportional to `weights`, by the largest-remainder method.

    Each entry gets at least one as far as `total` allows. Equal weights, or all zeros, give equal
    shares; ties go to the earlier entry.

    >>> apportion(4, [1.0, 1.0])
    [2, 2]
    >>> apportion(4, [9.0, 1.0])
    [3, 1]
    >>> apportion(2, [1.0, 1.0, 5.0])
    [1, 0, 1]
    """
    count = len(weights)
    if total <= count:
        chosen = sorted(range(count), key=lambda i: (-weights[i], i))[:total]
        return [1 if i in chosen else 0 for i in range(count)]
    whole = sum(weights)
    shares = [total * w / whole if whole > 0 else total / count for w in weights]
    parts = [max(1, int(share)) for share in shares]
    while sum(parts) > total:  # the minimum of one each exceeded the total
        richest = max(range(count), key=lambda i: (parts[i] - shares[i] if parts[i] > 1 else -1, i))
        parts[richest] -= 1
    while sum(parts) < total:
        neediest = max(range(count), key=lambda i: (shares[i] - parts[i], -i))
        parts[neediest] += 1
    return parts
