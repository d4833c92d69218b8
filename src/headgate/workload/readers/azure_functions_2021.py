"""Azure Functions 2021: one row per call, `app,func,end_timestamp,duration`, in seconds.

A call arrives at its end minus its duration; the rows, which are in order of the ends, are sorted,
and the earliest arrival is at 0, because some calls began before the trace. Public samples with
computed arrivals (`arrival_s,func_id,duration`) are recognised too, and keep their times. The
function is the pipeline, the app is the client.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from headgate.core.errors import ConfigError
from headgate.workload.arrivals import Arrivals
from headgate.workload.readers import requests
from headgate.workload.trace_file import ReadOptions, read_header, read_table

NAME: Final = "azure_functions_2021"

_ORIGINAL: Final = ("app", "func", "end_timestamp", "duration")
_SAMPLE: Final = ("arrival_s", "func_id", "duration")
NEEDS: Final = f"{','.join(_ORIGINAL)} or {','.join(_SAMPLE)}"


def sniff(columns: Sequence[str]) -> bool:
    """Whether the header has all columns of either form."""
    return set(columns) >= set(_ORIGINAL) or set(columns) >= set(_SAMPLE)


def read(path: Path, options: ReadOptions) -> Arrivals:
    """Read one arrival per call."""
    header = read_header(path)
    if not sniff(header):
        raise ConfigError("has other columns", where=str(path), allowed=NEEDS)
    if "end_timestamp" not in header:
        return requests.read(path, options)
    table = read_table(path, _ORIGINAL)
    times_ns = table.times_ns("end_timestamp") - table.times_ns("duration")
    return table.arrivals(times_ns - times_ns.min(), pipeline="func", client="app")
