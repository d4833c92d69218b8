"""Experiments, one module each: the claims of a paper, compared with results of this simulator.

Experiments are discovered: there is no list to edit. A module without a leading underscore is an
experiment, named like the module with hyphens; it has `NAME`, `TITLE` and `run`. An experiment
gives rows of numbers, and reports for every claim of the paper what was expected and what was
measured; a claim that does not hold is a valid result.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, cast

from headgate.core.errors import ConfigError
from headgate.metrics.format import json_value

Scalar = str | int | float | bool | None
Row = dict[str, Scalar]
Progress = Callable[[str], None]  # called with one line of text


@dataclass(frozen=True, slots=True)
class Check:
    """One claim: the expected value, the measured value, and whether they agree."""

    claim: str
    source: str  # origin of the expectation: a section, a figure, a calculation
    expected: Scalar
    measured: Scalar
    holds: bool


@dataclass(frozen=True, slots=True)
class Result:
    """The result of an experiment. Rows with the same keys belong to one table."""

    name: str
    rows: list[Row]
    checks: list[Check]
    figures: tuple[Path, ...] = ()  # files written, if an output directory was given

    @property
    def failing(self) -> list[Check]:
        return [check for check in self.checks if not check.holds]

    def to_json(self) -> dict[str, object]:
        """Return JSON-compatible data; NaN and infinity become null."""
        checks = [asdict(check) for check in self.checks]
        return {
            "name": self.name,
            "rows": json_value(self.rows),
            "checks": json_value(checks),
        }


def none_check(claim: str, source: str, exceptions: Sequence[str]) -> Check:
    """Return a check that there are no exceptions to a claim; those that there are, it names."""
    return Check(claim, source, "none", "; ".join(exceptions) or "none", not exceptions)


class Experiment(Protocol):
    """The interface of a module under `headgate.lab.experiments`."""

    NAME: str
    TITLE: str

    def run(self, *, quick: bool, out: Path | None, progress: Progress) -> Result:
        """Run the experiment, deterministically. `quick` takes seconds; figures go to `out`."""


def experiment_names() -> list[str]:
    """Return the names of all experiments, sorted.

    >>> "kaas-traces" in experiment_names()
    True
    """
    return sorted(
        module.name.replace("_", "-")
        for module in pkgutil.iter_modules(__path__)
        if not module.ispkg and not module.name.startswith("_")
    )


def find_experiment(name: str) -> Experiment:
    """Return an experiment by name. Raises `ConfigError` that lists the known names."""
    names = experiment_names()
    if name not in names:
        raise ConfigError(
            "unknown experiment", key="experiment", value=name, allowed=", ".join(names)
        )
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    experiment = cast(Experiment, module)  # the module has the three attributes of the protocol
    if name != experiment.NAME:
        raise TypeError(f"{module.__name__}.NAME is {experiment.NAME!r}, not {name!r}")
    return experiment
