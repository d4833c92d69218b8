"""One simulated run, as `simulate` and `compare` make it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from time import perf_counter
from typing import TextIO

from headgate.cli.app_loading import SelectedPolicy
from headgate.cli.options import writing
from headgate.cli.output import Progress
from headgate.cli.workload import Workload
from headgate.config import AppConfig, SimulationOptions, without_keys
from headgate.core.actions import Action
from headgate.core.event_log import LogHeader, LogWriter, json_lines, open_log
from headgate.core.events import Event
from headgate.metrics.columns import RunColumns
from headgate.metrics.summary import Summary, summarise
from headgate.sim.ground_truth import GroundTruthConfig
from headgate.sim.interfaces import Observer
from headgate.sim.run import Setup, simulate


@dataclass(frozen=True, slots=True)
class SimulatedRun:
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
    loaded: AppConfig,
    chosen: SelectedPolicy,
    workload: Workload,
    *,
    seed: int,
    validate: bool = False,
    records_spans: bool = False,
    observer: Observer | None = None,
    title: str = "simulating",
) -> tuple[SimulatedRun, RunColumns]:
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
        request_ns=choice.client_overhead_ns,
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
    return SimulatedRun(chosen.name, seed, summary, took_s), columns


def truth_of(choice: SimulationOptions) -> GroundTruthConfig:
    """Return the truth that the application file describes."""
    is_uniform = choice.distribution == "uniform"
    return GroundTruthConfig(
        distribution=choice.distribution,
        # A uniform truth is told its half width, and the file gives the deviation.
        cv=choice.cv * sqrt(3) if is_uniform else choice.cv,
        # No scale at all is the fast path.
        scale=choice.scale if any(scale != 1.0 for scale in choice.scale) else (),
        observed=choice.observed,
    )


# Writes the log of a simulated run, event by event.


class LogObserver(Observer):
    """An observer for a run with one Scheduler."""

    def __init__(self, stream: TextIO, header: LogHeader) -> None:
        self.events = 0
        self._writer = LogWriter(json_lines(stream), header)

    def on_event(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        """Write it down."""
        self._writer.write(self.events, now_ns, event, actions)
        self.events += 1

    def close(self) -> None:
        """Write the end mark, once the run has come to its end."""
        self._writer.close()


@contextmanager
def logging_to(
    path: Path | None, loaded: AppConfig, chosen: SelectedPolicy, seed: int
) -> Iterator[LogObserver | None]:
    """Open a log for a run; none without a path. What it needs to be replayed is in its header."""
    if path is None:
        yield None
        return
    header = LogHeader(without_keys(loaded.spec), chosen.name, chosen.settings, seed)
    with writing(path, "--log"), open_log(path) as stream:
        observer = LogObserver(stream, header)
        yield observer
        observer.close()  # not if the run broke: then there is more to it than the log says
