"""What is left of a server when three times as much is asked of it as it can do.

Open loop: requests come at their own times, whatever becomes of those before them, as they do when
there are many clients. The event log is on. Beside that, every server's curve with one ONNX model.
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
from headgate.lab.bench.live import CACHE, CONTESTANTS
from headgate.lab.bench.live.server_process import read_contestants
from headgate.lab.experiments.experiment import Check, Progress, Result, Row
from headgate.metrics.from_log import read_columns

NAME = "overload"
TITLE = "goodput, promises kept and memory at three times the capacity"

_SOURCE: Final = "docs/benchmarks.md"
_GOODPUT_MIN: Final = 0.9
_KEPT_MIN: Final = 0.99
_REJECTED_MS_MAX: Final = 5.0
_GROWTH_MIB_MAX: Final = 32.0


@dataclass(frozen=True, slots=True)
class OverloadPlan:
    """How much is asked, in capacities, and for how long; the last one is what is checked."""

    curve: tuple[float, ...] = (0.5, 0.8, 1.0, 1.5, 2.0)
    curve_seconds: float = 6.0
    overload: float = 3.0
    seconds: float = 60.0
    peak_seconds: float = 4.0


@dataclass(frozen=True, slots=True)
class OverloadResult:
    """All steps, in order of load."""

    capacity_rps: float  # with as many clients as keep the worker busy
    steps: list[LoadStep]
    logged: int  # requests that came and were settled, as the log has it

    @property
    def peak_rps(self) -> float:
        """The best goodput of all."""
        return max(self.capacity_rps, *(step.summary.run.goodput_rps for step in self.steps))

    @property
    def overload(self) -> LoadStep:
        """The last one."""
        return self.steps[-1]


def run(*, progress: Progress) -> Result:
    """Measure ours, then everybody. Takes a quarter of an hour, and longer the first time."""
    plan = PeerPlan(tuple(read_contestants(CONTESTANTS)), CACHE)
    ours = report(measure(OverloadPlan(), progress))
    everybody = report_peers(measure_peers(plan, progress))
    return Result(NAME, ours.rows + everybody.rows, ours.checks + everybody.checks)


def measure(plan: OverloadPlan, progress: Progress) -> OverloadResult:
    """Find out what the machine carries, and ask for ever more."""
    with TemporaryDirectory() as directory:
        folder = Path(directory)
        log = folder / "overload.log"
        progress("making a model of 20 ms")
        app = product_app()
        with serving(app, folder, folder / "peak.log") as server:
            capacity_rps = peak_rps(server, plan.peak_seconds)
        with serving(app, folder, log) as server:
            steps = []
            for load in (*plan.curve, plan.overload):
                seconds = plan.seconds if load == plan.overload else plan.curve_seconds
                progress(f"asking for {load:g} times {capacity_rps:.0f} requests/s, {seconds:g} s")
                steps.append(take_step(server, load, capacity_rps, seconds, OPTIONS))
        return OverloadResult(capacity_rps, steps, _settled(log))


def report(found: OverloadResult) -> Result:
    """Return the curve, and the checks."""
    return Result(NAME, [_row(step) for step in found.steps], list(_checks(found)))


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


def _checks(found: OverloadResult) -> Iterator[Check]:
    step = found.overload
    run = step.summary.run
    at = f"{step.load:g} times the capacity"
    share = run.goodput_rps / found.peak_rps
    claim = f"{at}: goodput over its peak ({found.peak_rps:.1f}/s)"
    yield Check(claim, _SOURCE, f">= {_GOODPUT_MIN}", round(share, 3), share >= _GOODPUT_MIN)
    kept = run.admitted_kept
    claim = f"{at}: what was admitted is answered within {SLO_MS} ms, as clients see it"
    yield Check(claim, _SOURCE, f">= {_KEPT_MIN}", round(kept, 4), kept >= _KEPT_MIN)
    rejected_ms = round(step.summary.rejected_p99_ms, 2)
    claim = f"{at}: a rejection is answered within, p99"
    holds = rejected_ms <= _REJECTED_MS_MAX
    yield Check(claim, _SOURCE, f"<= {_REJECTED_MS_MAX:g} ms", f"{rejected_ms} ms", holds)
    before_mib, most_mib, after_mib = step.memory_mib
    growth_mib = max(most_mib, after_mib) - before_mib
    claim = f"{at}: memory of all processes grows by"
    said = f"{growth_mib:.1f} MiB of {before_mib:.0f}"
    holds = growth_mib <= _GROWTH_MIB_MAX
    yield Check(claim, _SOURCE, f"<= {_GROWTH_MIB_MAX:g} MiB", said, holds)
    is_one = all(step.has_one_answer_each for step in found.steps)
    sent = sum(step.summary.run.requests for step in found.steps)
    claim = f"every one of {sent:,} requests has exactly one answer, and one settlement in the log"
    holds = is_one and found.logged == sent
    yield Check(claim, _SOURCE, "all", f"{found.logged:,} settled", holds)
