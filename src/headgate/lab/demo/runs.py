"""One run of the demonstration, live or simulated.

Live runs use functions on an embedded platform and `headgate serve`; simulated runs use the same
application and the same requests.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import exp, log, sqrt
from pathlib import Path
from statistics import NormalDist, median
from typing import Any, Final, final

import numpy as np
import yaml
from numpy.typing import NDArray

from headgate.config import from_spec
from headgate.core.actions import Action, Dispatch
from headgate.core.catalog import MIB, FaasOffering
from headgate.core.clock import MILLISECOND_NS, SECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.events import Event
from headgate.core.records import STAGES_MAX
from headgate.core.states import Outcome
from headgate.deploy import connect
from headgate.functions.lambda_payload import encode_ping, encode_request
from headgate.functions.tensor import TaskInputs, Tensor
from headgate.lab.bench._server_under_test import client_overhead_ns, off_worker_core, serving
from headgate.lab.demo.setup import FEW, FUNCTION, FUNCTIONS_MAX, MEMORY_MB, QUANTILE, Scale, Spec
from headgate.lambda_emulator import BillingRecord, EmbeddedPlatform
from headgate.loadgen import LoadOptions, run_open_loop
from headgate.metrics.columns import Int8
from headgate.policies import find_policy
from headgate.sim.ground_truth import GroundTruthConfig
from headgate.sim.interfaces import Observer
from headgate.sim.run import Setup, simulate
from headgate.workload import Arrivals

THRESHOLDS: Final = range(1, 2 * FEW + 1)
_HANDLER: Final = "headgate.functions.lambda_handler.handle"
_LENGTH: Final = 20  # clicks per session
_CALLS: Final = 15  # to measure the time of a call
_HOLD_MS: Final = 1_000.0
_SEED: Final = 0


@dataclass(frozen=True, slots=True, eq=False)
class DemoRunResult:
    """Metrics of one run, live or simulated, without its warm-up."""

    arrival_s: NDArray[np.float64]
    latency_ms: NDArray[np.float64]  # until the outcome, whatever it is
    is_met: NDArray[np.bool_]
    unserved: int  # requests that were rejected or failed
    spilled: float  # share of requests that ran on functions
    cold_starts: int  # of functions
    usd_per_1000: float

    @property
    def attainment(self) -> float:
        """Share of requests that met the SLO."""
        return float(self.is_met.mean())

    def percentile_ms(self, quantile: float) -> float:
        """Return a quantile of the latencies."""
        return float(np.quantile(self.latency_ms, quantile, method="inverted_cdf"))


def count_unserved(outcome: Int8) -> int:
    """Return the number of requests without a response, in time or late."""
    return int(np.count_nonzero(outcome > Outcome.LATE))


@dataclass(frozen=True, slots=True)
class DeployedFunction:
    """The recommender, deployed on an embedded platform."""

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
) -> tuple[DemoRunResult, int]:
    """Serve, send the requests, and return the metrics and the client-side overhead in ns."""
    options = LoadOptions(
        model=FUNCTION, is_binary=True, slo_ns=round(scale.slo_ms * MILLISECOND_NS)
    )
    with serving(spec, log.parent, log) as server:
        began_s = time.time()
        result = run_open_loop(server.url, arrivals, options)
    warm_up_ns = scale.schedule.warm_up_ns
    counts = result.intended_ns >= warm_up_ns
    calls = [
        record
        for record in functions.platform.billing_log.records(FUNCTION)
        if record.started_s >= began_s + warm_up_ns / SECOND_NS
    ]
    number = int(counts.sum())
    return DemoRunResult(
        arrival_s=(result.intended_ns[counts] - warm_up_ns) / SECOND_NS,
        latency_ms=result.latency_ns[counts] / MILLISECOND_NS,
        is_met=result.outcome[counts] == Outcome.MET,
        unserved=count_unserved(result.outcome[counts]),
        spilled=len(calls) / number,
        cold_starts=sum(record.is_cold for record in calls),
        usd_per_1000=1000 * functions.usd(calls) / number,
    ), client_overhead_ns(result)


@dataclass(frozen=True, slots=True)
class DemoPolicy:
    """A policy and its settings."""

    label: str
    name: str
    settings: tuple[tuple[str, int], ...] = ()


def run_simulated(
    spec: Spec, policy: DemoPolicy, scale: Scale, arrivals: Arrivals, request_ns: int
) -> DemoRunResult:
    """Simulate the application under a policy."""
    config = from_spec(spec, "the demonstration")
    kind = find_policy(policy.name)
    routes = _FaasObserver({pool.id for pool in config.app.pools if pool.faas is not None})
    setup = Setup(
        config.app,
        kind,
        kind.config(**dict(policy.settings)),
        seed=_SEED,
        truth=_scatter(scale),
        request_ns=request_ns,
    )
    run = simulate(setup, arrivals, observer=routes)
    columns = run.requests
    warm_up_ns = scale.schedule.warm_up_ns
    counts = columns.arrival_ns >= warm_up_ns
    is_spilled = np.isin(np.arange(len(columns)), list(routes.requests))
    platform = next(use for use in run.resources if use.tier == "serverless")
    usd_per_call = platform.usage_usd / max(1, is_spilled.sum())
    spilled = float(is_spilled[counts].mean())
    return DemoRunResult(
        arrival_s=(columns.arrival_ns[counts] - warm_up_ns) / SECOND_NS,
        latency_ms=(columns.finished_ns - columns.arrival_ns)[counts] / MILLISECOND_NS,
        is_met=columns.outcome[counts] == Outcome.MET,
        unserved=count_unserved(columns.outcome[counts]),
        spilled=spilled,
        cold_starts=int((columns.cold[counts] & is_spilled[counts]).sum()),
        usd_per_1000=1000 * usd_per_call * spilled,
    )


def best_threshold(spec: Spec, scale: Scale, arrivals: Arrivals, request_ns: int) -> int:
    """Return the threshold that spills least of those that reach the SLO quantile.

    If none reaches it, return the threshold of the highest attainment.
    """
    trial = {
        threshold: run_simulated(
            spec,
            DemoPolicy("", "threshold", (("threshold", threshold),)),
            scale,
            arrivals,
            request_ns,
        )
        for threshold in THRESHOLDS
    }
    sufficient = [each for each, result in trial.items() if result.attainment >= QUANTILE]
    if sufficient:
        return min(sufficient, key=lambda each: (trial[each].spilled, each))
    return max(trial, key=lambda each: trial[each].attainment)


def _scatter(scale: Scale) -> GroundTruthConfig:
    """Return a log-normal distribution with the measured ratio of p95 to p50 of one request."""
    median_ms, tail_ms = (scale.measured.time_ms(1, 1, 1, quantile) for quantile in (0.5, 0.95))
    sigma = log(tail_ms / median_ms) / NormalDist().inv_cdf(0.95)
    return (
        GroundTruthConfig("lognormal", cv=sqrt(exp(sigma * sigma) - 1.0))
        if sigma
        else GroundTruthConfig()
    )


@final
class _FaasObserver(Observer):
    """Records the requests sent to functions, which the columns of a run do not contain."""

    def __init__(self, pool_ids: set[int]) -> None:
        self._pool_ids = pool_ids
        self.requests: set[int] = set()

    def on_event(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Dispatch) and action.pool_id in self._pool_ids:
                self.requests.update(task // STAGES_MAX for task in action.task_ids)
