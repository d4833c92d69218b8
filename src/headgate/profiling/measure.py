"""Closed-loop clients in threads: each asks again as soon as it is answered."""

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

SAMPLES_MAX: Final = 20_000  # of one place; more would say nothing new
_GROUPS: Final = 10
_WARM_UP: Final = 0.1  # of the time for a place


def measure(call: Callable[[], None], wish: MeasureRequest) -> Measurement:
    """Return the response times of `call` in the company that `wish` says.

    The first call of each client and whatever ends early is warm-up. It ends once the median is
    known well enough, or when its time is over and every client has been answered on average once.
    Raises what `call` raises.
    """
    times_ms = _Loop(call, wish).run()
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
    """Return where the median lies, from the medians of groups in order of time.

    Whatever disturbs a machine lasts for a while, so that neighbours resemble each other: groups
    see that, single times taken for independent would not.

    >>> median_interval([1.0, 2.0, 3.0, 2.0, 1.0, 2.0])
    Interval(mean=1.83..., low=..., high=..., n=3)
    """
    count = max(1, min(_GROUPS, len(times) // 2))
    bounds = [len(times) * index // count for index in range(count + 1)]
    groups = [times[low:high] for low, high in pairwise(bounds)]
    return mean_interval([median(group) for group in groups])


@final
class _Loop:
    """The clients of one place, and what they have seen so far."""

    def __init__(self, call: Callable[[], None], wish: MeasureRequest) -> None:
        self._call = call
        self._wish = wish
        self._times_ms: list[float] = []  # in order of their ends
        self._error: BaseException | None = None
        self._over = Event()
        self._warm_ns = monotonic_ns() + int(wish.length_s * _WARM_UP * 1e9)
        self._end_ns = monotonic_ns() + int(wish.length_s * 1e9)

    def run(self) -> list[float]:
        """Return the times, once there are enough of them."""
        clients = [Thread(target=self._ask, daemon=True) for _ in range(self._wish.concurrency)]
        for client in clients:
            client.start()
        # Looking takes time from those who are measured: so ever more seldom.
        wait_s = min(0.05, self._wish.length_s / 4)
        while not self._over.wait(wait_s):
            wait_s *= 1.5
            if self._is_precise(list(self._times_ms)):
                self._over.set()
        for client in clients:
            client.join()
        if self._error is not None:
            raise self._error
        return self._times_ms

    def _ask(self) -> None:
        try:
            self._call()
            while True:
                began_ns = monotonic_ns()
                # To the back of the queue, as a request that comes over the network. Else a client
                # would be served several times in one time slice while the others wait for theirs,
                # and the median would know nothing of company.
                os.sched_yield()
                self._call()
                end_ns = monotonic_ns()
                if self._over.is_set():
                    return  # who asks last has less company: that does not count
                if end_ns > self._warm_ns:
                    self._times_ms.append((end_ns - began_ns) / 1e6)
                # The clients see for themselves: threads that never rest let nobody else look.
                if self._is_enough(end_ns):
                    self._over.set()
        except BaseException as error:  # whatever a model does
            self._error = error
            self._over.set()

    def _is_enough(self, now_ns: int) -> bool:
        samples = len(self._times_ms)
        is_late = now_ns >= self._end_ns and samples >= self._wish.concurrency
        return is_late or samples >= SAMPLES_MAX

    def _is_precise(self, times_ms: Sequence[float]) -> bool:
        if len(times_ms) < self._wish.samples_min:
            return False
        interval = median_interval(times_ms)
        return interval.high - interval.low <= 2 * self._wish.precision * interval.mean


# The subject: a function started the way an instance of a platform starts it, and then called.


@final
class ProbedFunction:
    """A loaded model that was called once. `started` says how long that took, in its parts."""

    def __init__(self, task: ProbeTask, ready_ns: int) -> None:
        if task.model is not None and task.code is None:
            _import_early("onnxruntime")
        imported_ns = monotonic_ns()
        if task.store is not None:
            task = _fetched(task, task.store)
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
            # What the user's module imports is found out where it is built.
            imports_ns=imported_ns - ready_ns + built_ns - fetched_ns,
            fetch_ns=fetched_ns - imported_ns,
            load_ns=loaded_ns - built_ns,
            first_call_ns=monotonic_ns() - called_ns,
            batches=self._model.batches,
        )

    def measure(self, wish: MeasureRequest) -> Measurement:
        """Return what clients that call it again and again have to wait."""
        return measure(self._caller(wish.batch), wish)

    def call(self, batch: int) -> None:
        """Send a batch through the model, each item from a request of its own."""
        self._caller(batch)()

    def _caller(self, batch: int) -> Callable[[], None]:
        model, example, lengths = self._model, self._example, [1] * batch

        def call() -> None:
            columns = [model.decode(dict(example)) for _ in range(batch)]
            answer = model.predict(concatenate(columns))
            for part in split(answer, lengths) if model.batches else (answer,):
                model.encode(part)

        return call


def _import_early(name: str) -> None:
    """Import what `load` would, so that it counts as what it is. That may miss it; `load` says."""
    try:
        import_module(name)
    except ImportError:
        return


def _fetched(task: ProbeTask, store: str) -> ProbeTask:
    """Fetch the model, or all there is beside the code; the copy is what gets loaded."""
    if task.model is None:
        fetch(store, None, Path(task.copy))
        sys.path.insert(0, task.base)  # for what is not in the store
        return msgspec.structs.replace(task, base=task.copy)
    name = Path(task.model).name if Path(task.model).is_absolute() else task.model
    fetch(store, name, Path(task.copy))
    return msgspec.structs.replace(task, base=task.copy, model=name)


def _example(model: Model, function: str) -> dict[str, Array]:
    example = model.example()
    if example is None:
        raise ConfigError(
            "does not say what it takes: there is nothing to measure with",
            where=function,
            allowed="`inputs`, or an `example` method",
        )
    for array in example.values():
        array.flags.writeable = False  # as those of requests are
    return example
