"""Spreading functions over nodes before they are needed there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from headgate.core.model import Variant
from headgate.core.records import Node
from headgate.core.view import View
from headgate.planning.demand import OfferedLoad

# Below so much load, in Erlangs, a function does not need to be in more places than it is.
_ERLANGS_MIN: Final = 0.05


def has_room(view: View, node: Node, variant: Variant) -> bool:
    """Whether a node could start a variant beside what it holds."""
    free_bytes = node.pool.memory_bytes - node.memory_used_bytes
    return (
        variant.id not in node.instances
        and variant.profile.memory_bytes <= free_bytes
        and not view.is_barred(node, variant)
    )


def next_start(view: View, loads: Sequence[OfferedLoad]) -> tuple[Variant, Node] | None:
    """The start that helps most, on a node with nothing to do and room; None if none does.

    That is of the function with most load per node that holds it. One idle node is left alone, for
    whoever comes while the other is starting. O(functions x nodes).
    """
    idle = [
        node
        for node in view.free_nodes.values()
        if node.running == 0 and not node.pool.is_elastic  # what is paid for is a plan's business
    ]
    best: tuple[Variant, Node] | None = None
    best_load = 0.0
    for function in view.app.functions if len(idle) > 1 else ():
        load = loads[function.id].erlangs(view.now_ns)
        if load < _ERLANGS_MIN:
            continue
        homes = sum(1 for node in view.nodes.values() if view.is_resident(node, function.id))
        if homes and load / homes <= best_load:
            continue
        for node in idle:
            variant = node.variants[function.id]
            if variant is not None and has_room(view, node, variant):
                best, best_load = (variant, node), load / max(1, homes)
                break
    return best
