"""Open-loop arrivals as the engine reads them: columns, handed over in chunks of plain lists.

Reading a numpy array element by element is slow; a chunk at a time as a list is fast, and a list of
everything would not fit in memory for a trace of many millions.
"""

from __future__ import annotations

from typing import final

import numpy as np
from numpy.typing import NDArray

from headgate.core.clock import NEVER_NS
from headgate.workload.arrivals import Arrivals

_CHUNK = 65_536


@final
class Feed:
    """A cursor over arrivals. `next_ns` is `NEVER_NS` when there are no more."""

    def __init__(self, arrivals: Arrivals | None, pipelines: list[int], clients: list[int]) -> None:
        self._arrivals = arrivals
        self._pipeline_ids = np.array(pipelines, dtype=np.int32)  # trace index -> app id
        self._client_ids = np.array(clients, dtype=np.int32)
        self._offset = 0
        self._index = 0
        self._times: list[int] = []
        self._pipelines: list[int] = []
        self._clients: list[int] = []
        self._items: list[int] = []
        self.next_ns = NEVER_NS
        self.pipeline = 0
        self.client = 0
        self.items = 1
        self.advance()

    def advance(self) -> None:
        """Go to the next arrival."""
        index = self._index
        if index == len(self._times):
            if not self._read_chunk():
                self.next_ns = NEVER_NS
                return
            index = 0
        self.next_ns = self._times[index]
        self.pipeline = self._pipelines[index]
        self.client = self._clients[index]
        self.items = self._items[index]
        self._index = index + 1

    def _read_chunk(self) -> bool:
        arrivals = self._arrivals
        if arrivals is None or self._offset >= len(arrivals.times_ns):
            self._times = []
            self._index = 0
            return False
        part = slice(self._offset, self._offset + _CHUNK)
        self._offset += _CHUNK
        self._times = _ints(arrivals.times_ns[part])
        self._pipelines = _ints(self._pipeline_ids[arrivals.pipeline[part]])
        self._clients = _ints(self._client_ids[arrivals.client[part]])
        count = len(self._times)
        self._items = [1] * count if arrivals.items is None else _ints(arrivals.items[part])
        return True


def _ints(column: NDArray[np.integer]) -> list[int]:
    values: list[int] = column.tolist()
    return values
