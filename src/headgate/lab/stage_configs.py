"""Candidate configurations of stages from tables: measured, by a scaling law, and of INFless.

Prices are an assumption, because the paper's are not known: see `Prices`. What is compared within
one set of prices does not depend on their level, only on the ratio of a GPU to a vCPU.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Final

from headgate.core.clock import HOUR_NS, MILLISECOND_NS
from headgate.core.errors import ConfigError
from headgate.planning.frontier.configs import StageConfig, cost_units

IMAGE_FUNCTIONS: Final = (
    "background_removal",
    "classification",
    "deblur",
    "depth",
    "segmentation",
    "super_resolution",
)
# Times at the smallest configuration as recalled from the ESG paper, in ms: an assumption.
ESG_BASE_MS: Final = {
    "super_resolution": 86.0,
    "segmentation": 293.0,
    "deblur": 319.0,
    "classification": 147.0,
    "background_removal": 1047.0,
    "depth": 828.0,
}
GPU_TABLE: Final = "gpu_batch_latency.csv"
CPU_PART_TABLE: Final = "cpu_part_latency.csv"
_CPU_PART: Final = 0.2  # of the time of a batch of one, in the scaling law


@dataclass(frozen=True, slots=True)
class Prices:
    """What a node's resources cost while a batch holds them. An assumption."""

    usd_per_vcpu_hour: float = 0.05
    usd_per_gpu_hour: float = 3.5

    def cost(self, vcpus: int, gpu_sevenths: int, time_ns: int, batch: int) -> int:
        """Return the cost of one item of a batch."""
        hourly = vcpus * self.usd_per_vcpu_hour + gpu_sevenths / 7 * self.usd_per_gpu_hour
        return cost_units(hourly * time_ns / HOUR_NS / batch)


def measured_configs(function: str) -> list[StageConfig]:
    """Return the measured configurations of an image function: 6 batches x 6 vCPUs x 7 shares.

    The time is that of its CPU part (decode, resize, encode) and its GPU part, one after the other.

    >>> len(measured_configs("deblur"))
    252
    """
    if function not in IMAGE_FUNCTIONS:
        allowed = ", ".join(IMAGE_FUNCTIONS)
        raise ConfigError("has no measured table", value=function, allowed=allowed)
    gpu_ms = {
        (int(row["batch"]), int(row["gpu_sevenths"])): float(row["median_ms"])
        for row in measured_rows(GPU_TABLE, function)
    }
    return [
        _config(
            float(row["decode_resize_median_ms"]) + float(row["encode_median_ms"]) + time_ms,
            batch,
            int(row["vcpus"]),
            sevenths,
        )
        for row in measured_rows(CPU_PART_TABLE, function)
        for (batch, sevenths), time_ms in gpu_ms.items()
        if batch == int(row["batch"])
    ]


def law_configs(
    base_ms: float,
    batches: Sequence[int],
    vcpus: Sequence[int],
    sevenths: Sequence[int],
) -> list[StageConfig]:
    """Return configurations by a scaling law, an assumption.

    `base_ms` is the time at batch 1, one vCPU and 1/7 of a GPU. A batch of b takes
    (0.3 + 0.7 b)**0.8 times as long; a fifth of the time is CPU work that scales with
    vCPUs**0.7, the rest scales with the share**0.8.

    >>> [config.time_ns for config in law_configs(10.0, [1], [1], [1, 7])]
    [10000000, 3686598]
    """
    return [
        _config(
            base_ms
            * (0.3 + 0.7 * batch) ** 0.8
            * (_CPU_PART / vcpu**0.7 + (1 - _CPU_PART) / share**0.8),
            batch,
            vcpu,
            share,
        )
        for batch in batches
        for vcpu in vcpus
        for share in sevenths
    ]


def infless_configs(table: Path, model: str) -> list[StageConfig]:
    """Return the configurations of a model in INFless's table, without those marked infeasible.

    Its shares are per cent of a GPU: they are rounded up to sevenths.
    """
    with gzip.open(table, "rt", encoding="utf-8", newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["model"] == model]
    return [
        _config(
            float(row["latency_ms"]),
            int(row["batch"]),
            int(row["vcpu"]),
            -(-7 * int(row["gpu_pct"]) // 100),
        )
        for row in rows
        if row["infeasible"] == "0"
    ]


def _config(time_ms: float, batch: int, vcpus: int, gpu_sevenths: int) -> StageConfig:
    time_ns = round(time_ms * MILLISECOND_NS)
    return StageConfig(
        time_ns=time_ns,
        cost=Prices().cost(vcpus, gpu_sevenths, time_ns, batch),
        batch=batch,
        cpu_milli=1000 * vcpus,
        gpu_sevenths=gpu_sevenths,
    )


def measured_rows(name: str, function: str) -> list[dict[str, str]]:
    """Return the rows of a function in a measured table."""
    text = files("headgate").joinpath("data", "measured", name).read_text(encoding="utf-8")
    return [row for row in csv.DictReader(text.splitlines()) if row["function"] == function]
