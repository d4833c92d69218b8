"""Warm-up: what a worker measures about its functions before it sends its `Hello`.

Every function is loaded, so that its signature is known and the first request need not wait. A
function without declared times is measured, on its own example or on zeros. A function that cannot
be loaded does not keep the worker from serving the others: its `MeasuredFunction` says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from time import monotonic_ns
from typing import Final, final

from headgate.config.options import VariantSource
from headgate.core.model import Variant
from headgate.functions.batch_runner import BatchRunner
from headgate.functions.tensor import Signature, TaskInputs
from headgate.live.ipc.crash_markers import MEASURE, CrashMarkers
from headgate.live.ipc.messages import MeasuredFunction
from headgate.live.worker.executor import Job
from headgate.live.worker.loading import Loader, LoadError
from headgate.live.worker.model_cache import ModelCache
from headgate.system.child_process import private_bytes

BUDGET_NS: Final = 400_000_000  # to measure one function
BUDGET_ALL_NS: Final = 1_000_000_000
RUNS_MAX: Final = 7  # per batch size


@final
class Warmup(Job):
    """Loads and measures every variant that this worker may run."""

    is_awaited = False

    def __init__(
        self,
        node_id: int,
        variants: Sequence[Variant],
        sources: Sequence[VariantSource | None],
        model_cache: ModelCache,
        loader: Loader,
        markers: CrashMarkers,
        limit_ns: int,
        on_done: Callable[[], None],
    ) -> None:
        self.limit_ns = limit_ns  # for each function
        self.measured: dict[int, MeasuredFunction] = {}  # by variant id
        self.on_done = on_done  # type: ignore[method-assign]
        self._node_id = node_id
        self._variants = [variant for variant in variants if sources[variant.id] is not None]
        self._sources = sources
        self._model_cache = model_cache
        self._loader = loader
        self._markers = markers

    def run(self) -> None:
        for variant in self._variants:
            self.description = f"loading {variant.name!r} for the first time"
            self.began_ns = monotonic_ns()
            problem = self._loader.suspect_reason(variant)  # loading it has killed a worker before
            try:
                if not problem:
                    self.measured[variant.id] = self._inspect(variant)
            except LoadError as error:
                problem = str(error)
            if problem:
                failed = MeasuredFunction(variant.name, Signature(), (), 0, 0, problem)
                self.measured[variant.id] = failed

    def _inspect(self, variant: Variant) -> MeasuredFunction:
        source = self._sources[variant.id]
        assert source is not None
        self._model_cache.evict_for(variant)
        before_ns, before_bytes = monotonic_ns(), private_bytes()
        runner = self._model_cache.acquire(variant)
        start_ns = monotonic_ns() - before_ns
        keep = False
        try:
            exec_ns = self._measure(variant, runner, source.batch_max) if source.is_measured else ()
            grown_bytes = max(0, private_bytes() - before_bytes)
            memory_bytes = self._model_cache.record_size(variant, grown_bytes)
            keep = True
        except BaseException as error:  # it exceeds its pool, or exhausts memory
            raise LoadError(self._loader.record_failure(variant, error)) from None
        finally:
            self._model_cache.release(variant, runner, keep=keep)
        return MeasuredFunction(variant.name, runner.signature, exec_ns, start_ns, memory_bytes)

    def _measure(self, variant: Variant, runner: BatchRunner, batch: int) -> tuple[int, ...]:
        """Return execution times by batch size; empty if measuring has killed a worker before."""
        markers, node_id = self._markers, self._node_id
        before = markers.read_measured(node_id, variant.id)
        if before is not None or markers.suspect_reason(MEASURE, variant.id):
            return before or ()
        budget_ns = min(BUDGET_NS, BUDGET_ALL_NS // len(self._variants))
        with markers.during(MEASURE, node_id, variant.id):
            exec_ns = measure_exec_ns(runner, batch, budget_ns)
        markers.write_measured(node_id, variant.id, exec_ns)
        return exec_ns


def measure_exec_ns(runner: BatchRunner, batch: int, budget_ns: int) -> tuple[int, ...]:
    """Return execution times by batch size, up to the largest size that works.

    Empty if the model has no example. Sizes beyond the time budget are extrapolated.
    """
    example = runner.example()
    if example is None:
        return ()
    tasks = [TaskInputs(id, 1, example) for id in range(batch)]
    if any(result.error for result in runner.run(tasks[:1])):  # this run also warms up the model
        return ()
    until_ns = monotonic_ns() + budget_ns
    known: dict[int, int] = {}
    for size in batch_sizes(batch):
        budget_left_ns = until_ns - monotonic_ns()
        if known and budget_left_ns < 2 * max(known.values()):
            break
        time_ns = _shortest_ns(runner, tasks[:size], budget_left_ns // 2)
        if time_ns is None:
            batch = max(known, default=0)
            break
        known[size] = time_ns
    return interpolate(known, batch)


def batch_sizes(batch: int) -> list[int]:
    """Return the batch sizes to measure: powers of two, and the largest.

    >>> batch_sizes(12)
    [1, 2, 4, 8, 12]
    """
    return [1 << power for power in range((batch - 1).bit_length())] + [batch]


def interpolate(known: dict[int, int], batch: int) -> tuple[int, ...]:
    """Return times for all sizes up to `batch`: monotone, linear between and beyond measured sizes.

    >>> interpolate({1: 10, 2: 9, 4: 20}, 6)
    (10, 10, 15, 20, 25, 30)
    """
    if not known or not batch:
        return ()
    points = [(0, 0)]
    for size, time_ns in sorted(known.items()):
        points.append((size, max(time_ns, points[-1][1], 1)))
    last, last_ns = points[-1]
    points.append((max(batch, last + 1), last_ns * max(batch, last + 1) // last))
    times: list[int] = []
    for (low, low_ns), (high, high_ns) in pairwise(points):
        for size in range(low + 1, high + 1):
            times.append(low_ns + (high_ns - low_ns) * (size - low) // (high - low))
    return tuple(times[:batch])


def _shortest_ns(runner: BatchRunner, tasks: list[TaskInputs], budget_ns: int) -> int | None:
    """Return the time of a batch on an undisturbed machine; None if it fails.

    It is the minimum of several runs, because other load can only add to it. The overhead of
    serving is learned while serving.
    """
    times_ns: list[int] = []
    while len(times_ns) < RUNS_MAX and (len(times_ns) < 2 or sum(times_ns) < budget_ns):
        began_ns = monotonic_ns()
        results = runner.run(tasks)
        times_ns.append(monotonic_ns() - began_ns)
        if any(result.error for result in results):
            return None
    return min(times_ns)
