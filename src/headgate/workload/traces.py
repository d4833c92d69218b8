"""Finds a trace by name and reads it, in any layout and format."""

from __future__ import annotations

from pathlib import Path

from headgate.core.errors import ConfigError
from headgate.workload.arrivals import Arrivals
from headgate.workload.generators import Draw, Spacing
from headgate.workload.readers import layouts, recognise
from headgate.workload.trace_file import SUFFIXES, ReadOptions, read_header


def read_trace(
    path: Path | str,
    *,
    layout: str = "auto",
    step_ns: int | None = None,
    seed: int = 0,
    spacing: Spacing = "uniform",
    draw: Draw | None = None,
    sort: bool = False,
    time_column: str | None = None,
) -> Arrivals:
    """Read a trace; `auto` finds the layout by the columns. For the options see `ReadOptions`.

    Raises ConfigError with the file and, where they apply, the line, the column and the cell.
    """
    path, known = Path(path), layouts()
    if layout != "auto" and layout not in known:
        allowed = ", ".join(("auto", *known))
        raise ConfigError("unknown layout", key="layout", value=layout, allowed=allowed)
    reader = recognise(path, read_header(path)) if layout == "auto" else known[layout]
    try:
        return reader.read(path, ReadOptions(step_ns, seed, spacing, draw, sort, time_column))
    except ConfigError as error:
        raise error.located(str(path)) from None


def find_trace(name: str, directory: Path | None = None) -> Path:
    """Return the file of this name: a path, or a file in `directory`, with or without suffix."""
    if Path(name).is_file():
        return Path(name)
    if directory is None:
        problem = "no such file, and no directory of traces is given (HEADGATE_TRACES)"
        raise ConfigError(problem, key="trace", value=name)
    if not directory.is_dir():
        raise ConfigError("no such directory of traces", where=str(directory))
    for suffix in ("", *SUFFIXES):
        path = directory / f"{name}{suffix}"
        if path.is_file():
            return path
    names = sorted(path.name for path in directory.iterdir() if path.name.endswith(SUFFIXES))
    allowed = ", ".join(names) or "the directory has no traces"
    raise ConfigError("no such trace", where=str(directory), value=name, allowed=allowed)
