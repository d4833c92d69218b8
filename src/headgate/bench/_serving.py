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
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml

from headgate.bench.live.process import Running
from headgate.core.clock import MILLISECOND_NS, NEVER_NS, SECOND_NS
from headgate.load import LoadOptions, LoadResult, run_closed_loop

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
    layers = int(_command("headgate.bench._product", str(MODEL_MS), threads=1))
    function = {"code": "headgate.bench._product:Product", "options": {"layers": layers}}
    return {
        "functions": {MODEL: {**function, "batch": _BATCH}},
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
