"""How fast Headgate serves, beside others, in one run on one machine.

Every contestant has a server process and an environment of its own, is sent the same tensors and
has to answer rightly before it is measured. They take turns, round after round, the hand-written
baseline first and last, and ratios are taken within a round, because machines are noisy.
"""

from __future__ import annotations

from pathlib import Path

from headgate.lab.bench.live.load_driver import driver_name
from headgate.lab.bench.live.measure import (
    PeerMeasurementPlan,
    PeersResult,
    figure,
    live_checks,
    measure,
    p50,
    p99,
    rate,
)
from headgate.lab.bench.live.server_process import read_contestants
from headgate.lab.experiments.experiment import Progress, Result, Row

__all__ = [
    "NAME",
    "TITLE",
    "PeerMeasurementPlan",
    "PeersResult",
    "default_plan",
    "measure",
    "report",
    "run",
]

NAME = "live"
TITLE = "requests per second and latency, beside other servers"

# From the project's folder, as `make bench-live` runs it.
CONTESTANTS = Path("benchmarks/peers/contestants.yaml")
CACHE = Path("build/peers")


def run(*, progress: Progress) -> Result:
    """Measure everybody. Takes about a quarter of an hour, and longer the first time."""
    return report(measure(default_plan(), progress))


def default_plan() -> PeerMeasurementPlan:
    """Return what `headgate bench live` measures."""
    return PeerMeasurementPlan(tuple(read_contestants(CONTESTANTS)), CACHE)


def report(found: PeersResult) -> Result:
    """Return tables and checks."""
    rows = [*_alone_rows(found), *_lap_rows(found), *_stay_rows(found)]
    return Result(NAME, rows, live_checks(found))


def _alone_rows(found: PeersResult) -> list[Row]:
    return [
        {
            "onnx_runtime_alone": row.model,
            "batch": row.batch,
            "items_per_s": round(row.items_per_s),
            "batch_p50_ms": round(row.p50_ms, 3),
        }
        for row in found.alone
    ]


def _lap_rows(found: PeersResult) -> list[Row]:
    rows: list[Row] = []
    for model in found.plan.models:
        for contestant in found.plan.contestants:
            stays = found.of(contestant, model)
            for concurrency in found.plan.concurrencies if stays else ():
                requests_per_s = figure(stays, concurrency, rate) or 0.0
                rows.append(
                    {
                        "contestant": contestant.name,
                        "model": model,
                        "at_a_time": concurrency,
                        "requests_per_s": round(requests_per_s),
                        "p50_ms": _rounded(figure(stays, concurrency, p50)),
                        "p99_ms": _rounded(figure(stays, concurrency, p99)),
                        "errors": sum(stay.laps[concurrency].errors for stay in stays),
                        "sent_by": driver_name(),
                    }
                )
    return rows


def _stay_rows(found: PeersResult) -> list[Row]:
    rows: list[Row] = []
    for model in found.plan.models:
        for contestant in found.plan.contestants:
            stays = found.of(contestant, model)
            first_s = [stay.first_answer_s for stay in stays]
            memory = [stay.memory_mib for stay in stays]
            rows.append(
                {
                    "server": contestant.name,
                    "model": model,
                    "first_answer_s": round(min(first_s), 2) if first_s else None,
                    "memory_mib": round(max(memory)) if memory else None,
                    "missing": found.missing.get((contestant.name, model)),
                }
            )
    return rows


def _rounded(value_ms: float | None) -> float | None:
    return None if value_ms is None else round(value_ms, 3)
