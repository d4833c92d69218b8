"""The benchmarks, one file each: a module with `NAME`, `TITLE` and `run`. There is no list to edit.

They report like experiments do: rows of numbers, and checks of what was measured against a target.
Modules whose names begin with an underscore are what benchmarks share.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Protocol, cast

from headgate.core.errors import ConfigError
from headgate.lab.experiments.experiment import Progress, Result


class Bench(Protocol):
    """What a module under `headgate.lab.bench` provides."""

    NAME: str
    TITLE: str

    def run(self, *, progress: Progress) -> Result:
        """Measure. What it takes and finds depends on the machine."""


def benches() -> dict[str, Bench]:
    """Return all benchmarks by name."""
    modules = [
        import_module(f"{__name__}.{found.name}")
        for found in pkgutil.iter_modules(__path__)
        if not found.name.startswith("_")
    ]
    return {bench.NAME: bench for bench in cast("list[Bench]", modules)}


def bench_names() -> list[str]:
    """Every benchmark there is."""
    return sorted(benches())


def find_bench(name: str) -> Bench:
    """Return the benchmark of that name, or raise `ConfigError` listing those there are."""
    known = benches()
    if name not in known:
        allowed = ", ".join(sorted(known)) or "none"
        raise ConfigError("unknown benchmark", value=name, allowed=allowed)
    return known[name]
