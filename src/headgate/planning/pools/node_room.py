"""What a node holds: instances that fit beside each other, and how many of each.

An instance holds memory and, where compute is resident, the compute of its shape as long as it is
loaded. A function that has to evict another one waits until that one is idle. So where one instance
of every function of a pool fits a node in some shapes, the rest of the node is divided so that the
function that could serve the fewest requests gets more of it first: instances, or a larger shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace
from typing import Final

from headgate.core.model import App, Compute, Pool, Shape, Variant
from headgate.core.records import Instance
from headgate.planning.constants import BATCH_SHARE
from headgate.planning.frontier.candidates import visits
from headgate.planning.pools.concurrency import budgets_ns, has_replicas

_ROUNDING: Final = 1e-9


@dataclass(frozen=True)
class Holding:
    """Instances of a variant on every node of a pool, all in one shape."""

    shape_id: int
    replicas: int
    room: float  # of a node's compute, the scarcer of CPUs and GPU
    items_per_s: float  # of a node


def resident_holdings(app: App, pool: Pool, gateways: int = 1) -> dict[int, Holding]:
    """What the nodes of a pool with resident compute should hold, by variant id.

    Empty where compute is not resident, where a node cannot hold all variants at once, and where it
    need not: it has fewer slots, and starts take no time.
    """
    variants = [v for v in app.variants_on(pool.id) if v is not None]
    if pool.compute != Compute.RESIDENT or not has_replicas(pool, gateways):
        return {}
    if len(variants) > pool.slots and not any(v.profile.cold_start_ns for v in variants):
        return {}
    budgets, demands = budgets_ns(app, _fastest_ns(app)), _visits(app)
    options = [_options(pool, v, budgets[v.function_id]) for v in variants]
    if not all(options):
        return {}
    chosen = [min(each, key=lambda o: (o.room, -o.items_per_s)) for each in options]
    if not _fits(pool, variants, chosen):
        return {}
    growing = set(range(len(variants)))
    while growing:
        index = min(
            growing,
            key=lambda i: chosen[i].items_per_s / max(1e-9, demands[variants[i].function_id]),
        )
        better = [o for o in options[index] if o.items_per_s > chosen[index].items_per_s]
        better.sort(key=lambda option: (option.items_per_s, option.room))
        for option in better:
            tried = [*chosen[:index], option, *chosen[index + 1 :]]
            if _fits(pool, variants, tried):
                chosen = tried
                break
        else:
            growing.remove(index)
    return {variant.id: each for variant, each in zip(variants, chosen, strict=True)}


def _fastest_ns(app: App) -> list[int]:
    """By function: the time of one item where it runs fastest."""
    return [
        min(
            variant.exec_ns(1, shape_id) + 2 * app.pools[pool_id].network_ns
            for variant in function.variants
            for pool_id in variant.pool_ids
            for shape_id, times in enumerate(variant.shapes)
            if app.pools[pool_id].has_room_for(times.shape) or shape_id == 0
        )
        for function in app.functions
    ]


def _visits(app: App) -> list[float]:
    """How often each function runs, if every pipeline has as many requests."""
    total = [0.0 for _ in app.functions]
    for pipeline in app.pipelines:
        for stage, count in zip(pipeline.stages, visits(pipeline), strict=True):
            total[stage.function.id] += count
    return total


def _options(pool: Pool, variant: Variant, budget_ns: int) -> list[Holding]:
    """The shapes and numbers of instances that a node could hold of a variant alone.

    Those that leave time to wait or, if none does, those that are in time, or else the fastest.
    """
    fitting = [id for id, times in enumerate(variant.shapes) if pool.has_room_for(times.shape)]
    fastest_ns = min([variant.exec_ns(1, id) for id in fitting], default=0)
    limits_ns = [int(share * budget_ns) - 2 * pool.network_ns for share in (BATCH_SHARE, 1.0)]
    limit_ns = next((limit for limit in limits_ns if limit >= fastest_ns), fastest_ns)
    in_time = [id for id in fitting if variant.exec_ns(1, id) <= limit_ns]
    options: list[Holding] = []
    for id in in_time:
        times_ns, shape = variant.shapes[id].exec_ns, variant.shapes[id].shape
        held_ns = min(
            (time_ns + 2 * pool.network_ns) / items
            for items, time_ns in enumerate(times_ns, 1)
            if items == 1 or time_ns <= limit_ns
        )
        part = compute_part(pool, shape)
        for replicas in range(1, pool.count_of(shape) + 1):
            lanes = min(pool.slots, replicas * variant.concurrency)
            options.append(Holding(id, replicas, replicas * part, lanes / held_ns * 1e9))
    return options


def _fits(pool: Pool, variants: Sequence[Variant], holdings: Sequence[Holding]) -> bool:
    """Whether a node can hold all of these at once."""
    pairs = list(zip(variants, holdings, strict=True))
    memory_bytes = sum(each.replicas * v.profile.memory_bytes for v, each in pairs)
    shapes = [(v.shapes[each.shape_id].shape, each.replicas) for v, each in pairs]
    together = Shape(
        sum(count * shape.cpu_milli for shape, count in shapes),
        sum(count * shape.gpu_sevenths for shape, count in shapes),
    )
    return memory_bytes <= pool.memory_bytes and pool.has_room_for(together)


def is_scarce(pool: Pool, instances: Sequence[tuple[Variant, int]]) -> bool:
    """Whether a node of a pool cannot hold all of these variants, each in its shape, at once."""
    if sum(variant.profile.memory_bytes for variant, _ in instances) > pool.memory_bytes:
        return True
    shapes = [variant.shapes[shape_id].shape for variant, shape_id in instances]
    together = Shape(sum(s.cpu_milli for s in shapes), sum(s.gpu_sevenths for s in shapes))
    return pool.compute == Compute.RESIDENT and not pool.has_room_for(together)


def room_of(pool: Pool, variant: Variant, shape_id: int) -> float:
    """The part of a node that an instance holds: of its memory or, where resident, its compute."""
    part = variant.profile.memory_bytes / max(1, pool.memory_bytes)
    if pool.compute == Compute.RESIDENT:
        part = max(part, compute_part(pool, variant.shapes[shape_id].shape))
    return part


def compute_part(pool: Pool, shape: Shape) -> float:
    """The part of a node's compute that a shape takes: of its CPUs or its GPU, the scarcer."""
    return max(cpu_part(pool, shape), gpu_part(pool, shape))


def cpu_part(pool: Pool, shape: Shape) -> float:
    """The part of a node's CPUs that a shape takes."""
    return shape.cpu_milli / max(1, pool.cpu_milli)


def gpu_part(pool: Pool, shape: Shape) -> float:
    """The part of a node's GPU that a shape takes."""
    return shape.gpu_sevenths / max(1, pool.gpu_sevenths)


def within_room(wanted: Sequence[tuple[float, int]], nodes: int) -> list[int]:
    """How many instances of each function fit on so many nodes, if the first come first.

    `wanted` has of each the part of a node that one instance holds, and the number of instances.
    """
    left = [-1.0] * nodes  # a heap: less what is left of each node
    fitting: list[int] = []
    for room, count in wanted:
        placed = 0
        while left and placed < min(count, nodes) and room <= _ROUNDING - left[0]:
            heapreplace(left, left[0] + room)
            placed += 1
        fitting.append(placed)
    return fitting


def replicas_of(pool: Pool, variant: Variant, lanes: int, room: float, room_left: float) -> int:
    """How many instances of a variant a node should hold: enough for its lanes, if it has room.

    `room` is what one holds, and `room_left` what one of each variant of the pool leaves.
    """
    if room_left < 0.0:
        return 1
    batches = max(
        (pool.count_of(t.shape) for t in variant.shapes if pool.has_room_for(t.shape)), default=1
    )
    wanted = -(-min(lanes, batches) // variant.concurrency)
    return wanted if room <= 0.0 else min(wanted, 1 + int(room_left / room))


def fits_host(instance: Instance) -> bool:
    """Whether the host memory of its node has room for the weights of an instance."""
    node, size = instance.node, instance.variant.profile.memory_bytes
    return node is not None and node.host_bytes_used + size <= node.pool.host_memory_bytes


def time_to_reload_ns(instance: Instance) -> int:
    """Time to load an instance again after it was evicted."""
    profile = instance.variant.profile
    return profile.swap_in_ns if fits_host(instance) else profile.cold_start_ns
