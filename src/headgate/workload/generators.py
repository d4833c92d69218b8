"""Synthetic open-loop arrivals. The same arguments and seed give the same arrivals, to the bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from headgate.core.clock import SECOND_NS
from headgate.core.errors import ConfigError
from headgate.workload.arrivals import Arrivals, Int64, arrivals_at, check_positive, check_total
from headgate.workload.counts import Float64, fill
from headgate.workload.rng import column_stream

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
