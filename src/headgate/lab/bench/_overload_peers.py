"""Every server's curve under overload: the same model, the same arrivals, the same client.

The capacity is what ONNX Runtime alone does on one core. Servers take turns; between two loads
each is given the time to get over what the last one left in its queues.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from headgate.core.clock import SECOND_NS
from headgate.lab.bench._server_under_test import (
    OPTIONS,
    SLO_MS,
    LoadStep,
    beside_the_worker,
    take_step,
)
from headgate.lab.bench.live.load_driver import make_request
from headgate.lab.bench.live.models import (
    BareOnnxRuntime,
    example,
    expected,
    measure_alone,
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
_TIMEOUT_NS: Final = 2 * SECOND_NS  # no client waits longer
_SETTLE_S: Final = 30.0
_ASK_AGAIN_S: Final = 0.1
_SOURCE: Final = "docs/benchmarks.md"


@dataclass(frozen=True, slots=True)
class PeerPlan:
    """Who is asked for how much, in capacities; the last load is what is compared."""

    contestants: tuple[Peer, ...]
    cache: Path  # where environments and models are kept
    loads: tuple[float, ...] = (0.5, 1.0, 2.0, 3.0)
    seconds: float = 8.0
    alone_seconds: float = 3.0


@dataclass(slots=True)
class PeersMeasured:
    """Every server's steps, in order of load, and why some are missing."""

    plan: PeerPlan
    alone: BareOnnxRuntime
    steps: dict[str, list[LoadStep]] = field(default_factory=dict)  # by contestant
    missing: dict[str, str] = field(default_factory=dict)  # likewise


def measure_peers(plan: PeerPlan, progress: Progress) -> PeersMeasured:
    """Ask everybody for ever more. Whoever does not start or recover is in `missing`."""
    models = plan.cache / "models"
    progress("making the models")
    write_models(models)
    found = PeersMeasured(plan, measure_alone(MODEL, 1, models, plan.alone_seconds))
    for contestant in once(plan.contestants):
        progress(f"{contestant.name}: up to {plan.loads[-1]:g} times the capacity")
        steps = found.steps[contestant.name] = []
        try:
            _measure(contestant, found, steps)
        except NotInstalledError as error:
            found.missing[contestant.name] = f"not installed: {error}"
        except ServerError as error:
            found.missing[contestant.name] = str(error)
    return found


def report_peers(found: PeersMeasured) -> Result:
    """Return the curves, who is missing, and how ours compares under the highest load."""
    alone = found.alone
    rows: list[Row] = [
        {
            "onnx_runtime_alone": alone.model,
            "items_per_s": round(alone.items_per_s, 1),
            "item_p50_ms": round(alone.p50_ms, 1),
        }
    ]
    for name, steps in found.steps.items():
        peak_rps = max((step.summary.run.goodput_rps for step in steps), default=0.0)
        rows += [_row(name, step, peak_rps) for step in steps]
    rows += [{"contestant": name, "missing": why} for name, why in found.missing.items()]
    return Result("peers", rows, [_check(found)])


def once(contestants: Sequence[Peer]) -> list[Peer]:
    """Everybody; the baseline, which `bench live` measures first and last, only once."""
    baselines = [contestant for contestant in contestants if contestant.is_baseline]
    return [
        replace(contestant, name=contestant.peer) if contestant.is_baseline else contestant
        for contestant in contestants
        if contestant not in baselines[1:]
    ]


def _measure(contestant: Peer, found: PeersMeasured, steps: list[LoadStep]) -> None:
    """Append to `steps`, so that those before a failure are kept."""
    plan = found.plan
    models = plan.cache / "models"
    if MODEL not in contestant.models:
        raise ServerError(f"does not serve the model {MODEL}")
    python = python_of(contestant.requirements, plan.cache, contestant.folder.name)
    body = make_request(contestant.models[MODEL].body, example(MODEL))
    options = LoadOptions(body=body, slo_ns=OPTIONS.slo_ns, timeout_ns=_TIMEOUT_NS)
    right = expected(MODEL, models)
    with (
        running(contestant, MODEL, python, models, body, right) as server,
        beside_the_worker(),
    ):
        for load in plan.loads:
            _settle(server, body)
            steps.append(take_step(server, load, found.alone.items_per_s, plan.seconds, options))


def _settle(server: Running, body: Body) -> None:
    """Wait until a lone request is answered in time again."""
    address = parse_address(server.url)
    end_s = time.monotonic() + _SETTLE_S
    while time.monotonic() < end_s:
        began_s = time.monotonic()
        with suppress(OSError):
            status, _ = fetch(address, "POST", address.path, body)
            if status == 200 and time.monotonic() - began_s <= SLO_MS / 1e3:
                return
        time.sleep(_ASK_AGAIN_S)
    raise ServerError(f"answers no lone request in time, {_SETTLE_S:g} s after the last load")


def _row(name: str, step: LoadStep, peak_rps: float) -> Row:
    """Whoever answers 429 or 503 has refused; what is neither that nor an answer has failed."""
    summary = step.summary
    run, answers = summary.run, summary.answers
    rejected = answers.get("429", 0) + answers.get("503", 0)
    return {
        "contestant": name,
        "load": step.load,
        "goodput_rps": round(run.goodput_rps, 1),
        "of_its_peak": round(run.goodput_rps / peak_rps, 3) if peak_rps else None,
        "p50_ms": round(run.p50_ms, 1),
        "p99_ms": round(run.p99_ms, 1),
        "late": run.late,
        "rejected": rejected,
        "failed": run.requests - answers.get("200", 0) - rejected,
        "memory_mib": round(step.memory_mib[1]),
    }


def _check(found: PeersMeasured) -> Check:
    """Whoever is missing was not beaten."""
    load = found.plan.loads[-1]
    (ours,) = [contestant.name for contestant in found.plan.contestants if contestant.is_ours]
    goodput_rps = {
        name: step.summary.run.goodput_rps
        for name, steps in found.steps.items()
        for step in steps
        if step.load == load
    }
    own_rps = goodput_rps.pop(ours, 0.0)
    best = max(goodput_rps, key=goodput_rps.__getitem__, default=None)
    best_rps = 0.0 if best is None else goodput_rps[best]
    said = f"{own_rps:.1f}/s; the best other: {best_rps:.1f}/s ({best or 'nobody'})"
    said = "; ".join([said, *(f"{name} is missing" for name in found.missing)])
    claim = f"{load:g} times the capacity: goodput at least every other server's"
    holds = not found.missing and own_rps >= best_rps
    return Check(claim, _SOURCE, "all", said, holds)
