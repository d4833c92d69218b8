"""From the application file to the declared records of the core, with every check between."""

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
    BreakerSpec,
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
from headgate.core.clock import NEVER_NS
from headgate.core.errors import ConfigError
from headgate.core.model import (
    PREWARM_ALL_NODES,
    TIER_NAMES,
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

# Functions and their variants, from the application file to the core.


# Taken for granted until a worker has measured it, or where it cannot.
UNKNOWN_EXEC_NS: Final = 10_000_000


def build_functions(
    specs: Mapping[str, FunctionSpec], pools: Sequence[Pool], where: str
) -> tuple[Function, ...]:
    """Return the functions, numbered in the order of the file, as are their variants."""
    functions: list[Function] = []
    variants_before = 0
    for id, (name, spec) in enumerate(specs.items()):
        entry = FieldReader(spec, where, f"functions.{name}")
        variants = tuple(
            _build_variant(variants_before + index, variant_name, id, variant, pools)
            for index, (variant_name, variant) in enumerate(_variants(name, entry))
        )
        warm = _warm(spec)
        functions.append(
            Function(id, name, variants, is_idempotent=spec.idempotent, prewarm_nodes=warm)
        )
        variants_before += len(variants)
    return tuple(functions)


def variant_spec(spec: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the part of a file that speaks of a variant: `function`, or `function/variant`."""
    function, _, variant = name.partition("/")
    found: dict[str, Any] = spec["functions"][function]
    return found["variants"][variant] if variant else found


def find_sources(specs: Mapping[str, FunctionSpec]) -> tuple[VariantSource | None, ...]:
    """Return what there is to serve of each variant, in the order of their ids."""
    variants = [v for spec in specs.values() for v in (spec.variants.values() or (spec,))]
    return tuple(_source(variant) for variant in variants)


def _source(spec: VariantSpec) -> VariantSource | None:
    if not _is_served(spec):
        return None
    return VariantSource(
        spec.model, spec.code, spec.options, spec.batch, is_measured=spec.exec is None
    )


def _is_served(spec: VariantSpec) -> bool:
    return spec.model is not None or spec.code is not None


def _warm(spec: FunctionSpec) -> int:
    if spec.warm is not None:
        return spec.warm
    is_served = any(_is_served(variant) for variant in (spec.variants.values() or (spec,)))
    return PREWARM_ALL_NODES if is_served else 0


def _variants(
    name: str, entry: FieldReader[FunctionSpec]
) -> list[tuple[str, FieldReader[VariantSpec]]]:
    """Return the variants with their names: a function without `variants` is its own only one."""
    spec = entry.spec
    if not spec.variants:
        return [(name, entry)]
    defaults = VariantSpec()
    for field in VariantSpec.__struct_fields__:
        if getattr(spec, field) != getattr(defaults, field):
            raise entry.error(
                field,
                "belongs into each of the variants",
                allowed="variants, idempotent",
            )
    return [
        (f"{name}/{variant}", FieldReader(body, entry.where, f"{entry.key}.variants.{variant}"))
        for variant, body in spec.variants.items()
    ]


def _build_variant(
    id: int,
    name: str,
    function_id: int,
    entry: FieldReader[VariantSpec],
    pools: Sequence[Pool],
) -> Variant:
    spec = entry.spec
    if spec.slowdown[0] != 1:
        problem = f"begins with {spec.slowdown[0]:g} for a batch alone on its node"
        raise entry.error("slowdown", problem, allowed="1.0 there")
    profile = Profile(
        exec_ns=_exec_ns(entry),
        slowdown=spec.slowdown,
        cold_start_ns=entry.duration_ns("start"),
        swap_in_ns=entry.duration_ns("load"),
        memory_bytes=entry.size_bytes("memory"),
        output_bytes=entry.size_bytes("output"),
    )
    shape = Shape(entry.cpu_milli("cpus"), entry.gpu_sevenths("gpu_share"))
    pool_ids = _pool_ids(entry, profile, shape, pools)
    return Variant(id, name, function_id, pool_ids, profile, shape, spec.concurrency)


def _exec_ns(entry: FieldReader[VariantSpec]) -> tuple[int, ...]:
    """Return the time of a batch by its size."""
    written = entry.spec.exec
    if entry.spec.model is not None and entry.spec.code is not None:
        raise entry.error("code", "stands beside `model`", allowed="one of the two")
    if written is None and _is_served(entry.spec):
        return (UNKNOWN_EXEC_NS,) * entry.spec.batch
    if written is None or written == () or written == {}:
        raise entry.error("exec", "is missing", allowed="5ms, [5ms, 6ms], {1: 5ms, 8: 20ms}")
    if isinstance(written, str | int):
        return (_batch_ns(entry, "exec", written),)
    if isinstance(written, tuple):
        return tuple(_batch_ns(entry, f"exec[{i}]", time) for i, time in enumerate(written))
    known = {int(size): _batch_ns(entry, f"exec.{size}", time) for size, time in written.items()}
    if 1 not in known:
        raise entry.error("exec", "has no time for a batch of 1", allowed="{1: 5ms, 8: 20ms}")
    return _interpolated(known)


def _batch_ns(entry: FieldReader[VariantSpec], name: str, time: object) -> int:
    key = entry.path(name)
    time_ns = units.parse_duration(time, where=entry.where, key=key)
    if time_ns == 0:
        raise ConfigError(
            "must be longer than zero", where=entry.where, key=key, value=time, allowed="5ms, 1us"
        )
    return time_ns


def _interpolated(known: Mapping[int, int]) -> tuple[int, ...]:
    """Fill the gaps between known batch sizes linearly.

    >>> _interpolated({1: 50, 4: 80, 6: 80})
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
    entry: FieldReader[VariantSpec],
    profile: Profile,
    shape: Shape,
    pools: Sequence[Pool],
) -> tuple[int, ...]:
    """Return the pools that the variant may use and that can hold it.

    A pool that is named and cannot hold it is a mistake; one that is merely not excluded is not.
    """
    is_named = entry.spec.pools is not None
    if is_named:
        named = entry.some_of("pool", "pools", [pool.name for pool in pools])
        pools = [pool for pool in pools if pool.name in named]
    misfits = [(pool, _misfit(pool, profile, shape)) for pool in pools]
    fitting = tuple(pool.id for pool, misfit in misfits if misfit is None)
    reasons = [(pool.name, *misfit) for pool, misfit in misfits if misfit is not None]
    if not pools:
        allowed = "one or more, or no `pools` at all for every pool"
        raise entry.error("pools", "names no pool", allowed=allowed)
    if not fitting or (is_named and reasons):
        allowed = ", ".join(f"{field} {most} on {pool}" for pool, field, most in reasons)
        problem = "does not fit every pool it names" if fitting else "fits no pool"
        raise entry.error(reasons[0][1], problem, allowed=f"at most {allowed}")
    return fitting


def _misfit(pool: Pool, profile: Profile, shape: Shape) -> tuple[str, str] | None:
    """Return the field that is too large for a node of the pool, and how much would fit."""
    if profile.memory_bytes > pool.memory_bytes:
        return ("memory", units.format_size(pool.memory_bytes))
    if shape.gpu_sevenths > pool.gpu_sevenths:
        return ("gpu_share", f"{pool.gpu_sevenths}/7")
    if shape.cpu_milli > pool.cpu_milli:
        return ("cpus", f"{pool.cpu_milli / 1000:g}")
    return None


# Pipelines and their objectives, from the application file to the core.


_STAGES_MAX: Final = STAGES_MAX - 1


def build_pipelines(
    spec: AppSpec, functions: Sequence[Function], where: str
) -> tuple[Pipeline, ...]:
    """Return the pipelines, numbered in the order of the file."""
    specs = spec.pipelines or {f.name: PipelineSpec(function=f.name) for f in functions}
    default = Slo() if spec.slo is None else _build_slo(FieldReader(spec.slo, where, "slo"))
    by_name = {function.name: function for function in functions}
    pipelines: list[Pipeline] = []
    for id, (name, body) in enumerate(specs.items()):
        entry = FieldReader(body, where, f"pipelines.{name}")
        slo = (
            default
            if body.slo is None
            else _build_slo(FieldReader(body.slo, where, entry.path("slo")))
        )
        pipelines.append(Pipeline(id, name, _build_stages(entry, by_name), slo))
    return tuple(pipelines)


def _build_slo(entry: FieldReader[SloSpec]) -> Slo:
    spec = entry.spec
    quantile = entry.fraction("quantile")
    if not 0 < quantile < 1:
        raise entry.error("quantile", "is a certainty", allowed="above 0% and below 100%")
    return Slo(
        latency_ns=entry.duration_or_never_ns("latency"),
        quantile=quantile,
        rate_tolerance=spec.burst,
        is_hard=spec.gives_up,
    )


def _build_stages(
    entry: FieldReader[PipelineSpec], functions: Mapping[str, Function]
) -> tuple[Stage, ...]:
    spec = entry.spec
    if (spec.function is None) == (not spec.stages):
        allowed = "either function or stages"
        raise ConfigError(
            "must say what to run, once",
            where=entry.where,
            key=entry.key,
            allowed=allowed,
        )
    if not spec.stages:
        return (Stage(functions[entry.one_of("function", "function", functions)]),)
    if len(spec.stages) > _STAGES_MAX:
        problem = f"has {len(spec.stages)} stages"
        raise entry.error("stages", problem, allowed=f"at most {_STAGES_MAX}")
    names = list(spec.stages)
    stages = tuple(
        _build_stage(
            FieldReader(body, entry.where, f"{entry.path('stages')}.{name}"), functions, names
        )
        for name, body in spec.stages.items()
    )
    _refuse_cycle(entry, spec.stages)
    return stages


def _build_stage(
    entry: FieldReader[StageSpec], functions: Mapping[str, Function], names: list[str]
) -> Stage:
    spec = entry.spec
    probability = entry.fraction("unsure_probability")
    if spec.only_if_unsure and not spec.after:
        raise entry.error(
            "only_if_unsure", "there is none before it to be unsure", allowed="a stage with `after`"
        )
    if not spec.only_if_unsure and probability != 1:
        raise entry.error(
            "unsure_probability", "it runs always", allowed="a stage with `only_if_unsure: true`"
        )
    return Stage(
        function=functions[entry.one_of("function", "function", functions)],
        after=tuple(names.index(before) for before in entry.some_of("stage", "after", names)),
        only_if_unsure=spec.only_if_unsure,
        unsure_probability=probability,
    )


def _refuse_cycle(entry: FieldReader[PipelineSpec], stages: Mapping[str, StageSpec]) -> None:
    try:
        TopologicalSorter({name: body.after for name, body in stages.items()}).prepare()
    except CycleError as error:
        problem = f"wait for each other: {' -> '.join(error.args[1])}"
        raise entry.error("stages", problem, allowed="no cycles") from None


# Pools, from the application file to the core.


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
        _build_pool(id, name, FieldReader(spec, where, f"pools.{name}"))
        for id, (name, spec) in enumerate(specs.items())
    )


def _build_pool(id: int, name: str, entry: FieldReader[PoolSpec]) -> Pool:
    choose_provider(entry)  # raises, where that makes no sense
    if entry.spec.tier == "serverless":
        _refuse_given(entry, _NODES_ONLY, "a serverless pool has no nodes")
        return _build_serverless(id, name, entry)
    _refuse_given(entry, _SERVERLESS_ONLY, "is only for serverless pools")
    return _build_nodes(id, name, entry)


def _build_nodes(id: int, name: str, entry: FieldReader[PoolSpec]) -> Pool:
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


def _build_serverless(id: int, name: str, entry: FieldReader[PoolSpec]) -> Pool:
    spec = entry.spec
    if spec.memory == "unlimited":
        raise entry.error("memory", "a serverless pool needs a size here", allowed="2GB, 1769MiB")
    serverless = FaasPlatform(
        memory_bytes=entry.size_or_unlimited_bytes("memory"),
        concurrency_max=spec.concurrency,
        burst_concurrency=spec.burst,
        burst_refill_per_s=entry.positive_rate_per_s("starts_rate"),
        keep_alive_ns=entry.duration_ns("keep_alive"),
        usd_per_gb_s=entry.price("price", units.parse_price_per_gb_second),
        usd_per_request=entry.price("request_price", units.parse_price_per_request),
        billing_step_ns=entry.positive_ns("billing_step"),
        age_max_ns=entry.duration_or_never_ns("max_age"),
        bills_cold_start=spec.bills_start,
        provisioning_ns=entry.duration_ns("provision"),
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
        faas=serverless,
        breaker=_build_guard(FieldReader(spec.guard, entry.where, entry.path("guard"))),
    )


def _build_guard(entry: FieldReader[BreakerSpec]) -> BreakerConfig:
    rest_ns, rest_max_ns = entry.positive_ns("rest"), entry.positive_ns("rest_max")
    if rest_ns > rest_max_ns:
        raise entry.error(
            "rest", "is longer than `rest_max`", allowed=f"up to {entry.spec.rest_max}"
        )
    return BreakerConfig(
        failure_threshold=entry.spec.failures,
        cooldown_ns=rest_ns,
        cooldown_max_ns=rest_max_ns,
        usd_per_minute=_budget_usd(entry, "budget_per_minute"),
        usd_per_day=_budget_usd(entry, "budget_per_day"),
    )


def _budget_usd(entry: FieldReader[BreakerSpec], key: str) -> float:
    if getattr(entry.spec, key) is None:
        return inf
    return entry.price(key, units.parse_dollars)


def _refuse_given(entry: FieldReader[PoolSpec], names: tuple[str, ...], problem: str) -> None:
    defaults = PoolSpec()
    for name in names:
        if getattr(entry.spec, name) != getattr(defaults, name):
            allowed = set(PoolSpec.__struct_fields__) - set(names)
            raise entry.error(name, problem, allowed=", ".join(sorted(allowed)))


def build(spec: AppSpec, where: str) -> App:
    """Return the declared records; raise `ConfigError` if they do not fit together."""
    if not spec.functions:
        raise ConfigError("is empty", where=where, key="functions", allowed="at least one")
    pools = build_pools(spec.pools or {"local": PoolSpec(tier="dedicated")}, where)
    functions = build_functions(spec.functions, pools, where)
    return App(
        functions=functions,
        pipelines=build_pipelines(spec, functions, where),
        pools=pools,
        clients=_build_clients(spec.clients),
        limits=_build_limits(FieldReader(spec.limits, where, "limits")),
    )


def _build_clients(specs: Mapping[str, ClientSpec]) -> tuple[Client, ...]:
    named = specs or {"client": ClientSpec()}
    return tuple(Client(id, name, spec.weight) for id, (name, spec) in enumerate(named.items()))


def _build_limits(entry: FieldReader[LimitsSpec]) -> Limits:
    spec = entry.spec
    return Limits(
        attempts_max=spec.attempts,
        refusals_max=spec.refusals,
        backoff_ns=entry.duration_ns("backoff"),
        timeout_factor=spec.lost_after,
        open_requests_max=spec.open_requests,
    )


# The settings of a policy: from plain data to its frozen configuration.


ConfigT = TypeVar("ConfigT", bound=PolicyConfig)

_NS = "_ns"


def make_config(config_type: type[ConfigT], settings: Mapping[str, object], where: str) -> ConfigT:
    """Make the configuration of a policy of what was written under `policy:`.

    A field `window_ns` is written `window: 5s`. Raises `ConfigError` for an unknown key, a value
    of the wrong type, and whatever the configuration itself refuses with a `ValueError`.
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


def _read(value: object, name: str, hint: object, where: str, key: str) -> object:
    if name.endswith(_NS) and value is not None:
        value = units.parse_duration(value, where=where, key=key)
    written = normalise(value, where, key)
    try:
        return msgspec.convert(written, hint)
    except msgspec.ValidationError as error:
        check(written, inspect.type_info(hint), where=where, key=key)
        raise ConfigError(str(error), where=where, key=key, value=value) from None
