"""Everybody measured, round after round: rows as they come, and why somebody is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from headgate.lab.bench.live.load_driver import LoadMeasurement, drive, make_request
from headgate.lab.bench.live.models import (
    BareOnnxRuntime,
    example,
    expected,
    measure_alone,
    model_bytes,
    write_models,
)
from headgate.lab.bench.live.server_process import (
    NotInstalledError,
    Peer,
    ServerError,
    python_of,
    running,
)
from headgate.lab.experiments.experiment import Check, Progress


@dataclass(frozen=True, slots=True)
class PeerMeasurementPlan:
    """What is measured and for how long."""

    contestants: tuple[Peer, ...]
    cache: Path  # where environments and models are kept
    models: tuple[str, ...] = ("echo", "cnn", "wide")
    concurrencies: tuple[int, ...] = (1, 8, 32, 64)
    rounds: int = 2
    seconds: float = 2.0


@dataclass(frozen=True, slots=True)
class ServerSession:
    """One server's turn in one round: how it started, what it held, how fast it was."""

    contestant: Peer
    model: str
    round: int
    first_answer_s: float
    memory_mib: float  # after all laps
    laps: dict[int, LoadMeasurement]  # by concurrency


@dataclass(slots=True)
class PeersResult:
    """Everything that was found, and the reason for whatever was not."""

    plan: PeerMeasurementPlan
    stays: list[ServerSession] = field(default_factory=list)
    alone: list[BareOnnxRuntime] = field(default_factory=list)
    missing: dict[tuple[str, str], str] = field(default_factory=dict)  # by contestant and model

    def of(self, contestant: Peer, model: str) -> list[ServerSession]:
        """The turns of one contestant with one model."""
        return [
            stay
            for stay in self.stays
            if stay.contestant.name == contestant.name and stay.model == model
        ]


def measure(plan: PeerMeasurementPlan, progress: Progress) -> PeersResult:
    """Measure everybody. Who cannot be installed or does not answer rightly is in `missing`."""
    found = PeersResult(plan)
    models = plan.cache / "models"
    progress("making the models")
    write_models(models)
    pythons = _install(plan, found, progress)
    for number in range(plan.rounds):
        for model in plan.models:
            if model != "echo":
                found.alone += [measure_alone(model, b, models, plan.seconds) for b in (1, 8)]
            for contestant in plan.contestants:
                if contestant.name in pythons and model in contestant.models:
                    progress(f"round {number + 1} of {plan.rounds}: {contestant.name}, {model}")
                    _stay(found, contestant, model, number, pythons[contestant.name])
    return found


def _install(plan: PeerMeasurementPlan, found: PeersResult, progress: Progress) -> dict[str, Path]:
    pythons = {}
    for contestant in plan.contestants:
        progress(f"installing {contestant.name}")
        try:
            requirements, folder = contestant.requirements, contestant.folder.name
            pythons[contestant.name] = python_of(requirements, plan.cache, folder)
        except NotInstalledError as error:
            for model in contestant.models:
                found.missing[contestant.name, model] = f"not installed: {error}"
    return pythons


def _stay(found: PeersResult, contestant: Peer, model: str, number: int, python: Path) -> None:
    plan = found.plan
    models = plan.cache / "models"
    body = make_request(contestant.models[model].body, example(model))
    right = expected(model, models)
    try:
        with running(contestant, model, python, models, body, right) as server:
            laps = {c: drive(server.url, body, c, plan.seconds) for c in plan.concurrencies}
            memory_mib = server.memory_mib()
            stay = ServerSession(contestant, model, number, server.first_answer_s, memory_mib, laps)
    except ServerError as error:
        found.missing[contestant.name, model] = str(error)
    else:
        found.stays.append(stay)


# What was measured, held against what is promised.


_SOURCE = "docs/benchmarks.md"
_BUSY = 32  # the concurrency at which rates are compared


def live_checks(found: PeersResult) -> list[Check]:
    """Return every check. One against a peer that is missing does not hold, and says why."""
    (ours,) = [contestant for contestant in found.plan.contestants if contestant.is_ours]
    checks = list(_rate_checks(found, ours))
    checks += _model_checks(found, ours)
    checks += _tail_checks(found, ours)
    checks += _size_checks(found, ours)
    return checks


def figure(
    stays: list[ServerSession], concurrency: int, read: Callable[[LoadMeasurement], float]
) -> float | None:
    """The median over the rounds; None if there is nothing."""
    values = [read(stay.laps[concurrency]) for stay in stays if concurrency in stay.laps]
    return median(values) if values else None


def rate(lap: LoadMeasurement) -> float:
    """Right answers per second."""
    return lap.requests_per_s


def p50(lap: LoadMeasurement) -> float:
    """Half of the answers took longer."""
    return lap.p50_ms


def p99(lap: LoadMeasurement) -> float:
    """One in a hundred answers took longer."""
    return lap.p99_ms


def _rate_checks(found: PeersResult, ours: Peer) -> Iterator[Check]:
    for model, of_peer, of_baseline in (("echo", 3.0, 1.8), ("wide", 1.0, 1.0)):
        if model in found.plan.models:
            for peer, contestants in _peers(found).items():
                factor = of_baseline if contestants[0].is_baseline else of_peer
                yield _ratio_check(found, ours, (peer, contestants), model, factor)


def _ratio_check(
    found: PeersResult,
    ours: Peer,
    peer: tuple[str, list[Peer]],
    model: str,
    factor: float,
) -> Check:
    """Compare rates within each round, with the peer's better row."""
    name, contestants = peer
    claim = f"{model}, {_BUSY} at a time: at least {factor:g} times as fast as {name}"
    own = {stay.round: rate(stay.laps[_BUSY]) for stay in found.of(ours, model)}
    best: dict[int, float] = {}
    for stay in (stay for contestant in contestants for stay in found.of(contestant, model)):
        best[stay.round] = max(best.get(stay.round, 0.0), rate(stay.laps[_BUSY]))
    ratios = [own[number] / best[number] for number in own if best.get(number)]
    if not ratios:
        reasons = [found.missing.get((c.name, model)) for c in (ours, *contestants)]
        why = next((reason for reason in reasons if reason), "not measured")
        return Check(claim, _SOURCE, f">= {factor:g}x", why, False)
    ratio = round(median(ratios), 2)
    return Check(claim, _SOURCE, f">= {factor:g}x", f"{ratio}x", ratio >= factor)


def _model_checks(found: PeersResult, ours: Peer) -> Iterator[Check]:
    """How much of ONNX Runtime alone is left, and what is added to a lone request."""
    for model in found.plan.models:
        alone = [row for row in found.alone if row.model == model and row.batch == 1]
        floor_ms = median(row.p50_ms for row in alone) if alone else 0.0
        lone_ms = figure(found.of(ours, model), 1, p50)
        added_ms = None if lone_ms is None else round(lone_ms - floor_ms, 3)
        claim = f"{model}, one at a time: time added to the median"
        holds = added_ms is not None and added_ms <= 0.5
        yield Check(claim, _SOURCE, "<= 0.5 ms", _or_missing(found, ours, model, added_ms), holds)
    if "cnn" in found.plan.models:
        own = figure(found.of(ours, "cnn"), _BUSY, rate)
        share = None if own is None else round(own / _alone_rate(found, "cnn"), 3)
        claim = f"cnn, {_BUSY} at a time, binary tensors: share of ONNX Runtime alone"
        holds = share is not None and share >= 0.8
        yield Check(claim, _SOURCE, ">= 0.8", _or_missing(found, ours, "cnn", share), holds)


def _alone_rate(found: PeersResult, model: str) -> float:
    """Items per second of ONNX Runtime at the batch size that suits it better."""
    rows = [row for row in found.alone if row.model == model]
    return max(
        median(row.items_per_s for row in rows if row.batch == batch)
        for batch in {row.batch for row in rows}
    )


def _tail_checks(found: PeersResult, ours: Peer) -> Iterator[Check]:
    for model in found.plan.models:
        worse = []
        for concurrency in found.plan.concurrencies:
            own_ms = figure(found.of(ours, model), concurrency, p99)
            for contestant in found.plan.contestants:
                their_ms = figure(found.of(contestant, model), concurrency, p99)
                if contestant.is_ours or contestant.is_baseline or their_ms is None:
                    continue
                if own_ms is None or own_ms >= their_ms:
                    worse.append(f"{contestant.name} at {concurrency} ({their_ms:.2f} ms)")
        missing = [c.name for c in found.plan.contestants if (c.name, model) in found.missing]
        worse += [f"{name} is missing" for name in missing]
        claim = f"{model}: p99 below every peer's, however many at a time"
        yield Check(claim, _SOURCE, "all", "; ".join(worse) or "all", not worse)


def _size_checks(found: PeersResult, ours: Peer) -> Iterator[Check]:
    for model in found.plan.models:
        stays = found.of(ours, model)
        model_mib = model_bytes(model, found.plan.cache / "models") / (1 << 20)
        memory = round(max(stay.memory_mib for stay in stays) - model_mib) if stays else None
        first = round(median(stay.first_answer_s for stay in stays), 2) if stays else None
        memory_said = _or_missing(found, ours, model, memory)
        holds = memory is not None and memory < 200
        claim = f"{model}: memory of all processes, the model aside"
        yield Check(claim, _SOURCE, "< 200 MiB", memory_said, holds)
        first_said = _or_missing(found, ours, model, first)
        holds = first is not None and first <= 1.5
        yield Check(f"{model}: first answer after", _SOURCE, "<= 1.5 s", first_said, holds)


def _peers(found: PeersResult) -> dict[str, list[Peer]]:
    peers: dict[str, list[Peer]] = {}
    for contestant in found.plan.contestants:
        if not contestant.is_ours:
            peers.setdefault(contestant.peer, []).append(contestant)
    return peers


def _or_missing(found: PeersResult, ours: Peer, model: str, value: float | None) -> float | str:
    return found.missing.get((ours.name, model), "not measured") if value is None else value
