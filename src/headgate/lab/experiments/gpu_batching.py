"""Throughput of a GPU and of CPUs over batch size, from the measured tables.

The thesis (EECS-2022-88, figure 3.3): with large batches a GPU classifies 10 times as many images
per second as CPUs do. Here the CPUs are the 16 cores of the machine that has the GPU, and get the
benefit of every doubt: their best batch size against each of the GPU's, and, as an upper limit, as
many processes of fewer cores as there is room for, as if they did not slow each other.

The last table adds what the models' times leave out: an image arrives as a JPEG of a camera, which
cores must decode wherever the model runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headgate.lab.experiments import Check, Progress, Result, Row, none_check
from headgate.lab.figures import DASHES, draw_lines, write_figures
from headgate.lab.stage_configs import (
    CPU_PART_TABLE,
    GPU_TABLE,
    IMAGE_FUNCTIONS,
    measured_rows,
)
from headgate.metrics.report.style import MUTED, add_legend, new_figure, number_log_axis, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "gpu-batching"
TITLE = "Throughput of a GPU and of CPUs over batch size"

CORES: Final = 16  # of the machine that was measured
WHOLE: Final = 7  # sevenths of the GPU
CLASSIFIED: Final = "classification"
FUNCTIONS: Final = (*IMAGE_FUNCTIONS, "bert", "recommender")
_CPU_TABLE: Final = "cpu_batch_latency.csv"
_FACTOR: Final = 10.0  # as the thesis has it
_SOURCE: Final = "thesis, fig. 3.3"
# The advantage of the functions that are not drawn is between those of these.
_DRAWN: Final = ("super_resolution", "depth", "deblur", "bert", CLASSIFIED, "recommender")

Times = Mapping[int, float]  # by batch size: the time of a batch, in ms


@dataclass(frozen=True, slots=True)
class FunctionTimes:
    """The median times of a function's batches on the GPU, on cores, and to decode its images."""

    function: str
    gpu_ms: Mapping[int, Times]  # by sevenths of the GPU
    cpu_ms: Mapping[int, Times]  # by cores
    image_ms: Mapping[int, Times]  # by cores: decode, resize and encode; empty without images

    @property
    def batch_max(self) -> int:
        """The largest batch of the GPU."""
        return max(self.gpu_ms[WHOLE])

    def gpu_per_s(self, batch: int, sevenths: int = WHOLE) -> float:
        return throughput(self.gpu_ms[sevenths], batch)

    @property
    def cpu_batch(self) -> int:
        """The batch size with the highest throughput of all cores together."""
        return best_batch(self.cpu_ms[CORES])

    @property
    def cpu_per_s(self) -> float:
        """The highest throughput of all cores together, as measured."""
        return throughput(self.cpu_ms[CORES], self.cpu_batch)

    @property
    def cpu_limit_per_s(self) -> float:
        """The highest throughput of any processes that fit, if none slowed another: a limit."""
        return _limit_per_s(self.cpu_ms)

    @property
    def common_batches(self) -> list[int]:
        """The batch sizes that were measured on the GPU and on all cores."""
        return sorted(self.gpu_ms[WHOLE].keys() & self.cpu_ms[CORES].keys())

    def advantage(self, batch: int) -> float:
        """Throughput of the GPU over that of all cores, both with this batch size."""
        return self.gpu_per_s(batch) / throughput(self.cpu_ms[CORES], batch)


def throughput(times_ms: Times, batch: int) -> float:
    """Return items per second.

    >>> throughput({1: 4.0, 8: 16.0}, 8)
    500.0
    """
    return 1000 * batch / times_ms[batch]


def best_batch(times_ms: Times) -> int:
    """Return the batch size with the highest throughput.

    >>> best_batch({1: 4.0, 2: 5.0, 4: 12.0})
    2
    """
    return max(times_ms, key=lambda batch: throughput(times_ms, batch))


def _limit_per_s(by_cores_ms: Mapping[int, Times]) -> float:
    return max(
        CORES // cores * throughput(times_ms, best_batch(times_ms))
        for cores, times_ms in by_cores_ms.items()
    )


def read_measured(function: str) -> FunctionTimes:
    """Return the tables of a function."""
    gpu_ms: dict[int, dict[int, float]] = {}
    for row in measured_rows(GPU_TABLE, function):
        times_ms = gpu_ms.setdefault(int(row["gpu_sevenths"]), {})
        times_ms[int(row["batch"])] = float(row["median_ms"])
    cpu_ms: dict[int, dict[int, float]] = {}
    for row in measured_rows(_CPU_TABLE, function):
        cpu_ms.setdefault(int(row["cores"]), {})[int(row["batch"])] = float(row["median_ms"])
    image_ms: dict[int, dict[int, float]] = {}
    for row in measured_rows(CPU_PART_TABLE, function):
        part_ms = float(row["decode_resize_median_ms"]) + float(row["encode_median_ms"])
        image_ms.setdefault(int(row["vcpus"]), {})[int(row["batch"])] = part_ms
    return FunctionTimes(function, gpu_ms, cpu_ms, image_ms)


def run(*, quick: bool, out: Path | None, progress: Progress) -> Result:
    """Read the tables. There is nothing to shorten: both forms are the same."""
    del quick
    progress("measured tables")
    tables = [read_measured(function) for function in FUNCTIONS]
    classified = next(table for table in tables if table.function == CLASSIFIED)
    images = [table for table in tables if table.image_ms]
    rows = [*_batch_rows(classified), *map(_function_row, tables), *map(_image_row, images)]
    figures = write_figures(out, NAME, lambda: {"throughput": _figure(tables, classified)})
    return Result(NAME, rows, list(_checks(tables, classified)), figures)


def _batch_rows(table: FunctionTimes) -> Iterator[Row]:
    """Yield the throughput of one function by batch size."""
    on_cores = table.cpu_ms[CORES]
    for batch in table.gpu_ms[WHOLE]:
        yield {
            f"{table.function}, batch": batch,
            "GPU [1/s]": table.gpu_per_s(batch),
            "1/7 GPU [1/s]": table.gpu_per_s(batch, 1),
            f"{CORES} cores [1/s]": throughput(on_cores, batch) if batch in on_cores else None,
            "GPU/cores": table.advantage(batch) if batch in on_cores else None,
            "GPU/cores at their best": table.gpu_per_s(batch) / table.cpu_per_s,
        }


def _function_row(table: FunctionTimes) -> Row:
    at_most = table.gpu_per_s(table.batch_max)
    first, last = table.common_batches[0], table.common_batches[-1]
    return {
        "function": table.function,
        f"GPU, batch {table.batch_max} [1/s]": at_most,
        f"{CORES} cores [1/s]": table.cpu_per_s,
        "their batch": table.cpu_batch,
        "processes, at most [1/s]": table.cpu_limit_per_s,
        "GPU/cores": at_most / table.cpu_per_s,
        "GPU/processes": at_most / table.cpu_limit_per_s,
        "batches gain, GPU": at_most / table.gpu_per_s(1),
        "cores": table.cpu_per_s / throughput(table.cpu_ms[CORES], 1),
        f"GPU/cores, batch {first}": table.advantage(first),
        "largest of both": table.advantage(last),
    }


def _image_row(table: FunctionTimes) -> Row:
    """The cores decode the next batch while the GPU has this one; without a GPU they do both."""
    image_ms = table.image_ms[CORES]
    with_gpu = {b: max(gpu_ms, image_ms[b]) for b, gpu_ms in table.gpu_ms[WHOLE].items()}
    without = {b: cpu_ms + image_ms[b] for b, cpu_ms in table.cpu_ms[CORES].items()}
    ours, theirs = (throughput(times_ms, best_batch(times_ms)) for times_ms in (with_gpu, without))
    images_per_s = _limit_per_s(table.image_ms)
    most = min(images_per_s, table.gpu_per_s(table.batch_max))
    their_most = 1 / (1 / images_per_s + 1 / table.cpu_limit_per_s)
    return {
        "with images to decode": table.function,
        f"GPU and {CORES} cores [1/s]": ours,
        f"{CORES} cores [1/s]": theirs,
        "ratio": ours / theirs,
        "processes with GPU, at most [1/s]": most,
        "without [1/s]": their_most,
        "their ratio": most / their_most,
    }


def _checks(tables: Sequence[FunctionTimes], classified: FunctionTimes) -> Iterator[Check]:
    batch = classified.batch_max
    ratio = classified.gpu_per_s(batch) / classified.cpu_per_s
    claim = f"images classified: GPU with batches of {batch} over {CORES} cores at their best"
    yield Check(claim, _SOURCE, f"{_FACTOR:g} or more", ratio, ratio >= _FACTOR)
    below = [
        f"{table.function}: {factor:.1f}"
        for table in tables
        if table.function in IMAGE_FUNCTIONS
        and (factor := table.gpu_per_s(table.batch_max) / table.cpu_limit_per_s) < _FACTOR
    ]
    claim = f"image functions with less than {_FACTOR:g} times what any processes could do at most"
    yield none_check(claim, _SOURCE, below)
    shrinking = [
        f"{table.function}: {table.advantage(first):.1f} to {table.advantage(last):.1f}"
        for table in tables
        if table.advantage(first := table.common_batches[0])
        >= table.advantage(last := table.common_batches[-1])
    ]
    claim = "functions whose advantage on the GPU does not grow with the batch, on both alike"
    yield none_check(claim, _SOURCE, shrinking)


def _figure(tables: Sequence[FunctionTimes], classified: FunctionTimes) -> Figure:
    """Plot the images classified per second, and the advantage of the GPU, over batch size."""
    figure = new_figure(6.4)
    upper, lower = figure.subplots(2, 1, sharex=True)
    lines = {
        "GPU": _line(classified.gpu_ms[WHOLE]),
        "1/7 of the GPU": _line(classified.gpu_ms[1]),
        f"{CORES} cores": _line(classified.cpu_ms[CORES]),
        "1 core": _line(classified.cpu_ms[1]),
    }
    add_legend(upper, draw_lines(upper, lines), list(lines))
    _style(upper, "images classified", "1/s")
    ratios = {
        table.function.replace("_", " "): (
            list(table.gpu_ms[WHOLE]),
            [table.gpu_per_s(batch) / table.cpu_per_s for batch in table.gpu_ms[WHOLE]],
        )
        for table in tables
        if table.function in _DRAWN
    }
    add_legend(lower, draw_lines(lower, ratios), list(ratios))
    lower.axhline(_FACTOR, color=MUTED, linewidth=1.1, linestyle=DASHES)
    lower.annotate("thesis", (32, _FACTOR), xytext=(0, 3), textcoords="offset points", fontsize=8,
                   color=MUTED, ha="center")  # fmt: skip
    _style(lower, f"GPU over {CORES} cores at their best batch", "times", x_label="batch size")
    return figure


def _line(times_ms: Times) -> tuple[list[int], list[float]]:
    return list(times_ms), [throughput(times_ms, batch) for batch in times_ms]


def _style(axes: Axes, title: str, y_label: str, x_label: str = "") -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    number_log_axis(axes.yaxis)
    axes.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
    style_axes(axes, title=title, x_label=x_label, y_label=y_label, grid="both")
