"""What an application has now: how its own pools would do under the load."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headgate.core.clock import NEVER_NS
from headgate.core.model import App, Function, Pool, Tier
from headgate.core.offers import InstanceType
from headgate.planning.characterisation import Characterisation
from headgate.planning.mix import Functions, Mix, best_of_type, evaluate
from headgate.planning.plan import INSTANCES_MAX, Plan, choose_functions
from headgate.planning.sizing import function_sizes, site


@dataclass(frozen=True, slots=True)
class Declared:
    """The dedicated pool of an application, and how it would do."""

    pool: Pool
    mix: Mix
    nodes_short: int | None  # more of its nodes that it takes; None: no number will do


def declared(
    app: App, function: Function, measured: Characterisation, plan: Plan
) -> Declared | None:
    """Return how the application does as it is; None if it does not say how large its nodes are."""
    homes = {pool_id for variant in function.variants for pool_id in variant.pool_ids}
    pools = [pool for pool in app.pools if pool.id in homes]
    pool = next((p for p in pools if p.tier == Tier.DEDICATED and p.cpu_milli != NEVER_NS), None)
    if pool is None:
        return None
    terms = plan.terms
    offer = InstanceType(
        name=pool.name,
        cpus=pool.cpu_milli / 1000,
        memory_bytes=pool.memory_bytes,
        usd_per_hour=pool.usd_per_hour,
        network_ns=pool.network_ns,
    )
    place = site(measured, offer, terms.slo_ms, terms.quantile)
    functions = _functions(pools, measured, plan)
    mix = evaluate(terms.load, place, pool.nodes if place.threshold else 0, functions)
    if mix.attainment >= terms.quantile:
        return Declared(pool, mix, 0)
    if not place.threshold:
        return Declared(pool, mix, None)
    enough = best_of_type(terms.load, place, functions, terms.quantile, 100 * INSTANCES_MAX)
    is_enough = enough.attainment >= terms.quantile
    return Declared(pool, mix, enough.instances - pool.nodes if is_enough else None)


def _functions(pools: list[Pool], measured: Characterisation, plan: Plan) -> Functions | None:
    """The functions of the application, at the size that it has declared."""
    pool = next((pool for pool in pools if pool.serverless is not None), None)
    if pool is None or pool.serverless is None or plan.platform is None:
        return None
    size = pool.serverless.memory_bytes
    platform = replace(
        plan.platform, terms=pool.serverless, sizes_bytes=(size,), network_ns=pool.network_ns
    )
    (row,) = function_sizes(measured, platform, plan.terms.slo_ms, plan.terms.quantile)
    return choose_functions(measured, platform, row, plan.terms) if row.fits else None
