"""Price lists: prices and limits of machines and function platforms, in dated files.

Headgate bundles a few. A file of the user's replaces them section by section: if it has
`instances`, those are all the instance types there are; likewise `functions` and platforms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, field, inspect

from headgate.config.errors import FieldReader, check, unknown_name_error
from headgate.config.schema import Count, Cpus, Duration, Name, Price, Section, Size
from headgate.config.source import normalise, read_yaml
from headgate.core import units
from headgate.core.catalog import FaasOffering, InstanceType
from headgate.core.errors import ConfigError
from headgate.core.model import FaasPlatform

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

    cpus: Cpus
    memory: Size
    price: Price
    boot_time: Duration = 0
    network_delay: Duration = 0


class SizesSpec(Section, frozen=True):
    """The memory sizes that a function can have."""

    min: Size
    max: Size
    step: Size


class FaasSpec(Section, frozen=True):
    """A function platform. Keys named like those of a serverless pool have the same meaning."""

    cpu_memory: Size
    sizes: SizesSpec
    price: Price
    request_price: Price | None = None
    billing_step: Duration = "1ms"
    bill_cold_start: bool = True
    provisioned_price: Price | None = None
    provisioned_run_price: Price | None = None
    provisioning_time: Duration = "60s"
    concurrency: Count = 1_000
    burst_concurrency: Count = 1_000
    burst_refill: str = "100/s"
    keep_alive: Duration = "10min"
    age_max: Duration = "never"
    timeout_max: Duration = "never"
    package_max: Size = "unlimited"
    image_max: Size = "unlimited"
    payload_max: Size = "unlimited"
    network_delay: Duration = 0


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
            instances[name] = _instance(name, FieldReader(instance, path, f"instances.{name}"))
        for name, functions in spec.functions.items():
            platforms[name] = _platform(name, FieldReader(functions, path, f"functions.{name}"))
    return PriceList(
        instances=tuple(instances.values()),
        platforms=tuple(platforms.values()),
        provenance=tuple(_provenance(spec, row) for _, spec in used for row in spec.provenance),
        titles=tuple(f"{spec.title} ({spec.as_of})" for _, spec in used),
    )


def _read(path: str) -> PricesSpec:
    written = normalise(read_yaml(path), path)
    try:
        return msgspec.convert(written, PricesSpec)
    except msgspec.ValidationError as error:
        check(written, inspect.type_info(PricesSpec), where=path, key="")
        raise ConfigError(str(error), where=path) from None


def _provenance(spec: PricesSpec, row: ProvenanceSpec) -> Provenance:
    return Provenance(spec.title, spec.as_of, row.keys, row.confidence, row.source, row.note)


def _instance(name: str, reader: FieldReader[InstanceSpec]) -> InstanceType:
    if reader.cpu_milli("cpus") == 0:
        raise reader.error("cpus", "must be more than zero", allowed="2, 0.5")
    return InstanceType(
        name=name,
        cpus=reader.spec.cpus,
        memory_bytes=reader.size_or_unlimited_bytes("memory"),
        usd_per_hour=reader.price("price", units.parse_price_per_hour),
        boot_ns=reader.duration_ns("boot_time"),
        network_ns=reader.duration_ns("network_delay"),
    )


def _platform(name: str, reader: FieldReader[FaasSpec]) -> FaasOffering:
    spec = reader.spec
    sizes_bytes = _sizes_bytes(FieldReader(spec.sizes, reader.where, reader.path("sizes")))
    terms = FaasPlatform(
        memory_bytes=sizes_bytes[-1],
        concurrency_max=spec.concurrency,
        burst_concurrency=spec.burst_concurrency,
        burst_refill_per_s=reader.positive_rate_per_s("burst_refill"),
        keep_alive_ns=reader.duration_ns("keep_alive"),
        age_max_ns=reader.duration_or_never_ns("age_max"),
        usd_per_gb_s=reader.price("price", units.parse_price_per_gb_second),
        usd_per_request=reader.price("request_price", units.parse_price_per_request),
        billing_step_ns=reader.positive_ns("billing_step"),
        bills_cold_start=spec.bill_cold_start,
        provisioning_ns=reader.duration_ns("provisioning_time"),
        provisioned_usd_per_gb_s=reader.price("provisioned_price", units.parse_price_per_gb_second),
        provisioned_run_usd_per_gb_s=reader.price(
            "provisioned_run_price", units.parse_price_per_gb_second
        ),
    )
    return FaasOffering(
        name=name,
        terms=terms,
        cpu_bytes=_cpu_bytes(reader),
        sizes_bytes=sizes_bytes,
        network_ns=reader.duration_ns("network_delay"),
        timeout_ns=reader.duration_or_never_ns("timeout_max"),
        package_bytes=reader.size_or_unlimited_bytes("package_max"),
        image_bytes=reader.size_or_unlimited_bytes("image_max"),
        payload_bytes=reader.size_or_unlimited_bytes("payload_max"),
    )


def _cpu_bytes(reader: FieldReader[FaasSpec]) -> int:
    size_bytes = reader.size_bytes("cpu_memory")
    if size_bytes < 2**20:
        raise reader.error("cpu_memory", "is too small", allowed="1MiB or more")
    return size_bytes


def _sizes_bytes(reader: FieldReader[SizesSpec]) -> tuple[int, ...]:
    low, high, step = (_whole_mib(reader, name) for name in ("min", "max", "step"))
    if low > high:
        raise reader.error("min", "is larger than `max`", allowed=f"up to {reader.spec.max}")
    if (high - low) // step >= _SIZES_MAX:
        raise reader.error("step", "makes too many sizes", allowed=f"at most {_SIZES_MAX:,} sizes")
    return (*range(low, high, step), high)


def _whole_mib(reader: FieldReader[SizesSpec], name: str) -> int:
    """Read a size in whole MiB, the unit in which sizes are listed and compared."""
    size_bytes = reader.size_bytes(name)
    if size_bytes == 0 or size_bytes % 2**20:
        raise reader.error(name, "is not a whole number of MiB", allowed="512MiB, 10GiB")
    return size_bytes
