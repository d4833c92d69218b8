"""Pools, from the application file to the core."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Final

from headgate.app.entry import Entry
from headgate.app.pool_spec import GuardSpec, PoolSpec
from headgate.app.providers import choose_provider
from headgate.core import units
from headgate.core.clock import NEVER_NS
from headgate.core.model import TIER_NAMES, Guard, Pool, Serverless, Tier

_NODES_ONLY: Final = (
    "nodes",
    "slots",
    "queue",
    "cpus",
    "gpu_share",
    "host_memory",
    "idle_timeout",
    "elastic",
    "boot",
)
_SERVERLESS_ONLY: Final = (
    "concurrency",
    "burst",
    "starts_rate",
    "keep_alive",
    "request_price",
    "billing_step",
    "max_age",
    "bills_start",
    "provision",
    "provisioned_price",
    "provisioned_run_price",
    "guard",
)


def build_pools(specs: Mapping[str, PoolSpec], where: str) -> tuple[Pool, ...]:
    """Return the pools, numbered in the order of the file."""
    return tuple(
        _build_pool(id, name, Entry(spec, where, f"pools.{name}"))
        for id, (name, spec) in enumerate(specs.items())
    )


def _build_pool(id: int, name: str, entry: Entry[PoolSpec]) -> Pool:
    choose_provider(entry)  # raises, where that makes no sense
    if entry.spec.tier == "serverless":
        _refuse_given(entry, _NODES_ONLY, "a serverless pool has no nodes")
        return _build_serverless(id, name, entry)
    _refuse_given(entry, _SERVERLESS_ONLY, "is only for serverless pools")
    return _build_nodes(id, name, entry)


def _build_nodes(id: int, name: str, entry: Entry[PoolSpec]) -> Pool:
    spec = entry.spec
    if spec.gpu_share is not None:
        gpu_sevenths = entry.gpu_sevenths("gpu_share")
    else:
        gpu_sevenths = 0 if spec.tier == "dedicated" else NEVER_NS
    return Pool(
        id,
        name,
        tier=TIER_NAMES.index(spec.tier),
        nodes=spec.nodes,
        slots=spec.slots,
        queue_max=spec.queue,
        cpu_milli=NEVER_NS if spec.cpus is None else entry.cpu_milli("cpus"),
        gpu_sevenths=gpu_sevenths,
        memory_bytes=entry.size_or_unlimited_bytes("memory"),
        host_memory_bytes=entry.size_bytes("host_memory"),
        idle_timeout_ns=entry.duration_or_never_ns("idle_timeout"),
        is_elastic=spec.elastic,
        boot_ns=entry.duration_ns("boot"),
        usd_per_hour=entry.price("price", units.parse_price_per_hour),
        network_ns=entry.duration_ns("network"),
        bytes_per_s=entry.bytes_per_s("bandwidth"),
    )


def _build_serverless(id: int, name: str, entry: Entry[PoolSpec]) -> Pool:
    spec = entry.spec
    if spec.memory == "unlimited":
        raise entry.error("memory", "a serverless pool needs a size here", allowed="2GB, 1769MiB")
    serverless = Serverless(
        memory_bytes=entry.size_or_unlimited_bytes("memory"),
        concurrency_max=spec.concurrency,
        burst=spec.burst,
        starts_per_s=entry.positive_rate_per_s("starts_rate"),
        keep_alive_ns=entry.duration_ns("keep_alive"),
        usd_per_gb_s=entry.price("price", units.parse_price_per_gb_second),
        usd_per_request=entry.price("request_price", units.parse_price_per_request),
        billing_step_ns=entry.positive_ns("billing_step"),
        age_max_ns=entry.duration_or_never_ns("max_age"),
        bills_start=spec.bills_start,
        provision_ns=entry.duration_ns("provision"),
        provisioned_usd_per_gb_s=entry.price("provisioned_price", units.parse_price_per_gb_second),
        provisioned_run_usd_per_gb_s=entry.price(
            "provisioned_run_price", units.parse_price_per_gb_second
        ),
    )
    return Pool(
        id,
        name,
        tier=Tier.SERVERLESS,
        nodes=0,
        gpu_sevenths=0,
        memory_bytes=serverless.memory_bytes,
        network_ns=entry.duration_ns("network"),
        bytes_per_s=entry.bytes_per_s("bandwidth"),
        serverless=serverless,
        guard=_build_guard(Entry(spec.guard, entry.where, entry.path("guard"))),
    )


def _build_guard(entry: Entry[GuardSpec]) -> Guard:
    rest_ns, rest_max_ns = entry.positive_ns("rest"), entry.positive_ns("rest_max")
    if rest_ns > rest_max_ns:
        raise entry.error(
            "rest", "is longer than `rest_max`", allowed=f"up to {entry.spec.rest_max}"
        )
    return Guard(
        failures_max=entry.spec.failures,
        rest_ns=rest_ns,
        rest_max_ns=rest_max_ns,
        usd_per_minute=_budget_usd(entry, "budget_per_minute"),
        usd_per_day=_budget_usd(entry, "budget_per_day"),
    )


def _budget_usd(entry: Entry[GuardSpec], key: str) -> float:
    if getattr(entry.spec, key) is None:
        return inf
    return entry.price(key, units.parse_dollars)


def _refuse_given(entry: Entry[PoolSpec], names: tuple[str, ...], problem: str) -> None:
    defaults = PoolSpec()
    for name in names:
        if getattr(entry.spec, name) != getattr(defaults, name):
            allowed = set(PoolSpec.__struct_fields__) - set(names)
            raise entry.error(name, problem, allowed=", ".join(sorted(allowed)))
