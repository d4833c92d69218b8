"""Hybrid serving, live: one machine that bursts overload, without and with functions.

The recommender is profiled on this machine, planned for, served, and sent a bursty workload, once
per policy. The machine is one core, and the functions have another core. Then the same is
simulated, to compare simulator and plan with the live run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from headgate.config.prices import PriceList, read_prices
from headgate.core.errors import ConfigError
from headgate.core.model import FaasOffering, InstanceType
from headgate.lab.demo.runs import best_threshold, deployed, run_live, run_simulated, simulation
from headgate.lab.demo.setup import (
    OVERHEAD_MS,
    QUANTILE,
    DemoSchedule,
    Progress,
    Scale,
    Times,
    application,
    fit_to_machine,
    one_core,
    read_times,
)
from headgate.lab.experiments.experiment import Check
from headgate.lab.harness import Environment, PolicyCase, RunResult
from headgate.planning.capacity.mix import open_load
from headgate.planning.capacity.plan import CapacityPlan, Infeasible, Terms, make_plan
from headgate.workload import Arrivals

PROFILE_S: Final = 12.0
_SEED: Final = 1
_SIMULATED_CORES: Final = (2, 4)  # of larger machines, which are only simulated
_REQUEST_NS: Final = round(OVERHEAD_MS * 1e6)
_ATTAINMENT_POINTS: Final = 3.0
_P50_PERCENT: Final = 15.0
_SOURCE: Final = "live, simulated and planned agree"


@dataclass(frozen=True, slots=True)
class Planned:
    """Profile, plan and workload, before anything is served."""

    scale: Scale
    plan: CapacityPlan
    prices: PriceList
    machine: InstanceType
    platform: FaasOffering
    arrivals: Arrivals

    @property
    def threshold(self) -> int:
        """Planned concurrency limit of the machine."""
        return self.plan.capacities[0].threshold

    def simulation(
        self, times: Times, request_ns: int = _REQUEST_NS, *, cores: int = 1
    ) -> Environment:
        """Return the environment with these times, on the machine or on a larger one.

        `request_ns` is the client-side overhead of a request, which event logs do not contain.
        """
        spec = application(self.scale, self.machine, self.platform, times, cores=cores)
        return simulation(spec, self.scale, self.arrivals, request_ns)


@dataclass(frozen=True, slots=True)
class DemoRun:
    """Results of one policy: predicted, live and simulated."""

    policy: PolicyCase
    predicted: RunResult  # simulated with the profile, before the live run
    live: RunResult | None = None  # None: only simulated
    simulated: RunResult | None = None  # simulated with the times in the live run's log


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Results of all policies."""

    planned: Planned
    runs: tuple[DemoRun, ...]
    best_threshold: int  # by exhaustive search in the simulator

    @property
    def checks(self) -> list[Check]:
        """Checks that live, simulated and planned results agree."""
        checks = [
            check
            for run in self.runs
            if run.live is not None and run.simulated is not None
            for check in _agreement(run.policy.label, run.live, run.simulated)
        ]
        planned, best = self.planned.threshold, self.best_threshold
        claim = "threshold: planned, and best by exhaustive search"
        measured = f"{planned} and {best}"
        return [*checks, Check(claim, _SOURCE, "within 1", measured, abs(planned - best) <= 1)]


def prepare(model: Path, schedule: DemoSchedule, budget_s: float, progress: Progress) -> Planned:
    """Profile the recommender and plan for it. Raises `ConfigError`."""
    return plan_for(fit_to_machine(model, schedule, budget_s, progress))


def plan_for(scale: Scale) -> Planned:
    """Plan for the measured profile. Raises `ConfigError` if the SLO is infeasible."""
    prices = read_prices()
    machine, platform = one_core(prices), prices.platforms[0]
    arrivals = scale.arrivals(_SEED)
    expected = open_load(arrivals.times_ns, arrivals.duration_ns, scale.slo_ms)
    terms = Terms(scale.slo_ms, QUANTILE, expected, instances_max=1)
    plan = make_plan(scale.measured, [machine], platform, terms)
    if isinstance(plan, Infeasible):
        problem = f"one core takes {plan.fastest_ms:.0f} ms even for a single request"
        raise ConfigError(problem, where="this machine", value=f"{scale.slo_ms:g} ms")
    return Planned(scale, plan, prices, machine, platform, arrivals)


def run_demo(planned: Planned, progress: Progress) -> DemoResult:
    """Serve with every policy, and simulate the same."""
    make = partial(application, planned.scale, planned.machine, planned.platform)
    single_ms = planned.scale.measured.time_ms(1, 1)
    runs: list[DemoRun] = []
    with TemporaryDirectory(prefix="headgate-demo-") as scratch:
        folder = Path(scratch)
        progress("deploying the function")
        spec = make(Times(single_ms, single_ms))
        with deployed(spec, folder, planned.platform) as functions:
            known = Times(single_ms, functions.call_ms(planned.scale))
            functions.prewarm()
            spec = make(known, endpoint_url=functions.platform.url)
            for policy in _policies(planned.threshold):
                progress(f"serving: {policy.label}")
                log = folder / f"{policy.name}.log"
                served_spec = {**spec, "policy": {"name": policy.name, **dict(policy.settings)}}
                live, request_ns = run_live(
                    served_spec, planned.scale, planned.arrivals, log, functions
                )
                predicted = run_simulated(planned.simulation(known), policy)
                calibrated = planned.simulation(read_times(log, known), request_ns)
                runs.append(DemoRun(policy, predicted, live, run_simulated(calibrated, policy)))
    progress("simulating other machines, and all thresholds")
    for cores in _SIMULATED_CORES:
        policy = PolicyCase("threshold", title=f"threshold on {cores} cores")
        larger = planned.simulation(known, cores=cores)
        runs.append(DemoRun(policy, run_simulated(larger, policy)))
    return DemoResult(planned, tuple(runs), best_threshold(planned.simulation(known)))


def _policies(threshold: int) -> tuple[PolicyCase, ...]:
    return (
        PolicyCase("dedicated_only", title="without functions"),
        PolicyCase.of("threshold", f"threshold of {threshold}", threshold=threshold),
        PolicyCase("headgate"),
    )


def _agreement(label: str, live: RunResult, simulated: RunResult) -> Iterator[Check]:
    points = 100 * abs(live.attainment - simulated.attainment)
    yield _check(f"{label}: SLO attainment", _ATTAINMENT_POINTS, points, "points")
    percent = 100 * abs(simulated.times.percentile_ms(0.5) / live.times.percentile_ms(0.5) - 1)
    yield _check(f"{label}: p50", _P50_PERCENT, percent, "%")


def _check(claim: str, most: float, measured: float, unit: str) -> Check:
    expected, text = f"within {most:g} {unit}", f"{measured:.1f} {unit}"
    return Check(f"{claim}, simulated versus live", _SOURCE, expected, text, measured <= most)
