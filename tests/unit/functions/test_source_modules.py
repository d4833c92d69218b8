"""Modules of an application come from their sources; those of an environment below it need not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from headgate.functions.source_modules import search_first
sys.dont_write_bytecode = False
sys.path.append("venv/packages")
search_first(sys.argv[1])
import alone, package.inner, installed
print(alone.NUMBER, package.inner.NUMBER, installed.NUMBER)
"""


def printed(directory: Path) -> str:
    command = [sys.executable, "-c", PROGRAM.replace("venv", f"{directory}/venv"), str(directory)]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_an_edit_in_the_same_second_and_of_the_same_size_is_seen(tmp_path: Path) -> None:
    sources = ("alone.py", "package/__init__.py", "package/inner.py", "venv/packages/installed.py")
    for number in (1, 2):
        for name in sources:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"NUMBER = {number}\n")
            os.utime(path, (1e9, 1e9))
        # What is on the path itself is not the application's, and keeps its cache.
        assert printed(tmp_path) == f"{number} {number} 1"
    cached = {str(path.relative_to(tmp_path).parent) for path in tmp_path.rglob("*.pyc")}
    assert cached == {"venv/packages/__pycache__"}


def test_a_file_of_the_application_can_be_run_by_its_path(tmp_path: Path) -> None:
    """Not everything that is asked for a finder is a directory: `runpy` asks for files, too."""
    (tmp_path / "settings.py").write_text("NUMBER = 3\n")
    program = (
        "import runpy, sys; from headgate.functions.source_modules import search_first; "
        "search_first(sys.argv[1]); print(runpy.run_path(sys.argv[1] + '/settings.py')['NUMBER'])"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr) == ("3\n", "")
