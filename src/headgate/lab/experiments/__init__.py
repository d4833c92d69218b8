"""Experiments, one module each: the claims of a paper, compared with results of this simulator.

Experiments are discovered: there is no list to edit. A module without a leading underscore is an
experiment, named like the module with hyphens; it has `NAME`, `TITLE` and `run`. An experiment
gives rows of numbers, and reports for every claim of the paper what was expected and what was
measured. A claim of the paper that is not so is a valid result: the module lists it in `KNOWN`,
with the page that says why.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Literal, Protocol, cast

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
    known: str | None = None  # the page that says why the claim is not so, if that is known


@dataclass(frozen=True, slots=True)
class Known:
    """A claim of a paper that is not so, and the page that says why. Never a goal of our own."""

    claim: str
    page: str
    forms: tuple[Literal["quick", "long"], ...] = ("quick", "long")  # in which it is not so


@dataclass(frozen=True, slots=True)
class Result:
    """The result of an experiment. Rows with the same keys belong to one table."""

    name: str
    rows: list[Row]
    checks: list[Check]
    figures: tuple[Path, ...] = ()  # files written, if an output directory was given

    @property
    def failing(self) -> list[Check]:
        """The checks that should hold, and do not."""
        return [check for check in self.checks if not check.holds and check.known is None]

    @property
    def known(self) -> list[Check]:
        """The checks that do not hold, for a reason that a page gives."""
        return [check for check in self.checks if not check.holds and check.known is not None]

    @property
    def outdated(self) -> list[Check]:
        """The checks that hold, although a page says why they do not."""
        return [check for check in self.checks if check.holds and check.known is not None]

    @property
    def is_as_expected(self) -> bool:
        """Whether the checks that fail are exactly those that are known not to hold."""
        return not self.failing and not self.outdated

    def mark_known(self, known: Iterable[Known], *, quick: bool) -> Result:
        """Return this result with the page on each check that is known not to hold."""
        pages = {each.claim: each.page for each in known if _form(quick) in each.forms}
        checks = [replace(check, known=pages.get(check.claim)) for check in self.checks]
        return replace(self, checks=checks)

    def to_json(self) -> dict[str, object]:
        """Return JSON-compatible data; NaN and infinity become null."""
        checks = [asdict(check) for check in self.checks]
        return {
            "name": self.name,
            "rows": json_value(self.rows),
            "checks": json_value(checks),
        }


def _form(quick: bool) -> str:
    return "quick" if quick else "long"


def none_check(claim: str, source: str, exceptions: Sequence[str]) -> Check:
    """Return a check that a claim has no exceptions; it names those that there are."""
    return Check(claim, source, "none", "; ".join(exceptions) or "none", not exceptions)


def error_check(
    claim: str, source: str, error: float, most: float, unit: Literal["%", "points"] = "%"
) -> Check:
    """Return a check that an error is at most `most`; both are fractions, printed in hundredths."""
    expected, measured = f"within {100 * most:g} {unit}", f"{100 * error:.1f} {unit}"
    return Check(claim, source, expected, measured, error <= most)


class Experiment(Protocol):
    """The interface of a module under `headgate.lab.experiments`.

    A module may also have `KNOWN`, a tuple of `Known` (see `known_claims`).
    """

    NAME: str
    TITLE: str

    def run(self, *, quick: bool, out: Path | None, progress: Progress) -> Result:
        """Run the experiment, deterministically. `quick` takes seconds; figures go to `out`.

        An experiment whose long form takes many minutes also takes `jobs`, a number of processes.
        """


def run_experiment(
    experiment: Experiment,
    *,
    quick: bool,
    out: Path | None,
    progress: Progress,
    jobs: int | None = None,
) -> Result:
    """Run an experiment, and mark the claims that are known not to hold. Raises `ConfigError`.

    `jobs` None: the experiment's own number of processes.
    """
    options: dict[str, int] = {}
    if jobs is not None:
        if "jobs" not in signature(experiment.run).parameters:
            problem = f"the number of processes of {experiment.NAME} is fixed"
            raise ConfigError(problem, key="--jobs", value=jobs)
        options["jobs"] = jobs
    run = cast("Callable[..., Result]", experiment.run)
    result = run(quick=quick, out=out, progress=progress, **options)
    return result.mark_known(known_claims(experiment), quick=quick)


def known_claims(experiment: Experiment) -> tuple[Known, ...]:
    """Return the claims that an experiment declares as known not to hold."""
    return cast("tuple[Known, ...]", getattr(experiment, "KNOWN", ()))


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
