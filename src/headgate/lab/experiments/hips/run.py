"""One run of the HiPS'21 experiments: a policy under the bursty load, and its metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from headgate.core.actions import Action, Dispatch
from headgate.core.clock import HOUR_NS, MILLISECOND_NS, SECOND_NS
from headgate.core.events import Event
from headgate.core.records import STAGES_MAX
from headgate.core.states import Outcome
from headgate.lab.experiments.hips.environment import (
    FUNCTION_POOL,
    INSTANCE_POOL,
    BurstPhase,
    HipsEnvironment,
    Scene,
    Setting,
    build_scene,
    lead_in_s,
    period_of,
    wave_sizes,
    waves,
)
from headgate.metrics.columns import RunColumns
from headgate.policies import find_policy
from headgate.sim.interfaces import Observer
from headgate.sim.run import Setup, simulate
from headgate.workload import Arrivals

_NO_POOL: Final = -1


@dataclass(frozen=True, slots=True)
class HipsPolicyCase:
    """A policy with its settings, and the label of its row."""

    label: str
    name: str
    config: tuple[tuple[str, float | bool], ...] = ()


@dataclass(frozen=True, slots=True)
class HipsCase:
    """One run. Picklable, for worker processes."""

    setting: Setting
    policy: HipsPolicyCase
    environment: HipsEnvironment
    phases: tuple[BurstPhase, ...]

    @property
    def period_ns(self) -> int:
        """Time between waves."""
        return period_of(self.setting.sla_ms)


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Columns of the requests of a run, in order of arrival."""

    arrival_s: NDArray[np.float64]
    response_ms: NDArray[np.float64]  # until the outcome, whatever it is
    pool: NDArray[np.int64]  # the pool it was sent to last
    is_met: NDArray[np.bool_]
    is_cold: NDArray[np.bool_]  # it waited for a cold start

    def on(self, pool: int) -> RequestTimes:
        """Return the requests sent to a pool."""
        return self._only(self.pool == pool)

    def since(self, from_s: float) -> RequestTimes:
        """Return the requests that arrived at a time or later."""
        return self._only(self.arrival_s >= from_s)

    @property
    def attainment(self) -> float:
        """Share of requests that met the SLA; NaN without requests."""
        return float(self.is_met.mean()) if len(self.is_met) else nan

    def _only(self, rows: NDArray[np.bool_]) -> RequestTimes:
        return RequestTimes(
            self.arrival_s[rows],
            self.response_ms[rows],
            self.pool[rows],
            self.is_met[rows],
            self.is_cold[rows],
        )


@dataclass(frozen=True, slots=True)
class HipsResult:
    """Metrics of one run. Shares are of the requests of the run, 0 to 1."""

    requests: int
    attainment: float
    on_instance: float  # share sent to the instance
    instance_attainment: float  # NaN if none was sent to the instance
    function_attainment: float
    violations: int
    cold_violations: int  # violations by requests that waited for a cold start
    cold_starts: int  # of functions
    p99_ms: float
    call_ms: float  # mean duration of a function call, with cold starts, without network
    usd_per_hour: float
    usd_per_1000: float  # per 1000 requests that met the SLA


def measure(case: HipsCase, seed: int) -> HipsResult:
    """Run a case. Top-level function with picklable arguments, for worker processes."""
    sizes = wave_sizes(case.phases, case.period_ns, seed)
    scene = build_scene(case.setting, case.environment)
    run, requests = observe(scene, case.policy, waves(sizes, case.period_ns), seed)
    return summarise(run, requests.since(lead_in_s(case.phases, case.period_ns)))


def observe(
    scene: Scene, policy: HipsPolicyCase, arrivals: Arrivals, seed: int
) -> tuple[RunColumns, RequestTimes]:
    """Run a policy and return the columns of the run and of its requests."""
    kind = find_policy(policy.name)
    config = kind.config(**dict(policy.config))
    routes = _PoolObserver()
    setup = Setup(scene.app, kind, config, seed=seed, truth=scene.truth)
    run = simulate(setup, arrivals, observer=routes)
    columns = run.requests
    return run, RequestTimes(
        columns.arrival_ns / SECOND_NS,
        (columns.finished_ns - columns.arrival_ns) / MILLISECOND_NS,
        np.array([routes.pools.get(row, _NO_POOL) for row in range(len(columns))], dtype=np.int64),
        columns.outcome == Outcome.MET,
        columns.cold == 1,
    )


def summarise(run: RunColumns, requests: RequestTimes) -> HipsResult:
    """Return the metrics of a run. `requests` may be a part of them; the cost is that of all."""
    late = ~requests.is_met
    cost_usd = sum(use.allocation_usd for use in run.resources)
    return HipsResult(
        requests=len(late),
        attainment=requests.attainment,
        on_instance=float(np.mean(requests.pool == INSTANCE_POOL)),
        instance_attainment=requests.on(INSTANCE_POOL).attainment,
        function_attainment=requests.on(FUNCTION_POOL).attainment,
        violations=int(late.sum()),
        cold_violations=int((late & requests.is_cold).sum()),
        cold_starts=sum(r.cold_starts for r in run.resources if r.tier == "serverless"),
        p99_ms=float(np.quantile(requests.response_ms, 0.99)),
        call_ms=_mean_call_ms(run, requests),
        usd_per_hour=cost_usd / run.end_ns * HOUR_NS,
        usd_per_1000=1000 * cost_usd / requests.is_met.sum() if requests.is_met.any() else nan,
    )


def _mean_call_ms(run: RunColumns, requests: RequestTimes) -> float:
    calls = int(np.count_nonzero(requests.pool == FUNCTION_POOL))
    busy_ns = sum(use.busy_ns for use in run.resources if use.tier == "serverless")
    return busy_ns / calls / MILLISECOND_NS if calls else nan


@final
class _PoolObserver(Observer):
    """Records the pool of each request, which the columns of a run do not contain."""

    def __init__(self) -> None:
        self.pools: dict[int, int] = {}  # by request id

    def on_event(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Dispatch):
                for task_id in action.task_ids:
                    self.pools[task_id // STAGES_MAX] = action.pool_id


def cold_share(runs: Sequence[HipsResult]) -> float:
    """Return the share of violations that is due to cold starts; 0 without violations."""
    violations = sum(run.violations for run in runs)
    return sum(run.cold_violations for run in runs) / max(1, violations)
