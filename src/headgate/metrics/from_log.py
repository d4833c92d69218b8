"""An event log as columns: what came, what became of it, and how long every batch took.

Times count from the first event, as those of any run do. A log sees what its Scheduler saw: a
request from when it was understood to when it was settled, and a batch from when it was ordered
to when its end was heard of, so the way to the worker and back is part of a batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, final

import numpy as np

from headgate.core.actions import Action, Dispatch, LoadWeights, Settle, StartInstance
from headgate.core.clock import NEVER_NS
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
from headgate.core.model import App
from headgate.core.records import STAGES_MAX
from headgate.core.states import Outcome
from headgate.metrics.columns import Int8, Int32, Int64, RequestColumns


@dataclass(frozen=True, slots=True)
class BatchColumns:
    """One row per batch that was sent and came back, in order of its end."""

    variant: Int32
    items: Int32
    sent_ns: Int64
    ended_ns: Int64
    cold: Int8  # 1 when it had to wait for a start or a load
    finished: Int8  # 1 when it ran to its end

    def __len__(self) -> int:
        return len(self.variant)


@dataclass(frozen=True, slots=True)
class LoggedColumns:
    """What a log tells. Requests that it leaves open count as cancelled, at NEVER_NS."""

    requests: RequestColumns  # `started_ns` is when it was first sent to a worker
    items: Int32  # by request
    own_deadline: Int8  # by request: 1 when the client set its deadline, not the objective
    batches: BatchColumns
    end_ns: int  # the last event


def read_columns(entries: Iterable[LogEntry], app: App) -> LoggedColumns:
    """Read a whole log. Keeps some 50 bytes per request and per batch."""
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
        self._requests = {name: array(code) for name, code in _REQUEST_TYPES.items()}
        self._rows: dict[int, int] = {}  # by request id, while it is open
        self._batches = {name: array(code) for name, code in _BATCH_TYPES.items()}
        self._out: dict[int, tuple[Dispatch, int, bool]] = {}  # by batch: when sent, whether cold
        self._preparing: set[int] = set()  # instances that are starting or loading

    def read(self, entry: LogEntry) -> None:
        if self._first_ns is None:
            self._first_ns = entry.now_ns
        self._now_ns = entry.now_ns - self._first_ns
        self._happened(entry.event)
        for action in entry.actions:
            self._ordered(action)

    def _happened(self, event: Event) -> None:
        if isinstance(event, RequestArrived):
            self._arrived(event)
        elif isinstance(event, BatchFinished | BatchFailed | BatchRefused | BatchLost):
            sent = self._out.pop(event.batch_id, None)
            if sent is not None:  # else it came back before
                self._ended(*sent, is_finished=isinstance(event, BatchFinished))
        elif isinstance(event, InstanceStarted | WeightsLoaded):
            self._preparing.discard(event.instance_id)

    def _ordered(self, action: Action) -> None:
        if isinstance(action, Dispatch):
            is_cold = action.instance_id is None or action.instance_id in self._preparing
            self._out[action.batch_id] = (action, self._now_ns, is_cold)
            for task_id in action.task_ids:
                self._sent(task_id // STAGES_MAX, is_cold)
        elif isinstance(action, Settle):
            row = self._rows.pop(action.request_id, None)
            if row is not None:
                self._requests["finished_ns"][row] = self._now_ns
                self._requests["outcome"][row] = action.outcome
        elif isinstance(action, StartInstance | LoadWeights):
            self._preparing.add(action.instance_id)

    def _arrived(self, event: RequestArrived) -> None:
        assert self._first_ns is not None
        app = self._app
        slo = app.pipelines[_checked("pipeline", event.pipeline, len(app.pipelines))].slo
        own_ns = event.deadline_ns
        self._rows[event.request_id] = len(self._requests["arrival_ns"])
        _append(
            self._requests,
            arrival_ns=self._now_ns,
            started_ns=NEVER_NS,
            finished_ns=NEVER_NS,
            deadline_ns=own_ns - self._first_ns if own_ns else slo.deadline_ns(self._now_ns),
            outcome=Outcome.CANCELLED,
            pipeline=event.pipeline,
            client=_checked("client", event.client, len(app.clients)),
            attempts=0,
            cold=0,
            items=_checked("items", event.items, _ITEMS_MAX),
            own_deadline=1 if own_ns else 0,
        )

    def _sent(self, request_id: int, is_cold: bool) -> None:
        row = self._rows.get(request_id)
        if row is None:
            return
        started_ns = self._requests["started_ns"]
        started_ns[row] = min(started_ns[row], self._now_ns)
        self._requests["attempts"][row] += 1
        self._requests["cold"][row] |= is_cold

    def _ended(self, order: Dispatch, sent_ns: int, is_cold: bool, *, is_finished: bool) -> None:
        _append(
            self._batches,
            variant=_checked("variant", order.variant_id, len(self._app.variants)),
            items=_checked("items", order.items, _ITEMS_MAX),
            sent_ns=sent_ns,
            ended_ns=self._now_ns,
            cold=int(is_cold),
            finished=int(is_finished),
        )

    def columns(self) -> LoggedColumns:
        """What was read so far."""
        requests = {name: np.array(column) for name, column in self._requests.items()}
        items, own_deadline = requests.pop("items"), requests.pop("own_deadline")
        batches = {name: np.array(column) for name, column in self._batches.items()}
        return LoggedColumns(
            RequestColumns(**requests), items, own_deadline, BatchColumns(**batches), self._now_ns
        )


_ITEMS_MAX: Final = 1 << 31
_REQUEST_TYPES: Final[Mapping[str, str]] = {
    "arrival_ns": "q",
    "started_ns": "q",
    "finished_ns": "q",
    "deadline_ns": "q",
    "outcome": "b",
    "pipeline": "i",
    "client": "i",
    "attempts": "i",
    "cold": "b",
    "items": "i",
    "own_deadline": "b",
}
_BATCH_TYPES: Final[Mapping[str, str]] = {
    "variant": "i",
    "items": "i",
    "sent_ns": "q",
    "ended_ns": "q",
    "cold": "b",
    "finished": "b",
}


def _append(columns: Mapping[str, array[int]], **row: int) -> None:
    for name, value in row.items():
        columns[name].append(value)


def _checked(key: str, value: int, limit: int) -> int:
    """Refuse what the application of the log does not have."""
    if not 0 <= value < limit:
        raise ConfigError("there is no such thing", key=key, value=value, allowed=f"below {limit}")
    return value
