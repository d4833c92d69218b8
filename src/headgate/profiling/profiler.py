"""The profiler: measures a function at every place of a grid, within a budget of time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from statistics import median
from time import monotonic
from typing import Final, final

import msgspec

from headgate.core.errors import ConfigError
from headgate.planning.latency_model import Characterisation, ColdStart, Point
from headgate.profiling.machine import usable_cores
from headgate.profiling.probe_client import MeasureRequest, Probe, ProbeTask

SAMPLES_MIN: Final = 50  # fewer say little about a tail
STARTS: Final = 3  # cold starts to take the median of
_STARTS_SHARE: Final = 0.2  # of the budget, for those after the first
_PATIENCE_S: Final = 60.0  # beyond the budget, for one answer

Progress = Callable[[str, int, int], None]  # what is done now, how much is done, of how much


@dataclass(frozen=True, slots=True)
class ProfilerSettings:
    """Where to measure, how well, and for how long."""

    cores: tuple[int, ...]
    concurrency: tuple[int, ...]
    batches: tuple[int, ...]
    budget_s: float = 60.0
    precision: float = 0.05
    store: str | None = None


@dataclass(frozen=True, slots=True)
class GridPoint:
    """One place of the grid."""

    cores: int
    concurrency: int
    batch: int


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """What came of it."""

    characterisation: Characterisation
    starts: int  # cold starts behind their median
    skipped: tuple[GridPoint, ...]  # for want of time
    batches: bool  # False: only single items could be measured
    took_s: float


def profile(
    task: ProbeTask, settings: ProfilerSettings, device: str, on_progress: Progress
) -> ProfileResult:
    """Measure a function. Raises `ConfigError` if it cannot be started, or breaks.

    What there is no time for is skipped, but for one place: a budget is no reason to say nothing.
    """
    return _Profiler(task, settings, on_progress).run(device)


@final
class _Profiler:
    def __init__(self, task: ProbeTask, settings: ProfilerSettings, on_progress: Progress) -> None:
        self._task = msgspec.structs.replace(task, store=settings.store)
        self._settings = settings
        self._on_progress = on_progress
        self._began_s = monotonic()
        self._order = usable_cores()
        self._points: list[Point] = []
        self._skipped: list[GridPoint] = []
        self._starts: list[ColdStart] = []  # on the most cores
        self._start_s = 0.0  # how long the last one took
        self._to_start = 0  # how many are still to come
        self._peak_bytes = 0
        self._batches = True
        grid = len(settings.cores) * len(settings.concurrency) * len(settings.batches)
        self._left = self._total = grid

    def run(self, device: str) -> ProfileResult:
        for place, cores in enumerate(sorted(self._settings.cores, reverse=True), start=1):
            self._to_start = len(self._settings.cores) - place
            if not self._points or self._left_s() > self._start_s:
                self._measure_on(cores)
            else:
                self._skip(cores, [(c, b) for b in self._settings.batches for c in self._together])
        if not self._points:
            problem = "takes one item at a time"
            raise ConfigError(problem, where=self._task.function, key="--batch", allowed="1")
        parts = {
            field.name: median(getattr(start, field.name) for start in self._starts)
            for field in fields(ColdStart)
        }
        points = sorted(self._points, key=lambda p: (p.cores, p.batch, p.concurrency))
        return ProfileResult(
            Characterisation(
                function=self._task.function,
                device=device,
                points=tuple(points),
                cold_start=ColdStart(**parts),
                peak_memory_bytes=self._peak_bytes,
            ),
            starts=len(self._starts),
            skipped=tuple(self._skipped),
            batches=self._batches,
            took_s=monotonic() - self._began_s,
        )

    def _measure_on(self, cores: int) -> None:
        while True:
            began_s = monotonic()
            with self._child(cores) as child:
                self._start_s = monotonic() - began_s
                if cores == max(self._settings.cores):
                    self._starts.append(child.cold_start)
                    if self._wants_start():
                        continue
                self._measure_in(child, cores)
                return

    def _wants_start(self) -> bool:
        soon_s = monotonic() - self._began_s + self._start_s
        return len(self._starts) < STARTS and soon_s < _STARTS_SHARE * self._settings.budget_s

    def _measure_in(self, child: Probe, cores: int) -> None:
        """Measure everything on so many cores; the lone requests first, as they tell the rest."""
        lone_s: dict[int, float] = {}
        for batch in self._settings.batches:
            if batch > 1 and not child.batches:
                self._batches = False
                self._left -= len(self._together)
                continue
            for concurrency in self._together:
                # Everybody is answered twice at least: once to warm up.
                least_s = 2 * concurrency * lone_s.get(batch, 0.0)
                if self._points and least_s > self._left_s():
                    self._skip(cores, [(concurrency, batch)])
                    continue
                point = self._measure(child, GridPoint(cores, concurrency, batch))
                self._points.append(point)
                lone_s.setdefault(batch, point.p50_ms / 1e3 / concurrency)
        self._peak_bytes = max(self._peak_bytes, child.peak_bytes)

    def _measure(self, child: Probe, place: GridPoint) -> Point:
        share_s = (self._left_s() - self._to_start * self._start_s) / self._left
        wish = MeasureRequest(
            concurrency=place.concurrency,
            batch=place.batch,
            length_s=max(0.02, share_s),
            precision=self._settings.precision,
            samples_min=SAMPLES_MIN,
        )
        title = f"{place.cores} cores, {place.concurrency} at once, batch {place.batch}"
        self._on_progress(title, self._total - self._left, self._total)
        found = child.measure(wish)
        self._left -= 1
        return Point(
            cores=place.cores,
            concurrency=place.concurrency,
            batch=place.batch,
            mean_ms=found.mean,
            p50_ms=found.p50,
            p95_ms=found.p95,
            p99_ms=found.p99,
            samples=found.samples,
            p50_low_ms=found.p50_low,
            p50_high_ms=found.p50_high,
        )

    def _skip(self, cores: int, places: Sequence[tuple[int, int]]) -> None:
        self._skipped += [GridPoint(cores, concurrency, batch) for concurrency, batch in places]
        self._left -= len(places)

    def _child(self, cores: int) -> Probe:
        title = f"starting on {cores} cores"
        self._on_progress(title, self._total - self._left, self._total)
        task = msgspec.structs.replace(self._task, cores=self._order[:cores])
        return Probe(task, patience_s=self._settings.budget_s + _PATIENCE_S)

    def _left_s(self) -> float:
        return self._settings.budget_s - (monotonic() - self._began_s)

    @property
    def _together(self) -> list[int]:
        return sorted(self._settings.concurrency)
