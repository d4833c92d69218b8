"""The harness of experiments, benchmarks and demonstrations: a policy, an environment, a result.

A `PolicyCase` runs in an `Environment` and gives a `RunResult`. An experiment describes its
environments by a `Scenario`: parameters that can be hashed and pickled, from which the process that
runs a `Case` builds the environment of a seed. So every policy of one scenario and one seed gets
the same application, the same arrivals and the same service times.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import exp, log, nan, sqrt
from multiprocessing import get_context
from statistics import NormalDist, fmean
from typing import Final, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from headgate.core.clock import HOUR_NS, MILLISECOND_NS, SECOND_NS
from headgate.core.model import TIER_NAMES, App, Tier
from headgate.core.policy import PolicyConfig, PolicyKind
from headgate.core.states import Outcome
from headgate.lab.experiments import Row
from headgate.metrics.columns import NOWHERE, Int8, RequestColumns, RunColumns
from headgate.metrics.confidence import mean_interval
from headgate.metrics.summary import GroupSummary, summarise
from headgate.policies import find_policy
from headgate.sim.faults import FaultAction
from headgate.sim.ground_truth import GroundTruthConfig
from headgate.sim.interfaces import Observer, SimClient
from headgate.sim.run import Setup, simulate
from headgate.workload import Arrivals

Setting = float | int | bool | str | tuple[str, ...]
Settings = tuple[tuple[str, Setting], ...]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

C = TypeVar("C", bound=Hashable)
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class PolicyCase:
    """A policy with its settings. `title` is the label of its row; empty: the policy's name."""

    name: str
    settings: Settings = ()
    title: str = ""
    announces: bool = False  # the policy is told of every request before the run
    sees_all: bool = False  # one gateway receives everything, however many the environment has

    @classmethod
    def of(
        cls, name: str, title: str = "", *, announces: bool = False, **settings: Setting
    ) -> PolicyCase:
        """Return a policy with settings by keyword."""
        return cls(name, tuple(settings.items()), title, announces)

    @property
    def label(self) -> str:
        return self.title or self.name

    @property
    def settings_text(self) -> str:
        """The settings as text; times are in seconds.

        >>> PolicyCase.of("spock", target=0.8, hold_ns=60_000_000_000).settings_text
        'target=0.8 hold=60s'
        """
        return " ".join(
            f"{key.removesuffix('_ns')}={value / SECOND_NS:g}s"
            if key.endswith("_ns") and not isinstance(value, str | tuple)
            else f"{key}={value}"
            for key, value in self.settings
        )

    def build(self) -> tuple[PolicyKind, PolicyConfig]:
        """Return the policy and its configuration. Raises `ConfigError`."""
        kind = find_policy(self.name)
        return kind, kind.config(**dict(self.settings))


@dataclass(frozen=True, slots=True)
class Environment:
    """Application with its pools and prices, arrivals, and true service times."""

    app: App
    arrivals: Arrivals | None = None
    truth: GroundTruthConfig = field(default=GroundTruthConfig())
    clients: tuple[SimClient, ...] = ()  # that react to responses, in addition to the arrivals
    request_ns: int = 0  # client-side latency on top of what the Scheduler sees
    since_ns: int = 0  # requests that arrive earlier are a warm-up, and not counted
    decision_ns: int = 0  # simulated time per event that the Scheduler handles
    work_unit_ns: int = 0  # simulated time per unit of work that the policy reports
    faults: tuple[tuple[int, FaultAction], ...] = ()
    schedulers: int = 1  # gateways that share the pools, for policies that can; else there is one
    membership_delay_ns: int = 0  # until the others know of a gateway that crashed, or came

    def simulate(
        self, policy: PolicyCase, seed: int, *, observer: Observer | None = None
    ) -> RunColumns:
        """Run a policy and return all columns of the run."""
        kind, config = policy.build()
        can_share = kind.capabilities.multi_gateway or kind.capabilities.retries_busy
        setup = Setup(
            self.app,
            kind,
            config,
            seed=seed,
            truth=self.truth,
            client_overheads_ns=(self.request_ns,),
            announces=policy.announces,
            decision_ns=self.decision_ns,
            work_unit_ns=self.work_unit_ns,
            faults=self.faults,
            schedulers=self.schedulers if can_share and not policy.sees_all else 1,
            membership_delay_ns=self.membership_delay_ns,
        )
        return simulate(setup, self.arrivals, clients=self.clients, observer=observer)

    def run(self, policy: PolicyCase, seed: int, *, keeps_times: bool = False) -> RunResult:
        """Run a policy and return its result, with a row per request if `keeps_times`."""
        return result_of(self.simulate(policy, seed), self.since_ns, keeps_times=keeps_times)


class Scenario(Protocol):
    """Parameters of environments. Hashable and picklable, for worker processes."""

    def environment(self, seed: int) -> Environment:
        """Return the environment of a seed; it does not depend on the policy."""


S = TypeVar("S", bound=Scenario)


@dataclass(frozen=True)  # not slotted: an alias like `Case[GpuScenario]` could not be called
class Case(Generic[S]):
    """A policy in a scenario."""

    policy: PolicyCase
    scenario: S


@dataclass(frozen=True, slots=True, eq=False)
class RequestTimes:
    """Columns of the counted requests of a run, simulated or live, in order of arrival."""

    arrival_s: Floats
    response_ms: Floats  # until the outcome, of any kind
    is_met: Bools
    is_cold: Bools  # it waited for a cold start
    on_machines: Bools  # where it ran last
    on_functions: Bools

    def only(self, rows: Bools) -> RequestTimes:
        return RequestTimes(*(getattr(self, column.name)[rows] for column in fields(self)))

    def percentile_ms(self, quantile: float) -> float:
        """Return a quantile of the response times, which is the time of one of the requests."""
        return float(np.quantile(self.response_ms, quantile, method="inverted_cdf"))


NO_TIMES: Final = RequestTimes(
    np.zeros(0), np.zeros(0), *(np.zeros(0, dtype=np.bool_) for _ in range(4))
)


@dataclass(frozen=True, slots=True)
class TierUse:
    """Use of the machines, or of the functions, in one run."""

    requests: int = 0  # counted requests that ran there last
    met: int = 0
    cold_starts: int = 0
    busy_ns: int = 0
    usd: float = 0.0

    @property
    def attainment(self) -> float:
        """Share of its requests that met the SLO; NaN without requests."""
        return self.met / self.requests if self.requests else nan


@dataclass(frozen=True, slots=True)
class RunResult:
    """Result of one run. Requests are those that are counted; use and cost are of the whole run."""

    requests: int
    met: int  # within the SLO
    unserved: int = 0  # without a response, in time or late
    cold_violations: int = 0  # violations by requests that waited for a cold start
    machines: TierUse = TierUse()
    functions: TierUse = TierUse()
    end_ns: int = 0
    p99_ms: float = nan
    mean_wait_ms: float = nan
    fairness: float = nan  # Jain's index over clients' pace
    clients: tuple[GroupSummary, ...] = ()
    pipelines: tuple[GroupSummary, ...] = ()
    times: RequestTimes = field(default=NO_TIMES, compare=False, repr=False)

    @property
    def attainment(self) -> float:
        """Share of the requests that met the SLO; NaN without requests."""
        return self.met / self.requests if self.requests else nan

    @property
    def violations(self) -> int:
        """Requests that did not meet the SLO."""
        return self.requests - self.met

    @property
    def cold_starts(self) -> int:
        """Cold starts of machines and functions."""
        return self.machines.cold_starts + self.functions.cold_starts

    @property
    def on_functions(self) -> float:
        """Share of the requests that ran on functions."""
        return self.functions.requests / self.requests

    @property
    def cost_usd(self) -> float:
        """Cost of everything that was held, idle or not."""
        return self.machines.usd + self.functions.usd

    @property
    def usd_per_hour(self) -> float:
        return self.cost_usd / self.end_ns * HOUR_NS

    @property
    def usd_per_1000_met(self) -> float:
        """Cost per 1000 requests that met the SLO; NaN if none did."""
        return 1000 * self.cost_usd / self.met if self.met else nan


def result_of(run: RunColumns, since_ns: int = 0, *, keeps_times: bool = False) -> RunResult:
    """Return the result of a run. The cost is that of the whole run."""
    times, requests = request_times(run, since_ns)
    summary = summarise(replace(run, requests=requests))
    return RunResult(
        requests=len(requests),
        met=summary.met,
        unserved=count_unserved(requests.outcome),
        cold_violations=int(np.count_nonzero(~times.is_met & times.is_cold)),
        machines=_tier_use(run, times, times.on_machines, is_function=False),
        functions=_tier_use(run, times, times.on_functions, is_function=True),
        end_ns=run.end_ns,
        p99_ms=float(np.quantile(times.response_ms, 0.99)) if len(requests) else nan,
        mean_wait_ms=summary.mean_wait_ms,
        fairness=summary.fairness,
        clients=summary.clients,
        pipelines=summary.pipelines,
        times=times if keeps_times else NO_TIMES,
    )


def count_unserved(outcome: Int8) -> int:
    """Return the number of requests without a response, in time or late."""
    return int(np.count_nonzero(outcome > Outcome.LATE))


def request_times(run: RunColumns, since_ns: int = 0) -> tuple[RequestTimes, RequestColumns]:
    """Return the requests that arrived at `since_ns` or later; times of arrival begin there."""
    requests = run.requests
    if since_ns:
        rows = requests.arrival_ns >= since_ns
        columns = {column.name: getattr(requests, column.name) for column in fields(requests)}
        requests = RequestColumns(**{name: values[rows] for name, values in columns.items()})
    serverless = {use.pool for use in run.resources if use.tier == TIER_NAMES[Tier.SERVERLESS]}
    is_serverless = np.array([*(pool in serverless for pool in run.pools), False])
    on_functions = is_serverless[requests.pool]  # `NOWHERE` is the last entry
    times = RequestTimes(
        (requests.arrival_ns - since_ns) / SECOND_NS,
        (requests.finished_ns - requests.arrival_ns) / MILLISECOND_NS,
        requests.outcome == Outcome.MET,
        requests.cold == 1,
        (requests.pool != NOWHERE) & ~on_functions,
        on_functions,
    )
    return times, requests


def _tier_use(run: RunColumns, times: RequestTimes, rows: Bools, *, is_function: bool) -> TierUse:
    uses = [
        use for use in run.resources if (use.tier == TIER_NAMES[Tier.SERVERLESS]) == is_function
    ]
    return TierUse(
        requests=int(np.count_nonzero(rows)),
        met=int(np.count_nonzero(rows & times.is_met)),
        cold_starts=sum(use.cold_starts for use in uses),
        busy_ns=sum(use.busy_ns for use in uses),
        usd=sum(use.allocation_usd for use in uses),
    )


def run_case(case: Case[S], seed: int) -> RunResult:
    """Run a case. At the top level of a module, for worker processes."""
    return case.scenario.environment(seed).run(case.policy, seed)


def in_processes(function: Callable[[C], R], items: Iterable[C], jobs: int) -> Iterator[R]:
    """Yield `function(item)` of each item, in order; with `jobs` above 1, from as many processes.

    In several processes `function` must be at the top level of a module, or a `partial` of such a
    function, and the items and results picklable.
    """
    if jobs == 1:
        yield from map(function, items)
        return
    with get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(function, items)


def over_seeds(
    function: Callable[[C, int], R],
    cases: Sequence[C],
    seeds: int,
    *,
    is_parallel: bool,
    processes: int = 2,
) -> dict[C, list[R]]:
    """Return `function(case, seed)` of every case, for seeds 0, 1, ... in order.

    In parallel there are `processes`: `function` must then be at the top level of a module and the
    cases picklable.
    """
    jobs = [(case, seed) for case in cases for seed in range(seeds)]
    if is_parallel and processes > 1:
        with get_context("spawn").Pool(processes) as pool:
            results = pool.starmap(function, jobs, chunksize=max(1, len(jobs) // 64))
    else:
        results = [function(case, seed) for case, seed in jobs]
    return {case: results[index * seeds : (index + 1) * seeds] for index, case in enumerate(cases)}


def best_setting(
    runs: Mapping[C, Sequence[RunResult]], quantile: float, cost: Callable[[RunResult], float]
) -> C:
    """Return the cheapest setting that reaches the quantile, else that of the best attainment."""
    attainment = {key: fmean(run.attainment for run in each) for key, each in runs.items()}
    enough = [key for key in runs if attainment[key] >= quantile]
    if enough:
        return min(enough, key=lambda key: fmean(map(cost, runs[key])))
    return max(runs, key=attainment.__getitem__)


def lognormal_truth(median_ms: float, tail_ms: float, quantile: float) -> GroundTruthConfig:
    """Return log-normal service times with this ratio of a quantile to the median."""
    sigma = log(tail_ms / median_ms) / NormalDist().inv_cdf(quantile)
    if not sigma:
        return GroundTruthConfig()
    return GroundTruthConfig("lognormal", cv=sqrt(exp(sigma * sigma) - 1.0))


def differences(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Return `first` minus `second`, paired by seed: both had the same arrivals."""
    return [one - other for one, other in zip(first, second, strict=True)]


def is_above(first: Sequence[float], second: Sequence[float]) -> bool:
    """Whether `first` is significantly above `second` (95 %, paired by seed)."""
    return mean_interval(differences(first, second)).low > 0


def margin(values: Sequence[float]) -> float:
    """Return half the width of the 95 % interval around the mean."""
    interval = mean_interval(values)
    return interval.high - interval.mean


def mean_columns(name: str, values: Sequence[float]) -> Row:
    """Return columns of the mean over runs and half the width of its 95 % interval."""
    return {name: fmean(values), f"± {name}": margin(values)}
