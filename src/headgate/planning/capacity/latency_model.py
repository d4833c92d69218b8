"""Measured latency of a function over cores, concurrency and batch size, and a model fitted to it.

`Characterisation` holds the measured points and the cold start. `Surface` is the model that fills
the gaps between points. A few forms are fitted by non-negative least squares of relative errors,
because more work or more concurrency never makes anything faster. With n cores, c concurrent
requests and b items in each, of which min(n, knee) cores help, the terms of the forms are:

    shared    1, cb, cb/min(n, knee)         the shape of figure 2 of the hybrid-serving paper
    calls     as above, and c, c/min(...)    a call has a cost beside its items
    crowded   as above, and the same with max(0, c - n): more requests than cores interfere

The form with the smallest cross-validation error wins; the knee is tried at every measured core
count. Below one core all times are in proportion. The residuals at the points are interpolated
(inverse distance weighting), so the result is exact where it was measured.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import exp, isfinite
from statistics import NormalDist
from typing import Final, NamedTuple, TypeAlias, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from headgate.core.errors import ConfigError
from headgate.core.model import Profile

Floats: TypeAlias = NDArray[np.float64]

FORMS: Final = ("shared", "calls", "crowded")  # simpler forms first: they win a tie
FOLDS: Final = 10
POINTS_MIN: Final = 3  # the terms of the simplest form: fewer points do not determine it
_TERMS_WITHOUT_CROWD: Final = 5  # terms before those of a crowd
_DISTANCE_POWER: Final = 4  # how fast a point loses its say with distance


class LatencySample(NamedTuple):
    """A measured time with its cores, concurrency and batch size."""

    cores: float
    concurrency: float
    batch: float
    time_ms: float


@dataclass(frozen=True, slots=True)
class Surface:
    """A fitted form. Its errors are cross-validated; None if there were too few points."""

    form: str
    knee: float  # cores beyond this do not help
    coefficients: tuple[float, ...]  # ms, in the order of the form's terms
    mean_error: float | None = None  # relative: 0.1 is 10 %
    max_error: float | None = None

    def time_ms(self, cores: float, concurrency: float, batch: float = 1.0) -> float:
        """Return the time by the form alone, without interpolation.

        >>> Surface("shared", 4, (0.0, 16.0, 40.0)).time_ms(8, 5)
        130.0
        """
        point = np.array([[cores, concurrency, batch]], dtype=np.float64)
        return float((_terms(self.form, self.knee, point) @ np.array(self.coefficients))[0])


def fit_surface(samples: Sequence[LatencySample]) -> Surface:
    """Return the surface that predicts held-out samples best. Times must be positive.

    >>> exact = Surface("shared", 2, (1.0, 3.0, 8.0))
    >>> grid = [(n, c) for n in (1.0, 2.0, 4.0) for c in (1.0, 3.0, 9.0)]
    >>> fitted = fit_surface([LatencySample(n, c, 1.0, exact.time_ms(n, c)) for n, c in grid])
    >>> fitted.form, fitted.knee, [round(value, 6) for value in fitted.coefficients]
    ('shared', 2.0, [1.0, 3.0, 8.0])
    """
    assert samples, "a surface needs a point"
    table = np.array(samples, dtype=np.float64)
    errors_by_form = [(form, _held_out_errors(form, table)) for form in FORMS]
    form, errors = min(errors_by_form, key=lambda each: round(float(each[1].mean()), 6))
    fitted = _fit(form, table)
    if np.isinf(errors).any():
        return fitted
    return replace(fitted, mean_error=float(errors.mean()), max_error=float(errors.max()))


@final
class Interpolation:
    """A surface corrected by interpolated residuals: exact at its samples."""

    def __init__(self, surface: Surface, samples: Sequence[LatencySample]) -> None:
        table = np.array(samples, dtype=np.float64)
        coefficients = np.array(surface.coefficients)
        self._surface = surface
        self._times_ms: list[float] = table[:, 3].tolist()
        self._log_points = np.log(table[:, :3])
        predicted_ms = _terms(surface.form, surface.knee, table) @ coefficients
        self._log_residuals = np.log(table[:, 3] / predicted_ms)

    def time_ms(self, cores: float, concurrency: float, batch: float = 1.0) -> float:
        """Return the corrected time. O(samples)."""
        point = np.log((cores, concurrency, batch))
        distances = ((self._log_points - point) ** 2).sum(axis=1)
        nearest = int(distances.argmin())
        if distances[nearest] < 1e-18:
            return self._times_ms[nearest]
        weights = distances ** (-_DISTANCE_POWER / 2)
        residual = float((weights * self._log_residuals).sum() / weights.sum())
        return self._surface.time_ms(cores, concurrency, batch) * exp(residual)


def _terms(form: str, knee: float, points: Floats) -> Floats:
    """Return the terms of a form at points: a row per point, a column per term."""
    cores, concurrency, batch = points[:, 0], points[:, 1], points[:, 2]
    share = np.minimum(cores, 1.0)  # a fraction of a core takes proportionally longer
    cores = np.maximum(cores, 1.0)
    helping = np.minimum(cores, max(knee, 1.0))
    items = concurrency * batch
    terms = [np.ones_like(cores), items, items / helping]
    if form != "shared":
        terms += [concurrency, concurrency / helping]
    if form == "crowded":
        crowd = np.maximum(concurrency - cores, 0.0)
        terms += [crowd, crowd / helping]
    return np.stack(terms, axis=1) / share[:, None]


def _fit(form: str, table: Floats) -> Surface:
    """Return the form with the knee and the coefficients of least relative error."""
    best, best_error = None, np.inf
    for knee in np.unique(table[:, 0]):
        relative = _terms(form, knee, table) / table[:, 3:]
        expected = np.ones(len(table))
        coefficients = _nnls(relative, expected)
        if not coefficients[
            :_TERMS_WITHOUT_CROWD
        ].any():  # then a lone request would take no time at all
            coefficients[:_TERMS_WITHOUT_CROWD] = _nnls(
                relative[:, :_TERMS_WITHOUT_CROWD], expected
            )
            coefficients[_TERMS_WITHOUT_CROWD:] = 0.0
        error = float(np.sum((relative @ coefficients - 1.0) ** 2))
        # A larger knee must be truly better: without evidence, more cores are assumed not to help.
        if best is None or error < best_error - 1e-9:
            best, best_error = (float(knee), coefficients), error
    assert best is not None
    return Surface(form, best[0], tuple(float(value) for value in best[1]))


def _held_out_errors(form: str, table: Floats) -> Floats:
    """Return the relative error at each point, predicted from folds that do not include it."""
    count = len(table)
    errors = np.full(count, np.inf)
    folds = np.arange(count) % min(FOLDS, count)
    if count < 3:
        return errors
    for fold in range(folds.max() + 1):
        surface = _fit(form, table[folds != fold])
        interpolation = Interpolation(
            surface, [LatencySample(*row) for row in table[folds != fold].tolist()]
        )
        for index in np.flatnonzero(folds == fold):
            errors[index] = abs(interpolation.time_ms(*table[index, :3]) / table[index, 3] - 1.0)
    return errors


def _nnls(matrix: Floats, expected: Floats) -> Floats:
    """Return x >= 0 that minimises |matrix x - wanted|: the active sets of Lawson and Hanson."""
    lengths = np.linalg.norm(matrix, axis=0)
    lengths[lengths == 0.0] = 1.0
    scaled = matrix / lengths
    solution = np.zeros(scaled.shape[1])
    is_free = np.zeros(scaled.shape[1], dtype=bool)
    for _ in range(3 * len(solution)):
        gain = scaled.T @ (expected - scaled @ solution)
        gain[is_free] = -np.inf
        if gain.max() <= 1e-9:
            break
        is_free[gain.argmax()] = True
        while True:
            candidate = np.zeros_like(solution)
            candidate[is_free] = np.linalg.lstsq(scaled[:, is_free], expected, rcond=None)[0]
            is_below = is_free & (candidate <= 0.0)
            if not is_below.any():
                break
            # Step towards it until the first component reaches zero, which then stays zero.
            steps = solution[is_below] / np.maximum(
                solution[is_below] - candidate[is_below], 1e-300
            )
            solution = solution + steps.min() * (candidate - solution)
            is_free &= solution > 1e-12
        solution = candidate
    return np.asarray(solution / lengths)


SCHEMA: Final = "headgate-profile/1"


@dataclass(frozen=True)
class Point:
    """Response times of concurrent requests of `batch` items on a number of cores."""

    cores: float
    concurrency: int
    batch: int
    mean_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    samples: int
    # The 95 % confidence interval of the median, if known.
    p50_low_ms: float | None = None
    p50_high_ms: float | None = None

    def __post_init__(self) -> None:
        times = (self.mean_ms, self.p50_ms, self.p95_ms, self.p99_ms)
        if not all(isfinite(value) and value > 0 for value in (self.cores, *times)):
            raise ValueError("cores and times must be more than zero")
        if self.concurrency < 1 or self.batch < 1:
            raise ValueError("concurrency and batch must be at least 1")

    @property
    def is_noise(self) -> bool:
        """Whether the interval of the median is wider than the median itself.

        Its ends are then a factor of three apart or more. Times grow about in proportion to the
        concurrency, so such a point fits its own concurrency no better than three times as much:
        it says nothing about how many requests fit an objective. A point without an interval is
        believed.

        >>> quiet = Point(1, 1, 1, 11.0, 10.0, 20.0, 30.0, 50, p50_low_ms=9.0, p50_high_ms=12.0)
        >>> quiet.is_noise, replace(quiet, p50_low_ms=4.0, p50_high_ms=15.0).is_noise
        (False, True)
        """
        if self.p50_low_ms is None or self.p50_high_ms is None:
            return False
        return not self.p50_high_ms - self.p50_low_ms <= self.p50_ms  # also true for NaN

    def time_ms(self, quantile: float) -> float:
        """Return a quantile of the times, log-normal between and beyond the measured quantiles.

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
    """The consecutive parts of a cold start. `first_call_ms` is the whole first call."""

    process_ms: float
    imports_ms: float
    fetch_ms: float
    load_ms: float
    first_call_ms: float

    @property
    def total_ms(self) -> float:
        """From starting the process to the first response."""
        return self.process_ms + self.imports_ms + self.fetch_ms + self.load_ms + self.first_call_ms


@dataclass(frozen=True)
class Characterisation:
    """The measurements of one function on one type of machine."""

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
        """The measured core counts, ascending."""
        return tuple(sorted({point.cores for point in self.points}))

    @property
    def concurrencies(self) -> tuple[int, ...]:
        """The measured concurrencies, ascending."""
        return tuple(sorted({point.concurrency for point in self.points}))

    @property
    def batches(self) -> tuple[int, ...]:
        """The measured batch sizes, ascending."""
        return tuple(sorted({point.batch for point in self.points}))

    @cached_property
    def surface(self) -> Surface:
        """The surface fitted to the medians."""
        return fit_surface(self._samples(0.5))

    def time_ms(
        self, cores: float, concurrency: int, batch: int = 1, quantile: float = 0.5
    ) -> float:
        """Return a response time: as measured at the points, by the surface elsewhere."""
        interpolation = self._interpolations.get(quantile)
        if interpolation is None:
            interpolation = self._interpolations[quantile] = Interpolation(
                self.surface, self._samples(quantile)
            )
        return interpolation.time_ms(cores, concurrency, batch)

    def without(self, points: Collection[Point]) -> Characterisation:
        """Return the characterisation without some of its points; at least one must stay."""
        kept = tuple(point for point in self.points if point not in points)
        return replace(self, points=kept) if points else self

    def to_json(self) -> dict[str, object]:
        """Return the content of a profile file."""
        surface = asdict(self.surface)
        return {"schema": SCHEMA, **asdict(self), "surface": surface}

    @classmethod
    def from_json(cls, content: object, where: str | None = None) -> Characterisation:
        """Read what `to_json` returned, ignoring additional keys. Raises `ConfigError`."""
        schema = content.get("schema") if isinstance(content, dict) else None
        if schema != SCHEMA:
            problem = "is not a profile"
            raise ConfigError(problem, where=where, key="schema", value=schema, allowed=SCHEMA)
        try:
            return msgspec.convert(content, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"is not a profile: {error}", where=where) from None

    @classmethod
    def surrogate(
        cls,
        s_ms: float = 16.0,
        p_ms: float = 40.0,
        cores: Sequence[float] = (1, 2, 4, 6, 8),
        concurrency: Sequence[int] = range(1, 21),
    ) -> Characterisation:
        """Return RT(c, n) = c (s + p / min(n, 4)), which reproduces the hybrid-serving paper.

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
    def _interpolations(self) -> dict[float, Interpolation]:
        """Interpolations by quantile, cached because planners ask thousands of times."""
        return {}

    def _samples(self, quantile: float) -> list[LatencySample]:
        return [
            LatencySample(point.cores, point.concurrency, point.batch, point.time_ms(quantile))
            for point in self.points
        ]


def profile_of(characterisation: Characterisation, cores: float, quantile: float = 0.5) -> Profile:
    """Return the profile of the function on a number of cores, for a Scheduler.

    It covers batch sizes and concurrencies up to the largest measured. Times are made to increase
    with both, against measurement noise. The work of the first call itself is not part of the cold
    start: it is execution time.
    """
    exec_ms = accumulate(
        (
            characterisation.time_ms(cores, 1, batch, quantile)
            for batch in range(1, characterisation.batches[-1] + 1)
        ),
        max,
    )
    isolated_ms = characterisation.time_ms(cores, 1, 1, quantile)
    slowdown = accumulate(
        (
            max(1.0, characterisation.time_ms(cores, concurrency, 1, quantile) / isolated_ms)
            for concurrency in range(1, characterisation.concurrencies[-1] + 1)
        ),
        max,
    )
    cold = characterisation.cold_start
    start_ms = 0.0
    if cold is not None:
        start_ms = max(cold.total_ms - isolated_ms, cold.total_ms - cold.first_call_ms)
    return Profile(
        exec_ns=tuple(max(1, round(ms * 1e6)) for ms in exec_ms),
        slowdown=tuple(slowdown),
        cold_start_ns=round(start_ms * 1e6),
        memory_bytes=characterisation.peak_memory_bytes or 0,
    )


_NORMAL: Final = NormalDist()
