"""From an event log to columns: the requests of a run with their outcomes, and its batches.

Times count from the first event, as in the columns of any run. A log contains what its Scheduler
saw: a request from its arrival at the Scheduler to its outcome, and a batch from its dispatch to
the event of its completion, so that the network to and from the worker is part of the batch. The
logs of gateways that share nodes are read as one, in the order of time (`LogColumnsReader.read`).

The batches calibrate the simulator: true service times over profiled ones. A batch that shared its
node or its host was slowed down by its neighbours, as the profile (`slowdown`, `interference`) and
the host say, and a simulation slows it down again: what counts is the time of a batch alone there,
without the network of its pool. Batch sizes that a log does not have are interpolated: see
`factors_by_size`.

How much longer batches take for each request that arrives while they run is found, too. Where a
gateway and its clients share cores with the workers, receiving a request takes CPU time from the
batches in progress, and refusing one takes more: the answer says what would have been accepted. The
mean of that is in the times of the batches anyway, but not that those beside a burst are the long
ones, nor that more requests make all of them longer.

A longer batch sees more arrivals even if they cost nothing, so a regression of times on arrivals
would find a delay where there is none. What counts here are the arrivals in a window at the
beginning of a batch, which is over before nearly all batches of the kind are: their number does not
depend on how long the batch takes (instrumental variables; Wald 1940).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final, final

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
    Refusal,
    RequestArrived,
    RequestCancelled,
    WeightsLoaded,
)
from headgate.core.ids import first_id
from headgate.core.model import App, Pool, Variant
from headgate.core.records import STAGES_MAX
from headgate.core.states import Outcome
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

Float64 = NDArray[np.float64]

VALUES_MAX: Final = 100
GROUP_MIN: Final = 20  # batches, for factors of their own
_FACTOR_MAX: Final = 1e6  # the limit of the application file
_BLENDED_VALUES: Final = 20  # of a size that was never seen: they are estimates anyway
_ROUNDING: Final = 1e-9
_STEP: Final = 0.05  # sizes whose profiled times differ by less have the same factors
_IDS_MAX: Final = 1 << 31
_ITEMS_MAX: Final = 1 << 31
_WINDOW_QUANTILE: Final = 0.05  # of the times of a kind of batch: when its window is over
_ERRORS_MIN: Final = 1.96  # standard errors; what is nearer to 0 may be chance (95 %)
_TERM_CODES: Final = {
    "items": "i",
    "priority": "i",
    "timeout_ns": "q",
    "cancel_ns": "q",
    "cost_usd": "d",
    "payload_bytes": "q",
}


class Trouble:
    """What was wrong with where a batch was sent; a function that fails is not among it."""

    NONE: Final = 0
    THROTTLED: Final = 1
    DOWN: Final = 2  # it was not there, failed, or was lost


@dataclass(frozen=True, slots=True)
class BatchColumns:
    """One row per batch that was dispatched and has ended, in order of the ends."""

    variant: Int32
    items: Int32
    shape: Int32
    pool: Int32
    node: Int32  # NOWHERE: a call of a platform
    concurrency: Int32  # the most batches that ran on its node at once, itself included
    sent_ns: Int64
    ended_ns: Int64
    alone_ns: Int64  # how long it would have run alone on its node, by its profile, without network
    cold: Int8  # 1 if it waited for a start or a load
    finished: Int8  # 1 if it ran to completion, for all of its tasks
    trouble: Int8  # a `Trouble`

    def __len__(self) -> int:
        return len(self.variant)


@dataclass(frozen=True, slots=True)
class LoggedColumns:
    """The columns of a log. Requests that are open at its end count as CANCELLED at NEVER_NS."""

    # `started_ns` is the time of the first dispatch, `pool` and `node` are those of the last one.
    requests: RequestColumns
    # By request, what it asked for. Times count from its arrival; 0 means that it did not.
    items: Int32
    priority: Int32
    timeout_ns: Int64  # the deadline that its client set
    cancel_ns: Int64  # when its client cancelled it
    cost_usd: Float64
    payload_bytes: Int64
    batches: BatchColumns
    end_ns: int  # time of the last event
    # By variant id: the median time of its starts, on nodes that were there.
    start_ns: dict[int, int]


def read_columns(entries: Iterable[LogEntry], app: App) -> LoggedColumns:
    """Read a whole log. Needs about 50 bytes of memory per request and per batch."""
    reader = LogColumnsReader(app)
    for entry in entries:
        reader.read(entry.now_ns, entry.event, entry.actions)
    return reader.columns()


@final
class _Flight:
    """A batch between its dispatch and its end."""

    __slots__ = ("alone_ns", "concurrency", "dispatch", "is_cold", "sent_ns", "variant")

    def __init__(self, dispatch: Dispatch, variant: Variant, sent_ns: int, is_cold: bool) -> None:
        self.dispatch = dispatch
        self.variant = variant
        self.sent_ns = sent_ns
        self.is_cold = is_cold  # it waits for a start or a load
        self.alone_ns = 0.0
        self.concurrency = 1


@final
class LogColumnsReader:
    """Follows requests, batches and instances from event to event."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._first_ns: int | None = None
        self._now_ns = 0
        self._ids_from = 0  # where the request ids of the gateway that is read begin
        self._requests = {name: array(code) for name, (code, _) in REQUEST_CODES.items()}
        self._terms: dict[str, array[Any]] = {
            name: array(code) for name, code in _TERM_CODES.items()
        }
        self._rows: dict[int, int] = {}  # by id of an open request, unique among gateways
        self._batches = {name: array(code) for name, code in column_codes(BatchColumns).items()}
        self._in_flight: dict[int, _Flight] = {}  # by batch id
        self._on_node: dict[int, list[_Flight]] = {}  # by node id, in order of dispatch
        self._changed_ns: dict[int, int] = {}  # by node id: when its batches last changed
        # By host id: the nodes on it that had batches, with their pools, and the calls in flight.
        self._nodes_of: dict[int, dict[int, Pool]] = {}
        self._calls_of: dict[int, list[_Flight]] = {}
        self._preparing: set[int] = set()  # instances that are starting or loading
        self._starting: dict[int, tuple[int, int]] = {}  # by instance: its variant, and since when
        self._start_ns: dict[int, list[int]] = {}  # by variant id

    def read(self, now_ns: int, event: Event, actions: Sequence[Action], gateway: int = 0) -> None:
        """Take the next event, and the actions that it led to.

        Each gateway (the index of its Scheduler) numbers its requests from 0 on. Batches and
        instances have ids that are unique among all of them.
        """
        if self._first_ns is None:
            self._first_ns = now_ns
        self._ids_from = first_id(gateway)
        self._now_ns = now_ns - self._first_ns
        self._on_event(event)
        for action in actions:
            self._on_action(action)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, RequestArrived):
            self._on_arrival(event)
        elif isinstance(event, BatchFinished | BatchFailed | BatchRefused | BatchLost):
            flight = self._in_flight.pop(event.batch_id, None)
            if flight is not None:  # else the batch has ended before, and this is a duplicate
                # Where the function failed, the time is not that of the whole batch.
                is_finished = isinstance(event, BatchFinished) and not event.failed_tasks
                self._on_batch_end(flight, is_finished=is_finished, trouble=_trouble(event))
        elif isinstance(event, RequestCancelled):
            row = self._rows.get(self._ids_from + event.request_id)
            if row is not None:
                waited_ns = self._now_ns - self._requests["arrival_ns"][row]
                self._terms["cancel_ns"][row] = max(1, waited_ns)
        elif isinstance(event, InstanceStarted | WeightsLoaded):
            self._preparing.discard(event.instance_id)
            start = self._starting.pop(event.instance_id, None)
            if start is not None:
                self._start_ns.setdefault(start[0], []).append(self._now_ns - start[1])

    def _on_action(self, action: Action) -> None:
        if isinstance(action, Dispatch):
            is_cold = action.instance_id is None or action.instance_id in self._preparing
            self._on_batch_sent(action, is_cold)
            for task_id in action.task_ids:
                self._on_dispatch(task_id // STAGES_MAX, action, is_cold)
        elif isinstance(action, Settle):
            row = self._rows.pop(self._ids_from + action.request_id, None)
            if row is not None:
                self._requests["finished_ns"][row] = self._now_ns
                self._requests["outcome"][row] = action.settlement.outcome
        elif isinstance(action, ReportWouldReject):
            row = self._rows.get(self._ids_from + action.request_id)
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
        self._rows[self._ids_from + event.request_id] = len(self._terms["items"])
        # A deadline that is not hard is that of the objective, from before the event was handled.
        own_timeout_ns = max(1, own_ns - self._first_ns - self._now_ns) if event.is_hard else 0
        terms = {
            "items": _checked("items", event.items, _ITEMS_MAX),
            "priority": event.priority,
            "timeout_ns": own_timeout_ns if own_ns else 0,
            "cancel_ns": 0,
            "cost_usd": event.cost_usd,
            "payload_bytes": event.payload_bytes,
        }
        for name, value in terms.items():
            self._terms[name].append(value)
        known = {
            "arrival_ns": self._now_ns,
            "deadline_ns": own_ns - self._first_ns if own_ns else slo.deadline_ns(self._now_ns),
            "pipeline": event.pipeline,
            "client": _checked("client", event.client, len(app.clients)),
        }
        for name, (_, default) in REQUEST_CODES.items():
            self._requests[name].append(known.get(name, default))

    def _on_dispatch(self, request_id: int, dispatch: Dispatch, is_cold: bool) -> None:
        row = self._rows.get(self._ids_from + request_id)
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

    def _on_batch_sent(self, dispatch: Dispatch, is_cold: bool) -> None:
        variant_id = _checked("variant", dispatch.variant_id, len(self._app.variants))
        _checked("pool", dispatch.pool_id, len(self._app.pools))
        variant = self._app.variants[variant_id]
        _checked("shape", dispatch.shape_id, len(variant.shapes))
        flight = _Flight(dispatch, variant, self._now_ns, is_cold)
        self._in_flight[dispatch.batch_id] = flight
        self._advance(dispatch)
        if dispatch.node_id is not None:
            self._on_node.setdefault(dispatch.node_id, []).append(flight)
        elif (host := self._app.pools[dispatch.pool_id].host) is not None:
            self._calls_of.setdefault(host.id, []).append(flight)

    def _advance(self, changing: Dispatch) -> None:
        """Credit the batches beside one that begins or ends with what they have done until now.

        They are those on its node, and on a host those on all its nodes.
        """
        node_id, pool = changing.node_id, self._app.pools[changing.pool_id]
        if pool.host is None:
            if node_id is not None:
                self._credit(node_id, self._running_on(node_id, pool), 1.0)
            return
        nodes = self._nodes_of.setdefault(pool.host.id, {})
        if node_id is not None:
            nodes[node_id] = pool
        running = {each: self._running_on(each, of_pool) for each, of_pool in nodes.items()}
        flights = [*self._calls_of.get(pool.host.id, ()), *chain.from_iterable(running.values())]
        wanted_milli = sum(f.variant.wanted_cpu_milli(f.dispatch.shape_id) for f in flights)
        for each, of_node in running.items():
            self._credit(each, of_node, pool.host.slowdown(wanted_milli))

    def _running_on(self, node_id: int, pool: Pool) -> list[_Flight]:
        """As many as the node has slots run, the first first; the others are queued there."""
        return self._on_node.get(node_id, [])[: pool.slots]

    def _credit(self, node_id: int, running: list[_Flight], of_host: float) -> None:
        elapsed_ns = self._now_ns - self._changed_ns.get(node_id, 0)
        self._changed_ns[node_id] = self._now_ns
        for flight in running:
            flight.concurrency = max(flight.concurrency, len(running))
            slowdown = flight.variant.profile.slowdown_at(len(running)) * of_host
            for other in running if flight.variant.interference else ():
                if other is not flight:
                    slowdown *= flight.variant.interference[other.variant.function_id]
            flight.alone_ns += elapsed_ns / slowdown

    def _on_batch_end(self, flight: _Flight, *, is_finished: bool, trouble: int) -> None:
        dispatch, node_id = flight.dispatch, flight.dispatch.node_id
        pool = self._app.pools[dispatch.pool_id]
        self._advance(dispatch)
        if node_id is not None:
            self._on_node[node_id].remove(flight)
        else:
            flight.alone_ns = self._now_ns - flight.sent_ns
            if pool.host is not None:
                self._calls_of[pool.host.id].remove(flight)
        network_ns = 2 * pool.network_ns
        row = {
            "variant": dispatch.variant_id,
            "items": _checked("items", dispatch.items, _ITEMS_MAX),
            "shape": dispatch.shape_id,
            "pool": dispatch.pool_id,
            "node": NOWHERE if node_id is None else _checked("node", node_id, _IDS_MAX),
            "concurrency": flight.concurrency,
            "sent_ns": flight.sent_ns,
            "ended_ns": self._now_ns,
            "alone_ns": max(1, round(flight.alone_ns) - network_ns),
            "cold": int(flight.is_cold),
            "finished": int(is_finished),
            "trouble": trouble,
        }
        for name, value in row.items():
            self._batches[name].append(value)

    def columns(self) -> LoggedColumns:
        """Return what was read so far."""
        return LoggedColumns(
            requests=build_requests(**self._requests),
            **{name: np.array(column) for name, column in self._terms.items()},
            batches=BatchColumns(**{name: np.array(c) for name, c in self._batches.items()}),
            end_ns=self._now_ns,
            start_ns={id: int(np.median(times)) for id, times in self._start_ns.items()},
        )


def _trouble(event: Event) -> int:
    if isinstance(event, BatchRefused):
        troubles = {Refusal.THROTTLED: Trouble.THROTTLED, Refusal.GONE: Trouble.DOWN}
        return troubles.get(event.reason, Trouble.NONE)
    return Trouble.DOWN if isinstance(event, BatchFailed | BatchLost) else Trouble.NONE


def _checked(key: str, value: int, limit: int) -> int:
    """Return an id of the log, or raise ConfigError if the application does not have it."""
    if not 0 <= value < limit:
        raise ConfigError("does not exist", key=key, value=value, allowed=f"below {limit}")
    return value


@dataclass(frozen=True, slots=True)
class ArrivalDelays:
    """By how much a request that arrives lengthens the batches on nodes."""

    arrival_ns: int = 0
    refusal_ns: int = 0  # in addition, if it is refused


def find_arrival_delays(columns: LoggedColumns) -> ArrivalDelays:
    """Return the delays that a log shows, and 0 for what may be chance.

    Batches of one variant, shape and size are compared with each other only.
    """
    batches = columns.batches
    is_usable = _is_on_node(batches) & (batches.cold == 0) & (batches.finished == 1)
    kinds = np.stack([batches.variant, batches.shape, batches.items])
    times_ns = _times_ns(columns)
    found = _Deviations()
    for kind in np.unique(kinds[:, is_usable], axis=1).T:
        is_own = is_usable & (kinds == kind[:, np.newaxis]).all(axis=0)
        if np.count_nonzero(is_own) >= GROUP_MIN:
            found.add(batches.sent_ns[is_own], batches.ended_ns[is_own], times_ns)
    return found.delays()


def without_arrivals(columns: LoggedColumns, delays: ArrivalDelays) -> LoggedColumns:
    """Return the columns with the times that batches would have had without any arrival."""
    batches = columns.batches
    took_ns = np.maximum(batches.ended_ns - batches.sent_ns, 1)
    seen = _count(_times_ns(columns), batches.sent_ns, batches.ended_ns)
    added_ns = seen @ np.array([delays.arrival_ns, delays.refusal_ns])
    # Of a batch that ran at half speed, a delay took the time of half as much work.
    share = np.where(_is_on_node(batches), 1.0 - added_ns / took_ns, 1.0)
    alone_ns = np.maximum(batches.alone_ns * share, 1.0).astype(np.int64)
    return replace(columns, batches=replace(batches, alone_ns=alone_ns))


@final
class _Deviations:
    """Of each batch, how its time and what it sees differ from the means of its kind."""

    def __init__(self) -> None:
        self._took_ns: list[Float64] = []
        self._seen: list[Float64] = []  # columns: requests that arrived, and those refused
        self._early: list[Float64] = []  # the same within the window

    def add(self, sent_ns: Int64, ended_ns: Int64, times_ns: tuple[Int64, Int64]) -> None:
        """Add the batches of one kind."""
        took_ns = ended_ns - sent_ns
        window_ns = np.int64(np.quantile(took_ns, _WINDOW_QUANTILE))
        seen = _count(times_ns, sent_ns, ended_ns)
        early = _count(times_ns, sent_ns, sent_ns + window_ns)
        self._took_ns.append(took_ns - took_ns.mean())
        self._seen.append(seen - seen.mean(axis=0))
        self._early.append(early - early.mean(axis=0))

    def delays(self) -> ArrivalDelays:
        """Return the estimates; that for refusals is left out first if it may be chance."""
        if not self._took_ns:
            return ArrivalDelays()
        took_ns = np.concatenate(self._took_ns)
        seen, early = np.concatenate(self._seen), np.concatenate(self._early)
        for columns in (2, 1):
            x, z = seen[:, :columns], early[:, :columns]
            if np.linalg.matrix_rank(z.T @ x) < columns:
                continue  # nothing arrived, or nothing was refused
            inverse = np.linalg.inv(z.T @ x)
            delays_ns = inverse @ (z.T @ took_ns)
            # The scatter may depend on the number of requests (White 1980).
            scatter = z * (took_ns - x @ delays_ns)[:, np.newaxis]
            errors_ns = np.sqrt(np.diag(inverse @ (scatter.T @ scatter) @ inverse.T))
            if (delays_ns > _ERRORS_MIN * errors_ns).all():
                return ArrivalDelays(*(round(ns) for ns in delays_ns.tolist()))
        return ArrivalDelays()


def _is_on_node(batches: BatchColumns) -> NDArray[np.bool_]:
    is_on_node: NDArray[np.bool_] = batches.node != NOWHERE
    return is_on_node


def _times_ns(columns: LoggedColumns) -> tuple[Int64, Int64]:
    """Return when requests arrived, and when those did that were refused, ascending."""
    requests = columns.requests
    is_refused = requests.outcome == Outcome.REJECTED
    return np.sort(requests.arrival_ns), np.sort(requests.arrival_ns[is_refused])


def _count(times_ns: tuple[Int64, Int64], since_ns: Int64, until_ns: Int64) -> Int64:
    """Return how many of each lie after one time and up to another: a row for each span."""
    counts = [
        np.searchsorted(times, until_ns, side="right")
        - np.searchsorted(times, since_ns, side="right")
        for times in times_ns
    ]
    return np.stack(counts, axis=1).astype(np.int64)


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
    sizes: tuple[int, ...]  # the batch sizes that were seen, ascending


def calibrate(app: App, batches: BatchColumns) -> list[CalibrationResult]:
    """Return the calibration of every function that ran.

    Small and large batches have factors of their own (`factors_by_size`). What a batch costs
    besides its function (to be sent, to be answered) does not grow with it, so the factor of a
    small batch is larger: for a function that takes less than that, many times larger. Batches that
    waited for a cold start or did not finish say nothing about service times, and are left out.
    """
    factor, function = _factors(app, batches)
    is_usable = (batches.cold == 0) & (batches.finished == 1)
    results: list[CalibrationResult] = []
    for candidate in app.functions:
        is_own = is_usable & (function == candidate.id)
        own = np.sort(factor[is_own])
        if len(own):
            p50, p99 = (float(q) for q in np.quantile(own, (0.5, 0.99), method="inverted_cdf"))
            items = batches.items[is_own]
            # The variants of a function share its factors: the profile is that of the most used.
            variant = app.variants[int(np.bincount(batches.variant[is_own]).argmax())]
            values = factors_by_size(items, factor[is_own], variant.profile.exec_ns)
            sizes = tuple(np.unique(items).tolist())
            results.append(
                CalibrationResult(candidate.name, len(own), own.mean(), p50, p99, values, sizes)
            )
    return results


def factors_by_size(
    items: Int32, factor: Float64, exec_ns: Sequence[int], group_min: int = GROUP_MIN
) -> dict[int, tuple[float, ...]]:
    """Return the distribution of factors by the batch size from which on it holds.

    A size with enough batches has its own. Neighbouring sizes share theirs if they are rare, and a
    size that was never seen has what those before and after it have: the same spread around the
    line that `fit_line` finds between profiled and true times of all sizes.

    >>> factors_by_size(np.array([1, 1]), np.array([1.4, 1.4]), [10, 20, 40])
    {1: (1.4, 1.4), 2: (1.2, 1.2), 3: (1.1, 1.1)}
    """
    starts = group_starts(items, group_min)
    expected_ns = np.array([_time_ns(exec_ns, size) for size in items.tolist()], np.float64)
    line = fit_line(expected_ns, factor * expected_ns)
    groups = {
        start: _SizeGroup(factor[is_own], expected_ns[is_own], line)
        for start, end in zip(starts, [*starts[1:], _ITEMS_MAX], strict=True)
        for is_own in [(items >= start) & (items < end)]
    }
    sizes, counts = (column.tolist() for column in np.unique(items, return_counts=True))
    frequent = {
        size: _SizeGroup(factor[items == size], expected_ns[items == size], line)
        for size, count in zip(sizes, counts, strict=True)
        if count >= group_min
    }
    found: dict[int, tuple[float, ...]] = {}
    last: tuple[list[int], int] | None = None  # groups and profile of the last entry
    for size in range(1, max(len(exec_ns), sizes[-1]) + 1):
        size_ns = _time_ns(exec_ns, size)
        near = [size] if size in sizes else _neighbours(sizes, size)
        own = sorted({max(start for start in starts if start <= each) for each in near})
        if size in frequent:
            last = None
            found[size] = frequent[size].factors(size_ns)
            continue
        is_like_last = last is not None and abs(size_ns - last[1]) <= _STEP * last[1]
        if len(own) == 1 and last is not None and last[0] == own and is_like_last:
            continue
        last = own, size_ns
        values = [groups[start].factors(size_ns) for start in own]
        weight = (size - near[0]) / (near[1] - near[0]) if len(own) == 2 else 0.0
        found[size] = _blended(values[0], values[-1], weight)
    return found


def group_starts(items: Int32, group_min: int = GROUP_MIN) -> list[int]:
    """Return the smallest size of each group of neighbouring sizes with enough batches.

    >>> group_starts(np.array([1, 1, 2, 4]), group_min=2)
    [1, 2]
    """
    sizes, counts = np.unique(items, return_counts=True)
    starts: list[int] = []
    count = group_min  # of the group so far
    for size, number in zip(sizes.tolist(), counts.tolist(), strict=True):
        if count >= group_min:
            starts.append(size)
            count = 0
        count += number
    if count < group_min and len(starts) > 1:
        del starts[-1]  # the largest sizes are rare: they share with those before
    return starts


def fit_line(expected_ns: Float64, took_ns: Float64) -> tuple[float, float]:
    """Return the time that every batch takes besides its profile, and the factor of the profile.

    Fitted to the medians of the batch sizes. Of a single size, whatever is more than the profile is
    taken for a time that each batch takes (to be sent, to be answered), and what is less for a
    factor.

    >>> fit_line(np.array([10.0, 20.0]), np.array([14.0, 24.0])), fit_line(np.ones(1), np.ones(1))
    ((4.0, 1.0), (0.0, 1.0))
    >>> fit_line(np.array([10.0, 20.0, 20.0]), np.array([12.0, 24.0, 24.0]))
    (0.0, 1.2)
    """
    known_ns, group, counts = np.unique(expected_ns, return_inverse=True, return_counts=True)
    medians_ns = np.array([np.median(took_ns[group == index]) for index in range(len(known_ns))])
    through_zero = float((counts * known_ns) @ medians_ns / ((counts * known_ns) @ known_ns))
    if len(known_ns) == 1:
        added_ns = float(medians_ns[0] - known_ns[0])
        return (added_ns, 1.0) if added_ns > 0.0 else (0.0, through_zero)
    factor, added_ns = np.polyfit(known_ns, medians_ns, 1, w=np.sqrt(counts)).tolist()
    if factor <= 0.0:
        return float(np.average(medians_ns, weights=counts)), 0.0
    if added_ns <= _ROUNDING * medians_ns[0]:
        return 0.0, round(through_zero, 9)
    return round(added_ns, 3), round(factor, 9)


@final
class _SizeGroup:
    """Batches of neighbouring sizes: how they spread around a line through the times of all."""

    def __init__(self, factor: Float64, expected_ns: Float64, line: tuple[float, float]) -> None:
        self._added_ns, self._factor = line
        self._spread = np.sort(factor / self._on_line(expected_ns))

    def factors(self, size_ns: int) -> tuple[float, ...]:
        """Return the factors of a size whose profile is `size_ns`."""
        return quantile_bin_means(self._spread * self._on_line(np.array(float(size_ns))))

    def _on_line(self, expected_ns: Float64) -> Float64:
        return self._factor + self._added_ns / expected_ns


def _neighbours(sizes: Sequence[int], size: int) -> list[int]:
    """Return the next smaller and the next larger size that was seen, or the nearest one."""
    return [
        *[each for each in sizes if each < size][-1:],
        *[each for each in sizes if each > size][:1],
    ]


def _blended(low: tuple[float, ...], high: tuple[float, ...], weight: float) -> tuple[float, ...]:
    """Return a distribution between two, quantile by quantile."""
    if weight == 0.0:
        return low
    at = (np.arange(_BLENDED_VALUES) + 0.5) / _BLENDED_VALUES
    blended = (1 - weight) * np.quantile(low, at) + weight * np.quantile(high, at)
    return tuple(float(f"{value:.4g}") for value in blended)


def _time_ns(exec_ns: Sequence[int], items: int) -> int:
    return max(1, exec_ns[min(max(items, 1), len(exec_ns)) - 1])


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
    arrival_ns: int = 0,
    refusal_ns: int = 0,
) -> dict[str, object]:
    """Return a copy of an application file whose simulation has the measured service times.

    The client-side overheads, equally likely, are in no log. The cost of decisions is part of the
    batch times already, so the overheads of decisions are 0. What arrivals and refusals take from
    batches (`ArrivalDelays`) must not be in those times any more.
    """
    overheads = [f"{overhead_ns}ns" for overhead_ns in client_overheads_ns]
    calibrated_spec = deepcopy(dict(spec))
    calibrated_spec["simulation"] = {
        "service_times": {
            "distribution": "observed",
            "observed": {result.function: _plain(result.factors) for result in results},
        },
        "overheads": {
            "arrival": f"{arrival_ns}ns",
            "refusal": f"{refusal_ns}ns",
            "client_overhead": overheads if len(overheads) > 1 else overheads[0],
        },
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
    factor = np.clip(batches.alone_ns / np.maximum(expected_ns, 1), 1 / _FACTOR_MAX, _FACTOR_MAX)
    return factor, functions[batches.variant]


def _expected_ns(variant: Variant, items: int, shape_id: int) -> int:
    return _time_ns(variant.shapes[shape_id].exec_ns, items)
