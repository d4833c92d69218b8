"""Open-loop arrivals as the engine reads them: columns, handed over in chunks of plain lists.

Reading a numpy array element by element is slow; a chunk at a time as a list is fast, and a list of
everything would not fit in memory for a trace of many millions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import numpy as np
from numpy.typing import NDArray

from headgate.workload.arrivals import Arrivals

_CHUNK = 65_536


@final
class Feed:
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
