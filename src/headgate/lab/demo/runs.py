"""The live side: functions on an embedded platform, and `headgate serve` in front of them."""

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
from headgate.functions.tensor import Tensor
from headgate.functions.unbatched import UnbatchedCall
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

# What came of a run, live or simulated, in the same few numbers.


@dataclass(frozen=True, slots=True, eq=False)
class DemoRunResult:
    """One run, without its warm-up."""

    arrival_s: NDArray[np.float64]
    latency_ms: NDArray[np.float64]  # until it was settled, whatever the outcome
    is_met: NDArray[np.bool_]
    unserved: int  # requests that were turned away, or broke
    spilled: float  # share of requests that functions ran
    cold_starts: int  # of functions
    usd_per_1000: float

    @property
    def attainment(self) -> float:
        """The share of requests that were answered in time."""
        return float(self.is_met.mean())

    def percentile_ms(self, quantile: float) -> float:
        """Of the latencies."""
        return float(np.quantile(self.latency_ms, quantile, method="inverted_cdf"))


def count_unserved(outcome: Int8) -> int:
    """Return how many of these requests got no answer, in time or late."""
    return int(np.count_nonzero(outcome > Outcome.LATE))


_HANDLER: Final = "headgate.functions.lambda_handler.handle"
_LENGTH: Final = 20  # of a session, in clicks
_CALLS: Final = 15  # to find out how long one takes
_HOLD_MS: Final = 1_000.0


@dataclass(frozen=True, slots=True)
class DeployedFunction:
    """The recommender, deployed on a platform of this process."""

    platform: EmbeddedPlatform
    client: Any  # boto3 has no types
    terms: FaasOffering  # prices

    def call_ms(self, scale: Scale) -> float:
        """Return how long a warm function takes to answer, from request to answer."""
        clicks = np.ones((scale.sessions, _LENGTH), np.int64)
        tensor = Tensor("clicks", "INT64", clicks.shape, memoryview(clicks.tobytes()))
        body = encode_request(FUNCTION, [UnbatchedCall(0, 1, [tensor])])
        times_ms = []
        with off_worker_core():
            for _ in range(_CALLS):
                began_s = time.perf_counter()
                answer = self.client.invoke(FunctionName=FUNCTION, Payload=body)
                said = answer["Payload"].read()
                if answer.get("FunctionError"):
                    raise ConfigError(f"fails: {said[:300].decode()}", where=FUNCTION)
                times_ms.append((time.perf_counter() - began_s) * 1e3)
        return median(times_ms[1:])  # the first one was cold

    def wake(self) -> None:
        """Have all of them started, as if there had been a burst before."""
        body = encode_ping(_HOLD_MS)

        def ping(_: int) -> None:
            self.client.invoke(FunctionName=FUNCTION, Payload=body)

        with ThreadPoolExecutor(FUNCTIONS_MAX) as threads:
            list(threads.map(ping, range(FUNCTIONS_MAX)))

    def usd(self, records: list[BillingRecord]) -> float:
        """Return what calls cost at the prices of the plan."""
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
        with off_worker_core():  # its thread stays where it is started
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
    """Serve, send the requests, and return what came of them, and what no log can see of one."""
    options = LoadOptions(
        model=FUNCTION, is_binary=True, slo_ns=round(scale.slo_ms * MILLISECOND_NS)
    )
    with serving(spec, log.parent, log) as server:
        began_s = time.time()
        result = run_open_loop(server.url, arrivals, options)
    warm_up_ns = scale.course.warm_up_ns
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


# The simulated side: the same application and the same requests.


_SEED: Final = 0
THRESHOLDS: Final = range(1, 2 * FEW + 1)


@dataclass(frozen=True, slots=True)
class DemoPolicy:
    """A policy and its settings."""

    label: str
    policy: str
    settings: tuple[tuple[str, int], ...] = ()


def run_simulated(
    spec: Spec, way: DemoPolicy, scale: Scale, arrivals: Arrivals, request_ns: int
) -> DemoRunResult:
    """Simulate the application under a policy."""
    loaded = from_spec(spec, "the demonstration")
    kind = find_policy(way.policy)
    routes = _FaasObserver({pool.id for pool in loaded.app.pools if pool.faas is not None})
    setup = Setup(
        loaded.app,
        kind,
        kind.config(**dict(way.settings)),
        seed=_SEED,
        truth=_scatter(scale),
        request_ns=request_ns,
    )
    run = simulate(setup, arrivals, observer=routes)
    columns = run.requests
    warm_up_ns = scale.course.warm_up_ns
    counts = columns.arrival_ns >= warm_up_ns
    is_out = np.isin(np.arange(len(columns)), list(routes.requests))
    platform = next(use for use in run.resources if use.tier == "serverless")
    usd_per_call = platform.usage_usd / max(1, is_out.sum())
    spilled = float(is_out[counts].mean())
    return DemoRunResult(
        arrival_s=(columns.arrival_ns[counts] - warm_up_ns) / SECOND_NS,
        latency_ms=(columns.finished_ns - columns.arrival_ns)[counts] / MILLISECOND_NS,
        is_met=columns.outcome[counts] == Outcome.MET,
        unserved=count_unserved(columns.outcome[counts]),
        spilled=spilled,
        cold_starts=int((columns.cold[counts] & is_out[counts]).sum()),
        usd_per_1000=1000 * usd_per_call * spilled,
    )


def best_threshold(spec: Spec, scale: Scale, arrivals: Arrivals, request_ns: int) -> int:
    """Try all thresholds: the one that spills least of those that reach the objective.

    Where none does, the one that comes closest.
    """
    tried = {
        threshold: run_simulated(
            spec,
            DemoPolicy("", "threshold", (("threshold", threshold),)),
            scale,
            arrivals,
            request_ns,
        )
        for threshold in THRESHOLDS
    }
    reaching = [each for each, seen in tried.items() if seen.attainment >= QUANTILE]
    if reaching:
        return min(reaching, key=lambda each: (tried[each].spilled, each))
    return max(tried, key=lambda each: tried[each].attainment)


def _scatter(scale: Scale) -> GroundTruthConfig:
    """Times scatter log-normally, as widely as those of lone requests did."""
    lone, wide = (scale.measured.time_ms(1, 1, 1, quantile) for quantile in (0.5, 0.95))
    sigma = log(wide / lone) / NormalDist().inv_cdf(0.95)
    return (
        GroundTruthConfig("lognormal", cv=sqrt(exp(sigma * sigma) - 1.0))
        if sigma
        else GroundTruthConfig()
    )


@final
class _FaasObserver(Observer):
    """Writes down which requests went to functions: the columns of a run do not say."""

    def __init__(self, pool_ids: set[int]) -> None:
        self._pool_ids = pool_ids
        self.requests: set[int] = set()

    def on_event(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Dispatch) and action.pool_id in self._pool_ids:
                self.requests.update(task // STAGES_MAX for task in action.task_ids)
