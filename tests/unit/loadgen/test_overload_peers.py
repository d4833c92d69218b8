"""`bench overload` with peers: all peers are counted alike, missing ones are named."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from headgate.core.clock import MILLISECOND_NS, SECOND_NS
from headgate.lab.bench._server_under_test import SLO_MS, LoadStep
from headgate.lab.bench.live.models import BareOnnxRuntime
from headgate.lab.bench.live.server_process import Peer, read_peers
from headgate.lab.bench.overload import (
    MODEL,
    PeerPlan,
    PeersOverloadResult,
    report_peers,
    without_repeats,
)
from headgate.loadgen.requests import LoadOptions
from headgate.loadgen.results import FailureReason, Rows, make_result, summarise_load
from headgate.workload import arrivals_at

PEERS_FILE = Path(__file__).parents[3] / "benchmarks" / "peers" / "peers.yaml"


def step(load: float, answers: list[tuple[int, int]]) -> LoadStep:
    """One second of requests, each with its status (0: timed out) and milliseconds."""
    rows = Rows()
    for number, (status, took_ms) in enumerate(answers):
        row = rows.add(number, number)
        if status:
            rows.complete(row, number + took_ms * MILLISECOND_NS, status, b"", b"")
        else:
            rows.fail(row, number + took_ms * MILLISECOND_NS, FailureReason.TIMED_OUT)
    arrivals = arrivals_at(np.array(rows.intended_ns), SECOND_NS)
    result = make_result(rows, arrivals, LoadOptions(slo_ns=SLO_MS * MILLISECOND_NS), 1)
    return LoadStep(load, summarise_load(result), True, (10.0, 12.0, 11.0))


def measured(own: list[LoadStep], peer: list[LoadStep]) -> PeersOverloadResult:
    """Return the result of two peers, one of which is Headgate."""
    ours = Peer("Ours", "Ours", Path(), (), {}, is_ours=True)
    other = Peer("Peer", "Peer", Path(), (), {})
    plan = PeerPlan((ours, other), Path(), loads=(1.0, 3.0))
    return PeersOverloadResult(
        plan, BareOnnxRuntime(MODEL, 1, 50.0, 20.0), {"Ours": own, "Peer": peer}
    )


def test_baseline_is_measured_once() -> None:
    """The baseline is listed twice; the SLO passed to Headgate is that of the client."""
    result = without_repeats(read_peers(PEERS_FILE))
    assert [c.name for c in result if c.is_baseline] == ["FastAPI by hand"]
    assert len(result) == 9
    assert all(MODEL in c.models for c in result)
    (ours,) = [c for c in result if c.is_ours]
    command = ours.models[MODEL].command
    assert command[command.index("--slo") + 1] == f"{SLO_MS}ms"


def test_rows_count_outcomes() -> None:
    """Two in time at first; then one in time, one late, two rejected, an error, a timeout."""
    steps = [
        step(1.0, [(200, 20), (200, 30)]),
        step(3.0, [(200, 40), (200, 400), (429, 1), (503, 1), (500, 1), (0, 2000)]),
    ]
    rows = report_peers(measured(steps, [])).rows
    first, last = [row for row in rows if row.get("peer") == "Ours"]
    assert (first["goodput_rps"], first["share_of_peak"]) == (2.0, 1.0)
    assert (last["goodput_rps"], last["share_of_peak"]) == (1.0, 0.5)
    assert (last["late"], last["rejected"], last["failed"]) == (1, 2, 2)
    assert (last["p99_ms"], last["memory_mib"]) == (400.0, 12)


def test_check_compares_goodput_at_the_highest_load() -> None:
    """Goodput at lower loads is not compared."""
    few, many = step(3.0, [(200, 20)]), step(3.0, [(200, 20)] * 2)
    (check,) = report_peers(measured([many], [step(1.0, [(200, 20)] * 9), few])).checks
    assert check.holds
    (check,) = report_peers(measured([few], [many])).checks
    assert not check.holds
    assert check.measured == "1.0/s; best other server: 2.0/s (Peer)"


def test_missing_peer_fails_the_check() -> None:
    found = measured([step(3.0, [(200, 20)])], [])
    found.missing["Peer"] = "exited with 1: no such module"
    result = report_peers(found)
    assert result.rows[-1] == {"peer": "Peer", "missing": "exited with 1: no such module"}
    assert [check.holds for check in result.checks] == [False]
    assert "Peer is missing" in str(result.checks[0].measured)
