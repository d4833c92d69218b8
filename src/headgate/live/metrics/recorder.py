"""Counts how requests ended.

A request costs one row of integers in a buffer of fixed size. Rows are added up, by numpy, when the
buffer is full or somebody asks: that is what keeps it well below two microseconds per request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from struct import Struct
from time import monotonic_ns
from typing import Final, final

import numpy as np

from headgate.core.clock import NEVER_NS, SECOND_NS
from headgate.core.model import TIER_NAMES, App, Pipeline
from headgate.core.outcome import Outcome
from headgate.live.call import Call
from headgate.live.metrics.histogram import (
    BATCH_BOUNDS,
    START_BOUNDS_NS,
    Histogram,
    Int64,
    latency_bounds_ns,
    slack_bounds_ns,
)
from headgate.live.metrics.readings import Readings
from headgate.live.metrics.responses import Responses

CLASS_NAMES: Final = ("urgent", "usual", "background")  # priority below, at and above 0
ROWS_MAX: Final = 2048  # adding up that many takes a fraction of a millisecond
REASONS_MAX: Final = 64
ARRIVAL_WINDOW_S: Final = 10

_ROW: Final = Struct("=11q")
_REJECTED: Final = Outcome.REJECTED
_PACK: Final = _ROW.pack_into
_ROW_BYTES: Final = _ROW.size
_BUFFER_BYTES: Final = ROWS_MAX * _ROW.size
_OTHER_REASON: Final = "other"
_FAULTS_MAX: Final = 64  # kinds of faults that are told apart


@final
class ModelMetrics:
    """What is kept of one model, and stays as it is when the model is declared anew."""

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
        """Count requests of this model: columns as `Metrics.settled` writes them."""
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
        """Mean over the last whole seconds; one second late, for requests still being answered."""
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
    """Everything counted since the gateway began."""

    def __init__(
        self,
        app: App,
        read: Callable[[], Readings] = Readings,
        now_ns: Callable[[], int] = monotonic_ns,
    ) -> None:
        self.read = read
        self.now_ns = now_ns
        self.models: list[ModelMetrics] = []
        self._tenants: list[str] = []
        self._reasons: list[str] = [""]
        self.starts: dict[str, Histogram] = {}  # cold starts, by function
        self.responses = Responses()
        self.faults: dict[str, int] = {}  # by kind
        # By model, tenant, reason, class and outcome, in one integer: see `fold`.
        self._tally: dict[int, int] = {}
        self._model_ids: dict[str, int] = {}
        self._tenant_ids: dict[str, int] = {}
        self._reason_ids: dict[str, int] = {"": 0}
        self._buffer = bytearray(_BUFFER_BYTES)
        self._used_bytes = 0
        self.declare(app)

    def declare(self, app: App) -> None:
        """These are served from now on. A model with another objective gets new buckets."""
        self.fold()
        for pipeline in app.pipelines:
            known = self._model_ids.get(pipeline.name)
            if known is None or self.models[known].slo_ns != pipeline.slo.latency_ns:
                model = ModelMetrics(pipeline.name, pipeline.slo.latency_ns, _tier(app, pipeline))
                self._keep_model(model)
        for client in app.clients:
            self._tenant_id(client.name)

    def settled(self, call: Call, model: str, tenant: str) -> None:
        """Count a request that has just ended, once, whatever its end."""
        used_bytes = self._used_bytes
        if used_bytes == _BUFFER_BYTES:
            self.fold()
            used_bytes = 0
        try:
            model_id = self._model_ids[model]
            tenant_id = self._tenant_ids[tenant]
        except KeyError:  # declared by nobody; not what is served, so it may cost
            model_id = self._model_id(model)
            tenant_id = self._tenant_id(tenant)
        priority = call.priority
        outcome = call.outcome
        _PACK(
            self._buffer,
            used_bytes,
            model_id,
            tenant_id,
            self._reason_id(call.reason) if outcome == _REJECTED else 0,
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

    def cold_started(self, function: str, duration_ns: int) -> None:
        """An instance of the function has been started, and that took so long."""
        starts = self.starts.setdefault(function, Histogram(START_BOUNDS_NS))
        starts.add(np.array([duration_ns], np.int64))

    def fault(self, kind: str) -> None:
        """Count a defect of ours, or of a policy, that serving has survived."""
        if kind not in self.faults and len(self.faults) >= _FAULTS_MAX:
            kind = _OTHER_REASON
        self.faults[kind] = self.faults.get(kind, 0) + 1

    def fold(self) -> None:
        """Add up the rows that have come in since last time."""
        if not self._used_bytes:
            return
        cells = np.frombuffer(self._buffer, np.int64, self._used_bytes // 8)
        rows = cells.reshape(-1, _ROW.size // 8)
        self._used_bytes = 0
        model, tenant, reason, priority_class, outcome = rows.T[:5]
        keys = model << 40 | tenant << 20 | reason << 8 | priority_class << 4 | outcome
        distinct, counts = np.unique(keys, return_counts=True)
        for key, count in zip(distinct.tolist(), counts.tolist(), strict=True):
            self._tally[key] = self._tally.get(key, 0) + count
        for model_id in np.unique(model).tolist():
            self.models[model_id].add(rows[model == model_id])

    def counted(self) -> Iterator[tuple[int, ModelMetrics, str, str, str, int]]:
        """How many there were of each model, tenant, reason, class and outcome."""
        for key, count in self._tally.items():
            model, tenant, reason = key >> 40, key >> 20 & 0xFFFFF, key >> 8 & 0xFFF
            yield (
                count,
                self.models[model],
                self._tenants[tenant],
                self._reasons[reason],
                CLASS_NAMES[key >> 4 & 0xF],
                key & 0xF,
            )

    def _model_id(self, name: str) -> int:
        if name not in self._model_ids:
            self._keep_model(ModelMetrics(name, NEVER_NS, TIER_NAMES[0]))
        return self._model_ids[name]

    def _keep_model(self, model: ModelMetrics) -> None:
        known = self._model_ids.setdefault(model.name, len(self.models))
        if known == len(self.models):
            self.models.append(model)
        else:
            self.models[known] = model

    def _tenant_id(self, name: str) -> int:
        if name not in self._tenant_ids:
            self._tenant_ids[name] = len(self._tenants)
            self._tenants.append(name)
        return self._tenant_ids[name]

    def _reason_id(self, reason: str) -> int:
        """A policy may say what it likes, but only so many different things."""
        known = self._reason_ids.get(reason)
        if known is None:
            if len(self._reasons) >= REASONS_MAX - 1:
                reason = _OTHER_REASON
            known = self._reason_ids.setdefault(reason, len(self._reasons))
            if known == len(self._reasons):
                self._reasons.append(reason)
        return known


def _tier(app: App, pipeline: Pipeline) -> str:
    """Where requests of a pipeline can run, if that is one kind of place."""
    tiers = {
        app.pools[pool_id].tier
        for stage in pipeline.stages
        for variant in stage.function.variants
        for pool_id in variant.pool_ids
    }
    return TIER_NAMES[tiers.pop()] if len(tiers) == 1 else "mixed"
