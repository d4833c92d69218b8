"""GPU against CPU throughput over batch size: all claims hold, and what the limits are made of."""

from __future__ import annotations

from pathlib import Path

import pytest
from paper_page import quick_result

from headgate.lab.experiments.gpu_batching import (
    CORES,
    FUNCTIONS,
    WHOLE,
    FunctionTimes,
    read_measured,
)

# Twice as fast on four cores as on 16 together, if the processes did not slow each other.
TOY = FunctionTimes(
    "toy",
    gpu_ms={WHOLE: {1: 1.0, 4: 2.0}, 1: {1: 2.0, 4: 8.0}},
    cpu_ms={4: {1: 20.0}, CORES: {1: 10.0, 2: 16.0}},
    image_ms={},
)


def test_the_experiment(tmp_path: Path) -> None:
    result = quick_result("gpu-batching", tmp_path)
    assert (result.failing, result.outdated) == ([], [])
    assert [row["function"] for row in result.rows if "function" in row] == list(FUNCTIONS)
    assert sum("with images to decode" in row for row in result.rows) == 6
    assert [path.name for path in result.figures] == ["gpu-batching-throughput.png"]


def test_cores_get_their_best_batch_and_processes_their_best_size() -> None:
    assert (TOY.cpu_batch, TOY.cpu_per_s) == (2, 125.0)
    assert TOY.cpu_limit_per_s == 200.0
    assert TOY.common_batches == [1]
    assert TOY.advantage(1) == pytest.approx(10.0)
    assert (TOY.gpu_per_s(TOY.batch_max), TOY.gpu_per_s(4, 1)) == (2000.0, 500.0)


def test_a_table_is_read_whole() -> None:
    table = read_measured("classification")
    assert sorted(table.gpu_ms) == [1, 2, 3, 4, 5, 6, 7]
    assert sorted(table.gpu_ms[WHOLE]) == [1, 2, 4, 8, 16, 32]
    assert sorted(table.cpu_ms) == [1, 2, 4, 8, 16]
    assert sorted(table.image_ms[CORES]) == [1, 2, 4, 8, 16, 32]
    assert not read_measured("bert").image_ms
