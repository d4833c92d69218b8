"""How well the simulator foretells a live day: the same requests, served and then simulated.

A model is really served, at three levels of load. Each event log is replayed, which must give
identical actions; then it is calibrated, and its requests are simulated with what that says. All
of it is done with the commands that users have. Machines are noisy and a 99th percentile is a few
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
    outside_ns,
    peak_rps,
    product_app,
    serving,
    tool,
)
from headgate.lab.experiments.experiment import Check, Progress, Result, Row
from headgate.loadgen import run_open_loop, summarise_load
from headgate.workload import Arrivals, poisson

NAME = "fidelity"
TITLE = "a live day, replayed and simulated"

_SOURCE: Final = "docs/benchmarks.md"
_ERRORS_MAX: Final[Mapping[str, tuple[str, float]]] = {
    "p50_ms": ("p50", 0.15),
    "p99_ms": ("p99", 0.30),
    "slo_attainment": ("SLO attainment", 0.03),
}


@dataclass(frozen=True, slots=True)
class FidelityPlan:
    """How much load, in capacities, and for how long."""

    levels: tuple[tuple[str, float], ...] = (("low", 0.3), ("medium", 0.7), ("overload", 2.0))
    rounds: int = 3
    seconds: float = 12.0
    peak_seconds: float = 3.0


@dataclass(frozen=True, slots=True)
class FidelityLevel:
    """One level in one round, as clients saw it and as it was simulated."""

    level: str
    round: int
    rate_per_s: float
    replay: dict[str, object]
    outside_ms: float
    live: dict[str, float]
    simulated: dict[str, float]

    def error(self, name: str) -> float:
        """How far off the simulation is: of a share in points, else relative."""
        live, simulated = self.live[name], self.simulated[name]
        return abs(simulated - live) / (1 if name == "slo_attainment" else live)


def run(*, progress: Progress) -> Result:
    """Measure. Takes about three minutes."""
    return report(measure(FidelityPlan(), progress))


def measure(plan: FidelityPlan, progress: Progress) -> list[FidelityLevel]:
    """Serve, replay, calibrate and simulate, level by level."""
    with TemporaryDirectory() as directory:
        folder = Path(directory)
        progress("finding out what the machine carries")
        app = product_app()
        with serving(app, folder, folder / "peak.log") as server:
            capacity_rps = peak_rps(server, plan.peak_seconds)
        seen = []
        for number in range(plan.rounds):
            for level, load in plan.levels:
                progress(f"round {number + 1} of {plan.rounds}: {load:.0%} of {capacity_rps:.0f}/s")
                arrivals = poisson(
                    load * capacity_rps, round(plan.seconds * SECOND_NS), seed=number
                )
                seen.append(_look(level, number, arrivals, app, folder))
        return seen


def report(seen: list[FidelityLevel]) -> Result:
    """Return a table, and the checks."""
    levels = dict.fromkeys(each.level for each in seen)
    checks = [check for level in levels for check in _checks([s for s in seen if s.level == level])]
    return Result(NAME, [row for each in seen for row in _rows(each)], checks)


def _look(
    level: str, number: int, arrivals: Arrivals, app: dict[str, object], folder: Path
) -> FidelityLevel:
    log, trace = folder / "live.log", folder / "live.csv"
    calibrated = folder / "calibrated.yaml"
    with serving(app, folder, log) as server:
        result = run_open_loop(server.url, arrivals, OPTIONS)
    outside = outside_ns(result)
    tool(
        "calibrate", log, "--out", calibrated, "--trace", trace, "--client-overhead", f"{outside}ns"
    )
    return FidelityLevel(
        level,
        number + 1,
        arrivals.mean_rate_per_s,
        tool("replay", log),
        outside / 1e6,
        _figures(summarise_load(result).run.to_json()),
        _figures(tool("simulate", calibrated, "--trace", trace)),
    )


def _figures(summary: dict[str, object]) -> dict[str, float]:
    return {name: float(str(summary[name])) for name in _ERRORS_MAX}


def _rows(seen: FidelityLevel) -> Iterator[Row]:
    for how, figures in (("live", seen.live), ("simulated", seen.simulated)):
        yield {
            "load": seen.level,
            "round": seen.round,
            "requests_per_s": round(seen.rate_per_s, 1),
            "how": how,
            "p50_ms": round(figures["p50_ms"], 2),
            "p99_ms": round(figures["p99_ms"], 2),
            "slo_attainment": round(figures["slo_attainment"], 4),
            "outside_ms": round(seen.outside_ms, 3),
        }


def _checks(rounds: list[FidelityLevel]) -> Iterator[Check]:
    level = rounds[0].level
    replays = [seen.replay for seen in rounds]
    is_same = all(replay["is_identical"] and replay["complete"] for replay in replays)
    actions = sum(int(str(replay["actions"])) for replay in replays)
    said = f"{actions:,} actions" if is_same else "they differ, or a log is not complete"
    claim = f"{level}: the logs replay with identical actions"
    yield Check(claim, _SOURCE, "identical", said, is_same)
    for name, (words, most) in _ERRORS_MAX.items():
        error = median(seen.error(name) for seen in rounds)
        unit = " points" if name == "slo_attainment" else " %"
        claim = f"{level}: simulated {words} beside the live one"
        expected = f"within {100 * most:g}{unit}"
        yield Check(claim, _SOURCE, expected, f"{100 * error:.1f}{unit}", error <= most)
