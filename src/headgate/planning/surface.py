"""A surface through measured times: what was not measured is told from what was.

A few forms are fitted by non-negative least squares of relative errors, because more work or more
company never makes anything faster. With n cores, c requests at once and b items in each, of which
min(n, knee) cores help:

    shared    1, cb, cb/min(n, knee)         the shape of the hybrid-serving paper's figure 2
    calls     as above, and c, c/min(...)    a call costs something beside its items
    crowded   as above, and the same with max(0, c - n): more requests than cores get in the way

The form that tells points best which it was not shown (cross-validation) wins; the knee is tried at
every core count. Below one core all times are in proportion. What a form misses at the points is
carried over to places nearby, so that the result is exact where it was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp
from typing import Final, NamedTuple, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]

FORMS: Final = ("shared", "calls", "crowded")  # simpler ones first: they win a tie
FOLDS: Final = 10
_CALLS: Final = 5  # terms before those of a crowd
_NEARNESS: Final = 4  # how fast a point loses its say with distance


class Sample(NamedTuple):
    """A time that was measured, and where."""

    cores: float
    concurrency: float
    batch: float
    time_ms: float


@dataclass(frozen=True, slots=True)
class Surface:
    """A fitted form. Its errors are those at points that it was not shown; None: too few points."""

    form: str
    knee: float  # cores beyond this do not help
    coefficients: tuple[float, ...]  # ms, in the order of the form's terms
    mean_error: float | None = None  # relative: 0.1 is 10 %
    max_error: float | None = None

    def time_ms(self, cores: float, concurrency: float, batch: float = 1.0) -> float:
        """Return what the form alone says.

        >>> Surface("shared", 4, (0.0, 16.0, 40.0)).time_ms(8, 5)
        130.0
        """
        place = np.array([[cores, concurrency, batch]], dtype=np.float64)
        return float((_terms(self.form, self.knee, place) @ np.array(self.coefficients))[0])


def fit_surface(samples: Sequence[Sample]) -> Surface:
    """Return the surface that tells held-out samples best. Times must be positive.

    >>> exact = Surface("shared", 2, (1.0, 3.0, 8.0))
    >>> grid = [(n, c) for n in (1.0, 2.0, 4.0) for c in (1.0, 3.0, 9.0)]
    >>> found = fit_surface([Sample(n, c, 1.0, exact.time_ms(n, c)) for n, c in grid])
    >>> found.form, found.knee, [round(value, 6) for value in found.coefficients]
    ('shared', 2.0, [1.0, 3.0, 8.0])
    """
    assert samples, "a surface needs a point"
    table = np.array(samples, dtype=np.float64)
    judged = [(form, _held_out_errors(form, table)) for form in FORMS]
    form, errors = min(judged, key=lambda each: round(float(each[1].mean()), 6))
    fitted = _fit(form, table)
    if np.isinf(errors).any():
        return fitted
    return replace(fitted, mean_error=float(errors.mean()), max_error=float(errors.max()))


@final
class Interpolation:
    """A surface bent through its samples: exact there, and near them as much off as they are."""

    def __init__(self, surface: Surface, samples: Sequence[Sample]) -> None:
        table = np.array(samples, dtype=np.float64)
        coefficients = np.array(surface.coefficients)
        self._surface = surface
        self._times_ms: list[float] = table[:, 3].tolist()
        self._places = np.log(table[:, :3])
        told_ms = _terms(surface.form, surface.knee, table) @ coefficients
        self._misses = np.log(table[:, 3] / told_ms)

    def time_ms(self, cores: float, concurrency: float, batch: float = 1.0) -> float:
        """Return the time there. O(samples)."""
        place = np.log((cores, concurrency, batch))
        distances = ((self._places - place) ** 2).sum(axis=1)
        nearest = int(distances.argmin())
        if distances[nearest] < 1e-18:
            return self._times_ms[nearest]
        weights = distances ** (-_NEARNESS / 2)
        miss = float((weights * self._misses).sum() / weights.sum())
        return self._surface.time_ms(cores, concurrency, batch) * exp(miss)


def _terms(form: str, knee: float, places: Floats) -> Floats:
    """Return the terms of a form, a column each, at places in rows."""
    cores, concurrency, batch = places[:, 0], places[:, 1], places[:, 2]
    share = np.minimum(cores, 1.0)  # of a core; a share of one does everything in proportion
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
        wanted = np.ones(len(table))
        coefficients = _non_negative(relative, wanted)
        if not coefficients[:_CALLS].any():  # then a lone request would take no time at all
            coefficients[:_CALLS] = _non_negative(relative[:, :_CALLS], wanted)
            coefficients[_CALLS:] = 0.0
        error = float(np.sum((relative @ coefficients - 1.0) ** 2))
        # A later knee must be truly better: where nothing tells them apart, no more cores help.
        if best is None or error < best_error - 1e-9:
            best, best_error = (float(knee), coefficients), error
    assert best is not None
    return Surface(form, best[0], tuple(float(value) for value in best[1]))


def _held_out_errors(form: str, table: Floats) -> Floats:
    """Return the relative error at each point, told from points that do not include it."""
    count = len(table)
    errors = np.full(count, np.inf)
    folds = np.arange(count) % min(FOLDS, count)
    if count < 3:
        return errors
    for fold in range(folds.max() + 1):
        surface = _fit(form, table[folds != fold])
        told = Interpolation(surface, [Sample(*row) for row in table[folds != fold].tolist()])
        for index in np.flatnonzero(folds == fold):
            errors[index] = abs(told.time_ms(*table[index, :3]) / table[index, 3] - 1.0)
    return errors


def _non_negative(matrix: Floats, wanted: Floats) -> Floats:
    """Return x >= 0 that minimises |matrix x - wanted|: the active sets of Lawson and Hanson."""
    lengths = np.linalg.norm(matrix, axis=0)
    lengths[lengths == 0.0] = 1.0
    scaled = matrix / lengths
    found = np.zeros(scaled.shape[1])
    is_free = np.zeros(scaled.shape[1], dtype=bool)
    for _ in range(3 * len(found)):
        gain = scaled.T @ (wanted - scaled @ found)
        gain[is_free] = -np.inf
        if gain.max() <= 1e-9:
            break
        is_free[gain.argmax()] = True
        while True:
            tried = np.zeros_like(found)
            tried[is_free] = np.linalg.lstsq(scaled[:, is_free], wanted, rcond=None)[0]
            is_below = is_free & (tried <= 0.0)
            if not is_below.any():
                break
            # As far towards it as nothing becomes negative; what gets there stays zero.
            steps = found[is_below] / np.maximum(found[is_below] - tried[is_below], 1e-300)
            found = found + steps.min() * (tried - found)
            is_free &= found > 1e-12
        found = tried
    return np.asarray(found / lengths)
