"""Limits and timings of the emulator. Defaults are documented by AWS, or were measured on AWS."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from headgate.core.errors import ConfigError
from headgate.http.interface import HttpLimits

CpuMode: TypeAlias = Literal["auto", "cgroup", "affinity", "none"]


@dataclass(frozen=True, slots=True)
class PlatformSettings:
    """Limits, timings and billing rules of a platform.

    Documented by AWS as of November 2026: concurrency, scaling, rates, sizes, retries of events.
    Measured on AWS over three runs of 28 hours in 2020: an instance is removed after about ten
    idle minutes, and after two hours even if it is busy all the time.
    """

    concurrency: int = 1_000  # limit of the account
    unreserved_share_min: float = 0.1  # share of `concurrency` that cannot be reserved
    scaling_burst: int = 1_000  # instances that a function may start at once
    scaling_per_s: float = 100.0  # refill rate of `scaling_burst`
    requests_per_concurrency: float = 10.0  # requests/s per unit of concurrency; 0: unlimited
    keep_alive_s: float = 600.0
    age_max_s: float = 7_200.0
    init_timeout_s: float = 10.0  # a longer start counts against the function's own timeout
    provisioned_init_timeout_s: float = 900.0
    is_init_billed: bool = True  # bill cold starts like run time, unless provisioned
    vcpu_mb: int = 1_769  # memory per vCPU
    memory_mb_max: int = 10_240
    timeout_s_max: int = 900
    sync_payload_bytes: int = 6_291_456
    event_payload_bytes: int = 1_048_576
    zip_bytes: int = 52_428_800
    unzipped_bytes: int = 262_144_000
    event_retry_s: tuple[float, ...] = (60.0, 120.0)  # delays of retries after a function error
    event_throttled_s: tuple[float, float] = (1.0, 300.0)  # backoff if throttled: first, maximum
    event_age_max_s: float = 21_600.0
    events_max: int = 100_000  # queued events; more are throttled
    records_max: int = 1_000_000  # billing records kept in memory
    cpu: CpuMode = "auto"
    cpus: tuple[int, ...] | None = None  # CPUs for instances; None: all that this process may use
    region: str = "us-east-1"
    account: str = "000000000000"
    # Limits of HTTP connections. How many connections and how large a body follow from the above.
    http: HttpLimits = field(
        default_factory=lambda: HttpLimits(header_bytes_max=1 << 16, headers_max=256)
    )
    inherited_variables: tuple[str, ...] = ("PATH", "LD_LIBRARY_PATH", "TMPDIR")

    def __post_init__(self) -> None:
        positive = ("concurrency", "keep_alive_s", "age_max_s", "vcpu_mb", "scaling_burst")
        for name in positive:
            if getattr(self, name) <= 0:
                value: object = getattr(self, name)
                raise ConfigError("must be more than zero", where="platform", key=name, value=value)

    def vcpus(self, memory_mb: int) -> float:
        """Return the number of CPUs that come with an amount of memory.

        >>> PlatformSettings().vcpus(1_769)
        1.0
        """
        return memory_mb / self.vcpu_mb

    def arn(self, name: str, qualifier: str | None = None) -> str:
        """Return the ARN of a function, with a qualifier if given."""
        suffix = "" if qualifier is None else f":{qualifier}"
        return f"arn:aws:lambda:{self.region}:{self.account}:function:{name}{suffix}"
