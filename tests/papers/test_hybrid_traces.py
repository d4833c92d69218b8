"""Hybrid policies on bursts: the failing claims are those that the page documents."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from paper_page import missed_goals, quick_result

from headgate.lab.experiments import Result
from headgate.lab.experiments.hybrid_renting.environment import TRACES
from headgate.lab.experiments.hybrid_renting.sweep import BEST

PAGE = "docs/papers/hybrid-traces.md"
POLICIES = [*(policy.name for policy in BEST), "headgate", "clairvoyant"]


@pytest.mark.slow
def test_on_generated_bursts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADGATE_TRACES", raising=False)
    result = _run(tmp_path)
    assert {check.claim for check in result.failing} == missed_goals(PAGE, "generated")


@pytest.mark.slow
def test_on_real_arrivals(tmp_path: Path) -> None:
    if not os.environ.get("HEADGATE_TRACES"):
        pytest.skip("HEADGATE_TRACES names no directory of public traces")
    result = _run(tmp_path)
    assert {check.claim for check in result.failing} == missed_goals(PAGE, "real")


def _run(out: Path) -> Result:
    """Run the quick form. Also: rows are complete."""
    result = quick_result("hybrid-traces", out)
    pairs = [(row["trace"], row["policy"]) for row in result.rows if "trace" in row]
    assert pairs == [(trace.name, policy) for trace in TRACES for policy in POLICIES]
    assert len(result.figures) == 2
    return result
