"""A load as levels: for which share of the time requests come how fast, or how many wait at once.

Arrivals are counted in windows, each many service times long. Counts vary even if the rate does
not; a model that takes a level for a Poisson stream adds that again. So what chance alone explains
is taken out first: deviations from the mean are shrunk until the variance of the rates is the
variance of the counts less their mean, which is what a Poisson stream would have.
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
    """A state that the load is in for a share of the time: one of its two numbers is zero."""

    share: float
    rate_per_s: float = 0.0  # requests that come by themselves
    clients: float = 0.0  # or clients that each wait for an answer and ask again at once


@dataclass(frozen=True, slots=True)
class Rise:
    """When the load rose above all that it had been before."""

    at_s: float
    place: int  # of the level that it rose to


@dataclass(frozen=True, slots=True)
class LoadProfile:
    """The levels of a load, for how long it was looked at, and how it rose.

    Either all levels are of requests that come by themselves, or all are of clients that wait.
    """

    levels: tuple[RateLevel, ...]
    duration_s: float
    rises: tuple[Rise, ...]  # in order of time

    @property
    def rate_per_s(self) -> float:
        """Requests per second, on average, of those that come by themselves."""
        return sum(level.share * level.rate_per_s for level in self.levels)

    @property
    def peak_per_s(self) -> float:
        """At the highest level."""
        return max(level.rate_per_s for level in self.levels)

    @property
    def peak_clients(self) -> float:
        """Likewise, of clients that wait for answers."""
        return max(level.clients for level in self.levels)


def open_load(times_ns: Ints, duration_ns: int, slo_ms: float) -> LoadProfile:
    """Return the levels of arrivals that come by themselves.

    >>> steady = open_load(np.arange(0, 10_000_000_000, 20_000_000), 10_000_000_000, slo_ms=100)
    >>> [(round(level.share, 3), level.rate_per_s) for level in steady.levels]
    [(1.0, 50.0)]
    """
    assert duration_ns > 0, duration_ns
    window_ns = min(duration_ns, max(_WINDOW_NS_MIN, round(10 * slo_ms * 1e6)))
    windows = duration_ns // window_ns  # what is left over is too short to tell
    counts = np.bincount(times_ns // window_ns, minlength=windows)[:windows].astype(np.float64)
    mean, variance = counts.mean(), counts.var()
    kept = np.sqrt(max(0.0, 1.0 - mean / variance)) if variance > 0.0 else 0.0
    rates = (mean + kept * (counts - mean)) / window_ns * 1e9
    levels, places = _merged(rates)
    highest, firsts = np.unique(np.maximum.accumulate(places), return_index=True)
    starts_s = firsts * (window_ns / 1e9)
    rises = map(Rise, starts_s.tolist(), highest.tolist())
    return LoadProfile(levels, duration_ns / 1e9, tuple(rises))


def closed_load(steps: Iterable[tuple[int, int]], duration_ns: int) -> LoadProfile:
    """Return the levels of clients that wait for answers: from each instant on, so many of them.

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


def _merged(rates: Floats) -> tuple[tuple[RateLevel, ...], Ints]:
    """Rates that are alike become one level, of their mean; and which level each rate is in.

    The levels rise, and the total stays what it is.
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
