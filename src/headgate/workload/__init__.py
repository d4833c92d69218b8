"""Workloads: synthetic arrival processes, closed loops and traces, as columns."""

from headgate.workload.arrivals import (
    Arrivals,
    ClosedLoop,
    ConcurrencyStep,
    RequestTerms,
    arrivals_at,
    constant_column,
)
from headgate.workload.generators import (
    counts_of_means,
    deterministic,
    expand_counts,
    gamma,
    mmpp,
    poisson,
    stepped,
)
from headgate.workload.readers import find_trace, layouts, read_trace
from headgate.workload.spec import parse_arrivals
from headgate.workload.trace_file import ReadOptions
from headgate.workload.transforms import (
    assign,
    mix,
    named,
    rescale_rate,
    scale_time,
    shift,
    superpose,
    window,
)

__all__ = [
    "Arrivals",
    "ClosedLoop",
    "ConcurrencyStep",
    "ReadOptions",
    "RequestTerms",
    "arrivals_at",
    "assign",
    "constant_column",
    "counts_of_means",
    "deterministic",
    "expand_counts",
    "find_trace",
    "gamma",
    "layouts",
    "mix",
    "mmpp",
    "named",
    "parse_arrivals",
    "poisson",
    "read_trace",
    "rescale_rate",
    "scale_time",
    "shift",
    "stepped",
    "superpose",
    "window",
]
