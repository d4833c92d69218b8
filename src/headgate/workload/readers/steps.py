"""One row per step: the number of requests (`count`), or requests per second (`rps`, `rate`).

Steps last one second unless `step_ns` is given. A `count` or an `rps` is a measurement: there are
exactly that many arrivals, with fractions of an `rps` carried over to the next step. A `rate` is an
average: the number of arrivals is drawn from a Poisson distribution. The option `draw` overrides
either.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from headgate.core.clock import SECOND_NS
from headgate.core.errors import ConfigError
from headgate.workload.arrivals import Arrivals
from headgate.workload.generators import counts_of_means, expand_counts
from headgate.workload.trace_file import ReadOptions, first_of, read_header, read_table

NAME: Final = "steps"
GENERAL: Final = True

_COLUMNS: Final = ("count", "rps", "rate")
NEEDS: Final = f"one of {', '.join(_COLUMNS)}"


def sniff(columns: Sequence[str]) -> bool:
    """Whether the header has a column of counts or rates."""
    return first_of(_COLUMNS, columns) is not None


def read(path: Path, options: ReadOptions) -> Arrivals:
    """Read one row per step, the first step starting at 0."""
    column = first_of(_COLUMNS, read_header(path))
    if column is None:
        allowed = ", ".join(_COLUMNS)
        raise ConfigError("has no column of counts or rates", where=str(path), allowed=allowed)
    step_ns = SECOND_NS if options.step_ns is None else options.step_ns
    table = read_table(path, [column])
    numbers = table.numbers(column)
    if column == "count" and (rows := np.flatnonzero(numbers % 1)).size:
        raise table.error(int(rows[0]), column, "is not a whole number")
    means = numbers if column == "count" else numbers * (step_ns / SECOND_NS)
    draw = options.draw or ("poisson" if column == "rate" else "exact")
    counts = counts_of_means(means, draw=draw, seed=options.seed)
    return expand_counts(counts, step_ns=step_ns, seed=options.seed, spacing=options.spacing)
