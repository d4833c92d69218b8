"""What the platform keeps to. The defaults are what AWS documents, or what was measured on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from headgate.core.errors import ConfigError

CpuMode: TypeAlias = Literal["auto", "cgroup", "affinity", "none"]


@dataclass(frozen=True, slots=True)
class PlatformSettings:
    """Limits, times and prices' quantities of a platform; any of them may be another's.

    Documented by AWS as of November 2026: concurrency, scaling, rates, sizes, retries of events.
    Measured on AWS over three runs of 28 hours in 2020: an instance is gone after some ten idle
    minutes, and after two hours even if it is busy all the time.
    """

    concurrency: int = 1_000  # of the whole account
    unreserved_share_min: float = 0.1  # of it, what reservations must leave to all others
    scaling_burst: int = 1_000  # instances that a function may start at once
    scaling_per_s: float = 100.0  # and how fast it may start more
    requests_per_concurrency: float = 10.0  # per second; 0: as many as there are
    keep_alive_s: float = 600.0
    age_max_s: float = 7_200.0
    init_timeout_s: float = 10.0  # beyond it, starting counts against the function's own timeout
    provisioned_init_timeout_s: float = 900.0
    bills_init: bool = True  # starting is billed like running, but not of provisioned instances
    vcpu_mb: int = 1_769  # memory that comes with one CPU
    memory_mb_max: int = 10_240
    timeout_s_max: int = 900
    sync_payload_bytes: int = 6_291_456
    event_payload_bytes: int = 1_048_576
    zip_bytes: int = 52_428_800
    unzipped_bytes: int = 262_144_000
    event_retry_s: tuple[float, ...] = (60.0, 120.0)  # after an error of the function
    event_throttled_s: tuple[float, float] = (1.0, 300.0)  # after a refusal: first, and longest
    event_age_max_s: float = 21_600.0
    events_max: int = 100_000  # that wait; beyond it they are refused
    records_max: int = 1_000_000  # of the bill that are kept at hand
    cpu: CpuMode = "auto"
    cpus: tuple[int, ...] | None = None  # where instances may run; None: wherever we may
    region: str = "us-east-1"
    account: str = "000000000000"
    inherits: tuple[str, ...] = ("PATH", "LD_LIBRARY_PATH", "TMPDIR")  # variables of ours

    def __post_init__(self) -> None:
        positive = ("concurrency", "keep_alive_s", "age_max_s", "vcpu_mb", "scaling_burst")
        for name in positive:
            if getattr(self, name) <= 0:
                value: object = getattr(self, name)
                raise ConfigError("must be more than zero", where="platform", key=name, value=value)

    def vcpus(self, memory_mb: int) -> float:
        """How many CPUs come with so much memory.

        >>> PlatformSettings().vcpus(1_769)
        1.0
        """
        return memory_mb / self.vcpu_mb

    def arn(self, name: str, qualifier: str | None = None) -> str:
        """How AWS calls a function."""
        suffix = "" if qualifier is None else f":{qualifier}"
        return f"arn:aws:lambda:{self.region}:{self.account}:function:{name}{suffix}"
