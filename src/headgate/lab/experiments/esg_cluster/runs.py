"""Runs of the ESG experiment, and what is measured in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import Final, final

import numpy as np

from headgate.core.actions import Action, Dispatch
from headgate.core.clock import MICROSECOND_NS, MILLISECOND_NS
from headgate.core.events import Event
from headgate.core.states import Outcome
from headgate.lab.aquatope import Trained, train
from headgate.lab.experiments.esg_cluster.environment import CELLS, ClusterScenario
from headgate.lab.experiments.esg_cluster.profiles import MEASURED, RECALLED
from headgate.lab.harness import Case, Floats, count_unserved, request_times
from headgate.lab.plan_misses import PlanMisses, PlansAhead
from headgate.sim.interfaces import Observer
from headgate.sim.run import Setup

ClusterCase = Case[ClusterScenario]
QUANTILES: Final = (0.5, 0.95, 0.99)
_CURVE: Final = np.linspace(0.0, 1.0, 201)  # quantiles kept of a run, for figures


# The charges for planning, in us, from the last table of `headgate bench planner` in
# docs/frontier.md: a test compares them. INFless's set, which the benchmark does not measure, is
# charged as the measured one. `esg` and `orion` are charged their searches alone, each at the price
# of its own expansions, and `aquatope`, which decides nothing, is charged nothing. The others
# report no work, and are charged all that a Scheduler does for an event.
ByCell = Mapping[str, tuple[float, float, float]]  # by profile set, then in the order of `CELLS`

EXPANSION_US: Final[Mapping[str, ByCell]] = {
    "esg": {MEASURED: (2.8, 2.9, 2.9), RECALLED: (2.5, 3, 3.1)},
    "orion": {MEASURED: (4.9, 4.6, 4.7), RECALLED: (3.2, 3.8, 4.6)},
}
EVENT_US: Final[Mapping[str, ByCell]] = {
    "headgate": {MEASURED: (83.4, 103.2, 161.1), RECALLED: (120.8, 149.1, 176.3)},
    "infless": {MEASURED: (21.7, 29.1, 34.6), RECALLED: (72.6, 141.9, 101)},
    "fast_gshare": {MEASURED: (19.6, 23.8, 29.3), RECALLED: (74, 114.5, 56.8)},
}
_TRAINING_SEED: Final = 1_000
_FIRST_SEED: Final = 3_000  # of the runs: no setting of a policy was chosen on these seeds


@dataclass(frozen=True, slots=True)
class TrainingCase:
    """A scenario in which `aquatope` is trained, and how many configurations it tries."""

    scenario: ClusterScenario
    trials: int


@dataclass(frozen=True, slots=True)
class ClusterRun:
    """One run. Costs are of all requests, hits and times of those after the warm-up."""

    requests: int
    hit_rate: float
    unserved: float  # share without a response: rejected, expired, failed
    usd_per_request: float
    slo_ratios: tuple[float, ...]  # quantiles of response time over objective, of those served
    overhead_ms: float  # charged per dispatch
    busy: float  # share of the time that the scheduler spends planning
    batch: float  # mean items of a batch
    misses: float  # share of dispatches whose plan misses; NaN if plans are not judged

    def ratio(self, quantile: float) -> float:
        """Return a quantile of the response time over the objective, of requests served."""
        return float(np.interp(quantile, _CURVE, self.slo_ratios))


def run_cell(case: ClusterCase, seed: int) -> ClusterRun:
    """Run a case; in the first run, judge plans that are made ahead. For worker processes."""
    return _run(case, _FIRST_SEED + seed, judges_plans=seed == 0)


def run_changed(case: ClusterCase, seed: int) -> ClusterRun:
    """Run a case of the dynamics. For worker processes."""
    return _run(case, _FIRST_SEED + seed, judges_plans=False)


def train_aquatope(case: TrainingCase, seed: int) -> Trained:
    """Train the configurations of a scenario on a seed that no run has. For worker processes.

    The seed is that of the sampler; trials are run in the same environment with every seed.
    """
    return train(case.scenario, seeds=(_TRAINING_SEED,), trials=case.trials, seed=seed)


def expansion_ns(policy: str, scenario: ClusterScenario) -> int:
    """Return what a policy is charged for each expansion that it reports."""
    return _in_cell(EXPANSION_US, policy, scenario)


def event_ns(policy: str, scenario: ClusterScenario) -> int:
    """Return what a policy is charged for each event, besides its expansions."""
    return _in_cell(EVENT_US, policy, scenario)


def _in_cell(charges: Mapping[str, ByCell], policy: str, scenario: ClusterScenario) -> int:
    measured = charges.get(policy)
    if measured is None:
        return 0
    by_cell = measured[RECALLED if scenario.profiles == RECALLED else MEASURED]
    return round(by_cell[CELLS.index(scenario.cell)] * MICROSECOND_NS)


def _run(case: ClusterCase, seed: int, *, judges_plans: bool) -> ClusterRun:
    environment = replace(
        case.scenario.environment(seed),
        decision_ns=event_ns(case.policy.name, case.scenario),
        work_unit_ns=expansion_ns(case.policy.name, case.scenario),
    )
    kind, config = case.policy.build()
    counter = _DispatchCounter()
    observers: list[Observer] = [counter]
    misses = None
    if judges_plans and issubclass(kind.make, PlansAhead):
        misses = PlanMisses(Setup(environment.app, kind, config, seed=seed))
        observers.append(misses)
    columns = environment.simulate(case.policy, seed, observer=_Observers(observers))
    times, requests = request_times(columns, environment.since_ns)
    slos_ms = np.array([p.slo.latency_ns / MILLISECOND_NS for p in environment.app.pipelines])
    ratios = times.response_ms / slos_ms[requests.pipeline]
    work_ns = columns.work * environment.work_unit_ns + counter.events * environment.decision_ns
    begin_ns = int(columns.requests.arrival_ns[0])
    dispatches = counter.dispatches
    return ClusterRun(
        requests=len(requests),
        hit_rate=float(times.is_met.mean()),
        unserved=count_unserved(requests.outcome) / len(requests),
        usd_per_request=sum(use.allocation_usd for use in columns.resources)
        / len(columns.requests),
        slo_ratios=_curve(ratios[requests.outcome <= Outcome.LATE]),
        overhead_ms=work_ns / MILLISECOND_NS / dispatches if dispatches else nan,
        busy=work_ns / (columns.end_ns - begin_ns),
        batch=counter.items / dispatches if dispatches else nan,
        misses=misses.miss_rate if misses else nan,
    )


def _curve(ratios: Floats) -> tuple[float, ...]:
    if not len(ratios):
        return (nan,) * len(_CURVE)
    return tuple(np.quantile(ratios, _CURVE).tolist())


@final
class _DispatchCounter(Observer):
    """Counts events, dispatches and their items."""

    def __init__(self) -> None:
        self.events = self.dispatches = self.items = 0

    def on_event(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        self.events += 1
        for action in actions:
            if isinstance(action, Dispatch):
                self.dispatches += 1
                self.items += action.items


@final
class _Observers(Observer):
    """Several observers of one run."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

    def on_event(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        for observer in self._observers:
            observer.on_event(now_ns, scheduler, event, actions)
