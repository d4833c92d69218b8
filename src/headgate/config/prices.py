"""Price lists: what machines and functions cost and allow, as dated files with their sources.

Headgate brings a few. A file of the user's replaces them section by section: where it has
`instances`, those are all the kinds of machines there are, and likewise `functions`.
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


class FactSpec(Section, frozen=True):
    """Where some of the numbers come from, and how sure they are."""

    keys: tuple[str, ...]
    confidence: Literal["read", "high", "low", "measured", "assumed"]
    source: str = ""
    note: str = ""


class InstanceSpec(Section, frozen=True):
    """A kind of machine."""

    cpus: Cpus
    memory: Size
    price: Price
    boot: Duration = 0
    network: Duration = 0


class SizesSpec(Section, frozen=True):
    """The memory sizes to choose from."""

    least: Size
    most: Size
    step: Size


class FunctionsSpec(Section, frozen=True):
    """A function platform. What has the name of a key of a serverless pool is the same thing."""

    cpu_memory: Size
    sizes: SizesSpec
    price: Price
    request_price: Price | None = None
    billing_step: Duration = "1ms"
    bills_start: bool = True
    provisioned_price: Price | None = None
    provisioned_run_price: Price | None = None
    provision: Duration = "60s"
    concurrency: Count = 1_000
    burst: Count = 1_000
    starts_rate: str = "100/s"
    keep_alive: Duration = "10min"
    max_age: Duration = "never"
    timeout: Duration = "never"
    package: Size = "unlimited"
    image: Size = "unlimited"
    payload: Size = "unlimited"
    network: Duration = 0


class PricesSpec(Section, frozen=True):
    """A price list."""

    title: str
    as_of: Annotated[str, Meta(title="date", pattern=r"^\d{4}-\d\d-\d\d$", examples=["2025-08-01"])]
    instances: dict[Name, InstanceSpec] = field(default_factory=dict)
    functions: dict[Name, FunctionsSpec] = field(default_factory=dict)
    facts: tuple[FactSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Fact:
    """What some of the numbers of a list rest on."""

    title: str
    as_of: str
    keys: tuple[str, ...]
    confidence: str
    source: str
    note: str


@dataclass(frozen=True, slots=True)
class PriceList:
    """Everything that can be had, and who says so."""

    instances: tuple[InstanceType, ...]
    platforms: tuple[FaasOffering, ...]
    facts: tuple[Fact, ...]
    titles: tuple[str, ...]  # with their dates

    def instances_named(self, names: Sequence[str], where: str) -> tuple[InstanceType, ...]:
        """Return those of these names, in which `*` stands for anything; all if there are none."""
        known = [offer.name for offer in self.instances]
        for name in names:
            if not any(fnmatchcase(each, name) for each in known):
                raise unknown_name_error("instance type", name, known, where=where, key=None)
        return tuple(
            offer
            for offer in self.instances
            if not names or any(fnmatchcase(offer.name, name) for name in names)
        )


def read_prices(paths: Sequence[str] = ()) -> PriceList:
    """Return the prices of these files, and where they have none, those that Headgate brings.

    Raises `ConfigError`. A name that is there twice is of the last file that has it.
    """
    given = [(path, _read(path)) for path in paths]
    own = [(str(path), _read(str(path))) for path in sorted(BUNDLED.glob("*.yaml"))]
    has_instances = any(spec.instances for _, spec in given)
    has_functions = any(spec.functions for _, spec in given)
    used = given + [
        (path, spec)
        for path, spec in own
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
        facts=tuple(_fact(spec, fact) for _, spec in used for fact in spec.facts),
        titles=tuple(f"{spec.title} ({spec.as_of})" for _, spec in used),
    )


def _read(path: str) -> PricesSpec:
    written = normalise(read_yaml(path), path)
    try:
        return msgspec.convert(written, PricesSpec)
    except msgspec.ValidationError as error:
        check(written, inspect.type_info(PricesSpec), where=path, key="")
        raise ConfigError(str(error), where=path) from None


def _fact(spec: PricesSpec, fact: FactSpec) -> Fact:
    return Fact(spec.title, spec.as_of, fact.keys, fact.confidence, fact.source, fact.note)


def _instance(name: str, entry: FieldReader[InstanceSpec]) -> InstanceType:
    if entry.cpu_milli("cpus") == 0:
        raise entry.error("cpus", "must be more than zero", allowed="2, 0.5")
    return InstanceType(
        name=name,
        cpus=entry.spec.cpus,
        memory_bytes=entry.size_or_unlimited_bytes("memory"),
        usd_per_hour=entry.price("price", units.parse_price_per_hour),
        boot_ns=entry.duration_ns("boot"),
        network_ns=entry.duration_ns("network"),
    )


def _platform(name: str, entry: FieldReader[FunctionsSpec]) -> FaasOffering:
    spec = entry.spec
    sizes_bytes = _sizes_bytes(FieldReader(spec.sizes, entry.where, entry.path("sizes")))
    terms = FaasPlatform(
        memory_bytes=sizes_bytes[-1],
        concurrency_max=spec.concurrency,
        burst_concurrency=spec.burst,
        burst_refill_per_s=entry.positive_rate_per_s("starts_rate"),
        keep_alive_ns=entry.duration_ns("keep_alive"),
        age_max_ns=entry.duration_or_never_ns("max_age"),
        usd_per_gb_s=entry.price("price", units.parse_price_per_gb_second),
        usd_per_request=entry.price("request_price", units.parse_price_per_request),
        billing_step_ns=entry.positive_ns("billing_step"),
        bills_cold_start=spec.bills_start,
        provisioning_ns=entry.duration_ns("provision"),
        provisioned_usd_per_gb_s=entry.price("provisioned_price", units.parse_price_per_gb_second),
        provisioned_run_usd_per_gb_s=entry.price(
            "provisioned_run_price", units.parse_price_per_gb_second
        ),
    )
    return FaasOffering(
        name=name,
        terms=terms,
        cpu_bytes=_cpu_bytes(entry),
        sizes_bytes=sizes_bytes,
        network_ns=entry.duration_ns("network"),
        timeout_ns=entry.duration_or_never_ns("timeout"),
        package_bytes=entry.size_or_unlimited_bytes("package"),
        image_bytes=entry.size_or_unlimited_bytes("image"),
        payload_bytes=entry.size_or_unlimited_bytes("payload"),
    )


def _cpu_bytes(entry: FieldReader[FunctionsSpec]) -> int:
    size_bytes = entry.size_bytes("cpu_memory")
    if size_bytes < 2**20:
        raise entry.error("cpu_memory", "is too little for a CPU", allowed="1MiB or more")
    return size_bytes


def _sizes_bytes(entry: FieldReader[SizesSpec]) -> tuple[int, ...]:
    least, most, step = (_whole_mib(entry, name) for name in ("least", "most", "step"))
    if least > most:
        raise entry.error("least", "is more than `most`", allowed=f"up to {entry.spec.most}")
    if (most - least) // step >= _SIZES_MAX:
        raise entry.error("step", "makes too many sizes", allowed=f"up to {_SIZES_MAX:,} of them")
    sizes = range(least, most, step)
    return (*sizes, most)


def _whole_mib(entry: FieldReader[SizesSpec], name: str) -> int:
    """Sizes are told apart, and written down, in MiB."""
    size_bytes = entry.size_bytes(name)
    if size_bytes == 0 or size_bytes % 2**20:
        raise entry.error(name, "is no whole number of MiB", allowed="512MiB, 10GiB")
    return size_bytes
