"""A plan in sentences: what is to be done, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import floor, isfinite

from headgate.config.prices import PriceList, Provenance
from headgate.core.catalog import InstanceType
from headgate.core.clock import NEVER_NS
from headgate.core.model import App, Function, Pool, Tier
from headgate.planning.capacity.mix import FaasChoice, Mix, best_of_type, break_even_rate, evaluate
from headgate.planning.capacity.plan import (
    INSTANCES_MAX,
    CapacityPlan,
    Infeasible,
    choose_functions,
)
from headgate.planning.capacity.sizing import InstanceCapacity, SizeRow, function_sizes, site
from headgate.planning.latency_model import Characterisation

# What an application has now: how its own pools would do under the load.


@dataclass(frozen=True, slots=True)
class CurrentSetup:
    """The dedicated pool of an application, and how it would do."""

    pool: Pool
    mix: Mix
    nodes_short: int | None  # more of its nodes that it takes; None: no number will do


def declared(
    app: App, function: Function, measured: Characterisation, plan: CapacityPlan
) -> CurrentSetup | None:
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
        return CurrentSetup(pool, mix, 0)
    if not place.threshold:
        return CurrentSetup(pool, mix, None)
    enough = best_of_type(terms.load, place, functions, terms.quantile, 100 * INSTANCES_MAX)
    is_enough = enough.attainment >= terms.quantile
    return CurrentSetup(pool, mix, enough.instances - pool.nodes if is_enough else None)


def _functions(
    pools: list[Pool], measured: Characterisation, plan: CapacityPlan
) -> FaasChoice | None:
    """The functions of the application, at the size that it has declared."""
    pool = next((pool for pool in pools if pool.faas is not None), None)
    if pool is None or pool.faas is None or plan.platform is None:
        return None
    size = pool.faas.memory_bytes
    platform = replace(
        plan.platform, terms=pool.faas, sizes_bytes=(size,), network_ns=pool.network_ns
    )
    (row,) = function_sizes(measured, platform, plan.terms.slo_ms, plan.terms.quantile)
    return choose_functions(measured, platform, row, plan.terms) if row.fits else None


def sentences(
    plan: CapacityPlan, measured: Characterisation, now: CurrentSetup | None, prices: PriceList
) -> list[str]:
    """Return the plan in a few sentences, the answer first."""
    return [
        *_answer(plan),
        *_load(plan),
        *_threshold(plan, measured),
        *_size(plan),
        *_even(plan),
        *_cold(plan),
        *_now(now),
        *_grounds(plan, measured, prices),
    ]


def infeasible_words(found: Infeasible, slo_ms: float, quantile: float) -> str:
    """Say why no number of anything will do."""
    if found.needs_bytes is not None:
        return f"not feasible at any scale: it needs {found.needs_bytes / 2**20:,.0f} MiB of memory"
    aim = f"{ms(slo_ms)} at {percent(quantile)}"
    fastest = f"a lone request takes {ms(found.fastest_ms)} where it is fastest, on {found.where}"
    return f"not feasible at any scale: the objective is {aim}, and {fastest}"


def ms(value: float) -> str:
    """Write a time.

    >>> ms(26.64), ms(144.0), ms(2500.0)
    ('26.6 ms', '144 ms', '2.5 s')
    """
    if value >= 1_000.0:
        return f"{value / 1e3:.3g} s"
    return f"{value:.3g} ms"


def percent(share: float) -> str:
    """Write a share, never rounded up to all.

    >>> percent(0.99), percent(0.99996), percent(1.0), percent(0.00001), percent(0)
    ('99 %', '99.99 %', '100 %', 'under 0.01 %', '0 %')
    """
    if 0.0 < share < 0.0001:
        return "under 0.01 %"
    return f"{floor(1e4 * share + 1e-9) / 100:g} %"


def about(share: float) -> str:
    """Write a share that need not be exact.

    >>> about(0.4186)
    '42 %'
    """
    return f"{100 * share:.0f} %"


def rate(per_s: float) -> str:
    """Write a rate.

    >>> rate(7.5612), rate(2991.3)
    ('7.56', '2,991')
    """
    return f"{per_s:,.0f}" if per_s >= 100.0 else f"{per_s:.3g}"


def usd(value: float) -> str:
    """Write an amount.

    >>> usd(0.085), usd(12.5), usd(0.00251)
    ('$0.085', '$12.50', '$0.00251')
    """
    return f"${value:,.2f}" if value >= 1.0 else f"${value:.3g}"


def _answer(plan: CapacityPlan) -> Iterator[str]:
    mix, terms = plan.mix, plan.terms
    aim = f"{percent(mix.attainment)} within {ms(terms.slo_ms)}"
    cost = f"{usd(mix.usd_per_1k)} per 1,000 requests ({usd(mix.usd_per_hour)}/h)"
    if plan.is_enough:
        yield f"Take {_mix(mix)}: expect {aim}, at {cost}."
    else:
        asked = f"where {percent(terms.quantile)} are asked for"
        yield f"Needs more capacity: {_mix(mix)} would bring only {aim} {asked}, at {cost}."
        yield _shortage(plan)
    others = []
    if plan.alone is not None and mix.instances:
        others.append(f"functions alone {_rival(plan.alone)}")
    if plan.without is not None and mix.functions is not None:
        name = plan.without.site.offer.name if plan.without.site is not None else ""
        others.append(f"{plan.without.instances} x {name} without functions {_rival(plan.without)}")
    if others:
        yield f"Per 1,000 requests, {'; '.join(others)}."


def _shortage(plan: CapacityPlan) -> str:
    mix = plan.mix
    if plan.instances_short and mix.site is not None:
        name, most = mix.site.offer.name, plan.terms.instances_max
        return f"It takes {plan.instances_short:,} more {name} than the {most:,} that may be had."
    if mix.functions is not None and mix.functions_peak >= mix.functions.terms.concurrency_max:
        most = mix.functions.terms.concurrency_max
        return f"The platform runs no more than {most:,} functions at once."
    return "Cold starts are what is in the way: keep functions warm, or take an instance."


def _mix(mix: Mix) -> str:
    memory = mix.functions.row.memory_bytes >> 20 if mix.functions is not None else 0
    if mix.site is None:
        return f"functions of {memory} MiB for everything"
    text = f"{mix.instances} x {mix.site.offer.name}"
    if mix.functions is None:
        return f"{text} and no functions"
    if mix.spilled == 0.0:
        return f"{text} with functions of {memory} MiB in reserve"
    return f"{text} with functions of {memory} MiB for the {percent(mix.spilled)} that go beyond"


def _rival(mix: Mix) -> str:
    return f"would cost {usd(mix.usd_per_1k)} and meet {percent(mix.attainment)}"


def _load(plan: CapacityPlan) -> Iterator[str]:
    load = plan.terms.load
    length = f"over {load.duration_s:,.0f} s"
    if load.peak_clients:
        least = min(level.clients for level in load.levels)
        yield f"The load is {least:g} to {load.peak_clients:g} clients at once {length}."
    else:
        mean, peak = rate(load.rate_per_s), rate(load.peak_per_s)
        yield f"The load is {mean} requests/s on average, {peak}/s at its height, {length}."


def _threshold(plan: CapacityPlan, measured: Characterisation) -> Iterator[str]:
    place = plan.mix.site
    if place is None:
        return
    name, cores, most = place.offer.name, place.offer.cpus, place.threshold
    overhead_ms = 2 * place.offer.network_ns / 1e6

    def time(company: int) -> str:
        return ms(measured.time_ms(cores, company, 1, plan.terms.quantile) + overhead_ms)

    reach = f"{most} at once take {time(most)}"
    if place.is_at_least:
        beyond = "and more were not measured"
    else:
        beyond = f"{most + 1} would take {time(most + 1)}"
    yield (
        f"One {name} holds {most} requests at once: at {percent(plan.terms.quantile)}, {reach}, "
        f"{beyond}."
    )


def _size(plan: CapacityPlan) -> Iterator[str]:
    if plan.knee is None or plan.cheapest is None or plan.functions is None:
        return
    knee, largest = plan.knee, plan.sizes[-1]
    if knee is largest:
        yield f"A function runs in {ms(knee.run_ms)} on {_mib(knee)}, and faster with every size."
    else:
        less = _less(knee.usd_per_s, largest.usd_per_s)
        yield (
            f"More than {_mib(knee)} no longer pay for a function: it runs in {ms(knee.run_ms)} "
            f"there and in {ms(largest.run_ms)} on {_mib(largest)}, and is {less} cheaper "
            "per second."
        )
    if plan.cheapest is not plan.functions.row:
        row, chosen = plan.cheapest, plan.functions.row
        saved = _less(row.usd_per_call, chosen.usd_per_call)
        yield (
            f"{_mib(row)} is the cheapest size within the objective: {saved} less per call, "
            f"but {ms(row.time_ms)} instead of {ms(chosen.time_ms)} (--size cheapest)."
        )


def _even(plan: CapacityPlan) -> Iterator[str]:
    place = plan.mix.site or _cheapest_site(plan.sites)
    if plan.functions is None or place is None:
        return
    even = break_even_rate(place.offer.usd_per_hour, plan.functions.row.usd_per_call)
    if not isfinite(even):
        return
    share = about(even / place.rate_per_s)
    verdict = f"it holds {rate(place.rate_per_s)}/s, so it pays if it is {share} used"
    if even > place.rate_per_s:
        verdict = f"it holds only {rate(place.rate_per_s)}/s, so functions are cheaper at any rate"
    name = place.offer.name
    yield f"One {name} costs as much as functions at {rate(even)} requests/s; {verdict}."


def _cold(plan: CapacityPlan) -> Iterator[str]:
    functions, mix = plan.functions, plan.mix
    if functions is None:
        return
    if functions.start_ms == 0.0:
        yield "Cold starts were not measured and count as nothing."
        return
    start = ms(functions.start_ms)
    if functions.is_cold_within:
        yield f"A cold start adds {start}, which is within the objective."
        return
    if mix.cold == 0.0:
        yield f"A cold start adds {start}, and no request is expected to meet one."
        return
    text = f"A cold start adds {start} and makes {percent(mix.cold)} of all requests late"
    if mix.functions_peak:
        count, terms = mix.functions_peak, functions.terms
        pings = count * terms.usd(terms.ping_ns) * 3.6e12 / max(1, terms.ping_every_ns)
        held = count * terms.gigabytes * terms.provisioned_usd_per_gb_s * 3600
        text += f"; to keep {count} warm would cost {usd(pings)}/h by pings"
        text += f", {usd(held)}/h provisioned" if held else ""
    yield f"{text}."


def _now(now: CurrentSetup | None) -> Iterator[str]:
    if now is None:
        return
    pool, mix = now.pool, now.mix
    what = f"{pool.nodes} x {pool.name}" + (" with its functions" if mix.functions else "")
    text = f"As declared, {what} would meet {percent(mix.attainment)}"
    if now.nodes_short == 0:
        yield f"{text}: that is enough, at {usd(mix.usd_per_1k)} per 1,000 requests."
    elif now.nodes_short is None:
        yield f"{text}, and no number of such nodes would do."
    else:
        yield f"{text}: it needs more capacity, {now.nodes_short} more such nodes."


def _grounds(plan: CapacityPlan, measured: Characterisation, prices: PriceList) -> Iterator[str]:
    is_told = any(place.is_told for place in plan.sites) or any(row.is_told for row in plan.sizes)
    if is_told:
        low, high = measured.cores[0], measured.cores[-1]
        span = f"{low:g} to {high:g}" if low < high else f"{low:g}"
        cores = "core" if span == "1" else "cores"
        yield f"* Measured on {span} {cores}; beyond that the fitted surface tells."
    yield f"Prices: {'; '.join(prices.titles)}.{_doubts(prices.provenance)}"


def _doubts(provenance: Sequence[Provenance]) -> str:
    low = [f"{' and '.join(f.keys)} of {f.title}" for f in provenance if f.confidence == "low"]
    assumed = sorted({key for f in provenance if f.confidence == "assumed" for key in f.keys})
    text = f" Not sure: {'; '.join(low)}." if low else ""
    return text + (f" Assumed: {', '.join(assumed)}." if assumed else "")


def _cheapest_site(sites: Sequence[InstanceCapacity]) -> InstanceCapacity | None:
    usable = [place for place in sites if place.threshold]
    return min(usable, key=lambda s: s.offer.usd_per_hour / s.rate_per_s, default=None)


def _mib(row: SizeRow) -> str:
    return f"{row.memory_bytes >> 20} MiB"


def _less(price: float, other: float) -> str:
    return about(1.0 - price / other if other else 0.0)
