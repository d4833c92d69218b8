"""Synthetic open-loop arrivals. The same arguments and seed give the same arrivals, to the bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from headgate.core.clock import NEVER_NS, SECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.rng import stream
from headgate.workload.arrivals import Arrivals, Int64, arrivals_at, check_positive, check_total

# The named random streams of `core.rng`, for drawing whole columns.


def column_stream(seed: int, name: str) -> np.random.Generator:
    """Return the numpy generator called `name` of `seed`.

    >>> bool(column_stream(7, "a").random() == column_stream(7, "a").random())
    True
    >>> bool(column_stream(7, "a").random() == column_stream(7, "b").random())
    False
    """
    return np.random.default_rng(stream(seed, name).getrandbits(128))


# From "so many per step" to instants, at tens of millions of arrivals per second.
#
# The instants of n arrivals of a Poisson process inside an interval are n sorted uniforms. Sorting
# is never needed: the partial sums of n + 1 exponentials, divided by their total, have that very
# distribution (Devroye, Non-Uniform Random Variate Generation, V.3). So each cell costs one draw,
# one running sum and one division per arrival, and the work goes in parts that stay in the cache.


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


_BLOCK_ROWS: Final = 1 << 16


def deterministic(rate_per_s: float, duration_ns: int) -> Arrivals:
    """Return arrivals at equal distances, the first at 0.

    >>> deterministic(2.0, 2 * SECOND_NS).times_ns.tolist()
    [0, 500000000, 1000000000, 1500000000]
    """
    check_positive("rate", rate_per_s)
    number = math.ceil(duration_ns * rate_per_s / SECOND_NS)
    check_total(number)
    times_ns = (np.arange(number) * SECOND_NS / rate_per_s).astype(np.int64)
    times_ns = times_ns[: np.searchsorted(times_ns, duration_ns)]
    return arrivals_at(times_ns, duration_ns)


def poisson(rate_per_s: float, duration_ns: int, *, seed: int) -> Arrivals:
    """Return a Poisson process: gaps are exponential, so their CV is 1."""
    check_positive("rate", rate_per_s)
    edges_ns = np.array([0, duration_ns])
    rng = column_stream(seed, "poisson")
    times_ns = _piecewise_poisson(edges_ns, np.array([rate_per_s]), rng)
    return arrivals_at(times_ns, duration_ns)


def gamma(rate_per_s: float, cv: float, duration_ns: int, *, seed: int) -> Arrivals:
    """Return a renewal process with gamma gaps: smoother than Poisson for cv < 1, else burstier.

    The first gap starts at 0. `cv` is the standard deviation of the gaps over their mean.
    """
    check_positive("rate", rate_per_s)
    if not 0.001 <= cv <= 100:  # beyond, gaps under- or overflow a float
        raise ConfigError("is out of range", key="cv", value=cv, allowed="0.001 to 100")
    check_total(rate_per_s * duration_ns / SECOND_NS)
    rng = column_stream(seed, "gamma")
    shape, scale_ns = cv**-2, cv**2 * SECOND_NS / rate_per_s
    blocks: list[Int64] = []
    last_ns = 0.0
    while last_ns < duration_ns:
        times = last_ns + np.cumsum(rng.gamma(shape, scale_ns, _BLOCK_ROWS))
        blocks.append(times[: np.searchsorted(times, duration_ns)].astype(np.int64))
        last_ns = float(times[-1])
    return arrivals_at(_joined(blocks), duration_ns)


def mmpp(
    rates_per_s: Sequence[float], stays_ns: Sequence[int], duration_ns: int, *, seed: int
) -> Arrivals:
    """Return a Markov-modulated Poisson process.

    State i has a Poisson rate `rates_per_s[i]` and lasts an exponential time of mean
    `stays_ns[i]`; then each other state is as likely. It starts in the long run: in state i with
    a probability in proportion to its stay. The mean rate is the stay-weighted mean of the rates.
    """
    _check_rates(rates_per_s, at_least=2)
    if len(stays_ns) != len(rates_per_s):
        problem = f"needs one stay for each of {len(rates_per_s)} rates"
        raise ConfigError(problem, key="stay", value=list(stays_ns))
    for stay_ns in stays_ns:
        check_positive("stay", stay_ns)
    rng = column_stream(seed, "mmpp")
    states, edges_ns = _modulation(np.asarray(stays_ns, dtype=np.float64), duration_ns, rng)
    times_ns = _piecewise_poisson(edges_ns, np.asarray(rates_per_s, dtype=float)[states], rng)
    return arrivals_at(times_ns, duration_ns)


def stepped(rates_per_s: Sequence[float], step_ns: int, duration_ns: int, *, seed: int) -> Arrivals:
    """Return a Poisson process whose rate changes each `step_ns`; the last one holds to the end."""
    _check_rates(rates_per_s, at_least=1)
    check_positive("every", step_ns)
    inner_ns = [i * step_ns for i in range(1, len(rates_per_s)) if i * step_ns < duration_ns]
    edges_ns = np.array([0, *inner_ns, duration_ns])
    rates = np.asarray(rates_per_s, dtype=float)[: len(edges_ns) - 1]
    times_ns = _piecewise_poisson(edges_ns, rates, column_stream(seed, "stepped"))
    return arrivals_at(times_ns, duration_ns)


def _piecewise_poisson(edges_ns: Int64, rates_per_s: Float64, rng: np.random.Generator) -> Int64:
    means = rates_per_s * np.diff(edges_ns) / SECOND_NS
    check_total(float(means.sum()))
    return fill(edges_ns, rng.poisson(means), rng)


def _modulation(
    stays_ns: Float64, duration_ns: int, rng: np.random.Generator
) -> tuple[Int64, Int64]:
    """Return the states visited and the edges between them, from 0 to `duration_ns`."""
    check_total(duration_ns / float(stays_ns.min()))
    state = int(rng.choice(len(stays_ns), p=stays_ns / stays_ns.sum()))
    states: list[Int64] = []
    edges_ns: list[Int64] = []
    last_ns = 0.0
    while last_ns < duration_ns:
        # A jump of 1 to n - 1 places, modulo n, is a uniform choice among the other states.
        jumps = rng.integers(1, len(stays_ns), _BLOCK_ROWS)
        visited = (state + np.concatenate(([0], np.cumsum(jumps)))) % len(stays_ns)
        ends = last_ns + np.cumsum(rng.standard_exponential(_BLOCK_ROWS) * stays_ns[visited[:-1]])
        kept = int(np.searchsorted(ends, duration_ns)) + 1
        states.append(visited[:-1][:kept])
        edges_ns.append(np.minimum(ends[:kept], duration_ns).astype(np.int64))
        state, last_ns = int(visited[-1]), float(ends[-1])
    return _joined(states), np.concatenate(([0], _joined(edges_ns)))


def _joined(blocks: list[Int64]) -> Int64:
    return np.concatenate(blocks) if blocks else np.empty(0, dtype=np.int64)


def _check_rates(rates_per_s: Sequence[float], *, at_least: int) -> None:
    if len(rates_per_s) < at_least:
        problem = f"needs at least {at_least} of them"
        raise ConfigError(problem, key="rates", value=list(rates_per_s))
    for rate_per_s in rates_per_s:
        if not 0 <= rate_per_s < math.inf:
            raise ConfigError("must be finite and not negative", key="rates", value=rate_per_s)
