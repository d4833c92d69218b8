"""The layouts of traces, one module each. A module that is added here is discovered.

A layout has a `NAME`, the columns it `NEEDS` as text, a `sniff(columns)` that recognises its
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
from headgate.workload.trace_file import ReadOptions


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
