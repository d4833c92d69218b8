"""Whether promises to clients hold where it is hardest: live, in three situations.

- *Tenants.* One floods at five times the capacity, with the longest deadline and the highest
  priority that a client can claim, once over HTTP and once over gRPC. The other sends a tenth of
  the capacity and claims nothing.
- *A slow function.* Under 40 % load the function becomes several times slower than its profile for
  20 s, then as fast as before. A part of the requests can still be in time.
- *A pipeline* with two branches at up to three times its capacity; and what the simulator predicts
  for the same requests, calibrated from the event log of the run.

Functions sleep, so the capacity does not depend on the machine. Latency counts from when a request
was due, as its client sees it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer
from time import sleep
from typing import Final

import numpy as np

from headgate.core.clock import MILLISECOND_NS, SECOND_NS
from headgate.core.states import Outcome
from headgate.lab.bench._paced_server import (
    CODE,
    Flood,
    flooding,
    free_port,
    hashed_key,
    one_item,
)
from headgate.lab.bench._server_under_test import serving, simulate_log
from headgate.lab.experiments import Check, Progress, Result, Row
from headgate.loadgen.loops import run_open_loop
from headgate.loadgen.requests import LoadOptions
from headgate.loadgen.results import LoadResult, summarise_load
from headgate.workload import poisson

NAME = "promises"
TITLE = "a flooding tenant, a function that becomes slow, and an overloaded pipeline, live"

_SOURCE: Final = "docs/benchmarks.md"
_QUIET_MIN: Final = 0.99
_SLOW_MIN: Final = 0.8
_GOODPUT_MIN: Final = 0.9
_QUANTILE: Final = 0.99

_FUNCTION: Final = "paced"
_EXEC_MS: Final = 10.0  # per item, so batches gain nothing and one number is the capacity
_CAPACITY_RPS: Final = 1e3 / _EXEC_MS
_SLO_MS: Final = 300
_LEAD_S: Final = 2.0  # of a flood, before the other tenant begins
_QUIET_KEY: Final = "quiet"
_FLOOD_KEY: Final = "flood"


@dataclass(frozen=True, slots=True)
class PromisesPlan:
    """Durations, and loads as multiples of the capacity."""

    protocols: tuple[str, ...] = ("http", "grpc")
    flood_load: float = 5.0
    quiet_load: float = 0.1
    quiet_seconds: float = 30.0
    factors: tuple[float, ...] = (5.0, 10.0)  # by which the function becomes slower
    slow_load: float = 0.4
    before_seconds: float = 5.0
    slow_seconds: float = 20.0
    recovery_seconds: float = 2.0
    after_seconds: float = 10.0  # of which `recovery_seconds` may still be bad
    pipeline_loads: tuple[float, ...] = (0.5, 0.8, 1.0, 1.5, 2.0, 3.0)
    pipeline_seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class TenantsResult:
    """What the quiet tenant saw beside a flood."""

    protocol: str
    flood_rps: float
    requests: int
    met: int
    p99_ms: float
    rejected: int


@dataclass(frozen=True, slots=True)
class SlowResult:
    """Requests while the function was slow, and those after it had recovered."""

    factor: float
    offered: int
    possible: int  # what the slow function can run, at most what was offered
    met: int
    after: int
    after_met: int


@dataclass(frozen=True, slots=True)
class PipelineStep:
    """One load of the pipeline: goodput, and the share of the admitted that was in time."""

    load: float
    offered_rps: float
    live_rps: float
    live_kept: float
    simulated_rps: float
    simulated_kept: float


def run(*, progress: Progress) -> Result:
    """Measure. Takes about four minutes."""
    plan = PromisesPlan()
    return report(
        measure_tenants(plan, progress),
        measure_slow(plan, progress),
        measure_pipeline(plan, progress),
    )


def report(
    tenants: list[TenantsResult], slow: list[SlowResult], pipeline: list[PipelineStep]
) -> Result:
    rows = [
        *map(_tenants_row, tenants),
        *map(_slow_row, slow),
        *map(_pipeline_row, pipeline),
    ]
    checks = [*_tenants_checks(tenants), *_slow_checks(slow), *_pipeline_checks(pipeline)]
    return Result(NAME, rows, checks)


def measure_tenants(plan: PromisesPlan, progress: Progress) -> list[TenantsResult]:
    """Measure the quiet tenant beside a flood over each protocol."""
    results = []
    with TemporaryDirectory() as directory:
        folder = Path(directory)
        for protocol in plan.protocols:
            progress(f"a flood over {protocol}, {plan.flood_load:g} times the capacity")
            port = free_port()
            app = {
                **_paced_app(folder),
                "clients": {
                    "quiet": {"key": hashed_key(_QUIET_KEY)},
                    "flood": {"key": hashed_key(_FLOOD_KEY)},
                },
                "serve": {"port": 0, "grpc_port": port, "connections_max": 4_096},
            }
            with serving(app, folder, folder / f"{protocol}.log") as server:
                address = server.url if protocol == "http" else f"127.0.0.1:{port}"
                seconds = plan.quiet_seconds + 2 * _LEAD_S
                rate_per_s = plan.flood_load * _CAPACITY_RPS
                flood = Flood(protocol, address, _FUNCTION, _FLOOD_KEY, rate_per_s, seconds)
                with flooding(flood) as count:
                    sleep(_LEAD_S)
                    quiet = _send(
                        server.url, plan.quiet_load * _CAPACITY_RPS, plan.quiet_seconds, _QUIET_KEY
                    )
            results.append(_tenants_result(protocol, count.rate_per_s, quiet))
    return results


def measure_slow(plan: PromisesPlan, progress: Progress) -> list[SlowResult]:
    """Measure a function that becomes slower than its profile, and recovers."""
    results = []
    with TemporaryDirectory() as directory:
        folder = Path(directory)
        factor_file = folder / "factor"
        for factor in plan.factors:
            progress(f"a function that becomes {factor:g} times slower")
            factor_file.write_text("1")
            app = {**_paced_app(folder), "serve": {"port": 0}}
            ends_s = plan.before_seconds + plan.slow_seconds
            with serving(app, folder, folder / "slow.log") as server:
                timers = [
                    Timer(plan.before_seconds, factor_file.write_text, [f"{factor:g}"]),
                    Timer(ends_s, factor_file.write_text, ["1"]),
                ]
                for timer in timers:
                    timer.start()
                try:
                    sent = _send(
                        server.url, plan.slow_load * _CAPACITY_RPS, ends_s + plan.after_seconds
                    )
                finally:
                    for timer in timers:
                        timer.cancel()
            results.append(slow_result(plan, factor, sent))
    return results


def slow_result(plan: PromisesPlan, factor: float, sent: LoadResult) -> SlowResult:
    """Count the requests of both periods by when they were due."""
    at_s = sent.intended_ns / SECOND_NS
    ends_s = plan.before_seconds + plan.slow_seconds
    is_slow = (at_s >= plan.before_seconds) & (at_s < ends_s)
    is_after = at_s >= ends_s + plan.recovery_seconds
    is_met = sent.outcome == Outcome.MET
    offered = int(is_slow.sum())
    capacity = int(plan.slow_seconds * _CAPACITY_RPS / factor)
    return SlowResult(
        factor,
        offered,
        min(offered, capacity),
        int((is_slow & is_met).sum()),
        int(is_after.sum()),
        int((is_after & is_met).sum()),
    )


def measure_pipeline(plan: PromisesPlan, progress: Progress) -> list[PipelineStep]:
    """Measure a pipeline under increasing load, and simulate each load from its log."""
    steps = []
    with TemporaryDirectory() as directory:
        folder = Path(directory)
        for load in plan.pipeline_loads:
            rate_per_s = load * _PIPELINE_RPS
            progress(f"a pipeline at {load:g} times {_PIPELINE_RPS:.0f} requests/s")
            log = folder / f"pipeline-{load:g}.log"
            with serving(_pipeline_app(), folder, log) as server:
                live = _send(server.url, rate_per_s, plan.pipeline_seconds, model="ensemble")
            run = summarise_load(live).run
            simulated = simulate_log(folder, log, live, ("goodput_rps", "admitted_kept"))
            steps.append(
                PipelineStep(
                    load,
                    len(live) / plan.pipeline_seconds,
                    run.goodput_rps,
                    run.admitted_kept,
                    simulated["goodput_rps"],
                    simulated["admitted_kept"],
                )
            )
    return steps


def _paced_app(folder: Path) -> dict[str, object]:
    options = {"item_ms": _EXEC_MS, "factor_file": str(folder / "factor")}
    return {
        "functions": {_FUNCTION: {"code": CODE, "options": options, "batch_max": 4}},
        "slo": {"latency": f"{_SLO_MS}ms", "quantile": _QUANTILE},
    }


# The ensemble of `examples/ensemble.yaml`, with batches that pay: by function its time without
# items and its time per item in ms, and its inputs and output.
_STAGES: Final = {
    "resize": (1.0, 0.5, "x", "image"),
    "resnet": (4.0, 2.0, "image", "left"),
    "vit": (8.0, 5.0, "image", "right"),
    "vote": (0.5, 0.0, "left+right", "y"),
}
_PIPELINE_BATCH: Final = 8
_PIPELINE_NODES: Final = 2
# What all nodes can do in full batches.
_PIPELINE_RPS: Final = (
    _PIPELINE_NODES
    * 1e3
    / sum(base_ms / _PIPELINE_BATCH + item_ms for base_ms, item_ms, _, _ in _STAGES.values())
)


def _pipeline_app() -> dict[str, object]:
    functions = {
        name: {
            "code": CODE,
            "options": {"base_ms": base_ms, "item_ms": item_ms, "takes": takes, "gives": gives},
            "batch_max": _PIPELINE_BATCH,
        }
        for name, (base_ms, item_ms, takes, gives) in _STAGES.items()
    }
    stages = {
        "resize": {"function": "resize"},
        "resnet": {"function": "resnet", "after": ["resize"]},
        "vit": {"function": "vit", "after": ["resize"]},
        "vote": {"function": "vote", "after": ["resnet", "vit"]},
    }
    return {
        "functions": functions,
        "pipelines": {"ensemble": {"stages": stages}},
        "pools": {"cpu": {"tier": "dedicated", "nodes": _PIPELINE_NODES}},
        "slo": {"latency": f"{_SLO_MS}ms", "quantile": _QUANTILE},
        "serve": {"port": 0},
    }


def _send(
    url: str, rate_per_s: float, seconds: float, key: str = "", *, model: str = _FUNCTION
) -> LoadResult:
    options = one_item(key) if key else LoadOptions(body=one_item("").body)
    options = replace(options, model=model, slo_ns=_SLO_MS * MILLISECOND_NS)
    return run_open_loop(url, poisson(rate_per_s, round(seconds * SECOND_NS), seed=2), options)


def _tenants_result(protocol: str, flood_rps: float, quiet: LoadResult) -> TenantsResult:
    summary = summarise_load(quiet).run
    return TenantsResult(
        protocol, flood_rps, summary.requests, summary.met, summary.p99_ms, summary.rejected
    )


def _tenants_row(result: TenantsResult) -> Row:
    return {
        "flood_over": result.protocol,
        "flood_rps": round(result.flood_rps, 1),
        "capacity_rps": _CAPACITY_RPS,
        "quiet_requests": result.requests,
        "in_time": result.met,
        "rejected": result.rejected,
        "p99_ms": None if np.isnan(result.p99_ms) else round(result.p99_ms, 1),
    }


def _tenants_checks(results: list[TenantsResult]) -> Iterator[Check]:
    for result in results:
        share = result.met / result.requests if result.requests else 0.0
        claim = f"beside a flood over {result.protocol}: share of the quiet tenant's in time"
        holds = share >= _QUIET_MIN
        yield Check(claim, _SOURCE, f">= {_QUIET_MIN}", round(share, 4), holds)


def _slow_row(result: SlowResult) -> Row:
    return {
        "times_slower": result.factor,
        "offered": result.offered,
        "possible_in_time": result.possible,
        "in_time": result.met,
        "after_recovery": result.after,
        "after_in_time": result.after_met,
    }


def _slow_checks(results: list[SlowResult]) -> Iterator[Check]:
    for result in results:
        share = result.met / result.possible if result.possible else 0.0
        claim = f"{result.factor:g} times slower: share of what could be in time that is"
        yield Check(claim, _SOURCE, f">= {_SLOW_MIN}", round(share, 3), share >= _SLOW_MIN)
        claim = f"{result.factor:g} times slower: in time from 2 s after its recovery"
        measured = f"{result.after_met} of {result.after}"
        holds = result.after_met == result.after > 0
        yield Check(claim, _SOURCE, "all", measured, holds)


def _pipeline_row(step: PipelineStep) -> Row:
    return {
        "pipeline_load": step.load,
        "offered_rps": round(step.offered_rps, 1),
        "live_goodput_rps": round(step.live_rps, 1),
        "live_kept": round(step.live_kept, 4),
        "simulated_goodput_rps": round(step.simulated_rps, 1),
        "simulated_kept": round(step.simulated_kept, 4),
    }


def _pipeline_checks(steps: list[PipelineStep]) -> Iterator[Check]:
    if not steps:
        return
    last = steps[-1]
    for source, goodputs_rps, kept in (
        ("live", [step.live_rps for step in steps], last.live_kept),
        ("simulated", [step.simulated_rps for step in steps], last.simulated_kept),
    ):
        peak_rps = max(goodputs_rps)
        share = goodputs_rps[-1] / peak_rps if peak_rps else 0.0
        at = f"pipeline at {last.load:g} times the capacity, {source}"
        claim = f"{at}: goodput relative to the peak ({peak_rps:.1f}/s)"
        holds = share >= _GOODPUT_MIN
        yield Check(claim, _SOURCE, f">= {_GOODPUT_MIN}", round(share, 3), holds)
        claim = f"{at}: share of the admitted in time"
        yield Check(claim, _SOURCE, f">= {_QUANTILE}", round(kept, 4), kept >= _QUANTILE)
