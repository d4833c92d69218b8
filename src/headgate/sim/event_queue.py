"""What is due to happen, in order: time, then rank, then the order it was put down.

Open-loop arrivals are not in here (they are sorted columns); the agenda holds only work in flight,
timers and messages, so it stays as small as what is going on.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappush
from typing import final

import numpy as np
from numpy.typing import NDArray

from headgate.core.actions import Action
from headgate.core.events import TimerKey
from headgate.sim.interfaces import FaultAction, SimClient
from headgate.workload.arrivals import Arrivals


class QueueItem:
    """Something that will happen. The engine knows what to do about each kind."""

    __slots__ = ()


Entry = tuple[int, int, int, QueueItem]  # (at_ns, rank, sequence, what)


@final
class EventQueue:
    """A heap with a documented order of ties."""

    def __init__(self) -> None:
        self.heap: list[Entry] = []
        self._sequence = 0

    def push(self, at_ns: int, rank: int, happening: QueueItem) -> None:
        """Put something down."""
        self._sequence += 1
        heappush(self.heap, (at_ns, rank, self._sequence, happening))


# What the engine puts on its agenda, other than the work that nodes and platforms have begun.


@final
class TimerDue(QueueItem):
    """A Scheduler's timer."""

    __slots__ = ("key", "scheduler", "token")

    def __init__(self, scheduler: int, key: TimerKey, token: int) -> None:
        self.scheduler = scheduler
        self.key = key
        self.token = token


@final
class Submission(QueueItem):
    """A client, or a fault, sends a request."""

    __slots__ = ("client", "items", "pipeline", "sender")

    def __init__(self, pipeline: int, client: int, items: int, sender: SimClient | None) -> None:
        self.pipeline = pipeline
        self.client = client
        self.items = items
        self.sender = sender


@final
class Cancellation(QueueItem):
    """A client withdraws a request."""

    __slots__ = ("request_id",)

    def __init__(self, request_id: int) -> None:
        self.request_id = request_id


@final
class ClientDue(QueueItem):
    """A client asked to be woken."""

    __slots__ = ("client",)

    def __init__(self, client: SimClient) -> None:
        self.client = client


@final
class FaultDue(QueueItem):
    """A fault begins or ends."""

    __slots__ = ("trouble",)

    def __init__(self, trouble: FaultAction) -> None:
        self.trouble = trouble


@final
class ActionInTransit(QueueItem):
    """An action on its way to where it is carried out."""

    __slots__ = ("action", "scheduler")

    def __init__(self, scheduler: int, action: Action) -> None:
        self.scheduler = scheduler
        self.action = action


@final
class DelayedAction(QueueItem):
    """An action that took the Scheduler until now to decide on."""

    __slots__ = ("action", "scheduler")

    def __init__(self, scheduler: int, action: Action) -> None:
        self.scheduler = scheduler
        self.action = action


@final
class Inbox(QueueItem):
    """A Scheduler that was thinking looks at the next event that waits for it."""

    __slots__ = ("scheduler",)

    def __init__(self, scheduler: int) -> None:
        self.scheduler = scheduler


# Open-loop arrivals as the engine reads them: columns, handed over in chunks of plain lists.
#
# Reading a numpy array element by element is slow; a chunk at a time as a list is fast, and a
# list of everything would not fit in memory for a trace of many millions.


_CHUNK = 65_536


@final
class ArrivalCursor:
    """A cursor over arrivals. The trace's names for pipelines and clients become the app's ids."""

    def __init__(
        self,
        arrivals: Arrivals | None,
        pipelines: list[int],
        clients: list[int],
        on_chunk: Callable[[int], None] | None = None,
    ) -> None:
        self._arrivals = arrivals
        self._pipeline_ids = np.array(pipelines, dtype=np.int32)  # trace index -> app id
        self._client_ids = np.array(clients, dtype=np.int32)
        self._on_chunk = on_chunk  # told, before each chunk, how many arrivals are through
        self._offset = 0
        self.times: list[int] = []
        self.pipelines: list[int] = []
        self.clients: list[int] = []
        self.items: list[int] = []

    def read(self) -> bool:
        """Put the next chunk into the lists; False when there are no more arrivals."""
        arrivals = self._arrivals
        if self._on_chunk is not None:
            self._on_chunk(self._offset)
        if arrivals is None or self._offset >= len(arrivals):
            return False
        part = slice(self._offset, self._offset + _CHUNK)
        self._offset += _CHUNK
        self.times = _ints(arrivals.times_ns[part])
        self.pipelines = _ints(self._pipeline_ids[arrivals.pipeline[part]])
        self.clients = _ints(self._client_ids[arrivals.client[part]])
        self.items = _ints(arrivals.sizes[part])
        return True

    def columns(self) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]:
        """All arrival times, pipeline ids and client ids."""
        arrivals = self._arrivals
        if arrivals is None:
            return np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int32)
        pipelines = self._pipeline_ids[arrivals.pipeline]
        return arrivals.times_ns, pipelines, self._client_ids[arrivals.client]


def _ints(column: NDArray[np.integer]) -> list[int]:
    values: list[int] = column.tolist()
    return values
