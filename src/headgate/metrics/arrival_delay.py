"""How much longer batches take for each request that arrives while they run, from a log.

Where a gateway and its clients share cores with the workers, receiving a request takes CPU time
from the batches in progress. The mean of what it takes is in their times anyway, but not that the
batches beside a burst are the long ones. A simulation that draws times independently of arrivals
is therefore too optimistic about the tail.

A longer batch sees more arrivals even if they cost nothing, so a regression of times on arrivals
would find a delay where there is none. What counts here are the arrivals in a window at the
beginning of a batch, which is over before nearly all batches of the kind are: their number does not
depend on how long the batch takes (an instrumental variable; Wald 1940).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from headgate.metrics.columns import NOWHERE, Int64
from headgate.metrics.from_log import GROUP_MIN, BatchColumns, Float64, LoggedColumns

_WINDOW_QUANTILE: Final = 0.05  # of the times of a kind of batch: when its window is over
_ERRORS_MIN: Final = 1.96  # standard errors; what is nearer to 0 may be chance (95 %)


def delay_per_arrival_ns(columns: LoggedColumns) -> int:
    """Return by how much an arriving request lengthens the batches on nodes; 0 if none is found.

    Batches of one variant, shape and size are compared with each other only.
    """
    batches, arrival_ns = columns.batches, np.sort(columns.requests.arrival_ns)
    is_usable = _is_on_node(batches) & (batches.cold == 0) & (batches.finished == 1)
    kinds = np.stack([batches.variant, batches.shape, batches.items])
    found = _Deviations()
    for kind in np.unique(kinds[:, is_usable], axis=1).T:
        is_own = is_usable & (kinds == kind[:, np.newaxis]).all(axis=0)
        if np.count_nonzero(is_own) >= GROUP_MIN:
            found.add(batches.sent_ns[is_own], batches.ended_ns[is_own], arrival_ns)
    return found.delay_ns()


def without_arrivals(columns: LoggedColumns, delay_ns: int) -> LoggedColumns:
    """Return the columns with the times that batches would have had without any arrival."""
    batches, arrival_ns = columns.batches, np.sort(columns.requests.arrival_ns)
    took_ns = np.maximum(batches.ended_ns - batches.sent_ns, 1)
    added_ns = delay_ns * _count(arrival_ns, batches.sent_ns, batches.ended_ns)
    # Of a batch that ran at half speed, the delay took the time of half as much work.
    share = np.where(_is_on_node(batches), 1.0 - added_ns / took_ns, 1.0)
    alone_ns = np.maximum(batches.alone_ns * share, 1.0).astype(np.int64)
    return replace(columns, batches=replace(batches, alone_ns=alone_ns))


@final
class _Deviations:
    """Of each batch, how its time and its arrivals differ from the means of its kind."""

    def __init__(self) -> None:
        self._took_ns: list[Float64] = []
        self._arrivals: list[Float64] = []
        self._early: list[Float64] = []  # arrivals within the window

    def add(self, sent_ns: Int64, ended_ns: Int64, arrival_ns: Int64) -> None:
        """Add the batches of one kind."""
        took_ns = ended_ns - sent_ns
        window_ns = np.int64(np.quantile(took_ns, _WINDOW_QUANTILE))
        arrivals = _count(arrival_ns, sent_ns, ended_ns)
        early = _count(arrival_ns, sent_ns, sent_ns + window_ns)
        self._took_ns.append(took_ns - took_ns.mean())
        self._arrivals.append(arrivals - arrivals.mean())
        self._early.append(early - early.mean())

    def delay_ns(self) -> int:
        """Return the estimate, or 0 if it is not positive beyond what chance may make of it."""
        if not self._took_ns:
            return 0
        took_ns, arrivals = np.concatenate(self._took_ns), np.concatenate(self._arrivals)
        early = np.concatenate(self._early)
        explained = float(arrivals @ early)
        if explained <= 0.0:
            return 0
        delay_ns = float(took_ns @ early) / explained
        # The scatter may depend on the number of requests (White 1980).
        error_ns = float(np.linalg.norm((took_ns - delay_ns * arrivals) * early)) / explained
        return round(delay_ns) if delay_ns > _ERRORS_MIN * error_ns else 0


def _is_on_node(batches: BatchColumns) -> NDArray[np.bool_]:
    return batches.node != NOWHERE


def _count(arrival_ns: Int64, since_ns: Int64, until_ns: Int64) -> Int64:
    """Return how many requests arrived after one time and up to another."""
    until: Int64 = np.searchsorted(arrival_ns, until_ns, side="right").astype(np.int64)
    return until - np.searchsorted(arrival_ns, since_ns, side="right")
