"""A capacity plan in sentences (what to rent, and why), and as an application file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from decimal import Decimal
from math import isfinite
from typing import Final, cast

from headgate.cli.options import WorkloadOptions
from headgate.config import AppConfig
from headgate.config.prices import PriceList, Provenance
from headgate.core.model import (
    UNLIMITED,
    App,
    Function,
    InstanceType,
    Pipeline,
    Pool,
    Profile,
    Tier,
)
from headgate.core.units import format_duration, format_size
from headgate.metrics.format import about, format_value, ms, per_second, percent, significant, usd
from headgate.planning.capacity.latency_model import (
    POINTS_MIN,
    Characterisation,
    Point,
    profile_of,
)
from headgate.planning.capacity.mix import FaasChoice, Mix, best_of_type, break_even_rate, evaluate
from headgate.planning.capacity.plan import INSTANCES_MAX, CapacityPlan, Infeasible, faas_choice
from headgate.planning.capacity.sizing import (
    InstanceCapacity,
    SizeRow,
    faas_sizes,
    instance_capacity,
)

_ROWS_NAMED: Final = 5  # of a profile: more would hide the plan


@dataclass(frozen=True, slots=True)
class CurrentSetup:
    """The dedicated pool of an application as declared, and how it would perform."""

    pool: Pool
    mix: Mix
    nodes_short: int | None  # nodes that are missing; None: no number of nodes suffices


def current_setup(
    app: App, function: Function, measured: Characterisation, plan: CapacityPlan
) -> CurrentSetup | None:
    """Return how the application performs as declared; None if it does not give `cpus` of nodes."""
    pool_ids = {pool_id for variant in function.variants for pool_id in variant.pool_ids}
    pools = [pool for pool in app.pools if pool.id in pool_ids]
    pool = next((p for p in pools if p.tier == Tier.DEDICATED and p.cpu_milli != UNLIMITED), None)
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
    capacity = instance_capacity(measured, offer, terms.slo_ms, terms.quantile)
    functions = _faas_choice(pools, measured, plan)
    mix = evaluate(terms.load, capacity, pool.nodes if capacity.threshold else 0, functions)
    if mix.attainment >= terms.quantile:
        return CurrentSetup(pool, mix, 0)
    if not capacity.threshold:
        return CurrentSetup(pool, mix, None)
    enough = best_of_type(terms.load, capacity, functions, terms.quantile, 100 * INSTANCES_MAX)
    is_enough = enough.attainment >= terms.quantile
    return CurrentSetup(pool, mix, enough.instances - pool.nodes if is_enough else None)


def _faas_choice(
    pools: list[Pool], measured: Characterisation, plan: CapacityPlan
) -> FaasChoice | None:
    """Return the application's FaaS choice, at the size that its pool declares."""
    pool = next((pool for pool in pools if pool.faas is not None), None)
    if pool is None or pool.faas is None or plan.platform is None:
        return None
    size = pool.faas.memory_bytes
    platform = replace(
        plan.platform, terms=pool.faas, sizes_bytes=(size,), network_ns=pool.network_ns
    )
    (row,) = faas_sizes(measured, platform, plan.terms.slo_ms, plan.terms.quantile)
    return faas_choice(measured, platform, row, plan.terms) if row.has_enough_memory else None


def sentences(
    plan: CapacityPlan, measured: Characterisation, now: CurrentSetup | None, prices: PriceList
) -> list[str]:
    """Return the plan in a few sentences, the recommendation first."""
    return [
        *_recommendation(plan),
        _formulas(plan.mix),
        *_load(plan),
        *_threshold(plan, measured),
        *_size(plan),
        *_break_even(plan),
        *_cold_starts(plan),
        *_current(now),
        *_sources(plan, measured, prices),
    ]


def left_out(measured: Characterisation, noisy: Sequence[Point]) -> list[str]:
    """Say which rows of a profile are noise and were not planned with; nothing if none are."""
    if not noisy:
        return []
    rows = [
        f"{p.cores:g} {'core' if p.cores == 1 else 'cores'}, {p.concurrency} at once, "
        f"batch {p.batch} (p50 {ms(p.p50_ms)}, {ms(p.p50_low_ms or 0)} to {ms(p.p50_high_ms or 0)})"
        for p in noisy[:_ROWS_NAMED]
    ]
    if len(noisy) > len(rows):
        rows.append(f"and {len(noisy) - len(rows)} more")
    kept = len(measured.points)
    text = f"Left out {len(noisy)} of {kept + len(noisy)} rows of the profile, whose intervals are "
    text += f"wider than their medians: {'; '.join(rows)}."
    if kept < POINTS_MIN:
        text += f" That leaves {kept}, too few to fit a surface: measure again on a quiet machine."
    return [text]


def infeasible_text(infeasible: Infeasible, slo_ms: float, quantile: float) -> str:
    """Say why no number of instances or functions meets the objective."""
    if infeasible.needs_bytes is not None:
        needs = format_value("bytes", infeasible.needs_bytes)
        return f"not feasible at any scale: the function needs {needs} of memory"
    aim = f"{ms(slo_ms)} at {percent(quantile)}"
    fastest = (
        f"an isolated request takes at least {ms(infeasible.fastest_ms)}, on {infeasible.where}"
    )
    return f"not feasible at any scale: the objective is {aim}, and {fastest}"


def _recommendation(plan: CapacityPlan) -> Iterator[str]:
    mix, terms = plan.mix, plan.terms
    aim = f"{percent(mix.attainment)} within {ms(terms.slo_ms)}"
    cost = f"{usd(mix.usd_per_1k)} per 1,000 requests ({usd(mix.usd_per_hour)}/h)"
    if plan.is_enough:
        yield f"Take {_mix(mix)}: expect {aim}, at {cost}."
    else:
        target = f"where the objective is {percent(terms.quantile)}"
        yield f"Needs more capacity: {_mix(mix)} would reach only {aim} {target}, at {cost}."
        yield _shortage(plan)
    alternatives = []
    if plan.faas_only is not None and mix.instances:
        alternatives.append(f"functions alone {_alternative(plan.faas_only)}")
    if plan.instances_only is not None and mix.faas is not None:
        only, capacity = plan.instances_only, plan.instances_only.capacity
        name = "" if capacity is None else capacity.instance_type.name
        alternatives.append(f"{only.instances} x {name} without functions {_alternative(only)}")
    if alternatives:
        yield f"Per 1,000 requests, {'; '.join(alternatives)}."


def _formulas(mix: Mix) -> str:
    """Say what the prediction assumes and a simulation of the same plan does not.

    The assumptions are those of `planning.capacity.mix`. By the formulas, requests are late mostly
    because times spread and because starts are cold in a ramp-up. A simulation has less of both:
    the plan has medians for execution times, and warm functions go on while others start.
    """
    if mix.faas is None:
        assumed, other = "a request that finds all instances full is late", "lets requests wait"
    else:
        assumed = "no request waits, each call of a ramp-up is cold"
        other = "lets requests wait, reuses warm functions"
    return (
        f"Expected by formulas: {assumed}, and times spread as measured. A simulation {other} and "
        "runs at the medians, unless `simulation.service_times` gives a spread."
    )


def _shortage(plan: CapacityPlan) -> str:
    mix = plan.mix
    if plan.instances_missing and mix.capacity is not None:
        name, limit = mix.capacity.instance_type.name, plan.terms.instances_max
        return f"It takes {plan.instances_missing:,} more {name} than the limit of {limit:,}."
    if mix.faas is not None and mix.functions_peak >= mix.faas.terms.concurrency_max:
        limit = mix.faas.terms.concurrency_max
        return f"The concurrency limit of the platform is {limit:,} functions."
    return "Cold starts are the bottleneck: keep functions warm, or add an instance."


def _mix(mix: Mix) -> str:
    memory = mix.faas.row.memory_bytes >> 20 if mix.faas is not None else 0
    if mix.capacity is None:
        return f"functions of {memory} MiB for everything"
    text = f"{mix.instances} x {mix.capacity.instance_type.name}"
    if mix.faas is None:
        return f"{text} and no functions"
    if mix.spilled == 0.0:
        return f"{text} with functions of {memory} MiB in reserve"
    spilled = f"{percent(mix.spilled)} of requests that spill over"
    return f"{text} with functions of {memory} MiB for the {spilled}"


def _alternative(mix: Mix) -> str:
    return f"would cost {usd(mix.usd_per_1k)} and meet {percent(mix.attainment)}"


def _load(plan: CapacityPlan) -> Iterator[str]:
    load = plan.terms.load
    length = f"over {load.duration_s:,.0f} s"
    if load.peak_clients:
        fewest = min(level.clients for level in load.levels)
        yield f"The load is {fewest:g} to {load.peak_clients:g} clients at once {length}."
    else:
        mean, peak = significant(load.rate_per_s), per_second(load.peak_per_s)
        yield f"The load is {mean} requests/s on average, {peak} at its peak, {length}."


def _threshold(plan: CapacityPlan, measured: Characterisation) -> Iterator[str]:
    place = plan.mix.capacity
    if place is None:
        return
    name, cores, limit = place.instance_type.name, place.instance_type.cpus, place.threshold
    overhead_ms = 2 * place.instance_type.network_ns / 1e6

    def time(concurrency: int) -> str:
        return ms(measured.time_ms(cores, concurrency, 1, plan.terms.quantile) + overhead_ms)

    within = f"{limit} at once take {time(limit)}"
    if place.is_lower_bound:
        beyond = "and more were not measured"
    else:
        beyond = f"{limit + 1} would take {time(limit + 1)}"
    yield (
        f"One {name} holds {limit} requests at once: at {percent(plan.terms.quantile)}, {within}, "
        f"{beyond}."
    )


def _size(plan: CapacityPlan) -> Iterator[str]:
    if plan.knee is None or plan.cheapest is None or plan.faas is None:
        return
    knee, largest = plan.knee, plan.sizes[-1]
    if knee is largest:
        yield f"A function runs in {ms(knee.run_ms)} on {_mib(knee)}, the largest size and fastest."
    else:
        less = _less(knee.usd_per_s, largest.usd_per_s)
        yield (
            f"More than {_mib(knee)} does not pay for a function: it runs in {ms(knee.run_ms)} "
            f"there and in {ms(largest.run_ms)} on {_mib(largest)}, and is {less} cheaper "
            "per second."
        )
    if plan.cheapest is not plan.faas.row:
        row, selected = plan.cheapest, plan.faas.row
        saved = _less(row.usd_per_call, selected.usd_per_call)
        yield (
            f"{_mib(row)} is the cheapest size within the objective: {saved} less per call, "
            f"but {ms(row.time_ms)} instead of {ms(selected.time_ms)} (--size cheapest)."
        )


def _break_even(plan: CapacityPlan) -> Iterator[str]:
    place = plan.mix.capacity or _cheapest_site(plan.capacities)
    if plan.faas is None or place is None:
        return
    even = break_even_rate(place.instance_type.usd_per_hour, plan.faas.row.usd_per_call)
    if not isfinite(even):
        return
    share = about(even / place.rate_per_s)
    conclusion = f"it holds {per_second(place.rate_per_s)}, so it pays above {share} utilisation"
    if even > place.rate_per_s:
        conclusion = (
            f"it holds only {per_second(place.rate_per_s)}, so functions are cheaper at any rate"
        )
    name = place.instance_type.name
    yield f"One {name} costs as much as functions at {significant(even)} requests/s; {conclusion}."


def _cold_starts(plan: CapacityPlan) -> Iterator[str]:
    functions, mix = plan.faas, plan.mix
    if functions is None:
        return
    if functions.start_ms == 0.0:
        yield "Cold starts were not measured and count as zero."
        return
    start = ms(functions.start_ms)
    if functions.is_cold_within:
        yield f"A cold start adds {start}, which is within the objective."
        return
    if mix.cold == 0.0:
        yield f"A cold start adds {start}, and no request is expected to see one."
        return
    text = f"A cold start adds {start} and makes {percent(mix.cold)} of all requests late"
    if mix.functions_peak:
        count, terms = mix.functions_peak, functions.terms
        pings = count * terms.usd(terms.ping_ns) * 3.6e12 / max(1, terms.ping_every_ns)
        held = count * terms.gigabytes * terms.provisioned_usd_per_gb_s * 3600
        text += f"; to keep {count} warm would cost {usd(pings)}/h by pings"
        text += f", {usd(held)}/h provisioned" if held else ""
    yield f"{text}."


def _current(now: CurrentSetup | None) -> Iterator[str]:
    if now is None:
        return
    pool, mix = now.pool, now.mix
    nodes = f"{pool.nodes} x {pool.name}" + (" with its functions" if mix.faas else "")
    text = f"As declared, {nodes} would meet {percent(mix.attainment)}"
    if now.nodes_short == 0:
        yield f"{text}: that is enough, at {usd(mix.usd_per_1k)} per 1,000 requests."
    elif now.nodes_short is None:
        yield f"{text}, and no number of such nodes is enough."
    else:
        yield f"{text}: it needs more capacity, {now.nodes_short} more such nodes."


def _sources(plan: CapacityPlan, measured: Characterisation, prices: PriceList) -> Iterator[str]:
    extrapolated = [entry.is_extrapolated for entry in plan.capacities]
    extrapolated += [row.is_extrapolated for row in plan.sizes]
    if any(extrapolated):
        low, high = measured.cores[0], measured.cores[-1]
        span = f"{low:g} to {high:g}" if low < high else f"{low:g}"
        cores = "core" if span == "1" else "cores"
        yield f"* Measured on {span} {cores}; other sizes are extrapolated by the fitted surface."
    yield f"Prices: {'; '.join(prices.titles)}.{_uncertain_prices(prices.provenance)}"


def _uncertain_prices(provenance: Sequence[Provenance]) -> str:
    low = [f"{' and '.join(f.keys)} of {f.title}" for f in provenance if f.confidence == "low"]
    assumed = sorted({key for f in provenance if f.confidence == "assumed" for key in f.keys})
    text = f" Uncertain: {'; '.join(low)}." if low else ""
    return text + (f" Assumed: {', '.join(assumed)}." if assumed else "")


def _cheapest_site(sites: Sequence[InstanceCapacity]) -> InstanceCapacity | None:
    usable = [place for place in sites if place.threshold]
    return min(usable, key=lambda s: s.instance_type.usd_per_hour / s.rate_per_s, default=None)


def _mib(row: SizeRow) -> str:
    return f"{row.memory_bytes >> 20} MiB"


def _less(price: float, other: float) -> str:
    return about(1.0 - price / other if other else 0.0)


Spec = dict[str, object]

# Keys that say what a variant runs; all other keys of a planned variant are measured.
_SOURCE: Final = ("model", "code", "options", "batch_max", "output")
_FUNCTIONS: Final = "functions"  # name of the serverless pool if the application has none


def planned_spec(
    config: AppConfig, function: Function, measured: Characterisation, plan: CapacityPlan
) -> Spec:
    """Return the application with the pools of the plan in place of its own.

    An existing pool of the same tier keeps its name and all keys that the plan does not set. Pools
    of other functions stay.
    """
    spec = deepcopy(config.spec)
    existing = cast(dict[str, Spec], spec["pools"])
    pools: dict[str, Spec] = {}
    variants: dict[str, Spec] = {}
    source = _source(spec, function)
    mix = plan.mix
    if mix.capacity is not None:
        name, base = _existing_pool(existing, "dedicated", mix.capacity.instance_type.name)
        pools[name] = {**base, **_instances(mix, mix.capacity, base)}
        profile = profile_of(measured, mix.capacity.instance_type.cpus)
        variants[name] = {
            **source,
            **_measured(profile, plan),
            "slowdown": [1.0, *(round(factor, 4) for factor in profile.slowdown[1:])],
            "concurrency": mix.capacity.threshold,
            "pools": [name],
        }
    if mix.faas is not None and plan.platform is not None:
        name, base = _existing_pool(existing, "serverless", _FUNCTIONS)
        delay = format_duration(plan.platform.network_ns)
        pools[name] = {**base, **_serverless(mix.faas, base), "network_delay": delay}
        profile = profile_of(measured, mix.faas.row.cpus)
        variants[name] = {**source, **_measured(profile, plan), "pools": [name]}
    functions = cast(dict[str, Spec], spec["functions"])
    idempotent = functions[function.name]["idempotent"]
    functions[function.name] = {
        "idempotent": idempotent,
        "prewarm_nodes": mix.instances,
        "variants": variants,
    }
    spec["pools"] = {**existing, **pools} if len(functions) > 1 else pools
    return spec


def with_workload(spec: Spec, pipeline: Pipeline, options: WorkloadOptions) -> Spec:
    """Return the application with the workload of the command line."""
    processes = list(options.arrivals)
    if options.trace is not None:
        processes.append(f"trace:{options.trace}")
    workload = dict(cast(Spec, spec["workload"]))
    if processes:
        workload["arrivals"] = [{"pipeline": pipeline.name, "process": p} for p in processes]
    if options.duration_ns is not None:
        workload["duration"] = format_duration(options.duration_ns)
    return {**spec, "workload": workload}


def _existing_pool(pools: Mapping[str, Spec], tier: str, default: str) -> tuple[str, Spec]:
    name = next((name for name, pool in pools.items() if pool["tier"] == tier), None)
    return (default, {"tier": tier}) if name is None else (name, dict(pools[name]))


def _source(spec: Spec, function: Function) -> Spec:
    section = cast(dict[str, Spec], spec["functions"])[function.name]
    variants = list(cast(dict[str, Spec], section["variants"]).values())
    first = variants[0] if variants else section
    return {key: first[key] for key in _SOURCE}


def _measured(profile: Profile, plan: CapacityPlan) -> Spec:
    start_ns = profile.cold_start_ns or round((plan.terms.start_ms or 0.0) * 1e6)
    return {
        "exec_time": [format_duration(max(1_000, round(ns, -3))) for ns in profile.exec_ns],
        "cold_start": format_duration(round(start_ns, -6)),
        "memory": format_size(profile.memory_bytes),
    }


def _instances(mix: Mix, site: InstanceCapacity, base: Spec) -> Spec:
    offer = site.instance_type
    # The application sets the maximum of an elastic pool; the plan sets what it starts with.
    nodes = max(mix.instances, cast(int, base["nodes"])) if base.get("elastic") else mix.instances
    return {
        "nodes": nodes,
        "slots": site.threshold,
        "cpus": offer.cpus,
        "memory": "unlimited"
        if offer.memory_bytes == UNLIMITED
        else format_size(offer.memory_bytes),
        "price": f"${_decimal(offer.usd_per_hour)}/h",
        "boot_time": format_duration(offer.boot_ns),
        "network_delay": format_duration(offer.network_ns),
    }


def _serverless(functions: FaasChoice, base: Spec) -> Spec:
    terms = functions.terms
    concurrency = min(
        terms.concurrency_max, cast(int, base.get("concurrency", terms.concurrency_max))
    )
    return {
        "memory": f"{terms.memory_bytes >> 20}MiB",
        "price": f"${_decimal(terms.usd_per_gb_s)}/GB-s",
        "request_price": f"${_decimal(terms.usd_per_request * 1e6)}/1M",
        "billing_step": format_duration(terms.billing_step_ns),
        "bill_cold_start": terms.bills_cold_start,
        "concurrency": concurrency,
        "burst_concurrency": terms.burst_concurrency,
        "burst_refill": f"{_decimal(terms.burst_refill_per_s)}/s",
        "keep_alive": format_duration(terms.keep_alive_ns),
        "age_max": format_duration(terms.age_max_ns),
        "provisioning_time": format_duration(terms.provisioning_ns),
        "provisioned_price": f"${_decimal(terms.provisioned_usd_per_gb_s)}/GB-s",
        "provisioned_run_price": f"${_decimal(terms.provisioned_run_usd_per_gb_s)}/GB-s",
    }


def _decimal(number: float) -> str:
    """Write a number without an exponent.

    >>> _decimal(1.66667e-05), _decimal(0.2)
    ('0.0000166667', '0.2')
    """
    return format(Decimal(f"{number:.12g}"), "f")
