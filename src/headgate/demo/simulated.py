"""The simulated side: the same application and the same requests."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import NormalDist
from typing import Final, final

import numpy as np

from headgate.app import from_spec
from headgate.core.actions import Action, Dispatch
from headgate.core.clock import MILLISECOND_NS, SECOND_NS
from headgate.core.events import Event
from headgate.core.outcome import Outcome
from headgate.core.records import STAGES_MAX
from headgate.demo.application import Spec
from headgate.demo.scale import FEW, QUANTILE, Scale
from headgate.demo.seen import Seen, count_unserved
from headgate.policies import find_policy
from headgate.sim.hooks import Observer
from headgate.sim.run import Setup, simulate
from headgate.sim.truth import TruthConfig
from headgate.workload import Arrivals

_SEED: Final = 0
THRESHOLDS: Final = range(1, 2 * FEW + 1)


@dataclass(frozen=True, slots=True)
class Way:
    """A policy and its settings."""

    label: str
    policy: str
    settings: tuple[tuple[str, int], ...] = ()


def run_simulated(spec: Spec, way: Way, scale: Scale, arrivals: Arrivals, request_ns: int) -> Seen:
    """Simulate the application under a policy."""
    loaded = from_spec(spec, "the demonstration")
    kind = find_policy(way.policy)
    routes = _Routes({pool.id for pool in loaded.app.pools if pool.serverless is not None})
    setup = Setup(
        loaded.app,
        kind,
        kind.config(**dict(way.settings)),
        seed=_SEED,
        truth=_scatter(scale),
        request_ns=request_ns,
    )
    run = simulate(setup, arrivals, observer=routes)
    columns = run.requests
    warm_up_ns = scale.course.warm_up_ns
    counts = columns.arrival_ns >= warm_up_ns
    is_out = np.isin(np.arange(len(columns)), list(routes.requests))
    platform = next(use for use in run.resources if use.tier == "serverless")
    usd_per_call = platform.usage_usd / max(1, is_out.sum())
    spilled = float(is_out[counts].mean())
    return Seen(
        arrival_s=(columns.arrival_ns[counts] - warm_up_ns) / SECOND_NS,
        latency_ms=(columns.finished_ns - columns.arrival_ns)[counts] / MILLISECOND_NS,
        is_met=columns.outcome[counts] == Outcome.MET,
        unserved=count_unserved(columns.outcome[counts]),
        spilled=spilled,
        cold_starts=int((columns.cold[counts] & is_out[counts]).sum()),
        usd_per_1000=1000 * usd_per_call * spilled,
    )


def best_threshold(spec: Spec, scale: Scale, arrivals: Arrivals, request_ns: int) -> int:
    """Try all thresholds: the one that spills least of those that reach the objective.

    Where none does, the one that comes closest.
    """
    tried = {
        threshold: run_simulated(
            spec, Way("", "threshold", (("threshold", threshold),)), scale, arrivals, request_ns
        )
        for threshold in THRESHOLDS
    }
    reaching = [each for each, seen in tried.items() if seen.attainment >= QUANTILE]
    if reaching:
        return min(reaching, key=lambda each: (tried[each].spilled, each))
    return max(tried, key=lambda each: tried[each].attainment)


def _scatter(scale: Scale) -> TruthConfig:
    """Times scatter log-normally, as widely as those of lone requests did."""
    lone, wide = (scale.measured.time_ms(1, 1, 1, quantile) for quantile in (0.5, 0.95))
    sigma = log(wide / lone) / NormalDist().inv_cdf(0.95)
    return TruthConfig("lognormal", cv=sqrt(exp(sigma * sigma) - 1.0)) if sigma else TruthConfig()


@final
class _Routes(Observer):
    """Writes down which requests went to functions: the columns of a run do not say."""

    def __init__(self, pool_ids: set[int]) -> None:
        self._pool_ids = pool_ids
        self.requests: set[int] = set()

    def saw(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Dispatch) and action.pool_id in self._pool_ids:
                self.requests.update(task // STAGES_MAX for task in action.task_ids)
