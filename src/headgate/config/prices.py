"""Price lists: prices and limits of machines and function platforms, in dated files.

Headgate bundles a few. A file of the user's replaces them section by section: if it has
`instances`, those are all the instance types there are; if it has `functions`, all the platforms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Final, Literal

from msgspec import Meta, field, structs

from headgate.config.build import faas_platform
from headgate.config.decoding import Located, decode
from headgate.config.quantities import (
    CpuMilli,
    DurationNs,
    PositiveOrNeverNs,
    SizeBytes,
    SizeOrUnlimitedBytes,
    UsdPerGbS,
    UsdPerHour,
)
from headgate.config.schema import FaasTerms, Name, Section
from headgate.config.source import read_yaml
from headgate.core.clock import NEVER_NS
from headgate.core.errors import unknown_name_error
from headgate.core.model import MIB, UNLIMITED, FaasOffering, InstanceType
from headgate.core.units import format_size

BUNDLED: Final = Path(__file__).parents[1] / "prices"
_SIZES_MAX: Final = 1_000


class ProvenanceSpec(Section, frozen=True):
    """The source of the values of some keys, and how reliable they are."""

    keys: tuple[str, ...]
    confidence: Literal["read", "high", "low", "measured", "assumed"]
    source: str = ""
    note: str = ""


class InstanceSpec(Section, frozen=True):
    """An instance type: a kind of machine rented by the hour."""

    cpu_milli: Annotated[CpuMilli, Meta(gt=0)] = field(name="cpus")
    memory_bytes: SizeOrUnlimitedBytes
    usd_per_hour: UsdPerHour = field(name="price")
    boot_ns: DurationNs = field(default=0, name="boot_time")
    network_ns: DurationNs = field(default=0, name="network_delay")


class SizesSpec(Section, frozen=True):
    """The memory sizes that a function can have."""

    min_bytes: SizeBytes
    max_bytes: SizeBytes
    step_bytes: SizeBytes


class FaasSpec(FaasTerms, frozen=True, kw_only=True):
    """A function platform. Keys named like those of a serverless pool have the same meaning."""

    cpu_memory_bytes: Annotated[SizeBytes, Meta(ge=MIB)]
    sizes: SizesSpec
    usd_per_gb_s: UsdPerGbS = field(name="price")
    # Limits of the platform, for readers of the list: no plan looks at them.
    timeout_max_ns: PositiveOrNeverNs = NEVER_NS
    package_bytes_max: SizeOrUnlimitedBytes = UNLIMITED
    image_bytes_max: SizeOrUnlimitedBytes = UNLIMITED
    payload_bytes_max: SizeOrUnlimitedBytes = UNLIMITED
    network_ns: DurationNs = field(default=0, name="network_delay")


class PricesSpec(Section, frozen=True):
    """A price list."""

    title: str
    as_of: Annotated[str, Meta(title="date", pattern=r"^\d{4}-\d\d-\d\d$", examples=["2025-08-01"])]
    instances: dict[Name, InstanceSpec] = field(default_factory=dict)
    functions: dict[Name, FaasSpec] = field(default_factory=dict)
    provenance: tuple[ProvenanceSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Provenance:
    """The source of the values of some keys of a price list."""

    title: str
    as_of: str
    keys: tuple[str, ...]
    confidence: str
    source: str
    note: str


@dataclass(frozen=True, slots=True)
class PriceList:
    """All instance types and function platforms on offer, with the sources of the numbers."""

    instances: tuple[InstanceType, ...]
    platforms: tuple[FaasOffering, ...]
    provenance: tuple[Provenance, ...]
    titles: tuple[str, ...]  # with their dates

    def instances_named(self, names: Sequence[str], where: str) -> tuple[InstanceType, ...]:
        """Return the instance types that match any name (`*` is a wildcard); without names, all."""
        known = [instance.name for instance in self.instances]
        for name in names:
            if not any(fnmatchcase(each, name) for each in known):
                raise unknown_name_error("instance type", name, known, where=where, key=None)
        return tuple(
            instance
            for instance in self.instances
            if not names or any(fnmatchcase(instance.name, name) for name in names)
        )


def read_prices(paths: Sequence[str] = ()) -> PriceList:
    """Return the prices of these files; the bundled lists fill in the sections that they lack.

    Raises `ConfigError`. Where several files have a name, the last one counts.
    """
    given = [(path, _read(path)) for path in paths]
    bundled = [(str(path), _read(str(path))) for path in sorted(BUNDLED.glob("*.yaml"))]
    has_instances = any(spec.instances for _, spec in given)
    has_functions = any(spec.functions for _, spec in given)
    used = given + [
        (path, spec)
        for path, spec in bundled
        if (spec.instances and not has_instances) or (spec.functions and not has_functions)
    ]
    instances: dict[str, InstanceType] = {}
    platforms: dict[str, FaasOffering] = {}
    for path, spec in used:
        for name, instance in spec.instances.items():
            fields = structs.asdict(instance)
            cpus = fields.pop("cpu_milli") / 1000
            instances[name] = InstanceType(name, cpus, **fields)
        for name, functions in spec.functions.items():
            sizes = Located(functions.sizes, path, f"functions.{name}.sizes")
            platforms[name] = _platform(name, functions, _sizes_bytes(sizes))
    return PriceList(
        instances=tuple(instances.values()),
        platforms=tuple(platforms.values()),
        provenance=tuple(
            Provenance(spec.title, spec.as_of, **structs.asdict(row))
            for _, spec in used
            for row in spec.provenance
        ),
        titles=tuple(f"{spec.title} ({spec.as_of})" for _, spec in used),
    )


def _read(path: str) -> PricesSpec:
    return decode(read_yaml(path), PricesSpec, path)[0]


def _platform(name: str, spec: FaasSpec, sizes_bytes: tuple[int, ...]) -> FaasOffering:
    return FaasOffering(
        name=name,
        terms=faas_platform(spec, sizes_bytes[-1], spec.usd_per_gb_s),
        cpu_bytes=spec.cpu_memory_bytes,
        sizes_bytes=sizes_bytes,
        network_ns=spec.network_ns,
    )


def _sizes_bytes(at: Located[SizesSpec]) -> tuple[int, ...]:
    """Return the sizes, in whole MiB: the unit in which sizes are listed and compared."""
    low, high, step = at.spec.min_bytes, at.spec.max_bytes, at.spec.step_bytes
    for name in SizesSpec.__struct_fields__:
        if getattr(at.spec, name) == 0 or getattr(at.spec, name) % MIB:
            raise at.error(name, "is not a whole number of MiB", allowed="512MiB, 10GiB")
    if low > high:
        raise at.error("min_bytes", "is larger than `max`", allowed=f"up to {format_size(high)}")
    if (high - low) // step >= _SIZES_MAX:
        allowed = f"at most {_SIZES_MAX:,} sizes"
        raise at.error("step_bytes", "makes too many sizes", allowed=allowed)
    return (*range(low, high, step), high)
