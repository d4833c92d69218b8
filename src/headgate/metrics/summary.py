"""The summary of a run: outcomes, latencies, costs and fairness, in total and by group.

Percentiles are by nearest rank, on integers: percentile p of n values is the ceil(p n / 100)-th
smallest of them, so that it is always a value that was observed, never an interpolation. Ranks are
computed from whole per mille, because `ceil(0.07 * 100)` is 8 in floating point.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite, nan
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headgate.core.clock import MILLISECOND_NS, NEVER_NS, SECOND_NS
from headgate.core.states import OUTCOME_NAMES, Outcome
from headgate.metrics.columns import Int32, Int64, RequestColumns, ResourceUse, RunColumns
from headgate.metrics.format import json_value

_ADMITTED: Final = ("met", "late", "expired", "failed")
_CHUNK_ROWS = 1 << 16  # temporaries of a chunk fit into the cache: faster, and little memory


def nearest_rank(
    values: Int64, per_mille: Sequence[int], *, overwrite: bool = False
) -> tuple[int, ...]:
    """Return one observed value per entry of `per_mille` (990 is the 99th percentile).

    `values` must not be empty. With `overwrite` it is reordered in place, which saves a copy of
    ten million rows. Linear time.

    >>> nearest_rank(np.array([40, 10, 30, 20]), [500, 990])
    (20, 40)
    """
    assert len(values) > 0, "a percentile of nothing"
    assert all(0 < share <= 1000 for share in per_mille), per_mille
    ranks = [(len(values) * share + 999) // 1000 - 1 for share in per_mille]
    ordered = values if overwrite else values.copy()
    ordered.partition(sorted(set(ranks)))
    return tuple(int(ordered[rank]) for rank in ranks)


def jain(values: Sequence[float]) -> float:
    """Return Jain's fairness index of `values`, none of them negative: from 1/n to 1.

    1 means that all are equal, 1/n that one has everything. No values, or zeros alone, count as
    equal: 1. (Jain, Chiu, Hawe: A Quantitative Measure of Fairness, 1984.)

    >>> jain([2.0, 2.0]), jain([1.0, 0.0])
    (1.0, 0.5)
    """
    shares = np.asarray(values, dtype=np.float64)
    assert not (shares < 0).any(), "shares cannot be negative"
    largest = float(shares.max(initial=0.0))
    if largest == 0.0:
        return 1.0
    shares = shares / largest  # so that squares neither overflow nor vanish
    return min(1.0, float(shares.sum() ** 2 / (len(shares) * (shares * shares).sum())))


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """The summary of one client or of one pipeline. NaN where there was nothing to count."""

    name: str
    requests: int
    met: int
    slo_attainment: float  # MET over everything but CANCELLED
    admitted: int  # not REJECTED and not CANCELLED
    admitted_kept: float  # MET over `admitted`
    would_reject: int  # rejected by the policy while admission was only observed
    mean_wait_ms: float  # of the requests that started
    p99_ms: float  # latency of the answered requests
    service_share: float  # this group's part of all time between start and finish
    # Mean of service / latency: the reciprocal of the slowdown, and 0 for a request that was
    # never answered, so that starving a group cannot look like serving it well.
    pace: float
    admission_margin: float | None = None  # the policy's own at the end, if this is a pipeline


def group_summaries(
    requests: RequestColumns, group: Int32, names: tuple[str, ...], latency_ns: Int64
) -> tuple[GroupSummary, ...]:
    """Return one summary per name; `group` holds, per request, an index into `names`.

    `latency_ns` is `latencies_ns(requests)`: computed once, used for several groupings.
    """
    if not names:
        return ()
    sums = _sum_by_group(requests, group, len(names))
    answered = requests.outcome <= Outcome.LATE
    parts = split_by_group(latency_ns, group[answered], len(names))
    service_total_ns = sums.service_ns.sum()
    return tuple(
        GroupSummary(
            name=name,
            requests=int(sums.requests[i]),
            met=int(sums.met[i]),
            slo_attainment=_share(sums.met[i], sums.counted[i], empty=nan),
            admitted=int(sums.admitted[i]),
            admitted_kept=_share(sums.met[i], sums.admitted[i], empty=nan),
            would_reject=int(sums.would_reject[i]),
            mean_wait_ms=_share(sums.wait_ns[i] / MILLISECOND_NS, sums.started[i], empty=nan),
            p99_ms=_p99_ms(parts[i]),
            service_share=_share(sums.service_ns[i], service_total_ns, empty=0.0),
            pace=_share(sums.pace[i], sums.counted[i], empty=nan),
        )
        for i, name in enumerate(names)
    )


def latencies_ns(requests: RequestColumns) -> Int64:
    """Return the latencies of the answered requests, in order of request id: a fresh array."""
    answered = requests.outcome <= Outcome.LATE
    return _differences(requests.finished_ns, requests.arrival_ns, answered)


def waits_ns(requests: RequestColumns) -> Int64:
    """Return the waits of the requests that started, in order of request id: a fresh array."""
    started = requests.started_ns != NEVER_NS
    return _differences(requests.started_ns, requests.arrival_ns, started)


def split_by_group(values: Int64, group: Int32, n: int) -> list[Int64]:
    """Return the values of group 0, of group 1, ... of group n - 1, each in the given order."""
    if n == 1:
        return [values]
    # numpy sorts 16-bit keys by radix, several times faster than wider ones.
    key = group.astype(np.uint16) if n <= 1 << 16 else group
    order = np.argsort(key, kind="stable")
    return np.split(values[order], np.cumsum(np.bincount(group, minlength=n))[:-1])


@dataclass(slots=True)
class _Sums:
    """Sums per group."""

    requests: NDArray[np.float64]
    counted: NDArray[np.float64]  # all except the cancelled requests
    admitted: NDArray[np.float64]
    met: NDArray[np.float64]
    would_reject: NDArray[np.float64]
    started: NDArray[np.float64]
    wait_ns: NDArray[np.float64]
    service_ns: NDArray[np.float64]
    pace: NDArray[np.float64]


def _sum_by_group(requests: RequestColumns, group: Int32, n: int) -> _Sums:
    sums = _Sums(*(np.zeros(n) for _ in range(9)))
    for rows in _chunks(len(requests)):
        outcome, key = requests.outcome[rows], group[rows]
        arrival_ns, finished_ns = requests.arrival_ns[rows], requests.finished_ns[rows]
        started = requests.started_ns[rows] != NEVER_NS
        started_ns = np.where(started, requests.started_ns[rows], finished_ns)
        service_ns = finished_ns - started_ns
        latency_ns = finished_ns - arrival_ns
        answered = outcome <= Outcome.LATE
        # A latency of 0 has the best pace, 1; the maximum avoids 0 / 0.
        pace = np.where(latency_ns > 0, service_ns / np.maximum(latency_ns, 1), 1.0)
        sums.requests += np.bincount(key, minlength=n)
        sums.counted += np.bincount(key, outcome != Outcome.CANCELLED, n)
        is_admitted = (outcome != Outcome.CANCELLED) & (outcome != Outcome.REJECTED)
        sums.admitted += np.bincount(key, is_admitted, n)
        sums.would_reject += np.bincount(key, requests.would_reject[rows], n)
        sums.met += np.bincount(key, outcome == Outcome.MET, n)
        sums.started += np.bincount(key, started, n)
        sums.wait_ns += np.bincount(key, (started_ns - arrival_ns) * started, n)
        sums.service_ns += np.bincount(key, service_ns, n)
        sums.pace += np.bincount(key, pace * answered, n)
    return sums


def _p99_ms(latency_ns: Int64) -> float:
    return nearest_rank(latency_ns, (990,))[0] / MILLISECOND_NS if len(latency_ns) else nan


def _differences(later_ns: Int64, earlier_ns: Int64, mask: NDArray[np.bool_]) -> Int64:
    """Return later - earlier of the masked rows, without whole temporary columns."""
    differences_ns = np.empty(np.count_nonzero(mask), dtype=np.int64)
    filled = 0
    for rows in _chunks(len(mask)):
        chunk_ns = (later_ns[rows] - earlier_ns[rows])[mask[rows]]
        differences_ns[filled : filled + len(chunk_ns)] = chunk_ns
        filled += len(chunk_ns)
    return differences_ns


def _chunks(rows: int) -> Iterator[slice]:
    for first in range(0, rows, _CHUNK_ROWS):
        yield slice(first, first + _CHUNK_ROWS)


@dataclass(frozen=True, slots=True)
class ResourceSummary:
    """The utilisation and the cost of one node, or of one serverless pool."""

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
    """The summary of one run.

    Shares are 0 to 1. A share, a latency or a cost with nothing to count is NaN (null in JSON).
    Percentiles are by nearest rank, so each is the latency of some request.
    """

    requests: int
    met: int
    late: int
    rejected: int
    expired: int
    failed: int
    cancelled: int
    would_reject: int  # rejected by the policy while admission was only observed
    slo_attainment: float  # MET over everything but CANCELLED
    admitted_kept: float  # MET over everything admitted and not cancelled

    window_ms: float
    makespan_ms: float  # from the first arrival until the last request was settled
    goodput_rps: float  # MET responses that finished inside the window, per second of window
    throughput_rps: float  # the same for all responses, in time or late

    mean_ms: float  # latency, from arrival to response, of the answered requests
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

    cost_usage_usd: float  # cost of the busy time alone
    cost_allocation_usd: float  # cost of everything that was held, idle or not
    cost_usd: float  # the cost of the allocation: idle hardware is not free
    cost_per_1000_met_usd: float

    # Jain's index over the clients' mean pace (see `GroupSummary.pace`). Service per time in the
    # system does not depend on the number of requests of a client, as attained service does.
    fairness: float

    clients: tuple[GroupSummary, ...]
    pipelines: tuple[GroupSummary, ...]
    resources: tuple[ResourceSummary, ...]

    def to_json(self) -> dict[str, object]:
        """Return dicts, lists and numbers; NaN and infinity become null."""
        return {key: json_value(value) for key, value in asdict(self).items()}


def summarise(run: RunColumns) -> Summary:
    """Return the summary of a run. Linear in its rows; needs less memory than the columns take."""
    requests, resources = run.requests, run.resources
    counts = dict(zip(OUTCOME_NAMES, count_outcomes(requests), strict=True))
    met, admitted = counts["met"], sum(counts[name] for name in _ADMITTED)
    latency_ns = latencies_ns(requests)
    clients = group_summaries(requests, requests.client, run.clients, latency_ns)
    pipelines = group_summaries(requests, requests.pipeline, run.pipelines, latency_ns)
    if run.admission_margins:
        margins = zip(pipelines, run.admission_margins, strict=True)
        pipelines = tuple(replace(row, admission_margin=margin) for row, margin in margins)
    mean_ms, p50_ms, p90_ms, p99_ms, p999_ms = _statistics_ms(latency_ns, (500, 900, 990, 999))
    mean_wait_ms, p99_wait_ms = _statistics_ms(waits_ns(requests), (990,))
    allocation_usd = sum(resource.allocation_usd for resource in resources)
    return Summary(
        requests=len(requests),
        **counts,
        would_reject=int(np.count_nonzero(requests.would_reject)),
        slo_attainment=_share(met, admitted + counts["rejected"], empty=nan),
        admitted_kept=_share(met, admitted, empty=nan),
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
    # One comparison per outcome reads a byte per row; bincount would convert all to int64.
    return tuple(
        int(np.count_nonzero(requests.outcome == outcome)) for outcome in range(len(OUTCOME_NAMES))
    )


def missed_at_start(requests: RequestColumns) -> int:
    """Return how many requests were missed that arrived before the first result of their pipeline.

    Where instances start, these are what the beginning of a run costs: nothing was loaded yet.
    Requests of a pipeline without any result are not counted.
    """
    pipelines = int(requests.pipeline.max(initial=-1)) + 1
    answered = requests.outcome <= Outcome.LATE
    first_ns = np.full(pipelines, NEVER_NS)
    np.minimum.at(first_ns, requests.pipeline[answered], requests.finished_ns[answered])
    first_ns[first_ns == NEVER_NS] = 0
    missed = (requests.outcome != Outcome.MET) & (requests.outcome != Outcome.CANCELLED)
    return int(np.count_nonzero(missed & (requests.arrival_ns < first_ns[requests.pipeline])))


def _statistics_ms(values_ns: Int64, per_mille: Sequence[int]) -> tuple[float, ...]:
    """Return the mean, then the percentiles. Reorders its argument in place."""
    if not len(values_ns):
        return (nan,) * (1 + len(per_mille))
    mean_ms = float(values_ns.mean()) / MILLISECOND_NS
    ranks_ns = nearest_rank(values_ns, per_mille, overwrite=True)
    return (mean_ms, *(rank_ns / MILLISECOND_NS for rank_ns in ranks_ns))


def _rate_in_window(run: RunColumns, worst_outcome: int) -> float:
    """Return the rate of requests that finished in the window with this outcome or a better one."""
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
    return float(part / whole) if whole else empty
