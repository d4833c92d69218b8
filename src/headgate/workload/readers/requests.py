"""One row per request: `arrival_s[,pipeline][,client][,items][,priority]`, in order of time.

The time is `arrival_s`, `arrival_ms`, `arrival_us` or `arrival_ns`, since the start of the trace
and unchanged; or `timestamp`, `time` or `ts`, seconds or ISO dates on any clock, and then the first
request is at 0. `timeout_ns`, `cancel_ns`, `cost_usd` and `payload_bytes` are what a request asked
for besides (`RequestTerms`), as `headgate calibrate` writes them. Other columns are ignored. The
window ends just after the last request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Final

import numpy as np

from headgate.core.errors import ConfigError
from headgate.workload.arrivals import Arrivals, Int64, RequestTerms, no_terms
from headgate.workload.trace_file import ReadOptions, TraceTable, first_of, read_header, read_table

NAME: Final = "requests"
GENERAL: Final = True

_OFFSETS: Final = ("arrival_s", "arrival_ms", "arrival_us", "arrival_ns")
_TIMES: Final = (*_OFFSETS, "timestamp", "time", "ts")
_PIPELINES: Final = ("pipeline", "model", "func_id", "function", "func")
_CLIENTS: Final = ("client", "client_id", "tenant", "user")
_TERMS: Final = tuple(column.name for column in fields(RequestTerms))
_STEPS: Final = ("count", "rps", "rate")  # a file with one of these has rows per step

NEEDS: Final = f"one of {', '.join(_TIMES)}"


def sniff(columns: Sequence[str]) -> bool:
    """Whether the header has a column of times and none of counts or rates."""
    return first_of(_TIMES, columns) is not None and first_of(_STEPS, columns) is None


def read(path: Path, options: ReadOptions) -> Arrivals:
    """Read one row per request; rows out of order are an error unless `sort` is set."""
    header = read_header(path)
    time = options.time_column or first_of(_TIMES, header)
    if time is None:
        allowed = ", ".join(_TIMES)
        raise ConfigError("has no column with times", where=str(path), allowed=allowed)
    pipeline, client = first_of(_PIPELINES, header), first_of(_CLIENTS, header)
    items, priority = first_of(["items"], header), first_of(["priority"], header)
    own = [name for name in _TERMS if name in header]
    named = [name for name in (time, pipeline, client, items, priority) if name]
    table = read_table(path, [*named, *own])
    times_ns = table.times_ns(time)
    if not options.sort:
        _check_order(table, time, times_ns)
    if time not in _OFFSETS:
        times_ns -= times_ns.min()
    terms = _read_terms(table, own) if own else None
    return table.arrivals(
        times_ns, pipeline=pipeline, client=client, items=items, priority=priority, terms=terms
    )


def _read_terms(table: TraceTable, names: Sequence[str]) -> RequestTerms:
    terms = no_terms(len(table))
    for name in names:
        if name == "cost_usd":
            terms = replace(terms, cost_usd=table.numbers(name))
        elif name == "timeout_ns":
            terms = replace(terms, timeout_ns=table.times_ns(name))
        elif name == "cancel_ns":
            terms = replace(terms, cancel_ns=table.times_ns(name))
        else:
            terms = replace(terms, payload_bytes=table.numbers(name).astype(np.int64))
    return terms


def _check_order(table: TraceTable, column: str, times_ns: Int64) -> None:
    # Rows out of order usually mean a broken file, so sorting is an option.
    backwards = np.flatnonzero(times_ns[1:] < times_ns[:-1])
    if len(backwards):
        row = int(backwards[0]) + 1
        before = table.cells[column][row - 1]
        hint = "use --sort (in Python: sort=True) to sort the rows"
        problem = f"is earlier than the previous row ({before}); {hint}"
        raise table.error(row, column, problem)
