"""One run of the hybrid experiments: a policy with its settings, on one trace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headgate.core.clock import MINUTE_NS, SECOND_NS
from headgate.core.model import TIER_NAMES, App, Tier
from headgate.core.policy import PolicyConfig, PolicyKind
from headgate.core.states import Outcome
from headgate.lab.experiments.hybrid.environment import (
    PEAK_INSTANCES,
    SMALL,
    HybridEnvironment,
    TraceSource,
    build_app,
    draw_arrivals,
)
from headgate.metrics.columns import RunColumns
from headgate.policies import find_policy
from headgate.sim.ground_truth import GroundTruthConfig
from headgate.sim.interfaces import Observer
from headgate.sim.run import Setup, simulate
from headgate.workload import Arrivals

Setting = float | int | bool | str


@dataclass(frozen=True, slots=True)
class HybridPolicyCase:
    """A policy with its settings."""

    name: str
    config: tuple[tuple[str, Setting], ...] = ()

    def build(self) -> tuple[PolicyKind, PolicyConfig]:
        """Return the policy and its configuration."""
        kind = find_policy(self.name)
        return kind, kind.config(**dict(self.config))

    @property
    def settings(self) -> str:
        """The settings as text; times are in seconds.

        >>> HybridPolicyCase("spock", (("target", 0.8), ("hold_ns", 60_000_000_000))).settings
        'target=0.8 hold=60s'
        """
        return " ".join(
            f"{key.removesuffix('_ns')}={value / SECOND_NS:g}s"
            if key.endswith("_ns") and not isinstance(value, str)
            else f"{key}={value}"
            for key, value in self.config
        )


@dataclass(frozen=True, slots=True)
class HybridCase:
    """One run: a policy on a trace. Without a directory of traces, arrivals are generated."""

    policy: HybridPolicyCase
    trace: TraceSource
    directory: Path | None = None
    environment: HybridEnvironment = SMALL


@dataclass(frozen=True, slots=True)
class HybridResult:
    """Metrics of one run."""

    requests: int
    attainment: float
    dedicated_usd: float
    functions_usd: float
    cold_starts: int  # of functions
    cold_misses: int  # requests that waited for a cold start and missed the SLO
    function_share: float  # share of the busy time that functions had

    @property
    def cost_usd(self) -> float:
        """Total cost."""
        return self.dedicated_usd + self.functions_usd


def measure(case: HybridCase, seed: int) -> HybridResult:
    """Run a case. Top-level function with picklable arguments, for worker processes."""
    return summarise(run_case(case, seed))


def run_case(case: HybridCase, seed: int, *, observer: Observer | None = None) -> RunColumns:
    """Run a case and return its columns."""
    arrivals = arrivals_of(case, seed)
    kind, config = case.policy.build()
    setup = Setup(
        app_of(case.environment, arrivals),
        kind,
        config,
        seed=seed,
        truth=GroundTruthConfig("lognormal", cv=0.1),
    )
    return simulate(setup, arrivals, observer=observer)


def arrivals_of(case: HybridCase, seed: int) -> Arrivals:
    """Return the arrivals of a case; they do not depend on the policy."""
    peak_per_s = PEAK_INSTANCES * case.environment.capacity_per_s
    return draw_arrivals(case.trace, peak_per_s, case.directory, seed)


def app_of(environment: HybridEnvironment, arrivals: Arrivals) -> App:
    """Return the application, with the instances that the first minute needs on average."""
    in_first_minute = int(np.searchsorted(arrivals.times_ns, MINUTE_NS))
    return build_app(environment, warm=environment.instances_for(in_first_minute / 60))


def summarise(run: RunColumns) -> HybridResult:
    """Return the metrics of a run."""
    requests = run.requests
    is_met = requests.outcome == Outcome.MET
    usd = {True: 0.0, False: 0.0}
    busy_ns = {True: 0, False: 0}
    cold_starts = 0
    for use in run.resources:
        is_function = use.tier == TIER_NAMES[Tier.SERVERLESS]
        usd[is_function] += use.allocation_usd
        busy_ns[is_function] += use.busy_ns
        cold_starts += use.cold_starts if is_function else 0
    return HybridResult(
        requests=len(requests),
        attainment=float(is_met.mean()) if len(requests) else 1.0,
        dedicated_usd=usd[False],
        functions_usd=usd[True],
        cold_starts=cold_starts,
        cold_misses=int(np.count_nonzero((requests.cold == 1) & ~is_met)),
        function_share=busy_ns[True] / max(1, sum(busy_ns.values())),
    )
