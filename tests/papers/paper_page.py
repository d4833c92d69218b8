"""The quick form of an experiment, and what a page in docs/papers says about its claims."""

from __future__ import annotations

import json
import re
from pathlib import Path

from headgate.lab.experiments import Result, find_experiment, run_experiment

ROOT = Path(__file__).parents[2]
_GOALS = "## Goals that are not reached\n"


def quick_result(name: str, out: Path | None) -> Result:
    """Run the quick form: claims are unique, figures are written, and the result is valid JSON."""
    messages: list[str] = []
    result = run_experiment(find_experiment(name), quick=True, out=out, progress=messages.append)
    assert len({check.claim for check in result.checks}) == len(result.checks), "claims are unique"
    assert messages, "progress is reported"
    assert all(path.parent == out and path.stat().st_size for path in result.figures)
    content = result.to_json()
    assert set(content) == {"name", "rows", "checks"}
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    return result


def missed_goals(page: str, form: str) -> set[str]:
    """Return the goals that a page lists as not reached in this form; none without such a list."""
    section = (ROOT / page).read_text("utf-8").partition(_GOALS)[2].partition("\n## ")[0]
    return set(re.findall(rf"^\| [a-z, ]*{form}[a-z, ]* \| (.*?) \| .* \|$", section, re.MULTILINE))


def explained_claims(page: str) -> set[str]:
    """Return the claims in the second column of all tables of a page."""
    text = (ROOT / page).read_text("utf-8")
    return set(re.findall(r"^\| .*? \| (.*?) \| .* \|$", text, re.MULTILINE))
