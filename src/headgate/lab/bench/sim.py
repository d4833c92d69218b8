"""Speed of the simulator compared with SimPy and SimFaaS, in one run.

Each simulator has a process of its own; they run in turn, round after round, and only ratios within
a round count, because machines are noisy. The compiled build is measured if it exists
(`make compile`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from headgate.lab.experiments import Check, Progress, Result, Row

NAME = "sim"
TITLE = "simulated requests per second, compared with SimPy and SimFaaS"

ROUNDS = 5
_SOURCE = "docs/benchmarks.md"
SimulatorRun = dict[str, float | str]


COMPILED = Path("build/compiled/src")  # output of `make compile`, relative to the repository root


def run(*, progress: Progress) -> Result:
    """Measure all simulators, and the compiled build if it exists."""
    compiled = COMPILED if COMPILED.is_dir() else None
    simulators: list[tuple[str, str, int, Path | None]] = [
        ("simpy", "simpy", 100_000, None),
        ("simfaas", "simfaas", 40_000, None),
        ("interpreted", "ours", 100_000, None),
        ("interpreted, batching", "ours-batching", 100_000, None),
    ]
    if compiled is not None:
        simulators.append(("compiled", "ours", 400_000, compiled))
        simulators.append(("compiled, batching", "ours-batching", 400_000, compiled))
    runs: dict[str, list[SimulatorRun]] = {label: [] for label, *_ in simulators}
    for number in range(ROUNDS):
        for label, simulator, requests, tree in simulators:
            progress(f"round {number + 1} of {ROUNDS}: {label}")
            simulated = _run_simulator(simulator, requests, tree)
            if simulated is not None:
                runs[label].append(simulated)
    rows = [_row(label, runs[label]) for label in runs]
    checks = _speed_checks(runs)
    checks += _build_checks(compiled, progress)
    return Result(NAME, rows, checks)


def _run_simulator(simulator: str, requests: int, tree: Path | None) -> SimulatorRun | None:
    """Run one simulator once; None if it is not installed."""
    environment = dict(os.environ)
    if tree is not None:
        environment["PYTHONPATH"] = str(tree)
    command = [sys.executable, "-m", "headgate.lab.bench._simulators", simulator, str(requests)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        if "ModuleNotFoundError" in done.stderr:
            return None
        raise RuntimeError(f"{simulator} failed: {done.stderr.strip()}")
    run: SimulatorRun = json.loads(done.stdout)
    return run


def _row(label: str, runs: list[SimulatorRun]) -> Row:
    if not runs:
        return {"simulator": label, "requests_per_s": None, "mean_wait_ms": None, "peak_mib": None}
    return {
        "simulator": label,
        "requests_per_s": round(median(_rates(runs))),
        "mean_wait_ms": round(float(runs[0]["mean_wait_ms"]), 4),
        "peak_mib": round(max(float(run["peak_mib"]) for run in runs)),
    }


def _rates(runs: list[SimulatorRun]) -> list[float]:
    return [float(run["requests_per_s"]) for run in runs]


def _speed_checks(runs: dict[str, list[SimulatorRun]]) -> list[Check]:
    checks = [_ratio_check(runs, "interpreted", "simpy", 1.5)]
    if "compiled" in runs:
        checks.append(_ratio_check(runs, "compiled", "simpy", 8.0))
        checks.append(_ratio_check(runs, "compiled", "simfaas", 8.0))
    targets = {"interpreted": 150_000, "compiled": 700_000, "compiled, batching": 1_000_000}
    for label, target in targets.items():
        if runs.get(label):
            rate = round(median(_rates(runs[label])))
            claim = f"{label}: simulated requests per second (a target to report against)"
            checks.append(Check(claim, _SOURCE, f">= {target:,}", rate, rate >= target))
    return checks


def _ratio_check(runs: dict[str, list[SimulatorRun]], ours: str, peer: str, factor: float) -> Check:
    claim = f"{ours} is at least {factor:g} times as fast as {peer}"
    if not runs[peer]:
        return Check(claim, _SOURCE, f">= {factor:g}x", f"{peer} is not installed", False)
    ratios = [a / b for a, b in zip(_rates(runs[ours]), _rates(runs[peer]), strict=True)]
    ratio = round(median(ratios), 2)
    return Check(claim, _SOURCE, f">= {factor:g}x", f"{ratio}x", ratio >= factor)


def _build_checks(compiled: Path | None, progress: Progress) -> list[Check]:
    """Check that a long run fits in memory, and that both builds decide alike."""
    progress("ten million requests")
    simulated = _run_simulator("ours", 10_000_000 if compiled is not None else 2_000_000, compiled)
    assert simulated is not None
    claim = f"a replay of {simulated['requests']:,} requests stays under 2 GiB"
    peak = round(float(simulated["peak_mib"]))
    checks = [Check(claim, _SOURCE, "< 2048 MiB", f"{peak} MiB", peak < 2048)]
    if compiled is not None:
        progress("comparing the action logs of both builds")
        logs = [_run_simulator("ours-log", 20_000, tree) for tree in (None, compiled)]
        assert all(log is not None for log in logs)
        kinds = [str(log["build"]) for log in logs if log is not None]
        is_same = len({log["hash"] for log in logs if log is not None}) == 1
        claim = "the interpreted and the compiled build give identical action logs"
        holds = is_same and kinds == ["interpreted", "compiled"]
        checks.append(
            Check(claim, _SOURCE, "identical", "identical" if is_same else "differ", holds)
        )
    return checks
