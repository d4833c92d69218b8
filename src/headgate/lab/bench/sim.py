"""How fast the simulator is, beside SimPy and SimFaaS, in one run.

Each contestant has a process of its own; they take turns, round after round, and only ratios within
a round count, because machines are noisy. The compiled build takes part where it has been built
(`make compile`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from headgate.lab.experiments.experiment import Check, Progress, Result, Row

NAME = "sim"
TITLE = "simulated requests per second, beside SimPy and SimFaaS"

ROUNDS = 5
_SOURCE = "docs/benchmarks.md"
Lap = dict[str, float | str]


COMPILED = Path("build/compiled/src")  # where `make compile` puts it, from the project's folder


def run(*, progress: Progress) -> Result:
    """Measure, with the compiled build if it is there."""
    compiled = COMPILED if COMPILED.is_dir() else None
    entrants: list[tuple[str, str, int, Path | None]] = [
        ("simpy", "simpy", 100_000, None),
        ("simfaas", "simfaas", 40_000, None),
        ("interpreted", "ours", 100_000, None),
        ("interpreted, batching", "ours-batching", 100_000, None),
    ]
    if compiled is not None:
        entrants.append(("compiled", "ours", 400_000, compiled))
        entrants.append(("compiled, batching", "ours-batching", 400_000, compiled))
    laps: dict[str, list[Lap]] = {label: [] for label, *_ in entrants}
    for number in range(ROUNDS):
        for label, contestant, requests, tree in entrants:
            progress(f"round {number + 1} of {ROUNDS}: {label}")
            lap = _lap(contestant, requests, tree)
            if lap is not None:
                laps[label].append(lap)
    rows = [_row(label, laps[label]) for label in laps]
    checks = _speed_checks(laps)
    checks += _build_checks(compiled, progress)
    return Result(NAME, rows, checks)


def _lap(contestant: str, requests: int, tree: Path | None) -> Lap | None:
    """Run one contestant once; None if it is not installed."""
    environment = dict(os.environ)
    if tree is not None:
        environment["PYTHONPATH"] = str(tree)
    command = [sys.executable, "-m", "headgate.lab.bench._simulators", contestant, str(requests)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        if "ModuleNotFoundError" in done.stderr:
            return None
        raise RuntimeError(f"{contestant} failed: {done.stderr.strip()}")
    lap: Lap = json.loads(done.stdout)
    return lap


def _row(label: str, laps: list[Lap]) -> Row:
    if not laps:
        return {"contestant": label, "requests_per_s": None, "mean_wait_ms": None, "peak_mib": None}
    return {
        "contestant": label,
        "requests_per_s": round(median(_rates(laps))),
        "mean_wait_ms": round(float(laps[0]["mean_wait_ms"]), 4),
        "peak_mib": round(max(float(lap["peak_mib"]) for lap in laps)),
    }


def _rates(laps: list[Lap]) -> list[float]:
    return [float(lap["requests_per_s"]) for lap in laps]


def _speed_checks(laps: dict[str, list[Lap]]) -> list[Check]:
    checks = [_ratio_check(laps, "interpreted", "simpy", 1.5)]
    if "compiled" in laps:
        checks.append(_ratio_check(laps, "compiled", "simpy", 8.0))
        checks.append(_ratio_check(laps, "compiled", "simfaas", 8.0))
    targets = {"interpreted": 150_000, "compiled": 700_000, "compiled, batching": 1_000_000}
    for label, target in targets.items():
        if laps.get(label):
            rate = round(median(_rates(laps[label])))
            claim = f"{label}: simulated requests per second (a target to report against)"
            checks.append(Check(claim, _SOURCE, f">= {target:,}", rate, rate >= target))
    return checks


def _ratio_check(laps: dict[str, list[Lap]], ours: str, peer: str, factor: float) -> Check:
    claim = f"{ours} is at least {factor:g} times as fast as {peer}"
    if not laps[peer]:
        return Check(claim, _SOURCE, f">= {factor:g}x", f"{peer} is not installed", False)
    ratios = [a / b for a, b in zip(_rates(laps[ours]), _rates(laps[peer]), strict=True)]
    ratio = round(median(ratios), 2)
    return Check(claim, _SOURCE, f">= {factor:g}x", f"{ratio}x", ratio >= factor)


def _build_checks(compiled: Path | None, progress: Progress) -> list[Check]:
    """That both builds decide alike, and that a long run fits in memory."""
    progress("ten million requests")
    lap = _lap("ours", 10_000_000 if compiled is not None else 2_000_000, compiled)
    assert lap is not None
    claim = f"a replay of {lap['requests']:,} requests stays under 2 GiB"
    peak = round(float(lap["peak_mib"]))
    checks = [Check(claim, _SOURCE, "< 2048 MiB", f"{peak} MiB", peak < 2048)]
    if compiled is not None:
        progress("comparing the action logs of both builds")
        logs = [_lap("ours-log", 20_000, tree) for tree in (None, compiled)]
        assert all(log is not None for log in logs)
        kinds = [str(log["build"]) for log in logs if log is not None]
        is_same = len({log["hash"] for log in logs if log is not None}) == 1
        claim = "the interpreted and the compiled build give identical action logs"
        holds = is_same and kinds == ["interpreted", "compiled"]
        checks.append(
            Check(claim, _SOURCE, "identical", "identical" if is_same else "differ", holds)
        )
    return checks
