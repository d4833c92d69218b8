"""Builds the core's records from a decoded application file, and checks how its parts relate.

`build` is the entry point: pools first, then functions (whose variants need pools that can hold
them), then pipelines. `make_config` does the same for the settings of a policy. All numbers (ids)
follow the order of the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any, Final, TypeVar, get_type_hints

import msgspec
from msgspec import Struct, structs

from headgate.config.decoding import Located, read
from headgate.config.options import VariantSource
from headgate.config.quantities import DurationNs, UsdPerGbS, UsdPerHour
from headgate.config.schema import (
    AppSpec,
    BudgetSpec,
    ClientSpec,
    ExecTimeNs,
    FaasTerms,
    FunctionSpec,
    HostSpec,
    PipelineSpec,
    PoolSpec,
    ShapeSpec,
    StageSpec,
    VariantSpec,
)
from headgate.config.source import normalise
from headgate.core import units
from headgate.core.clock import NEVER_NS
from headgate.core.errors import ConfigError, unknown_name_error
from headgate.core.model import (
    COMPUTE_NAMES,
    TIER_NAMES,
    UNLIMITED,
    App,
    BreakerConfig,
    Client,
    FaasPlatform,
    Function,
    Host,
    Limits,
    Pipeline,
    Pool,
    Profile,
    Shape,
    ShapeTimes,
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
_WHOLE_GPU: Final = 7  # sevenths
_NS: Final = "_ns"

_NODES_ONLY: Final = (
    "nodes",
    "slots",
    "queue_max",
    "cpu_milli",
    "gpu_sevenths",
    "compute",
    "cpu_usd_per_hour",
    "gpu_usd_per_hour",
    "host_memory_bytes",
    "idle_timeout_ns",
    "is_elastic",
    "boot_ns",
)
_SERVERLESS_ONLY: Final = (*FaasTerms.__struct_fields__, "circuit_breaker", "budget")

ConfigT = TypeVar("ConfigT", bound=PolicyConfig)


def build(spec: AppSpec, where: str) -> App:
    """Return the core's records; raise `ConfigError` if they are inconsistent."""
    if not spec.functions:
        raise ConfigError("is empty", where=where, key="functions", allowed="at least one")
    pools = _build_pools(
        spec.pools or {"local": PoolSpec(tier="dedicated")}, _build_hosts(spec.hosts), where
    )
    functions = _build_functions(spec.functions, pools, where)
    return App(
        functions=functions,
        pipelines=_build_pipelines(spec, functions, where),
        pools=pools,
        clients=_build_clients(spec.clients),
        limits=Limits(**structs.asdict(spec.limits)),
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
        key = (error.key or "").removesuffix(_NS)
        raise ConfigError(
            error.problem,
            where=where,
            key=f"policy.{key}" if key else "policy",
            value=settings.get(key, error.value),
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
        at = Located(spec, where, f"functions.{name}")
        variants = tuple(
            _build_variant(variants_before + index, variant_name, id, variant, pools, list(specs))
            for index, (variant_name, variant) in enumerate(_variants(name, at))
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
        spec.model, spec.code, spec.options, spec.batch_max, is_measured=spec.exec_time_ns is None
    )


def _is_served(spec: VariantSpec) -> bool:
    return spec.model is not None or spec.code is not None


def _prewarm_nodes(spec: FunctionSpec) -> int:
    if spec.prewarm_nodes is not None:
        return spec.prewarm_nodes
    is_served = any(_is_served(variant) for variant in (spec.variants.values() or (spec,)))
    return UNLIMITED if is_served else 0


def _variants(name: str, at: Located[FunctionSpec]) -> list[tuple[str, Located[VariantSpec]]]:
    """Return the variants and their names. Without `variants` the function is its only variant."""
    spec = at.spec
    if not spec.variants:
        return [(name, at)]
    defaults = VariantSpec()
    for field in VariantSpec.__struct_fields__:
        if getattr(spec, field) != getattr(defaults, field):
            raise at.error(
                field,
                "must be set in each variant instead",
                allowed="variants, idempotent, prewarm_nodes",
            )
    return [
        (f"{name}/{variant}", Located(body, at.where, f"{at.key}.variants.{variant}"))
        for variant, body in spec.variants.items()
    ]


def _build_variant(
    id: int,
    name: str,
    function_id: int,
    at: Located[VariantSpec],
    pools: Sequence[Pool],
    functions: Sequence[str],
) -> Variant:
    spec = at.spec
    if spec.slowdown[0] != 1:
        problem = f"begins with {spec.slowdown[0]:g}, the factor of a batch alone on its node"
        raise at.error("slowdown", problem, allowed="1.0 as the first factor")
    if spec.retire_after_ns < NEVER_NS and spec.unused_after_ns == NEVER_NS:
        problem = "counts from when an instance is no longer in use"
        raise at.error("retire_after_ns", problem, allowed="together with unused_after")
    profile = Profile(
        exec_ns=_exec_ns(at),
        slowdown=spec.slowdown,
        cold_start_ns=spec.cold_start_ns,
        swap_in_ns=spec.swap_in_ns,
        memory_bytes=spec.memory_bytes,
        output_bytes=spec.output_bytes,
        is_estimate=spec.exec_time_estimated,
    )
    shape = _read_shape(at)
    pool_ids = _pool_ids(at, profile, shape, pools)
    shapes = _build_shapes(at, shape, [pools[pool_id] for pool_id in pool_ids])
    return Variant(
        id,
        name,
        function_id,
        pool_ids,
        profile,
        shape,
        spec.concurrency,
        more_shapes=shapes,
        interference=_build_interference(at, functions),
        unused_after_ns=spec.unused_after_ns,
        retire_after_ns=spec.retire_after_ns,
    )


def _build_interference(at: Located[VariantSpec], functions: Sequence[str]) -> tuple[float, ...]:
    """Return the factor beside each function; nothing if none is given."""
    factors = at.spec.interference
    for name in factors:
        if name not in functions:
            key = at.path("interference")
            raise unknown_name_error("function", name, functions, where=at.where, key=key)
    return tuple(factors.get(name, 1.0) for name in functions) if factors else ()


def _build_shapes(
    at: Located[VariantSpec], own: Shape, pools: Sequence[Pool]
) -> tuple[ShapeTimes, ...]:
    """Return the further shapes: each differs from the others and fits one of the pools."""
    known = [own]
    shapes: list[ShapeTimes] = []
    for index, spec in enumerate(at.spec.shapes):
        each = Located(spec, at.where, f"{at.path('shapes')}[{index}]")
        shape = _read_shape(each)
        if shape in known:
            problem = f"repeats the shape of {shape}"
            raise each.error("cpu_milli", problem, allowed="another cpus or gpu_share")
        misfits = [(pool.name, _shape_misfit(pool, shape)) for pool in pools]
        reasons = [(name, *misfit) for name, misfit in misfits if misfit is not None]
        if len(reasons) == len(pools):
            allowed = ", ".join(f"{limit} on {pool}" for pool, _, limit in reasons)
            raise each.error(reasons[0][1], "exceeds every pool", allowed=f"at most {allowed}")
        known.append(shape)
        shapes.append(ShapeTimes(shape, _read_times(each, spec.exec_time_ns)))
    return tuple(shapes)


def _read_shape(at: Located[VariantSpec] | Located[ShapeSpec]) -> Shape:
    if at.spec.gpu_sevenths > _WHOLE_GPU:
        raise at.error("gpu_sevenths", "is more than a whole GPU", allowed="0/7, 1/7, ... 7/7")
    return Shape(at.spec.cpu_milli, at.spec.gpu_sevenths)


def _exec_ns(at: Located[VariantSpec]) -> tuple[int, ...]:
    """Return the execution times of batches of 1, 2, 3, ... items."""
    times = at.spec.exec_time_ns
    if at.spec.model is not None and at.spec.code is not None:
        raise at.error("code", "is given besides `model`", allowed="either model or code")
    if at.spec.code is not None and not all(at.spec.code.partition(":")):
        problem = "does not name a module and what is in it"
        raise at.error("code", problem, allowed="module:name, such as sentiment:Sentiment")
    if times is None and _is_served(at.spec):
        return (UNKNOWN_EXEC_NS,) * at.spec.batch_max
    return _read_times(at, times)


def _read_times(
    at: Located[VariantSpec] | Located[ShapeSpec], times: ExecTimeNs | None
) -> tuple[int, ...]:
    if times is None or times == () or times == {}:
        allowed = "5ms, [5ms, 6ms], {1: 5ms, 8: 20ms}"
        raise at.error("exec_time_ns", "is missing", allowed=allowed)
    if isinstance(times, int):
        return (times,)
    if isinstance(times, tuple):
        return times
    if "1" not in times:
        allowed = "{1: 5ms, 8: 20ms}"
        raise at.error("exec_time_ns", "has no time for a batch of 1", allowed=allowed)
    return interpolated({int(size): time_ns for size, time_ns in times.items()})


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
    at: Located[VariantSpec], profile: Profile, shape: Shape, pools: Sequence[Pool]
) -> tuple[int, ...]:
    """Return the pools that the variant may use and that have the resources for it.

    A pool that `pools` names must have them. Without `pools`, a pool that lacks them is left out.
    """
    is_named = at.spec.pools is not None
    if is_named:
        named = at.some_of("pool", "pools", [pool.name for pool in pools])
        pools = [pool for pool in pools if pool.name in named]
    misfits = [(pool, _misfit(pool, profile, shape)) for pool in pools]
    fitting = tuple(pool.id for pool, misfit in misfits if misfit is None)
    reasons = [(pool.name, *misfit) for pool, misfit in misfits if misfit is not None]
    if not pools:
        allowed = "one or more, or no `pools` at all for every pool"
        raise at.error("pools", "names no pool", allowed=allowed)
    if not fitting or (is_named and reasons):
        allowed = ", ".join(f"{limit} on {pool}" for pool, _, limit in reasons)
        problem = "exceeds a pool under `pools`" if fitting else "exceeds every pool"
        raise at.error(reasons[0][1], problem, allowed=f"at most {allowed}")
    return fitting


def _misfit(pool: Pool, profile: Profile, shape: Shape) -> tuple[str, str] | None:
    """Return the field that exceeds a node of the pool, and the limit with its key."""
    if profile.memory_bytes > pool.memory_bytes:
        return ("memory_bytes", f"memory {units.format_size(pool.memory_bytes)}")
    return _shape_misfit(pool, shape)


def _shape_misfit(pool: Pool, shape: Shape) -> tuple[str, str] | None:
    if shape.gpu_sevenths > pool.gpu_sevenths:
        return ("gpu_sevenths", f"gpu_share {pool.gpu_sevenths}/7")
    if shape.cpu_milli > pool.cpu_milli:
        return ("cpu_milli", f"cpus {pool.cpu_milli / 1000:g}")
    return None


def _build_pipelines(
    spec: AppSpec, functions: Sequence[Function], where: str
) -> tuple[Pipeline, ...]:
    specs = spec.pipelines or {f.name: PipelineSpec(function=f.name) for f in functions}
    default = Slo() if spec.slo is None else Slo(**structs.asdict(spec.slo))
    by_name = {function.name: function for function in functions}
    pipelines: list[Pipeline] = []
    for id, (name, body) in enumerate(specs.items()):
        at = Located(body, where, f"pipelines.{name}")
        slo = default if body.slo is None else Slo(**structs.asdict(body.slo))
        pipelines.append(Pipeline(id, name, _build_stages(at, by_name), slo))
    return tuple(pipelines)


def _build_stages(
    at: Located[PipelineSpec], functions: Mapping[str, Function]
) -> tuple[Stage, ...]:
    spec = at.spec
    if (spec.function is None) == (not spec.stages):
        allowed = "either function or stages"
        problem = "must have exactly one of function and stages"
        raise ConfigError(problem, where=at.where, key=at.key, allowed=allowed)
    if not spec.stages:
        return (Stage(functions[at.one_of("function", "function", functions)]),)
    if len(spec.stages) > _STAGES_MAX:
        problem = f"has {len(spec.stages)} stages"
        raise at.error("stages", problem, allowed=f"at most {_STAGES_MAX}")
    names = _sort_stages(at, spec.stages)
    return tuple(
        _build_stage(
            name,
            Located(spec.stages[name], at.where, f"{at.path('stages')}.{name}"),
            functions,
            names,
        )
        for name in names
    )


def _build_stage(
    name: str, at: Located[StageSpec], functions: Mapping[str, Function], names: list[str]
) -> Stage:
    spec = at.spec
    probability = spec.unsure_probability
    if spec.only_if_unsure and not spec.after:
        raise at.error("only_if_unsure", "needs a stage before it", allowed="a stage with `after`")
    if not spec.only_if_unsure and probability != 1:
        raise at.error(
            "unsure_probability",
            "is set for a stage that always runs",
            allowed="a stage with `only_if_unsure: true`",
        )
    return Stage(
        function=functions[at.one_of("function", "function", functions)],
        after=tuple(names.index(before) for before in at.some_of("stage", "after", names)),
        only_if_unsure=spec.only_if_unsure,
        unsure_probability=probability,
        name=name,
    )


def _sort_stages(at: Located[PipelineSpec], stages: Mapping[str, StageSpec]) -> list[str]:
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
        raise at.error("stages", problem, allowed="no cycles") from None
    names: list[str] = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        names += ready
        sorter.done(*ready)
    return names


def _build_hosts(specs: Mapping[str, HostSpec]) -> dict[str, Host]:
    return {name: Host(id, name, spec.cpu_milli) for id, (name, spec) in enumerate(specs.items())}


def _build_pools(
    specs: Mapping[str, PoolSpec], hosts: Mapping[str, Host], where: str
) -> tuple[Pool, ...]:
    return tuple(
        _build_pool(id, name, Located(spec, where, f"pools.{name}"), hosts)
        for id, (name, spec) in enumerate(specs.items())
    )


def _build_pool(id: int, name: str, at: Located[PoolSpec], hosts: Mapping[str, Host]) -> Pool:
    spec = at.spec
    common = _given(spec, ("memory_bytes", "network_ns", "bytes_per_s"))
    if spec.host is not None:
        if spec.host not in hosts:
            raise unknown_name_error("host", spec.host, hosts, where=at.where, key=at.path("host"))
        common["host"] = hosts[spec.host]
    if spec.tier != "serverless":
        _refuse_given(at, _SERVERLESS_ONLY, "is only for serverless pools")
        defaults = {"gpu_sevenths": 0} if spec.tier == "dedicated" else {}
        nodes = defaults | common | _given(spec, _NODES_ONLY)
        nodes["compute"] = COMPUTE_NAMES.index(spec.compute)
        tier = TIER_NAMES.index(spec.tier)
        return Pool(id, name, tier, usd_per_hour=_price(at, UsdPerHour), **nodes)
    _refuse_given(at, _NODES_ONLY, "is not for serverless pools")
    if spec.memory_bytes == UNLIMITED:
        allowed = "2GB, 1769MiB"
        raise at.error("memory_bytes", "must be a size in a serverless pool", allowed=allowed)
    return Pool(
        id,
        name,
        Tier.SERVERLESS,
        nodes=0,
        gpu_sevenths=0,
        faas=faas_platform(spec, spec.memory_bytes, _price(at, UsdPerGbS)),
        breaker=_build_breaker(at),
        **common,
    )


def _given(spec: Struct, names: Iterable[str]) -> dict[str, Any]:
    """Return the fields of these names that have a value; the core's records have the same."""
    return {name: value for name in names if (value := getattr(spec, name)) is not None}


def _price(at: Located[PoolSpec], kind: Any) -> float:
    """Return the price of a pool. Its unit depends on the tier: `kind` is the quantity."""
    if at.spec.price is None:
        return 0.0
    price = read(at.spec.price, kind, at.where, at.path("price"))
    assert isinstance(price, float)
    return price


def faas_platform(terms: FaasTerms, memory_bytes: int, usd_per_gb_s: float) -> FaasPlatform:
    """Return a platform of a pool or of a price list, at a memory size. No price is 0."""
    given = _given(terms, FaasTerms.__struct_fields__)
    return FaasPlatform(memory_bytes, usd_per_gb_s=usd_per_gb_s, **given)


def _build_breaker(pool: Located[PoolSpec]) -> BreakerConfig:
    breaker, budget = pool.spec.circuit_breaker, pool.spec.budget
    if breaker.cooldown_ns > breaker.cooldown_max_ns:
        allowed = f"up to {units.format_duration(breaker.cooldown_max_ns)}"
        raise Located(breaker, pool.where, pool.path("circuit_breaker")).error(
            "cooldown_ns", "is longer than `cooldown_max`", allowed=allowed
        )
    return BreakerConfig(**structs.asdict(breaker), **_given(budget, BudgetSpec.__struct_fields__))


def _refuse_given(at: Located[PoolSpec], names: tuple[str, ...], problem: str) -> None:
    defaults = PoolSpec()
    for name in names:
        if getattr(at.spec, name) != getattr(defaults, name):
            others = [each for each in PoolSpec.__struct_fields__ if each not in names]
            allowed = sorted(at.path(each).rpartition(".")[2] for each in others)
            raise at.error(name, problem, allowed=", ".join(allowed))


def _build_clients(specs: Mapping[str, ClientSpec]) -> tuple[Client, ...]:
    clients = specs or {"client": ClientSpec()}
    return tuple(
        Client(id, name, spec.weight, spec.priority)
        for id, (name, spec) in enumerate(clients.items())
    )


def _read(value: object, name: str, hint: Any, where: str, key: str) -> object:
    if name.endswith(_NS):
        hint = DurationNs | None if value is None else DurationNs
    return msgspec.convert(read(normalise(value, where, key), hint, where, key), hint)
