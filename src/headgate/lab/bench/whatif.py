"""What `headgate whatif` predicts from a run at low load, beside live runs of the same changes.

Two models are served at 30 % of their capacity with an event log: one that computes, on one core,
and one that sleeps. From each log, `headgate whatif` predicts what clients see at 80 % and 110 % of
the capacity, and with two workers, another policy and another batch limit; then each is run live.
Live requests arrive at times of their own: the prediction is for the rate at which they came, and
not for the same requests. All steps use the commands that users have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from headgate.core.clock import MILLISECOND_NS, SECOND_NS
from headgate.lab.bench._paced_server import CODE
from headgate.lab.bench._server_under_test import (
    MODEL,
    SLO_MS,
    client_overheads,
    peak_rps,
    product_app,
    run_command,
    serving,
)
from headgate.lab.experiments import Check, Progress, Result, Row, error_check
from headgate.loadgen.loops import run_open_loop
from headgate.loadgen.requests import LoadOptions
from headgate.loadgen.results import LoadResult, summarise_load
from headgate.workload import Arrivals, poisson

NAME = "whatif"
TITLE = "predictions from a run at 30 % of the capacity, beside live runs"

_SOURCE: Final = "docs/benchmarks.md"
_SLEEPER: Final = "sleeper"
_BASE_MS: Final = 10.0
_ITEM_MS: Final = 5.0
_BATCH: Final = 4
_LARGER_BATCH: Final = 8
_POLICY: Final = "clipper"
_ATTAINMENT_MAX: Final = 0.03  # errors
_P50_MAX: Final = 0.10


@dataclass(frozen=True, slots=True)
class LiveChange:
    """A change, as `whatif` takes it and as it is served."""

    name: str
    load: float  # multiple of the capacity of one worker
    arguments: tuple[str, ...] = ()  # of `headgate whatif`; {model} is the name of the model
    workers: int = 1
    policy: str | None = None
    batch_max: int = _BATCH

    def applied(self, app: Mapping[str, object], model: str) -> dict[str, object]:
        """Return the application with the change."""
        functions = app["functions"]
        assert isinstance(functions, dict)
        function = {**functions[model], "batch_max": self.batch_max}
        changed: dict[str, object] = {**app, "functions": {model: function}}
        if self.policy is not None:
            changed["policy"] = self.policy
        if self.workers > 1:
            changed["pools"] = {"local": {"tier": "dedicated", "nodes": self.workers}}
        return changed


CHANGES: Final = (
    LiveChange("80 %", 0.8),
    LiveChange("110 %", 1.1),
    LiveChange("two workers, 110 %", 1.1, ("--workers", "2"), workers=2),
    LiveChange(f"{_POLICY}, 80 %", 0.8, ("--policy", _POLICY), policy=_POLICY),
    LiveChange(
        f"batches up to {_LARGER_BATCH}, 80 %",
        0.8,
        ("--set", f"functions.{{model}}.batch_max={_LARGER_BATCH}"),
        batch_max=_LARGER_BATCH,
    ),
)


@dataclass(frozen=True, slots=True)
class WhatIfPlan:
    """Models, changes and durations."""

    models: tuple[str, ...] = (MODEL, _SLEEPER)
    changes: tuple[LiveChange, ...] = CHANGES
    load: float = 0.3  # of the run that is logged
    logged_seconds: float = 60.0
    seconds: float = 30.0
    peak_seconds: float = 3.0
    runs: int = 5  # simulations for each prediction


@dataclass(frozen=True, slots=True)
class WhatIfMeasurement:
    """What was predicted for one change, and what clients saw."""

    model: str
    change: str
    requests_per_s: float
    live: dict[str, float]  # `in_time` and `p50_ms`
    predicted: dict[str, dict[str, float]]  # by figure: `value`, `low` and `high`
    unseen: Sequence[str]

    @property
    def attainment_error(self) -> float:
        """The error of the predicted attainment."""
        return abs(self.predicted["in_time"]["value"] - self.live["in_time"])

    @property
    def p50_error(self) -> float:
        """The relative error of the predicted median latency."""
        return abs(self.predicted["p50_ms"]["value"] / self.live["p50_ms"] - 1)


def run(*, progress: Progress) -> Result:
    """Measure. Takes about ten minutes."""
    return report(measure(WhatIfPlan(), progress))


def measure(plan: WhatIfPlan, progress: Progress) -> list[WhatIfMeasurement]:
    """Serve each model at low load, predict every change from the log, and serve it."""
    measured: list[WhatIfMeasurement] = []
    for model in plan.models:
        with TemporaryDirectory() as directory:
            measured += _measure_model(model, plan, Path(directory), progress)
    return measured


def _measure_model(
    model: str, plan: WhatIfPlan, folder: Path, progress: Progress
) -> Iterator[WhatIfMeasurement]:
    progress(f"{model}: measuring the capacity")
    app = product_app() if model == MODEL else _sleeping_app()
    capacity_rps = _capacity_rps(app, model, plan, folder)
    log = folder / "logged.log"
    progress(f"{model}: {plan.load:.0%} of {capacity_rps:.0f}/s, logged")
    duration_ns = round(plan.logged_seconds * SECOND_NS)
    logged = poisson(plan.load * capacity_rps, duration_ns, seed=0)
    overheads = client_overheads(_serve(app, model, logged, folder, log))
    for number, change in enumerate(plan.changes):
        progress(f"{model}: {change.name}")
        rate_per_s = change.load * capacity_rps
        arrivals = poisson(rate_per_s, round(plan.seconds * SECOND_NS), seed=number + 1)
        scale = arrivals.mean_rate_per_s / logged.mean_rate_per_s
        arguments = [argument.format(model=model) for argument in change.arguments]
        found = run_command(
            *("whatif", log, "--rate-scale", scale, *arguments),
            *("--client-overhead", overheads, "--runs", plan.runs),
        )
        changed = change.applied(app, model)
        live = summarise_load(_serve(changed, model, arrivals, folder, folder / "live.log")).run
        yield WhatIfMeasurement(
            model,
            change.name,
            arrivals.mean_rate_per_s,
            {"in_time": live.slo_attainment, "p50_ms": live.p50_ms},
            {name: found["predicted"][name] for name in ("in_time", "p50_ms")},
            found["unseen"],
        )


def _sleeping_app() -> dict[str, object]:
    options = {"base_ms": _BASE_MS, "item_ms": _ITEM_MS}
    return {
        "functions": {_SLEEPER: {"code": CODE, "options": options, "batch_max": _BATCH}},
        "slo": {"latency": f"{SLO_MS}ms"},
        "serve": {"port": 0},
    }


def _capacity_rps(app: Mapping[str, object], model: str, plan: WhatIfPlan, folder: Path) -> float:
    """Return the requests per second that one worker can serve: measured, or as it sleeps."""
    if model == _SLEEPER:
        return 1e3 * _BATCH / (_BASE_MS + _BATCH * _ITEM_MS)
    with serving(app, folder, folder / "peak.log") as server:
        return peak_rps(server, plan.peak_seconds)


def _serve(
    app: Mapping[str, object], model: str, arrivals: Arrivals, folder: Path, log: Path
) -> LoadResult:
    log.unlink(missing_ok=True)
    with serving(app, folder, log) as server:
        options = LoadOptions(model=model, slo_ns=SLO_MS * MILLISECOND_NS)
        return run_open_loop(server.url, arrivals, options)


def report(measured: Sequence[WhatIfMeasurement]) -> Result:
    """Return the figures side by side, and a check of each."""
    rows = [row for each in measured for row in _rows(each)]
    return Result(NAME, rows, [check for each in measured for check in _checks(each)])


def _rows(measured: WhatIfMeasurement) -> Iterator[Row]:
    in_time, p50_ms = measured.predicted["in_time"], measured.predicted["p50_ms"]
    yield {
        "model": measured.model,
        "change": measured.change,
        "requests_per_s": round(measured.requests_per_s, 1),
        "live_in_time_%": round(100 * measured.live["in_time"], 2),
        "predicted_%": round(100 * in_time["value"], 2),
        "from_%": round(100 * in_time["low"], 2),
        "to_%": round(100 * in_time["high"], 2),
        "live_p50_ms": round(measured.live["p50_ms"], 2),
        "predicted_ms": round(p50_ms["value"], 2),
        "from_ms": round(p50_ms["low"], 2),
        "to_ms": round(p50_ms["high"], 2),
        "never_seen": len(measured.unseen),
    }


def _checks(measured: WhatIfMeasurement) -> Iterator[Check]:
    what = f"{measured.model}, {measured.change}"
    claim = f"{what}: error of the predicted attainment"
    yield error_check(claim, _SOURCE, measured.attainment_error, _ATTAINMENT_MAX, "points")
    yield error_check(f"{what}: error of the predicted p50", _SOURCE, measured.p50_error, _P50_MAX)
