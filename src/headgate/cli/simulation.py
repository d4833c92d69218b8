"""One simulated run, for the commands `simulate` and `compare`, and its event log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from headgate.core.errors import ConfigError
from headgate.core.event_log import LogHeader, LogWriter, json_lines, open_log
from headgate.core.events import Event
from headgate.core.model import App
from headgate.metrics.columns import RunColumns
from headgate.metrics.summary import Summary, summarise
from headgate.sim.ground_truth import GroundTruthConfig
from headgate.sim.interfaces import Observer
from headgate.sim.run import Setup, simulate


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """The result of a run, and how long it took to simulate."""

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
    config: AppConfig,
    policy: SelectedPolicy,
    workload: Workload,
    *,
    seed: int,
    gateways: int = 1,
    platforms: App | None = None,
    validate: bool = False,
    records_spans: bool = False,
    observer: Observer | None = None,
    title: str = "simulating",
) -> tuple[SimulatedRun, RunColumns]:
    """Simulate, with a progress bar if it takes long.

    Of `platforms` each gateway may use what `config` says; without it, all of them.
    """
    options = config.simulation
    setup = Setup(
        app=config.app,
        policy=policy.kind,
        config=policy.config,
        seed=seed,
        truth=ground_truth_config(options),
        decision_ns=options.decision_ns,
        work_unit_ns=options.per_work_unit_ns,
        arrival_ns=options.arrival_ns,
        refusal_ns=options.refusal_ns,
        client_overheads_ns=options.client_overheads_ns,
        schedulers=gateways,
        platforms=platforms,
        announces=policy.is_clairvoyant,
        validate=validate,
        records_spans=records_spans,
    )
    arrivals = workload.arrivals
    total = None if arrivals is None or workload.loops else len(arrivals)
    with Progress(f"{title} {policy.name}", total) as progress:
        start_s = perf_counter()
        try:
            columns = simulate(
                setup,
                arrivals,
                clients=workload.clients(config.app),
                observer=observer,
                window_ns=workload.window_ns,
                on_chunk=progress.update,
            )
        except ConfigError as error:
            raise error.located(f"policy {policy.name}") from error
        took_s = perf_counter() - start_s
        if len(columns.requests) == workload.requests_max:
            # All were sent before the time was over: rates are over the time that they took.
            last_ns = int(columns.requests.finished_ns.max())
            columns = replace(columns, window_ns=min(columns.window_ns, last_ns + 1))
        summary = summarise(columns)
    return SimulatedRun(policy.name, seed, summary, took_s), columns


def ground_truth_config(options: SimulationOptions) -> GroundTruthConfig:
    """Return the ground truth that the application file describes."""
    is_uniform = options.distribution == "uniform"
    return GroundTruthConfig(
        distribution=options.distribution,
        # The simulator takes the half width of a uniform distribution, the file gives its CV.
        cv=options.cv * sqrt(3) if is_uniform else options.cv,
        # An empty scale takes the fast path.
        scale=options.scale if any(scale != 1.0 for scale in options.scale) else (),
        observed=options.observed,
    )


class LogObserver(Observer):
    """Writes the event log of a run with one Scheduler."""

    def __init__(self, stream: TextIO, header: LogHeader) -> None:
        self.events = 0
        self._writer = LogWriter(json_lines(stream), header)

    def on_event(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        if scheduler == 0:  # a log has the events of one Scheduler
            self._writer.write(self.events, now_ns, event, actions)
            self.events += 1

    def close(self) -> None:
        """Write the end mark of a complete run."""
        self._writer.close()


@contextmanager
def logging_to(
    path: Path | None, config: AppConfig, policy: SelectedPolicy, seed: int, gateways: int = 1
) -> Iterator[LogObserver | None]:
    """Open an event log for a run, if there is a path. Its header has all that a replay needs.

    Of several gateways, the first one is logged.
    """
    if path is None:
        yield None
        return
    spec = without_keys(config.spec)
    header = LogHeader(spec, policy.name, policy.settings, seed, peers=gateways)
    with writing(path, "--log"), open_log(path) as stream:
        observer = LogObserver(stream, header)
        yield observer
        observer.close()  # not after an exception: then the log is incomplete
