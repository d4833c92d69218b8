"""One simulator under test, in a process: `python -m headgate.lab.bench._simulators`.

Every simulator simulates the same system, a queue with eight servers at 80 % load (SimFaaS has no
queue, so it simulates the same load as a loss system), and prints one line of JSON. Imports and the
generation of arrivals are not timed for any simulator.
"""

from __future__ import annotations

import gc
import json
import random
import resource
import sys
import time
from collections.abc import Callable, Generator
from hashlib import sha256

from headgate.core import build_kind
from headgate.core.actions import Action
from headgate.core.event_log import to_wire
from headgate.core.events import Event
from headgate.core.model import App, Function, Pipeline, Pool, Profile, Stage, Variant
from headgate.lab.harness import Environment, PolicyCase
from headgate.metrics.columns import RunColumns
from headgate.sim.ground_truth import GroundTruthConfig
from headgate.sim.interfaces import Observer
from headgate.workload.generators import poisson

SERVERS = 8
SERVICE_NS = 1_000_000
RATE_PER_S = 0.8 * SERVERS * 1e9 / SERVICE_NS
_BALANCE = PolicyCase.of("balance", batch_max=1)


def ours(requests: int) -> dict[str, object]:
    """Run policy `balance` with single requests."""
    return _timed(_environment(requests, RATE_PER_S), _BALANCE)


def ours_batching(requests: int) -> dict[str, object]:
    """Run policy `balance` with batches of up to 8, at 95 % of the capacity of full batches."""
    exec_ns = tuple(SERVICE_NS * (4 + size) // 5 for size in range(1, 9))
    rate_per_s = 0.95 * SERVERS * 8 * 1e9 / exec_ns[-1]
    batching = PolicyCase.of("balance", batch_max=8)
    return _timed(_environment(requests, rate_per_s, exec_ns), batching)


def ours_log(requests: int) -> dict[str, object]:
    """Return a hash of all actions of a run, to compare builds."""
    observer = _Hasher()
    _environment(requests, RATE_PER_S).simulate(_BALANCE, 0, observer=observer)
    return {"hash": observer.digest.hexdigest(), "build": build_kind()}


def simpy(requests: int) -> dict[str, object]:
    """Run SimPy, with a process per request and a resource of capacity eight."""
    import simpy  # noqa: PLC0415 - optional, and only here

    rng = random.Random(1)
    environment = simpy.Environment()
    servers = simpy.Resource(environment, capacity=SERVERS)
    waits: list[float] = []

    def request() -> Generator[simpy.Event, object, None]:
        arrived = environment.now
        with servers.request() as turn:
            yield turn
            waits.append(environment.now - arrived)
            yield environment.timeout(rng.expovariate(1.0))

    def source() -> Generator[simpy.Event, object, None]:
        for _ in range(requests):
            yield environment.timeout(rng.expovariate(0.8 * SERVERS))
            environment.process(request())

    environment.process(source())
    seconds = _seconds(environment.run)
    return _row(requests, seconds, sum(waits) / len(waits) * SERVICE_NS / 1e6)


def simfaas(requests: int) -> dict[str, object]:
    """Run SimFaaS, with at most eight instances and no queue: excess requests are rejected."""
    from simfaas.ServerlessSimulator import ServerlessSimulator  # noqa: PLC0415 - likewise

    simulator = ServerlessSimulator(
        arrival_rate=0.8 * SERVERS,
        warm_service_rate=1.0,
        cold_service_rate=1.0,
        expiration_threshold=600,
        max_time=requests / (0.8 * SERVERS),
        maximum_concurrency=SERVERS,
    )
    seconds = _seconds(lambda: simulator.generate_trace(debug_print=False, progress=False))
    return _row(simulator.total_req_count, seconds, 0.0)


class _Hasher(Observer):
    def __init__(self) -> None:
        self.digest = sha256()

    def on_event(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        line = [now_ns, scheduler, to_wire(event), [to_wire(action) for action in actions]]
        self.digest.update(json.dumps(line).encode())


def _environment(
    requests: int, rate_per_s: float, exec_ns: tuple[int, ...] = (SERVICE_NS,)
) -> Environment:
    variant = Variant(0, "function", 0, (0,), Profile(exec_ns=exec_ns))
    function = Function(0, "function", (variant,))
    pipeline = Pipeline(0, "function", (Stage(function),))
    app = App((function,), (pipeline,), (Pool(0, "node", nodes=SERVERS),))
    arrivals = poisson(rate_per_s, int(requests / rate_per_s * 1e9), seed=1)
    return Environment(app, arrivals, GroundTruthConfig("exponential"))


def _timed(environment: Environment, policy: PolicyCase) -> dict[str, object]:
    policy.build()  # imports the policy, which is not timed
    runs: list[RunColumns] = []
    seconds = _seconds(lambda: runs.append(environment.simulate(policy, 0)))
    rows = runs[0].requests
    wait_ms = float((rows.started_ns - rows.arrival_ns).mean()) / 1e6
    return _row(len(rows), seconds, wait_ms)


def _seconds(work: Callable[[], object]) -> float:
    gc.collect()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _row(requests: int, seconds: float, mean_wait_ms: float) -> dict[str, object]:
    return {
        "requests": requests,
        "seconds": seconds,
        "requests_per_s": requests / seconds,
        "mean_wait_ms": mean_wait_ms,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "build": build_kind(),
    }


def main() -> None:
    """Run the simulator named on the command line, with the given number of requests."""
    simulators: dict[str, Callable[[int], dict[str, object]]] = {
        "ours": ours,
        "ours-batching": ours_batching,
        "ours-log": ours_log,
        "simpy": simpy,
        "simfaas": simfaas,
    }
    print(json.dumps(simulators[sys.argv[1]](int(sys.argv[2]))))


if __name__ == "__main__":
    main()
