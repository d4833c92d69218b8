"""What an experiment is, and what it hands back: rows of numbers, and checks against a paper.

An experiment is a module with `NAME`, `TITLE` and `run`. It says for every claim of the paper what
was expected and what was measured; a claim that does not hold is a result like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from multiprocessing import get_context
from pathlib import Path
from typing import Protocol, TypeVar

Scalar = str | int | float | bool | None
Row = dict[str, Scalar]
Progress = Callable[[str], None]  # is given one line at a time

C = TypeVar("C", bound=Hashable)
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Check:
    """One claim: what the source says, what was measured, and whether the two agree."""

    claim: str
    source: str  # where the expectation comes from: a section, a figure, a calculation
    expected: Scalar
    measured: Scalar
    holds: bool


@dataclass(frozen=True, slots=True)
class Result:
    """What an experiment found. Rows with the same keys belong to one table."""

    name: str
    rows: list[Row]
    checks: list[Check]
    figures: tuple[Path, ...] = ()  # files written, if a directory was given

    @property
    def failing(self) -> list[Check]:
        """The checks that do not hold."""
        return [check for check in self.checks if not check.holds]

    def to_json(self) -> dict[str, object]:
        """Return plain dicts, lists and numbers; what is not a number becomes null."""
        return {
            "name": self.name,
            "rows": [_plain(row) for row in self.rows],
            "checks": [_plain(asdict(check)) for check in self.checks],
        }


class Experiment(Protocol):
    """What a module under `headgate.lab.experiments` provides."""

    NAME: str
    TITLE: str

    def run(self, *, quick: bool, out: Path | None, progress: Progress) -> Result:
        """Run it. Deterministic. `quick` takes seconds; figures are written into `out`."""


def over_seeds(
    function: Callable[[C, int], R], cases: Sequence[C], seeds: int, *, quick: bool
) -> dict[C, list[R]]:
    """Return `function(case, seed)` of every case, for seeds 0, 1, ... in order.

    The long form uses two processes: `function` must then be at the top level of a module and the
    cases plain values, because a fresh process imports the one and is sent the others.
    """
    jobs = [(case, seed) for case in cases for seed in range(seeds)]
    if quick:
        results = [function(case, seed) for case, seed in jobs]
    else:
        with get_context("spawn").Pool(2) as pool:
            results = pool.starmap(function, jobs, chunksize=max(1, len(jobs) // 64))
    return {case: results[place * seeds : (place + 1) * seeds] for place, case in enumerate(cases)}


def _plain(row: Row) -> Row:
    return {
        key: None if isinstance(value, float) and not isfinite(value) else value
        for key, value in row.items()
    }
