from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from headgate.core.errors import ConfigError
from headgate.workload.arrivals import Arrivals, Int32, arrivals_at, constant_column


def column(*values: int) -> Int32:
    return np.array(values, dtype=np.int32)


def test_columns_are_read_only_and_the_caller_keeps_its_own() -> None:
    times_ns = np.array([0, 5, 5])
    arrivals = arrivals_at(times_ns, 10)
    with pytest.raises(ValueError, match="read-only"):
        arrivals.times_ns[0] = 1
    times_ns[0] = 0  # still writable
    assert arrivals.sizes.tolist() == [1, 1, 1]
    assert arrivals.mean_rate_per_s == 3e8


@pytest.mark.parametrize(
    ("times_ns", "duration_ns", "problem"),
    [
        ([3, 2], 10, "row 1 is earlier"),
        ([-1, 2], 10, "must not be negative"),
        ([0, 10], 10, "before the end of the window"),
        ([], -1, "must not be negative"),
    ],
)
def test_bad_times_are_refused(times_ns: list[int], duration_ns: int, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        arrivals_at(np.array(times_ns, dtype=np.int64), duration_ns)


def test_unsorted_times_are_found_across_chunks() -> None:
    times_ns = np.arange(1 << 21)
    times_ns[1 << 20] = 0
    with pytest.raises(ConfigError, match=f"row {1 << 20} is earlier"):
        arrivals_at(times_ns, 1 << 21)


@pytest.mark.parametrize(
    ("pipeline", "items", "problem"),
    [
        (column(0), None, "1 rows beside 2 times"),
        (column(0, 2), None, "no such index"),
        (column(-1, 0), None, "no such index"),
        (column(0, 1), column(1, 0), "at least one item"),
        (column(0, 1), column(1), "1 rows beside 2 times"),
        (np.array([0.0, 1.0]), None, "float64"),
    ],
)
def test_bad_columns_are_refused(pipeline: Int32, items: Int32 | None, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Arrivals(
            np.array([1, 2]), 3, pipeline, constant_column(2), ("a", "b"), ("me",), items=items
        )


def test_a_name_may_appear_once_only() -> None:
    zeros = constant_column(1)
    with pytest.raises(ConfigError, match="twice"):
        Arrivals(np.array([1]), 3, zeros, zeros, ("a", "a"))


def test_constant_columns_take_no_memory() -> None:
    """72 million arrivals must fit: beside the times, nothing may grow with their number."""
    times_ns = np.broadcast_to(np.array(0), (72_000_000,))
    tracemalloc.start()
    arrivals = arrivals_at(times_ns, 1)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(arrivals) == 72_000_000
    assert peak_bytes < 10_000_000
