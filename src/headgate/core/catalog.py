"""What is for sale: kinds of machines by the hour, and functions by the call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from headgate.core.clock import NEVER_NS
from headgate.core.model import FaasPlatform

MIB: Final = 1 << 20


@dataclass(frozen=True)
class InstanceType:
    """A machine that can be rented."""

    name: str
    cpus: float
    memory_bytes: int
    usd_per_hour: float
    boot_ns: int = 0  # from the order until it can start something
    network_ns: int = 0  # one way


@dataclass(frozen=True)
class FaasOffering:
    """Where functions run, in memory sizes that CPU comes in proportion to."""

    name: str
    terms: FaasPlatform  # prices and limits, at the largest size
    cpu_bytes: int  # the memory that comes with one CPU
    sizes_bytes: tuple[int, ...]  # to choose from, rising
    network_ns: int = 0  # one way
    timeout_ns: int = NEVER_NS  # of one call
    package_bytes: int = NEVER_NS  # of the code and all it brings, unpacked
    image_bytes: int = NEVER_NS  # of a container image
    payload_bytes: int = NEVER_NS  # of one request or answer

    def cpus(self, memory_bytes: int) -> float:
        """How much CPU comes with so much memory."""
        return memory_bytes / self.cpu_bytes

    def sized(self, memory_bytes: int) -> FaasPlatform:
        """The terms at a size."""
        return replace(self.terms, memory_bytes=memory_bytes)
