"""The survey: what a worker finds out about its functions before it says hello.

Each is loaded, so that its signature is known and the first request need not wait. One whose times
were not declared is measured, on its own example or on zeros. A function that cannot be loaded does
not keep the worker from serving the others: its facts say why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from time import monotonic_ns
from typing import Final, final

from headgate.config.options import VariantSource
from headgate.core.model import Variant
from headgate.functions.tensor import Signature
from headgate.live.ipc.crash_markers import MEASURE, CrashMarkers
from headgate.live.ipc.messages import MeasuredFunction, TaskInputs
from headgate.live.worker.executor import Job
from headgate.live.worker.loading import Loader, LoadError
from headgate.live.worker.model_cache import ModelCache
from headgate.live.worker.runner import BatchRunner
from headgate.system.child_process import private_bytes

BUDGET_NS: Final = 400_000_000  # to measure one function
BUDGET_ALL_NS: Final = 1_000_000_000
RUNS_MAX: Final = 7  # of one batch size


@final
class Warmup(Job):
    """Looks at every variant that this worker may run."""

    is_awaited = False

    def __init__(
        self,
        node_id: int,
        variants: Sequence[Variant],
        sources: Sequence[VariantSource | None],
        stock: ModelCache,
        loader: Loader,
        markers: CrashMarkers,
        limit_ns: int,
        on_over: Callable[[], None],
    ) -> None:
        self.limit_ns = limit_ns  # for each of the functions
        self.facts: dict[int, MeasuredFunction] = {}  # by variant id
        self.over = on_over  # type: ignore[method-assign]
        self._node_id = node_id
        self._variants = [variant for variant in variants if sources[variant.id] is not None]
        self._sources = sources
        self._stock = stock
        self._loader = loader
        self._markers = markers

    def run(self) -> None:
        """Find the facts; of a function that cannot be loaded, why."""
        for variant in self._variants:
            self.what = f"loading {variant.name!r} for the first time"
            self.began_ns = monotonic_ns()
            problem = self._loader.suspicion(variant)  # that load has ended a worker before
            try:
                if not problem:
                    self.facts[variant.id] = self._look_at(variant)
            except LoadError as error:
                problem = str(error)
            if problem:
                facts = MeasuredFunction(variant.name, Signature(), (), 0, 0, problem)
                self.facts[variant.id] = facts

    def _look_at(self, variant: Variant) -> MeasuredFunction:
        source = self._sources[variant.id]
        assert source is not None
        self._stock.make_way(variant)
        before_ns, before_bytes = monotonic_ns(), private_bytes()
        runner = self._stock.take(variant)
        start_ns = monotonic_ns() - before_ns
        is_kept = False
        try:
            exec_ns = self._measure(variant, runner, source.batch_max) if source.is_measured else ()
            grown_bytes = max(0, private_bytes() - before_bytes)
            memory_bytes = self._stock.weigh(variant, grown_bytes)
            is_kept = True
        except BaseException as error:  # it is larger than its pool, or leaves no memory for us
            raise LoadError(self._loader.failed(variant, error)) from None
        finally:
            self._stock.give(variant, runner, keep=is_kept)
        return MeasuredFunction(variant.name, runner.signature, exec_ns, start_ns, memory_bytes)

    def _measure(self, variant: Variant, runner: BatchRunner, batch: int) -> tuple[int, ...]:
        """Return the time of a batch by its size; nothing if that has ended a worker before."""
        markers, node_id = self._markers, self._node_id
        before = markers.measured(node_id, variant.id)
        if before is not None or markers.suspicion(MEASURE, variant.id):
            return before or ()
        budget_ns = min(BUDGET_NS, BUDGET_ALL_NS // len(self._variants))
        with markers.during(MEASURE, node_id, variant.id):
            exec_ns = measure(runner, batch, budget_ns)
        markers.keep_measured(node_id, variant.id, exec_ns)
        return exec_ns


def measure(runner: BatchRunner, batch: int, budget_ns: int) -> tuple[int, ...]:
    """Return the time of a batch by its size, up to the largest one that works.

    Empty if it cannot be said what to measure with. What there is no time for is extrapolated.
    """
    example = runner.example()
    if example is None:
        return ()
    works = [TaskInputs(id, 1, example) for id in range(batch)]
    if any(result.error for result in runner.run(works[:1])):  # also warms it up
        return ()
    until_ns = monotonic_ns() + budget_ns
    known: dict[int, int] = {}
    for size in sizes(batch):
        left_ns = until_ns - monotonic_ns()
        if known and left_ns < 2 * max(known.values()):
            break
        time_ns = _shortest_ns(runner, works[:size], left_ns // 2)
        if time_ns is None:
            batch = max(known, default=0)
            break
        known[size] = time_ns
    return fill(known, batch)


def sizes(batch: int) -> list[int]:
    """Return the batch sizes to measure.

    >>> sizes(12)
    [1, 2, 4, 8, 12]
    """
    return [1 << power for power in range((batch - 1).bit_length())] + [batch]


def fill(known: dict[int, int], batch: int) -> tuple[int, ...]:
    """Return times for all sizes up to `batch`: never falling, in proportion beyond those known.

    >>> fill({1: 10, 2: 9, 4: 20}, 6)
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


def _shortest_ns(runner: BatchRunner, works: list[TaskInputs], budget_ns: int) -> int | None:
    """Return how long it takes undisturbed; None if it breaks.

    That is the shortest of several: others on the machine can only make it longer, and what serving
    adds is found while serving.
    """
    times_ns: list[int] = []
    while len(times_ns) < RUNS_MAX and (len(times_ns) < 2 or sum(times_ns) < budget_ns):
        began_ns = monotonic_ns()
        results = runner.run(works)
        times_ns.append(monotonic_ns() - began_ns)
        if any(result.error for result in results):
            return None
    return min(times_ns)
