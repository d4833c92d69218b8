"""What was measured of a function: how long it takes, alone and in company, and how it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from math import isfinite
from statistics import NormalDist
from typing import Final

import msgspec

from headgate.core.errors import ConfigError
from headgate.core.model import Profile
from headgate.planning.surface import Interpolation, Sample, Surface, fit_surface

SCHEMA: Final = "headgate-profile/1"


@dataclass(frozen=True)
class Point:
    """Response times of requests of `batch` items, `concurrency` of them at once, on some cores."""

    cores: float
    concurrency: int
    batch: int
    mean_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    samples: int
    # The bounds that hold the true median with 95 % confidence, where that is known.
    p50_low_ms: float | None = None
    p50_high_ms: float | None = None

    def __post_init__(self) -> None:
        times = (self.mean_ms, self.p50_ms, self.p95_ms, self.p99_ms)
        if not all(isfinite(value) and value > 0 for value in (self.cores, *times)):
            raise ValueError("cores and times must be more than zero")
        if self.concurrency < 1 or self.batch < 1:
            raise ValueError("concurrency and batch must be at least 1")

    def time_ms(self, quantile: float) -> float:
        """Return a quantile of the times: between and beyond those known as if log-normal.

        >>> point = Point(1, 1, 1, 11.0, 10.0, 20.0, 30.0, 50)
        >>> point.time_ms(0.5), point.time_ms(0.95), round(point.time_ms(0.9), 1)
        (10.0, 20.0, 17.2)
        """
        p95_ms = max(self.p50_ms, self.p95_ms)
        p99_ms = max(p95_ms, self.p99_ms)
        known = {0.5: self.p50_ms, 0.95: p95_ms, 0.99: p99_ms}
        if quantile in known:
            return known[quantile]
        if quantile < 0.5:
            return self.p50_ms
        low, high = (0.5, 0.95) if quantile < 0.95 else (0.95, 0.99)
        z, z_low, z_high = (_NORMAL.inv_cdf(min(q, 0.9999)) for q in (quantile, low, high))
        part = (z - z_low) / (z_high - z_low)
        rise: float = (known[high] / known[low]) ** part
        return known[low] * rise


@dataclass(frozen=True)
class ColdStart:
    """The parts of a cold start, one after the other. The first call is all of that call."""

    process_ms: float
    imports_ms: float
    fetch_ms: float
    load_ms: float
    first_call_ms: float

    @property
    def total_ms(self) -> float:
        """From nothing to the first answer."""
        return self.process_ms + self.imports_ms + self.fetch_ms + self.load_ms + self.first_call_ms


@dataclass(frozen=True)
class Characterisation:
    """What is known of one function on one kind of machine."""

    function: str
    device: str
    points: tuple[Point, ...]
    cold_start: ColdStart | None = None
    peak_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError("there must be a point")

    @property
    def cores(self) -> tuple[float, ...]:
        """The core counts that were measured, rising."""
        return tuple(sorted({point.cores for point in self.points}))

    @property
    def concurrencies(self) -> tuple[int, ...]:
        """The numbers of requests at once that were measured, rising."""
        return tuple(sorted({point.concurrency for point in self.points}))

    @property
    def batches(self) -> tuple[int, ...]:
        """The batch sizes that were measured, rising."""
        return tuple(sorted({point.batch for point in self.points}))

    @cached_property
    def surface(self) -> Surface:
        """What is laid through the medians."""
        return fit_surface(self._samples(0.5))

    def time_ms(
        self, cores: float, concurrency: int, batch: int = 1, quantile: float = 0.5
    ) -> float:
        """Return a response time: as measured at the points, told by the surface elsewhere."""
        told = self._told.get(quantile)
        if told is None:
            told = self._told[quantile] = Interpolation(self.surface, self._samples(quantile))
        return told.time_ms(cores, concurrency, batch)

    def to_json(self) -> dict[str, object]:
        """Return plain data."""
        surface = asdict(self.surface)
        return {"schema": SCHEMA, **asdict(self), "surface": surface}

    @classmethod
    def from_json(cls, document: object, where: str | None = None) -> Characterisation:
        """Read what `to_json` gave; what stands beside it is left alone. Raises `ConfigError`."""
        schema = document.get("schema") if isinstance(document, dict) else None
        if schema != SCHEMA:
            problem = "is no profile"
            raise ConfigError(problem, where=where, key="schema", value=schema, allowed=SCHEMA)
        try:
            return msgspec.convert(document, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"is no profile: {error}", where=where) from None

    @classmethod
    def surrogate(
        cls,
        s_ms: float = 16.0,
        p_ms: float = 40.0,
        cores: Sequence[float] = (1, 2, 4, 6, 8),
        concurrency: Sequence[int] = range(1, 21),
    ) -> Characterisation:
        """Return RT(c, n) = c (s + p / min(n, 4)), which does what the hybrid paper says of it.

        >>> paper = Characterisation.surrogate()
        >>> [paper.time_ms(n, c) for n, c in ((2, 5), (2, 6), (8, 5), (8, 6))]
        [180.0, 216.0, 130.0, 156.0]
        """
        points = []
        for n in cores:
            for c in concurrency:
                time_ms = c * (s_ms + p_ms / min(n, 4))
                points.append(Point(n, c, 1, time_ms, time_ms, time_ms, time_ms, 1))
        return cls("recommender", "surrogate", tuple(points))

    @cached_property
    def _told(self) -> dict[float, Interpolation]:
        """By quantile, what was asked for before: planners ask thousands of times."""
        return {}

    def _samples(self, quantile: float) -> list[Sample]:
        return [
            Sample(point.cores, point.concurrency, point.batch, point.time_ms(quantile))
            for point in self.points
        ]


def profile_of(characterisation: Characterisation, cores: float, quantile: float = 0.5) -> Profile:
    """Return what a Scheduler should know of the function on so many cores.

    Batches and company up to the largest that were measured; both only ever make things slower,
    whatever noise says. The first call's own work is no part of the start: it is run time.
    """
    exec_ms = accumulate(
        (
            characterisation.time_ms(cores, 1, batch, quantile)
            for batch in range(1, characterisation.batches[-1] + 1)
        ),
        max,
    )
    alone_ms = characterisation.time_ms(cores, 1, 1, quantile)
    slowdown = accumulate(
        (
            max(1.0, characterisation.time_ms(cores, concurrency, 1, quantile) / alone_ms)
            for concurrency in range(1, characterisation.concurrencies[-1] + 1)
        ),
        max,
    )
    cold = characterisation.cold_start
    start_ms = 0.0
    if cold is not None:
        start_ms = max(cold.total_ms - alone_ms, cold.total_ms - cold.first_call_ms)
    return Profile(
        exec_ns=tuple(max(1, round(ms * 1e6)) for ms in exec_ms),
        slowdown=tuple(slowdown),
        start_ns=round(start_ms * 1e6),
        memory_bytes=characterisation.peak_memory_bytes or 0,
    )


_NORMAL: Final = NormalDist()
