"""Synthetic open-loop arrivals, and the expansion of counts per step into arrival times.

Equal arguments and seeds give equal arrivals, bit for bit. Tens of millions of arrivals are made
per second: the times of n arrivals of a Poisson process inside an interval are n sorted uniforms,
and sorting is not needed, because the partial sums of n + 1 exponentials, divided by their total,
have that distribution (Devroye, Non-Uniform Random Variate Generation, V.3). So each cell costs one
draw, one running sum and one division per arrival, in chunks that fit into the cache.
"""

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

Float64 = NDArray[np.float64]
Spacing = Literal["uniform", "even"]
Draw = Literal["exact", "poisson"]

_CHUNK_ROWS: Final = 1 << 16


def column_stream(seed: int, name: str) -> np.random.Generator:
    """Return the numpy generator for the named random stream of `core.rng`, to draw columns.

    >>> bool(column_stream(7, "a").random() == column_stream(7, "a").random())
    True
    >>> bool(column_stream(7, "a").random() == column_stream(7, "b").random())
    False
    """
    return np.random.default_rng(stream(seed, name).getrandbits(128))


def expand_counts(
    counts: NDArray[np.integer],
    *,
    step_ns: int = SECOND_NS,
    seed: int = 0,
    spacing: Spacing = "uniform",
) -> Arrivals:
    """Return exactly `counts[i]` arrivals in step i, `[i * step_ns, (i + 1) * step_ns)`.

    Inside a step the arrivals are random (`uniform`) or at equal distances (`even`).

    >>> expand_counts(np.array([2, 0, 1]), step_ns=100, spacing="even").times_ns.tolist()
    [25, 75, 250]
    """
    edges_ns = step_edges(len(counts), step_ns)
    times_ns = fill(edges_ns, counts, column_stream(seed, "arrivals"), spacing=spacing)
    return arrivals_at(times_ns, int(edges_ns[-1]))


def counts_of_means(means: Float64, *, draw: Draw = "exact", seed: int = 0) -> Int64:
    """Return a count for each step, from its mean number of arrivals.

    `exact` rounds and carries the remainder over, so that whole means are kept and the total is
    that of the means; `poisson` draws each count from the Poisson distribution of its mean.

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
    """Return the `steps` + 1 edges of steps of equal length, the first at 0."""
    if step_ns <= 0 or steps * step_ns >= NEVER_NS:
        problem = "must be positive, and all steps must end within 292 years"
        raise ConfigError(problem, key="step_ns", value=step_ns)
    return np.arange(steps + 1, dtype=np.int64) * step_ns


def fill(
    edges_ns: Int64,
    counts: NDArray[np.integer],
    rng: np.random.Generator,
    *,
    spacing: Spacing = "uniform",
) -> Int64:
    """Return sorted times, `counts[i]` of them in the cell `[edges_ns[i], edges_ns[i + 1])`.

    Needs ascending edges, one more than counts. Linear in arrivals and cells; besides the result
    it needs a few words per cell and a few MB. An empty cell has its arrivals on its edge.
    """
    if len(counts) and counts.min() < 0:
        raise ConfigError("must not be negative", key="counts", value=int(counts.min()))
    check_total(float(counts.sum(dtype=np.float64)))
    busy = np.flatnonzero(counts)
    starts_ns, ends_ns, numbers = edges_ns[busy], edges_ns[busy + 1], counts[busy].astype(np.int64)
    if len(numbers) and numbers.max() > _CHUNK_ROWS:
        starts_ns, ends_ns, numbers = _split_large(starts_ns, ends_ns, numbers, rng, spacing)
    done = np.cumsum(numbers)
    times_ns = np.empty(int(done[-1]) if len(done) else 0, dtype=np.int64)
    place = _uniform if spacing == "uniform" else _even
    cell = row = 0
    while cell < len(numbers):
        cell_end = max(cell + 1, int(np.searchsorted(done, row + _CHUNK_ROWS, side="right")))
        part, row_end = slice(cell, cell_end), int(done[cell_end - 1])
        lengths_ns = ends_ns[part] - starts_ns[part]
        offsets = place(numbers[part], lengths_ns, rng).astype(np.int64)
        # Rounding may give the end of the cell, which belongs to the next cell.
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
    starts_ns: Int64, ends_ns: Int64, numbers: Int64, rng: np.random.Generator, spacing: Spacing
) -> tuple[Int64, Int64, Int64]:
    """Split each cell of more than a chunk into equal pieces, so that memory stays bounded.

    Given their number, uniform arrivals are distributed over equal pieces as a multinomial draw.
    """
    pieces = -(-numbers // _CHUNK_ROWS)
    firsts = np.cumsum(pieces) - pieces
    cells = np.repeat(np.arange(len(numbers)), pieces)
    ranks = np.arange(len(cells)) - firsts[cells]
    shares = numbers[cells] // pieces[cells] + (ranks < (numbers % pieces)[cells])
    if spacing == "uniform":
        for cell in np.flatnonzero(pieces > 1):
            size, first = int(pieces[cell]), int(firsts[cell])
            shares[first : first + size] = rng.multinomial(numbers[cell], np.full(size, 1 / size))
    edges_ns = starts_ns[cells] + (ends_ns - starts_ns)[cells] // pieces[cells] * ranks
    piece_ends_ns = np.append(edges_ns[1:], 0)
    piece_ends_ns[firsts + pieces - 1] = ends_ns
    busy = shares > 0
    return edges_ns[busy], piece_ends_ns[busy], shares[busy]


def deterministic(rate_per_s: float, duration_ns: int) -> Arrivals:
    """Return arrivals at a constant rate, the first at 0.

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
    """Return a Poisson process: inter-arrival times are exponential, with a CV of 1."""
    check_positive("rate", rate_per_s)
    edges_ns = np.array([0, duration_ns])
    rng = column_stream(seed, "poisson")
    times_ns = _piecewise_poisson(edges_ns, np.array([rate_per_s]), rng)
    return arrivals_at(times_ns, duration_ns)


def gamma(rate_per_s: float, cv: float, duration_ns: int, *, seed: int) -> Arrivals:
    """Return a renewal process with gamma-distributed inter-arrival times.

    `cv` is their coefficient of variation: below 1 arrivals are smoother than a Poisson process,
    above 1 they are burstier. The first inter-arrival time starts at 0.
    """
    check_positive("rate", rate_per_s)
    if not 0.001 <= cv <= 100:  # beyond, inter-arrival times under- or overflow a float
        raise ConfigError("is out of range", key="cv", value=cv, allowed="0.001 to 100")
    check_total(rate_per_s * duration_ns / SECOND_NS)
    rng = column_stream(seed, "gamma")
    shape, scale_ns = cv**-2, cv**2 * SECOND_NS / rate_per_s
    blocks: list[Int64] = []
    last_ns = 0.0
    while last_ns < duration_ns:
        times = last_ns + np.cumsum(rng.gamma(shape, scale_ns, _CHUNK_ROWS))
        blocks.append(times[: np.searchsorted(times, duration_ns)].astype(np.int64))
        last_ns = float(times[-1])
    return arrivals_at(_concatenate(blocks), duration_ns)


def mmpp(
    rates_per_s: Sequence[float], dwells_ns: Sequence[int], duration_ns: int, *, seed: int
) -> Arrivals:
    """Return a Markov-modulated Poisson process.

    State i has the Poisson rate `rates_per_s[i]` and an exponential dwell time of mean
    `dwells_ns[i]`; then each other state is equally likely. The process starts in its stationary
    distribution: in state i with a probability proportional to its dwell time. The mean rate is
    the mean of the rates, weighted by the dwell times.
    """
    _check_rates(rates_per_s, at_least=2)
    if len(dwells_ns) != len(rates_per_s):
        problem = f"needs one dwell time for each of {len(rates_per_s)} rates"
        raise ConfigError(problem, key="stay", value=list(dwells_ns))
    for dwell_ns in dwells_ns:
        check_positive("stay", dwell_ns)
    rng = column_stream(seed, "mmpp")
    states, edges_ns = _modulation(np.asarray(dwells_ns, dtype=np.float64), duration_ns, rng)
    times_ns = _piecewise_poisson(edges_ns, np.asarray(rates_per_s, dtype=float)[states], rng)
    return arrivals_at(times_ns, duration_ns)


def stepped(rates_per_s: Sequence[float], step_ns: int, duration_ns: int, *, seed: int) -> Arrivals:
    """Return a Poisson process whose rate changes every `step_ns`; the last rate persists."""
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
    dwells_ns: Float64, duration_ns: int, rng: np.random.Generator
) -> tuple[Int64, Int64]:
    """Return the states visited and the edges between them, from 0 to `duration_ns`."""
    check_total(duration_ns / float(dwells_ns.min()))
    state = int(rng.choice(len(dwells_ns), p=dwells_ns / dwells_ns.sum()))
    states: list[Int64] = []
    edges_ns: list[Int64] = []
    last_ns = 0.0
    while last_ns < duration_ns:
        # A jump of 1 to n - 1 places, modulo n, is a uniform choice among the other states.
        jumps = rng.integers(1, len(dwells_ns), _CHUNK_ROWS)
        visited = (state + np.concatenate(([0], np.cumsum(jumps)))) % len(dwells_ns)
        ends = last_ns + np.cumsum(rng.standard_exponential(_CHUNK_ROWS) * dwells_ns[visited[:-1]])
        kept = int(np.searchsorted(ends, duration_ns)) + 1
        states.append(visited[:-1][:kept])
        edges_ns.append(np.minimum(ends[:kept], duration_ns).astype(np.int64))
        state, last_ns = int(visited[-1]), float(ends[-1])
    return _concatenate(states), np.concatenate(([0], _concatenate(edges_ns)))


def _concatenate(blocks: list[Int64]) -> Int64:
    return np.concatenate(blocks) if blocks else np.empty(0, dtype=np.int64)


def _check_rates(rates_per_s: Sequence[float], *, at_least: int) -> None:
    if len(rates_per_s) < at_least:
        problem = f"needs at least {at_least}"
        raise ConfigError(problem, key="rates", value=list(rates_per_s))
    for rate_per_s in rates_per_s:
        if not 0 <= rate_per_s < math.inf:
            raise ConfigError("must be finite and not negative", key="rates", value=rate_per_s)
