"""From "so many per step" to instants, at tens of millions of arrivals per second.

The instants of n arrivals of a Poisson process inside an interval are n sorted uniforms. Sorting
is never needed: the partial sums of n + 1 exponentials, divided by their total, have that very
distribution (Devroye, Non-Uniform Random Variate Generation, V.3). So each cell costs one draw,
one running sum and one division per arrival, and the work goes in parts that stay in the cache.
"""

from __future__ import annotations

from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from headgate.core.clock import NEVER_NS, SECOND_NS
from headgate.core.errors import ConfigError
from headgate.workload.arrivals import Arrivals, Int64, arrivals_at, check_total
from headgate.workload.rng import column_stream

Float64 = NDArray[np.float64]
Spread = Literal["uniform", "even"]
Draw = Literal["exact", "poisson"]

_PART_ROWS: Final = 1 << 16


def expand_counts(
    counts: NDArray[np.integer],
    *,
    step_ns: int = SECOND_NS,
    seed: int = 0,
    spread: Spread = "uniform",
) -> Arrivals:
    """Return exactly `counts[i]` arrivals in step i, `[i * step_ns, (i + 1) * step_ns)`.

    Inside a step they lie at random (`uniform`) or at equal distances (`even`).

    >>> expand_counts(np.array([2, 0, 1]), step_ns=100, spread="even").times_ns.tolist()
    [25, 75, 250]
    """
    edges_ns = step_edges(len(counts), step_ns)
    times_ns = fill(edges_ns, counts, column_stream(seed, "arrivals"), spread=spread)
    return arrivals_at(times_ns, int(edges_ns[-1]))


def counts_of_means(means: Float64, *, draw: Draw = "exact", seed: int = 0) -> Int64:
    """Return a whole number for each step, from its mean number of arrivals.

    `exact` rounds and carries the rest over, so that whole numbers stay as they are and the total
    is that of the means; `poisson` draws each count from the Poisson distribution of its mean.

    >>> counts_of_means(np.array([0.5, 0.5, 0.5, 3.0])).tolist()
    [1, 0, 1, 3]
    """
    if len(means) and not (np.isfinite(means).all() and means.min() >= 0):
        raise ConfigError("must be finite and not negative", key="means")
    check_total(float(means.sum()))
    if draw == "poisson":
        return column_stream(seed, "counts").poisson(means)
    totals: Int64 = np.floor(np.cumsum(means) + 0.5).astype(np.int64)
    totals[1:] -= totals[:-1].copy()
    return totals


def step_edges(steps: int, step_ns: int) -> Int64:
    """Return the steps + 1 instants between which steps of one length lie."""
    if step_ns <= 0 or steps * step_ns >= NEVER_NS:
        problem = "must be positive, and the steps end within 292 years"
        raise ConfigError(problem, key="step_ns", value=step_ns)
    return np.arange(steps + 1, dtype=np.int64) * step_ns


def fill(
    edges_ns: Int64,
    counts: NDArray[np.integer],
    rng: np.random.Generator,
    *,
    spread: Spread = "uniform",
) -> Int64:
    """Return sorted instants, `counts[i]` of them in `[edges_ns[i], edges_ns[i + 1])`.

    Needs ascending edges, one more than counts. Linear in arrivals and cells; beside the result
    it needs a few words per cell and a few MB. A cell of no length has its arrivals on its edge.
    """
    if len(counts) and counts.min() < 0:
        raise ConfigError("must not be negative", key="counts", value=int(counts.min()))
    check_total(float(counts.sum(dtype=np.float64)))
    busy = np.flatnonzero(counts)
    starts_ns, ends_ns, numbers = edges_ns[busy], edges_ns[busy + 1], counts[busy].astype(np.int64)
    if len(numbers) and numbers.max() > _PART_ROWS:
        starts_ns, ends_ns, numbers = _split_large(starts_ns, ends_ns, numbers, rng, spread)
    done = np.cumsum(numbers)
    times_ns = np.empty(int(done[-1]) if len(done) else 0, dtype=np.int64)
    place = _uniform if spread == "uniform" else _even
    cell = row = 0
    while cell < len(numbers):
        cell_end = max(cell + 1, int(np.searchsorted(done, row + _PART_ROWS, side="right")))
        part, row_end = slice(cell, cell_end), int(done[cell_end - 1])
        lengths_ns = ends_ns[part] - starts_ns[part]
        offsets = place(numbers[part], lengths_ns, rng).astype(np.int64)
        # Rounding may land on the end of the cell, which belongs to the next one.
        np.minimum(offsets, np.repeat(np.maximum(lengths_ns - 1, 0), numbers[part]), out=offsets)
        np.add(offsets, np.repeat(starts_ns[part], numbers[part]), out=times_ns[row:row_end])
        cell, row = cell_end, row_end
    return times_ns


def _uniform(numbers: Int64, lengths_ns: Int64, rng: np.random.Generator) -> Float64:
    """Return ascending offsets into each cell, distributed as sorted uniforms."""
    sums = np.cumsum(rng.standard_exponential(int(numbers.sum())))
    last = np.cumsum(numbers) - 1
    before = np.concatenate(([0.0], sums[last[:-1]]))
    totals = sums[last] - before + rng.standard_exponential(len(numbers))
    sums -= np.repeat(before, numbers)
    sums *= np.repeat(lengths_ns / totals, numbers)
    return sums


def _even(numbers: Int64, lengths_ns: Int64, rng: np.random.Generator) -> Float64:
    """Return offsets at equal distances, half a distance from either end of the cell."""
    ranks = np.arange(int(numbers.sum())) - np.repeat(np.cumsum(numbers) - numbers, numbers)
    gaps: Float64 = np.repeat(lengths_ns / numbers, numbers)
    return (ranks + 0.5) * gaps


def _split_large(
    starts_ns: Int64, ends_ns: Int64, numbers: Int64, rng: np.random.Generator, spread: Spread
) -> tuple[Int64, Int64, Int64]:
    """Cut each cell of more than a part into equal pieces, so that memory stays bounded.

    Given their number, uniform arrivals fall into equal pieces as one multinomial draw.
    """
    pieces = -(-numbers // _PART_ROWS)
    firsts = np.cumsum(pieces) - pieces
    cells = np.repeat(np.arange(len(numbers)), pieces)
    ranks = np.arange(len(cells)) - firsts[cells]
    shares = numbers[cells] // pieces[cells] + (ranks < (numbers % pieces)[cells])
    if spread == "uniform":
        for cell in np.flatnonzero(pieces > 1):
            size, first = int(pieces[cell]), int(firsts[cell])
            shares[first : first + size] = rng.multinomial(numbers[cell], np.full(size, 1 / size))
    edges_ns = starts_ns[cells] + (ends_ns - starts_ns)[cells] // pieces[cells] * ranks
    piece_ends_ns = np.append(edges_ns[1:], 0)
    piece_ends_ns[firsts + pieces - 1] = ends_ns
    busy = shares > 0
    return edges_ns[busy], piece_ends_ns[busy], shares[busy]
