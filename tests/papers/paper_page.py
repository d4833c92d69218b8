"""What a page in docs/papers says about the claims of an experiment."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_GOALS = "## Goals that are not reached\n"


def missed_goals(page: str, form: str) -> set[str]:
    """Return the goals that a page lists as not reached in this form; none without such a list."""
    section = (ROOT / page).read_text("utf-8").partition(_GOALS)[2].partition("\n## ")[0]
    return set(re.findall(rf"^\| [a-z, ]*{form}[a-z, ]* \| (.*?) \| .* \|$", section, re.MULTILINE))


def explained_claims(page: str) -> set[str]:
    """Return the claims in the second column of all tables of a page."""
    text = (ROOT / page).read_text("utf-8")
    return set(re.findall(r"^\| .*? \| (.*?) \| .* \|$", text, re.MULTILINE))
