"""Profile sets of the ESG experiment: functions with times by shape and batch size, applications.

- *measured*: the GPU and CPU-part tables of six image functions on an H200 and its host.
- *recalled*: the paper's function table as remembered, with a scaling law. Times at the smallest
  configuration, cold starts, input sizes and the law are all assumptions.
- *INFless*: one pipeline of three models whose tables INFless published, where they are present.

Times between the batch sizes of a table are interpolated; a batch below the smallest one of a shape
takes as long as that one. Results of a stage are as large as the largest input of its successors.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Final

from headgate.config.build import interpolated
from headgate.core.clock import MILLISECOND_NS, SECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.model import (
    App,
    Function,
    Pipeline,
    Pool,
    Profile,
    Shape,
    ShapeTimes,
    Slo,
    Stage,
    Tier,
    Variant,
)
from headgate.lab.stage_configs import (
    ESG_BASE_MS,
    IMAGE_FUNCTIONS,
    Prices,
    infless_configs,
    law_configs,
    measured_configs,
)
from headgate.planning.frontier.configs import StageConfig

NODES: Final = 16
VCPUS: Final = 16  # of a node
SEVENTHS: Final = 7
_SLOTS: Final = 16  # no limit: every configuration takes a vCPU, and most take a seventh of a GPU
_BYTES_PER_S: Final = 1.25e9  # 10 Gb/s between nodes, an assumption

MEASURED: Final = "measured"
RECALLED: Final = "recalled"
INFLESS: Final = "INFless"

IMAGE_APPLICATIONS: Final = {
    "classification": ("super_resolution", "segmentation", "classification"),
    "depth": ("deblur", "super_resolution", "depth"),
    "background": ("super_resolution", "deblur", "background_removal"),
    "expanded": (
        "deblur", "super_resolution", "background_removal", "segmentation", "classification",
    ),
}  # fmt: skip
_INFLESS_APPLICATION: Final = {"detection": ("ssd", "mobilenet", "resnet-50")}
_INFLESS_FILE: Final = "infless_model_vcpu_gpupct_batch.csv.gz"
# 8 batches x 8 vCPUs x 4 shares: 256 configurations per function, as in the paper. Its grid is not
# known.
_LAW_BATCHES: Final = (1, 2, 3, 4, 5, 6, 7, 8)
_LAW_VCPUS: Final = (1, 2, 3, 4, 6, 8, 12, 16)
_LAW_SEVENTHS: Final = (1, 2, 4, 7)
# Recalled from the paper: an assumption.
_COLD_START_MS: Final = {
    "super_resolution": 3503.0,
    "segmentation": 16510.0,
    "deblur": 22343.0,
    "classification": 18299.0,
    "background_removal": 3729.0,
    "depth": 16479.0,
}
_INPUT_BYTES: Final = {
    "super_resolution": 2_700_000,
    "segmentation": 2_500_000,
    "deblur": 1_100_000,
    "classification": 147_000,
    "background_removal": 2_500_000,
    "depth": 648_000,
}
_IMAGE_BYTES: Final = 674_000  # of the image whose decoding was measured
_INFLESS_COLD_MS: Final = 5_000.0  # not in the tables: an assumption


@dataclass(frozen=True, slots=True)
class FunctionTable:
    """A function: its configurations, the time of a cold start, and the size of its result."""

    name: str
    configs: tuple[StageConfig, ...]
    cold_start_ns: int
    output_bytes: int

    def times(self) -> list[ShapeTimes]:
        """Return the times by shape, the smallest shape first."""
        by_shape: dict[Shape, dict[int, int]] = {}
        for config in self.configs:
            shape = Shape(config.cpu_milli, config.gpu_sevenths)
            by_shape.setdefault(shape, {})[config.batch] = config.time_ns
        smallest_first = sorted(by_shape, key=lambda shape: (shape.cpu_milli, shape.gpu_sevenths))
        return [ShapeTimes(shape, _from_one(by_shape[shape])) for shape in smallest_first]


@dataclass(frozen=True, slots=True)
class ProfileSet:
    """Functions, and applications as sequences of them."""

    name: str
    functions: tuple[FunctionTable, ...]
    applications: tuple[tuple[str, tuple[str, ...]], ...]


@cache
def profile_set(name: str, directory: Path | None = None) -> ProfileSet:
    """Return a profile set. INFless's table is found near a directory of traces."""
    if name == INFLESS:
        path = infless_table(directory)
        if path is None:
            raise ConfigError("has no table of INFless", key="HEADGATE_TRACES", value=directory)
        return _infless(path)
    return _measured() if name == MEASURED else _recalled()


def infless_table(directory: Path | None) -> Path | None:
    """Return the table of INFless, which lies beside or below a directory of traces, if it does."""
    if directory is None:
        return None
    places = (directory / "profiles", directory.parent / "profiles")
    return next(
        (place / _INFLESS_FILE for place in places if (place / _INFLESS_FILE).is_file()), None
    )


def build_app(profiles: ProfileSet, slos_ns: Mapping[str, int], prices: Prices) -> App:
    """Return the cluster with all functions on all nodes, and the applications.

    A function that is loaded on a node serves as many batches at once as fit the node.
    """
    functions = {
        table.name: _function(number, table) for number, table in enumerate(profiles.functions)
    }
    pool = Pool(
        0,
        "node",
        Tier.GPU,
        nodes=NODES,
        slots=_SLOTS,
        cpu_milli=1000 * VCPUS,
        gpu_sevenths=SEVENTHS,
        cpu_usd_per_hour=prices.usd_per_vcpu_hour,
        gpu_usd_per_hour=prices.usd_per_gpu_hour,
        bytes_per_s=_BYTES_PER_S,
    )
    return App(
        functions=tuple(functions.values()),
        pipelines=tuple(
            Pipeline(
                number,
                name,
                tuple(
                    Stage(functions[function], (index - 1,) if index else (), name=function)
                    for index, function in enumerate(stages)
                ),
                Slo(slos_ns[name]),
            )
            for number, (name, stages) in enumerate(profiles.applications)
        ),
        pools=(pool,),
    )


def _function(number: int, table: FunctionTable) -> Function:
    own, *more = table.times()
    variant = Variant(
        number,
        table.name,
        number,
        (0,),
        Profile(own.exec_ns, cold_start_ns=table.cold_start_ns, output_bytes=table.output_bytes),
        own.shape,
        concurrency=_SLOTS,
        more_shapes=tuple(more),
    )
    return Function(number, table.name, (variant,), prewarm_nodes=NODES)


def _measured() -> ProfileSet:
    cold_ms = _measured_cold_starts_ms()
    tables = [
        _table(name, measured_configs(name), cold_ms[name], _IMAGE_BYTES)
        for name in IMAGE_FUNCTIONS
    ]
    return ProfileSet(MEASURED, tuple(tables), tuple(IMAGE_APPLICATIONS.items()))


def _measured_cold_starts_ms() -> dict[str, float]:
    """Return the time to import, to reach the GPU, to build the model and of its first call."""
    table = files("headgate").joinpath("data", "measured", "gpu_load_cost.csv")
    rows = csv.DictReader(table.read_text(encoding="utf-8").splitlines())
    parts_s = ("import_torch_s_median", "cuda_init_s_median", "model_build_s_median",
               "to_gpu_cold_s_median")  # fmt: skip
    return {
        row["function"]: 1000 * sum(float(row[part]) for part in parts_s)
        + float(row["first_call_ms_median"])
        for row in rows
    }


def _recalled() -> ProfileSet:
    tables = [
        _table(
            name,
            law_configs(base_ms, _LAW_BATCHES, _LAW_VCPUS, _LAW_SEVENTHS),
            _COLD_START_MS[name],
            _largest_input_behind(name),
        )
        for name, base_ms in ESG_BASE_MS.items()
    ]
    return ProfileSet(RECALLED, tuple(tables), tuple(IMAGE_APPLICATIONS.items()))


def _infless(path: Path) -> ProfileSet:
    tables = [
        _table(name, infless_configs(path, name), _INFLESS_COLD_MS, _IMAGE_BYTES)
        for names in _INFLESS_APPLICATION.values()
        for name in names
    ]
    return ProfileSet(INFLESS, tuple(tables), tuple(_INFLESS_APPLICATION.items()))


def _table(
    name: str, configs: Sequence[StageConfig], cold_start_ms: float, output_bytes: int
) -> FunctionTable:
    return FunctionTable(name, tuple(configs), round(cold_start_ms * MILLISECOND_NS), output_bytes)


def _largest_input_behind(function: str) -> int:
    behind = [
        _INPUT_BYTES[stages[index + 1]]
        for stages in IMAGE_APPLICATIONS.values()
        for index, stage in enumerate(stages[:-1])
        if stage == function
    ]
    return max(behind, default=0)


def _from_one(known: Mapping[int, int]) -> tuple[int, ...]:
    return interpolated({1: known[min(known)], **known})


def ready_after_ns(profiles: ProfileSet) -> int:
    """Return a time at which all functions are loaded, if all begin at 0."""
    return max(table.cold_start_ns for table in profiles.functions) + SECOND_NS
