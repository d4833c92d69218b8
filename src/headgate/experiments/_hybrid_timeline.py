"""One run of the hybrid experiments as it went: demand, instances, functions in flight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from headgate.core.actions import Action, Dispatch, StartInstance
from headgate.core.clock import SECOND_NS
from headgate.core.events import (
    BatchFinished,
    BatchRefused,
    Event,
    InstanceStarted,
    InstanceStopped,
)
from headgate.experiments._hybrid_runs import Case, arrivals_of, run_case
from headgate.sim.hooks import Observer

STEP_NS: Final = 10 * SECOND_NS
Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Timeline:
    """What was there in each step: means of demand and instances, the most calls at once."""

    demand: Float64  # in instances that it would keep busy
    ready: Float64
    paid: Float64  # those that boot included
    in_flight: Float64


@final
class Watcher(Observer):
    """Notes every change of what is there."""

    def __init__(self) -> None:
        self.paid: list[tuple[int, int]] = [(0, 0)]  # (from when, how many)
        self.ready: list[tuple[int, int]] = [(0, 0)]
        self.in_flight: list[tuple[int, int]] = [(0, 0)]
        self._calls: set[int] = set()
        self._ready: set[int] = set()

    def saw(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        if isinstance(event, InstanceStarted):
            self._ready.add(event.instance_id)
            _note(self.ready, now_ns, 1)
        elif isinstance(event, InstanceStopped):
            _note(self.paid, now_ns, -1)
            if event.instance_id in self._ready:
                _note(self.ready, now_ns, -1)
        elif isinstance(event, BatchFinished | BatchRefused) and event.batch_id in self._calls:
            self._calls.remove(event.batch_id)
            _note(self.in_flight, now_ns, -1)
        for action in actions:
            if isinstance(action, StartInstance):
                _note(self.paid, now_ns, 1)
            elif isinstance(action, Dispatch) and action.node_id is None:
                self._calls.add(action.batch_id)
                _note(self.in_flight, now_ns, 1)


def watch(case: Case, seed: int) -> Timeline:
    """Run a case and return how it went."""
    watcher = Watcher()
    run = run_case(case, seed, observer=watcher)
    steps = -(-run.window_ns // STEP_NS)
    counts = np.bincount(arrivals_of(case, seed).times_ns // STEP_NS, minlength=steps)
    return Timeline(
        counts / (case.world.capacity_per_s * STEP_NS / SECOND_NS),
        means_of(watcher.ready, steps),
        means_of(watcher.paid, steps),
        most_of(watcher.in_flight, steps),
    )


def means_of(changes: list[tuple[int, int]], steps: int) -> Float64:
    """Return the mean in each step of a number that changes now and then.

    >>> means_of([(0, 2), (STEP_NS // 2, 4)], 2).tolist()
    [3.0, 4.0]
    """
    edges_ns = np.arange(steps + 1) * STEP_NS
    times_ns, numbers = np.array(changes).T
    sums = np.concatenate(([0], np.cumsum(numbers[:-1] * np.diff(times_ns))))  # up to each change
    last = np.searchsorted(times_ns, edges_ns, side="right") - 1
    until = sums[last] + numbers[last] * (edges_ns - times_ns[last])
    means: Float64 = np.diff(until) / STEP_NS
    return means


def most_of(changes: list[tuple[int, int]], steps: int) -> Float64:
    """Return the largest value in each step of a number that changes now and then.

    >>> most_of([(0, 2), (1, 7), (2, 1)], 2).tolist()
    [7.0, 1.0]
    """
    times_ns, numbers = np.array(changes).T
    edges_ns = np.arange(steps) * STEP_NS
    most: Float64 = numbers[np.searchsorted(times_ns, edges_ns, side="right") - 1].astype(
        np.float64
    )
    within = times_ns // STEP_NS
    is_seen = within < steps
    np.maximum.at(most, within[is_seen], numbers[is_seen])
    return most


def _note(changes: list[tuple[int, int]], now_ns: int, change: int) -> None:
    changes.append((now_ns, changes[-1][1] + change))
