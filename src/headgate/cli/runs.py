"""One simulated run, as `simulate` and `compare` make it."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from time import perf_counter

from headgate.app import LoadedApp, SimulationChoice
from headgate.cli.chosen import Chosen
from headgate.cli.progress import Progress
from headgate.cli.workload import Workload
from headgate.metrics.columns import RunColumns
from headgate.metrics.summary import Summary, summarise
from headgate.sim.hooks import Observer
from headgate.sim.run import Setup, simulate
from headgate.sim.truth import TruthConfig


@dataclass(frozen=True, slots=True)
class Run:
    """What came of it, in numbers, and how long it took to simulate."""

    policy: str
    seed: int
    summary: Summary
    took_s: float

    @property
    def sim_requests_per_s(self) -> float:
        """Simulated requests per second of real time."""
        return self.summary.requests / self.took_s

    def to_json(self) -> dict[str, object]:
        """Return what `--json` prints about a run."""
        return {
            "policy": self.policy,
            "seed": self.seed,
            **self.summary.to_json(),
            "sim_requests_per_s": self.sim_requests_per_s,
        }


def run(
    loaded: LoadedApp,
    chosen: Chosen,
    workload: Workload,
    *,
    seed: int,
    validate: bool = False,
    records_spans: bool = False,
    observer: Observer | None = None,
    title: str = "simulating",
) -> tuple[Run, RunColumns]:
    """Simulate, with a bar if it takes long."""
    choice = loaded.simulation
    setup = Setup(
        app=loaded.app,
        policy=chosen.kind,
        config=chosen.config,
        seed=seed,
        truth=truth_of(choice),
        decision_ns=choice.decision_ns,
        work_unit_ns=choice.per_work_unit_ns,
        request_ns=choice.request_ns,
        announces=chosen.is_clairvoyant,
        validate=validate,
        records_spans=records_spans,
    )
    arrivals = workload.arrivals
    total = None if arrivals is None or workload.loops else len(arrivals)
    with Progress(f"{title} {chosen.name}", total) as progress:
        start_s = perf_counter()
        columns = simulate(
            setup,
            arrivals,
            clients=workload.clients(loaded.app),
            observer=observer,
            window_ns=workload.window_ns,
            on_chunk=progress.update,
        )
        took_s = perf_counter() - start_s
        summary = summarise(columns)
    return Run(chosen.name, seed, summary, took_s), columns


def truth_of(choice: SimulationChoice) -> TruthConfig:
    """Return the truth that the application file describes."""
    is_uniform = choice.distribution == "uniform"
    return TruthConfig(
        distribution=choice.distribution,
        # A uniform truth is told its half width, and the file gives the deviation.
        cv=choice.cv * sqrt(3) if is_uniform else choice.cv,
        # No scale at all is the fast path.
        scale=choice.scale if any(scale != 1.0 for scale in choice.scale) else (),
        observed=choice.observed,
    )
