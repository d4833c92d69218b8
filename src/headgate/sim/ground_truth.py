"""The truth behind the profile: how long things really take, and whether they can be started.

Policies see the `Profile`; the simulator draws from this. The two agree on the mean unless the
truth is scaled, which is how an error in a profile is studied.
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
    """How true times scatter around the profile, and by how much the profile is wrong."""

    distribution: str = "exact"
    cv: float = 0.1  # of log-normal times; uniform ones lie within +-cv of the mean
    scale: tuple[float, ...] = ()  # by function id: truth over profile; missing is 1
    observed: tuple[tuple[float, ...], ...] = ()  # by function id: factors, all equally likely

    def __post_init__(self) -> None:
        if self.distribution not in DISTRIBUTIONS and self.distribution != OBSERVED:
            raise ConfigError(
                "unknown distribution",
                key="simulation.truth.distribution",
                value=self.distribution,
                allowed=f"{', '.join(DISTRIBUTIONS)}, {OBSERVED}",
            )
        if (self.distribution == OBSERVED) != bool(self.observed):
            problem = "goes together with the distribution of the same name"
            raise ConfigError(problem, key="simulation.truth.observed")


@final
class GroundTruth:
    """Draws true durations. Factors of mean 1 are drawn in chunks, because that is fast."""

    def __init__(self, config: GroundTruthConfig, seed: int) -> None:
        self._config = config
        self._is_exact = config.distribution == "exact"
        self._observed = config.observed
        self._rng = np.random.default_rng([seed, 0x7472757468])  # its own stream: "truth"
        self._factors: list[float] = []  # drawn and not used yet; the next is the last
        self.scale = list(config.scale)
        self.unloadable: set[int] = set()  # functions that cannot be started just now, anywhere

    def exec_ns(self, variant: Variant, items: int) -> int:
        """True time of a batch that has its node to itself. At least a nanosecond."""
        expected_ns = variant.profile.exec_ns[items - 1]
        scale = self.scale
        if self._is_exact and not scale:
            return expected_ns
        factor = 1.0
        if not self._is_exact:
            if not self._factors:
                self._factors = self._draw()
            factor = self._factors.pop()
            if self._observed:  # what was drawn is then a place in the distribution, of [0, 1)
                likely = self._observed[variant.function_id]
                factor = likely[int(factor * len(likely))]
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


# Which answers of a cascade are unsure, so that its next stage runs.


def has_cascades(app: App) -> bool:
    """Whether any stage runs only for some requests."""
    return any(s.only_if_unsure for p in app.pipelines for s in p.stages)


def unsure_tasks(app: App, recorder: Recorder, task_ids: list[int]) -> tuple[int, ...]:
    """Which of these tasks a cascade should go on with; drawn by hashing, so order is no matter."""
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
