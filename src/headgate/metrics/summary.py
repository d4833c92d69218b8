"""The numbers that describe one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite, nan
from typing import Final

import numpy as np

from headgate.core.clock import MILLISECOND_NS, NEVER_NS, SECOND_NS
from headgate.core.outcome import OUTCOME_NAMES, Outcome
from headgate.metrics.columns import Int64, RequestColumns, ResourceUse, RunColumns
from headgate.metrics.groups import GroupSummary, group_summaries, latencies_ns, waits_ns
from headgate.metrics.percentile import jain, nearest_rank

_ADMITTED: Final = ("met", "late", "expired", "failed")


@dataclass(frozen=True, slots=True)
class ResourceSummary:
    """What one node, or one serverless pool, did and cost."""

    name: str
    pool: str
    tier: str
    utilisation: float  # busy over up
    up_ms: float
    cold_starts: int
    loads: int
    usage_usd: float
    allocation_usd: float


@dataclass(frozen=True, slots=True)
class Summary:
    """One run in numbers.

    Shares are 0 to 1. A latency or cost with nothing to count is not a number (null in JSON).
    Percentiles are by nearest rank, so each is a latency that some request really had.
    """

    requests: int
    met: int
    late: int
    rejected: int
    expired: int
    failed: int
    cancelled: int
    slo_attainment: float  # MET over everything but CANCELLED; 1 when nothing counts
    admitted_kept: float  # MET over everything admitted and not cancelled; 1 when nothing counts

    window_ms: float
    makespan_ms: float  # from the first arrival until the last request was settled
    goodput_rps: float  # MET answers that finished inside the window, per second of window
    throughput_rps: float  # the same for all answers, in time or late

    mean_ms: float  # latency, from arrival to answer, of the answered requests
    p50_ms: float
    p90_ms: float
    p99_ms: float
    p999_ms: float
    mean_wait_ms: float  # from arrival to first work, of the requests that started
    p99_wait_ms: float

    cold_starts: int
    loads: int
    cold_request_share: float  # of the requests that started
    utilisation: float  # all busy time over all up time

    cost_usage_usd: float  # paying only for what ran
    cost_allocation_usd: float  # paying for what was held, idle or not
    cost_usd: float  # the allocation: idle hardware is not free
    cost_per_1000_met_usd: float

    # Jain's index over the clients' mean pace (see `GroupSummary.pace`): service per time in the
    # system does not depend on how much a client asks for, as attained service would.
    fairness: float

    clients: tuple[GroupSummary, ...]
    pipelines: tuple[GroupSummary, ...]
    resources: tuple[ResourceSummary, ...]

    def to_json(self) -> dict[str, object]:
        """Return plain dicts, lists and numbers; what is not a number becomes null."""
        return {key: _plain(value) for key, value in asdict(self).items()}


def summarise(run: RunColumns) -> Summary:
    """Condense a run. Linear in its rows; needs less extra memory than the columns take."""
    requests, resources = run.requests, run.resources
    counts = dict(zip(OUTCOME_NAMES, count_outcomes(requests), strict=True))
    met, admitted = counts["met"], sum(counts[name] for name in _ADMITTED)
    latency_ns = latencies_ns(requests)
    clients = group_summaries(requests, requests.client, run.clients, latency_ns)
    pipelines = group_summaries(requests, requests.pipeline, run.pipelines, latency_ns)
    mean_ms, p50_ms, p90_ms, p99_ms, p999_ms = _spread_ms(latency_ns, (500, 900, 990, 999))
    mean_wait_ms, p99_wait_ms = _spread_ms(waits_ns(requests), (990,))
    allocation_usd = sum(resource.allocation_usd for resource in resources)
    return Summary(
        requests=len(requests),
        **counts,
        slo_attainment=_share(met, admitted + counts["rejected"], empty=1.0),
        admitted_kept=_share(met, admitted, empty=1.0),
        window_ms=run.window_ns / MILLISECOND_NS,
        makespan_ms=_makespan_ns(requests) / MILLISECOND_NS,
        goodput_rps=_rate_in_window(run, Outcome.MET),
        throughput_rps=_rate_in_window(run, Outcome.LATE),
        mean_ms=mean_ms,
        p50_ms=p50_ms,
        p90_ms=p90_ms,
        p99_ms=p99_ms,
        p999_ms=p999_ms,
        mean_wait_ms=mean_wait_ms,
        p99_wait_ms=p99_wait_ms,
        cold_starts=sum(resource.cold_starts for resource in resources),
        loads=sum(resource.loads for resource in resources),
        cold_request_share=_cold_share(requests),
        utilisation=_utilisation(resources),
        cost_usage_usd=sum(resource.usage_usd for resource in resources),
        cost_allocation_usd=allocation_usd,
        cost_usd=allocation_usd,
        cost_per_1000_met_usd=_share(1000 * allocation_usd, met, empty=nan),
        fairness=jain([row.pace for row in clients if isfinite(row.pace)]),
        clients=clients,
        pipelines=pipelines,
        resources=tuple(_summarise_resource(resource) for resource in resources),
    )


def count_outcomes(requests: RequestColumns) -> tuple[int, ...]:
    """Return how many requests ended in each outcome, in the order of `OUTCOME_NAMES`."""
    # One comparison per outcome reads a byte a row; counting with bincount would widen to int64.
    return tuple(
        int(np.count_nonzero(requests.outcome == outcome)) for outcome in range(len(OUTCOME_NAMES))
    )


def _spread_ms(values_ns: Int64, per_mille: Sequence[int]) -> tuple[float, ...]:
    """Return the mean, then the percentiles. Puts its argument out of order."""
    if not len(values_ns):
        return (nan,) * (1 + len(per_mille))
    mean_ms = float(values_ns.mean()) / MILLISECOND_NS
    ranks_ns = nearest_rank(values_ns, per_mille, overwrite=True)
    return (mean_ms, *(rank_ns / MILLISECOND_NS for rank_ns in ranks_ns))


def _rate_in_window(run: RunColumns, worst_outcome: int) -> float:
    """Return the requests per second that finished in the window, as well as that or better."""
    if run.window_ns <= 0:
        return 0.0
    requests = run.requests
    counted = requests.outcome <= worst_outcome
    counted &= requests.finished_ns < run.window_ns
    return int(np.count_nonzero(counted)) * SECOND_NS / run.window_ns


def _makespan_ns(requests: RequestColumns) -> int:
    if not len(requests):
        return 0
    return int(requests.finished_ns.max()) - int(requests.arrival_ns.min())


def _cold_share(requests: RequestColumns) -> float:
    started = int(np.count_nonzero(requests.started_ns != NEVER_NS))
    return _share(int(np.count_nonzero(requests.cold)), started, empty=0.0)


def _utilisation(resources: Sequence[ResourceUse]) -> float:
    busy_ns = sum(resource.busy_ns for resource in resources)
    return _share(busy_ns, sum(resource.up_ns for resource in resources), empty=0.0)


def _summarise_resource(resource: ResourceUse) -> ResourceSummary:
    return ResourceSummary(
        name=resource.name,
        pool=resource.pool,
        tier=resource.tier,
        utilisation=_utilisation((resource,)),
        up_ms=resource.up_ns / MILLISECOND_NS,
        cold_starts=resource.cold_starts,
        loads=resource.loads,
        usage_usd=resource.usage_usd,
        allocation_usd=resource.allocation_usd,
    )


def _share(part: float, whole: float, *, empty: float) -> float:
    return part / whole if whole else empty


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not isfinite(value):
        return None
    return value
