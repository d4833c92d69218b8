"""Hybrid policies on bursts: the failing claims are those that the page documents."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from paper_page import missed_goals

from headgate.lab.experiments import Result, find_experiment, run_experiment
from headgate.lab.experiments.hybrid.environment import TRACES
from headgate.lab.experiments.hybrid.sweep import BEST

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
    """Run the quick form. Also: rows are complete, figures are written, JSON is valid."""
    messages: list[str] = []
    experiment = find_experiment("hybrid-traces")
    result = run_experiment(experiment, quick=True, out=out, progress=messages.append)
    pairs = [(row["trace"], row["policy"]) for row in result.rows if "trace" in row]
    assert pairs == [(trace.name, policy) for trace in TRACES for policy in POLICIES]
    assert len({check.claim for check in result.checks}) == len(result.checks), "claims are unique"
    assert messages, "progress is reported"
    assert len(result.figures) == 2
    assert all(path.parent == out and path.stat().st_size for path in result.figures)
    content = result.to_json()
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    return result
