"""Functions and their variants, from the application file to the core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from headgate.app.entry import Entry
from headgate.app.loaded import Source
from headgate.app.spec import FunctionSpec, VariantSpec
from headgate.core import units
from headgate.core.errors import ConfigError
from headgate.core.model import WARM_EVERYWHERE, Function, Pool, Profile, Shape, Variant

# Taken for granted until a worker has measured it, or where it cannot.
UNKNOWN_EXEC_NS: Final = 10_000_000


def build_functions(
    specs: Mapping[str, FunctionSpec], pools: Sequence[Pool], where: str
) -> tuple[Function, ...]:
    """Return the functions, numbered in the order of the file, as are their variants."""
    functions: list[Function] = []
    variants_before = 0
    for id, (name, spec) in enumerate(specs.items()):
        entry = Entry(spec, where, f"functions.{name}")
        variants = tuple(
            _build_variant(variants_before + index, variant_name, id, variant, pools)
            for index, (variant_name, variant) in enumerate(_variants(name, entry))
        )
        warm = _warm(spec)
        functions.append(Function(id, name, variants, is_idempotent=spec.idempotent, warm=warm))
        variants_before += len(variants)
    return tuple(functions)


def variant_spec(spec: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the part of a file that speaks of a variant: `function`, or `function/variant`."""
    function, _, variant = name.partition("/")
    found: dict[str, Any] = spec["functions"][function]
    return found["variants"][variant] if variant else found


def find_sources(specs: Mapping[str, FunctionSpec]) -> tuple[Source | None, ...]:
    """Return what there is to serve of each variant, in the order of their ids."""
    variants = [v for spec in specs.values() for v in (spec.variants.values() or (spec,))]
    return tuple(_source(variant) for variant in variants)


def _source(spec: VariantSpec) -> Source | None:
    if not _is_served(spec):
        return None
    return Source(spec.model, spec.code, spec.options, spec.batch, is_measured=spec.exec is None)


def _is_served(spec: VariantSpec) -> bool:
    return spec.model is not None or spec.code is not None


def _warm(spec: FunctionSpec) -> int:
    if spec.warm is not None:
        return spec.warm
    is_served = any(_is_served(variant) for variant in (spec.variants.values() or (spec,)))
    return WARM_EVERYWHERE if is_served else 0


def _variants(name: str, entry: Entry[FunctionSpec]) -> list[tuple[str, Entry[VariantSpec]]]:
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
        (f"{name}/{variant}", Entry(body, entry.where, f"{entry.key}.variants.{variant}"))
        for variant, body in spec.variants.items()
    ]


def _build_variant(
    id: int,
    name: str,
    function_id: int,
    entry: Entry[VariantSpec],
    pools: Sequence[Pool],
) -> Variant:
    spec = entry.spec
    if spec.slowdown[0] != 1:
        problem = f"begins with {spec.slowdown[0]:g} for a batch alone on its node"
        raise entry.error("slowdown", problem, allowed="1.0 there")
    profile = Profile(
        exec_ns=_exec_ns(entry),
        slowdown=spec.slowdown,
        start_ns=entry.duration_ns("start"),
        load_ns=entry.duration_ns("load"),
        memory_bytes=entry.size_bytes("memory"),
        output_bytes=entry.size_bytes("output"),
    )
    shape = Shape(entry.cpu_milli("cpus"), entry.gpu_sevenths("gpu_share"))
    pool_ids = _pool_ids(entry, profile, shape, pools)
    return Variant(id, name, function_id, pool_ids, profile, shape, spec.concurrency)


def _exec_ns(entry: Entry[VariantSpec]) -> tuple[int, ...]:
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


def _batch_ns(entry: Entry[VariantSpec], name: str, time: object) -> int:
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
    entry: Entry[VariantSpec],
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
