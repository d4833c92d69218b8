"""The world of the hybrid experiments: a recommender, instances that can be rented, and functions.

Response times are those of the surrogate for the hybrid paper's figure 2: `c` requests at once on
`n` cores each take c x (16 + 40 / min(n, 4)) ms. Everything that computes is then made ten times as
heavy, the objective with it: the same number of instances is needed for a tenth of the requests, so
that an hour is simulated in a second. Boot, cold start, keep-alive and network are not stretched.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Final

from headgate.core.clock import HOUR_NS, MILLISECOND_NS, MINUTE_NS, SECOND_NS
from headgate.core.model import (
    App,
    Client,
    Function,
    Pipeline,
    Pool,
    Profile,
    Serverless,
    Slo,
    Stage,
    Tier,
    Variant,
)

HEAVINESS: Final = 10
INSTANCES_MAX: Final = 16
_FUNCTION_CORES: Final = 4


@dataclass(frozen=True, slots=True)
class World:
    """An instance type with the objective that the paper sets on it."""

    name: str
    cores: int
    usd_per_hour: float
    slo_ms: float
    at_once: int  # the most requests that an instance holds within the objective
    boot_ns: int = 180 * SECOND_NS
    start_ns: int = 2_500 * MILLISECOND_NS  # of an instance after its boot, and of a function

    @property
    def exec_ns(self) -> int:
        """Time of a lone request on an instance."""
        return lone_ns(self.cores)

    @property
    def slo_ns(self) -> int:
        """The objective."""
        return round(self.slo_ms * HEAVINESS * MILLISECOND_NS)

    @property
    def capacity_per_s(self) -> float:
        """Requests per second of one instance that is never idle: sharing it costs nothing."""
        return SECOND_NS / self.exec_ns

    @property
    def usd_per_request(self) -> float:
        """What a request costs on an instance that is never idle."""
        return self.usd_per_hour / HOUR_NS * self.exec_ns

    @property
    def usd_per_call(self) -> float:
        """What a request costs on a function that is warm."""
        return LAMBDA.usd(lone_ns(_FUNCTION_CORES))

    def instances_for(self, rate_per_s: float) -> int:
        """How many instances a rate keeps busy, rounded up; at least one."""
        return max(1, ceil(rate_per_s / self.capacity_per_s))


# AWS Lambda, 6656 MB: 4 cores. Prices of x86 in USD, as published in 2024.
LAMBDA: Final = Serverless(
    memory_bytes=6656 << 20,
    concurrency_max=1_000,
    burst=1_000,
    starts_per_s=100.0,
    keep_alive_ns=10 * MINUTE_NS,
    age_max_ns=2 * HOUR_NS,
    usd_per_gb_s=1.66667e-5,
    usd_per_request=2e-7,
    bills_start=True,
    provision_ns=60 * SECOND_NS,
    provisioned_usd_per_gb_s=4.1667e-6,
    provisioned_run_usd_per_gb_s=9.7222e-6,
)


def lone_ns(cores: int) -> int:
    """Time of a lone request.

    >>> lone_ns(2) // MILLISECOND_NS, lone_ns(4) // MILLISECOND_NS, lone_ns(8) // MILLISECOND_NS
    (360, 260, 260)
    """
    return round((16 + 40 / min(cores, 4)) * HEAVINESS * MILLISECOND_NS)


SMALL: Final = World("ml.c5.large", cores=2, usd_per_hour=0.10, slo_ms=200, at_once=5)
# With the larger instance there is nothing to decide: a warm function costs what a request costs
# on an instance that is never idle.
LARGE: Final = World("ml.c5.2xlarge", cores=8, usd_per_hour=0.41, slo_ms=150, at_once=5)


def build_app(world: World, warm: int) -> App:
    """Return the application; `warm` instances are there when it begins."""
    dedicated = Pool(
        0,
        "instance",
        Tier.DEDICATED,
        nodes=INSTANCES_MAX,
        slots=world.at_once,
        is_elastic=True,
        boot_ns=world.boot_ns,
        usd_per_hour=world.usd_per_hour,
    )
    functions = Pool(
        1, "lambda", Tier.SERVERLESS, nodes=0, network_ns=5 * MILLISECOND_NS, serverless=LAMBDA
    )
    shared = tuple(float(c) for c in range(1, world.at_once + 1))
    on_instance = Profile((world.exec_ns,), slowdown=shared, start_ns=world.start_ns)
    as_function = Profile((lone_ns(_FUNCTION_CORES),), start_ns=world.start_ns)
    recommend = Function(
        0,
        "recommend",
        (
            Variant(0, "instance", 0, (0,), on_instance, concurrency=world.at_once),
            Variant(1, "lambda", 0, (1,), as_function),
        ),
        warm=warm,
    )
    slo = Slo(world.slo_ns, quantile=0.99)
    pipeline = Pipeline(0, "recommend", (Stage(recommend),), slo)
    return App((recommend,), (pipeline,), (dedicated, functions), (Client(0, "client"),))
