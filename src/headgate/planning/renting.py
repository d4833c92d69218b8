"""Which elastic pools to rent how much of: a `Levels` for every function that runs on one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from headgate.core.clock import HOUR_NS, NEVER_NS, SECOND_NS
from headgate.core.model import App, Function, Pipeline, Pool, Variant
from headgate.core.policy import Target
from headgate.planning.company import best_company
from headgate.planning.levels import Levels
from headgate.planning.outlet import Outlet

# Where nothing else can take what a node cannot: what a miss is worth, in rent per request.
_MISS: Final = 20.0


@final
class Renting:
    """Follows demand and says how many nodes to rent."""

    def __init__(self, app: App, outlets: Sequence[Outlet | None], memory_ns: int) -> None:
        self._outlets = outlets
        self._levels: list[list[tuple[Variant, Pool, Levels]]] = [
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
    outlets: Sequence[Outlet | None],
    memory_ns: int,
) -> Levels:
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
    return Levels(
        pool.nodes,
        standing=min(function.warm, pool.nodes),
        own=int(_own_per_ns(app, function, within_ns) * pace_ns),
        allowed_ns=within_ns,
        pace_ns=pace_ns,
        call_usd=miss_usd if outlet is None else outlet.call_usd,
        rent_usd_per_s=rent_usd_per_s,
        boot_ns=pool.boot_ns + variant.profile.start_ns,
        memory_ns=memory_ns,
    )


def _pace_ns(pool: Pool, variant: Variant, within_ns: int) -> float:
    """Time per request on a node that is kept busy."""
    lanes = best_company(variant.profile, min(pool.slots, variant.concurrency), within_ns)
    return variant.profile.time_ns(1, lanes) / lanes


def _own_per_ns(app: App, function: Function, within_ns: int) -> float:
    """How much of a function nodes do that are ours anyway; those who share them get a part."""
    per_ns = 0.0
    for pool in app.pools:
        variants = app.variants_on(pool.id)
        variant = variants[function.id]
        if variant is not None and pool.serverless is None and not pool.is_elastic:
            sharers = sum(1 for other in variants if other is not None)
            per_ns += pool.nodes / sharers / _pace_ns(pool, variant, within_ns)
    return per_ns
