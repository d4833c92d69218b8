"""Profiling: measures the latency of a function on this machine, or imports measurements."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from headgate.profiling.csv_import import bundled_functions, bundled_profile, read_tables
    from headgate.profiling.profile_file import read_profile

__all__ = ["bundled_functions", "bundled_profile", "read_profile", "read_tables"]

_MODULES: Final = {
    "bundled_profile": "csv_import",
    "bundled_functions": "csv_import",
    "read_profile": "profile_file",
    "read_tables": "csv_import",
}


def __getattr__(name: str) -> object:
    """Import on first use: a probe measures import times, so it must start without imports."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
