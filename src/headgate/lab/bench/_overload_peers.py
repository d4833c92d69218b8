"""Goodput of every server under overload, with the same model, arrivals and client.

The capacity is the throughput of bare ONNX Runtime on one core. Servers are measured one after the
other; between two loads a server gets time to drain its queues.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from headgate.core.clock import SECOND_NS
from headgate.lab.bench._server_under_test import (
    OPTIONS,
    SLO_MS,
    LoadStep,
    off_worker_core,
    take_step,
)
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
    running,
)
from headgate.lab.experiments.experiment import Check, Progress, Result, Row
from headgate.loadgen import Body, LoadOptions, parse_address
from headgate.loadgen.requests import fetch

MODEL: Final = "slow"
_TIMEOUT_NS: Final = 2 * SECOND_NS  # of every client
_SETTLE_S: Final = 30.0
_POLL_S: Final = 0.1
_SOURCE: Final = "docs/benchmarks.md"


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
            _measure(peer, result, steps)
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
        rows += [_row(name, step, peak_rps) for step in steps]
    rows += [{"peer": name, "missing": reason} for name, reason in result.missing.items()]
    return Result("peers", rows, [_check(result)])


def without_repeats(peers: Sequence[Peer]) -> list[Peer]:
    """Return all peers; the baseline, which `bench live` measures twice, only once."""
    baselines = [peer for peer in peers if peer.is_baseline]
    return [
        replace(peer, name=peer.group) if peer.is_baseline else peer
        for peer in peers
        if peer not in baselines[1:]
    ]


def _measure(peer: Peer, result: PeersOverloadResult, steps: list[LoadStep]) -> None:
    """Append to `steps`, so that steps before a failure are kept."""
    plan = result.plan
    models = plan.cache / "models"
    if MODEL not in peer.models:
        raise ServerError(f"does not serve the model {MODEL}")
    python = python_of(peer.requirements, plan.cache, peer.folder.name)
    body = make_request(peer.models[MODEL].body, example(MODEL))
    options = LoadOptions(body=body, slo_ns=OPTIONS.slo_ns, timeout_ns=_TIMEOUT_NS)
    correct = expected(MODEL, models)
    with (
        running(peer, MODEL, python, models, body, correct) as server,
        off_worker_core(),
    ):
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


def _row(name: str, step: LoadStep, peak_rps: float) -> Row:
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


def _check(result: PeersOverloadResult) -> Check:
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
