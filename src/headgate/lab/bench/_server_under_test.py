"""Headgate as users have it, for benchmarks: the command in a process of its own, and its tools."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final

import numpy as np
import yaml

from headgate.core.clock import MILLISECOND_NS, NEVER_NS, SECOND_NS
from headgate.functions import Model
from headgate.functions.arrays import Array
from headgate.lab.bench.live.server_process import Running
from headgate.loadgen import (
    FailureReason,
    LoadOptions,
    LoadResult,
    LoadSummary,
    run_closed_loop,
    run_open_loop,
    summarise_load,
)
from headgate.workload import poisson

MODEL: Final = "product"
MODEL_MS: Final = 20.0
SLO_MS: Final = 150
OPTIONS: Final = LoadOptions(model=MODEL, slo_ns=SLO_MS * MILLISECOND_NS)
_BATCH: Final = 4
_BUSY: Final = 3  # clients that keep one core busy, and are answered in time
_START_S: Final = 30.0
_STOP_S: Final = 30.0


def product_app() -> dict[str, object]:
    """Return an application with one model that takes about 20 ms on one core."""
    layers = int(_command("headgate.lab.bench._server_under_test", str(MODEL_MS), threads=1))
    function = {
        "code": "headgate.lab.bench._server_under_test:Product",
        "options": {"layers": layers},
    }
    return {
        "functions": {MODEL: {**function, "batch_max": _BATCH}},
        "slo": {"latency": f"{SLO_MS}ms"},
        "serve": {"port": 0},
    }


@contextmanager
def serving(app: Mapping[str, object], folder: Path, log: Path) -> Iterator[Running]:
    """Serve an application until the end of the block; its event log is complete then."""
    path, said = folder / "app.yaml", folder / "said.txt"
    path.write_text(yaml.safe_dump(dict(app)), encoding="utf-8")
    command = [sys.executable, "-m", "headgate", "serve", str(path), "--log", str(log)]
    began_s = time.monotonic()
    with said.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    try:
        url = _await_url(process, said, began_s)
        with beside_the_worker():
            yield Running(process.pid, url, time.monotonic() - began_s)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_STOP_S)
        finally:
            process.kill()
            process.wait()


@contextmanager
def beside_the_worker() -> Iterator[None]:
    """Leave the last core alone: a worker has it, and load must not slow what it measures."""
    cores = os.sched_getaffinity(0)
    if len(cores) > 1:
        os.sched_setaffinity(0, sorted(cores)[:-1])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def peak_rps(server: Running, seconds: float) -> float:
    """Return how many requests per second are answered in time when it is always busy."""
    duration_ns = round(seconds * SECOND_NS)
    result = run_closed_loop(server.url, _BUSY, duration_ns, OPTIONS, warm_up_ns=duration_ns // 4)
    return int((result.outcome == 0).sum()) / seconds


def outside_ns(result: LoadResult) -> int:
    """Return what a request usually takes outside of the gateway's own account of it."""
    total_ns = result.timings_ns["total"]
    is_told = (total_ns != NEVER_NS) & (result.status == 200)
    return int(np.median((result.latency_ns - total_ns)[is_told]))


def tool(*arguments: object) -> Any:  # whatever JSON it prints
    """Run a command of Headgate's with --json and return what it says."""
    return json.loads(_command("headgate", *map(str, arguments), "--json"))


def _command(module: str, *arguments: str, threads: int | None = None) -> str:
    limits = {} if threads is None else dict.fromkeys(_THREADS, str(threads))
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, **limits},
        capture_output=True,
        text=True,
        check=False,
    )
    # 1 is a check that does not hold, which is a result.
    if done.returncode not in (0, 1) or not done.stdout:
        raise RuntimeError(f"{module} {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def _await_url(process: subprocess.Popen[bytes], said: Path, began_s: float) -> str:
    while time.monotonic() - began_s < _START_S and process.poll() is None:
        words = said.read_text(encoding="utf-8").split()
        if "try" in words:  # the greeting is complete
            return words[words.index("serving") + 1]
        time.sleep(0.02)
    raise RuntimeError(f"it does not serve: {said.read_text(encoding='utf-8')}")


_THREADS: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


# A model that computes for real, for as long as it is told to: a product of many matrices.
#
# python -m headgate.lab.bench._server_under_test 20     how many layers take 20 ms on one core


ROWS: Final = 64
WIDTH: Final = 256
_TRIALS: Final = 40


class MatrixProduct(Model):
    """Takes `layers` products for each item. A batch saves nothing: it takes as long as its items.

    So what a server makes of it is the server's doing, and capacity is one number.
    """

    def __init__(self, layers: int = 1) -> None:
        self._layers = layers

    def load(self) -> None:
        """Make the weights, always the same."""
        self.inputs = {"x": f"FP32[-1, {ROWS}]"}
        self.outputs = {"y": "FP32[-1]"}
        weights = np.random.default_rng(1).standard_normal((WIDTH, WIDTH), dtype=np.float32)
        self._weights = weights * np.float32(np.sqrt(2 / WIDTH))

    def predict(self, batch: dict[str, Array]) -> dict[str, Array]:
        """Return one number for each item."""
        return {"y": np.array([self._one(x) for x in batch["x"]], np.float32)}

    def _one(self, x: Array) -> float:
        hidden = np.repeat(x[:, None], WIDTH, axis=1)
        for _ in range(self._layers):
            hidden = np.maximum(hidden @ self._weights, 0)
        return float(hidden.mean())


def layers_for(milliseconds: float) -> int:
    """Return how many layers take so long here and now."""
    model = MatrixProduct(layers=8)
    model.load()
    x = {"x": np.ones((1, ROWS), np.float32)}
    took_s = []
    for _ in range(_TRIALS):
        begin_s = perf_counter()
        model.predict(x)
        took_s.append(perf_counter() - begin_s)
    return max(1, round(8 * milliseconds / 1e3 / median(took_s)))


if __name__ == "__main__":
    sys.stdout.write(f"{layers_for(float(sys.argv[1]))}\n")


# One step of a curve: a load in an open loop, and what came of it.


@dataclass(frozen=True, slots=True)
class LoadStep:
    """One load and what came of it, as clients saw it."""

    load: float  # in capacities
    summary: LoadSummary
    has_one_answer_each: bool
    memory_mib: tuple[float, float, float]  # before, at most, after


def take_step(
    server: Running, load: float, capacity_rps: float, seconds: float, options: LoadOptions
) -> LoadStep:
    """Ask for so many times the capacity. The same load comes at the same times to everybody."""
    arrivals = poisson(load * capacity_rps, round(seconds * SECOND_NS), seed=round(10 * load))
    before_mib = server.memory_mib()
    seen_mib = [before_mib]
    result = run_open_loop(
        server.url,
        arrivals,
        options,
        on_standing=lambda _: seen_mib.append(server.memory_mib()),
    )
    memory_mib = (before_mib, max(seen_mib), server.memory_mib())
    return LoadStep(load, summarise_load(result), _has_one_answer_each(result), memory_mib)


def _has_one_answer_each(result: LoadResult) -> bool:
    """Whether no answer is missing; that there are no more than that, the log must tell."""
    return bool(np.all((result.trouble == FailureReason.NONE) & (result.status > 0)))
