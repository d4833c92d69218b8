"""What serving everything in time costs at least, for somebody who knows all arrivals.

A dynamic programme over the number of instances, with time in steps as long as the objective. A
request that is in time is done in the step in which it comes or in the next. So what is left over
of the arrivals of a step may be carried into the next one, where it goes first, and what is left of
it then goes to a function that is warm. Whatever a policy does that keeps objectives is a way
through this programme, so none is cheaper.

What is left out makes the bound lower, never higher: work is a fluid that any instances there are
can share, at mean service times; cold starts are free, and so is keeping functions warm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headgate.core.clock import HOUR_NS, SECOND_NS
from headgate.lab.experiments.hybrid.environment import INSTANCES_MAX, HybridEnvironment

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

_GRAINS: Final = 4  # what is carried is counted in quarters of a request, rounded down


@dataclass(frozen=True, slots=True)
class Clairvoyant:
    """The cheapest way, and what it costs."""

    dedicated_usd: float
    functions_usd: float
    instances: tuple[int, ...]  # that serve, step by step; those that boot are not among them
    step_ns: int

    @property
    def cost_usd(self) -> float:
        """All of it."""
        return self.dedicated_usd + self.functions_usd


def clairvoyant(world: HybridEnvironment, times_ns: Int64, duration_ns: int) -> Clairvoyant:
    """Return the least cost of serving these arrivals, in expectation over service times."""
    step_ns = world.slo_ns
    counts = np.bincount(times_ns // step_ns, minlength=-(-duration_ns // step_ns))
    levels = np.arange(INSTANCES_MAX + 1)
    carried = np.arange(counts.max(initial=0) * _GRAINS + 1) / _GRAINS
    # What the instances can take beyond what was carried; if negative, what they cannot take of it.
    room = levels[:, None] * (world.capacity_per_s * step_ns / SECOND_NS) - carried[None, :]
    overflow_usd = np.maximum(-room, 0.0) * world.usd_per_call
    here_usd = overflow_usd + levels[:, None] * (world.usd_per_hour * step_ns / HOUR_NS)
    ahead_usd = np.tile(carried * world.usd_per_call, (len(levels), 1))
    choices = np.empty((len(counts), *room.shape), dtype=np.int8)
    for step in range(len(counts) - 1, -1, -1):
        left = _left_over(room, int(counts[step]))
        option_usd = here_usd + np.take_along_axis(ahead_usd, left, axis=1)
        # By what was there before, what is there now, and what was carried.
        total_usd = _boot_usd(world, levels, step * step_ns)[:, :, None] + option_usd
        choices[step] = total_usd.argmin(axis=1)
        ahead_usd = total_usd.min(axis=1)
    instances, overflow = _follow(choices, room, counts)
    functions_usd = overflow * world.usd_per_call
    return Clairvoyant(float(ahead_usd[0, 0]) - functions_usd, functions_usd, instances, step_ns)


def _left_over(room: Float64, arrived: int) -> Int64:
    """Return, in grains, what of the arrivals of a step its instances cannot take."""
    left = np.maximum(arrived - np.maximum(room, 0.0), 0.0)
    grains: Int64 = np.floor(left * _GRAINS).astype(np.int64)
    return grains


def _boot_usd(world: HybridEnvironment, levels: Int64, now_ns: int) -> Float64:
    """Return what it costs to have more than before: what is ready now was paid for as it booted.

    At the very beginning instances are there at once, and soon after it they would have had to be
    there from the beginning.
    """
    booted_ns = min(now_ns, world.boot_ns + world.start_ns)
    more = np.maximum(levels[None, :] - levels[:, None], 0)
    usd: Float64 = more * (world.usd_per_hour * booted_ns / HOUR_NS)
    return usd


def _follow(
    choices: NDArray[np.int8], room: Float64, counts: Int64
) -> tuple[tuple[int, ...], float]:
    """Return the instances of the cheapest way, and how many requests go to functions on it."""
    instances: list[int] = []
    level, carried, overflow = 0, 0, 0.0
    for step, count in enumerate(counts):
        level = int(choices[step, level, carried])
        instances.append(level)
        overflow += max(0.0, -float(room[level, carried]))
        carried = int(_left_over(room[level, carried], int(count)))
    return tuple(instances), overflow + carried / _GRAINS
