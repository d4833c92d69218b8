"""Profiling: measures a function on this machine, or reads what was measured on another."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from headgate.profiling.carried import measured, measured_functions
    from headgate.profiling.document import read_profile
    from headgate.profiling.tables import read_tables

__all__ = ["measured", "measured_functions", "read_profile", "read_tables"]

_HOMES: Final = {
    "measured": "carried",
    "measured_functions": "carried",
    "read_profile": "document",
    "read_tables": "tables",
}


def __getattr__(name: str) -> object:
    """Import on first use: a probe that measures how long imports take must not begin with any."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
