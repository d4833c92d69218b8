"""Measures how long a loaded function takes, with closed-loop clients.

It is one loop for `headgate profile` and for a worker that starts, so that both estimate the same
quantity: the median time of `BatchRunner.run`. A client sends the next batch as soon as it has got
the last result. The loop ends when the confidence interval of the median is narrow, or at a limit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import isnan
from statistics import fmean, median
from threading import Event, Thread
from time import monotonic_ns
from typing import Final, final

import numpy as np
from msgspec import Struct

from headgate.core.errors import ConfigError
from headgate.functions.batch_runner import BatchRunner
from headgate.functions.tensor import TaskInputs, Tensor
from headgate.metrics.confidence import Interval, mean_interval

SAMPLES_MAX: Final = 20_000  # more would not improve the estimate
PRECISION: Final = 0.05
_GROUPS: Final = 10
_WARM_UP: Final = 0.1  # share of the time limit


@final
class MeasureRequest(Struct, frozen=True):
    """What to measure, and when to stop."""

    concurrency: int
    batch: int
    length_s: float  # time limit; at least one sample per client is taken in any case
    samples_min: int
    precision: float = PRECISION  # half-width of the median's confidence interval over the median


@final
class Measurement(Struct, frozen=True):
    """Response times. The interval of the median is None if there were too few samples."""

    mean_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    samples: int
    p50_low_ms: float | None
    p50_high_ms: float | None


def example_call(runner: BatchRunner, example: list[Tensor], batch: int) -> Callable[[], None]:
    """Return a call that runs a batch of equal requests, and raises `ConfigError` if one fails."""
    tasks = [TaskInputs(id, 1, example) for id in range(batch)]

    def call() -> None:
        for result in runner.run(tasks):
            if result.error:
                raise ConfigError(result.error)

    return call


def measure(call: Callable[[], None], request: MeasureRequest) -> Measurement:
    """Return the response times of `call` at the concurrency of `request`.

    The first call of each client and calls that end within the warm-up time are not counted. Raises
    what `call` raises.
    """
    times_ms = _Loop(call, request).run()
    interval = median_interval(times_ms)
    is_known = not isnan(interval.low)
    p50, p95, p99 = np.quantile(times_ms, (0.5, 0.95, 0.99)).tolist()
    return Measurement(
        mean_ms=fmean(times_ms),
        p50_ms=p50,
        p95_ms=p95,
        p99_ms=p99,
        samples=len(times_ms),
        p50_low_ms=min(p50, interval.low) if is_known else None,
        p50_high_ms=max(p50, interval.high) if is_known else None,
    )


def median_interval(times: Sequence[float]) -> Interval:
    """Return a confidence interval of the median, from medians of consecutive groups.

    Disturbances of a machine last for a while, so that successive times are correlated. Batch
    means account for that; treating single times as independent would not.

    >>> median_interval([1.0, 2.0, 3.0, 2.0, 1.0, 2.0])
    Interval(mean=1.83..., low=..., high=..., n=3)
    """
    count = max(1, min(_GROUPS, len(times) // 2))
    bounds = [len(times) * index // count for index in range(count + 1)]
    groups = [times[low:high] for low, high in pairwise(bounds)]
    return mean_interval([median(group) for group in groups])


@final
class _Loop:
    """The closed-loop clients, and the times measured so far."""

    def __init__(self, call: Callable[[], None], request: MeasureRequest) -> None:
        self._call = call
        self._request = request
        self._times_ms: list[float] = []  # in order of completion
        self._error: BaseException | None = None
        self._done = Event()
        self._next_check = request.samples_min
        self._warm_ns = monotonic_ns() + int(request.length_s * _WARM_UP * 1e9)
        self._end_ns = monotonic_ns() + int(request.length_s * 1e9)

    def run(self) -> list[float]:
        """Run the clients until there are enough samples, and return the times."""
        others = [
            Thread(target=self._run_client, daemon=True)
            for _ in range(self._request.concurrency - 1)
        ]
        for client in others:
            client.start()
        self._run_client()
        for client in others:
            client.join()
        if self._error is not None:
            raise self._error
        return self._times_ms

    def _run_client(self) -> None:
        is_alone = self._request.concurrency == 1
        try:
            self._call()
            while not self._done.is_set():
                began_ns = monotonic_ns()
                if not is_alone:
                    # Each call goes to the back of the run queue like a request from the network.
                    # Otherwise one client would run several calls in one time slice while the
                    # others wait, and the median would not show the interference.
                    os.sched_yield()
                self._call()
                ended_ns = monotonic_ns()
                if self._done.is_set():
                    return  # not counted: the last calls run at a lower concurrency
                if ended_ns > self._warm_ns:
                    self._times_ms.append((ended_ns - began_ns) / 1e6)
                if self._is_enough(ended_ns):
                    self._done.set()
        except BaseException as error:  # anything that a model raises
            self._error = error
            self._done.set()

    def _is_enough(self, now_ns: int) -> bool:
        samples = len(self._times_ms)
        if samples >= SAMPLES_MAX:
            return True
        if now_ns >= self._end_ns and samples >= self._request.concurrency:
            return True
        if samples < self._next_check:
            return False
        # A check takes CPU time from the clients, so the distance between checks grows.
        self._next_check = samples + samples // 2
        interval = median_interval(self._times_ms[:samples])
        return interval.high - interval.low <= 2 * self._request.precision * interval.mean
