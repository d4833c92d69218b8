"""Fidelity of the simulator: the same requests, served live and then simulated.

A model is served at three levels of load. Each event log is replayed, which must give identical
actions; then service times are calibrated from the log, and its requests are simulated with them.
All steps use the commands that users have. Machines are noisy and a 99th percentile depends on few
requests, so there are several rounds, and the median error counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final

from headgate.core.clock import SECOND_NS
from headgate.lab.bench._server_under_test import (
    OPTIONS,
    client_overhead_ns,
    peak_rps,
    product_app,
    run_command,
    serving,
)
from headgate.lab.experiments import Check, Progress, Result, Row, error_check
from headgate.loadgen.loops import run_open_loop
from headgate.loadgen.results import summarise_load
from headgate.workload import Arrivals, poisson

NAME = "fidelity"
TITLE = "a live run, replayed and simulated"

_SOURCE: Final = "docs/benchmarks.md"
_ERRORS_MAX: Final[Mapping[str, tuple[str, float]]] = {
    "p50_ms": ("p50", 0.15),
    "p99_ms": ("p99", 0.30),
    "slo_attainment": ("SLO attainment", 0.03),
}


@dataclass(frozen=True, slots=True)
class FidelityPlan:
    """Levels of load, as multiples of the capacity, and durations."""

    levels: tuple[tuple[str, float], ...] = (("low", 0.3), ("medium", 0.7), ("overload", 2.0))
    rounds: int = 3
    seconds: float = 12.0
    peak_seconds: float = 3.0


@dataclass(frozen=True, slots=True)
class FidelityLevel:
    """Live and simulated metrics of one level in one round."""

    level: str
    round: int
    rate_per_s: float
    replay: dict[str, object]
    client_overhead_ms: float
    live: dict[str, float]
    simulated: dict[str, float]

    def error(self, name: str) -> float:
        """Return the error of the simulation: absolute for a share, else relative."""
        live, simulated = self.live[name], self.simulated[name]
        return abs(simulated - live) / (1 if name == "slo_attainment" else live)


def run(*, progress: Progress) -> Result:
    """Measure. Takes about three minutes."""
    return report(measure(FidelityPlan(), progress))


def measure(plan: FidelityPlan, progress: Progress) -> list[FidelityLevel]:
    """Serve, replay, calibrate and simulate, level by level."""
    with TemporaryDirectory() as directory:
        folder = Path(directory)
        progress("measuring the capacity")
        app = product_app()
        with serving(app, folder, folder / "peak.log") as server:
            capacity_rps = peak_rps(server, plan.peak_seconds)
        measured = []
        for number in range(plan.rounds):
            for level, load in plan.levels:
                progress(f"round {number + 1} of {plan.rounds}: {load:.0%} of {capacity_rps:.0f}/s")
                arrivals = poisson(
                    load * capacity_rps, round(plan.seconds * SECOND_NS), seed=number
                )
                measured.append(_measure_level(level, number, arrivals, app, folder))
        return measured


def report(measured: list[FidelityLevel]) -> Result:
    levels = dict.fromkeys(each.level for each in measured)
    checks = [
        check
        for level in levels
        for check in _checks([each for each in measured if each.level == level])
    ]
    return Result(NAME, [row for each in measured for row in _rows(each)], checks)


def _measure_level(
    level: str, number: int, arrivals: Arrivals, app: dict[str, object], folder: Path
) -> FidelityLevel:
    log, trace = folder / "live.log", folder / "live.csv"
    calibrated = folder / "calibrated.yaml"
    with serving(app, folder, log) as server:
        result = run_open_loop(server.url, arrivals, OPTIONS)
    overhead_ns = client_overhead_ns(result)
    run_command(
        "calibrate",
        log,
        "--out",
        calibrated,
        "--trace",
        trace,
        "--client-overhead",
        f"{overhead_ns}ns",
    )
    return FidelityLevel(
        level,
        number + 1,
        arrivals.mean_rate_per_s,
        run_command("replay", log),
        overhead_ns / 1e6,
        _figures(summarise_load(result).run.to_json()),
        _figures(run_command("simulate", calibrated, "--trace", trace)),
    )


def _figures(summary: dict[str, object]) -> dict[str, float]:
    return {name: float(str(summary[name])) for name in ("requests", *_ERRORS_MAX)}


def _rows(measured: FidelityLevel) -> Iterator[Row]:
    for source, figures in (("live", measured.live), ("simulated", measured.simulated)):
        yield {
            "load": measured.level,
            "round": measured.round,
            "requests_per_s": round(measured.rate_per_s, 1),
            "source": source,
            "p50_ms": round(figures["p50_ms"], 2),
            "p99_ms": round(figures["p99_ms"], 2),
            "slo_attainment": round(figures["slo_attainment"], 4),
            "client_overhead_ms": round(measured.client_overhead_ms, 3),
        }


def _checks(rounds: list[FidelityLevel]) -> Iterator[Check]:
    level = rounds[0].level
    replays = [measured.replay for measured in rounds]
    is_same = all(replay["is_identical"] and replay["complete"] for replay in replays)
    actions = sum(int(str(replay["actions"])) for replay in replays)
    measured_text = f"{actions:,} actions" if is_same else "they differ, or a log is not complete"
    claim = f"{level}: the logs replay with identical actions"
    yield Check(claim, _SOURCE, "identical", measured_text, is_same)
    for name, (title, most) in _ERRORS_MAX.items():
        error = median(measured.error(name) for measured in rounds)
        claim = f"{level}: error of the simulated {title}"
        is_share = name == "slo_attainment"
        yield error_check(claim, _SOURCE, error, most, "points" if is_share else "%")
