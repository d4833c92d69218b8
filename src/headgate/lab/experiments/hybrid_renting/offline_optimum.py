"""Lower bound on the cost of serving all requests in time: the clairvoyant offline optimum.

The bound is a dynamic programme over the number of instances, with time in steps as long as the
SLO. A request that is in time completes in the step of its arrival or in the next step. So the
backlog of a step may be carried into the next step, where it is served first; what remains of it
then goes to a warm function. Every policy that meets the SLO is a path through this programme, so
no policy is cheaper.

All simplifications lower the bound, never raise it: work is a fluid that all instances share, at
mean service times; cold starts are free, and so is keeping functions warm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headgate.core.clock import HOUR_NS, SECOND_NS
from headgate.lab.experiments.hybrid_renting.environment import INSTANCES_MAX, InstanceSetting

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

_GRAINS: Final = 4  # backlog is counted in quarters of a request, rounded down


@dataclass(frozen=True, slots=True)
class Clairvoyant:
    """The offline optimum: its cost and its number of instances over time."""

    dedicated_usd: float
    functions_usd: float
    instances: tuple[int, ...]  # ready instances by step, without booting ones
    step_ns: int

    @property
    def cost_usd(self) -> float:
        return self.dedicated_usd + self.functions_usd


def clairvoyant(setting: InstanceSetting, times_ns: Int64, duration_ns: int) -> Clairvoyant:
    """Return the least cost of serving these arrivals, in expectation over service times."""
    step_ns = setting.slo_ns
    counts = np.bincount(times_ns // step_ns, minlength=-(-duration_ns // step_ns))
    levels = np.arange(INSTANCES_MAX + 1)
    backlog = np.arange(counts.max(initial=0) * _GRAINS + 1) / _GRAINS
    # Capacity left after the backlog; if negative, the backlog that exceeds the capacity.
    room = levels[:, None] * (setting.capacity_per_s * step_ns / SECOND_NS) - backlog[None, :]
    overflow_usd = np.maximum(-room, 0.0) * setting.usd_per_call
    here_usd = overflow_usd + levels[:, None] * (setting.usd_per_hour * step_ns / HOUR_NS)
    ahead_usd = np.tile(backlog * setting.usd_per_call, (len(levels), 1))
    choices = np.empty((len(counts), *room.shape), dtype=np.int8)
    for step in range(len(counts) - 1, -1, -1):
        left = _left_over(room, int(counts[step]))
        option_usd = here_usd + np.take_along_axis(ahead_usd, left, axis=1)
        # Axes: instances before, instances now, backlog.
        total_usd = _boot_usd(setting, levels, step * step_ns)[:, :, None] + option_usd
        choices[step] = total_usd.argmin(axis=1)
        ahead_usd = total_usd.min(axis=1)
    instances, overflow = _follow(choices, room, counts)
    functions_usd = overflow * setting.usd_per_call
    return Clairvoyant(float(ahead_usd[0, 0]) - functions_usd, functions_usd, instances, step_ns)


def _left_over(room: Float64, arrived: int) -> Int64:
    """Return, in grains, the arrivals of a step that exceed the capacity of its instances."""
    left = np.maximum(arrived - np.maximum(room, 0.0), 0.0)
    grains: Int64 = np.floor(left * _GRAINS).astype(np.int64)
    return grains


def _boot_usd(setting: InstanceSetting, levels: Int64, now_ns: int) -> Float64:
    """Return the cost of booting additional instances, which are paid for while they boot.

    At time 0 instances are ready at once; an instance that is ready before one boot time has
    passed must have been rented since time 0.
    """
    booted_ns = min(now_ns, setting.boot_ns + setting.start_ns)
    more = np.maximum(levels[None, :] - levels[:, None], 0)
    usd: Float64 = more * (setting.usd_per_hour * booted_ns / HOUR_NS)
    return usd


def _follow(
    choices: NDArray[np.int8], room: Float64, counts: Int64
) -> tuple[tuple[int, ...], float]:
    """Return the instances of the optimal path, and the number of requests sent to functions."""
    instances: list[int] = []
    level, backlog, overflow = 0, 0, 0.0
    for step, count in enumerate(counts):
        level = int(choices[step, level, backlog])
        instances.append(level)
        overflow += max(0.0, -float(room[level, backlog]))
        backlog = int(_left_over(room[level, backlog], int(count)))
    return tuple(instances), overflow + backlog / _GRAINS
