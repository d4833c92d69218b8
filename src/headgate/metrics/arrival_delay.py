"""How much longer batches take for each request that arrives while they run, from a log.

Where a gateway and its clients share cores with the workers, receiving a request takes CPU time
from the batches in progress, and refusing one takes more: the answer says what would have been
accepted. The mean of that is in the times of the batches anyway, but not that those beside a burst
are the long ones, nor that more requests make all of them longer.

A longer batch sees more arrivals even if they cost nothing, so a regression of times on arrivals
would find a delay where there is none. What counts here are the arrivals in a window at the
beginning of a batch, which is over before nearly all batches of the kind are: their number does not
depend on how long the batch takes (instrumental variables; Wald 1940).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from headgate.core.states import Outcome
from headgate.metrics.columns import NOWHERE, Int64
from headgate.metrics.from_log import GROUP_MIN, BatchColumns, Float64, LoggedColumns

_WINDOW_QUANTILE: Final = 0.05  # of the times of a kind of batch: when its window is over
_ERRORS_MIN: Final = 1.96  # standard errors; what is nearer to 0 may be chance (95 %)


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
