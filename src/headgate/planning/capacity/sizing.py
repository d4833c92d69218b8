"""How much one place can hold: requests at once on a machine, and which size a function needs.

The rule of the hybrid-serving paper (Chahal et al., HiPS 2021): measure response times over cores
and concurrency in advance; a machine takes as many requests at once as stay within the objective,
and a function gets the smallest size after which more cores no longer help.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Final

from headgate.core.catalog import FaasOffering, InstanceType
from headgate.core.clock import MILLISECOND_NS
from headgate.planning.latency_model import Characterisation

TOLERANCE: Final = 0.05  # so much slower than the best is as good as the best


@dataclass(frozen=True, slots=True)
class InstanceCapacity:
    """An instance type, for one function under one objective."""

    offer: InstanceType
    threshold: int  # requests at once within the objective; 0: not even one
    is_at_least: bool  # as many as were ever measured are within it
    is_told: bool  # so many cores were not measured: the surface tells
    alone_ms: float  # of one request, network included, at the objective's quantile
    times_ms: tuple[float, ...]  # mean, without network, of 1, 2, ... threshold at once
    within: tuple[float, ...]  # share of requests within the objective, likewise

    @property
    def rate_per_s(self) -> float:
        """Requests per second with `threshold` of them at once."""
        return self.threshold / self.times_ms[-1] * 1e3 if self.threshold else 0.0


@dataclass(frozen=True, slots=True)
class SizeRow:
    """A memory size of a function platform, for one function under one objective."""

    memory_bytes: int
    cpus: float
    is_told: bool  # so many cores were not measured
    time_ms: float  # of a lone request, network included, at the objective's quantile
    run_ms: float  # mean, without network: what is billed
    trip_ms: float  # mean, network included
    usd_per_call: float
    usd_per_s: float  # while it runs
    within: float  # share of warm calls within the objective
    meets: bool
    fits: bool  # what the function needs in memory


def largest_concurrency(
    measured: Characterisation,
    cores: float,
    slo_ms: float,
    quantile: float = 0.99,
    overhead_ms: float = 0.0,
) -> int:
    """Return how many requests at once stay within the objective at its quantile; 0: not one.

    No more than were ever measured at once.

    >>> paper = Characterisation.surrogate()
    >>> largest_concurrency(paper, 2, 200), largest_concurrency(paper, 8, 150)
    (5, 5)
    """
    allowed_ms = slo_ms - overhead_ms
    for concurrency in range(1, measured.concurrencies[-1] + 1):
        if measured.time_ms(cores, concurrency, 1, quantile) > allowed_ms:
            return concurrency - 1
    return measured.concurrencies[-1]


def knee_cores(measured: Characterisation, tolerance: float = TOLERANCE) -> float:
    """Return the fewest measured cores that a lone request is about as fast on as on any.

    >>> knee_cores(Characterisation.surrogate())
    4.0
    """
    times_ms = {cores: measured.time_ms(cores, 1) for cores in measured.cores}
    enough_ms = (1.0 + tolerance) * min(times_ms.values())
    return float(next(cores for cores, time_ms in times_ms.items() if time_ms <= enough_ms))


def site(
    measured: Characterisation, offer: InstanceType, slo_ms: float, quantile: float
) -> InstanceCapacity:
    """Return what an instance type can do for the function."""
    overhead_ms = 2 * offer.network_ns / MILLISECOND_NS
    cores = offer.cpus
    has_room = (measured.peak_memory_bytes or 0) <= offer.memory_bytes
    most = largest_concurrency(measured, cores, slo_ms, quantile, overhead_ms) if has_room else 0
    company = range(1, most + 1)
    return InstanceCapacity(
        offer=offer,
        threshold=most,
        is_at_least=most == measured.concurrencies[-1],
        is_told=_is_told(measured, cores),
        alone_ms=measured.time_ms(cores, 1, 1, quantile) + overhead_ms,
        times_ms=tuple(_mean_ms(measured, cores, c) for c in company),
        within=tuple(
            _share_within(measured, cores, c, slo_ms - overhead_ms, quantile) for c in company
        ),
    )


def function_sizes(
    measured: Characterisation, platform: FaasOffering, slo_ms: float, quantile: float = 0.99
) -> list[SizeRow]:
    """Return what each size of the platform would do, smallest first."""
    overhead_ms = 2 * platform.network_ns / MILLISECOND_NS
    rows = []
    for memory_bytes in platform.sizes_bytes:
        terms, cpus = platform.sized(memory_bytes), platform.cpus(memory_bytes)
        time_ms = measured.time_ms(cpus, 1, 1, quantile) + overhead_ms
        run_ms = _mean_ms(measured, cpus, 1)
        rows.append(
            SizeRow(
                memory_bytes=memory_bytes,
                cpus=cpus,
                is_told=_is_told(measured, cpus),
                time_ms=time_ms,
                run_ms=run_ms,
                trip_ms=run_ms + overhead_ms,
                usd_per_call=terms.usd(round(run_ms * MILLISECOND_NS)),
                usd_per_s=terms.gigabytes * terms.usd_per_gb_s,
                within=_share_within(measured, cpus, 1, slo_ms - overhead_ms, quantile),
                meets=time_ms <= slo_ms,
                fits=(measured.peak_memory_bytes or 0) <= memory_bytes,
            )
        )
    return rows


def knee_size(rows: Sequence[SizeRow], tolerance: float = TOLERANCE) -> SizeRow | None:
    """Return the smallest size after which more memory no longer pays; None if none will do.

    That is the smallest that is about as fast as any, or, where that is too slow, the smallest
    that meets the objective.
    """
    usable = [row for row in rows if row.meets and row.fits]
    if not usable:
        return None
    enough_ms = (1.0 + tolerance) * min(row.run_ms for row in usable)
    return next(row for row in usable if row.run_ms <= enough_ms)


def cheapest_size(rows: Sequence[SizeRow]) -> SizeRow | None:
    """Return the size that meets the objective at the lowest price of a call; the faster of equals.

    None if none will do.
    """
    usable = [row for row in rows if row.meets and row.fits]
    return min(usable, key=lambda row: (row.usd_per_call, row.time_ms), default=None)


def _is_told(measured: Characterisation, cores: float) -> bool:
    return not measured.cores[0] <= cores <= measured.cores[-1]


def _mean_ms(measured: Characterisation, cores: float, concurrency: int) -> float:
    """The median times how much the mean is above it at the point that is nearest."""
    point = min(
        (point for point in measured.points if point.batch == 1),
        key=lambda p: (abs(log(p.cores / cores)), abs(p.concurrency - concurrency)),
        default=measured.points[0],
    )
    return measured.time_ms(cores, concurrency) * point.mean_ms / point.p50_ms


def _share_within(
    measured: Characterisation, cores: float, concurrency: int, allowed_ms: float, quantile: float
) -> float:
    """The share of requests that take no longer: the largest quantile tried that does not."""
    tried = sorted({*_QUANTILES, quantile})
    within = [q for q in tried if measured.time_ms(cores, concurrency, 1, q) <= allowed_ms]
    if not within:
        return 0.0
    return 1.0 if within[-1] == tried[-1] else within[-1]


# Beyond the last of these a profile cannot tell, and all are taken to be within.
_QUANTILES: Final = (0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
