"""Measures a loaded function with closed-loop clients, in the probe process.

Each client is a thread that sends the next request as soon as it has got the last response.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import pairwise
from math import isnan
from pathlib import Path
from statistics import fmean, median
from threading import Event, Thread
from time import monotonic_ns
from typing import Final, final

import msgspec
import numpy as np

from headgate.core.errors import ConfigError
from headgate.functions.arrays import Array, concatenate, split
from headgate.functions.loader import build_model
from headgate.functions.model import Model
from headgate.metrics.confidence import Interval, mean_interval
from headgate.profiling.model_store import fetch
from headgate.profiling.probe_client import Measurement, MeasureRequest, ProbeTask, Started

SAMPLES_MAX: Final = 20_000  # per grid point; more would not improve the estimate
_GROUPS: Final = 10
_WARM_UP: Final = 0.1  # share of the time of a grid point


def measure(call: Callable[[], None], request: MeasureRequest) -> Measurement:
    """Return the response times of `call` at the concurrency of `request`.

    The first call of each client and calls that end within the warm-up time are not counted.
    Measuring ends when the median is precise enough, or when the time is over and there is at least
    one sample per client on average. Raises what `call` raises.
    """
    times_ms = _Loop(call, request).run()
    interval = median_interval(times_ms)
    is_known = not isnan(interval.low)
    p50, p95, p99 = np.quantile(times_ms, (0.5, 0.95, 0.99)).tolist()
    return Measurement(
        mean=fmean(times_ms),
        p50=p50,
        p95=p95,
        p99=p99,
        samples=len(times_ms),
        p50_low=min(p50, interval.low) if is_known else None,
        p50_high=max(p50, interval.high) if is_known else None,
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
    """The closed-loop clients of one grid point, and the times measured so far."""

    def __init__(self, call: Callable[[], None], request: MeasureRequest) -> None:
        self._call = call
        self._request = request
        self._times_ms: list[float] = []  # in order of completion
        self._error: BaseException | None = None
        self._done = Event()
        self._warm_ns = monotonic_ns() + int(request.length_s * _WARM_UP * 1e9)
        self._end_ns = monotonic_ns() + int(request.length_s * 1e9)

    def run(self) -> list[float]:
        """Run the clients until there are enough samples, and return the times."""
        clients = [
            Thread(target=self._run_client, daemon=True) for _ in range(self._request.concurrency)
        ]
        for client in clients:
            client.start()
        # The check takes CPU time from the clients, so the interval between checks grows.
        wait_s = min(0.05, self._request.length_s / 4)
        while not self._done.wait(wait_s):
            wait_s *= 1.5
            if self._is_precise(list(self._times_ms)):
                self._done.set()
        for client in clients:
            client.join()
        if self._error is not None:
            raise self._error
        return self._times_ms

    def _run_client(self) -> None:
        try:
            self._call()
            while True:
                began_ns = monotonic_ns()
                # Yield, so that each call goes to the back of the run queue like a request from
                # the network. Otherwise one client would run several calls in one time slice while
                # the others wait, and the median would not show the interference.
                os.sched_yield()
                self._call()
                end_ns = monotonic_ns()
                if self._done.is_set():
                    return  # not counted: the last calls run at a lower concurrency
                if end_ns > self._warm_ns:
                    self._times_ms.append((end_ns - began_ns) / 1e6)
                # The clients check as well: busy threads may starve the main thread.
                if self._is_enough(end_ns):
                    self._done.set()
        except BaseException as error:  # anything that a model raises
            self._error = error
            self._done.set()

    def _is_enough(self, now_ns: int) -> bool:
        samples = len(self._times_ms)
        is_late = now_ns >= self._end_ns and samples >= self._request.concurrency
        return is_late or samples >= SAMPLES_MAX

    def _is_precise(self, times_ms: Sequence[float]) -> bool:
        if len(times_ms) < self._request.samples_min:
            return False
        interval = median_interval(times_ms)
        return interval.high - interval.low <= 2 * self._request.precision * interval.mean


@final
class ProbedFunction:
    """A model that was loaded as a platform instance loads it, and called once.

    `started` has the durations of the parts of that cold start.
    """

    def __init__(self, task: ProbeTask, ready_ns: int) -> None:
        if task.model is not None and task.code is None:
            _import_early("onnxruntime")
        imported_ns = monotonic_ns()
        if task.store is not None:
            task = _fetch_model(task, task.store)
        fetched_ns = monotonic_ns()
        self._model = build_model(task, task.base, task.function)
        built_ns = monotonic_ns()
        self._model.load()
        loaded_ns = monotonic_ns()
        self._example = _example(self._model, task.function)
        called_ns = monotonic_ns()
        self.call(1)
        self.started = Started(
            ready_ns=ready_ns,
            # Building the model imports the user's module.
            imports_ns=imported_ns - ready_ns + built_ns - fetched_ns,
            fetch_ns=fetched_ns - imported_ns,
            load_ns=loaded_ns - built_ns,
            first_call_ns=monotonic_ns() - called_ns,
            batches=self._model.batches,
        )

    def measure(self, request: MeasureRequest) -> Measurement:
        """Return the response times seen by closed-loop clients."""
        return measure(self._caller(request.batch), request)

    def call(self, batch: int) -> None:
        """Run a batch through the model; each item is decoded and encoded like a request."""
        self._caller(batch)()

    def _caller(self, batch: int) -> Callable[[], None]:
        model, example, lengths = self._model, self._example, [1] * batch

        def call() -> None:
            columns = [model.decode(dict(example)) for _ in range(batch)]
            output = model.predict(concatenate(columns))
            for part in split(output, lengths) if model.batches else (output,):
                model.encode(part)

        return call


def _import_early(name: str) -> None:
    """Import what `load` would import, so that it counts as import time.

    A missing module is ignored here: `load` reports it.
    """
    try:
        import_module(name)
    except ImportError:
        return


def _fetch_model(task: ProbeTask, store: str) -> ProbeTask:
    """Fetch the model (or the whole store, for code) and return a task that loads the copy."""
    if task.model is None:
        fetch(store, None, Path(task.copy))
        sys.path.insert(0, task.base)  # for modules that are not in the store
        return msgspec.structs.replace(task, base=task.copy)
    name = Path(task.model).name if Path(task.model).is_absolute() else task.model
    fetch(store, name, Path(task.copy))
    return msgspec.structs.replace(task, base=task.copy, model=name)


def _example(model: Model, function: str) -> dict[str, Array]:
    example = model.example()
    if example is None:
        raise ConfigError(
            "has no example input to measure with",
            where=function,
            allowed="`inputs`, or an `example` method",
        )
    for array in example.values():
        array.flags.writeable = False  # like the arrays of requests
    return example
