"""Azure Functions 2019: one row per function, one column per minute, named 1 to 1440.

Both the original header (`HashOwner,HashApp,HashFunction,Trigger,1,2,...`) and the shorter one of
public samples (`func,Trigger,1,2,...`) are recognised. The function is the pipeline, the owner is
the client. Inside a minute the arrivals of all functions are at random times.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np

from headgate.core.clock import SECOND_NS
from headgate.core.errors import ConfigError
from headgate.workload.arrivals import DEFAULT_NAME, Arrivals, Int32, take_rows
from headgate.workload.generators import column_stream, fill, step_edges
from headgate.workload.trace_file import ReadOptions, first_of, index_names, read_header, read_rows

NAME: Final = "azure_functions_2019"

_FUNCTIONS: Final = ("hashfunction", "func")
NEEDS: Final = "HashOwner,HashApp,HashFunction,Trigger,1,... or func,Trigger,1,..."


def sniff(columns: Sequence[str]) -> bool:
    """Whether the header has a function, its trigger and its first minute."""
    return first_of(_FUNCTIONS, columns) is not None and {"trigger", "1"} <= set(columns)


def read(path: Path, options: ReadOptions) -> Arrivals:
    """Read counts per function and minute (or per `step_ns`)."""
    header = read_header(path)
    if not sniff(header):
        raise ConfigError("has other columns", where=str(path), allowed=NEEDS)
    functions, owners, counts = _read_counts(path, header)
    step_ns = 60 * SECOND_NS if options.step_ns is None else options.step_ns
    edges_ns = step_edges(counts.shape[1], step_ns)
    rng = column_stream(options.seed, "arrivals")
    times_ns = fill(edges_ns, counts.sum(axis=0, dtype=np.int64), rng, spacing=options.spacing)
    rows = _shuffled_rows(counts, rng)
    pipeline, pipelines = index_names(functions)
    client, clients = index_names(owners)
    return Arrivals(
        times_ns,
        int(edges_ns[-1]),
        take_rows(pipeline, rows),
        take_rows(client, rows),
        pipelines,
        clients,
    )


def _read_counts(path: Path, header: tuple[str, ...]) -> tuple[list[str], list[str], Int32]:
    """Return each row's function and owner, and the counts, one row per function."""
    function, owner = (first_of(names, header) for names in (_FUNCTIONS, ["hashowner"]))
    first = header.index("1")
    functions: list[str] = []
    owners: list[str] = []
    counts: list[Int32] = []
    for line, cells in islice(read_rows(path), 1, None):
        functions.append(cells[header.index(function or "func")])
        owners.append(cells[header.index(owner)] if owner else DEFAULT_NAME)
        counts.append(_parse_counts(cells[first:], header[first:], f"{path}:{line}"))
    if not counts:
        raise ConfigError("has a header but no rows", where=str(path))
    return functions, owners, np.stack(counts)


def _parse_counts(cells: Sequence[str], columns: Sequence[str], where: str) -> Int32:
    for column, cell in zip(columns, cells, strict=True):
        if not cell.isdecimal() or len(cell) > 9:  # nine digits fit into 32 bits
            raise ConfigError("is not a whole number", where=where, key=column, value=cell)
    return np.array(list(map(int, cells)), dtype=np.int32)


def _shuffled_rows(counts: Int32, rng: np.random.Generator) -> Int32:
    """Return the function of each arrival: inside a minute all orders are equally likely."""
    functions = np.arange(len(counts), dtype=np.int32)
    return np.concatenate([rng.permutation(np.repeat(functions, minute)) for minute in counts.T])
