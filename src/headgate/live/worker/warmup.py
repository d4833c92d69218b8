"""Warm-up: what a worker measures about its functions before it sends its `Hello`.

Every function is loaded, so that its signature is known and the first request need not wait. A
function without declared times is measured, on its own example or on zeros. A function that cannot
be loaded does not keep the worker from serving the others: its `MeasuredFunction` says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from time import monotonic_ns
from typing import Final, final

from headgate.config.build import interpolated
from headgate.config.options import VariantSource
from headgate.core.errors import ConfigError
from headgate.core.model import Variant
from headgate.functions.batch_runner import BatchRunner
from headgate.functions.measure import Measurement, MeasureRequest, example_call, measure
from headgate.functions.tensor import Signature, Tensor
from headgate.live.ipc.crash_markers import MEASURE, CrashMarkers
from headgate.live.ipc.messages import MeasuredFunction
from headgate.live.worker.executor import SLOW_LOAD_NS, Job
from headgate.live.worker.model_cache import Loader, LoadError, ModelCache
from headgate.metrics.format import format_value
from headgate.system.process import private_bytes

BUDGET_NS: Final = 400_000_000  # to measure one function
BUDGET_ALL_NS: Final = 1_000_000_000
ONCE_MS: Final = 2_000.0  # and beyond that, for each of two larger batches, as it is estimated
SAMPLES_MIN: Final = 10  # per batch size, if there is time
_LOG: Final = logging.getLogger(__name__)


@final
@dataclass(eq=False)
class Warmup(Job):
    """Loads and measures every variant that this worker may run."""

    node_id: int
    variants: Sequence[Variant]
    sources: Sequence[VariantSource | None]
    model_cache: ModelCache
    loader: Loader
    markers: CrashMarkers
    limit_ns: int  # for each function
    callback: Callable[[], None]
    measured: dict[int, MeasuredFunction] = field(default_factory=dict)  # by variant id
    description = "loading functions for the first time"
    is_awaited = False
    slow_ns = SLOW_LOAD_NS

    def __post_init__(self) -> None:
        self.variants = [v for v in self.variants if self.sources[v.id] is not None]

    def on_done(self) -> None:
        self.callback()

    def run(self) -> None:
        for variant in self.variants:
            self.description = f"loading {variant.name!r} for the first time"
            self.began_ns = monotonic_ns()
            problem = self.loader.suspect_reason(variant)  # loading it has killed a worker before
            try:
                if not problem:
                    self.measured[variant.id] = self._inspect(variant)
            except LoadError as error:
                problem = str(error)
            if problem:
                failed = MeasuredFunction(variant.name, Signature(), (), 0, 0, problem)
                self.measured[variant.id] = failed

    def _inspect(self, variant: Variant) -> MeasuredFunction:
        source = self.sources[variant.id]
        assert source is not None
        self.model_cache.evict_for(variant)
        before_ns, before_bytes = monotonic_ns(), private_bytes()
        loaded = self.model_cache.acquire(variant)
        runner = loaded.runner  # of the function's own shape, whose times it measures
        start_ns = monotonic_ns() - before_ns
        keep = False
        try:
            exec_ns = self._measure(variant, runner, source.batch_max) if source.is_measured else ()
            grown_bytes = max(0, private_bytes() - before_bytes)
            memory_bytes = self.model_cache.record_size(variant, grown_bytes)
            keep = True
        except BaseException as error:  # it exceeds its pool, or exhausts memory
            raise LoadError(self.loader.record_failure(variant, error)) from None
        finally:
            self.model_cache.release(variant, loaded, keep=keep)
        return MeasuredFunction(variant.name, runner.signature, exec_ns, start_ns, memory_bytes)

    def _measure(self, variant: Variant, runner: BatchRunner, batch: int) -> tuple[int, ...]:
        """Return execution times by batch size; empty if measuring has killed a worker before."""
        markers, node_id = self.markers, self.node_id
        before = markers.read_measured(node_id, variant.id)
        if before is not None or markers.suspect_reason(MEASURE, variant.id):
            return before or ()
        budget_ns = min(BUDGET_NS, BUDGET_ALL_NS // len(self.variants))
        self.description = f"measuring {variant.name!r}"
        with markers.during(MEASURE, node_id, variant.id):
            measured = MeasuredSizes(runner, batch, budget_ns)
        exec_ns = measured.exec_ns()
        if exec_ns:  # the median, with its 95 % confidence interval
            _LOG.info("%s: %s", variant.name, measured)
        markers.write_measured(node_id, variant.id, exec_ns)
        return exec_ns


@final
class MeasuredSizes:
    """The times of a function by batch size, and the largest size that works."""

    def __init__(self, runner: BatchRunner, batch_max: int, budget_ns: int) -> None:
        """Measure until the time is over, then two larger sizes. Sizes beyond are extrapolated.

        There are no sizes if the model has no example, or fails on it.
        """
        self.by_size: dict[int, Measurement] = {}
        self.batch_max = batch_max
        try:
            example = runner.example()
            if example is None:
                return
            example_call(runner, example, 1)()  # warms up the model, which may take long
        except BaseException as error:  # a model may raise anything
            runner.log_error(error)
            return
        self._measure(runner, example, monotonic_ns() + budget_ns)

    def _measure(self, runner: BatchRunner, example: list[Tensor], until_ns: int) -> None:
        sizes = batch_sizes(self.batch_max)
        for size in sizes:
            left_ms = (until_ns - monotonic_ns()) / 1e6
            if self.by_size and left_ms < 2 * max(time.p50_ms for time in self.by_size.values()):
                self._measure_larger(runner, example, sizes)
                break
            if not self._measure_size(runner, example, size, max(0.0, left_ms / 2e3)):
                break

    def _measure_larger(self, runner: BatchRunner, example: list[Tensor], sizes: list[int]) -> None:
        """Measure the largest size that is estimated to take `ONCE_MS` at most, twice.

        Where many items take hardly longer than one, the first estimate, a proportion, is far off:
        requests of many items would be refused, and as nobody runs them, nothing would ever correct
        it. Two sizes make a line, which reaches further.
        """
        for _ in range(2):
            known, estimates_ns = max(self.by_size), self.exec_ns()
            larger = [
                size for size in sizes if size > known and estimates_ns[size - 1] <= ONCE_MS * 1e6
            ]
            if not larger or not self._measure_size(runner, example, larger[-1], 0.0):
                return

    def _measure_size(
        self, runner: BatchRunner, example: list[Tensor], size: int, length_s: float
    ) -> bool:
        """Measure a size; return whether it works."""
        request = MeasureRequest(1, size, length_s, SAMPLES_MIN)
        call = example_call(runner, example, size)
        try:
            time = measure(call, request)
            if time.p50_low_ms is None and self._is_implausible(size, time):
                time = min(time, measure(call, request), key=lambda each: each.p50_ms)
        except ConfigError:  # the runner has logged why
            self.batch_max = max(self.by_size, default=0)
            return False
        self.by_size[size] = time
        return True

    def _is_implausible(self, size: int, time: Measurement) -> bool:
        """Whether a batch took more than its proportion of a smaller one: others disturbed it."""
        if not self.by_size:
            return False
        known, smaller = max(self.by_size.items())
        return time.p50_ms * known > smaller.p50_ms * size

    def exec_ns(self) -> tuple[int, ...]:
        """Return times of all sizes: measured, or estimated from those that are."""
        times_ns = {size: round(time.p50_ms * 1e6) for size, time in self.by_size.items()}
        return fill_sizes(times_ns, self.batch_max)

    def __str__(self) -> str:
        lines = [
            f"a batch of {size} takes {format_value('time_ms', time.p50_ms)}{_interval(time)}"
            for size, time in self.by_size.items()
        ]
        if max(self.by_size, default=0) < self.batch_max:
            known = "these" if len(self.by_size) > 1 else "it"
            lines.append(f"the times of larger ones are extrapolated from {known}")
        return ", ".join(lines)


def batch_sizes(batch: int) -> list[int]:
    """Return the batch sizes to measure: powers of two, and the largest.

    >>> batch_sizes(12)
    [1, 2, 4, 8, 12]
    """
    return [1 << power for power in range((batch - 1).bit_length())] + [batch]


def fill_sizes(known: dict[int, int], batch: int) -> tuple[int, ...]:
    """Return times for all sizes up to `batch`: monotone, linear between and beyond known sizes.

    Other processes only ever make a batch slower, so none is taken to be slower than a larger one:
    otherwise a single disturbed size would count for all that are larger. Beyond the last known, an
    item adds what it added up to there, counted from the size where that is most. A single size
    does not say what an item adds: times are in proportion.

    >>> fill_sizes({1: 10, 2: 90, 4: 20}, 6)
    (10, 20, 20, 20, 23, 26)
    >>> fill_sizes({1: 10}, 3)
    (10, 20, 30)
    """
    if not known or not batch:
        return ()
    sizes = sorted(known, reverse=True)
    monotone = dict(zip(sizes, accumulate((known[size] for size in sizes), min), strict=True))
    monotone.setdefault(batch, _extrapolated(monotone, batch))
    return interpolated(monotone)[:batch]


def _extrapolated(known: dict[int, int], batch: int) -> int:
    """Return the time of a batch that may be larger than all of these sizes."""
    last = max(known)
    if len(known) == 1:
        return known[last] * batch // last
    return known[last] + max(
        (known[last] - known[size]) * (batch - last) // (last - size)
        for size in known
        if size != last
    )


def _interval(time: Measurement) -> str:
    """Describe the interval of a median; one that is wider than it says nothing.

    >>> _interval(Measurement(1.0, 1.0, 1.0, 1.0, 10, 0.9, 1.1))
    ' ± 10.0 % (10 runs)'
    >>> _interval(Measurement(1.0, 1.0, 1.0, 1.0, 7, -150.0, 150.0))
    ' (too few runs for an interval)'
    """
    if time.p50_low_ms is not None and time.p50_high_ms is not None:
        half_ms = (time.p50_high_ms - time.p50_low_ms) / 2
        if half_ms <= time.p50_ms:
            return f" ± {100 * half_ms / time.p50_ms:.1f} % ({time.samples} runs)"
    return " (too few runs for an interval)"
