"""Hybrid serving, live: one machine that bursts overload, without and with functions.

The recommender is profiled on this machine, planned for, served, and sent a bursty workload, once
per policy. The machine is one core, and the functions have another core. Then the same is
simulated, to compare simulator and plan with the live run. Live runs use functions on an embedded
platform and `headgate serve`; simulated runs use the same application and the same requests.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import yaml

from headgate.config import from_spec
from headgate.config.prices import PriceList, read_prices
from headgate.core.clock import MILLISECOND_NS, SECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.model import MIB, FaasOffering, InstanceType
from headgate.core.states import Outcome
from headgate.deploy import connect
from headgate.functions.lambda_payload import encode_ping, encode_request
from headgate.functions.tensor import TaskInputs, Tensor
from headgate.lab.bench._server_under_test import client_overhead_ns, off_worker_core, serving
from headgate.lab.demo.setup import (
    FEW,
    FUNCTION,
    FUNCTIONS_MAX,
    MEMORY_MB,
    OVERHEAD_MS,
    QUANTILE,
    DemoSchedule,
    Scale,
    Spec,
    Times,
    application,
    fit_to_machine,
    one_core,
    read_times,
)
from headgate.lab.experiments import Check, Progress, error_check
from headgate.lab.figures import draw_responses
from headgate.lab.harness import (
    Environment,
    PolicyCase,
    RequestTimes,
    RunResult,
    TierUse,
    best_setting,
    count_unserved,
    lognormal_truth,
    request_times,
    result_of,
)
from headgate.lambda_emulator import BillingRecord, EmbeddedPlatform
from headgate.loadgen.loops import run_open_loop
from headgate.loadgen.requests import LoadOptions
from headgate.metrics.format import percent
from headgate.metrics.report.style import Plot, new_figure, style_axes
from headgate.metrics.report.write import write_page
from headgate.metrics.table import Column, ReportTable, rows_table
from headgate.planning.capacity.mix import open_load
from headgate.planning.capacity.plan import CapacityPlan, Infeasible, Terms, make_plan
from headgate.profiling.report import profile_figure
from headgate.sim.ground_truth import GroundTruthConfig
from headgate.workload import Arrivals

if TYPE_CHECKING:
    from matplotlib.figure import Figure

THRESHOLDS: Final = range(1, 2 * FEW + 1)
_HANDLER: Final = "headgate.functions.lambda_handler.handle"
_LENGTH: Final = 20  # clicks per session
_CALLS: Final = 15  # to measure the time of a call
_HOLD_MS: Final = 1_000.0
_SIMULATION_SEED: Final = 0
PROFILE_S: Final = 12.0
_ARRIVALS_SEED: Final = 1
_SIMULATED_CORES: Final = (2, 4)  # of larger machines, which are only simulated
_REQUEST_NS: Final = round(OVERHEAD_MS * 1e6)
_ATTAINMENT_ERROR_MAX: Final = 0.03
_P50_ERROR_MAX: Final = 0.15
_VERSUS: Final = "simulated versus live"
_SOURCE: Final = "live, simulated and planned agree"
TextRow = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class DeployedFunction:
    """The recommender, deployed on a Lambda emulator."""

    platform: EmbeddedPlatform
    client: Any  # boto3 has no types
    terms: FaasOffering  # prices

    def call_ms(self, scale: Scale) -> float:
        """Return the median response time of a warm function."""
        clicks = np.ones((scale.sessions, _LENGTH), np.int64)
        tensor = Tensor("clicks", "INT64", clicks.shape, memoryview(clicks.tobytes()))
        body = encode_request(FUNCTION, [TaskInputs(0, 1, [tensor])])
        times_ms = []
        with off_worker_core():
            for _ in range(_CALLS):
                began_s = time.perf_counter()
                response = self.client.invoke(FunctionName=FUNCTION, Payload=body)
                payload = response["Payload"].read()
                if response.get("FunctionError"):
                    raise ConfigError(f"fails: {payload[:300].decode()}", where=FUNCTION)
                times_ms.append((time.perf_counter() - began_s) * 1e3)
        return median(times_ms[1:])  # without the first call, which was cold

    def prewarm(self) -> None:
        """Start all instances, as an earlier burst would have done."""
        body = encode_ping(_HOLD_MS)

        def ping(_: int) -> None:
            self.client.invoke(FunctionName=FUNCTION, Payload=body)

        with ThreadPoolExecutor(FUNCTIONS_MAX) as threads:
            list(threads.map(ping, range(FUNCTIONS_MAX)))

    def usd(self, records: list[BillingRecord]) -> float:
        """Return the cost of calls at the prices of the plan."""
        terms = self.terms.sized(MEMORY_MB * MIB)
        return sum(terms.usd(record.billed_ms * MILLISECOND_NS) for record in records)


@contextmanager
def deployed(spec: Spec, folder: Path, terms: FaasOffering) -> Iterator[DeployedFunction]:
    """Run a platform on the first core, with the application's function on it."""
    package = folder / "package"
    package.mkdir()
    (package / "app.yaml").write_text(yaml.safe_dump(spec), encoding="utf-8")
    first = min(os.sched_getaffinity(0))
    platform = EmbeddedPlatform(folder / "platform", cpus=(first,))
    with ExitStack() as stack:
        with off_worker_core():  # the platform's thread inherits the affinity
            stack.enter_context(platform)
        platform.register(
            FUNCTION,
            package,
            _HANDLER,
            memory_mb=MEMORY_MB,
            environment={"HEADGATE_APP": "app.yaml"},
        )
        yield DeployedFunction(platform, connect(platform.url), terms)


def run_live(
    spec: Spec, scale: Scale, arrivals: Arrivals, log: Path, functions: DeployedFunction
) -> tuple[RunResult, int]:
    """Serve, send the requests, and return the result and the client-side overhead in ns."""
    options = LoadOptions(
        model=FUNCTION, is_binary=True, slo_ns=round(scale.slo_ms * MILLISECOND_NS)
    )
    with serving(spec, log.parent, log) as server:
        began_s = time.time()
        loaded = run_open_loop(server.url, arrivals, options)
    warm_up_ns = scale.schedule.warm_up_ns
    counts = loaded.intended_ns >= warm_up_ns
    calls = [
        record
        for record in functions.platform.billing_log.records(FUNCTION)
        if record.started_s >= began_s + warm_up_ns / SECOND_NS
    ]
    outcome = loaded.outcome[counts]
    unknown = np.zeros(len(outcome), dtype=np.bool_)  # clients do not learn where a request ran
    times = RequestTimes(
        (loaded.intended_ns[counts] - warm_up_ns) / SECOND_NS,
        loaded.latency_ns[counts] / MILLISECOND_NS,
        outcome == Outcome.MET,
        is_cold=unknown,
        on_machines=unknown,
        on_functions=unknown,
    )
    result = RunResult(
        len(outcome),
        int(np.count_nonzero(times.is_met)),
        unserved=count_unserved(outcome),
        functions=TierUse(
            len(calls),
            cold_starts=sum(record.is_cold for record in calls),
            usd=functions.usd(calls),
        ),
        times=times,
    )
    return result, client_overhead_ns(loaded)


def simulation(
    spec: Spec, scale: Scale, arrivals: Arrivals, request_ns: int, cv: float | None
) -> Environment:
    """Return the application and its requests, for the simulator."""
    median_ms, tail_ms = (scale.measured.time_ms(1, 1, 1, quantile) for quantile in (0.5, 0.95))
    profiled = lognormal_truth(median_ms, tail_ms, 0.95)
    return Environment(
        from_spec(spec, "the demonstration").app,
        arrivals,
        GroundTruthConfig("lognormal", cv=cv) if cv else profiled,
        request_ns=request_ns,
        since_ns=scale.schedule.warm_up_ns,
    )


def run_simulated(environment: Environment, policy: PolicyCase) -> RunResult:
    """Simulate a policy. Calls of functions count after the warm-up, as in a live run."""
    run = environment.simulate(policy, _SIMULATION_SEED)
    result = result_of(run, environment.since_ns, keeps_times=True)
    all_calls = int(np.count_nonzero(request_times(run)[0].on_functions))
    use, times = result.functions, result.times
    counted = replace(
        use,
        cold_starts=int(np.count_nonzero(times.is_cold & times.on_functions)),
        usd=use.usd * use.requests / max(1, all_calls),
    )
    return replace(result, functions=counted)


def best_threshold(environment: Environment) -> int:
    """Return the threshold that spills least of those that reach the SLO quantile.

    If none reaches it, return the threshold of the highest attainment.
    """
    trials = {
        threshold: [
            environment.run(PolicyCase.of("threshold", threshold=threshold), _SIMULATION_SEED)
        ]
        for threshold in THRESHOLDS
    }
    return best_setting(trials, QUANTILE, lambda result: result.on_functions)


@dataclass(frozen=True, slots=True)
class Planned:
    """Profile, plan and workload, before anything is served."""

    scale: Scale
    plan: CapacityPlan
    prices: PriceList
    machine: InstanceType
    platform: FaasOffering
    arrivals: Arrivals

    @property
    def threshold(self) -> int:
        """Planned concurrency limit of the machine."""
        return self.plan.capacities[0].threshold

    def simulation(
        self, times: Times, request_ns: int = _REQUEST_NS, *, cores: int = 1
    ) -> Environment:
        """Return the environment with these times, on the machine or on a larger one.

        `request_ns` is the client-side overhead of a request, which event logs do not contain.
        """
        spec = application(self.scale, self.machine, self.platform, times, cores=cores)
        return simulation(spec, self.scale, self.arrivals, request_ns, times.cv)


@dataclass(frozen=True, slots=True)
class DemoRun:
    """Results of one policy: predicted, live and simulated."""

    policy: PolicyCase
    predicted: RunResult  # simulated with the profile, before the live run
    live: RunResult | None = None  # None: only simulated
    simulated: RunResult | None = None  # simulated with the times in the live run's log


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Results of all policies."""

    planned: Planned
    runs: tuple[DemoRun, ...]
    best_threshold: int  # by exhaustive search in the simulator

    @property
    def checks(self) -> list[Check]:
        """Checks that live, simulated and planned results agree."""
        checks = [
            check
            for run in self.runs
            if run.live is not None and run.simulated is not None
            for check in _agreement(run.policy.label, run.live, run.simulated)
        ]
        planned, best = self.planned.threshold, self.best_threshold
        claim = "threshold: planned, and best by exhaustive search"
        measured = f"{planned} and {best}"
        return [*checks, Check(claim, _SOURCE, "within 1", measured, abs(planned - best) <= 1)]


def prepare(model: Path, schedule: DemoSchedule, budget_s: float, progress: Progress) -> Planned:
    """Profile the recommender and plan for it. Raises `ConfigError`."""
    return plan_for(fit_to_machine(model, schedule, budget_s, progress))


def plan_for(scale: Scale) -> Planned:
    """Plan for the measured profile. Raises `ConfigError` if the SLO is infeasible."""
    prices = read_prices()
    machine, platform = one_core(prices), prices.platforms[0]
    arrivals = scale.arrivals(_ARRIVALS_SEED)
    expected = open_load(arrivals.times_ns, arrivals.duration_ns, scale.slo_ms)
    terms = Terms(scale.slo_ms, QUANTILE, expected, instances_max=1)
    plan = make_plan(scale.measured, [machine], platform, terms)
    if isinstance(plan, Infeasible):
        problem = f"one core takes {plan.fastest_ms:.0f} ms even for a single request"
        raise ConfigError(problem, where="this machine", value=f"{scale.slo_ms:g} ms")
    return Planned(scale, plan, prices, machine, platform, arrivals)


def run_demo(planned: Planned, progress: Progress) -> DemoResult:
    """Serve with every policy, and simulate the same."""
    make = partial(application, planned.scale, planned.machine, planned.platform)
    single_ms = planned.scale.measured.time_ms(1, 1)
    runs: list[DemoRun] = []
    with TemporaryDirectory(prefix="headgate-demo-") as scratch:
        folder = Path(scratch)
        progress("deploying the function")
        spec = make(Times(single_ms, single_ms))
        with deployed(spec, folder, planned.platform) as functions:
            known = Times(single_ms, functions.call_ms(planned.scale))
            functions.prewarm()
            spec = make(known, endpoint_url=functions.platform.url)
            for policy in _policies(planned.threshold):
                progress(f"serving: {policy.label}")
                log = folder / f"{policy.name}.log"
                served_spec = {**spec, "policy": {"name": policy.name, **dict(policy.settings)}}
                live, request_ns = run_live(
                    served_spec, planned.scale, planned.arrivals, log, functions
                )
                predicted = run_simulated(planned.simulation(known), policy)
                calibrated = planned.simulation(read_times(log, known), request_ns)
                runs.append(DemoRun(policy, predicted, live, run_simulated(calibrated, policy)))
    progress("simulating other machines, and all thresholds")
    for cores in _SIMULATED_CORES:
        policy = PolicyCase("threshold", title=f"threshold on {cores} cores")
        larger = planned.simulation(known, cores=cores)
        runs.append(DemoRun(policy, run_simulated(larger, policy)))
    return DemoResult(planned, tuple(runs), best_threshold(planned.simulation(known)))


def _policies(threshold: int) -> tuple[PolicyCase, ...]:
    return (
        PolicyCase("dedicated_only", title="without functions"),
        PolicyCase.of("threshold", f"threshold of {threshold}", threshold=threshold),
        PolicyCase("headgate"),
    )


def _agreement(label: str, live: RunResult, simulated: RunResult) -> Iterator[Check]:
    error = abs(live.attainment - simulated.attainment)
    claim = f"{label}: SLO attainment, {_VERSUS}"
    yield error_check(claim, _SOURCE, error, _ATTAINMENT_ERROR_MAX, "points")
    error = abs(simulated.times.percentile_ms(0.5) / live.times.percentile_ms(0.5) - 1)
    yield error_check(f"{label}: p50, {_VERSUS}", _SOURCE, error, _P50_ERROR_MAX)


def run_rows(result: DemoResult) -> list[TextRow]:
    """Return rows per policy: predicted, live, and simulated with the live run's times."""
    return [
        _row(run.policy.label, source, run_result)
        for run in result.runs
        for source, run_result in (
            ("predicted", run.predicted),
            ("live", run.live),
            ("simulated", run.simulated),
        )
        if run_result is not None
    ]


def write_demo_page(result: DemoResult, plan_sentences: Sequence[str], directory: Path) -> Path:
    """Write `report.html`, and its plots if matplotlib is installed; return its path."""
    planned = result.planned
    meta: dict[str, object] = {
        "machine": planned.scale.measured.device,
        "request size": f"{planned.scale.sessions} sessions",
        "SLO": f"{planned.scale.slo_ms:g} ms",
    }
    tiles = {
        f"SLO attainment, {run.policy.label}": percent(run.live.attainment)
        for run in result.runs
        if run.live is not None
    }
    tables = [
        _table("Runs", run_rows(result)),
        rows_table(check_rows(result), "Live, simulated and planned"),
        _table("The plan", [{"": sentence} for sentence in plan_sentences]),
    ]
    title = "Hybrid serving on this machine"
    return write_page(directory, title, meta, tiles, _plots(result), tables)[0]


def check_rows(result: DemoResult) -> list[dict[str, object]]:
    """Return rows per check that live, simulated and planned results agree."""
    return [
        {"claim": c.claim, "expected": c.expected, "measured": c.measured, "holds": c.holds}
        for c in result.checks
    ]


def _plots(result: DemoResult) -> Iterator[Plot]:
    scale = result.planned.scale
    yield Plot("profile", "Profile", profile_figure(scale.measured, scale.slo_ms))
    yield Plot("runs", "Live requests; late ones are red", response_figure(result))


def response_figure(result: DemoResult) -> Figure:
    """Plot the response time of every request, a panel per live run."""
    live_runs = [(run.policy.label, run.live) for run in result.runs if run.live is not None]
    figure = new_figure(2.2 * len(live_runs))
    panels = figure.subplots(len(live_runs), 1, sharex=True, sharey=True, squeeze=False)
    for axes, (label, live) in zip(panels[:, 0], live_runs, strict=True):
        draw_responses(axes, live.times, result.planned.scale.slo_ms)
        style_axes(axes, title=label, x_label="s", y_label="ms")
    return figure


def _row(label: str, source: str, result: RunResult) -> TextRow:
    return {
        "": label,
        "source": source,
        "in time": f"{result.attainment:.1%}",
        "p50 ms": f"{result.times.percentile_ms(0.5):.0f}",
        "p99 ms": f"{result.times.percentile_ms(0.99):.0f}",
        "unserved": str(result.unserved),
        "to functions": f"{result.on_functions:.1%}",
        "cold": str(result.functions.cold_starts),
        "functions $/1000": f"{1000 * result.functions.usd / result.requests:.5f}",
    }


def _table(title: str, rows: Sequence[TextRow]) -> ReportTable:
    return ReportTable(
        title,
        tuple(
            Column(key, "", tuple(row[key] for row in rows), is_text=key in ("", "source"))
            for key in rows[0]
        ),
    )
