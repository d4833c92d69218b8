"""The event queue of the simulator, the items on it, and the cursor over open-loop arrivals.

The queue is a binary heap ordered by time, then by rank (`Rank`: completions, then arrivals, then
timers), then by the order of insertion. Open-loop arrivals are not on the heap: they are sorted
columns that `ArrivalCursor` reads. The heap holds only work in flight, timers and messages, so its
size follows the load and not the length of the trace.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappush
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from headgate.core.actions import Action
from headgate.core.events import TimerKey
from headgate.sim.interfaces import SimClient
from headgate.workload.arrivals import Arrivals

# Compiled code reads a Final directly, and what is imported from a dictionary.
_heappush: Final = heappush
_CHUNK = 65_536  # arrivals converted to lists at a time


class QueueItem:
    """Base of everything on the event queue. The engine knows how to process each kind."""

    __slots__ = ()


Entry = tuple[int, int, int, QueueItem]  # (at_ns, rank, sequence, item)


@final
class EventQueue:
    """A heap in which ties in time are broken by rank, then by the order of insertion."""

    def __init__(self) -> None:
        self.heap: list[Entry] = []
        self._sequence = 0

    def push(self, at_ns: int, rank: int, item: QueueItem) -> None:
        """Schedule an item. O(log n)."""
        self._sequence += 1
        _heappush(self.heap, (at_ns, rank, self._sequence, item))

    def under_way(self) -> set[int]:
        """Return the numbers of all items but timers. O(n)."""
        return {number for _, _, number, item in self.heap if not isinstance(item, TimerDue)}


@final
class TimerDue(QueueItem):
    """A timer that a Scheduler has set. Void if the timer has another token by now."""

    __slots__ = ("key", "scheduler", "token")

    def __init__(self, scheduler: int, key: TimerKey, token: int) -> None:
        self.scheduler = scheduler
        self.key = key
        self.token = token


@final
class Submission(QueueItem):
    """A request that a client, or a fault, sends."""

    __slots__ = (
        "client",
        "cost_usd",
        "items",
        "payload_bytes",
        "pipeline",
        "priority",
        "sender",
        "timeout_ns",
    )

    def __init__(
        self,
        pipeline: int,
        client: int,
        items: int,
        priority: int,
        timeout_ns: int,
        cost_usd: float,
        payload_bytes: int,
        sender: SimClient | None,
    ) -> None:
        self.pipeline = pipeline
        self.client = client
        self.items = items
        self.priority = priority
        self.timeout_ns = timeout_ns  # 0: the pipeline's SLO sets the deadline
        self.cost_usd = cost_usd  # 0.0: the pipeline's SLO says
        self.payload_bytes = payload_bytes  # 0: unknown
        self.sender = sender


@final
class Callback(QueueItem):
    """Whatever is too rare for a kind of its own: `call` is called with the time."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[int], None]) -> None:
        self.call = call


@final
class ActionInTransit(QueueItem):
    """An action on the network, between its Scheduler and the node or platform it is for."""

    __slots__ = ("action",)

    def __init__(self, action: Action) -> None:
        self.action = action


@final
class ArrivalCursor:
    """Reads open-loop arrivals in chunks, as lists, with the application's ids.

    Reading a numpy array element by element is slow and reading a list is fast, but one list of
    everything would not fit in memory for a trace of many millions: hence chunks. The indices by
    which a trace names pipelines and clients become the ids of the application.
    """

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
        self._on_chunk = on_chunk  # called before each chunk with the number of arrivals read
        self._offset = 0
        self.times: list[int] = []
        self.pipelines: list[int] = []
        self.clients: list[int] = []
        self.items: list[int] = []
        self.priorities: list[int] = []

    def read(self) -> bool:
        """Read the next chunk into the lists; return False when no arrivals are left."""
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
        self.priorities = _ints(arrivals.priorities[part])
        return True

    def columns(self) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]:
        """Return the times, pipeline ids and client ids of all arrivals."""
        arrivals = self._arrivals
        if arrivals is None:
            return np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int32)
        pipelines = self._pipeline_ids[arrivals.pipeline]
        return arrivals.times_ns, pipelines, self._client_ids[arrivals.client]


def _ints(column: NDArray[np.integer]) -> list[int]:
    values: list[int] = column.tolist()
    return values
