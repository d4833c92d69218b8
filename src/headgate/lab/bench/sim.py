"""Speed of the simulator compared with SimPy and SimFaaS, in one run.

Each simulator has a process of its own; they run in turn, round after round, and only ratios within
a round count, because machines are noisy. The compiled build is measured if it exists
(`make compile`).

    python -m headgate.lab.bench.sim simpy 1000     one simulator under test, 1000 requests

Every simulator simulates the same system, a queue with eight servers at 80 % load (SimFaaS has no
queue, so it simulates the same load as a loss system), and prints one line of JSON. Imports and the
generation of arrivals are not timed for any simulator. The default policy has an objective to keep,
so far away that it admits every request and serves each when `balance` does.
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from hashlib import sha256
from pathlib import Path
from statistics import median

from headgate.core import build_kind
from headgate.core.actions import Action
from headgate.core.event_log import to_wire
from headgate.core.events import Event
from headgate.core.model import App, Function, Pipeline, Pool, Profile, Slo, Stage, Variant
from headgate.core.states import Outcome
from headgate.lab.experiments import Check, Progress, Result, Row
from headgate.lab.harness import Environment, PolicyCase
from headgate.metrics.columns import RunColumns
from headgate.sim.ground_truth import GroundTruthConfig
from headgate.sim.interfaces import Observer
from headgate.workload.generators import poisson

NAME = "sim"
TITLE = "simulated requests per second, compared with SimPy and SimFaaS"

ROUNDS = 5
COMPILED = Path("build/compiled/src")  # output of `make compile`, relative to the repository root
SERVERS = 8
SERVICE_NS = 1_000_000
RATE_PER_S = 0.8 * SERVERS * 1e9 / SERVICE_NS
OBJECTIVE_NS = 50 * SERVICE_NS
_BALANCE = PolicyCase.of("balance", batch_max=1)
_DEFAULT = PolicyCase.of("headgate")
_SOURCE = "docs/benchmarks.md"
SimulatorRun = dict[str, float | str]


def run(*, progress: Progress) -> Result:
    """Measure all simulators, and the compiled build if it exists."""
    compiled = COMPILED if COMPILED.is_dir() else None
    simulators: list[tuple[str, str, int, Path | None]] = [
        ("simpy", "simpy", 100_000, None),
        ("simfaas", "simfaas", 40_000, None),
        ("interpreted", "ours", 100_000, None),
        ("interpreted, batching", "ours-batching", 100_000, None),
        ("interpreted, default policy", "ours-default", 30_000, None),
    ]
    if compiled is not None:
        simulators.append(("compiled", "ours", 400_000, compiled))
        simulators.append(("compiled, batching", "ours-batching", 400_000, compiled))
        simulators.append(("compiled, default policy", "ours-default", 200_000, compiled))
    runs: dict[str, list[SimulatorRun]] = {label: [] for label, *_ in simulators}
    for number in range(ROUNDS):
        for label, simulator, requests, tree in simulators:
            progress(f"round {number + 1} of {ROUNDS}: {label}")
            simulated = _run_simulator(simulator, requests, tree)
            if simulated is not None:
                runs[label].append(simulated)
    rows = [_row(label, runs[label]) for label in runs]
    checks = _speed_checks(runs)
    checks += _build_checks(compiled, progress)
    return Result(NAME, rows, checks)


def _run_simulator(simulator: str, requests: int, tree: Path | None) -> SimulatorRun | None:
    """Run one simulator once; None if it is not installed."""
    environment = dict(os.environ)
    if tree is not None:
        environment["PYTHONPATH"] = str(tree)
    command = [sys.executable, "-m", "headgate.lab.bench.sim", simulator, str(requests)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        if "ModuleNotFoundError" in done.stderr:
            return None
        raise RuntimeError(f"{simulator} failed: {done.stderr.strip()}")
    run: SimulatorRun = json.loads(done.stdout)
    return run


def _row(label: str, runs: list[SimulatorRun]) -> Row:
    if not runs:
        return {"simulator": label, "requests_per_s": None, "mean_wait_ms": None, "peak_mib": None}
    return {
        "simulator": label,
        "requests_per_s": round(median(_rates(runs))),
        "mean_wait_ms": round(float(runs[0]["mean_wait_ms"]), 4),
        "peak_mib": round(max(float(run["peak_mib"]) for run in runs)),
    }


def _rates(runs: list[SimulatorRun]) -> list[float]:
    return [float(run["requests_per_s"]) for run in runs]


def _speed_checks(runs: dict[str, list[SimulatorRun]]) -> list[Check]:
    checks = [
        _ratio_check(runs, "interpreted", "simpy", 1.5),
        _ratio_check(runs, "interpreted, default policy", "simpy", 0.6),
    ]
    if "compiled" in runs:
        checks.append(_ratio_check(runs, "compiled", "simpy", 8.0))
        checks.append(_ratio_check(runs, "compiled", "simfaas", 8.0))
        checks.append(_ratio_check(runs, "compiled, default policy", "simpy", 2.0))
    targets = {"interpreted": 150_000, "compiled": 700_000, "compiled, batching": 1_000_000}
    for label, target in targets.items():
        if runs.get(label):
            rate = round(median(_rates(runs[label])))
            claim = f"{label}: simulated requests per second (a target to report against)"
            checks.append(Check(claim, _SOURCE, f">= {target:,}", rate, rate >= target))
    return checks


def _ratio_check(runs: dict[str, list[SimulatorRun]], ours: str, peer: str, factor: float) -> Check:
    claim = f"{ours} is at least {factor:g} times as fast as {peer}"
    if not runs[peer]:
        return Check(claim, _SOURCE, f">= {factor:g}x", f"{peer} is not installed", False)
    ratios = [a / b for a, b in zip(_rates(runs[ours]), _rates(runs[peer]), strict=True)]
    ratio = round(median(ratios), 2)
    return Check(claim, _SOURCE, f">= {factor:g}x", f"{ratio}x", ratio >= factor)


def _build_checks(compiled: Path | None, progress: Progress) -> list[Check]:
    """Check that a long run fits in memory, and that both builds decide alike."""
    progress("ten million requests")
    simulated = _run_simulator("ours", 10_000_000 if compiled is not None else 2_000_000, compiled)
    assert simulated is not None
    claim = f"a replay of {simulated['requests']:,} requests stays under 2 GiB"
    peak = round(float(simulated["peak_mib"]))
    checks = [Check(claim, _SOURCE, "< 2048 MiB", f"{peak} MiB", peak < 2048)]
    if compiled is not None:
        progress("comparing the action logs of both builds")
        checks.append(_equality_check("balance", "ours-log", compiled))
        checks.append(_equality_check("the default policy", "ours-default-log", compiled))
    return checks


def _equality_check(policy: str, simulator: str, compiled: Path) -> Check:
    """Check that both builds decide alike under a policy, and that they are two builds."""
    logs = [_run_simulator(simulator, 20_000, tree) for tree in (None, compiled)]
    kinds = [str(log["build"]) for log in logs if log is not None]
    is_same = len({log["hash"] for log in logs if log is not None}) == 1
    claim = f"the interpreted and the compiled build give identical action logs under {policy}"
    holds = is_same and kinds == ["interpreted", "compiled"]
    return Check(claim, _SOURCE, "identical", "identical" if is_same else "differ", holds)


def ours(requests: int) -> dict[str, object]:
    """Run policy `balance` with single requests."""
    return _timed(_environment(requests, RATE_PER_S), _BALANCE)


def ours_batching(requests: int) -> dict[str, object]:
    """Run policy `balance` with batches of up to 8, at 95 % of the capacity of full batches."""
    exec_ns = tuple(SERVICE_NS * (4 + size) // 5 for size in range(1, 9))
    rate_per_s = 0.95 * SERVERS * 8 * 1e9 / exec_ns[-1]
    batching = PolicyCase.of("balance", batch_max=8)
    return _timed(_environment(requests, rate_per_s, exec_ns), batching)


def ours_default(requests: int) -> dict[str, object]:
    """Run the default policy with single requests, which have an objective."""
    return _timed(_environment(requests, RATE_PER_S, slo=Slo(OBJECTIVE_NS)), _DEFAULT)


def ours_log(requests: int) -> dict[str, object]:
    """Return a hash of all actions of a run under `balance`, to compare builds."""
    return _logged(_environment(requests, RATE_PER_S), _BALANCE)


def ours_default_log(requests: int) -> dict[str, object]:
    """The same under the default policy."""
    return _logged(_environment(requests, RATE_PER_S, slo=Slo(OBJECTIVE_NS)), _DEFAULT)


def _logged(environment: Environment, policy: PolicyCase) -> dict[str, object]:
    observer = _Hasher()
    environment.simulate(policy, 0, observer=observer)
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
    return _run_row(requests, seconds, sum(waits) / len(waits) * SERVICE_NS / 1e6)


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
    return _run_row(simulator.total_req_count, seconds, 0.0)


class _Hasher(Observer):
    def __init__(self) -> None:
        self.digest = sha256()

    def on_event(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        line = [now_ns, scheduler, to_wire(event), [to_wire(action) for action in actions]]
        self.digest.update(json.dumps(line).encode())


def _environment(
    requests: int,
    rate_per_s: float,
    exec_ns: tuple[int, ...] = (SERVICE_NS,),
    slo: Slo = Slo(),  # noqa: B008 - a frozen value
) -> Environment:
    variant = Variant(0, "function", 0, (0,), Profile(exec_ns=exec_ns))
    function = Function(0, "function", (variant,))
    pipeline = Pipeline(0, "function", (Stage(function),), slo)
    app = App((function,), (pipeline,), (Pool(0, "node", nodes=SERVERS),))
    arrivals = poisson(rate_per_s, int(requests / rate_per_s * 1e9), seed=1)
    return Environment(app, arrivals, GroundTruthConfig("exponential"))


def _timed(environment: Environment, policy: PolicyCase) -> dict[str, object]:
    policy.build()  # imports the policy, which is not timed
    runs: list[RunColumns] = []
    seconds = _seconds(lambda: runs.append(environment.simulate(policy, 0)))
    rows = runs[0].requests
    assert (rows.outcome == Outcome.MET).all(), "a request that is refused is no work"
    wait_ms = float((rows.started_ns - rows.arrival_ns).mean()) / 1e6
    return _run_row(len(rows), seconds, wait_ms)


def _seconds(work: Callable[[], object]) -> float:
    gc.collect()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _run_row(requests: int, seconds: float, mean_wait_ms: float) -> dict[str, object]:
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
        "ours-default": ours_default,
        "ours-log": ours_log,
        "ours-default-log": ours_default_log,
        "simpy": simpy,
        "simfaas": simfaas,
    }
    print(json.dumps(simulators[sys.argv[1]](int(sys.argv[2]))))


if __name__ == "__main__":
    main()
