"""Throughput and latency of Headgate and other servers, in one run on one machine.

Every peer has a server process and a virtual environment of its own, is sent the same tensors and
must respond correctly before it is measured. Peers are measured in turn, round after round, the
hand-written baseline first and last, and ratios are taken within a round, because machines are
noisy.
"""

from __future__ import annotations

from pathlib import Path

from headgate.lab.bench.live.load_driver import driver_name
from headgate.lab.bench.live.measure import (
    PeerMeasurementPlan,
    PeersResult,
    live_checks,
    measure,
    median_of,
)
from headgate.lab.bench.live.server_process import read_peers
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
TITLE = "requests per second and latency, compared with other servers"

# Relative to the repository root, where `make bench-live` runs.
PEERS_FILE = Path("benchmarks/peers/peers.yaml")
CACHE = Path("build/peers")


def run(*, progress: Progress) -> Result:
    """Measure all peers. Takes about a quarter of an hour, and longer the first time."""
    return report(measure(default_plan(), progress))


def default_plan() -> PeerMeasurementPlan:
    """Return the plan of `headgate bench live`."""
    return PeerMeasurementPlan(tuple(read_peers(PEERS_FILE)), CACHE)


def report(result: PeersResult) -> Result:
    """Return rows and checks."""
    rows = [*_bare_rows(result), *_load_rows(result), *_session_rows(result)]
    return Result(NAME, rows, live_checks(result))


def _bare_rows(result: PeersResult) -> list[Row]:
    return [
        {
            "bare_onnx_runtime": row.model,
            "batch": row.batch,
            "items_per_s": round(row.items_per_s),
            "batch_p50_ms": round(row.p50_ms, 3),
        }
        for row in result.bare
    ]


def _load_rows(result: PeersResult) -> list[Row]:
    rows: list[Row] = []
    for model in result.plan.models:
        for peer in result.plan.peers:
            sessions = result.of(peer, model)
            for concurrency in result.plan.concurrencies if sessions else ():
                requests_per_s = median_of(sessions, concurrency, "requests_per_s") or 0.0
                rows.append(
                    {
                        "peer": peer.name,
                        "model": model,
                        "concurrency": concurrency,
                        "requests_per_s": round(requests_per_s),
                        "p50_ms": _rounded(median_of(sessions, concurrency, "p50_ms")),
                        "p99_ms": _rounded(median_of(sessions, concurrency, "p99_ms")),
                        "errors": sum(
                            session.measurements[concurrency].errors for session in sessions
                        ),
                        "load_generator": driver_name(),
                    }
                )
    return rows


def _session_rows(result: PeersResult) -> list[Row]:
    rows: list[Row] = []
    for model in result.plan.models:
        for peer in result.plan.peers:
            sessions = result.of(peer, model)
            first_s = [session.first_response_s for session in sessions]
            memory = [session.memory_mib for session in sessions]
            rows.append(
                {
                    "server": peer.name,
                    "model": model,
                    "first_response_s": round(min(first_s), 2) if first_s else None,
                    "memory_mib": round(max(memory)) if memory else None,
                    "missing": result.missing.get((peer.name, model)),
                }
            )
    return rows


def _rounded(value_ms: float | None) -> float | None:
    return None if value_ms is None else round(value_ms, 3)
