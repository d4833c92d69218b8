"""Counters and histograms of a gateway, by model, tenant, class and outcome.

A request costs one row of integers in a buffer of fixed size. NumPy sums the rows when the buffer
is full or metrics are scraped. `headgate bench metrics` compares the cost with prometheus_client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from struct import Struct
from time import monotonic_ns
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from headgate.core.clock import MILLISECOND_NS, NEVER_NS, SECOND_NS
from headgate.core.model import TIER_NAMES, App, Pipeline
from headgate.core.states import Outcome, Rejection
from headgate.live.call import FUNCTION_REFUSED, Call

Int64 = NDArray[np.int64]

# Bucket bounds as multiples of the SLO: dense around it, because SLO attainment is what matters.
# The SLO itself is a bound, so the share of requests within it is exact and not interpolated.
_TIMES_SLO: Final = (
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    *(1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0),
)
_SLACK_TIMES_SLO: Final = (
    *(-4.0, -2.0, -1.0, -0.5, -0.25, -0.1, -0.05, 0.0),
    *(0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
)
_SLO_UNKNOWN_NS: Final = 100 * MILLISECOND_NS
_STARTS_S: Final = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300)

BATCH_BOUNDS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)
START_BOUNDS_NS: Final = tuple(round(s * SECOND_NS) for s in _STARTS_S)


@final
class Histogram:
    """Counts of values by bucket: at most each bound, and beyond the last."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[int]) -> None:
        self.bounds = np.array(bounds, np.int64)
        self.counts = np.zeros(len(bounds) + 1, np.int64)
        self.total = 0  # sum of all values

    def add(self, values: Int64) -> None:
        """Add values.

        >>> histogram = Histogram((10, 20))
        >>> histogram.add(np.array([10, 11, 99]))
        >>> histogram.cumulative(unit=10), histogram.total
        ([(1.0, 1), (2.0, 2), (inf, 3)], 120)
        """
        buckets = np.searchsorted(self.bounds, values)
        self.counts += np.bincount(buckets, minlength=len(self.counts))
        self.total += int(values.sum())

    def cumulative(self, *, unit: int) -> list[tuple[float, int]]:
        """Return cumulative counts by bound, with bounds divided by `unit`."""
        bounds = [bound / unit for bound in self.bounds.tolist()]
        return list(zip([*bounds, float("inf")], accumulate(self.counts.tolist()), strict=True))


def latency_bounds_ns(slo_ns: int) -> list[int]:
    return _times(_TIMES_SLO, slo_ns)


def slack_bounds_ns(slo_ns: int) -> list[int]:
    """Return the bucket bounds of deadline slack for an SLO; negative slack is late."""
    return _times(_SLACK_TIMES_SLO, slo_ns)


def _times(factors: tuple[float, ...], slo_ns: int) -> list[int]:
    scale_ns = _SLO_UNKNOWN_NS if slo_ns == NEVER_NS else slo_ns
    return sorted({round(factor * scale_ns) for factor in factors})


@dataclass(frozen=True, slots=True)
class FaasPoolGauges:
    """Gauges of one pay-per-call pool."""

    breaker: int  # a `BreakerState`
    blocked_by: str  # what blocks calls: a `core.circuit_breaker.CallBlock`; empty: nothing
    in_flight: int
    calls: Mapping[str, int]  # total, by outcome
    pings: int  # total keep-warm calls
    spent_usd: float  # total, as counted against the budgets


@dataclass(frozen=True, slots=True)
class GaugeSnapshot:
    """Gauge values at the time of a scrape, read from the runtime. Unknown ones are left out."""

    queue_depth: Mapping[str, int] = field(default_factory=dict)  # by model: waiting requests
    inflight: Mapping[str, int] = field(default_factory=dict)  # by model: accepted, not settled
    # By function and state (`core.states`): instances.
    replicas: Mapping[tuple[str, str], int] = field(default_factory=dict)
    # By function and variant: recent mean of execution time minus predicted time.
    prediction_error_s: Mapping[tuple[str, str], float] = field(default_factory=dict)
    # By model, tenant, tier and basis ("usage", "idle" or "warm"); monotone.
    cost_usd: Mapping[tuple[str, str, str, str], float] = field(default_factory=dict)
    faas_pools: Mapping[str, FaasPoolGauges] = field(default_factory=dict)  # by pool
    # By model: the safety margin of the policy's admission test, in the policy's own unit.
    admission_margin: Mapping[str, float] = field(default_factory=dict)
    stage_output_bytes: int = 0  # in the memory of workers, for the next stage
    events_ignored: int = 0  # total events that crossed others or came twice


HTTP: Final = "http"
GRPC: Final = "grpc"

REJECTIONS: Final = tuple(text for name, text in vars(Rejection).items() if name.isupper())
# The possible values of the label `reason`. Any other becomes `other`: a function, a policy or a
# client must not be able to create time series.
REASONS: Final = frozenset(
    (
        *REJECTIONS,
        *("answer_too_large", "answers", "client_gone", "codec_busy", "codec_lost"),
        *("codec_timeout", "concurrency_limited", "connections", "deadline_exceeded", "draining"),
        *("failed", "function_failed", FUNCTION_REFUSED, "internal", "invalid", "malformed"),
        *("memory", "method_not_allowed", "no_message", "not_acceptable", "not_ready"),
        *("outcome_unknown", "policy_fault", "rate_limited", "refused", "slow", "starting"),
        "too_many_rpcs",
        *("unauthenticated", "unknown_method", "unknown_model", "unknown_path", "unsupported"),
        "worker_lost",
    )
)
OTHER: Final = "other"


@final
class Responses:
    """Counts the responses of a gateway by protocol, code and reason.

    >>> responses = Responses()
    >>> responses.count(HTTP, 405, "method_not_allowed")
    >>> responses.count(GRPC, "NOT_FOUND", "unknown_model")
    >>> sorted(responses.counted())[1]
    (('http', '200', ''), 0)
    >>> sorted(responses.counted())[2]
    (('http', '405', 'method_not_allowed'), 1)
    """

    def __init__(self) -> None:
        # The common response exists from the start, because a rate needs an initial value.
        self._counts: dict[tuple[str, int | str, str], int] = {(HTTP, 200, ""): 0}

    def count(self, protocol: str, code: int | str, reason: str) -> None:
        """Count one response: its HTTP status or the name of its gRPC status, and the reason of an
        error.

        The HTTP status must be one that this server uses: their number bounds the label.
        """
        key = (protocol, code, reason)
        if key in self._counts:
            self._counts[key] += 1
            return
        if reason and reason not in REASONS:
            reason = OTHER
        key = (protocol, code, reason)
        self._counts[key] = self._counts.get(key, 0) + 1

    def counted(self) -> Iterator[tuple[tuple[str, str, str], int]]:
        """Yield every (protocol, code, reason) with its count."""
        for (protocol, code, reason), count in self._counts.items():
            yield (protocol, str(code), reason), count


CLASS_NAMES: Final = ("urgent", "default", "background")  # priority below, at and above 0
ROWS_MAX: Final = 2048  # summing them takes a fraction of a millisecond
REASONS_MAX: Final = 64
ARRIVAL_WINDOW_S: Final = 10

_ROW: Final = Struct("=11q")
_REJECTED: Final = Outcome.REJECTED
_FAILED: Final = Outcome.FAILED
_REFUSED_ID: Final = 1  # of the reason `FUNCTION_REFUSED`
_PACK: Final = _ROW.pack_into
_ROW_BYTES: Final = _ROW.size
_BUFFER_BYTES: Final = ROWS_MAX * _ROW.size
_FAULTS_MAX: Final = 64  # different kinds of faults


@final
class ModelMetrics:
    """Metrics of one model."""

    def __init__(self, name: str, slo_ns: int, tier: str) -> None:
        self.name = name
        self.slo_ns = slo_ns
        self.tier = tier
        self.request = Histogram(latency_bounds_ns(slo_ns))
        self.queue = Histogram(latency_bounds_ns(slo_ns))
        self.execute = Histogram(latency_bounds_ns(slo_ns))
        self.slack = Histogram(slack_bounds_ns(slo_ns))
        self.batch = Histogram(BATCH_BOUNDS)
        self.arrivals: dict[int, int] = {}  # by second of the monotonic clock; recent ones only

    def add(self, rows: Int64) -> None:
        """Add requests of this model: columns as `Metrics.settled` writes them."""
        outcome, arrived_ns, began_ns, ended_ns, deadline_ns, settled_ns, items = rows.T[4:]
        ran = began_ns > 0
        answered = outcome <= Outcome.LATE
        self.request.add((settled_ns - arrived_ns)[answered])
        self.queue.add(np.maximum(began_ns - arrived_ns, 0)[ran])
        self.execute.add(np.maximum(ended_ns - began_ns, 0)[ran & (ended_ns > 0)])
        self.batch.add(items[items > 0])
        if self.slo_ns != NEVER_NS:
            deadline_ns = np.where(deadline_ns == 0, arrived_ns + self.slo_ns, deadline_ns)
        due = answered & (deadline_ns > 0) & (deadline_ns < NEVER_NS)
        self.slack.add((deadline_ns - settled_ns)[due])
        self._count_arrivals(arrived_ns)

    def arrival_rps(self, now_ns: int) -> float:
        """Return the mean over whole seconds, one second late for requests still in progress."""
        last_s = now_ns // SECOND_NS - 1
        window = range(last_s - ARRIVAL_WINDOW_S, last_s)
        return sum(self.arrivals.get(second, 0) for second in window) / ARRIVAL_WINDOW_S

    def _count_arrivals(self, arrived_ns: Int64) -> None:
        seconds, counts = np.unique(arrived_ns // SECOND_NS, return_counts=True)
        for second, count in zip(seconds.tolist(), counts.tolist(), strict=True):
            self.arrivals[second] = self.arrivals.get(second, 0) + count
        oldest_s = max(self.arrivals) - 2 * ARRIVAL_WINDOW_S
        self.arrivals = {s: count for s, count in self.arrivals.items() if s > oldest_s}


@final
class Metrics:
    """Everything counted since the gateway started."""

    def __init__(self, app: App, now_ns: Callable[[], int] = monotonic_ns) -> None:
        self.now_ns = now_ns
        self.models = [  # by pipeline id
            ModelMetrics(pipeline.name, pipeline.slo.latency_ns, _tier(app, pipeline))
            for pipeline in app.pipelines
        ]
        self.tenants = [client.name for client in app.clients]  # by client id
        self._reasons: list[str] = ["", FUNCTION_REFUSED]
        self.starts: dict[str, Histogram] = {}  # cold starts by function
        self.responses = Responses()
        self.faults: dict[str, int] = {}  # by kind
        # By model and reason: requests that would have been rejected, were admission enforced.
        self._would_reject: dict[tuple[int, int], int] = {}
        # By model, tenant, reason, class and outcome, packed into one integer: see `fold`.
        self._counts: dict[int, int] = {}
        self._reason_ids: dict[str, int] = {"": 0, FUNCTION_REFUSED: _REFUSED_ID}
        self._buffer = bytearray(_BUFFER_BYTES)
        self._used_bytes = 0

    def settled(self, call: Call) -> None:
        """Count a settled request, once, whatever its outcome."""
        settlement = call.settlement
        assert settlement is not None
        used_bytes = self._used_bytes
        if used_bytes == _BUFFER_BYTES:
            self.fold()
            used_bytes = 0
        priority = call.priority
        outcome = settlement.outcome
        reason_id = 0
        if outcome == _REJECTED:
            reason_id = self._reason_id(settlement.reason)
        elif outcome == _FAILED and call.is_refused:
            reason_id = _REFUSED_ID
        _PACK(
            self._buffer,
            used_bytes,
            call.pipeline_id,
            call.client_id,
            reason_id,
            1 if priority == 0 else 0 if priority < 0 else 2,
            outcome,
            call.arrived_ns,
            call.began_ns,
            call.ended_ns,
            call.deadline_ns,
            self.now_ns(),
            call.batch_items,
        )
        self._used_bytes = used_bytes + _ROW_BYTES

    def would_reject(self, call: Call, reason: str) -> None:
        """Count a request that the policy rejected while admission is only observed."""
        key = (call.pipeline_id, self._reason_id(reason))
        self._would_reject[key] = self._would_reject.get(key, 0) + 1

    def cold_started(self, function: str, duration_ns: int) -> None:
        starts = self.starts.setdefault(function, Histogram(START_BOUNDS_NS))
        starts.add(np.array([duration_ns], np.int64))

    def fault(self, kind: str) -> None:
        """Count a defect of the server or of a policy that serving has survived."""
        if kind not in self.faults and len(self.faults) >= _FAULTS_MAX:
            kind = OTHER
        self.faults[kind] = self.faults.get(kind, 0) + 1

    def fold(self) -> None:
        """Sum the buffered rows."""
        if not self._used_bytes:
            return
        cells = np.frombuffer(self._buffer, np.int64, self._used_bytes // 8)
        rows = cells.reshape(-1, _ROW.size // 8)
        self._used_bytes = 0
        model, tenant, reason, priority_class, outcome = rows.T[:5]
        keys = model << 40 | tenant << 20 | reason << 8 | priority_class << 4 | outcome
        distinct, counts = np.unique(keys, return_counts=True)
        for key, count in zip(distinct.tolist(), counts.tolist(), strict=True):
            self._counts[key] = self._counts.get(key, 0) + count
        for model_id in np.unique(model).tolist():
            self.models[model_id].add(rows[model == model_id])

    def counted(self) -> Iterator[tuple[int, ModelMetrics, str, str, str, int]]:
        """Yield the count of each model, tenant, reason, class and outcome."""
        for key, count in self._counts.items():
            model, tenant, reason = key >> 40, key >> 20 & 0xFFFFF, key >> 8 & 0xFFF
            yield (
                count,
                self.models[model],
                self.tenants[tenant],
                self._reasons[reason],
                CLASS_NAMES[key >> 4 & 0xF],
                key & 0xF,
            )

    def would_reject_counted(self) -> Iterator[tuple[tuple[str, str], int]]:
        """Yield every model and reason with its count of would-be rejections."""
        for (model, reason), count in self._would_reject.items():
            yield (self.models[model].name, self._reasons[reason]), count

    def _reason_id(self, reason: str) -> int:
        """Return the id of a reason. Policies may use any text; `REASONS_MAX` are told apart."""
        known = self._reason_ids.get(reason)
        if known is None:
            if len(self._reasons) >= REASONS_MAX:
                reason = OTHER
            known = self._reason_ids.setdefault(reason, len(self._reasons))
            if known == len(self._reasons):
                self._reasons.append(reason)
        return known


def _tier(app: App, pipeline: Pipeline) -> str:
    """Return the tier that the requests of a pipeline can run on; `mixed` if there are several."""
    tiers = {
        app.pools[pool_id].tier
        for stage in pipeline.stages
        for variant in stage.function.variants
        for pool_id in variant.pool_ids
    }
    return TIER_NAMES[tiers.pop()] if len(tiers) == 1 else "mixed"
