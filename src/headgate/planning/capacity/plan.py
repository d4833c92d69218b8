"""A capacity plan: instance type and count, FaaS memory size, cost and SLO attainment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from headgate.core.model import FaasOffering, InstanceType
from headgate.planning.capacity.latency_model import Characterisation, profile_of
from headgate.planning.capacity.mix import (
    FaasChoice,
    LoadProfile,
    Mix,
    best_of_type,
    cheapest_mix,
    evaluate,
)
from headgate.planning.capacity.sizing import (
    InstanceCapacity,
    SizeRow,
    cheapest_size,
    faas_sizes,
    instance_capacity,
    knee_size,
)

INSTANCES_MAX: Final = 100
_INSTANCES_ANY: Final = 100_000


@dataclass(frozen=True, slots=True)
class Terms:
    """The objective, the load and the limits of a plan."""

    slo_ms: float
    quantile: float
    load: LoadProfile
    instances_max: int = INSTANCES_MAX  # that may be rented
    size: str = "knee"  # FaaS memory size: "knee", "cheapest", or a number of bytes
    start_ms: float | None = None  # cold start, if the profile has none


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """The recommended mix, and the alternatives it was chosen from."""

    terms: Terms
    platform: FaasOffering | None
    capacities: tuple[InstanceCapacity, ...]  # every instance type, as it was given
    sizes: tuple[SizeRow, ...]  # every function size, smallest first
    knee: SizeRow | None  # None: no size is within the objective
    cheapest: SizeRow | None
    faas: FaasChoice | None  # at the size that was chosen
    mix: Mix
    by_type: tuple[Mix | None, ...]  # the best of each site; None: it cannot hold one request
    faas_only: Mix | None  # functions without instances
    instances_only: Mix | None  # instances without functions
    instances_missing: int  # more than may be rented, to reach the quantile; 0: it is reached

    @property
    def is_enough(self) -> bool:
        """Whether the mix reaches the quantile."""
        return self.mix.attainment >= self.terms.quantile


@dataclass(frozen=True, slots=True)
class Infeasible:
    """Why no mix can meet the objective: too slow everywhere, or too little memory."""

    fastest_ms: float  # isolated latency at the quantile, on the fastest option
    where: str  # the instance type or FaaS memory size that is fastest
    needs_bytes: int | None  # memory that no option has; None: latency is the problem


def make_plan(
    measured: Characterisation,
    instance_types: Sequence[InstanceType],
    platform: FaasOffering | None,
    terms: Terms,
) -> CapacityPlan | Infeasible:
    """Return the plan, or why there is none. The load must have requests."""
    slo_ms, quantile, load = terms.slo_ms, terms.quantile, terms.load
    capacities = tuple(
        instance_capacity(measured, instance_type, slo_ms, quantile)
        for instance_type in instance_types
    )
    sizes = tuple(faas_sizes(measured, platform, slo_ms, quantile)) if platform else ()
    knee, cheapest = knee_size(sizes), cheapest_size(sizes)
    usable = [each for each in capacities if each.threshold]
    if not usable and knee is None:
        return _infeasible(measured, capacities, sizes)
    functions = None
    if platform is not None and knee is not None and cheapest is not None:
        functions = faas_choice(
            measured, platform, _selected_size(sizes, knee, cheapest, terms), terms
        )
    best = cheapest_mix(load, capacities, functions, quantile, terms.instances_max)
    without = cheapest_mix(load, usable, None, quantile, terms.instances_max) if usable else None
    return CapacityPlan(
        terms=terms,
        platform=platform,
        capacities=capacities,
        sizes=sizes,
        knee=knee,
        cheapest=cheapest,
        faas=functions,
        mix=best,
        by_type=tuple(
            best_of_type(load, each, functions, quantile, terms.instances_max)
            if each.threshold
            else None
            for each in capacities
        ),
        faas_only=evaluate(load, None, 0, functions) if functions is not None else None,
        instances_only=without,
        instances_missing=_instances_missing(best, usable, functions, terms),
    )


def faas_choice(
    measured: Characterisation, platform: FaasOffering, row: SizeRow, terms: Terms
) -> FaasChoice:
    """Return the FaaS platform at a memory size, with its cold start."""
    start_ms = terms.start_ms or 0.0
    if measured.cold_start is not None:
        start_ms = profile_of(measured, row.cpus).cold_start_ns / 1e6
    is_cold_within = start_ms + row.time_ms <= terms.slo_ms
    return FaasChoice(platform.sized(row.memory_bytes), row, start_ms, is_cold_within)


def _selected_size(
    sizes: Sequence[SizeRow], knee: SizeRow, cheapest: SizeRow, terms: Terms
) -> SizeRow:
    if terms.size == "knee":
        return knee
    if terms.size == "cheapest":
        return cheapest
    return next(row for row in sizes if row.memory_bytes == int(terms.size))


def _instances_missing(
    best: Mix, usable: Sequence[InstanceCapacity], functions: FaasChoice | None, terms: Terms
) -> int:
    """Instances beyond `instances_max` that are needed to reach the quantile; 0 if none."""
    if best.attainment >= terms.quantile or not usable:
        return 0
    kind = best.capacity or usable[0]
    enough = best_of_type(terms.load, kind, functions, terms.quantile, _INSTANCES_ANY)
    return max(0, enough.instances - terms.instances_max)


def _infeasible(
    measured: Characterisation, capacities: Sequence[InstanceCapacity], sizes: Sequence[SizeRow]
) -> Infeasible:
    times = [(each.isolated_ms, each.instance_type.name) for each in capacities]
    times += [(row.time_ms, f"a function of {row.memory_bytes >> 20} MiB") for row in sizes]
    fastest_ms, where = min(times)
    needed = measured.peak_memory_bytes or 0
    rooms = [each.instance_type.memory_bytes for each in capacities] + [
        row.memory_bytes for row in sizes
    ]
    return Infeasible(fastest_ms, where, needed if needed > max(rooms) else None)
