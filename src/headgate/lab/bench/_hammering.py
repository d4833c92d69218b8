"""The part of `bench overload` with clients that hammer: refused, they come back at once.

So many clients each send the next request as soon as they are answered, whatever `Retry-After`
says: as many as keep the worker busy, twice and eight times as many. The function sleeps, so the
worker leaves its core to the gateway and the clients.

Goodput counts what is within the objective, as its client sees it: a request also waits in the
kernel until the gateway reads it, behind the refusals of all others. Beside it stands what is in
time by the clock of the gateway, which is what the policy can promise. The core time of all but the
workers is divided by the requests where (nearly) none is refused, which is the cost of an
admission; what more it is with eight times the clients is the cost of the refusals.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np

from headgate.core.clock import SECOND_NS
from headgate.core.states import Outcome
from headgate.functions import Model
from headgate.functions.arrays import Array
from headgate.lab.bench._server_under_test import OPTIONS, SLO_MS, serving
from headgate.lab.bench.pipeline import core_seconds
from headgate.lab.experiments import Check, Progress, Result, Row
from headgate.loadgen.loops import run_closed_loop
from headgate.loadgen.results import FailureReason, LoadResult

NAME: Final = "hammering"
_SOURCE: Final = "docs/benchmarks.md"
_SLEEP_MS: Final = 20.0
_BATCH: Final = 8
_GOODPUT_MIN: Final = 0.9
_COST_MAX: Final = 1.0


class Sleeping(Model):
    """Takes as long for a batch as for one item, and no core."""

    def load(self) -> None:
        """Declare inputs and outputs."""
        self.inputs, self.outputs = {"x": "FP32[-1, 1]"}, {"y": "FP32[-1]"}

    def predict(self, batch: dict[str, Array]) -> dict[str, Array]:
        """Return the inputs, after a while."""
        time.sleep(_SLEEP_MS / 1e3)
        return {"y": batch["x"][:, 0]}


@dataclass(frozen=True, slots=True)
class HammeringPlan:
    """How many clients there are, in multiples of what keeps the worker busy: two batches."""

    clients: int = 2 * _BATCH
    multiples: tuple[int, ...] = (1, 2, 8)
    seconds: float = 15.0


@dataclass(frozen=True, slots=True)
class HammeringStep:
    """What became of the requests of so many clients."""

    clients: int
    seconds: float
    admitted: int
    rejected: int
    unanswered: int
    good: int  # within the objective, as clients see it
    in_time: int  # as the gateway counts
    p50_ms: float  # of what was admitted
    core_s: float  # of the gateway and its supervisor


def measure(plan: HammeringPlan, progress: Progress) -> list[HammeringStep]:
    """Serve so many clients after one another."""
    app = {
        "functions": {
            OPTIONS.model: {
                "code": "headgate.lab.bench._hammering:Sleeping",
                "batch_max": _BATCH,
            }
        },
        "slo": {"latency": f"{SLO_MS}ms"},
        "serve": {"port": 0},
    }
    steps = []
    duration_ns = round(plan.seconds * SECOND_NS)
    with TemporaryDirectory() as directory:
        folder = Path(directory)
        with serving(app, folder, folder / "hammering.log") as server:
            for multiple in plan.multiples:
                clients = multiple * plan.clients
                progress(f"{clients} clients that come back at once, {plan.seconds:g} s")
                before_s = core_seconds(server)
                result = run_closed_loop(server.url, clients, duration_ns, OPTIONS)
                core_s = core_seconds(server).gateway - before_s.gateway
                steps.append(step_of(clients, plan.seconds, result, core_s))
    return steps


def step_of(clients: int, seconds: float, result: LoadResult, core_s: float) -> HammeringStep:
    """Return the figures of a run."""
    is_admitted, latencies_ms = result.status == 200, result.latency_ns * 1e-6
    return HammeringStep(
        clients,
        seconds,
        admitted=int(is_admitted.sum()),
        rejected=int((result.status == 429).sum()),
        unanswered=int((result.failure != FailureReason.NONE).sum()),
        good=int((is_admitted & (latencies_ms <= SLO_MS)).sum()),
        in_time=int((is_admitted & (result.reported != Outcome.LATE)).sum()),
        p50_ms=float(np.median(latencies_ms[is_admitted])) if is_admitted.any() else nan,
        core_s=core_s,
    )


def costs_us(steps: Sequence[HammeringStep]) -> tuple[float, float]:
    """Return the core time of an admission and of a refusal, from the first and the last step."""
    first, last = steps[0], steps[-1]
    admission_us = 1e6 * first.core_s / max(1, first.admitted + first.rejected)
    refusals_us = 1e6 * last.core_s - admission_us * last.admitted
    return admission_us, refusals_us / max(1, last.rejected)


def report(steps: Sequence[HammeringStep]) -> Result:
    """Return a row per number of clients, and checks of the last one."""
    peak, last = max(step.good / step.seconds for step in steps), steps[-1]
    peak_in_time = max(step.in_time / step.seconds for step in steps)
    admission_us, refusal_us = costs_us(steps)
    rows: list[Row] = [
        {
            "clients": step.clients,
            "goodput_rps": round(step.good / step.seconds, 1),
            "share_of_peak": round(step.good / step.seconds / peak, 3) if peak else None,
            "in_time_rps": round(step.in_time / step.seconds, 1),
            "rejected_rps": round(step.rejected / step.seconds, 1),
            "p50_ms": round(step.p50_ms, 1),
        }
        for step in steps
    ]
    rows.append({"admission_us": round(admission_us, 1), "refusal_us": round(refusal_us, 1)})
    at = f"{last.clients} clients that come back at once"
    share = last.in_time / last.seconds / peak_in_time if peak_in_time else 0.0
    holds = share >= _GOODPUT_MIN
    claim = f"{at}: in time by the gateway's clock, relative to the peak ({peak_in_time:.1f}/s)"
    checks = [Check(claim, _SOURCE, f">= {_GOODPUT_MIN}", round(share, 3), holds)]
    cost = refusal_us / admission_us if admission_us else nan
    claim = "core time of a refusal, relative to an admission"
    checks.append(Check(claim, _SOURCE, f"<= {_COST_MAX:g}", round(cost, 2), cost <= _COST_MAX))
    unanswered = sum(step.unanswered for step in steps)
    claim = "requests of clients that hammer, without a response"
    checks.append(Check(claim, _SOURCE, "0", unanswered, unanswered == 0))
    return Result(NAME, rows, checks)
