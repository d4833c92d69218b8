"""Benchmarks, one module each with `NAME`, `TITLE` and `run`.

Modules are discovered: there is no list to edit. Benchmarks report like experiments: rows of
numbers, and checks of measurements against targets. Modules whose names begin with an underscore
are shared by benchmarks.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from inspect import signature
from typing import Protocol, cast

from headgate.core.errors import ConfigError
from headgate.lab.experiments import Progress, Result


class Bench(Protocol):
    """The interface of a module under `headgate.lab.bench`."""

    NAME: str
    TITLE: str

    def run(self, *, progress: Progress, **options: object) -> Result:
        """Measure. Duration and results depend on the machine.

        A benchmark declares the options that it takes beside `progress`: `policy`, a name, and
        `out`, a directory for figures (see `takes`).
        """


def benches() -> dict[str, Bench]:
    modules = [
        import_module(f"{__name__}.{module.name}")
        for module in pkgutil.iter_modules(__path__)
        if not module.name.startswith("_")
    ]
    return {bench.NAME: bench for bench in cast("list[Bench]", modules)}


def takes(bench: Bench, option: str) -> bool:
    """Whether a benchmark declares this option of `run`.

    >>> takes(find_bench("decisions"), "policy"), takes(find_bench("sim"), "policy")
    (True, False)
    """
    return option in signature(bench.run).parameters


def bench_names() -> list[str]:
    return sorted(benches())


def find_bench(name: str) -> Bench:
    """Return a benchmark by name. Raises `ConfigError` that lists the known names."""
    known = benches()
    if name not in known:
        allowed = ", ".join(sorted(known)) or "none"
        raise ConfigError("unknown benchmark", value=name, allowed=allowed)
    return known[name]
