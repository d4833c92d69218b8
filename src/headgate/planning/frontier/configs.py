"""Configurations of a stage: batch size, vCPUs and GPU share, with the time and cost they take.

Costs are integers in a unit of the caller's choice, so that sums are exact and ties are ties.
`cost_units` converts dollars to the unit that Headgate uses: 1e-15 USD, so that the part of a
millisecond batch that one item pays for still has five digits, and a request of up to 9,000 USD
fits a machine word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from headgate.core.errors import ConfigError
from headgate.core.units import format_duration

GPU_SEVENTHS_MAX: Final = 7
COST_UNITS_PER_USD: Final = 10**15
SUM_MAX: Final = 2**62  # of all times or costs of a pipeline: sums stay within 64 bits


class InfeasibleError(ConfigError):
    """No configuration meets the objective; `fastest_ns` is what the fastest path takes."""

    def __init__(self, problem: str, fastest_ns: int) -> None:
        super().__init__(problem)
        self.fastest_ns = fastest_ns


@dataclass(frozen=True, slots=True)
class StageConfig:
    """One way to run a stage: what it takes of a node, how long, and what an item costs."""

    time_ns: int  # of a batch, from dispatch to result, with the start if it is cold
    cost: int  # of one item, in the units of the caller
    batch: int = 1
    cpu_milli: int = 0
    gpu_sevenths: int = 0
    build: int = 0  # id of the variant on a pool, or whatever the caller distinguishes
    place: int = 0  # data moves between stages at different places (see `Edge`)
    start_ns: int = 0  # part of `time_ns`: cold start, or a load of weights
    shape_id: int = 0  # of the variant, where `build` is one


def cost_units(usd: float) -> int:
    """Return dollars as the integer cost of a `StageConfig`.

    >>> cost_units(0.25)
    250000000000000
    """
    return round(usd * COST_UNITS_PER_USD)


def check_configs(name: str, configs: Sequence[StageConfig]) -> None:
    """Raise `ConfigError` if a stage has no configuration, or one that cannot be."""
    if not configs:
        raise ConfigError(f"stage {name}: has no feasible configuration")
    for config in configs:
        if not 0 <= config.gpu_sevenths <= GPU_SEVENTHS_MAX:
            share = f"{config.gpu_sevenths}/{GPU_SEVENTHS_MAX}"
            raise ConfigError(f"stage {name}: GPU share {share}", allowed="0/7 to 7/7")
    for key, low in (("batch", 1), ("cpu_milli", 0), ("time_ns", 0), ("cost", 0)):
        values = list(map(attrgetter(key), configs))
        for value in (min(values), max(values)):
            if not low <= value <= SUM_MAX:
                raise ConfigError(f"stage {name}: {key} is {value}", allowed=f"{low} to 2**62")


def infeasible(budget_ns: int, fastest_ns: int, path: Sequence[str]) -> InfeasibleError:
    """Return the error for an objective below the fastest path, which it names.

    >>> str(infeasible(5_000_000, 8_000_000, ["resize", "vit"]))
    'the objective is 5ms, and the fastest path takes 8ms: resize > vit'
    """
    objective, fastest = format_duration(max(0, budget_ns)), format_duration(fastest_ns)
    path_text = " > ".join(path)
    problem = f"the objective is {objective}, and the fastest path takes {fastest}: {path_text}"
    return InfeasibleError(problem, fastest_ns)
