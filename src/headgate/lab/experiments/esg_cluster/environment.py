"""The cluster of the ESG experiment under the loads and the objectives of its cells.

The objective of an application is a multiple of L, its latency at the smallest configuration of
every stage (batch 1): 0.8, 1.0 and 1.2. On the measured set L is only 1.2 times the fastest path,
because a single image decodes no faster on more cores, and 0.8 L cannot be met at all. Objectives
there are 1.2, 1.5 and 2.5 times the fastest path, as in `headgate bench planner`.

Load is the share of the cluster's GPU time, or vCPU time if that binds first, that requests need at
the cheapest configurations of batch 1 within the objective: 20, 50 and 85 %. With the recalled set
the recalled arrival intervals of the paper are 21, 43 and 85 % in this measure.

All functions are loaded on all nodes before the first arrival. Requests of the first seconds
are a warm-up and do not count for latencies and hit rates; cost is that of the whole run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Final, Literal

import numpy as np

from headgate.core.clock import MILLISECOND_NS, SECOND_NS
from headgate.core.model import App
from headgate.lab.experiments.esg_cluster.profiles import (
    MEASURED,
    NODES,
    SEVENTHS,
    VCPUS,
    ProfileSet,
    build_app,
    profile_set,
    ready_after_ns,
)
from headgate.lab.harness import Environment
from headgate.lab.stage_configs import Prices
from headgate.planning.frontier.candidates import pipeline_frontier
from headgate.planning.frontier.configs import COST_UNITS_PER_USD
from headgate.planning.frontier.pipeline import PipelineFrontier
from headgate.sim.faults import Fault, FaultPlan
from headgate.sim.ground_truth import GroundTruthConfig
from headgate.workload import Arrivals, arrivals_at, assign, gamma, poisson
from headgate.workload.arrivals import Int64
from headgate.workload.generators import column_stream

Process = Literal["band", "poisson", "bursty"]

PRICES: Final = Prices()
CV: Final = 0.01  # the GPU table's 95th percentiles are on average 1.5 % above the medians
_BAND: Final = (10.0, 16.8)  # ms between requests, heavy, as recalled: only their ratio is used
_BURSTY_CV: Final = 4.0
_BETWEEN_FAILURES_NS: Final = 100 * MILLISECOND_NS
_FACTORS: Final = {"strict": 0.8, "moderate": 1.0, "relaxed": 1.2}  # times L
_MEASURED_FACTORS: Final = {"strict": 1.2, "moderate": 1.5, "relaxed": 2.5}  # times the fastest
_UTILISATION: Final = {"light": 0.20, "normal": 0.50, "heavy": 0.85}


@dataclass(frozen=True, slots=True)
class Cell:
    """An objective and a load."""

    objective: str
    load: str

    @property
    def name(self) -> str:
        return f"{self.objective}-{self.load}"

    @property
    def utilisation(self) -> float:
        return _UTILISATION[self.load]


CELLS: Final = (Cell("strict", "light"), Cell("moderate", "normal"), Cell("relaxed", "heavy"))


@dataclass(frozen=True, slots=True)
class ClusterScenario:
    """A cell on a profile set, and what goes wrong in it."""

    profiles: str
    cell: Cell
    duration_s: float  # of the arrivals that count, after the warm-up
    warm_up_s: float = 10.0  # until policies with replicas have scaled
    directory: Path | None = None  # of traces, for the INFless set
    load_factor: float = 1.0  # on the rate of the cell
    process: Process = "band"
    cv: float = CV  # coefficient of variation of execution times
    failed_nodes: int = 0  # in the middle third of the time that counts
    profile_errors: tuple[float, ...] = ()  # true over profiled times, by function in turn

    @property
    def rate_per_s(self) -> float:
        """Requests per second, of all applications together."""
        sized = sized_cell(self.profiles, self.directory, self.cell)
        return self.load_factor * sized.rate_per_s

    def environment(self, seed: int) -> Environment:
        sized = sized_cell(self.profiles, self.directory, self.cell)
        begin_ns = ready_after_ns(profile_set(self.profiles, self.directory))
        warm_up_ns = round(self.warm_up_s * SECOND_NS)
        counted_ns = round(self.duration_s * SECOND_NS)
        since_ns = begin_ns + warm_up_ns
        arrivals = _draw(self.process, self.rate_per_s, begin_ns, warm_up_ns + counted_ns, seed)
        applications = dict.fromkeys([pipeline.name for pipeline in sized.app.pipelines], 1.0)
        functions = len(sized.app.functions)
        errors = self.profile_errors
        return Environment(
            sized.app,
            assign(arrivals, applications, {"client": 1.0}, seed=seed),
            GroundTruthConfig(
                "lognormal",
                cv=self.cv,
                scale=tuple(errors[i % len(errors)] for i in range(functions)) if errors else (),
            ),
            since_ns=since_ns,
            faults=_failures(self.failed_nodes, since_ns, counted_ns).actions(),
        )


@dataclass(frozen=True, slots=True)
class SizedCell:
    """The application of a cell with its objectives, its rate, and its lower bound."""

    app: App
    rate_per_s: float
    binding: str  # the resource that the load is a share of
    bound_usd: float  # per request: every stage in full batches of the cheapest plan in time
    smallest_ms: dict[str, float]  # by application: L
    fastest_ms: dict[str, float]
    slo_ms: dict[str, float]


@cache
def sized_cell(name: str, directory: Path | None, cell: Cell) -> SizedCell:
    """Return a cell on a profile set: objectives first, then the rate."""
    profiles = profile_set(name, directory)
    smallest_ns = _smallest_ns(profiles)
    unlimited = build_app(profiles, dict.fromkeys(smallest_ns, SECOND_NS), PRICES)
    frontiers = {
        pipeline.name: pipeline_frontier(unlimited, pipeline) for pipeline in unlimited.pipelines
    }
    fastest_ns = {app: frontier.whole.fastest_ns for app, frontier in frontiers.items()}
    is_measured = name == MEASURED
    base_ns = fastest_ns if is_measured else smallest_ns
    factor = (_MEASURED_FACTORS if is_measured else _FACTORS)[cell.objective]
    slos_ns = {app: round(factor * base_ns[app]) for app in base_ns}
    rate_per_s, binding = _rate(frontiers, slos_ns, cell.utilisation)
    return SizedCell(
        build_app(profiles, slos_ns, PRICES),
        rate_per_s,
        binding,
        fmean(frontiers[app].plan(slos_ns[app]).cost for app in slos_ns) / COST_UNITS_PER_USD,
        {app: value / 1e6 for app, value in smallest_ns.items()},
        {app: value / 1e6 for app, value in fastest_ns.items()},
        {app: value / 1e6 for app, value in slos_ns.items()},
    )


def _smallest_ns(profiles: ProfileSet) -> dict[str, int]:
    times_ns = {table.name: table.times()[0].exec_ns[0] for table in profiles.functions}
    return {app: sum(times_ns[stage] for stage in stages) for app, stages in profiles.applications}


def _rate(
    frontiers: dict[str, PipelineFrontier], slos_ns: dict[str, int], utilisation: float
) -> tuple[float, str]:
    """Return the rate at which requests, one by one, use this share of the cluster."""
    gpu_s, cpu_s = [], []
    for app, frontier in frontiers.items():
        configs = frontier.capped(1).plan(slos_ns[app]).configs
        gpu_s.append(sum(c.gpu_sevenths * c.time_ns for c in configs) / SECOND_NS)
        cpu_s.append(sum(c.cpu_milli * c.time_ns for c in configs) / SECOND_NS / 1000)
    limits = {
        "vGPU": NODES * SEVENTHS / (fmean(gpu_s) or 1e-9),
        "vCPU": NODES * VCPUS / fmean(cpu_s),
    }
    binding = min(limits, key=limits.__getitem__)
    return utilisation * limits[binding], binding


def _draw(
    process: Process, rate_per_s: float, begin_ns: int, duration_ns: int, seed: int
) -> Arrivals:
    if process == "poisson":
        drawn = poisson(rate_per_s, duration_ns, seed=seed).times_ns
    elif process == "bursty":
        drawn = gamma(rate_per_s, _BURSTY_CV, duration_ns, seed=seed).times_ns
    else:
        drawn = _band(rate_per_s, duration_ns, seed)
    return arrivals_at(begin_ns + drawn, begin_ns + duration_ns)


def _band(rate_per_s: float, duration_ns: int, seed: int) -> Int64:
    """Return arrivals with intervals that are uniform in a band, as wide as the paper's."""
    low, high = (2 * edge / sum(_BAND) * SECOND_NS / rate_per_s for edge in _BAND)
    count = int(1.1 * duration_ns / (0.5 * (low + high))) + 100
    times = np.cumsum(column_stream(seed, "esg/intervals").uniform(low, high, count))
    return times[times < duration_ns].astype(np.int64)


def _failures(count: int, begin_ns: int, duration_ns: int) -> FaultPlan:
    """Return a plan in which nodes are down in the middle third of a time, one after the other.

    If they failed at the same instant, requests that are retried would use up their attempts.
    """
    third_ns = duration_ns // 3
    faults = []
    for node in range(count):
        down_ns = begin_ns + third_ns + node * _BETWEEN_FAILURES_NS
        faults.append(Fault("crash", down_ns, until_ns=down_ns + third_ns, node=node))
    return FaultPlan(tuple(faults))
