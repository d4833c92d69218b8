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
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import yaml

from headgate.config import from_spec
from headgate.core.clock import MILLISECOND_NS, SECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.model import MIB, FaasOffering
from headgate.core.states import Outcome
from headgate.deploy import connect
from headgate.functions.lambda_payload import encode_ping, encode_request
from headgate.functions.tensor import TaskInputs, Tensor
from headgate.lab.bench._server_under_test import client_overhead_ns, off_worker_core, serving
from headgate.lab.demo.setup import FEW, FUNCTION, FUNCTIONS_MAX, MEMORY_MB, QUANTILE, Scale, Spec
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
from headgate.loadgen import LoadOptions, run_open_loop
from headgate.workload import Arrivals

THRESHOLDS: Final = range(1, 2 * FEW + 1)
_HANDLER: Final = "headgate.functions.lambda_handler.handle"
_LENGTH: Final = 20  # clicks per session
_CALLS: Final = 15  # to measure the time of a call
_HOLD_MS: Final = 1_000.0
_SEED: Final = 0


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


def simulation(spec: Spec, scale: Scale, arrivals: Arrivals, request_ns: int) -> Environment:
    """Return the application and its requests, for the simulator."""
    median_ms, tail_ms = (scale.measured.time_ms(1, 1, 1, quantile) for quantile in (0.5, 0.95))
    return Environment(
        from_spec(spec, "the demonstration").app,
        arrivals,
        lognormal_truth(median_ms, tail_ms, 0.95),
        request_ns=request_ns,
        since_ns=scale.schedule.warm_up_ns,
    )


def run_simulated(environment: Environment, policy: PolicyCase) -> RunResult:
    """Simulate a policy. Calls of functions count after the warm-up, as in a live run."""
    run = environment.simulate(policy, _SEED)
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
        threshold: [environment.run(PolicyCase.of("threshold", threshold=threshold), _SEED)]
        for threshold in THRESHOLDS
    }
    return best_setting(trials, QUANTILE, lambda result: result.on_functions)
