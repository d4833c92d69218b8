"""The live side: functions on an embedded platform, and `headgate serve` in front of them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import yaml

from headgate.bench._serving import beside_the_worker, outside_ns, serving
from headgate.core.clock import MILLISECOND_NS, SECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.offers import MIB, FunctionPlatform
from headgate.core.outcome import Outcome
from headgate.demo.application import FUNCTIONS_MAX, MEMORY_MB, Spec
from headgate.demo.scale import FUNCTION, Scale
from headgate.demo.seen import Seen, count_unserved
from headgate.deploy import connect
from headgate.functions.envelope import encode_ping, encode_request
from headgate.functions.tensor import Tensor
from headgate.functions.work import Work
from headgate.load import LoadOptions, run_open_loop
from headgate.serverless import BillingRecord, EmbeddedPlatform
from headgate.workload import Arrivals

_HANDLER: Final = "headgate.functions.lambda_handler.handle"
_LENGTH: Final = 20  # of a session, in clicks
_CALLS: Final = 15  # to find out how long one takes
_HOLD_MS: Final = 1_000.0


@dataclass(frozen=True, slots=True)
class Functions:
    """The recommender, deployed on a platform of this process."""

    platform: EmbeddedPlatform
    client: Any  # boto3 has no types
    terms: FunctionPlatform  # prices

    def call_ms(self, scale: Scale) -> float:
        """Return how long a warm function takes to answer, from request to answer."""
        clicks = np.ones((scale.sessions, _LENGTH), np.int64)
        tensor = Tensor("clicks", "INT64", clicks.shape, memoryview(clicks.tobytes()))
        body = encode_request(FUNCTION, [Work(0, 1, [tensor])])
        times_ms = []
        with beside_the_worker():
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
def deployed(spec: Spec, folder: Path, terms: FunctionPlatform) -> Iterator[Functions]:
    """Run a platform on the first core, with the application's function on it."""
    package = folder / "package"
    package.mkdir()
    (package / "app.yaml").write_text(yaml.safe_dump(spec), encoding="utf-8")
    first = min(os.sched_getaffinity(0))
    platform = EmbeddedPlatform(folder / "platform", cpus=(first,))
    with ExitStack() as stack:
        with beside_the_worker():  # its thread stays where it is started
            stack.enter_context(platform)
        platform.register(
            FUNCTION,
            package,
            _HANDLER,
            memory_mb=MEMORY_MB,
            environment={"HEADGATE_APP": "app.yaml"},
        )
        yield Functions(platform, connect(platform.url), terms)


def run_live(
    spec: Spec, scale: Scale, arrivals: Arrivals, log: Path, functions: Functions
) -> tuple[Seen, int]:
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
        for record in functions.platform.bill.records(FUNCTION)
        if record.started_s >= began_s + warm_up_ns / SECOND_NS
    ]
    number = int(counts.sum())
    return Seen(
        arrival_s=(result.intended_ns[counts] - warm_up_ns) / SECOND_NS,
        latency_ms=result.latency_ns[counts] / MILLISECOND_NS,
        is_met=result.outcome[counts] == Outcome.MET,
        unserved=count_unserved(result.outcome[counts]),
        spilled=len(calls) / number,
        cold_starts=sum(record.is_cold for record in calls),
        usd_per_1000=1000 * functions.usd(calls) / number,
    ), outside_ns(result)
