"""The default policy in random worlds, against recorded scores of its rivals."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from headgate.lab.regret.search import RegretReport, recorded_rivals, search

pytestmark = pytest.mark.long

RECORDED: Final = Path(__file__).with_name("regret.json")


@dataclass(frozen=True)
class Reached:
    """What the policy must reach in some worlds, a little below what it does.

    No constant was chosen on these worlds. Raise these when it gets better.
    """

    seeds: range
    share: float
    ratio: float
    kept: float
    quantile_kept: float
    cost: float


# It reaches 0.946, 0.999, 0.999, 1.0 and 1.0001, and in all 60 worlds 0.890, 0.972, 0.992, 0.92
# and 0.987.
FEW: Final = Reached(range(20_000, 20_020), 0.935, 0.99, 0.99, 0.95, 1.005)
MANY: Final = Reached(range(20_000, 20_060), 0.88, 0.96, 0.98, 0.90, 1.0)


@pytest.fixture(
    scope="module",
    params=[pytest.param(FEW, id="20"), pytest.param(MANY, id="60", marks=pytest.mark.slow)],
)
def reached(request: pytest.FixtureRequest) -> Reached:
    wanted: Reached = request.param
    return wanted


@pytest.fixture(scope="module")
def report(reached: Reached) -> RegretReport:
    recorded = recorded_rivals(json.loads(RECORDED.read_text(encoding="utf-8")))
    results = tuple(search("headgate", reached.seeds, recorded=recorded))
    return RegretReport("headgate", "scattered", results)


def test_the_worlds_count(report: RegretReport) -> None:
    worlds = len(report.results)
    assert len(report.judged) >= worlds - 3
    assert report.ratio.worlds >= worlds // 3


def test_goodput_beside_the_fluid_bound(report: RegretReport, reached: Reached) -> None:
    assert report.share.mean >= reached.share


def test_goodput_beside_the_rivals(report: RegretReport, reached: Reached) -> None:
    assert report.ratio.mean >= reached.ratio


def test_what_is_admitted_is_kept(report: RegretReport, reached: Reached) -> None:
    assert report.kept.mean >= reached.kept
    assert report.quantile_kept >= reached.quantile_kept


def test_cost_beside_comparable_rivals(report: RegretReport, reached: Reached) -> None:
    assert not report.cost.mean > reached.cost


def test_nothing_reaches_more_than_the_bound(report: RegretReport) -> None:
    """But for chance: service times are scattered, and cascades are drawn."""
    assert max(result.own.share for result in report.results) <= 1.03
