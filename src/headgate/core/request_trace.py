"""The trace of one request: all entries of an event log that concern it.

The log has no table that maps events to requests. A task id contains its request id, and an event
that ends an action names the action, which is enough to follow the chain from cause to effect.

A request is found by its number, or by the id in the answer to its client. Such ids are not unique:
a client sends a request again under the same id, and may give one id to all of its requests, or one
that is also a number. So every request that is meant is traced, up to a limit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, final

from headgate.core.actions import Action, Dispatch, LoadWeights, StartInstance
from headgate.core.event_log import LogEntry
from headgate.core.events import (
    Event,
    InstanceStarted,
    InstanceStopped,
    NodeLost,
    RequestArrived,
    TimerKey,
    WeightsLoaded,
)
from headgate.core.records import STAGES_MAX

TRACED_MAX: Final = 10  # requests of one id that are traced: a client may give all the same

# As the log writes numbers: 007 can only be an id.
_NUMBER: Final = re.compile("0|[1-9][0-9]{0,18}")


@dataclass(frozen=True)
class RequestTrace:
    """The entries that concern the requests that were asked for, and how many were left out."""

    entries: list[LogEntry]
    left_out: int


def request_trace(entries: Iterable[LogEntry], request: str) -> RequestTrace:
    """Return the entries of a log that concern a request, with only the actions that do.

    `request` is its number in the log, or the id in the answer to its client. All requests that it
    names are traced, of those with the same id the first `TRACED_MAX`.

    These are its arrival, its dispatches, the ends of their batches, the starts and loads that the
    batches waited for, the loss of their instance or node, the request's timers, and its settling.
    The event of an entry may concern other requests: then it caused actions that concern this one.
    """
    tracer = _RequestTracer(request)
    for entry in entries:
        tracer.read(entry)
    return RequestTrace(tracer.entries(), tracer.left_out)


@final
class _RequestTracer:
    """Follows the requests that are meant through a log, in one pass."""

    def __init__(self, request: str) -> None:
        self.left_out = 0
        self._client_request_id = request
        self._named = 0  # requests whose clients know them by this id
        self._request_ids: set[int] = set()
        if _NUMBER.fullmatch(request):
            self._request_ids.add(int(request))
        self._batch_ids: set[int] = set()  # every batch with a task of the request
        self._in_flight: dict[int, Dispatch] = {}  # those batches that have not ended
        self._awaited: set[int] = set()  # instances that those batches wait for
        # Starts and loads under way, with the entry and index of the action that ordered them.
        # They concern the request once one of its batches waits for them.
        self._preparing: dict[int, tuple[LogEntry, int]] = {}
        self._kept: dict[int, tuple[LogEntry, set[int]]] = {}  # by seq; indices of actions kept

    def read(self, entry: LogEntry) -> None:
        """Keep what concerns the request, and remember what may turn out to concern it."""
        event = entry.event
        if isinstance(event, RequestArrived) and event.client_request_id:
            self._find(event)
        if self._concerns(event):
            self._keep(entry)
        if isinstance(event, InstanceStarted | InstanceStopped | WeightsLoaded):
            self._preparing.pop(event.instance_id, None)
            self._awaited.discard(event.instance_id)
        batch_id = _batch_of(event)
        if batch_id is not None:
            self._in_flight.pop(batch_id, None)
        for place, action in enumerate(entry.actions):
            self._read_action(entry, place, action)

    def entries(self) -> list[LogEntry]:
        """Return the trace so far, in order."""
        return [
            LogEntry(entry.seq, entry.now_ns, entry.event, [entry.actions[i] for i in sorted(kept)])
            for _, (entry, kept) in sorted(self._kept.items())
        ]

    def _find(self, event: RequestArrived) -> None:
        """Follow the request from here on if its client knows it by the id that was asked for."""
        if event.client_request_id != self._client_request_id:
            return
        self._named += 1
        if self._named <= TRACED_MAX:
            self._request_ids.add(event.request_id)
        elif event.request_id not in self._request_ids:
            self.left_out += 1

    def _read_action(self, entry: LogEntry, place: int, action: Action) -> None:
        if isinstance(action, StartInstance | LoadWeights):
            self._preparing[action.instance_id] = (entry, place)
        elif isinstance(action, Dispatch):
            if any(task_id // STAGES_MAX in self._request_ids for task_id in action.task_ids):
                self._keep(entry, place)
                self._follow(action)
        elif self._concerns(action):
            self._keep(entry, place)

    def _follow(self, dispatch: Dispatch) -> None:
        self._batch_ids.add(dispatch.batch_id)
        self._in_flight[dispatch.batch_id] = dispatch
        instance_id = dispatch.instance_id
        if instance_id is not None and instance_id in self._preparing:
            self._awaited.add(instance_id)
            self._keep(*self._preparing[instance_id])

    def _keep(self, entry: LogEntry, place: int | None = None) -> None:
        places = self._kept.setdefault(entry.seq, (entry, set()))[1]
        if place is not None:
            places.add(place)

    def _concerns(self, thing: Event | Action) -> bool:
        """Whether it names the request, one of its batches, or the node or instance of those."""
        if isinstance(thing, NodeLost):
            return any(thing.node_id == dispatch.node_id for dispatch in self._in_flight.values())
        if isinstance(thing, InstanceStopped):
            return any(
                thing.instance_id == dispatch.instance_id for dispatch in self._in_flight.values()
            )
        key: TimerKey | None = getattr(thing, "key", None)
        return (
            getattr(thing, "request_id", None) in self._request_ids
            or (key is not None and key[0] == "deadline" and key[1] in self._request_ids)
            or getattr(thing, "instance_id", None) in self._awaited
            or _batch_of(thing) in self._batch_ids
        )


def _batch_of(thing: Event | Action) -> int | None:
    """The batch that an event or an action names, directly or by its timeout timer."""
    key: TimerKey | None = getattr(thing, "key", None)
    if key is not None:
        return key[1] if key[0] == "lost" else None
    batch_id: int | None = getattr(thing, "batch_id", None)
    return batch_id
