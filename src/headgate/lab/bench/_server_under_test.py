"""The server under test: `headgate serve` in a process of its own, with a synthetic model.

`MatrixProduct` computes a product of many matrices, for a configurable duration:

    python -m headgate.lab.bench._server_under_test 20     layers that take 20 ms on one core

`take_step` sends one open-loop load.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from time import perf_counter, sleep
from typing import Any, Final

import numpy as np
import yaml

from headgate.core.clock import MILLISECOND_NS, NEVER_NS, SECOND_NS
from headgate.functions import Model
from headgate.functions.arrays import Array
from headgate.lab.bench.live.server_process import Running, server_process
from headgate.loadgen.loops import run_closed_loop, run_open_loop
from headgate.loadgen.requests import LoadOptions
from headgate.loadgen.results import FailureReason, LoadResult, LoadSummary, summarise_load
from headgate.metrics.columns import Int64
from headgate.system.process import thread_variables
from headgate.workload import poisson

MODEL: Final = "product"
MODEL_MS: Final = 20.0
SLO_MS: Final = 150
OPTIONS: Final = LoadOptions(model=MODEL, slo_ns=SLO_MS * MILLISECOND_NS)
_BATCH: Final = 4
BATCH: Final = 8  # of `Sleeping`
_BUSY: Final = 3  # closed-loop clients that saturate one core within the SLO
_ROWS: Final = 64
_WIDTH: Final = 256
_TRIALS: Final = 40
_SEEDS: Final = 5  # simulations of one log


def product_app() -> dict[str, object]:
    """Return an application with one model that takes about 20 ms on one core."""
    layers = int(_run_module("headgate.lab.bench._server_under_test", str(MODEL_MS), threads=1))
    function = {
        "code": "headgate.lab.bench._server_under_test:MatrixProduct",
        "options": {"layers": layers},
    }
    return {
        "functions": {MODEL: {**function, "batch_max": _BATCH}},
        "slo": {"latency": f"{SLO_MS}ms"},
        "serve": {"port": 0},
    }


@contextmanager
def serving(app: Mapping[str, object], folder: Path, log: Path) -> Iterator[Running]:
    """Serve an application inside the block; after the block its event log is complete."""
    path = folder / "app.yaml"
    path.write_text(yaml.safe_dump(dict(app)), encoding="utf-8")
    command = [sys.executable, "-m", "headgate", "serve", str(path), "--log", str(log)]

    def ready_url(output: str) -> str | None:
        tokens = output.split()
        # "try" ends the start message.
        return tokens[tokens.index("serving") + 1] if "try" in tokens else None

    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with (
        server_process(command, ready_url, env=environment, stop_signal=signal.SIGINT) as server,
        off_worker_core(),
    ):
        yield server


@contextmanager
def off_worker_core() -> Iterator[None]:
    """Keep this process off the last core, which the worker has: load must not slow it down."""
    cores = os.sched_getaffinity(0)
    if len(cores) > 1:
        os.sched_setaffinity(0, sorted(cores)[:-1])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def peak_rps(server: Running, seconds: float) -> float:
    """Return the goodput of a saturated server, in requests per second."""
    duration_ns = round(seconds * SECOND_NS)
    result = run_closed_loop(server.url, _BUSY, duration_ns, OPTIONS, warm_up_ns=duration_ns // 4)
    return int((result.outcome == 0).sum()) / seconds


def client_overhead_ns(result: LoadResult) -> int:
    """Return the median latency that clients see in addition to the gateway's own timing."""
    return int(np.median(_client_overheads_ns(result)))


def _client_overheads_ns(result: LoadResult) -> Int64:
    total_ns = result.timings_ns["total"]
    has_timings = (total_ns != NEVER_NS) & (result.status == 200)
    overheads_ns: Int64 = np.maximum(result.latency_ns - total_ns, 0)[has_timings]
    return overheads_ns


def simulate_log(
    folder: Path, log: Path, live: LoadResult, names: Sequence[str]
) -> dict[str, float]:
    """Return figures of simulations of the requests in a log, with its service times.

    Each figure is the mean of several runs: what one run draws would be a part of its error.
    """
    calibrated, trace = folder / "calibrated.yaml", folder / "live.csv"
    overhead = client_overheads(live)
    run_command(
        *("calibrate", log, "--out", calibrated, "--trace", trace, "--client-overhead", overhead)
    )
    runs = [
        run_command("simulate", calibrated, "--trace", trace, "--seed", seed)
        for seed in range(1, _SEEDS + 1)
    ]
    return {name: fmean(float(run[name]) for run in runs) for name in names}


def client_overheads(live: LoadResult) -> str:
    """Return the latencies that clients saw besides the gateway's own, for `--client-overhead`."""
    overheads_ns = _client_overheads_ns(live)
    if len(overheads_ns):  # every fifth percent of them
        overheads_ns = np.quantile(overheads_ns, np.arange(0.025, 1, 0.05)).astype(np.int64)
    return ",".join(f"{overhead_ns}ns" for overhead_ns in overheads_ns.tolist() or [0])


def run_command(*arguments: object) -> Any:  # any JSON
    """Run a Headgate command with --json and return its output."""
    return json.loads(_run_module("headgate", *map(str, arguments), "--json"))


def _run_module(module: str, *arguments: str, threads: int | None = None) -> str:
    limits = {} if threads is None else thread_variables(threads)
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, **limits},
        capture_output=True,
        text=True,
        check=False,
    )
    # Exit status 1 reports a check that does not hold, which is a result.
    if done.returncode not in (0, 1) or not done.stdout:
        raise RuntimeError(f"{module} {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


class MatrixProduct(Model):
    """Computes `layers` matrix products per item.

    A batch takes as long as the sum of its items, so batching gains nothing and the capacity is
    one number.
    """

    def __init__(self, layers: int = 1) -> None:
        self._layers = layers

    def load(self) -> None:
        """Generate the weights, with a fixed seed."""
        self.inputs = {"x": f"FP32[-1, {_ROWS}]"}
        self.outputs = {"y": "FP32[-1]"}
        weights = np.random.default_rng(1).standard_normal((_WIDTH, _WIDTH), dtype=np.float32)
        self._weights = weights * np.float32(np.sqrt(2 / _WIDTH))

    def predict(self, batch: dict[str, Array]) -> dict[str, Array]:
        """Return one number per item."""
        return {"y": np.array([self._product(x) for x in batch["x"]], np.float32)}

    def _product(self, x: Array) -> float:
        hidden = np.repeat(x[:, None], _WIDTH, axis=1)
        for _ in range(self._layers):
            hidden = np.maximum(hidden @ self._weights, 0)
        return float(hidden.mean())


class Sleeping(Model):
    """Takes as long for a batch as for one item, and no core."""

    def load(self) -> None:
        """Declare inputs and outputs."""
        self.inputs, self.outputs = {"x": "FP32[-1, 1]"}, {"y": "FP32[-1]"}

    def predict(self, batch: dict[str, Array]) -> dict[str, Array]:
        """Return the inputs, after a while."""
        sleep(MODEL_MS / 1e3)
        return {"y": batch["x"][:, 0]}


def layers_for_ms(milliseconds: float) -> int:
    """Return the number of layers that take this long on this machine."""
    model = MatrixProduct(layers=8)
    model.load()
    x = {"x": np.ones((1, _ROWS), np.float32)}
    took_s = []
    for _ in range(_TRIALS):
        begin_s = perf_counter()
        model.predict(x)
        took_s.append(perf_counter() - begin_s)
    return max(1, round(8 * milliseconds / 1e3 / median(took_s)))


@dataclass(frozen=True, slots=True)
class LoadStep:
    """One open-loop load and its results, as clients saw them."""

    load: float  # multiple of the capacity
    summary: LoadSummary
    has_one_response_each: bool
    memory_mib: tuple[float, float, float]  # before, peak, after


def take_step(
    server: Running, load: float, capacity_rps: float, seconds: float, options: LoadOptions
) -> LoadStep:
    """Send `load` times the capacity. Equal loads have equal arrival times for every server."""
    arrivals = poisson(load * capacity_rps, round(seconds * SECOND_NS), seed=round(10 * load))
    before_mib = server.memory_mib()
    samples_mib = [before_mib]
    result = run_open_loop(
        server.url, arrivals, options, on_progress=lambda _: samples_mib.append(server.memory_mib())
    )
    memory_mib = (before_mib, max(samples_mib), server.memory_mib())
    return LoadStep(load, summarise_load(result), _has_one_response_each(result), memory_mib)


def _has_one_response_each(result: LoadResult) -> bool:
    """Whether no response is missing. Duplicates show in the event log only."""
    return bool(np.all((result.failure == FailureReason.NONE) & (result.status > 0)))


if __name__ == "__main__":
    sys.stdout.write(f"{layers_for_ms(float(sys.argv[1]))}\n")
