"""ESG and its rivals: the failing claims are those that the page documents."""

from __future__ import annotations

from pathlib import Path

import pytest
from paper_page import missed_goals, quick_result

from headgate.lab.experiments.esg_cluster.environment import CELLS
from headgate.lab.experiments.esg_cluster.results import BOUND, ESG, OURS, RIVALS

PAGE = "docs/papers/esg.md"


@pytest.mark.slow
def test_the_quick_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are complete, figures are written, JSON is valid, and failing claims are documented."""
    pytest.importorskip("optuna")  # without it `aquatope` is not trained
    monkeypatch.delenv("HEADGATE_TRACES", raising=False)
    result = quick_result("esg", tmp_path)
    rows = [(row["cell"], row["policy"]) for row in result.rows if "cost / ESG" in row]
    policies = (ESG, *RIVALS, OURS, BOUND)
    assert rows == [(cell.name, policy) for cell in CELLS for policy in policies]
    assert len(result.figures) == 3
    assert {check.claim for check in result.failing} == missed_goals(PAGE, "quick")
    assert not result.outdated
