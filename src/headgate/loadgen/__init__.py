"""Load generator for live servers, open-loop and closed-loop, and the results it measures."""

from headgate.loadgen.loops import run_closed_loop, run_open_loop
from headgate.loadgen.requests import (
    Address,
    Body,
    InputSpec,
    LoadOptions,
    fetch_inputs,
    make_body,
    parse_address,
    read_body,
)
from headgate.loadgen.results import (
    FAILURE_NAMES,
    FailureReason,
    LoadProgress,
    LoadResult,
    LoadSummary,
    summarise_load,
)

__all__ = [
    "FAILURE_NAMES",
    "Address",
    "Body",
    "FailureReason",
    "InputSpec",
    "LoadOptions",
    "LoadProgress",
    "LoadResult",
    "LoadSummary",
    "fetch_inputs",
    "make_body",
    "parse_address",
    "read_body",
    "run_closed_loop",
    "run_open_loop",
    "summarise_load",
]
