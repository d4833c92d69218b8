"""Writes a capacity plan as an application file: planned pools, and measured profiles."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from decimal import Decimal
from typing import Final, cast

from headgate.cli.workload import WorkloadOptions
from headgate.config import AppConfig
from headgate.core.model import UNLIMITED, Function, Pipeline, Profile
from headgate.core.units import format_duration, format_size
from headgate.planning.capacity.mix import FaasChoice, Mix
from headgate.planning.capacity.plan import CapacityPlan
from headgate.planning.capacity.sizing import InstanceCapacity
from headgate.planning.latency_model import Characterisation, profile_of

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
