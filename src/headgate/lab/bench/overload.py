"""Goodput, latency and memory under overload, up to three times the capacity.

Open loop: arrivals do not depend on earlier responses, as with many clients. The event log is on.
In addition, every peer is measured under overload with one ONNX model, the same arrivals and the
same client. The capacity for peers is the throughput of bare ONNX Runtime on one core. Peers are
measured one after the other; between two loads a peer gets time to drain its queues.

Between the two, clients hammer, closed loop: each sends the next request as soon as it is answered,
whatever `Retry-After` says; as many as keep the worker busy, twice and eight times as many. The
function sleeps, so the worker leaves its core to the gateway and the clients. Goodput is what is
within the objective as its client sees it: a request also waits in the kernel until the gateway
reads it, behind the refusals of all others. Beside it stands what is in time by the clock of the
gateway, which is what the policy can promise. The core time of the gateway where nearly nobody is
refused is the cost of admissions; what more it is with eight times the clients is that of refusals.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
from msgspec.structs import replace

from headgate.config import from_spec
from headgate.core.clock import NEVER_NS, SECOND_NS
from headgate.core.event_log import read_log
from headgate.core.states import Outcome
from headgate.lab.bench._server_under_test import (
    BATCH,
    OPTIONS,
    SLO_MS,
    LoadStep,
    off_worker_core,
    peak_rps,
    product_app,
    serving,
    take_step,
)
from headgate.lab.bench.live import CACHE, PEERS_FILE
from headgate.lab.bench.live.load_driver import make_request
from headgate.lab.bench.live.models import (
    BareOnnxRuntime,
    example,
    expected,
    measure_bare,
    write_models,
)
from headgate.lab.bench.live.server_process import (
    NotInstalledError,
    Peer,
    Running,
    ServerError,
    python_of,
    read_peers,
    running,
)
from headgate.lab.bench.pipeline import core_seconds
from headgate.lab.experiments import Check, Progress, Result, Row
from headgate.loadgen.loops import run_closed_loop
from headgate.loadgen.requests import Body, LoadOptions, fetch, parse_address
from headgate.loadgen.results import FailureReason, LoadResult
from headgate.metrics.from_log import read_columns

NAME = "overload"
TITLE = "goodput, admitted requests within the SLO and memory at three times the capacity"

_SOURCE: Final = "docs/benchmarks.md"
_GOODPUT_MIN: Final = 0.9
_WITHIN_SLO_MIN: Final = 0.99
_REJECTED_MS_MAX: Final = 5.0
_REFUSAL_COST_MAX: Final = 1.0  # of an admission
_GROWTH_MIB_MAX: Final = 32.0
MODEL: Final = "slow"  # of peers
_TIMEOUT_NS: Final = 2 * SECOND_NS  # of every client
_SETTLE_S: Final = 30.0
_POLL_S: Final = 0.1


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
    """Measure Headgate, clients that hammer it, and all peers.

    Takes a quarter of an hour, longer the first time.
    """
    plan = PeerPlan(tuple(read_peers(PEERS_FILE)), CACHE)
    ours = report(measure(OverloadPlan(), progress))
    hammered = report_hammering(hammer(HammeringPlan(), progress))
    peers_report = report_peers(measure_peers(plan, progress))
    results = (ours, hammered, peers_report)
    rows = [row for result in results for row in result.rows]
    return Result(NAME, rows, [check for result in results for check in result.checks])


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


@dataclass(frozen=True, slots=True)
class PeerPlan:
    """Servers and loads, as multiples of the capacity; the last load is compared."""

    peers: tuple[Peer, ...]
    cache: Path  # directory of virtual environments and models
    loads: tuple[float, ...] = (0.5, 1.0, 2.0, 3.0)
    seconds: float = 8.0
    bare_seconds: float = 3.0


@dataclass(slots=True)
class PeersOverloadResult:
    """The load steps of every server, in order of load, and why servers are missing."""

    plan: PeerPlan
    bare: BareOnnxRuntime
    steps: dict[str, list[LoadStep]] = field(default_factory=dict)  # by peer
    missing: dict[str, str] = field(default_factory=dict)  # by peer


def measure_peers(plan: PeerPlan, progress: Progress) -> PeersOverloadResult:
    """Measure all servers under increasing load.

    Servers that do not start or do not recover are in `missing`.
    """
    models = plan.cache / "models"
    progress("writing the models")
    write_models(models)
    result = PeersOverloadResult(plan, measure_bare(MODEL, 1, models, plan.bare_seconds))
    for peer in without_repeats(plan.peers):
        progress(f"{peer.name}: up to {plan.loads[-1]:g} times the capacity")
        steps = result.steps[peer.name] = []
        try:
            _measure_peer(peer, result, steps)
        except NotInstalledError as error:
            result.missing[peer.name] = f"not installed: {error}"
        except ServerError as error:
            result.missing[peer.name] = str(error)
    return result


def report_peers(result: PeersOverloadResult) -> Result:
    """Return rows per server and load, missing servers, and a check at the highest load."""
    bare = result.bare
    rows: list[Row] = [
        {
            "bare_onnx_runtime": bare.model,
            "items_per_s": round(bare.items_per_s, 1),
            "item_p50_ms": round(bare.p50_ms, 1),
        }
    ]
    for name, steps in result.steps.items():
        peak_rps = max((step.summary.run.goodput_rps for step in steps), default=0.0)
        rows += [_peer_row(name, step, peak_rps) for step in steps]
    rows += [{"peer": name, "missing": reason} for name, reason in result.missing.items()]
    return Result("peers", rows, [_peers_check(result)])


def without_repeats(peers: Sequence[Peer]) -> list[Peer]:
    """Return all peers; the baseline, which `bench live` measures twice, only once."""
    baselines = [peer for peer in peers if peer.is_baseline]
    return [
        replace(peer, name=peer.group) if peer.is_baseline else peer
        for peer in peers
        if peer not in baselines[1:]
    ]


def _measure_peer(peer: Peer, result: PeersOverloadResult, steps: list[LoadStep]) -> None:
    """Append to `steps`, so that steps before a failure are kept."""
    plan = result.plan
    models = plan.cache / "models"
    if MODEL not in peer.models:
        raise ServerError(f"does not serve the model {MODEL}")
    python = python_of(peer.requirements, plan.cache, peer.folder.name)
    body = make_request(peer.models[MODEL].body, example(MODEL))
    options = LoadOptions(body=body, slo_ns=OPTIONS.slo_ns, timeout_ns=_TIMEOUT_NS)
    correct = expected(MODEL, models)
    with running(peer, MODEL, python, models, body, correct) as server, off_worker_core():
        for load in plan.loads:
            _settle(server, body)
            steps.append(take_step(server, load, result.bare.items_per_s, plan.seconds, options))


def _settle(server: Running, body: Body) -> None:
    """Wait until a single request gets its response in time again."""
    address = parse_address(server.url)
    end_s = time.monotonic() + _SETTLE_S
    while time.monotonic() < end_s:
        began_s = time.monotonic()
        with suppress(OSError):
            status, _ = fetch(address, "POST", address.path, body)
            if status == 200 and time.monotonic() - began_s <= SLO_MS / 1e3:
                return
        time.sleep(_POLL_S)
    raise ServerError(
        f"no response in time to a single request {_SETTLE_S:g} s after the last load"
    )


def _peer_row(name: str, step: LoadStep, peak_rps: float) -> Row:
    """Return a row. Responses 429 and 503 are rejections; other responses but 200 are failures."""
    summary = step.summary
    run, answers = summary.run, summary.answers
    rejected = answers.get("429", 0) + answers.get("503", 0)
    return {
        "peer": name,
        "load": step.load,
        "goodput_rps": round(run.goodput_rps, 1),
        "share_of_peak": round(run.goodput_rps / peak_rps, 3) if peak_rps else None,
        "p50_ms": round(run.p50_ms, 1),
        "p99_ms": round(run.p99_ms, 1),
        "late": run.late,
        "rejected": rejected,
        "failed": run.requests - answers.get("200", 0) - rejected,
        "memory_mib": round(step.memory_mib[1]),
    }


def _peers_check(result: PeersOverloadResult) -> Check:
    """Compare goodput at the highest load. Fails if a server is missing."""
    load = result.plan.loads[-1]
    (ours,) = [peer.name for peer in result.plan.peers if peer.is_ours]
    goodput_rps = {
        name: step.summary.run.goodput_rps
        for name, steps in result.steps.items()
        for step in steps
        if step.load == load
    }
    own_rps = goodput_rps.pop(ours, 0.0)
    best = max(goodput_rps, key=goodput_rps.__getitem__, default=None)
    best_rps = 0.0 if best is None else goodput_rps[best]
    measured = f"{own_rps:.1f}/s; best other server: {best_rps:.1f}/s ({best or 'none'})"
    measured = "; ".join([measured, *(f"{name} is missing" for name in result.missing)])
    claim = f"{load:g} times the capacity: goodput at least that of every other server"
    holds = not result.missing and own_rps >= best_rps
    return Check(claim, _SOURCE, "all", measured, holds)


@dataclass(frozen=True, slots=True)
class HammeringPlan:
    """How many clients there are, in multiples of what keeps the worker busy: two batches."""

    clients: int = 2 * BATCH
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


def hammer(plan: HammeringPlan, progress: Progress) -> list[HammeringStep]:
    """Serve so many clients after one another."""
    app = {
        "functions": {
            OPTIONS.model: {
                "code": "headgate.lab.bench._server_under_test:Sleeping",
                "batch_max": BATCH,
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


def report_hammering(steps: Sequence[HammeringStep]) -> Result:
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
    checks.append(
        Check(
            claim, _SOURCE, f"<= {_REFUSAL_COST_MAX:g}", round(cost, 2), cost <= _REFUSAL_COST_MAX
        )
    )
    unanswered = sum(step.unanswered for step in steps)
    claim = "requests of clients that hammer, without a response"
    checks.append(Check(claim, _SOURCE, "0", unanswered, unanswered == 0))
    return Result("hammering", rows, checks)
