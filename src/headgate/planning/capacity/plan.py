"""A plan: which machines, how many, which function size, what it costs and how well it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from headgate.core.catalog import FaasOffering, InstanceType
from headgate.planning.capacity.load import LoadProfile
from headgate.planning.capacity.mix import FaasChoice, Mix, best_of_type, cheapest_mix, evaluate
from headgate.planning.capacity.sizing import (
    InstanceCapacity,
    SizeRow,
    cheapest_size,
    function_sizes,
    knee_size,
    site,
)
from headgate.planning.latency_model import Characterisation, profile_of

INSTANCES_MAX: Final = 100
_INSTANCES_ANY: Final = 100_000


@dataclass(frozen=True, slots=True)
class Terms:
    """What a plan is made for."""

    slo_ms: float
    quantile: float
    load: LoadProfile
    instances_max: int = INSTANCES_MAX  # that may be rented
    size: str = "knee"  # of functions: "knee", "cheapest", or a number of bytes
    start_ms: float | None = None  # of a cold start, where the profile has none


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """What was found, the parts as well as the whole."""

    terms: Terms
    platform: FaasOffering | None
    sites: tuple[InstanceCapacity, ...]  # every instance type, as it was given
    sizes: tuple[SizeRow, ...]  # every function size, smallest first
    knee: SizeRow | None  # None: no size is within the objective
    cheapest: SizeRow | None
    functions: FaasChoice | None  # at the size that was chosen
    mix: Mix
    by_type: tuple[Mix | None, ...]  # the best of each site; None: it cannot hold one request
    alone: Mix | None  # functions without instances
    without: Mix | None  # instances without functions
    instances_short: int  # more than may be rented, to reach the quantile; 0: it is reached

    @property
    def is_enough(self) -> bool:
        """Whether the mix reaches the quantile."""
        return self.mix.attainment >= self.terms.quantile


@dataclass(frozen=True, slots=True)
class Infeasible:
    """No number of anything will do."""

    fastest_ms: float  # of a lone request, at the quantile
    where: str  # the instance type or the function size that is fastest
    needs_bytes: int | None  # memory that nothing has; None: it is the time


def make_plan(
    measured: Characterisation,
    offers: Sequence[InstanceType],
    platform: FaasOffering | None,
    terms: Terms,
) -> CapacityPlan | Infeasible:
    """Return the plan, or why there cannot be one. The load must have requests."""
    slo_ms, quantile, load = terms.slo_ms, terms.quantile, terms.load
    sites = tuple(site(measured, offer, slo_ms, quantile) for offer in offers)
    sizes = tuple(function_sizes(measured, platform, slo_ms, quantile)) if platform else ()
    knee, cheapest = knee_size(sizes), cheapest_size(sizes)
    usable = [each for each in sites if each.threshold]
    if not usable and knee is None:
        return _infeasible(measured, sites, sizes)
    functions = None
    if platform is not None and knee is not None and cheapest is not None:
        functions = choose_functions(
            measured, platform, _chosen(sizes, knee, cheapest, terms), terms
        )
    best = cheapest_mix(load, sites, functions, quantile, terms.instances_max)
    without = cheapest_mix(load, usable, None, quantile, terms.instances_max) if usable else None
    return CapacityPlan(
        terms=terms,
        platform=platform,
        sites=sites,
        sizes=sizes,
        knee=knee,
        cheapest=cheapest,
        functions=functions,
        mix=best,
        by_type=tuple(
            best_of_type(load, each, functions, quantile, terms.instances_max)
            if each.threshold
            else None
            for each in sites
        ),
        alone=evaluate(load, None, 0, functions) if functions is not None else None,
        without=without,
        instances_short=_short(best, usable, functions, terms),
    )


def choose_functions(
    measured: Characterisation, platform: FaasOffering, row: SizeRow, terms: Terms
) -> FaasChoice:
    """Return the functions of a size, with the cold start that they would have."""
    start_ms = terms.start_ms or 0.0
    if measured.cold_start is not None:
        start_ms = profile_of(measured, row.cpus).cold_start_ns / 1e6
    is_cold_within = start_ms + row.time_ms <= terms.slo_ms
    return FaasChoice(platform.sized(row.memory_bytes), row, start_ms, is_cold_within)


def _chosen(sizes: Sequence[SizeRow], knee: SizeRow, cheapest: SizeRow, terms: Terms) -> SizeRow:
    if terms.size == "knee":
        return knee
    if terms.size == "cheapest":
        return cheapest
    return next(row for row in sizes if row.memory_bytes == int(terms.size))


def _short(
    best: Mix, usable: Sequence[InstanceCapacity], functions: FaasChoice | None, terms: Terms
) -> int:
    """How many instances more than may be rented it takes to reach the quantile."""
    if best.attainment >= terms.quantile or not usable:
        return 0
    kind = best.site or usable[0]
    enough = best_of_type(terms.load, kind, functions, terms.quantile, _INSTANCES_ANY)
    return max(0, enough.instances - terms.instances_max)


def _infeasible(
    measured: Characterisation, sites: Sequence[InstanceCapacity], sizes: Sequence[SizeRow]
) -> Infeasible:
    times = [(each.alone_ms, each.offer.name) for each in sites]
    times += [(row.time_ms, f"a function of {row.memory_bytes >> 20} MiB") for row in sizes]
    fastest_ms, where = min(times)
    needed = measured.peak_memory_bytes or 0
    rooms = [each.offer.memory_bytes for each in sites] + [row.memory_bytes for row in sizes]
    return Infeasible(fastest_ms, where, needed if needed > max(rooms) else None)
