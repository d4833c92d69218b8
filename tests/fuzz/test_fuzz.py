"""Runs every fuzz target for some seconds: a smoke test of targets and parsers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TARGETS = sorted(
    path.stem
    for path in HERE.glob("*.py")
    if path.stem != "fuzzing" and not path.stem.startswith("test_")
)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_fuzz(name: str, tmp_path: Path) -> None:
    """Run a target in a process of its own, because libFuzzer ends its process."""
    pytest.importorskip("atheris")
    done = subprocess.run(
        [sys.executable, str(HERE / f"{name}.py"), "-max_total_time=8", "-artifact_prefix=./"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Done " in done.stderr
    assert not list(tmp_path.glob("crash-*"))
