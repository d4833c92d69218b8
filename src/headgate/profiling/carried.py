"""The tables that Headgate carries: eight models on a server's cores, measured for it."""

from __future__ import annotations

from contextlib import ExitStack
from importlib.resources import as_file, files
from pathlib import Path
from typing import Final

from headgate.planning.characterisation import Characterisation
from headgate.profiling.tables import function_names, read_tables

_TABLES: Final = ("cpu_concurrency_latency.csv", "cpu_batch_latency.csv")


def measured(function: str) -> Characterisation:
    """Return what was measured of a function. Raises `ConfigError` for one that was not.

    >>> measured("recommender").time_ms(cores=2, concurrency=5)
    15.748
    """
    with ExitStack() as stack:
        return read_tables([_path(stack, name) for name in _TABLES], function)


def measured_functions() -> list[str]:
    """Return the functions that were measured with several requests at once.

    >>> measured_functions()
    ['bert', 'classification', 'recommender']
    """
    with ExitStack() as stack:
        return function_names(_path(stack, _TABLES[0]))


def _path(stack: ExitStack, name: str) -> Path:
    table = files("headgate").joinpath("data", "measured", name)
    return stack.enter_context(as_file(table))
