"""How many instances: as many as a rate needs, as many as pay, and which of them to give up."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from headgate.core.lifecycle import InstanceState
from headgate.core.records import Instance
from headgate.core.view import View


def nodes_for(rate_per_s: float, node_rate_per_s: float) -> int:
    """How many nodes answer that many requests; 0 where none can.

    >>> nodes_for(21.0, 10.0), nodes_for(0.0, 10.0), nodes_for(5.0, 0.0)
    (3, 0, 0)
    """
    if node_rate_per_s <= 0:
        return 0
    return ceil(rate_per_s / node_rate_per_s - 1e-9)


def nodes_that_pay(
    buckets: Sequence[float], node_takes: float, node_usd: float, spill_usd: float, most: int
) -> int:
    """How many nodes cost less than the calls that they save: the balance of the newsvendor.

    `buckets` are amounts of demand in equal times, of which one node takes `node_takes` at
    `node_usd`; what is left is spilled at `spill_usd` each. One more node is added while what it
    alone takes would cost more as calls. Steady demand keeps a node busy, so it pays up to the
    mean; volatile demand leaves it idle for most of the time, so fewer pay.

    >>> nodes_that_pay([10.0] * 4, node_takes=4.0, node_usd=1.0, spill_usd=0.4, most=9)
    2
    >>> nodes_that_pay([0.0, 0.0, 0.0, 40.0], 4.0, 1.0, 0.4, most=9)
    0
    """
    if node_takes <= 0 or not buckets:
        return 0
    nodes = 0
    while nodes < most:
        below = nodes * node_takes
        saved = sum(min(max(amount - below, 0.0), node_takes) for amount in buckets) / len(buckets)
        # Nothing saved is worth nothing, even where a call has no price because there is no call.
        if saved <= 0.0 or node_usd >= saved * spill_usd:
            break
        nodes += 1
    return nodes


def surplus(view: View, key: tuple[int, int], count: int) -> list[Instance]:
    """The instances of a (variant, pool) beyond `count`, those to be given up.

    First what is not there yet, then what has least to do, then the youngest. O(instances).
    """
    there = present(view, key)
    if len(there) <= count:
        return []
    there.sort(key=_order_of_leaving)
    return there[: len(there) - count]


def is_nowhere(view: View, function_id: int) -> bool:
    """Whether no node holds a function or is starting it. O(instances)."""
    return not any(
        instance.variant.function_id == function_id and instance.state != InstanceState.DRAINING
        for instance in view.instances.values()
    )


def present(view: View, key: tuple[int, int]) -> list[Instance]:
    """The instances of a (variant, pool) that are there or starting, and not leaving."""
    return [
        instance
        for instance in view.instances.values()
        if (instance.variant.id, instance.pool.id) == key
        and instance.state != InstanceState.DRAINING
    ]


def _order_of_leaving(instance: Instance) -> tuple[bool, int, int]:
    return (instance.state != InstanceState.STARTING, instance.running, -instance.id)
