"""The default policy in 8 random worlds with shapes, against recorded scores of its rivals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest

from headgate.lab.regret.search import RegretReport, recorded_rivals, search

RECORDED: Final = Path(__file__).with_name("regret_shapes.json")
SEEDS: Final = range(60_000, 60_008)

# What the policy must reach in these worlds, a little below what it does: 0.799, 0.994 and 0.99.
# No constant was chosen on them. Raise these when it gets better.
SHARE_MEAN_MIN: Final = 0.79
KEPT_MEAN_MIN: Final = 0.985
RATIO_MEAN_MIN: Final = 0.97


@pytest.fixture(scope="module")
def report() -> RegretReport:
    recorded = recorded_rivals(json.loads(RECORDED.read_text(encoding="utf-8")))
    results = search("headgate", SEEDS, kind="shapes", recorded=recorded)
    return RegretReport("headgate", "scattered", tuple(results), "shapes")


def test_goodput_beside_the_fluid_bounds(report: RegretReport) -> None:
    assert report.share.mean >= SHARE_MEAN_MIN
    assert max(result.own.share_in_time for result in report.results) <= 1.03


def test_goodput_beside_the_rivals(report: RegretReport) -> None:
    assert report.ratio.mean >= RATIO_MEAN_MIN


def test_what_is_admitted_is_kept(report: RegretReport) -> None:
    assert report.kept.mean >= KEPT_MEAN_MIN
