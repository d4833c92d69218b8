"""A plan as rows: what the tables show and what JSON carries."""

from __future__ import annotations

from math import isfinite

from headgate.cli.plan.words import percent
from headgate.core.units import format_duration, format_size
from headgate.planning.mix import Mix, break_even_rate
from headgate.planning.plan import Plan
from headgate.planning.sizing import Site, SizeRow


def instance_rows(plan: Plan) -> list[dict[str, object]]:
    """One row per instance type, for people."""
    rows: list[dict[str, object]] = []
    for place, mix in zip(plan.sites, plan.by_type, strict=True):
        is_chosen = plan.mix.site is place
        rows.append(
            {
                "": ">" if is_chosen else "",
                "instance": place.offer.name + ("*" if place.is_told else ""),
                "CPUs": place.offer.cpus,
                "$/h": f"{place.offer.usd_per_hour:.3f}",
                "alone ms": f"{place.alone_ms:.1f}",
                "holds": f"{place.threshold}{'+' if place.is_at_least else ''}",
                "per s": f"{place.rate_per_s:.1f}" if place.threshold else "-",
                "even at": _even(plan, place),
                "wanted": mix.instances if mix is not None else None,
                "$/1k": f"{mix.usd_per_1k:.5f}" if mix is not None else "-",
                "met": percent(mix.attainment) if mix is not None else "-",
            }
        )
    return rows


def size_rows(plan: Plan) -> list[dict[str, object]]:
    """One row per function size, for people."""
    return [
        {
            "": ">" if plan.functions is not None and row is plan.functions.row else "",
            "MiB": f"{row.memory_bytes >> 20}" + ("*" if row.is_told else ""),
            "CPUs": f"{row.cpus:.2f}",
            "alone ms": f"{row.time_ms:.1f}",
            "$/1M": f"{1e6 * row.usd_per_call:.2f}",
            "in time": row.meets if row.fits else "no room",
            "is": ", ".join(_names(plan, row)),
        }
        for row in plan.sizes
    ]


def plan_json(plan: Plan) -> dict[str, object]:
    """Return everything a program may want to know."""
    terms, load = plan.terms, plan.terms.load
    return {
        "slo_ms": terms.slo_ms,
        "quantile": terms.quantile,
        "load": {
            "rate_per_s": load.rate_per_s,
            "peak_per_s": load.peak_per_s,
            "peak_clients": load.peak_clients,
            "duration_s": load.duration_s,
        },
        "instances": [_instance_json(plan, place) for place in plan.sites],
        "sizes": [_size_json(plan, row) for row in plan.sizes],
        "mix": _mix_json(plan.mix),
        "functions_alone": _mix_json(plan.alone) if plan.alone is not None else None,
        "instances_alone": _mix_json(plan.without) if plan.without is not None else None,
        "is_enough": plan.is_enough,
        "instances_short": plan.instances_short,
    }


def _even(plan: Plan, place: Site) -> str:
    if plan.functions is None:
        return "-"
    rate = break_even_rate(place.offer.usd_per_hour, plan.functions.row.usd_per_call)
    return f"{rate:.1f}/s" if isfinite(rate) else "-"


def _names(plan: Plan, row: SizeRow) -> list[str]:
    return [name for name, one in (("knee", plan.knee), ("cheapest", plan.cheapest)) if one is row]


def _instance_json(plan: Plan, place: Site) -> dict[str, object]:
    even = None
    if plan.functions is not None:
        even = break_even_rate(place.offer.usd_per_hour, plan.functions.row.usd_per_call)
    return {
        "name": place.offer.name,
        "cpus": place.offer.cpus,
        "memory": format_size(place.offer.memory_bytes),
        "boot": format_duration(place.offer.boot_ns),
        "usd_per_hour": place.offer.usd_per_hour,
        "threshold": place.threshold,
        "is_at_least": place.is_at_least,
        "is_measured": not place.is_told,
        "alone_ms": place.alone_ms,
        "rate_per_s": place.rate_per_s,
        "break_even_per_s": even,
    }


def _size_json(plan: Plan, row: SizeRow) -> dict[str, object]:
    return {
        "memory_mib": row.memory_bytes >> 20,
        "cpus": row.cpus,
        "is_measured": not row.is_told,
        "time_ms": row.time_ms,
        "run_ms": row.run_ms,
        "usd_per_call": row.usd_per_call,
        "is_within": row.meets,
        "has_room": row.fits,
        "is": _names(plan, row),
    }


def _mix_json(mix: Mix) -> dict[str, object]:
    row = mix.functions.row if mix.functions is not None else None
    return {
        "instance": mix.site.offer.name if mix.site is not None else None,
        "instances": mix.instances,
        "threshold": mix.site.threshold if mix.site is not None else 0,
        "function_memory_mib": row.memory_bytes >> 20 if row is not None else None,
        "functions_peak": mix.functions_peak,
        "spilled": mix.spilled,
        "cold": mix.cold,
        "attainment": mix.attainment,
        "usd_per_hour": mix.usd_per_hour,
        "usd_per_1k": mix.usd_per_1k,
    }
