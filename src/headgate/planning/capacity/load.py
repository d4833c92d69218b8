"""A load as a distribution over rate levels: shares of time at an arrival rate or client count.

Arrivals are counted in windows, each many service times long. Counts vary even if the rate does
not, and a model that takes each level for a Poisson stream adds that variation a second time. So
the Poisson part is removed first: deviations from the mean are shrunk until the variance of the
rates is the variance of the counts less their mean, which is the variance of a Poisson stream.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LEVELS_MAX: Final = 32
_WINDOW_NS_MIN: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class RateLevel:
    """A level of the load for a share of the time: open (a rate) or closed (a client count)."""

    share: float
    rate_per_s: float = 0.0  # open loop: arrival rate
    clients: float = 0.0  # closed loop: clients that send the next request after each response


@dataclass(frozen=True, slots=True)
class Rise:
    """A moment at which the load rose above its previous maximum."""

    at_s: float
    level: int  # index of the level that it rose to


@dataclass(frozen=True, slots=True)
class LoadProfile:
    """The levels of a load, its duration, and the moments of a new maximum.

    All levels are open loop, or all are closed loop.
    """

    levels: tuple[RateLevel, ...]
    duration_s: float
    rises: tuple[Rise, ...]  # in order of time

    @property
    def rate_per_s(self) -> float:
        """Mean arrival rate of an open load."""
        return sum(level.share * level.rate_per_s for level in self.levels)

    @property
    def peak_per_s(self) -> float:
        """Arrival rate at the highest level of an open load."""
        return max(level.rate_per_s for level in self.levels)

    @property
    def peak_clients(self) -> float:
        """Clients at the highest level of a closed load."""
        return max(level.clients for level in self.levels)


def open_load(times_ns: Ints, duration_ns: int, slo_ms: float) -> LoadProfile:
    """Return the load profile of open-loop arrivals.

    >>> steady = open_load(np.arange(0, 10_000_000_000, 20_000_000), 10_000_000_000, slo_ms=100)
    >>> [(round(level.share, 3), level.rate_per_s) for level in steady.levels]
    [(1.0, 50.0)]
    """
    assert duration_ns > 0, duration_ns
    window_ns = min(duration_ns, max(_WINDOW_NS_MIN, round(10 * slo_ms * 1e6)))
    windows = duration_ns // window_ns  # the incomplete last window is dropped
    counts = np.bincount(times_ns // window_ns, minlength=windows)[:windows].astype(np.float64)
    mean, variance = counts.mean(), counts.var()
    kept = np.sqrt(max(0.0, 1.0 - mean / variance)) if variance > 0.0 else 0.0
    rates = (mean + kept * (counts - mean)) / window_ns * 1e9
    levels, places = _merge_rates(rates)
    highest, firsts = np.unique(np.maximum.accumulate(places), return_index=True)
    starts_s = firsts * (window_ns / 1e9)
    rises = map(Rise, starts_s.tolist(), highest.tolist())
    return LoadProfile(levels, duration_ns / 1e9, tuple(rises))


def closed_load(steps: Iterable[tuple[int, int]], duration_ns: int) -> LoadProfile:
    """Return the load profile of closed-loop clients, from (start time, client count) steps.

    >>> [(level.share, level.clients) for level in closed_load([(0, 5), (10, 20)], 40).levels]
    [(0.25, 5), (0.75, 20)]
    """
    known = sorted(steps)
    ends_ns = [start_ns for start_ns, _ in known[1:]] + [duration_ns]
    shares: dict[int, float] = {}
    rises: list[Rise] = []
    highest = -1
    for (start_ns, clients), end_ns in zip(known, ends_ns, strict=True):
        length_ns = max(0, min(end_ns, duration_ns) - start_ns)
        shares[clients] = shares.get(clients, 0.0) + length_ns / duration_ns
        if clients > highest:
            highest = clients
            rises.append(Rise(start_ns / 1e9, len(shares) - 1))
    levels = tuple(RateLevel(share, clients=clients) for clients, share in shares.items())
    return LoadProfile(levels, duration_ns / 1e9, tuple(rises))


def _merge_rates(rates: Floats) -> tuple[tuple[RateLevel, ...], Ints]:
    """Merge similar rates into levels at their mean; also return the level index of each rate.

    Levels are ascending, and the mean over all levels is unchanged.
    """
    lowest, highest = float(rates.min()), float(rates.max())
    if highest - lowest <= 1e-9 * highest:
        return (RateLevel(1.0, rate_per_s=float(rates.mean())),), np.zeros(
            len(rates), dtype=np.int64
        )
    edges = np.linspace(lowest, highest, LEVELS_MAX + 1)[1:-1]
    places = np.unique(np.digitize(rates, edges), return_inverse=True)[1]
    shares = np.bincount(places) / len(rates)
    means = np.bincount(places, weights=rates) / np.bincount(places)
    levels = tuple(
        RateLevel(share, rate_per_s=mean)
        for share, mean in zip(shares.tolist(), means.tolist(), strict=True)
    )
    return levels, places
