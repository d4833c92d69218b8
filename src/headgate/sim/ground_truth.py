"""Ground truth of a simulation: true service times, loadable functions and cascade outcomes.

Policies see the `Profile` of a variant; the simulator draws the true times from this module. The
two agree on the mean unless `scale` says otherwise, which is how profile errors are studied.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, sqrt
from typing import final

import numpy as np

from headgate.core.errors import ConfigError
from headgate.core.model import App, Variant
from headgate.core.records import STAGES_MAX
from headgate.sim.recorder import Recorder

_CHUNK = 8192
DISTRIBUTIONS = ("exact", "exponential", "lognormal", "uniform")
OBSERVED = "observed"


@dataclass(frozen=True)
class GroundTruthConfig:
    """The distribution of true service times around the profile, and the error of the profile."""

    distribution: str = "exact"
    cv: float = 0.1  # lognormal: coefficient of variation; uniform: half-width over the mean
    scale: tuple[float, ...] = ()  # by function id: true time over profiled time; 1 if missing
    # By function id: batch sizes, ascending, and the equally likely factors from each on.
    observed: tuple[tuple[tuple[int, tuple[float, ...]], ...], ...] = ()

    def __post_init__(self) -> None:
        if self.distribution not in DISTRIBUTIONS and self.distribution != OBSERVED:
            raise ConfigError(
                "unknown distribution",
                key="simulation.truth.distribution",
                value=self.distribution,
                allowed=f"{', '.join(DISTRIBUTIONS)}, {OBSERVED}",
            )
        if (self.distribution == OBSERVED) != bool(self.observed):
            problem = f"must be given if, and only if, the distribution is {OBSERVED}"
            raise ConfigError(problem, key="simulation.truth.observed")


@final
class GroundTruth:
    """Draws true service times. Random factors of mean 1 are drawn in chunks, for speed."""

    def __init__(self, config: GroundTruthConfig, seed: int) -> None:
        self._config = config
        self._is_exact = config.distribution == "exact"
        # By function id and batch size; the last one holds for larger batches.
        self._observed = [_filled(by_size) for by_size in config.observed]
        # A stream of its own. The constant is "truth" in ASCII: other streams are seeded with a
        # name (`headgate.core.rng.stream`), but another seed would change every simulated run.
        self._rng = np.random.default_rng([seed, 0x7472757468])
        self._factors: list[float] = []  # drawn and not used yet, in reverse order
        self.scale = list(config.scale)
        self.unloadable: set[int] = set()  # ids of functions that no node can load at present

    def exec_ns(self, variant: Variant, items: int, shape_id: int = 0) -> int:
        """Return the true time of a batch that runs alone on its node: at least 1 ns."""
        expected_ns = variant.shapes[shape_id].exec_ns[items - 1]
        scale = self.scale
        if self._is_exact and not scale:
            return expected_ns
        factor = 1.0
        if not self._is_exact:
            if not self._factors:
                self._factors = self._draw()
            factor = self._factors.pop()
            if self._observed:  # the number drawn is a quantile in [0, 1)
                sizes = self._observed[variant.function_id]
                observed = sizes[items - 1] if items <= len(sizes) else sizes[-1]
                factor = observed[int(factor * len(observed))]
        if scale and variant.function_id < len(scale):
            factor *= scale[variant.function_id]
        return int(expected_ns * factor) or 1

    def _draw(self) -> list[float]:
        cv = self._config.cv
        if self._config.distribution == "exponential":
            drawn = self._rng.standard_exponential(_CHUNK)
        elif self._config.distribution == "lognormal":
            sigma = sqrt(log(1.0 + cv * cv))
            drawn = self._rng.lognormal(-sigma * sigma / 2.0, sigma, _CHUNK)
        elif self._config.distribution == OBSERVED:
            drawn = self._rng.random(_CHUNK)
        else:
            drawn = self._rng.uniform(1.0 - cv, 1.0 + cv, _CHUNK)
        factors: list[float] = drawn[::-1].tolist()
        return factors


def _filled(
    by_size: tuple[tuple[int, tuple[float, ...]], ...],
) -> list[tuple[float, ...]]:
    """Return the factors of every batch size up to the last one given.

    >>> _filled(((2, (1.5,)), (4, (1.2,))))
    [(1.5,), (1.5,), (1.5,), (1.2,)]
    """
    filled: list[tuple[float, ...]] = []
    before = by_size[0][1]
    for size, factors in by_size:
        filled += [before] * (size - 1 - len(filled))
        filled.append(factors)
        before = factors
    return filled


def has_cascades(app: App) -> bool:
    """Whether any stage runs only if an earlier stage was unsure of its result."""
    return any(s.only_if_unsure for p in app.pipelines for s in p.stages)


def unsure_tasks(app: App, recorder: Recorder, task_ids: list[int]) -> tuple[int, ...]:
    """Return the tasks whose results are unsure, so that the next stage of their cascade runs.

    The draw is a hash of the task id, so that it does not depend on the order of execution.
    """
    return tuple(task_id for task_id in task_ids if _is_unsure(app, recorder, task_id))


def _is_unsure(app: App, recorder: Recorder, task_id: int) -> bool:
    row = task_id // STAGES_MAX
    pipeline = app.pipelines[recorder.pipeline[row]]
    for index in pipeline.successors[task_id % STAGES_MAX]:
        stage = pipeline.stages[index]
        if stage.only_if_unsure:
            drawn = (task_id * 2654435761 % 4294967296) / 4294967296
            return drawn < stage.unsure_probability
    return False
