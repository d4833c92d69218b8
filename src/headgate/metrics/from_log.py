"""From an event log to columns: the requests of a run with their outcomes, and its batches.

Times count from the first event, as in the columns of any run. A log contains what its Scheduler
saw: a request from its arrival at the Scheduler to its outcome, and a batch from its dispatch to
the event of its completion, so that the network to and from the worker is part of the batch.

The batches calibrate the simulator: true service times over profiled ones.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from headgate.core.actions import (
    Action,
    Dispatch,
    LoadWeights,
    ReportWouldReject,
    Settle,
    StartInstance,
)
from headgate.core.errors import ConfigError
from headgate.core.event_log import LogEntry
from headgate.core.events import (
    BatchFailed,
    BatchFinished,
    BatchLost,
    BatchRefused,
    Event,
    InstanceStarted,
    RequestArrived,
    WeightsLoaded,
)
from headgate.core.model import App, Variant
from headgate.core.records import STAGES_MAX
from headgate.metrics.columns import (
    NOWHERE,
    REQUEST_CODES,
    Int8,
    Int32,
    Int64,
    RequestColumns,
    build_requests,
    column_codes,
)

VALUES_MAX: Final = 100
GROUP_MIN: Final = 20  # batches, for factors of their own
_FACTOR_MAX: Final = 1e6  # the limit of the application file
_IDS_MAX: Final = 1 << 31
_ITEMS_MAX: Final = 1 << 31


@dataclass(frozen=True, slots=True)
class BatchColumns:
    """One row per batch that was dispatched and has ended, in order of the ends."""

    variant: Int32
    items: Int32
    shape: Int32
    sent_ns: Int64
    ended_ns: Int64
    cold: Int8  # 1 if it waited for a start or a load
    finished: Int8  # 1 if it ran to completion

    def __len__(self) -> int:
        return len(self.variant)


@dataclass(frozen=True, slots=True)
class LoggedColumns:
    """The columns of a log. Requests that are open at its end count as CANCELLED at NEVER_NS."""

    # `started_ns` is the time of the first dispatch, `pool` and `node` are those of the last one.
    requests: RequestColumns
    items: Int32  # by request
    own_deadline: Int8  # by request: 1 if the client set the deadline, 0 if the SLO did
    batches: BatchColumns
    end_ns: int  # time of the last event
    # By variant id: the median time of its starts, on nodes that were there.
    start_ns: dict[int, int]


def read_columns(entries: Iterable[LogEntry], app: App) -> LoggedColumns:
    """Read a whole log. Needs about 50 bytes of memory per request and per batch."""
    reader = _Reader(app)
    for entry in entries:
        reader.read(entry)
    return reader.columns()


@final
class _Reader:
    """Follows requests, batches and instances from event to event."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._first_ns: int | None = None
        self._now_ns = 0
        self._requests = {name: array(code) for name, (code, _) in REQUEST_CODES.items()}
        self._items = array("i")
        self._own_deadline = array("b")
        self._rows: dict[int, int] = {}  # by id of an open request
        self._batches = {name: array(code) for name, code in column_codes(BatchColumns).items()}
        # By batch id: the action, when it was sent, and whether it waits for a start or a load.
        self._in_flight: dict[int, tuple[Dispatch, int, bool]] = {}
        self._preparing: set[int] = set()  # instances that are starting or loading
        self._starting: dict[int, tuple[int, int]] = {}  # by instance: its variant, and since when
        self._start_ns: dict[int, list[int]] = {}  # by variant id

    def read(self, entry: LogEntry) -> None:
        if self._first_ns is None:
            self._first_ns = entry.now_ns
        self._now_ns = entry.now_ns - self._first_ns
        self._on_event(entry.event)
        for action in entry.actions:
            self._on_action(action)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, RequestArrived):
            self._on_arrival(event)
        elif isinstance(event, BatchFinished | BatchFailed | BatchRefused | BatchLost):
            batch = self._in_flight.pop(event.batch_id, None)
            if batch is not None:  # else the batch has ended before, and this is a duplicate
                self._on_batch_end(*batch, is_finished=isinstance(event, BatchFinished))
        elif isinstance(event, InstanceStarted | WeightsLoaded):
            self._preparing.discard(event.instance_id)
            start = self._starting.pop(event.instance_id, None)
            if start is not None:
                self._start_ns.setdefault(start[0], []).append(self._now_ns - start[1])

    def _on_action(self, action: Action) -> None:
        if isinstance(action, Dispatch):
            is_cold = action.instance_id is None or action.instance_id in self._preparing
            self._in_flight[action.batch_id] = (action, self._now_ns, is_cold)
            for task_id in action.task_ids:
                self._on_dispatch(task_id // STAGES_MAX, action, is_cold)
        elif isinstance(action, Settle):
            row = self._rows.pop(action.request_id, None)
            if row is not None:
                self._requests["finished_ns"][row] = self._now_ns
                self._requests["outcome"][row] = action.settlement.outcome
        elif isinstance(action, ReportWouldReject):
            row = self._rows.get(action.request_id)
            if row is not None:
                self._requests["would_reject"][row] = 1
        elif isinstance(action, StartInstance | LoadWeights):
            self._preparing.add(action.instance_id)
            if isinstance(action, StartInstance):
                self._on_start(action)

    def _on_arrival(self, event: RequestArrived) -> None:
        assert self._first_ns is not None
        app = self._app
        slo = app.pipelines[_checked("pipeline", event.pipeline, len(app.pipelines))].slo
        own_ns = event.deadline_ns
        self._rows[event.request_id] = len(self._items)
        self._items.append(_checked("items", event.items, _ITEMS_MAX))
        self._own_deadline.append(1 if own_ns else 0)
        known = {
            "arrival_ns": self._now_ns,
            "deadline_ns": own_ns - self._first_ns if own_ns else slo.deadline_ns(self._now_ns),
            "pipeline": event.pipeline,
            "client": _checked("client", event.client, len(app.clients)),
        }
        for name, (_, default) in REQUEST_CODES.items():
            self._requests[name].append(known.get(name, default))

    def _on_dispatch(self, request_id: int, dispatch: Dispatch, is_cold: bool) -> None:
        row = self._rows.get(request_id)
        if row is None:
            return
        requests = self._requests
        requests["started_ns"][row] = min(requests["started_ns"][row], self._now_ns)
        requests["attempts"][row] += 1
        requests["cold"][row] |= is_cold
        requests["pool"][row] = _checked("pool", dispatch.pool_id, len(self._app.pools))
        if dispatch.node_id is None:
            requests["node"][row] = NOWHERE
        else:
            requests["node"][row] = _checked("node", dispatch.node_id, _IDS_MAX)

    def _on_start(self, action: StartInstance) -> None:
        variant_id = _checked("variant", action.variant_id, len(self._app.variants))
        pool = self._app.pools[_checked("pool", action.pool_id, len(self._app.pools))]
        if pool.faas is None and not pool.is_elastic:  # else it may wait for a node to boot
            self._starting[action.instance_id] = (variant_id, self._now_ns)

    def _on_batch_end(
        self, dispatch: Dispatch, sent_ns: int, is_cold: bool, *, is_finished: bool
    ) -> None:
        variant_id = _checked("variant", dispatch.variant_id, len(self._app.variants))
        variant = self._app.variants[variant_id]
        row = {
            "variant": variant_id,
            "items": _checked("items", dispatch.items, _ITEMS_MAX),
            "shape": _checked("shape", dispatch.shape_id, len(variant.shapes)),
            "sent_ns": sent_ns,
            "ended_ns": self._now_ns,
            "cold": int(is_cold),
            "finished": int(is_finished),
        }
        for name, value in row.items():
            self._batches[name].append(value)

    def columns(self) -> LoggedColumns:
        return LoggedColumns(
            requests=build_requests(**self._requests),
            items=np.array(self._items),
            own_deadline=np.array(self._own_deadline),
            batches=BatchColumns(**{name: np.array(c) for name, c in self._batches.items()}),
            end_ns=self._now_ns,
            start_ns={id: int(np.median(times)) for id, times in self._start_ns.items()},
        )


def _checked(key: str, value: int, limit: int) -> int:
    """Return an id of the log, or raise ConfigError if the application does not have it."""
    if not 0 <= value < limit:
        raise ConfigError("does not exist", key=key, value=value, allowed=f"below {limit}")
    return value


@dataclass(frozen=True, slots=True)
class CalibrationResult:
    """The measured service times of one function, divided by those of its profile."""

    function: str
    batches: int
    mean: float
    p50: float
    p99: float
    # The distribution, as equally likely values, by the batch size from which on it holds.
    factors: dict[int, tuple[float, ...]]


def calibrate(app: App, batches: BatchColumns) -> list[CalibrationResult]:
    """Return the calibration of every function that ran.

    Small and large batches have factors of their own. What a batch costs besides its function (to
    be sent, to be answered) does not grow with it, so the factor of a small batch is larger: for a
    function that takes less than that, many times larger. Batches that waited for a cold start or
    did not finish say nothing about service times, and are left out.
    """
    factor, function = _factors(app, batches)
    is_usable = (batches.cold == 0) & (batches.finished == 1)
    results: list[CalibrationResult] = []
    for candidate in app.functions:
        is_own = is_usable & (function == candidate.id)
        own = np.sort(factor[is_own])
        if len(own):
            p50, p99 = (float(q) for q in np.quantile(own, (0.5, 0.99), method="inverted_cdf"))
            values = factors_by_size(batches.items[is_own], factor[is_own])
            results.append(
                CalibrationResult(candidate.name, len(own), own.mean(), p50, p99, values)
            )
    return results


def factors_by_size(
    items: Int32, factor: NDArray[np.float64], group_min: int = GROUP_MIN
) -> dict[int, tuple[float, ...]]:
    """Return the distribution of factors by batch size: neighbouring sizes share one if they are
    rare.

    >>> factors_by_size(np.array([1, 1, 2, 4]), np.array([3.0, 3.0, 2.0, 1.0]), group_min=2)
    {1: (3.0, 3.0), 2: (1.0, 2.0)}
    """
    sizes, counts = np.unique(items, return_counts=True)
    starts: list[int] = []  # the smallest size of each group
    count = group_min  # of the group so far
    for size, number in zip(sizes.tolist(), counts.tolist(), strict=True):
        if count >= group_min:
            starts.append(size)
            count = 0
        count += number
    if count < group_min and len(starts) > 1:
        del starts[-1]  # the largest sizes are rare: they share with those before
    ends = [*starts[1:], int(sizes[-1]) + 1]
    return {
        start: quantile_bin_means(np.sort(factor[(items >= start) & (items < end)]))
        for start, end in zip(starts, ends, strict=True)
    }


def quantile_bin_means(values: NDArray[np.float64]) -> tuple[float, ...]:
    """Return the means of equal shares of sorted values: at most `VALUES_MAX`, same overall mean.

    Points of the quantile function would not do: the last of them would be the worst value
    observed, and would represent a whole share.

    >>> quantile_bin_means(np.array([1.0, 2.0, 4.0]))
    (1.0, 2.0, 4.0)
    """
    edges = np.linspace(0.0, len(values), min(len(values), VALUES_MAX) + 1)
    # The integral of the step function of the values, at the edges of the shares.
    sums = np.interp(edges, np.arange(len(values) + 1), np.concatenate(([0.0], values.cumsum())))
    means = np.diff(sums) / np.diff(edges)
    return tuple(float(f"{mean:.4g}") for mean in means)


def calibrated(
    spec: Mapping[str, object],
    results: list[CalibrationResult],
    client_overheads_ns: Sequence[int] = (0,),
) -> dict[str, object]:
    """Return a copy of an application file whose simulation has the measured service times.

    The client-side overheads, equally likely, are in no log. The cost of decisions is part of the
    batch times already, so the overheads of decisions are 0.
    """
    overheads = [f"{overhead_ns}ns" for overhead_ns in client_overheads_ns]
    calibrated_spec = deepcopy(dict(spec))
    calibrated_spec["simulation"] = {
        "service_times": {
            "distribution": "observed",
            "observed": {result.function: _plain(result.factors) for result in results},
        },
        "overheads": {"client_overhead": overheads if len(overheads) > 1 else overheads[0]},
    }
    return calibrated_spec


def _plain(by_size: Mapping[int, tuple[float, ...]]) -> object:
    if len(by_size) == 1:
        return list(*by_size.values())
    return {size: list(factors) for size, factors in by_size.items()}


def _factors(app: App, batches: BatchColumns) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """Return, per batch, its measured over its expected time, and its function."""
    functions = np.array([variant.function_id for variant in app.variants], np.int32)
    expected_ns = np.array(
        [
            _expected_ns(app.variants[variant], items, shape)
            for variant, items, shape in zip(
                batches.variant.tolist(),
                batches.items.tolist(),
                batches.shape.tolist(),
                strict=True,
            )
        ],
        np.int64,
    )
    took_ns = batches.ended_ns - batches.sent_ns
    factor = np.clip(took_ns / np.maximum(expected_ns, 1), 1 / _FACTOR_MAX, _FACTOR_MAX)
    return factor, functions[batches.variant]


def _expected_ns(variant: Variant, items: int, shape_id: int) -> int:
    exec_ns = variant.shapes[shape_id].exec_ns
    return exec_ns[min(max(items, 1), len(exec_ns)) - 1]
