"""Goodput, latency and memory under overload, up to three times the capacity.

Open loop: arrivals do not depend on earlier responses, as with many clients. The event log is on.
In addition, every peer is measured under overload with one ONNX model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np

from headgate.config import from_spec
from headgate.core.clock import NEVER_NS
from headgate.core.event_log import read_log
from headgate.lab.bench._overload_peers import PeerPlan, measure_peers, report_peers
from headgate.lab.bench._server_under_test import (
    OPTIONS,
    SLO_MS,
    LoadStep,
    peak_rps,
    product_app,
    serving,
    take_step,
)
from headgate.lab.bench.live import CACHE, PEERS_FILE
from headgate.lab.bench.live.server_process import read_peers
from headgate.lab.experiments.experiment import Check, Progress, Result, Row
from headgate.metrics.from_log import read_columns

NAME = "overload"
TITLE = "goodput, admitted requests within the SLO and memory at three times the capacity"

_SOURCE: Final = "docs/benchmarks.md"
_GOODPUT_MIN: Final = 0.9
_WITHIN_SLO_MIN: Final = 0.99
_REJECTED_MS_MAX: Final = 5.0
_GROWTH_MIB_MAX: Final = 32.0


@dataclass(frozen=True, slots=True)
class OverloadPlan:
    """Loads, as multiples of the capacity, and durations; the last load is checked."""

    curve: tuple[float, ...] = (0.5, 0.8, 1.0, 1.5, 2.0)
    curve_seconds: float = 6.0
    overload: float = 3.0
    seconds: float = 60.0
    peak_seconds: float = 4.0


@dataclass(frozen=True, slots=True)
class OverloadResult:
    """All load steps, in order of load."""

    capacity_rps: float  # goodput in a closed loop that saturates the worker
    steps: list[LoadStep]
    settled: int  # requests with an outcome in the event log

    @property
    def peak_rps(self) -> float:
        """Highest goodput of all loads."""
        return max(self.capacity_rps, *(step.summary.run.goodput_rps for step in self.steps))

    @property
    def overload(self) -> LoadStep:
        """The step with the highest load."""
        return self.steps[-1]


def run(*, progress: Progress) -> Result:
    """Measure Headgate, then all peers. Takes a quarter of an hour, longer the first time."""
    plan = PeerPlan(tuple(read_peers(PEERS_FILE)), CACHE)
    ours = report(measure(OverloadPlan(), progress))
    peers_report = report_peers(measure_peers(plan, progress))
    return Result(NAME, ours.rows + peers_report.rows, ours.checks + peers_report.checks)


def measure(plan: OverloadPlan, progress: Progress) -> OverloadResult:
    """Measure the capacity, then increasing loads."""
    with TemporaryDirectory() as directory:
        folder = Path(directory)
        log = folder / "overload.log"
        progress("calibrating a model of 20 ms")
        app = product_app()
        with serving(app, folder, folder / "peak.log") as server:
            capacity_rps = peak_rps(server, plan.peak_seconds)
        with serving(app, folder, log) as server:
            steps = []
            for load in (*plan.curve, plan.overload):
                seconds = plan.seconds if load == plan.overload else plan.curve_seconds
                progress(f"load of {load:g} times {capacity_rps:.0f} requests/s, {seconds:g} s")
                steps.append(take_step(server, load, capacity_rps, seconds, OPTIONS))
        return OverloadResult(capacity_rps, steps, _settled(log))


def report(result: OverloadResult) -> Result:
    """Return rows per load, and the checks."""
    return Result(NAME, [_row(step) for step in result.steps], list(_checks(result)))


def _settled(log: Path) -> int:
    header, entries = read_log(log)
    with closing(entries):
        columns = read_columns(entries, from_spec(header.app, str(log)).app)
    return int(np.count_nonzero(columns.requests.finished_ns != NEVER_NS))


def _row(step: LoadStep) -> Row:
    summary = step.summary
    return {
        "load": step.load,
        "offered_rps": round(summary.offered_rps, 1),
        "goodput_rps": round(summary.run.goodput_rps, 1),
        "admitted_kept": round(summary.run.admitted_kept, 4),
        "late": summary.run.late,
        "expired": summary.run.expired,
        "failed": summary.run.failed,
        "rejected": summary.run.rejected,
        "p50_ms": round(summary.run.p50_ms, 1),
        "p99_ms": round(summary.run.p99_ms, 1),
        "rejected_p99_ms": round(summary.rejected_p99_ms, 2),
        "sender_lag_p99_ms": round(summary.lag_p99_ms, 2),
        "memory_mib": round(step.memory_mib[1]),
    }


def _checks(result: OverloadResult) -> Iterator[Check]:
    step = result.overload
    run = step.summary.run
    at = f"{step.load:g} times the capacity"
    share = run.goodput_rps / result.peak_rps
    claim = f"{at}: goodput relative to the peak ({result.peak_rps:.1f}/s)"
    yield Check(claim, _SOURCE, f">= {_GOODPUT_MIN}", round(share, 3), share >= _GOODPUT_MIN)
    within_slo = run.admitted_kept
    claim = f"{at}: share of admitted requests within {SLO_MS} ms, as clients see it"
    holds = within_slo >= _WITHIN_SLO_MIN
    yield Check(claim, _SOURCE, f">= {_WITHIN_SLO_MIN}", round(within_slo, 4), holds)
    rejected_ms = round(step.summary.rejected_p99_ms, 2)
    claim = f"{at}: p99 latency of rejections"
    holds = rejected_ms <= _REJECTED_MS_MAX
    yield Check(claim, _SOURCE, f"<= {_REJECTED_MS_MAX:g} ms", f"{rejected_ms} ms", holds)
    before_mib, most_mib, after_mib = step.memory_mib
    growth_mib = max(most_mib, after_mib) - before_mib
    claim = f"{at}: growth of memory of all processes"
    measured = f"{growth_mib:.1f} MiB of {before_mib:.0f}"
    holds = growth_mib <= _GROWTH_MIB_MAX
    yield Check(claim, _SOURCE, f"<= {_GROWTH_MIB_MAX:g} MiB", measured, holds)
    is_one = all(step.has_one_response_each for step in result.steps)
    sent = sum(step.summary.run.requests for step in result.steps)
    claim = f"each of {sent:,} requests has exactly one response, and one outcome in the event log"
    holds = is_one and result.settled == sent
    yield Check(claim, _SOURCE, "all", f"{result.settled:,} settled", holds)
