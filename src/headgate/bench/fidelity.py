"""How well the simulator foretells a live day: the same requests, served and then simulated.

A model is really served, at three levels of load. Each event log is replayed, which must give
identical actions; then it is calibrated, and its requests are simulated with what that says. All
of it is done with the commands that users have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from headgate.bench._serving import OPTIONS, outside_ns, peak_rps, product_app, serving, tool
from headgate.core.clock import SECOND_NS
from headgate.experiments.experiment import Check, Progress, Result, Row
from headgate.load import run_open_loop, summarise_load
from headgate.workload import poisson

NAME = "fidelity"
TITLE = "a live day, replayed and simulated"

_SOURCE: Final = "docs/benchmarks.md"
_P50_MAX: Final = 0.15
_P99_MAX: Final = 0.30
_ATTAINMENT_MAX: Final = 0.03


@dataclass(frozen=True, slots=True)
class Plan:
    """How much load, in capacities, and for how long."""

    levels: tuple[tuple[str, float], ...] = (("low", 0.3), ("medium", 0.7), ("overload", 2.0))
    seconds: float = 15.0
    peak_seconds: float = 3.0


@dataclass(frozen=True, slots=True)
class Seen:
    """One level, as clients saw it and as it was simulated."""

    level: str
    rate_per_s: float
    replay: dict[str, object]
    outside_ms: float
    live: dict[str, float]
    simulated: dict[str, float]


def run(*, progress: Progress) -> Result:
    """Measure. Takes about a minute."""
    return report(measure(Plan(), progress))


def measure(plan: Plan, progress: Progress) -> list[Seen]:
    """Serve, replay, calibrate and simulate, level by level."""
    with TemporaryDirectory() as directory:
        folder = Path(directory)
        progress("finding out what the machine carries")
        app = product_app()
        with serving(app, folder, folder / "peak.log") as server:
            capacity_rps = peak_rps(server, plan.peak_seconds)
        seen = []
        for seed, (level, load) in enumerate(plan.levels):
            progress(f"serving at {load:.0%} of {capacity_rps:.0f} requests/s")
            seen.append(_look(level, load * capacity_rps, app, folder, plan.seconds, seed))
        return seen


def report(seen: list[Seen]) -> Result:
    """Return a table, and the checks."""
    checks = [check for each in seen for check in _checks(each)]
    return Result(NAME, [row for each in seen for row in _rows(each)], checks)


def _look(
    level: str, rate_per_s: float, app: dict[str, object], folder: Path, seconds: float, seed: int
) -> Seen:
    log, trace = folder / f"{level}.log", folder / f"{level}.csv"
    calibrated = folder / f"{level}.yaml"
    arrivals = poisson(rate_per_s, round(seconds * SECOND_NS), seed=seed)
    with serving(app, folder, log) as server:
        result = run_open_loop(server.url, arrivals, OPTIONS)
    live = summarise_load(result).run
    outside = outside_ns(result)
    tool("calibrate", log, "--out", calibrated, "--trace", trace, "--request", f"{outside}ns")
    return Seen(
        level,
        rate_per_s,
        tool("replay", log),
        outside / 1e6,
        _figures(live.to_json()),
        _figures(tool("simulate", calibrated, "--trace", trace)),
    )


def _figures(summary: dict[str, object]) -> dict[str, float]:
    return {name: float(str(summary[name])) for name in ("p50_ms", "p99_ms", "slo_attainment")}


def _rows(seen: Seen) -> Iterator[Row]:
    for how, figures in (("live", seen.live), ("simulated", seen.simulated)):
        yield {
            "load": seen.level,
            "requests_per_s": round(seen.rate_per_s, 1),
            "how": how,
            "p50_ms": round(figures["p50_ms"], 2),
            "p99_ms": round(figures["p99_ms"], 2),
            "slo_attainment": round(figures["slo_attainment"], 4),
            "outside_ms": round(seen.outside_ms, 3),
        }


def _checks(seen: Seen) -> Iterator[Check]:
    is_same = seen.replay["is_identical"] is True and seen.replay["complete"] is True
    said = f"{seen.replay['actions']:,} actions" if is_same else str(seen.replay["difference"])
    claim = f"{seen.level}: the log replays with identical actions"
    yield Check(claim, _SOURCE, "identical", said, is_same)
    for name, most in (("p50_ms", _P50_MAX), ("p99_ms", _P99_MAX)):
        error = abs(seen.simulated[name] / seen.live[name] - 1)
        claim = f"{seen.level}: simulated {name[:3]} beside the live one"
        yield Check(claim, _SOURCE, f"within {most:.0%}", f"{error:.1%}", error <= most)
    error = abs(seen.simulated["slo_attainment"] - seen.live["slo_attainment"])
    claim = f"{seen.level}: simulated SLO attainment beside the live one"
    expected = f"within {100 * _ATTAINMENT_MAX:.0f} points"
    yield Check(claim, _SOURCE, expected, f"{100 * error:.1f} points", error <= _ATTAINMENT_MAX)
