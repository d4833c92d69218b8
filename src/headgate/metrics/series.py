"""A run over time, in equal bins: outcomes, rates, and how busy each resource was."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headgate.core.clock import SECOND_NS
from headgate.core.outcome import OUTCOME_NAMES, Outcome
from headgate.metrics.columns import Int64, RunColumns

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TimeBins:
    """The bins [0, step), [step, 2 step), ... that cover a run."""

    step_ns: int
    count: int

    @property
    def edges_ns(self) -> Int64:
        """The bounds of the bins: one more than there are bins."""
        return np.arange(self.count + 1, dtype=np.int64) * self.step_ns

    def index(self, times_ns: Int64) -> Int64:
        """Return the bin of each time; what lies outside falls into the first or the last bin."""
        return np.clip(times_ns // self.step_ns, 0, self.count - 1)


def time_bins(run: RunColumns, count_max: int = 120) -> TimeBins:
    """Return bins fine enough to see a burst, with ten requests a bin or so if there are few."""
    count = min(count_max, max(20, len(run.requests) // 10))
    # Rounding up makes the last bin as wide as the others: no false drop at the end of a rate.
    return TimeBins(max(1, -(-max(run.end_ns, run.window_ns) // count)), count)


def outcomes_by_arrival(run: RunColumns, bins: TimeBins) -> Int64:
    """Return counts [outcome, bin]: how the requests that arrived in a bin ended."""
    kinds = len(OUTCOME_NAMES)
    cell = bins.index(run.requests.arrival_ns)
    cell *= kinds
    cell += run.requests.outcome
    counts = np.bincount(cell, minlength=bins.count * kinds)
    return counts.reshape(bins.count, kinds).T.astype(np.int64)


def arrival_rps(run: RunColumns, bins: TimeBins) -> Floats:
    """Return the requests that arrived, per second, in each bin."""
    return _rate_rps(run.requests.arrival_ns, bins)


def goodput_rps(run: RunColumns, bins: TimeBins) -> Floats:
    """Return the answers in time that were given, per second, in each bin."""
    met = run.requests.outcome == Outcome.MET
    return _rate_rps(run.requests.finished_ns[met], bins)


def busy_share(run: RunColumns, bins: TimeBins) -> Floats:
    """Return shares [resource, bin]: how much of each resource was working, 0 to 1.

    A node with several slots is fully busy when all of them work, and a serverless pool when as
    many instances work as it had on average.
    """
    cumulative = _cumulative_work_ns(run, bins)
    units = np.array(_parallel_units(run, cumulative[:, -1]))
    share = np.diff(cumulative, axis=1) / (bins.step_ns * units[:, None])
    busy: Floats = np.clip(share, 0.0, 1.0)
    return busy


def _rate_rps(times_ns: Int64, bins: TimeBins) -> Floats:
    counts = np.bincount(bins.index(times_ns), minlength=bins.count)
    return counts.astype(np.float64) * (SECOND_NS / bins.step_ns)


def _cumulative_work_ns(run: RunColumns, bins: TimeBins) -> Floats:
    """Return [resource, edge]: the work done on a resource before each edge.

    A span that began at s has done e - s by the edge e, and one that ended at t takes e - t away
    again. So the work at an edge is e times (begun - ended before it), less the sum of the begins,
    plus the sum of the ends: two counts and two sums per bin instead of a loop over spans.
    """
    shape = (len(run.resources), bins.count)
    open_spans, offset_ns = np.zeros(shape), np.zeros(shape)
    for times_ns, sign in ((run.spans.start_ns, 1), (run.spans.end_ns, -1)):
        cell = bins.index(times_ns) + run.spans.node * np.int64(bins.count)
        size = shape[0] * shape[1]
        open_spans += sign * np.bincount(cell, minlength=size).reshape(shape)
        offset_ns += sign * np.bincount(cell, times_ns, size).reshape(shape)
    edges_ns = bins.edges_ns[1:]
    work_ns = np.cumsum(open_spans, axis=1) * edges_ns - np.cumsum(offset_ns, axis=1)
    return np.hstack((np.zeros((shape[0], 1)), work_ns))


def _parallel_units(run: RunColumns, work_ns: Floats) -> list[float]:
    """Return, per resource, how many spans can run on it side by side."""
    units = []
    for resource, total_ns in zip(run.resources, work_ns, strict=True):
        slots = max(1, round(total_ns / resource.busy_ns)) if resource.busy_ns else 1
        instances = max(1.0, resource.up_ns / run.end_ns) if run.end_ns else 1.0
        units.append(slots * instances)
    return units
