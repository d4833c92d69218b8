"""A live image pipeline on two workers: batches and cores from the frontier, beside other ways.

Three stages with ONNX models are served in three ways that differ in the batch sizes and cores of
their stages alone: those that the frontier plans, equal cores with batches of one, and the optimum
of each stage by itself. All get the same requests, Poisson and bursty, at a share of what the
frontier's way can do by its profiles. Each event log is calibrated and simulated, so that the
prediction of the simulator stands beside the measurement. The ways take turns in several rounds,
because machines are noisy, and means over the rounds count.

Core time is that of the worker processes, as the kernel counts it. Requests that are rejected count
as missed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Final

from headgate.core.clock import MILLISECOND_NS, SECOND_NS
from headgate.lab.bench._image_pipeline import (
    FIXED,
    FRONTIER,
    NODES,
    PIPELINE,
    STAGES,
    Profiles,
    Way,
    choose_ways,
    core_counts,
    core_ns,
    cores_per_worker,
    fastest_ns,
    measure_profiles,
    served_app,
    write_models,
)
from headgate.lab.bench._server_under_test import serving, simulate_log
from headgate.lab.bench.live.server_process import Running, descendants
from headgate.lab.experiments import Check, Progress, Result, Row
from headgate.loadgen.loops import run_open_loop
from headgate.loadgen.requests import LoadOptions
from headgate.loadgen.results import LoadResult, summarise_load
from headgate.workload import Arrivals, gamma, poisson

NAME = "pipeline"
TITLE = "a live image pipeline on two workers, with batches and cores from the frontier"

_SOURCE: Final = "docs/benchmarks.md"
_SLO_FACTOR: Final = 4.0  # objective, as a multiple of the fastest path
_PLAN_SHARE: Final = 0.5  # of the objective for the plan; the rest is for queueing
_P50_ERROR_MAX: Final = 0.10
_HIT_ERROR_MAX: Final = 0.02
_HIT_SLACK: Final = 0.02  # two runs of one way differ by as much


@dataclass(frozen=True, slots=True)
class ImagePipelinePlan:
    """Loads, as shares of what the frontier's way can do by its profiles, and durations."""

    poisson_load: float = 0.5
    bursty_load: float = 0.35
    bursty_cv: float = 2.0
    rounds: int = 2
    seconds: float = 10.0
    profile_seconds: float = 0.5  # for each stage, core count and batch size


@dataclass(frozen=True, slots=True)
class WayRun:
    """One way under one arrival process, live and simulated."""

    way: str
    arrivals: str
    round: int
    choices: Way
    rate_per_s: float
    slo_ms: float
    live: dict[str, float]
    simulated: dict[str, float]
    core_s: float  # per response, of the workers


@dataclass(frozen=True, slots=True)
class WayMean:
    """The means of one way under one arrival process, over its rounds."""

    way: str
    arrivals: str
    hit_rate: float
    core_s: float
    p50_error: float
    hit_error: float


def run(*, progress: Progress) -> Result:
    """Measure. Takes about four minutes."""
    return report(measure(ImagePipelinePlan(), progress))


def measure(plan: ImagePipelinePlan, progress: Progress) -> list[WayRun]:
    """Measure the stages, plan, and serve the pipeline in every way under both processes."""
    cores = cores_per_worker()
    with TemporaryDirectory() as directory:
        folder = Path(directory)
        progress("measuring the stages")
        write_models(folder)
        profiles = measure_profiles(folder, core_counts(cores), plan.profile_seconds)
        slo_ns = round(_SLO_FACTOR * fastest_ns(profiles) / MILLISECOND_NS) * MILLISECOND_NS
        slo_ns = max(slo_ns, MILLISECOND_NS)
        ways = choose_ways(profiles, cores, slo_ns, round(_PLAN_SHARE * slo_ns))
        capacity_rps = NODES * cores * SECOND_NS / core_ns(profiles, ways[FRONTIER])
        runs = []
        server = PipelineServer(folder, profiles, cores, slo_ns)
        for number in range(1, plan.rounds + 1):
            for kind, arrivals in _arrivals(plan, capacity_rps, number):
                for name, way in ways.items():
                    rate = f"{arrivals.mean_rate_per_s:.0f} requests/s"
                    progress(f"round {number} of {plan.rounds}: {name}, {kind} at {rate}")
                    live, simulated, core_s = server.run(way, arrivals)
                    rate_per_s, slo_ms = arrivals.mean_rate_per_s, slo_ns / MILLISECOND_NS
                    runs.append(
                        WayRun(name, kind, number, way, rate_per_s, slo_ms, live, simulated, core_s)
                    )
        return runs


def report(runs: list[WayRun]) -> Result:
    by_key: dict[tuple[str, str], list[WayRun]] = {}
    for run in runs:
        by_key.setdefault((run.way, run.arrivals), []).append(run)
    means = [_mean(rounds) for rounds in by_key.values()]
    checks = [*_way_checks(means), *(check for each in means for check in _fidelity_checks(each))]
    return Result(NAME, [_row(run) for run in runs], checks)


@dataclass(frozen=True, slots=True)
class PipelineServer:
    """Serves the pipeline in any way."""

    folder: Path  # with the models
    profiles: Profiles
    cores: int
    slo_ns: int

    def run(self, way: Way, arrivals: Arrivals) -> tuple[dict[str, float], dict[str, float], float]:
        """Serve requests. Returns the figures, live and simulated, and the core time of one."""
        log = self.folder / "live.log"
        options = LoadOptions(model=PIPELINE, slo_ns=self.slo_ns, is_binary=True)
        app = served_app(self.profiles, way, self.cores, self.slo_ns)
        with serving(app, self.folder, log) as server:
            before_s = worker_cpu_s(server)
            result = run_open_loop(server.url, arrivals, options)
            used_s = worker_cpu_s(server) - before_s
        return (
            _figures(summarise_load(result).run.to_json()),
            _figures(simulate_log(self.folder, log, result)),
            used_s / max(1, _responses(result)),
        )


def worker_cpu_s(server: Running) -> float:
    """Return the CPU time that the workers of a server have used so far."""
    ticks = 0
    for pid in descendants(server.pid):
        with suppress(OSError, IndexError):
            if "headgate.live.worker" in Path(f"/proc/{pid}/cmdline").read_text():
                # The name in field 2 may contain spaces; behind it, fields 14 and 15 are times.
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _arrivals(
    plan: ImagePipelinePlan, capacity_rps: float, seed: int
) -> Iterator[tuple[str, Arrivals]]:
    duration_ns = round(plan.seconds * SECOND_NS)
    yield "poisson", poisson(plan.poisson_load * capacity_rps, duration_ns, seed=seed)
    rate_per_s = plan.bursty_load * capacity_rps
    yield "bursty", gamma(rate_per_s, plan.bursty_cv, duration_ns, seed=seed)


def _mean(rounds: list[WayRun]) -> WayMean:
    live, simulated = (
        {name: fmean(each[name] for each in figures) for name in ("p50_ms", "slo_attainment")}
        for figures in ([run.live for run in rounds], [run.simulated for run in rounds])
    )
    return WayMean(
        rounds[0].way,
        rounds[0].arrivals,
        live["slo_attainment"],
        fmean(run.core_s for run in rounds),
        abs(simulated["p50_ms"] - live["p50_ms"]) / live["p50_ms"],
        abs(simulated["slo_attainment"] - live["slo_attainment"]),
    )


def _responses(result: LoadResult) -> int:
    return int((result.status == 200).sum())


def _figures(summary: dict[str, object]) -> dict[str, float]:
    names = ("requests", "p50_ms", "p99_ms", "slo_attainment")
    return {name: float(str(summary[name])) for name in names}


def _row(run: WayRun) -> Row:
    choices = [run.choices[stage] for stage in STAGES]
    return {
        "way": run.way,
        "batch": "/".join(str(choice.batch) for choice in choices),
        "cores": "/".join(str(choice.cores) for choice in choices),
        "arrivals": run.arrivals,
        "round": run.round,
        "requests_per_s": round(run.rate_per_s, 1),
        "slo_ms": run.slo_ms,
        "hit_rate": round(run.live["slo_attainment"], 4),
        "simulated_hit_rate": round(run.simulated["slo_attainment"], 4),
        "p50_ms": round(run.live["p50_ms"], 2),
        "simulated_p50_ms": round(run.simulated["p50_ms"], 2),
        "p99_ms": round(run.live["p99_ms"], 1),
        "core_ms_per_request": round(run.core_s * 1e3, 2),
    }


def _way_checks(means: list[WayMean]) -> Iterator[Check]:
    by_key = {(each.way, each.arrivals): each for each in means}
    for other in means:
        if other.way == FRONTIER:
            continue
        own = by_key[FRONTIER, other.arrivals]
        claim = f"{other.arrivals}: hit rate of the frontier's way, beside {other.way}"
        expected = f">= {other.hit_rate:.4f} - {_HIT_SLACK}"
        holds = own.hit_rate >= other.hit_rate - _HIT_SLACK
        yield Check(claim, _SOURCE, expected, round(own.hit_rate, 4), holds)
        if other.way == FIXED:
            claim = f"{other.arrivals}: core time of a request, as a share of {other.way}"
            share = own.core_s / other.core_s if other.core_s else 1.0
            yield Check(claim, _SOURCE, "< 1", round(share, 3), share < 1)


def _fidelity_checks(run: WayMean) -> Iterator[Check]:
    at = f"{run.way}, {run.arrivals}"
    yield Check(
        f"{at}: error of the simulated p50",
        _SOURCE,
        f"within {100 * _P50_ERROR_MAX:g} %",
        f"{100 * run.p50_error:.1f} %",
        run.p50_error <= _P50_ERROR_MAX,
    )
    yield Check(
        f"{at}: error of the simulated hit rate",
        _SOURCE,
        f"within {100 * _HIT_ERROR_MAX:g} points",
        f"{100 * run.hit_error:.1f} points",
        run.hit_error <= _HIT_ERROR_MAX,
    )
