"""Swayam's resource estimation: all claims hold, in the quick form as on the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headgate.lab.experiments import find_experiment

PAGE = Path(__file__).parents[2] / "docs" / "papers" / "swayam-estimator.md"


@pytest.mark.slow
def test_the_quick_form(tmp_path: Path) -> None:
    """Rows are complete, the figure is written, JSON is valid, and every claim holds."""
    messages: list[str] = []
    experiment = find_experiment("swayam-estimator")
    result = experiment.run(quick=True, out=tmp_path, progress=messages.append)
    summaries = [row for row in result.rows if "within 1" in row]
    assert [row["balancer"] for row in summaries] == [
        "random", "global queue", "partitioned", "join-idle-queue", "power of 2"
    ]  # fmt: skip
    assert [row["cells"] for row in summaries] == [8, 4, 4, 4, 4]
    assert sum("SLA" in row for row in result.rows) == 1
    assert messages, "progress is reported"
    assert [path.name for path in result.figures] == ["swayam-estimator-waiting.png"]
    content = result.to_json()
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    assert not result.failing
    assert all(check.claim in PAGE.read_text("utf-8") for check in result.checks)
