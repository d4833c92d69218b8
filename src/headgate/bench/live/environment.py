"""An environment of its own for each peer, made once and kept."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path
from typing import Final

_TIMEOUT_S: Final = 1_800
_MARK: Final = "installed"  # holds the requirements that were installed


class NotInstalledError(Exception):
    """Why a peer cannot take part, in one line."""


def python_of(requirements: Path | None, cache: Path, name: str) -> Path:
    """Return the Python that runs a contestant, with what it needs installed.

    Raises NotInstalledError.
    """
    if requirements is None:
        return Path(sys.executable)
    home = (cache / name).absolute()
    python, mark = home / "bin" / "python", home / _MARK
    wanted = requirements.read_text(encoding="utf-8")
    if mark.exists() and mark.read_text(encoding="utf-8") == wanted:
        return python
    venv.create(home, with_pip=True, clear=True)
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    try:
        subprocess.run(
            [*pip, "install", "--requirement", str(requirements.absolute())],
            capture_output=True,
            text=True,
            check=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if line.startswith("ERROR")]
        raise NotInstalledError((lines or ["pip failed"])[-1][:200]) from None
    except subprocess.TimeoutExpired:
        raise NotInstalledError(f"pip took longer than {_TIMEOUT_S} s") from None
    mark.write_text(wanted, encoding="utf-8")
    return python
