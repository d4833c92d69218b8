"""Finds a trace by name and reads it, in any layout and format.

The layouts of traces are modules of this package; a module that is added here is discovered. A
layout has a `NAME`, the columns it `NEEDS` as text, a `sniff(columns)` that recognises its
header (names in lower case), and a `read(path, options)`. A layout that recognises many files sets
`GENERAL = True` and applies only if no other layout recognises the header. File formats (CSV, gzip,
Parquet) are handled by `headgate.workload.trace_file`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from headgate.core.errors import ConfigError
from headgate.workload.arrivals import Arrivals
from headgate.workload.generators import Draw, Spacing
from headgate.workload.trace_file import SUFFIXES, ReadOptions, read_header


class Layout(Protocol):
    """The interface of each module of this package, besides an optional `GENERAL: bool`."""

    NAME: str
    NEEDS: str

    def sniff(self, columns: Sequence[str]) -> bool:
        """Whether a file with this header has this layout."""

    def read(self, path: Path, options: ReadOptions) -> Arrivals:
        """Read the file, or raise ConfigError with the file, the line and the column."""


def layouts() -> dict[str, Layout]:
    """Return all layouts by name.

    >>> list(layouts())
    ['azure_functions_2019', 'azure_functions_2021', 'requests', 'steps']
    """
    modules = [
        import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)
    ]
    return {layout.NAME: layout for layout in cast("list[Layout]", modules)}


def recognise(path: Path, columns: Sequence[str]) -> Layout:
    """Return the layout that recognises this header; raise ConfigError if not exactly one does."""
    known = layouts()
    matches = [layout for layout in known.values() if layout.sniff(columns)]
    matches = [m for m in matches if not getattr(m, "GENERAL", False)] or matches
    if len(matches) == 1:
        return matches[0]
    header = ",".join(columns[:8]) + (",..." if len(columns) > 8 else "")
    if matches:
        problem = f"several layouts have the columns {header}"
        names = ", ".join(layout.NAME for layout in matches)
        raise ConfigError(problem, where=str(path), allowed=f"those of one of {names}")
    allowed = "; ".join(f"{layout.NAME}: {layout.NEEDS}" for layout in known.values())
    raise ConfigError(f"no layout has the columns {header}", where=str(path), allowed=allowed)


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
        problem = "no such file, and no directory of traces is given"
        if Path(name).is_dir():
            problem = "is a directory"
        allowed = "a file, or a name in --traces DIRECTORY or HEADGATE_TRACES"
        raise ConfigError(problem, key="trace", value=name, allowed=allowed)
    if not directory.is_dir():
        raise ConfigError("no such directory of traces", where=str(directory))
    for suffix in ("", *SUFFIXES):
        path = directory / f"{name}{suffix}"
        if path.is_file():
            return path
    names = sorted(path.name for path in directory.iterdir() if path.name.endswith(SUFFIXES))
    allowed = ", ".join(names) or "the directory has no traces"
    problem = "is a directory" if (directory / name).is_dir() else "no such trace"
    raise ConfigError(problem, where=str(directory), value=name, allowed=allowed)
