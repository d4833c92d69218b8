"""Sizing: the concurrency threshold of an instance type, and the memory size of a function.

The rule of the hybrid-serving paper (Chahal et al., HiPS 2021): measure response times over cores
and concurrency in advance; the threshold of a machine is the largest concurrency within the
objective, and a function gets the smallest memory size beyond which more cores do not help.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Final

from headgate.core.clock import MILLISECOND_NS
from headgate.core.model import FaasOffering, InstanceType
from headgate.planning.capacity.latency_model import Characterisation

TOLERANCE: Final = 0.05  # a time within 5 % of the best counts as the best


@dataclass(frozen=True, slots=True)
class InstanceCapacity:
    """What an instance type can do for one function under one objective."""

    instance_type: InstanceType
    threshold: int  # largest concurrency within the objective; 0: not even 1
    is_lower_bound: bool  # the largest measured concurrency is within the objective
    is_extrapolated: bool  # its core count is outside the measured range
    isolated_ms: float  # latency of one request, with network, at the objective's quantile
    times_ms: tuple[float, ...]  # mean time without network, at concurrency 1 .. threshold
    within: tuple[float, ...]  # share of requests within the objective, likewise

    @property
    def rate_per_s(self) -> float:
        """Throughput at the threshold."""
        return self.threshold / self.times_ms[-1] * 1e3 if self.threshold else 0.0


@dataclass(frozen=True, slots=True)
class SizeRow:
    """What a memory size of a FaaS platform can do for one function under one objective."""

    memory_bytes: int
    cpus: float
    is_extrapolated: bool  # its core count is outside the measured range
    time_ms: float  # latency of one request, with network, at the objective's quantile
    run_ms: float  # mean time without network: the billed time
    round_trip_ms: float  # mean time with network
    usd_per_call: float
    usd_per_s: float  # while a call runs
    within: float  # share of warm calls within the objective
    is_within_slo: bool
    has_enough_memory: bool  # what the function needs in memory


def largest_concurrency(
    measured: Characterisation,
    cores: float,
    slo_ms: float,
    quantile: float = 0.99,
    overhead_ms: float = 0.0,
) -> int:
    """Return the largest concurrency within the objective at its quantile; 0 if not even 1.

    Never more than the largest measured concurrency.

    >>> paper = Characterisation.surrogate()
    >>> largest_concurrency(paper, 2, 200), largest_concurrency(paper, 8, 150)
    (5, 5)
    """
    allowed_ms = slo_ms - overhead_ms
    for concurrency in range(1, measured.concurrencies[-1] + 1):
        if measured.time_ms(cores, concurrency, 1, quantile) > allowed_ms:
            return concurrency - 1
    return measured.concurrencies[-1]


def knee_cores(measured: Characterisation) -> float:
    """Return the smallest measured core count within `TOLERANCE` of the best isolated latency.

    >>> knee_cores(Characterisation.surrogate())
    4.0
    """
    times_ms = {cores: measured.time_ms(cores, 1) for cores in measured.cores}
    enough_ms = (1.0 + TOLERANCE) * min(times_ms.values())
    return float(next(cores for cores, time_ms in times_ms.items() if time_ms <= enough_ms))


def instance_capacity(
    measured: Characterisation, instance_type: InstanceType, slo_ms: float, quantile: float
) -> InstanceCapacity:
    """Return the capacity of an instance type for the function."""
    overhead_ms = 2 * instance_type.network_ns / MILLISECOND_NS
    cores = instance_type.cpus
    has_room = (measured.peak_memory_bytes or 0) <= instance_type.memory_bytes
    most = largest_concurrency(measured, cores, slo_ms, quantile, overhead_ms) if has_room else 0
    concurrencies = range(1, most + 1)
    return InstanceCapacity(
        instance_type=instance_type,
        threshold=most,
        is_lower_bound=most == measured.concurrencies[-1],
        is_extrapolated=_is_extrapolated(measured, cores),
        isolated_ms=measured.time_ms(cores, 1, 1, quantile) + overhead_ms,
        times_ms=tuple(_mean_ms(measured, cores, c) for c in concurrencies),
        within=tuple(
            _share_within(measured, cores, c, slo_ms - overhead_ms, quantile) for c in concurrencies
        ),
    )


def faas_sizes(
    measured: Characterisation, platform: FaasOffering, slo_ms: float, quantile: float = 0.99
) -> list[SizeRow]:
    """Return a row per memory size of the platform, smallest first."""
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
                is_extrapolated=_is_extrapolated(measured, cpus),
                time_ms=time_ms,
                run_ms=run_ms,
                round_trip_ms=run_ms + overhead_ms,
                usd_per_call=terms.usd(round(run_ms * MILLISECOND_NS)),
                usd_per_s=terms.gigabytes * terms.usd_per_gb_s,
                within=_share_within(measured, cpus, 1, slo_ms - overhead_ms, quantile),
                is_within_slo=time_ms <= slo_ms,
                has_enough_memory=(measured.peak_memory_bytes or 0) <= memory_bytes,
            )
        )
    return rows


def knee_size(rows: Sequence[SizeRow]) -> SizeRow | None:
    """Return the memory size at the knee of latency; None if no size meets the objective.

    That is the smallest size within `TOLERANCE` of the fastest, among the sizes that meet the
    objective and fit the function.
    """
    usable = [row for row in rows if row.is_within_slo and row.has_enough_memory]
    if not usable:
        return None
    enough_ms = (1.0 + TOLERANCE) * min(row.run_ms for row in usable)
    return next(row for row in usable if row.run_ms <= enough_ms)


def cheapest_size(rows: Sequence[SizeRow]) -> SizeRow | None:
    """Return the size with the cheapest call that meets the objective; the faster of equals.

    None if no size meets the objective.
    """
    usable = [row for row in rows if row.is_within_slo and row.has_enough_memory]
    return min(usable, key=lambda row: (row.usd_per_call, row.time_ms), default=None)


def _is_extrapolated(measured: Characterisation, cores: float) -> bool:
    return not measured.cores[0] <= cores <= measured.cores[-1]


def _mean_ms(measured: Characterisation, cores: float, concurrency: int) -> float:
    """Mean time: the median times the ratio of mean to median at the nearest measured point."""
    point = min(
        (point for point in measured.points if point.batch == 1),
        key=lambda p: (abs(log(p.cores / cores)), abs(p.concurrency - concurrency)),
        default=measured.points[0],
    )
    return measured.time_ms(cores, concurrency) * point.mean_ms / point.p50_ms


def _share_within(
    measured: Characterisation, cores: float, concurrency: int, allowed_ms: float, quantile: float
) -> float:
    """Share of requests within `allowed_ms`: the largest quantile tried that is within it."""
    tried = sorted({*_QUANTILES, quantile})
    within = [q for q in tried if measured.time_ms(cores, concurrency, 1, q) <= allowed_ms]
    if not within:
        return 0.0
    return 1.0 if within[-1] == tried[-1] else within[-1]


# A profile has no information beyond the last of these: then all requests count as within.
_QUANTILES: Final = (0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
