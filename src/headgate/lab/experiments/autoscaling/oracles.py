"""Clairvoyant autoscalers of the Swayam paper, and bounds below them.

An oracle knows every request in advance, its execution time included, and meets every deadline; a
backend runs one request at a time. `zero_setup` is ClairA1: backends appear at once and are
released the moment they are idle, so that only busy time is paid for. `lazy_release` is ClairA2: a
backend is paid for from the beginning of its set-up, which ends just in time, until it has been
idle for a timeout. The paper describes both and prints no algorithm; ours serves requests in order
of arrival, which is the order of their deadlines, by two rules:

- A request goes to the backend that is free latest among those where it is in time (best fit).
- Else a backend is added, and runs it as late as the deadline allows: what arrives in the meantime
  is served right behind it, and needs no backend of its own.

Both are greedy. What no autoscaler can undercut, by counting:

- Backend-time is at least the total execution time. ClairA1 uses exactly that.
- Requests that arrive after s with deadlines before t are executed between s and t. So there are
  at some time at least (their execution times) / (t - s) backends: `peak_bound`, over all s and t.
- Every backend of ClairA2 is set up and times out at least once (`lazy_release_bound_ns`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from headgate.core.clock import NEVER_NS
from headgate.core.errors import ConfigError

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class BackendUse:
    """When backends were paid for: one row per time from the start of a set-up to a release."""

    starts_ns: Int64
    ends_ns: Int64

    @property
    def total_ns(self) -> int:
        """Backend-time: the time for which backends were paid for, in all."""
        return int((self.ends_ns - self.starts_ns).sum())

    @property
    def peak(self) -> int:
        """The most backends at any time."""
        return int(self._counts()[1].max(initial=0))

    def at(self, times_ns: Int64) -> Int64:
        """Return the number of backends at each of these times."""
        edges_ns, counts = self._counts()
        before = np.searchsorted(edges_ns, times_ns, side="right")
        return np.concatenate(([0], counts))[before]

    def _counts(self) -> tuple[Int64, Int64]:
        """Return the times at which the number of backends changes, and the number from then on."""
        edges_ns, changes = np.unique(
            np.concatenate((self.starts_ns, self.ends_ns)), return_inverse=True
        )
        counts = np.zeros(len(edges_ns), dtype=np.int64)
        signs = np.repeat(np.array([1, -1]), len(self.starts_ns))
        np.add.at(counts, changes, signs)
        return edges_ns, np.cumsum(counts)


def zero_setup(arrivals_ns: Int64, exec_ns: Int64, response_max_ns: int) -> BackendUse:
    """Return the use of ClairA1. O(requests x log backends)."""
    starts_ns, ends_ns = _assign(arrivals_ns, exec_ns, response_max_ns, NEVER_NS)
    # A backend is released whenever it is idle, so which backend runs what makes no difference.
    return BackendUse(np.array(starts_ns, dtype=np.int64), np.array(ends_ns, dtype=np.int64))


def lazy_release(
    arrivals_ns: Int64, exec_ns: Int64, response_max_ns: int, *, setup_ns: int, timeout_ns: int
) -> BackendUse:
    """Return the use of ClairA2. O(requests x log backends).

    A backend that is needed at time 0 was set up before; that time is paid for as well.
    """
    sessions: list[list[int]] = []
    _assign(arrivals_ns, exec_ns, response_max_ns, timeout_ns, sessions)
    starts_ns = np.array([first for first, _ in sessions], dtype=np.int64) - setup_ns
    ends_ns = np.array([last for _, last in sessions], dtype=np.int64) + timeout_ns
    return BackendUse(starts_ns, ends_ns)


def _assign(
    arrivals_ns: Int64,
    exec_ns: Int64,
    response_max_ns: int,
    timeout_ns: int,
    sessions: list[list[int]] | None = None,
) -> tuple[list[int], list[int]]:
    """Assign each request a backend and a start; return starts and ends by request.

    A backend that has been idle for longer than `timeout_ns` is gone. To `sessions` are added, for
    each backend, the start of its first request and the end of its last one.
    """
    _check(arrivals_ns, exec_ns, response_max_ns)
    sessions = [] if sessions is None else sessions
    free: list[tuple[int, int]] = []  # (free from, session) of the backends, ascending
    starts_ns: list[int] = []
    ends_ns: list[int] = []
    for arrival_ns, length_ns in zip(arrivals_ns.tolist(), exec_ns.tolist(), strict=True):
        if timeout_ns != NEVER_NS:
            del free[: bisect_left(free, (arrival_ns - timeout_ns, 0))]
        latest_ns = arrival_ns + response_max_ns - length_ns
        at = bisect_right(free, (latest_ns, NEVER_NS)) - 1
        if at >= 0:
            free_ns, session = free.pop(at)
            start_ns = max(arrival_ns, free_ns)
        else:
            start_ns, session = latest_ns, len(sessions)
            sessions.append([start_ns, start_ns])
        end_ns = start_ns + length_ns
        sessions[session][1] = end_ns
        insort(free, (end_ns, session))
        starts_ns.append(start_ns)
        ends_ns.append(end_ns)
    return starts_ns, ends_ns


def peak_bound(arrivals_ns: Int64, exec_ns: Int64, response_max_ns: int) -> int:
    """Return a number of backends that some time needs, whatever the schedule.

    It is the largest ratio of the work between two times to the time between them, rounded up. A
    ratio of sums is maximised by Dinkelbach's method: while some pair is above the ratio found so
    far, take the best such pair, in O(requests) each time; it takes a few rounds. Preemption and
    the execution of one request on several backends at once would be allowed by this bound.
    """
    _check(arrivals_ns, exec_ns, response_max_ns)
    if not len(arrivals_ns):
        return 0
    done = np.cumsum(exec_ns).astype(np.float64)
    before = done - exec_ns
    begins, ends = arrivals_ns.astype(np.float64), (arrivals_ns + response_max_ns).astype(float)
    ratio = 0.0
    while True:
        # For each last request, the first one with which the work exceeds the ratio most.
        gains = ratio * begins - before
        best = np.maximum.accumulate(gains)
        last = int(np.argmax(done - ratio * ends + best))
        first = int(np.argmax(gains[: last + 1]))
        better = float((done[last] - before[first]) / (ends[last] - begins[first]))
        if better <= ratio * (1 + 1e-12):
            return max(1, ceil(ratio * (1 - 1e-9)))  # rounding must not add a backend
        ratio = better


def lazy_release_bound_ns(
    arrivals_ns: Int64, exec_ns: Int64, response_max_ns: int, *, setup_ns: int, timeout_ns: int
) -> int:
    """Return a backend-time below which nobody with this set-up and this timeout can stay."""
    peak = peak_bound(arrivals_ns, exec_ns, response_max_ns)
    return int(exec_ns.sum()) + peak * (setup_ns + timeout_ns)


def _check(arrivals_ns: Int64, exec_ns: Int64, response_max_ns: int) -> None:
    longest_ns = int(exec_ns.max(initial=0))
    if longest_ns > response_max_ns:
        problem = f"is shorter than a request, which takes {longest_ns} ns"
        raise ConfigError(problem, key="response_max_ns", value=response_max_ns)
    assert len(arrivals_ns) == len(exec_ns)
