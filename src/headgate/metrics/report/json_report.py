"""The summary as JSON, with what is needed to know which run it describes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from headgate.metrics.summary import Summary


def write_json(path: Path, summary: Summary, meta: Mapping[str, object]) -> Path:
    """Write `{"meta": ..., "summary": ...}`; values of `meta` that JSON lacks become text."""
    document = {"meta": dict(meta), "summary": summary.to_json()}
    path.write_text(json.dumps(document, indent=2, default=str) + "\n", encoding="utf-8")
    return path
