"""The demonstration, cut to this machine: how large a request is, how soon it must be answered,
and how many of them come.

Machines differ by an order of magnitude, and a request that takes a millisecond would measure the
gateway and not the recommender. So requests have as many sessions as take about 20 ms on one core,
and everything else follows from what was measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Final

from headgate.core.clock import SECOND_NS
from headgate.core.errors import ConfigError
from headgate.demo.sessions import Sessions
from headgate.planning.characterisation import Characterisation
from headgate.profiling.machine import this_machine, usable_cores
from headgate.profiling.messages import Task
from headgate.profiling.profiler import Settings, profile
from headgate.workload import Arrivals, stepped

FUNCTION: Final = "recommend"
CODE: Final = f"{Sessions.__module__}:{Sessions.__name__}"
QUANTILE: Final = 0.95  # of a few hundred requests; a higher one would be decided by a handful
FEW: Final = 5  # clients that one machine can serve in time, and
MANY: Final = 20  # clients that it cannot: the paper's workload
AT_ONCE: Final = (1, 2, 3, 4, 5, 6, 8, 12, MANY)
OVERHEAD_MS: Final = 3.0  # of the way through the gateway, on a machine that is busy
_REQUEST_MS: Final = 20.0
_TRIED: Final = 16  # sessions in the request that tells how many it should have
_SESSIONS_MAX: Final = 256
# A burst brings more than one machine can take, and not more than the functions' core can add.
_BURST_LOAD: Final = 1.35

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Course:
    """How the load goes: a burst, quiet, a burst, ... The first two steps only warm up."""

    step_s: float = 2.0
    steps: int = 7

    @property
    def warm_up_ns(self) -> int:
        """Requests before that do not count."""
        return round(2 * self.step_s * SECOND_NS)


@dataclass(frozen=True, slots=True)
class Scale:
    """What the demonstration asks of this machine."""

    model: Path
    sessions: int  # in a request
    measured: Characterisation
    slo_ms: float
    course: Course

    @property
    def capacity_per_s(self) -> float:
        """Requests that one core answers in a second, with as many at once as are in time."""
        return FEW / self.measured.time_ms(1, FEW) * 1e3

    @property
    def rates_per_s(self) -> tuple[float, float]:
        """When it is quiet, and in a burst: as 5 and as 20 clients would send."""
        burst = _BURST_LOAD * self.capacity_per_s
        return burst * FEW / MANY, burst

    def arrivals(self, seed: int) -> Arrivals:
        """Return the requests. Live and simulated get the very same."""
        rates = [self.rates_per_s[1 - step % 2] for step in range(self.course.steps)]
        step_ns = round(self.course.step_s * SECOND_NS)
        return stepped(rates, step_ns, self.course.steps * step_ns, seed=seed)


def fit_to_machine(model: Path, course: Course, budget_s: float, progress: Progress) -> Scale:
    """Measure the recommender on this machine, and choose accordingly."""
    cores = len(usable_cores())
    if cores < 2:
        problem = "needs two cores, one for the machine and one for the functions"
        raise ConfigError(problem, where="this machine", value=cores)
    device = this_machine().cpu

    def measure(sessions: int, of_budget: float, settings: Settings) -> Characterisation:
        task = Task(FUNCTION, None, CODE, options(model, sessions), str(model.parent))
        settings = replace(settings, budget_s=of_budget * budget_s)
        return profile(
            task, settings, device, lambda title, done, total: progress(f"profiling: {title}")
        ).characterisation

    tried = measure(_TRIED, 0.1, Settings((1,), (1,), (1,)))
    sessions = round(_TRIED * _REQUEST_MS / tried.time_ms(1, 1))
    sessions = max(1, min(_SESSIONS_MAX, sessions))
    one = measure(sessions, 0.7, Settings((1,), AT_ONCE, (1,)))
    two = measure(sessions, 0.2, Settings((2,), (1, FEW), (1,)))  # what more cores would do
    measured = replace(one, points=(*one.points, *two.points))
    # A little more than the few take: so the many are late, and so are a few more.
    slo_ms = ceil(1.05 * measured.time_ms(1, FEW, 1, QUANTILE) + OVERHEAD_MS)
    return Scale(model, sessions, measured, slo_ms, course)


def options(model: Path, sessions: int) -> dict[str, object]:
    """Return what the function is made with."""
    return {"path": str(model.resolve()), "sessions": sessions}
