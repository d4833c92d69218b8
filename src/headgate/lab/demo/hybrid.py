"""Hybrid serving, live: one machine that bursts are too much for, without and with functions.

The recommender is profiled on this machine, planned for, served, and sent a bursty workload, once
for every way of serving it. The machine is one core, and the functions have another. Then the same
is simulated, to see whether the simulator and the plan would have said so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from headgate.config.prices import PriceList, read_prices
from headgate.core.catalog import FaasOffering, InstanceType
from headgate.core.errors import ConfigError
from headgate.lab.demo.runs import (
    DemoPolicy,
    DemoRunResult,
    best_threshold,
    deployed,
    run_live,
    run_simulated,
)
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
from headgate.planning.capacity.load import open_load
from headgate.planning.capacity.plan import CapacityPlan, Infeasible, Terms, make_plan
from headgate.workload import Arrivals

PROFILE_S: Final = 12.0
_SEED: Final = 1
_SIMULATED_CORES: Final = (2, 4)  # of machines that this one is not
_REQUEST_NS: Final = round(OVERHEAD_MS * 1e6)
_ATTAINMENT_POINTS: Final = 3.0
_P50_PERCENT: Final = 15.0
_SOURCE: Final = "live, simulated and planned agree"


@dataclass(frozen=True, slots=True)
class Planned:
    """What was known before anything was served."""

    scale: Scale
    plan: CapacityPlan
    prices: PriceList
    machine: InstanceType
    platform: FaasOffering
    arrivals: Arrivals

    @property
    def threshold(self) -> int:
        """Requests at once that the machine is to have."""
        return self.plan.capacities[0].threshold


@dataclass(frozen=True, slots=True)
class DemoEnvironment:
    """What a simulation is told."""

    times: Times
    request_ns: int  # what no log can see of a request


@dataclass(frozen=True, slots=True)
class DemoRun:
    """One way of serving: as it was, and as it was simulated."""

    way: DemoPolicy
    foretold: DemoRunResult  # by what was known before
    live: DemoRunResult | None = None  # None: this machine has no such size
    simulated: DemoRunResult | None = None  # by what the live run's own log says of times


@dataclass(frozen=True, slots=True)
class DemoResult:
    """All of it."""

    planned: Planned
    runs: tuple[DemoRun, ...]
    best_threshold: int  # of all that were tried in the simulator

    @property
    def checks(self) -> list[Check]:
        """Whether live, simulated and planned agree."""
        found = [
            check
            for run in self.runs
            if run.live is not None and run.simulated is not None
            for check in _agreement(run.way.label, run.live, run.simulated)
        ]
        planned, best = self.planned.threshold, self.best_threshold
        claim = "threshold: planned, and the best of all that were tried"
        said = f"{planned} and {best}"
        return [*found, Check(claim, _SOURCE, "within 1", said, abs(planned - best) <= 1)]


def prepare(model: Path, course: DemoSchedule, budget_s: float, progress: Progress) -> Planned:
    """Profile the recommender and plan for it. Raises `ConfigError`."""
    return plan_for(fit_to_machine(model, course, budget_s, progress))


def plan_for(scale: Scale) -> Planned:
    """Plan for what was measured. Raises `ConfigError` if nothing would do."""
    prices = read_prices()
    machine, platform = one_core(prices), prices.platforms[0]
    arrivals = scale.arrivals(_SEED)
    expected = open_load(arrivals.times_ns, arrivals.duration_ns, scale.slo_ms)
    terms = Terms(scale.slo_ms, QUANTILE, expected, instances_max=1)
    plan = make_plan(scale.measured, [machine], platform, terms)
    if isinstance(plan, Infeasible):
        problem = f"one core takes {plan.fastest_ms:.0f} ms for a request, however few there are"
        raise ConfigError(problem, where="this machine", value=f"{scale.slo_ms:g} ms")
    return Planned(scale, plan, prices, machine, platform, arrivals)


def perform(planned: Planned, progress: Progress) -> DemoResult:
    """Serve it in every way, and simulate the same."""
    make = partial(application, planned.scale, planned.machine, planned.platform)
    lone_ms = planned.scale.measured.time_ms(1, 1)
    runs: list[DemoRun] = []
    with TemporaryDirectory(prefix="headgate-demo-") as scratch:
        folder = Path(scratch)
        progress("deploying the function")
        spec = make(Times(lone_ms, lone_ms))
        with deployed(spec, folder, planned.platform) as functions:
            known = DemoEnvironment(Times(lone_ms, functions.call_ms(planned.scale)), _REQUEST_NS)
            functions.wake()
            spec = make(known.times, endpoint_url=functions.platform.url)
            for way in _ways(planned.threshold):
                progress(f"serving: {way.label}")
                log = folder / f"{way.policy}.log"
                chosen = {**spec, "policy": {"name": way.policy, **dict(way.settings)}}
                live, request_ns = run_live(chosen, planned.scale, planned.arrivals, log, functions)
                seen = DemoEnvironment(read_times(log, known.times), request_ns)
                runs.append(
                    DemoRun(
                        way, _simulate(planned, way, known), live, _simulate(planned, way, seen)
                    )
                )
    progress("simulating other machines, and all thresholds")
    for cores in _SIMULATED_CORES:
        way = DemoPolicy(f"threshold on {cores} cores", "threshold")
        runs.append(DemoRun(way, _simulate(planned, way, known, cores)))
    best = best_threshold(make(known.times), planned.scale, planned.arrivals, _REQUEST_NS)
    return DemoResult(planned, tuple(runs), best)


def _simulate(
    planned: Planned, way: DemoPolicy, world: DemoEnvironment, cores: int = 1
) -> DemoRunResult:
    scale, machine, platform = planned.scale, planned.machine, planned.platform
    spec = application(scale, machine, platform, world.times, cores=cores)
    return run_simulated(spec, way, scale, planned.arrivals, world.request_ns)


def _ways(threshold: int) -> tuple[DemoPolicy, ...]:
    return (
        DemoPolicy("without functions", "dedicated_only"),
        DemoPolicy(f"threshold of {threshold}", "threshold", (("threshold", threshold),)),
        DemoPolicy("headgate", "headgate"),
    )


def _agreement(label: str, live: DemoRunResult, simulated: DemoRunResult) -> Iterator[Check]:
    points = 100 * abs(live.attainment - simulated.attainment)
    yield _check(f"{label}: in time", _ATTAINMENT_POINTS, points, "points")
    percent = 100 * abs(simulated.percentile_ms(0.5) / live.percentile_ms(0.5) - 1)
    yield _check(f"{label}: p50", _P50_PERCENT, percent, "%")


def _check(claim: str, most: float, measured: float, unit: str) -> Check:
    expected, said = f"within {most:g} {unit}", f"{measured:.1f} {unit}"
    return Check(f"{claim}, simulated beside live", _SOURCE, expected, said, measured <= most)
