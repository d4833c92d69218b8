"""Builds the core's records from a decoded application file, and checks how its parts relate.

`build` is the entry point: pools first, then functions (whose variants need pools that can hold
them), then pipelines. `make_config` does the same for the settings of a policy. All numbers (ids)
follow the order of the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from math import inf
from typing import Any, Final, TypeVar, get_type_hints

import msgspec
from msgspec import inspect

from headgate.config.errors import FieldReader, check, unknown_name_error
from headgate.config.options import VariantSource
from headgate.config.providers import choose_provider
from headgate.config.schema import (
    AppSpec,
    BudgetSpec,
    ClientSpec,
    FunctionSpec,
    LimitsSpec,
    PipelineSpec,
    PoolSpec,
    SloSpec,
    StageSpec,
    VariantSpec,
)
from headgate.config.source import normalise
from headgate.core import units
from headgate.core.errors import ConfigError
from headgate.core.model import (
    TIER_NAMES,
    UNLIMITED,
    App,
    BreakerConfig,
    Client,
    FaasPlatform,
    Function,
    Limits,
    Pipeline,
    Pool,
    Profile,
    Shape,
    Slo,
    Stage,
    Tier,
    Variant,
)
from headgate.core.policy import PolicyConfig
from headgate.core.records import STAGES_MAX

# Placeholder for the time of a batch that no worker has measured yet.
UNKNOWN_EXEC_NS: Final = 10_000_000
_STAGES_MAX: Final = STAGES_MAX - 1
_NS: Final = "_ns"

_NODES_ONLY: Final = (
    "nodes",
    "slots",
    "queue_max",
    "cpus",
    "gpu_share",
    "host_memory",
    "idle_timeout",
    "elastic",
    "boot_time",
)
_SERVERLESS_ONLY: Final = (
    "concurrency",
    "burst_concurrency",
    "burst_refill",
    "keep_alive",
    "request_price",
    "billing_step",
    "age_max",
    "bill_cold_start",
    "provisioning_time",
    "provisioned_price",
    "provisioned_run_price",
    "circuit_breaker",
    "budget",
)

ConfigT = TypeVar("ConfigT", bound=PolicyConfig)


def build(spec: AppSpec, where: str) -> App:
    """Return the core's records; raise `ConfigError` if they are inconsistent."""
    if not spec.functions:
        raise ConfigError("is empty", where=where, key="functions", allowed="at least one")
    pools = _build_pools(spec.pools or {"local": PoolSpec(tier="dedicated")}, where)
    functions = _build_functions(spec.functions, pools, where)
    return App(
        functions=functions,
        pipelines=_build_pipelines(spec, functions, where),
        pools=pools,
        clients=_build_clients(spec.clients),
        limits=_build_limits(FieldReader(spec.limits, where, "limits")),
    )


def make_config(config_type: type[ConfigT], settings: Mapping[str, object], where: str) -> ConfigT:
    """Return the configuration of a policy, from the settings under `policy:`.

    A field `window_ns` is written `window: 5s`. Raises `ConfigError` for an unknown key, a value
    of the wrong type, and any value that the configuration itself refuses with a `ValueError`.
    """
    hints = get_type_hints(config_type)
    names = {
        field.name.removesuffix(_NS): field.name for field in fields(config_type) if field.init
    }
    values: dict[str, object] = {}
    for key, value in settings.items():
        if key not in names:
            raise unknown_name_error("setting", key, names, where=where, key="policy")
        name = names[key]
        values[name] = _read(value, name, hints[name], where, f"policy.{key}")
    try:
        return config_type(**values)
    except ConfigError as error:
        raise ConfigError(
            error.problem,
            where=where,
            key=f"policy.{error.key}" if error.key else "policy",
            value=error.value,
            allowed=error.allowed,
        ) from None
    except ValueError as error:
        raise ConfigError(str(error), where=where, key="policy") from None


def variant_spec(spec: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the section of a file for a variant, named `function` or `function/variant`."""
    function, _, variant = name.partition("/")
    section: dict[str, Any] = spec["functions"][function]
    return section["variants"][variant] if variant else section


def variant_sources(specs: Mapping[str, FunctionSpec]) -> tuple[VariantSource | None, ...]:
    """Return what a worker loads for each variant, by variant id; None if it is only simulated."""
    variants = [v for spec in specs.values() for v in (spec.variants.values() or (spec,))]
    return tuple(_source(variant) for variant in variants)


def _build_functions(
    specs: Mapping[str, FunctionSpec], pools: Sequence[Pool], where: str
) -> tuple[Function, ...]:
    functions: list[Function] = []
    variants_before = 0
    for id, (name, spec) in enumerate(specs.items()):
        reader = FieldReader(spec, where, f"functions.{name}")
        variants = tuple(
            _build_variant(variants_before + index, variant_name, id, variant, pools)
            for index, (variant_name, variant) in enumerate(_variants(name, reader))
        )
        functions.append(
            Function(
                id,
                name,
                variants,
                is_idempotent=spec.idempotent,
                prewarm_nodes=_prewarm_nodes(spec),
            )
        )
        variants_before += len(variants)
    return tuple(functions)


def _source(spec: VariantSpec) -> VariantSource | None:
    if not _is_served(spec):
        return None
    return VariantSource(
        spec.model, spec.code, spec.options, spec.batch_max, is_measured=spec.exec_time is None
    )


def _is_served(spec: VariantSpec) -> bool:
    return spec.model is not None or spec.code is not None


def _prewarm_nodes(spec: FunctionSpec) -> int:
    if spec.prewarm_nodes is not None:
        return spec.prewarm_nodes
    is_served = any(_is_served(variant) for variant in (spec.variants.values() or (spec,)))
    return UNLIMITED if is_served else 0


def _variants(
    name: str, reader: FieldReader[FunctionSpec]
) -> list[tuple[str, FieldReader[VariantSpec]]]:
    """Return the variants and their names. Without `variants` the function is its only variant."""
    spec = reader.spec
    if not spec.variants:
        return [(name, reader)]
    defaults = VariantSpec()
    for field in VariantSpec.__struct_fields__:
        if getattr(spec, field) != getattr(defaults, field):
            raise reader.error(
                field,
                "must be set in each variant instead",
                allowed="variants, idempotent, prewarm_nodes",
            )
    return [
        (f"{name}/{variant}", FieldReader(body, reader.where, f"{reader.key}.variants.{variant}"))
        for variant, body in spec.variants.items()
    ]


def _build_variant(
    id: int,
    name: str,
    function_id: int,
    reader: FieldReader[VariantSpec],
    pools: Sequence[Pool],
) -> Variant:
    spec = reader.spec
    if spec.slowdown[0] != 1:
        problem = f"begins with {spec.slowdown[0]:g}, the factor of a batch alone on its node"
        raise reader.error("slowdown", problem, allowed="1.0 as the first factor")
    profile = Profile(
        exec_ns=_exec_ns(reader),
        slowdown=spec.slowdown,
        cold_start_ns=reader.duration_ns("cold_start"),
        swap_in_ns=reader.duration_ns("swap_in"),
        memory_bytes=reader.size_bytes("memory"),
        output_bytes=reader.size_bytes("output"),
    )
    shape = Shape(reader.cpu_milli("cpus"), reader.gpu_sevenths("gpu_share"))
    pool_ids = _pool_ids(reader, profile, shape, pools)
    return Variant(id, name, function_id, pool_ids, profile, shape, spec.concurrency)


def _exec_ns(reader: FieldReader[VariantSpec]) -> tuple[int, ...]:
    """Return the execution times of batches of 1, 2, 3, ... items."""
    written = reader.spec.exec_time
    if reader.spec.model is not None and reader.spec.code is not None:
        raise reader.error("code", "is given besides `model`", allowed="either model or code")
    if written is None and _is_served(reader.spec):
        return (UNKNOWN_EXEC_NS,) * reader.spec.batch_max
    if written is None or written == () or written == {}:
        raise reader.error("exec_time", "is missing", allowed="5ms, [5ms, 6ms], {1: 5ms, 8: 20ms}")
    if isinstance(written, str | int):
        return (_batch_ns(reader, "exec_time", written),)
    if isinstance(written, tuple):
        return tuple(_batch_ns(reader, f"exec_time[{i}]", time) for i, time in enumerate(written))
    known = {
        int(size): _batch_ns(reader, f"exec_time.{size}", time) for size, time in written.items()
    }
    if 1 not in known:
        raise reader.error("exec_time", "has no time for a batch of 1", allowed="{1: 5ms, 8: 20ms}")
    return interpolated(known)


def _batch_ns(reader: FieldReader[VariantSpec], name: str, time: object) -> int:
    key = reader.path(name)
    time_ns = units.parse_duration(time, where=reader.where, key=key)
    if time_ns == 0:
        raise ConfigError(
            "must be longer than zero", where=reader.where, key=key, value=time, allowed="5ms, 1us"
        )
    return time_ns


def interpolated(known: Mapping[int, int]) -> tuple[int, ...]:
    """Fill the gaps between known batch sizes linearly.

    >>> interpolated({1: 50, 4: 80, 6: 80})
    (50, 60, 70, 80, 80, 80)
    """
    sizes = sorted(known)
    times = [known[sizes[0]]]
    for low, high in pairwise(sizes):
        rise = known[high] - known[low]
        for size in range(low + 1, high + 1):
            times.append(known[low] + rise * (size - low) // (high - low))
    return tuple(times)


def _pool_ids(
    reader: FieldReader[VariantSpec],
    profile: Profile,
    shape: Shape,
    pools: Sequence[Pool],
) -> tuple[int, ...]:
    """Return the pools that the variant may use and that have the resources for it.

    A pool that `pools` names must have them. Without `pools`, a pool that lacks them is left out.
    """
    is_named = reader.spec.pools is not None
    if is_named:
        named = reader.some_of("pool", "pools", [pool.name for pool in pools])
        pools = [pool for pool in pools if pool.name in named]
    misfits = [(pool, _misfit(pool, profile, shape)) for pool in pools]
    fitting = tuple(pool.id for pool, misfit in misfits if misfit is None)
    reasons = [(pool.name, *misfit) for pool, misfit in misfits if misfit is not None]
    if not pools:
        allowed = "one or more, or no `pools` at all for every pool"
        raise reader.error("pools", "names no pool", allowed=allowed)
    if not fitting or (is_named and reasons):
        allowed = ", ".join(f"{field} {limit} on {pool}" for pool, field, limit in reasons)
        problem = "exceeds a pool under `pools`" if fitting else "exceeds every pool"
        raise reader.error(reasons[0][1], problem, allowed=f"at most {allowed}")
    return fitting


def _misfit(pool: Pool, profile: Profile, shape: Shape) -> tuple[str, str] | None:
    """Return the field that exceeds a node of the pool, and the pool's limit."""
    if profile.memory_bytes > pool.memory_bytes:
        return ("memory", units.format_size(pool.memory_bytes))
    if shape.gpu_sevenths > pool.gpu_sevenths:
        return ("gpu_share", f"{pool.gpu_sevenths}/7")
    if shape.cpu_milli > pool.cpu_milli:
        return ("cpus", f"{pool.cpu_milli / 1000:g}")
    return None


def _build_pipelines(
    spec: AppSpec, functions: Sequence[Function], where: str
) -> tuple[Pipeline, ...]:
    specs = spec.pipelines or {f.name: PipelineSpec(function=f.name) for f in functions}
    default = Slo() if spec.slo is None else _build_slo(FieldReader(spec.slo, where, "slo"))
    by_name = {function.name: function for function in functions}
    pipelines: list[Pipeline] = []
    for id, (name, body) in enumerate(specs.items()):
        reader = FieldReader(body, where, f"pipelines.{name}")
        slo = (
            default
            if body.slo is None
            else _build_slo(FieldReader(body.slo, where, reader.path("slo")))
        )
        pipelines.append(Pipeline(id, name, _build_stages(reader, by_name), slo))
    return tuple(pipelines)


def _build_slo(reader: FieldReader[SloSpec]) -> Slo:
    spec = reader.spec
    quantile = reader.fraction("quantile")
    if not 0 < quantile < 1:
        raise reader.error("quantile", "is out of range", allowed="above 0% and below 100%")
    return Slo(
        latency_ns=reader.duration_or_never_ns("latency"),
        quantile=quantile,
        rate_tolerance=spec.rate_tolerance,
        is_hard=spec.hard_deadline,
    )


def _build_stages(
    reader: FieldReader[PipelineSpec], functions: Mapping[str, Function]
) -> tuple[Stage, ...]:
    spec = reader.spec
    if (spec.function is None) == (not spec.stages):
        allowed = "either function or stages"
        raise ConfigError(
            "must have exactly one of function and stages",
            where=reader.where,
            key=reader.key,
            allowed=allowed,
        )
    if not spec.stages:
        return (Stage(functions[reader.one_of("function", "function", functions)]),)
    if len(spec.stages) > _STAGES_MAX:
        problem = f"has {len(spec.stages)} stages"
        raise reader.error("stages", problem, allowed=f"at most {_STAGES_MAX}")
    names = _sort_stages(reader, spec.stages)
    return tuple(
        _build_stage(
            name,
            FieldReader(spec.stages[name], reader.where, f"{reader.path('stages')}.{name}"),
            functions,
            names,
        )
        for name in names
    )


def _build_stage(
    name: str, reader: FieldReader[StageSpec], functions: Mapping[str, Function], names: list[str]
) -> Stage:
    spec = reader.spec
    probability = reader.fraction("unsure_probability")
    if spec.only_if_unsure and not spec.after:
        raise reader.error(
            "only_if_unsure", "needs a stage before it", allowed="a stage with `after`"
        )
    if not spec.only_if_unsure and probability != 1:
        raise reader.error(
            "unsure_probability",
            "is set for a stage that always runs",
            allowed="a stage with `only_if_unsure: true`",
        )
    return Stage(
        function=functions[reader.one_of("function", "function", functions)],
        after=tuple(names.index(before) for before in reader.some_of("stage", "after", names)),
        only_if_unsure=spec.only_if_unsure,
        unsure_probability=probability,
        name=name,
    )


def _sort_stages(reader: FieldReader[PipelineSpec], stages: Mapping[str, StageSpec]) -> list[str]:
    """The names of stages in a topological order that does not depend on their order in the file.

    Raises `ConfigError` for a cycle.
    """
    sorter = TopologicalSorter(
        {
            name: [before for before in body.after if before in stages]
            for name, body in stages.items()
        }
    )
    try:
        sorter.prepare()
    except CycleError as error:
        problem = f"form a cycle: {' -> '.join(error.args[1])}"
        raise reader.error("stages", problem, allowed="no cycles") from None
    names: list[str] = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        names += ready
        sorter.done(*ready)
    return names


def _build_pools(specs: Mapping[str, PoolSpec], where: str) -> tuple[Pool, ...]:
    return tuple(
        _build_pool(id, name, FieldReader(spec, where, f"pools.{name}"))
        for id, (name, spec) in enumerate(specs.items())
    )


def _build_pool(id: int, name: str, reader: FieldReader[PoolSpec]) -> Pool:
    choose_provider(reader)  # raises if the provider does not match the pool
    if reader.spec.tier == "serverless":
        _refuse_given(reader, _NODES_ONLY, "is not for serverless pools")
        return _build_serverless(id, name, reader)
    _refuse_given(reader, _SERVERLESS_ONLY, "is only for serverless pools")
    return _build_nodes(id, name, reader)


def _build_nodes(id: int, name: str, reader: FieldReader[PoolSpec]) -> Pool:
    spec = reader.spec
    if spec.gpu_share is not None:
        gpu_sevenths = reader.gpu_sevenths("gpu_share")
    else:
        gpu_sevenths = 0 if spec.tier == "dedicated" else UNLIMITED
    return Pool(
        id,
        name,
        tier=TIER_NAMES.index(spec.tier),
        nodes=spec.nodes,
        slots=spec.slots,
        queue_max=spec.queue_max,
        cpu_milli=UNLIMITED if spec.cpus is None else reader.cpu_milli("cpus"),
        gpu_sevenths=gpu_sevenths,
        memory_bytes=reader.size_or_unlimited_bytes("memory"),
        host_memory_bytes=reader.size_bytes("host_memory"),
        idle_timeout_ns=reader.duration_or_never_ns("idle_timeout"),
        is_elastic=spec.elastic,
        boot_ns=reader.duration_ns("boot_time"),
        usd_per_hour=reader.price("price", units.parse_price_per_hour),
        network_ns=reader.duration_ns("network_delay"),
        bytes_per_s=reader.bytes_per_s("bandwidth"),
    )


def _build_serverless(id: int, name: str, reader: FieldReader[PoolSpec]) -> Pool:
    spec = reader.spec
    if spec.memory == "unlimited":
        raise reader.error("memory", "must be a size in a serverless pool", allowed="2GB, 1769MiB")
    platform = FaasPlatform(
        memory_bytes=reader.size_or_unlimited_bytes("memory"),
        concurrency_max=spec.concurrency,
        burst_concurrency=spec.burst_concurrency,
        burst_refill_per_s=reader.positive_rate_per_s("burst_refill"),
        keep_alive_ns=reader.duration_ns("keep_alive"),
        usd_per_gb_s=reader.price("price", units.parse_price_per_gb_second),
        usd_per_request=reader.price("request_price", units.parse_price_per_request),
        billing_step_ns=reader.positive_ns("billing_step"),
        age_max_ns=reader.duration_or_never_ns("age_max"),
        bills_cold_start=spec.bill_cold_start,
        provisioning_ns=reader.duration_ns("provisioning_time"),
        provisioned_usd_per_gb_s=reader.price("provisioned_price", units.parse_price_per_gb_second),
        provisioned_run_usd_per_gb_s=reader.price(
            "provisioned_run_price", units.parse_price_per_gb_second
        ),
    )
    return Pool(
        id,
        name,
        tier=Tier.SERVERLESS,
        nodes=0,
        gpu_sevenths=0,
        memory_bytes=platform.memory_bytes,
        network_ns=reader.duration_ns("network_delay"),
        bytes_per_s=reader.bytes_per_s("bandwidth"),
        faas=platform,
        breaker=_build_breaker(reader),
    )


def _build_breaker(pool: FieldReader[PoolSpec]) -> BreakerConfig:
    breaker = FieldReader(pool.spec.circuit_breaker, pool.where, pool.path("circuit_breaker"))
    budget = FieldReader(pool.spec.budget, pool.where, pool.path("budget"))
    cooldown_ns = breaker.positive_ns("cooldown")
    cooldown_max_ns = breaker.positive_ns("cooldown_max")
    if cooldown_ns > cooldown_max_ns:
        allowed = f"up to {breaker.spec.cooldown_max}"
        raise breaker.error("cooldown", "is longer than `cooldown_max`", allowed=allowed)
    return BreakerConfig(
        failure_threshold=breaker.spec.failure_threshold,
        cooldown_ns=cooldown_ns,
        cooldown_max_ns=cooldown_max_ns,
        usd_per_minute=_budget_usd(budget, "per_minute"),
        usd_per_day=_budget_usd(budget, "per_day"),
    )


def _budget_usd(reader: FieldReader[BudgetSpec], name: str) -> float:
    if getattr(reader.spec, name) is None:
        return inf
    return reader.price(name, units.parse_dollars)


def _refuse_given(reader: FieldReader[PoolSpec], names: tuple[str, ...], problem: str) -> None:
    defaults = PoolSpec()
    for name in names:
        if getattr(reader.spec, name) != getattr(defaults, name):
            allowed = set(PoolSpec.__struct_fields__) - set(names)
            raise reader.error(name, problem, allowed=", ".join(sorted(allowed)))


def _build_clients(specs: Mapping[str, ClientSpec]) -> tuple[Client, ...]:
    clients = specs or {"client": ClientSpec()}
    return tuple(Client(id, name, spec.weight) for id, (name, spec) in enumerate(clients.items()))


def _build_limits(reader: FieldReader[LimitsSpec]) -> Limits:
    spec = reader.spec
    return Limits(
        attempts_max=spec.attempts_max,
        refusals_max=spec.refusals_max,
        backoff_ns=reader.duration_ns("backoff"),
        timeout_factor=spec.timeout_factor,
        open_requests_max=spec.open_requests_max,
    )


def _read(value: object, name: str, hint: object, where: str, key: str) -> object:
    if name.endswith(_NS) and value is not None:
        value = units.parse_duration(value, where=where, key=key)
    written = normalise(value, where, key)
    try:
        return msgspec.convert(written, hint)
    except msgspec.ValidationError as error:
        check(written, inspect.type_info(hint), where=where, key=key)
        raise ConfigError(str(error), where=where, key=key, value=value) from None
