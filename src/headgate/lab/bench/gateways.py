"""Requests per second of one gateway and of two, side by side.

A gateway schedules and speaks to clients in one process, so it is one core's worth. The model costs
next to nothing, so that the gateways are what limits the rate. Both servers have the same workers
and get the same load, in turn, in several rounds; only ratios within a round count, because
machines are noisy. Two gateways need cores of their own beside those of the workers and of the load
generator: with fewer than five, the ratio says how much they get in each other's way.
"""

from __future__ import annotations

import os
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final, final

import numpy as np

from headgate.functions import Model
from headgate.functions.arrays import Array
from headgate.lab.bench._server_under_test import serving
from headgate.lab.bench.live.load_driver import (
    LoadMeasurement,
    drive,
    driver_name,
    make_request,
)
from headgate.lab.experiments import Check, Progress, Result, Row

NAME = "gateways"
TITLE = "requests per second of one gateway and of two, on the same workers"

MODEL: Final = "echo"
GATEWAYS: Final = (1, 2)
WORKERS: Final = 2
CONCURRENCIES: Final = (1, 32, 64)
ROUNDS: Final = 3
SECONDS: Final = 2.0
_SOURCE: Final = "docs/benchmarks.md"
Measured = dict[tuple[int, int, int], LoadMeasurement]  # by round, gateways and concurrency


@final
class Echo(Model):
    """Returns its input."""

    inputs = {"x": "FP32[-1, 8]"}  # noqa: RUF012
    outputs = {"y": "FP32[-1, 8]"}  # noqa: RUF012

    def predict(self, batch: dict[str, Array]) -> dict[str, Array]:
        return {"y": batch["x"]}


def run(
    *,
    progress: Progress,
    rounds: int = ROUNDS,
    seconds: float = SECONDS,
    concurrencies: tuple[int, ...] = CONCURRENCIES,
) -> Result:
    """Measure both servers in turn. Takes about a minute."""
    measured: Measured = {}
    for number in range(rounds):
        for gateways in GATEWAYS:
            progress(f"round {number + 1} of {rounds}: {gateways} gateways")
            by_concurrency = _measure(gateways, seconds, concurrencies)
            for concurrency, measurement in by_concurrency.items():
                measured[number, gateways, concurrency] = measurement
    return report(measured)


def report(measured: Measured) -> Result:
    """Return the medians over the rounds, and the ratio of the rates within a round."""
    rows: list[Row] = []
    for concurrency in sorted({key[2] for key in measured}):
        for gateways in GATEWAYS:
            runs = [m for key, m in measured.items() if key[1:] == (gateways, concurrency)]
            rows.append(
                {
                    "gateways": gateways,
                    "concurrency": concurrency,
                    "requests_per_s": round(median(m.requests_per_s for m in runs)),
                    "p50_ms": round(median(m.p50_ms for m in runs), 3),
                    "p99_ms": round(median(m.p99_ms for m in runs), 3),
                    "times_one": _ratio(measured, gateways, concurrency),
                    "cores": len(os.sched_getaffinity(0)),
                    "load_generator": driver_name(),
                }
            )
    errors = sum(measurement.errors for measurement in measured.values())
    claim = "requests that were not answered with 200"
    return Result(NAME, rows, [Check(claim, _SOURCE, "0", errors, errors == 0)])


def _ratio(measured: Measured, gateways: int, concurrency: int) -> float:
    ratios = [
        m.requests_per_s / max(1e-9, measured[number, GATEWAYS[0], concurrency].requests_per_s)
        for (number, count, clients), m in measured.items()
        if (count, clients) == (gateways, concurrency)
    ]
    return round(median(ratios), 2)


def _measure(
    gateways: int, seconds: float, concurrencies: tuple[int, ...]
) -> dict[int, LoadMeasurement]:
    app = {
        "functions": {MODEL: {"code": f"{__name__}:{Echo.__name__}", "batch_max": 32}},
        "pools": {"local": {"tier": "dedicated", "nodes": WORKERS, "cpus": 1}},
        "serve": {"port": 0, "gateways": gateways},
    }
    body = make_request("oip", np.ones((1, 8), np.float32))
    with TemporaryDirectory() as directory:
        folder = Path(directory)
        with serving(app, folder, folder / "run.log") as server:
            url = f"{server.url}/v2/models/{MODEL}/infer"
            return {clients: drive(url, body, clients, seconds) for clients in concurrencies}
