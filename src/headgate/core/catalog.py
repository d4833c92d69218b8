"""A price list: instance types by the hour, and FaaS platforms by the call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from headgate.core.clock import NEVER_NS
from headgate.core.model import UNLIMITED, FaasPlatform

MIB: Final = 1 << 20


@dataclass(frozen=True)
class InstanceType:
    """A machine type that can be rented by the hour."""

    name: str
    cpus: float
    memory_bytes: int
    usd_per_hour: float
    boot_ns: int = 0  # from the order until an instance can be started on it
    network_ns: int = 0  # one way


@dataclass(frozen=True)
class FaasOffering:
    """A FaaS platform in a price list: memory sizes, each with CPU in proportion to its memory."""

    name: str
    terms: FaasPlatform  # prices and limits, at the largest size
    cpu_bytes: int  # the memory size that comes with one CPU
    sizes_bytes: tuple[int, ...]  # the memory sizes on offer, ascending
    network_ns: int = 0  # one way
    timeout_ns: int = NEVER_NS  # limit on one call
    package_bytes: int = UNLIMITED  # limit on the code and its dependencies, unpacked
    image_bytes: int = UNLIMITED  # limit on a container image
    payload_bytes: int = UNLIMITED  # limit on one request or response

    def cpus(self, memory_bytes: int) -> float:
        """CPUs of an instance of this memory size."""
        return memory_bytes / self.cpu_bytes

    def sized(self, memory_bytes: int) -> FaasPlatform:
        """The platform's terms at a memory size."""
        return replace(self.terms, memory_bytes=memory_bytes)
