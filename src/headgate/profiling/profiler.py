"""The profiler: measures a function at every point of a grid, within a time budget.

A profile also describes the machine on which it was measured.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Final, final

import msgspec

from headgate import __version__
from headgate.core.errors import ConfigError
from headgate.functions.measure import PRECISION, MeasureRequest
from headgate.planning.capacity.latency_model import Characterisation, ColdStart, Point
from headgate.profiling.probe_client import Probe, ProbeTask

SAMPLES_MIN: Final = 50  # fewer do not resolve the tail
STARTS: Final = 3  # cold starts, of which the median is taken
_STARTS_SHARE: Final = 0.2  # share of the budget for cold starts after the first
_TIMEOUT_S: Final = 60.0  # of one reply, in addition to the budget
_QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")

Progress = Callable[[str, int, int], None]  # current step, number of steps done, total


@dataclass(frozen=True, slots=True)
class ProfilerSettings:
    """Grid, precision and time budget of a profile."""

    cores: tuple[int, ...]
    concurrency: tuple[int, ...]
    batches: tuple[int, ...]
    budget_s: float = 60.0
    precision: float = PRECISION
    store: str | None = None


@dataclass(frozen=True, slots=True)
class GridPoint:
    """One point of the grid."""

    cores: int
    concurrency: int
    batch: int


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """A measured characterisation, and how complete it is."""

    characterisation: Characterisation
    starts: int  # number of cold starts measured
    skipped: tuple[GridPoint, ...]  # for lack of time
    batches: bool  # False: the model accepts single items only
    took_s: float


def profile(
    task: ProbeTask, settings: ProfilerSettings, device: str, on_progress: Progress
) -> ProfileResult:
    """Measure a function. Raises `ConfigError` if it cannot be started, or fails.

    Grid points beyond the time budget are skipped, but at least one is always measured.
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
        self._starts: list[ColdStart] = []  # on the largest number of cores
        self._start_s = 0.0  # duration of the last start
        self._starts_left = 0  # probes still to be started
        self._peak_bytes = 0
        self._batches = True
        grid = len(settings.cores) * len(settings.concurrency) * len(settings.batches)
        self._left = self._total = grid

    def run(self, device: str) -> ProfileResult:
        for number, cores in enumerate(sorted(self._settings.cores, reverse=True), start=1):
            self._starts_left = len(self._settings.cores) - number
            if not self._points or self._left_s() > self._start_s:
                self._measure_on(cores)
            else:
                batches = self._settings.batches
                self._skip(cores, [(c, b) for b in batches for c in self._concurrencies])
        if not self._points:
            problem = "accepts single items only"
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
            with self._start_probe(cores) as probe:
                self._start_s = monotonic() - began_s
                if cores == max(self._settings.cores):
                    self._starts.append(probe.cold_start)
                    if self._needs_cold_start():
                        continue
                self._measure_grid(probe, cores)
                return

    def _needs_cold_start(self) -> bool:
        soon_s = monotonic() - self._began_s + self._start_s
        return len(self._starts) < STARTS and soon_s < _STARTS_SHARE * self._settings.budget_s

    def _measure_grid(self, probe: Probe, cores: int) -> None:
        """Measure all points of a number of cores, by increasing concurrency.

        Concurrency 1 comes first: its times predict how long the other points take.
        """
        single_s: dict[int, float] = {}
        for batch in self._settings.batches:
            if batch > 1 and not probe.batches:
                self._batches = False
                self._left -= len(self._concurrencies)
                continue
            for concurrency in self._concurrencies:
                # Each client needs at least two responses: the first one is warm-up.
                least_s = 2 * concurrency * single_s.get(batch, 0.0)
                if self._points and least_s > self._left_s():
                    self._skip(cores, [(concurrency, batch)])
                    continue
                point = self._measure(probe, GridPoint(cores, concurrency, batch))
                self._points.append(point)
                single_s.setdefault(batch, point.p50_ms / 1e3 / concurrency)
        self._peak_bytes = max(self._peak_bytes, probe.peak_bytes)

    def _measure(self, probe: Probe, grid_point: GridPoint) -> Point:
        share_s = (self._left_s() - self._starts_left * self._start_s) / self._left
        request = MeasureRequest(
            concurrency=grid_point.concurrency,
            batch=grid_point.batch,
            length_s=max(0.02, share_s),
            precision=self._settings.precision,
            samples_min=SAMPLES_MIN,
        )
        title = (
            f"{grid_point.cores} cores, {grid_point.concurrency} at once, batch {grid_point.batch}"
        )
        self._on_progress(title, self._total - self._left, self._total)
        measurement = probe.measure(request)
        self._left -= 1
        return Point(**asdict(grid_point), **msgspec.structs.asdict(measurement))

    def _skip(self, cores: int, points: Sequence[tuple[int, int]]) -> None:
        self._skipped += [GridPoint(cores, concurrency, batch) for concurrency, batch in points]
        self._left -= len(points)

    def _start_probe(self, cores: int) -> Probe:
        title = f"starting on {cores} cores"
        self._on_progress(title, self._total - self._left, self._total)
        task = msgspec.structs.replace(self._task, cores=self._order[:cores])
        return Probe(task, timeout_s=self._settings.budget_s + _TIMEOUT_S)

    def _left_s(self) -> float:
        return self._settings.budget_s - (monotonic() - self._began_s)

    @property
    def _concurrencies(self) -> list[int]:
        return sorted(self._settings.concurrency)


@dataclass(frozen=True, slots=True)
class Machine:
    """Description of a machine, stored in profiles."""

    cpu: str
    cores: int  # usable by this process
    memory_bytes: int
    system: str
    python: str
    headgate: str


def this_machine() -> Machine:
    """Return the description of this machine."""
    return Machine(
        cpu=_cpu(),
        cores=len(usable_cores()),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        headgate=__version__,
    )


def usable_cores(quota_path: Path = _QUOTA) -> list[int]:
    """Return the cores that processes may be pinned to, the best first.

    These are the cores of this process, limited to the CPU quota of its container: more would be
    throttled. The highest core numbers come first, because other programs tend to run on the
    lowest.
    """
    cores = sorted(os.sched_getaffinity(0), reverse=True)
    quota = _quota(quota_path)
    return cores if quota is None else cores[: max(1, int(quota))]


def _quota(path: Path) -> float | None:
    """Return the CPU quota of the control group in cores; None if there is none."""
    try:
        quota, period = path.read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
