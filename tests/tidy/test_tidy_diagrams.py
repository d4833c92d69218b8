"""The diagrams in the documents show the tables that the code obeys."""

from __future__ import annotations

import runpy

from tidy_sources import ROOT


def test_the_diagrams_are_up_to_date() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "diagrams.py"))
    text = (ROOT / "docs" / "life-of-a-request.md").read_text(encoding="utf-8")
    assert tool["drawn"](text) == text, "run python tools/diagrams.py"
