"""How many nodes to rent, beside a platform that takes what they cannot, at a price per call.

Demand is cut into levels: the first node would take as much as one node can, the second what is
above that, and so on. For each level there are two ways to serve it, renting a node or paying by
the call, and it costs a boot to go from the second to the first. When to change over is an old
question with an old answer: when what the other way would have saved since it last looked bad
exceeds a certain part of what changing costs. To take a node, that part is small where arrivals are
steady, because then a rise is news; where they come in bursts, it grows with how bursty they are.
To give a node back it is small, too, unless it was missed soon after the last time.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Final, final

from headgate.core.clock import HOUR_NS, MINUTE_NS, NEVER_NS, SECOND_NS
from headgate.core.model import App, Function, Pipeline, Pool, Variant
from headgate.core.policy import Target
from headgate.core.records import Instance
from headgate.core.states import InstanceState
from headgate.core.view import View
from headgate.planning.concurrency import knee_concurrency
from headgate.planning.forecast import Dispersion
from headgate.planning.targets import FaasTarget

_OFF: Final = 0
_BOOTING: Final = 1
_ON: Final = 2

# Regret, in boots, before a node is taken where arrivals are steady, and before it is given back.
_START: Final = 0.15
_STOP: Final = 0.25
_STOP_MAX: Final = 4.0
_LEARNT: Final = 4.0  # by so much more, if it was missed
_MISSED_NS: Final = 15 * MINUTE_NS  # within so long
_WINDOW_NS: Final = 5 * SECOND_NS


@final
class RentalLevel:
    """What one more node would be used for, and whether it is worth having."""

    __slots__ = (
        "_boots_until_ns",
        "_given_back_ns",
        "_regret_usd",
        "_state",
        "_stop",
        "calls",
        "free_ns",
    )

    def __init__(self, *, is_on: bool) -> None:
        self.calls = 0  # of late: what the node would have taken
        self.free_ns = 0.0  # when the node would be free
        self._state = _ON if is_on else _OFF
        self._regret_usd = 0.0  # since the other way last looked bad
        self._boots_until_ns = 0
        self._given_back_ns = -_MISSED_NS
        self._stop = _STOP

    @property
    def is_wanted(self) -> bool:
        """Whether to have the node."""
        return self._state != _OFF

    def weigh(self, saved_usd: float, rent_usd: float, boot_usd: float, burstiness: float) -> bool:
        """A while has passed in which the node would have saved so much: whether to change over."""
        if self._state == _BOOTING:
            return False
        gained_usd = rent_usd - saved_usd if self._state == _ON else saved_usd - rent_usd
        self._regret_usd = max(0.0, self._regret_usd + gained_usd)
        part = self._stop if self._state == _ON else _START * burstiness
        return self._regret_usd > part * boot_usd

    def change(self, now_ns: int, boot_ns: int) -> None:
        """Go the other way; a node that is taken is there after its boot."""
        self._regret_usd = 0.0
        if self._state == _ON:
            self._state = _OFF
            self._given_back_ns = now_ns
            return
        self._state = _BOOTING
        self._boots_until_ns = now_ns + boot_ns
        if now_ns - self._given_back_ns < _MISSED_NS:
            self._stop = min(_LEARNT * self._stop, _STOP_MAX)
        else:
            self._stop = max(self._stop / _LEARNT, _STOP)

    def wait(self, now_ns: int) -> None:
        """Time passes."""
        if self._state == _BOOTING and now_ns >= self._boots_until_ns:
            self._state = _ON


@final
class RentalLadder:
    """Says how many nodes are worth their rent. O(levels) per arrival, and per `wanted`.

    A node takes what it can have done within `allowed_ns`, at `pace_ns` per request; what it cannot
    is for the next level. The first `own` levels are those of nodes that are ours anyway, which are
    never weighed or counted. `call_usd` is what a call costs elsewhere.
    """

    def __init__(
        self,
        count: int,
        *,
        standing: int,
        own: int = 0,
        allowed_ns: int,
        pace_ns: float,
        call_usd: float,
        rent_usd_per_s: float,
        boot_ns: int,
        memory_ns: int,
    ) -> None:
        self._levels = [RentalLevel(is_on=number < standing) for number in range(count)]
        self._fills = [*(RentalLevel(is_on=True) for _ in range(own)), *self._levels]
        self._allowed_ns = allowed_ns
        self._pace_ns = pace_ns
        self._call_usd = call_usd
        self._rent_usd_per_s = rent_usd_per_s
        self._boot_ns = boot_ns
        self._dispersion = Dispersion(_WINDOW_NS, memory_ns)
        self._seen_ns: int | None = None

    def arrived(self, now_ns: int, items: int) -> None:
        """Something is asked for, whether or not it is let in."""
        if self._seen_ns is None:
            self._seen_ns = now_ns
        self._dispersion.arrived(now_ns, items)
        work_ns = self._pace_ns * items
        for level in self._fills:
            done_ns = max(now_ns, level.free_ns) + work_ns
            if done_ns <= now_ns + self._allowed_ns:
                level.free_ns = done_ns
                level.calls += 1
                return

    def wanted(self, now_ns: int) -> int:
        """How many nodes to have, as of now."""
        if self._seen_ns is not None and now_ns > self._seen_ns:
            self._weigh(now_ns, now_ns - self._seen_ns)
        self._seen_ns = now_ns
        return sum(1 for level in self._levels if level.is_wanted)

    def _weigh(self, now_ns: int, elapsed_ns: int) -> None:
        rent_usd = self._rent_usd_per_s * elapsed_ns / SECOND_NS
        boot_usd = self._rent_usd_per_s * self._boot_ns / SECOND_NS
        burstiness = max(1.0, self._dispersion.value)
        for level in self._levels:
            saved_usd = level.calls * self._call_usd
            level.calls = 0
            level.wait(now_ns)
            if level.weigh(saved_usd, rent_usd, boot_usd, burstiness):
                level.change(now_ns, self._boot_ns)


# Which elastic pools to rent how much of: a `RentalLadder` for every function that runs on one.


# Where nothing else can take what a node cannot: what a miss is worth, in rent per request.
_MISS: Final = 20.0


@final
class NodeAutoscaler:
    """Follows demand and says how many nodes to rent."""

    def __init__(self, app: App, outlets: Sequence[FaasTarget | None], memory_ns: int) -> None:
        self._outlets = outlets
        self._levels: list[list[tuple[Variant, Pool, RentalLadder]]] = [
            [
                (variant, pool, _levels(app, function, variant, pool, outlets, memory_ns))
                for pool in app.pools
                for variant in function.variants
                if pool.is_elastic and pool.id in variant.pool_ids
            ]
            for function in app.functions
        ]

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to rent."""
        return any(self._levels)

    def arrived(self, now_ns: int, pipeline: Pipeline, items: int) -> None:
        """Something is asked for, whether or not it is let in."""
        for stage in pipeline.stages:
            for _, _, levels in self._levels[stage.function.id]:
                levels.arrived(now_ns, items)

    def targets(self, now_ns: int, closed_pools: Sequence[int]) -> tuple[Target, ...]:
        """What to have, as of now; where nothing else is there to take a call, at least one."""
        found: list[Target] = []
        for function_id, entries in enumerate(self._levels):
            outlet = self._outlets[function_id]
            least = 1 if outlet is None or outlet.pool.id in closed_pools else 0
            for variant, pool, levels in entries:
                count = max(least, levels.wanted(now_ns))
                found.append(Target(variant.id, pool.id, count))
        return tuple(found)


def _levels(
    app: App,
    function: Function,
    variant: Variant,
    pool: Pool,
    outlets: Sequence[FaasTarget | None],
    memory_ns: int,
) -> RentalLadder:
    allowed_ns = min(
        (p.slo.latency_ns for p in app.pipelines if any(s.function is function for s in p.stages)),
        default=NEVER_NS,
    )
    within_ns = SECOND_NS if allowed_ns == NEVER_NS else allowed_ns
    pace_ns = _pace_ns(pool, variant, within_ns)
    outlet = outlets[function.id]
    # With nothing to compare it to, a rent is as good as any other; only none at all is not.
    usd_per_hour = 1.0 if outlet is None else pool.usd_per_hour
    rent_usd_per_s = usd_per_hour / (HOUR_NS / SECOND_NS)
    miss_usd = _MISS * rent_usd_per_s * pace_ns / SECOND_NS
    return RentalLadder(
        pool.nodes,
        standing=min(function.prewarm_nodes, pool.nodes),
        own=int(_own_per_ns(app, function, within_ns) * pace_ns),
        allowed_ns=within_ns,
        pace_ns=pace_ns,
        call_usd=miss_usd if outlet is None else outlet.call_usd,
        rent_usd_per_s=rent_usd_per_s,
        boot_ns=pool.boot_ns + variant.profile.cold_start_ns,
        memory_ns=memory_ns,
    )


def _pace_ns(pool: Pool, variant: Variant, within_ns: int) -> float:
    """Time per request on a node that is kept busy."""
    lanes = knee_concurrency(variant.profile, min(pool.slots, variant.concurrency), within_ns)
    return variant.profile.time_ns(1, lanes) / lanes


def _own_per_ns(app: App, function: Function, within_ns: int) -> float:
    """How much of a function nodes do that are ours anyway; those who share them get a part."""
    per_ns = 0.0
    for pool in app.pools:
        variants = app.variants_on(pool.id)
        variant = variants[function.id]
        if variant is not None and pool.faas is None and not pool.is_elastic:
            sharers = sum(1 for other in variants if other is not None)
            per_ns += pool.nodes / sharers / _pace_ns(pool, variant, within_ns)
    return per_ns


# How many instances: as many as a rate needs, as many as pay, and which of them to give up.


def nodes_for(rate_per_s: float, node_rate_per_s: float) -> int:
    """How many nodes answer that many requests; 0 where none can.

    >>> nodes_for(21.0, 10.0), nodes_for(0.0, 10.0), nodes_for(5.0, 0.0)
    (3, 0, 0)
    """
    if node_rate_per_s <= 0:
        return 0
    return ceil(rate_per_s / node_rate_per_s - 1e-9)


def newsvendor_nodes(
    buckets: Sequence[float], node_takes: float, node_usd: float, spill_usd: float, most: int
) -> int:
    """How many nodes cost less than the calls that they save: the balance of the newsvendor.

    `buckets` are amounts of demand in equal times, of which one node takes `node_takes` at
    `node_usd`; what is left is spilled at `spill_usd` each. One more node is added while what it
    alone takes would cost more as calls. Steady demand keeps a node busy, so it pays up to the
    mean; volatile demand leaves it idle for most of the time, so fewer pay.

    >>> newsvendor_nodes([10.0] * 4, node_takes=4.0, node_usd=1.0, spill_usd=0.4, most=9)
    2
    >>> newsvendor_nodes([0.0, 0.0, 0.0, 40.0], 4.0, 1.0, 0.4, most=9)
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


def excess_instances(view: View, key: tuple[int, int], count: int) -> list[Instance]:
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
