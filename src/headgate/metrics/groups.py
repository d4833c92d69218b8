"""The same few numbers per client and per pipeline: who was served how well."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import nan

import numpy as np
from numpy.typing import NDArray

from headgate.core.clock import MILLISECOND_NS, NEVER_NS
from headgate.core.outcome import Outcome
from headgate.metrics.columns import Int32, Int64, RequestColumns
from headgate.metrics.percentile import nearest_rank

_CHUNK_ROWS = 1 << 16  # the temporaries of a chunk fit the cache: faster, and no memory to speak of


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """How the requests of one client, or of one pipeline, fared. Not a number: nothing to count."""

    name: str
    requests: int
    met: int
    slo_attainment: float  # MET over everything but CANCELLED
    mean_wait_ms: float  # of the requests that started
    p99_ms: float  # latency of the answered requests
    service_share: float  # of all the time between start and finish, how much was this group's
    # Mean of service / latency: the reciprocal of the slowdown, and 0 for a request that was
    # never answered, so that starving a group cannot look like serving it well.
    pace: float


def group_summaries(
    requests: RequestColumns, group: Int32, names: tuple[str, ...], latency_ns: Int64
) -> tuple[GroupSummary, ...]:
    """Return one row per name; `group` holds, per request, an index into `names`.

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
            slo_attainment=_ratio(sums.met[i], sums.counted[i], empty=1.0),
            mean_wait_ms=_ratio(sums.wait_ns[i] / MILLISECOND_NS, sums.started[i], empty=nan),
            p99_ms=_p99_ms(parts[i]),
            service_share=_ratio(sums.service_ns[i], service_total_ns, empty=0.0),
            pace=_ratio(sums.pace[i], sums.counted[i], empty=nan),
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
    counted: NDArray[np.float64]  # all but the cancelled ones
    met: NDArray[np.float64]
    started: NDArray[np.float64]
    wait_ns: NDArray[np.float64]
    service_ns: NDArray[np.float64]
    pace: NDArray[np.float64]


def _sum_by_group(requests: RequestColumns, group: Int32, n: int) -> _Sums:
    sums = _Sums(*(np.zeros(n) for _ in range(7)))
    for rows in _chunks(len(requests)):
        outcome, key = requests.outcome[rows], group[rows]
        arrival_ns, finished_ns = requests.arrival_ns[rows], requests.finished_ns[rows]
        started = requests.started_ns[rows] != NEVER_NS
        started_ns = np.where(started, requests.started_ns[rows], finished_ns)
        service_ns = finished_ns - started_ns
        latency_ns = finished_ns - arrival_ns
        answered = outcome <= Outcome.LATE
        # An answer in no time at all was as quick as can be; the maximum avoids 0 / 0.
        pace = np.where(latency_ns > 0, service_ns / np.maximum(latency_ns, 1), 1.0)
        sums.requests += np.bincount(key, minlength=n)
        sums.counted += np.bincount(key, outcome != Outcome.CANCELLED, n)
        sums.met += np.bincount(key, outcome == Outcome.MET, n)
        sums.started += np.bincount(key, started, n)
        sums.wait_ns += np.bincount(key, (started_ns - arrival_ns) * started, n)
        sums.service_ns += np.bincount(key, service_ns, n)
        sums.pace += np.bincount(key, pace * answered, n)
    return sums


def _p99_ms(latency_ns: Int64) -> float:
    return nearest_rank(latency_ns, (990,))[0] / MILLISECOND_NS if len(latency_ns) else nan


def _differences(later_ns: Int64, earlier_ns: Int64, chosen: NDArray[np.bool_]) -> Int64:
    """Return later - earlier of the chosen rows, without whole columns in between."""
    differences_ns = np.empty(np.count_nonzero(chosen), dtype=np.int64)
    filled = 0
    for rows in _chunks(len(chosen)):
        chunk_ns = (later_ns[rows] - earlier_ns[rows])[chosen[rows]]
        differences_ns[filled : filled + len(chunk_ns)] = chunk_ns
        filled += len(chunk_ns)
    return differences_ns


def _chunks(rows: int) -> Iterator[slice]:
    for first in range(0, rows, _CHUNK_ROWS):
        yield slice(first, first + _CHUNK_ROWS)


def _ratio(part: float, whole: float, *, empty: float) -> float:
    return float(part / whole) if whole else empty
