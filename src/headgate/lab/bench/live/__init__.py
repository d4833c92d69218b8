"""Throughput and latency of Headgate and other servers, in one run on one machine.

Every peer has a server process and a virtual environment of its own, is sent the same tensors and
must respond correctly before it is measured. Peers are measured in turn, round after round, the
hand-written baseline first and last, and ratios are taken within a round, because machines are
noisy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Literal

from headgate.lab.bench.live.load_driver import LoadMeasurement, drive, driver_name, make_request
from headgate.lab.bench.live.models import (
    BareOnnxRuntime,
    example,
    expected,
    measure_bare,
    model_bytes,
    write_models,
)
from headgate.lab.bench.live.server_process import (
    NotInstalledError,
    Peer,
    ServerError,
    python_of,
    read_peers,
    running,
)
from headgate.lab.experiments import Check, Progress, Result, Row

NAME = "live"
TITLE = "requests per second and latency, compared with other servers"

# Relative to the repository root, where `make bench-live` runs.
PEERS_FILE = Path("benchmarks/peers/peers.yaml")
CACHE = Path("build/peers")
_SOURCE = "docs/benchmarks.md"
Measured = Literal["requests_per_s", "p50_ms", "p99_ms"]

_BUSY = 32  # the concurrency at which rates are compared


@dataclass(frozen=True, slots=True)
class PeerMeasurementPlan:
    """Peers, models, concurrencies and durations."""

    peers: tuple[Peer, ...]
    cache: Path  # directory of virtual environments and models
    models: tuple[str, ...] = ("echo", "cnn", "wide")
    concurrencies: tuple[int, ...] = (1, 8, 32, 64)
    rounds: int = 2
    seconds: float = 2.0


@dataclass(frozen=True, slots=True)
class ServerSession:
    """One server session in one round: start time, memory and measurements."""

    peer: Peer
    model: str
    round: int
    first_response_s: float
    memory_mib: float  # after all measurements
    measurements: dict[int, LoadMeasurement]  # by concurrency


@dataclass(slots=True)
class PeersResult:
    """All measurements, and the reasons for missing ones."""

    plan: PeerMeasurementPlan
    sessions: list[ServerSession] = field(default_factory=list)
    bare: list[BareOnnxRuntime] = field(default_factory=list)
    missing: dict[tuple[str, str], str] = field(default_factory=dict)  # by peer and model

    def of(self, peer: Peer, model: str) -> list[ServerSession]:
        return [
            session
            for session in self.sessions
            if session.peer.name == peer.name and session.model == model
        ]


def measure(plan: PeerMeasurementPlan, progress: Progress) -> PeersResult:
    """Start the peers one after the other, in rounds, and measure each with every model.

    Peers that cannot be installed or respond incorrectly are in `missing`.
    """
    result = PeersResult(plan)
    models = plan.cache / "models"
    progress("writing the models")
    write_models(models)
    pythons = _install(plan, result, progress)
    for number in range(plan.rounds):
        for model in plan.models:
            if model != "echo":
                result.bare += [measure_bare(model, b, models, plan.seconds) for b in (1, 8)]
            for peer in plan.peers:
                if peer.name in pythons and model in peer.models:
                    progress(f"round {number + 1} of {plan.rounds}: {peer.name}, {model}")
                    _measure_session(result, peer, model, number, pythons[peer.name])
    return result


def _install(plan: PeerMeasurementPlan, result: PeersResult, progress: Progress) -> dict[str, Path]:
    pythons = {}
    for peer in plan.peers:
        progress(f"installing {peer.name}")
        try:
            requirements, folder = peer.requirements, peer.folder.name
            pythons[peer.name] = python_of(requirements, plan.cache, folder)
        except NotInstalledError as error:
            for model in peer.models:
                result.missing[peer.name, model] = f"not installed: {error}"
    return pythons


def _measure_session(
    result: PeersResult, peer: Peer, model: str, number: int, python: Path
) -> None:
    plan = result.plan
    models = plan.cache / "models"
    body = make_request(peer.models[model].body, example(model))
    correct = expected(model, models)
    try:
        with running(peer, model, python, models, body, correct) as server:
            measurements = {c: drive(server.url, body, c, plan.seconds) for c in plan.concurrencies}
            memory_mib = server.memory_mib()
            session = ServerSession(
                peer, model, number, server.first_response_s, memory_mib, measurements
            )
    except ServerError as error:
        result.missing[peer.name, model] = str(error)
    else:
        result.sessions.append(session)


def live_checks(result: PeersResult) -> list[Check]:
    """Return all checks. A check against a missing peer fails with the reason."""
    (ours,) = [peer for peer in result.plan.peers if peer.is_ours]
    checks = list(_rate_checks(result, ours))
    checks += _model_checks(result, ours)
    checks += _tail_checks(result, ours)
    checks += _size_checks(result, ours)
    return checks


def median_of(sessions: list[ServerSession], concurrency: int, name: Measured) -> float | None:
    """Return the median over rounds; None without sessions."""
    values: list[float] = [
        getattr(session.measurements[concurrency], name)
        for session in sessions
        if concurrency in session.measurements
    ]
    return median(values) if values else None


def _rate_checks(result: PeersResult, ours: Peer) -> Iterator[Check]:
    for model, of_peer, of_baseline in (("echo", 3.0, 1.8), ("wide", 1.0, 1.0)):
        if model in result.plan.models:
            for group, peers in _peers(result).items():
                factor = of_baseline if peers[0].is_baseline else of_peer
                yield _ratio_check(result, ours, (group, peers), model, factor)


def _ratio_check(
    result: PeersResult, ours: Peer, group: tuple[str, list[Peer]], model: str, factor: float
) -> Check:
    """Compare rates within each round, with the best variant of a peer."""
    name, peers = group
    claim = f"{model}, concurrency {_BUSY}: at least {factor:g} times as fast as {name}"
    own = {
        session.round: session.measurements[_BUSY].requests_per_s
        for session in result.of(ours, model)
    }
    best: dict[int, float] = {}
    for session in (session for peer in peers for session in result.of(peer, model)):
        best[session.round] = max(
            best.get(session.round, 0.0), session.measurements[_BUSY].requests_per_s
        )
    ratios = [own[number] / best[number] for number in own if best.get(number)]
    if not ratios:
        reasons = [result.missing.get((c.name, model)) for c in (ours, *peers)]
        reason = next((reason for reason in reasons if reason), "not measured")
        return Check(claim, _SOURCE, f">= {factor:g}x", reason, False)
    ratio = round(median(ratios), 2)
    return Check(claim, _SOURCE, f">= {factor:g}x", f"{ratio}x", ratio >= factor)


def _model_checks(result: PeersResult, ours: Peer) -> Iterator[Check]:
    """Check throughput relative to bare ONNX Runtime, and the latency added to one request."""
    for model in result.plan.models:
        bare = [row for row in result.bare if row.model == model and row.batch == 1]
        floor_ms = median(row.p50_ms for row in bare) if bare else 0.0
        single_ms = median_of(result.of(ours, model), 1, "p50_ms")
        added_ms = None if single_ms is None else round(single_ms - floor_ms, 3)
        claim = f"{model}, concurrency 1: latency added to the median"
        holds = added_ms is not None and added_ms <= 0.5
        yield Check(claim, _SOURCE, "<= 0.5 ms", _or_missing(result, ours, model, added_ms), holds)
    if "cnn" in result.plan.models:
        own = median_of(result.of(ours, "cnn"), _BUSY, "requests_per_s")
        share = None if own is None else round(own / _bare_rate(result, "cnn"), 3)
        claim = f"cnn, concurrency {_BUSY}, binary tensors: share of bare ONNX Runtime"
        holds = share is not None and share >= 0.8
        yield Check(claim, _SOURCE, ">= 0.8", _or_missing(result, ours, "cnn", share), holds)


def _bare_rate(result: PeersResult, model: str) -> float:
    """Return items per second of bare ONNX Runtime at its better batch size."""
    rows = [row for row in result.bare if row.model == model]
    return max(
        median(row.items_per_s for row in rows if row.batch == batch)
        for batch in {row.batch for row in rows}
    )


def _tail_checks(result: PeersResult, ours: Peer) -> Iterator[Check]:
    for model in result.plan.models:
        worse = []
        for concurrency in result.plan.concurrencies:
            own_ms = median_of(result.of(ours, model), concurrency, "p99_ms")
            for peer in result.plan.peers:
                their_ms = median_of(result.of(peer, model), concurrency, "p99_ms")
                if peer.is_ours or peer.is_baseline or their_ms is None:
                    continue
                if own_ms is None or own_ms >= their_ms:
                    worse.append(f"{peer.name} at {concurrency} ({their_ms:.2f} ms)")
        missing = [c.name for c in result.plan.peers if (c.name, model) in result.missing]
        worse += [f"{name} is missing" for name in missing]
        claim = f"{model}: p99 below that of every peer, at every concurrency"
        yield Check(claim, _SOURCE, "all", "; ".join(worse) or "all", not worse)


def _size_checks(result: PeersResult, ours: Peer) -> Iterator[Check]:
    for model in result.plan.models:
        memory = first = None
        if sessions := result.of(ours, model):
            model_mib = model_bytes(model, result.plan.cache / "models") / (1 << 20)
            memory = round(max(session.memory_mib for session in sessions) - model_mib)
            first = round(median(session.first_response_s for session in sessions), 2)
        claim = f"{model}: memory of all processes, without the model"
        memory_text = _or_missing(result, ours, model, memory)
        yield Check(claim, _SOURCE, "< 200 MiB", memory_text, memory is not None and memory < 200)
        first_text = _or_missing(result, ours, model, first)
        holds = first is not None and first <= 1.5
        yield Check(f"{model}: first response after", _SOURCE, "<= 1.5 s", first_text, holds)


def _peers(result: PeersResult) -> dict[str, list[Peer]]:
    peers: dict[str, list[Peer]] = {}
    for peer in result.plan.peers:
        if not peer.is_ours:
            peers.setdefault(peer.group, []).append(peer)
    return peers


def _or_missing(result: PeersResult, ours: Peer, model: str, value: float | None) -> float | str:
    return result.missing.get((ours.name, model), "not measured") if value is None else value


def run(*, progress: Progress) -> Result:
    """Measure all peers. Takes about a quarter of an hour, and longer the first time."""
    plan = PeerMeasurementPlan(tuple(read_peers(PEERS_FILE)), CACHE)
    return report(measure(plan, progress))


def report(result: PeersResult) -> Result:
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
