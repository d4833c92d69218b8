"""The bursty load of the paper's figure 3: between 5 and 20 requests at the same time.

Only these two bounds are in its text. Here requests come in waves, so many at once, and every few
waves that number is drawn anew. A wave does not wait for the one before: whoever serves, and
however slowly, is asked the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from headgate.core.clock import MINUTE_NS, SECOND_NS
from headgate.workload import Arrivals
from headgate.workload.arrivals import arrivals_at

LEAST: Final = 5
MOST: Final = 20
_WAVES_ALIKE: Final = 5  # a burst of some seconds is over long before a machine could have booted


@dataclass(frozen=True, slots=True)
class Phase:
    """A while of bursts, or of calm, when there are as few requests at once as there ever are."""

    length_ns: int
    is_bursty: bool


def phases(bursts_ns: int) -> tuple[Phase, ...]:
    """Return the course of a run: bursts come out of a calm, twice.

    The second calm is longer than a platform keeps functions that nobody calls.
    """
    burst = Phase(bursts_ns, is_bursty=True)
    return Phase(MINUTE_NS, is_bursty=False), burst, Phase(12 * MINUTE_NS, is_bursty=False), burst


def lead_in_s(course: Sequence[Phase], period_ns: int) -> float:
    """Return when the first wave of bursts comes; nothing is counted before.

    A run begins with nothing warm, not even where functions are kept so at all times.

    >>> lead_in_s(phases(MINUTE_NS), 7 * SECOND_NS)
    56.0
    """
    first = course[0]
    return 0.0 if first.is_bursty else first.length_ns // period_ns * period_ns / SECOND_NS


def wave_sizes(course: Sequence[Phase], period_ns: int, seed: int) -> list[int]:
    """Return how many requests each wave has.

    >>> wave_sizes([Phase(2 * SECOND_NS, False), Phase(9 * SECOND_NS, True)], SECOND_NS, seed=0)
    [5, 5, 20, 20, 20, 20, 20, 15, 15, 15, 15]
    """
    rng = np.random.default_rng([seed, 0x6275727374])  # its own stream: "burst"
    sizes: list[int] = []
    for phase in course:
        waves = phase.length_ns // period_ns
        if not phase.is_bursty:
            sizes += [LEAST] * waves
            continue
        draws = rng.integers(LEAST, MOST, size=-(-waves // _WAVES_ALIKE), endpoint=True)
        sizes += np.repeat(draws, _WAVES_ALIKE)[:waves].tolist()
    return sizes


def waves(sizes: Sequence[int], period_ns: int) -> Arrivals:
    """Return the requests of all waves."""
    starts_ns = np.arange(len(sizes), dtype=np.int64) * period_ns
    return arrivals_at(np.repeat(starts_ns, sizes), len(sizes) * period_ns)


def period_of(sla_ms: float) -> int:
    """Return the time from wave to wave: five times the objective, at least half a second.

    >>> period_of(200.0) / SECOND_NS
    1.0
    """
    return max(SECOND_NS // 2, round(5e6 * sla_ms))
